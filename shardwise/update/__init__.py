"""The optimizer's work on this rank's shards, tile by tile: in ``step()`` or during backward, in memory or on a disk.

Nothing here reduces or gathers.
"""
