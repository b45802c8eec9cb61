"""Checks that turn silent mistakes into errors: edits, replaced modules, ranks that differ, failed changes.

Nothing here changes what is trained; checks read, compare and raise. What has to be the same on all ranks travels with
exchanges that are made anyway, or is compared before anything is built.
"""
