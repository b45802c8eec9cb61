"""The optimizer's work on this rank's shards, tile by tile: in ``step()`` or during backward, in memory or on a disk.

Everything here concerns one rank: nothing reduces, gathers or talks to other ranks. What a failed disk means for them
is decided in :mod:`shardwise.core.engine.updates`.
"""

# [Note: Updates during backward]
# With update="backward" each optimizer has a thread (early.py) that updates chunks in the order in which they are
# reduced. It writes masters, state and new parameters, never what backward reads: masters have memory of their own then
# (engine/placement.py), and parameters change at step(). The caller waits for the thread at the end of every reduced
# pass, so nothing runs between passes.
# Nothing that comes later can change the update: plans refuse clipping, a loss scale and weights by tokens. The memory
# of the gradient serves the next chunk, so there is no way back. Another pass, dropped gradients and a changed learning
# rate would need one, so they are errors. All ranks raise them, because they depend on whether a pass has reached the
# optimizer (EarlyUpdates.pending), not on what this rank has updated. A failed pass, or dropped gradients, break the
# session (EarlyObserver.lose). A chunk in which some parameters have no gradient is left to step(). Tiles on a disk are
# written next to the committed version, and step() commits them; see [Note: Two versions of a record]. An error in the
# thread is kept until step(), where all ranks exchange how it went.
