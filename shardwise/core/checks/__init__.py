"""What would silently go wrong becomes an error: edits, replaced modules, ranks that differ, what was left half-done.

Nothing here changes what is trained; it reads, compares and raises. What has to be alike on all ranks rides on
exchanges that are made anyway, or is compared before anything is made.
"""
