"""Parameters packed into flat arrays: which lie together, where a shard is at home, and who still reads what.

Nothing here decides when something is gathered or freed.
"""
