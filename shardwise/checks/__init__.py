"""What would silently go wrong becomes an error: edits, replaced modules, ranks that differ, what was left half-done.

Nothing here changes what is trained; it reads, compares and raises.
"""
