"""Memory tiers: the tier of each chunk, accounts of device memory, the memory trace, and the disk store.

Nothing here moves tensors between tiers. The ledger queries the owners of memory whenever it needs a number, so that
numbers are not stored twice; the owners also give it callbacks that free memory.
"""
