"""The optimizer's work on this rank's shards, tile by tile: in ``step()`` or during backward, in memory or on a disk.

Everything here is one rank's own: nothing reduces, gathers or talks to peers. What a failed disk means for the other
ranks is the engine's affair (:mod:`shardwise.core.engine.updates`).
"""

# [Note: Updates during backward]
# With update="backward" each optimizer has a thread (early.py) that updates chunks as soon as they are reduced, in that
# order. It writes masters, state and new parameters, never what backward reads: masters are memory of their own then
# (Storage.master_dtype), and parameters change at step(). The caller waits for it at the end of every reduced pass, so
# between passes nothing runs beside it.
# Nothing that comes later can change the update: plans refuse clipping, a loss scale and weights by tokens. The
# gradient's memory serves the next chunk, so there is no way back. What would need one, another pass, gradients that
# are dropped, a changed learning rate, is an error, on all ranks alike, since it depends on whether a pass has reached
# the optimizer (EarlyUpdates.pending), not on what this rank has updated. A pass that fails, and gradients that are
# dropped, leave parameters and state broken (EarlyObserver.lose). A chunk that has no gradient of some of its
# parameters is left to step(). Tiles on a disk are written beside the committed version, which step() commits; see
# [Note: Two versions of a record]. What fails in the thread is kept until step(), where all ranks meet.
