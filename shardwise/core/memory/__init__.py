"""Memory tiers: placement of chunks, accounts of device memory, the memory trace, and the disk store.

Nothing here moves tensors between tiers. The ledger asks the owners of memory whenever it needs a number, so that no
count is kept twice; the owners also offer it callbacks that free memory.
"""
