"""Checks that turn silent mistakes into errors: edits, replaced modules, ranks that differ, failed changes.

Checks do not change training; they read, compare and raise. Values that have to be equal on all ranks are sent with
other exchanges, or are compared before anything is built.
"""
