"""Parameters packed into flat arrays: which lie together, where a shard is at home, and who still reads what.

Layouts are pure arithmetic, the same on every rank. Nothing here decides when something is gathered or freed, or talks
to peers but through the group that a gather is given.
"""
