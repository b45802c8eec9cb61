"""The optimizer's work on this rank's shards, tile by tile: in ``step()`` or during backward, in memory or on a disk.

Everything here concerns one rank: nothing reduces, gathers or communicates with other ranks.
:mod:`shardwise.core.engine.updates` decides what a failed disk means for the other ranks.
"""

# [Note: Updates during backward]
# With update="backward" an optimizer has a thread (optimizer_in_backward.py) that updates chunks in the order in which
# they are reduced. It writes masters, state and new parameters, and never writes what backward reads: in this mode
# masters have separate memory (engine/placement.py), and parameters change at step(). The caller waits for the thread
# at the end of every reduced pass, so the thread never runs between passes.
# A later event must not change the update: plans refuse clipping, a loss scale and weights by tokens. The next chunk
# reuses the memory of the gradient, so an update cannot be undone. Another pass, dropped gradients and a changed
# learning rate would require this, so they are errors. All ranks raise them, because they depend on whether a pass has
# reached the optimizer (EarlyUpdates.pending), not on what this rank has updated. A failed pass and dropped gradients
# break the session (EarlyObserver.lose). step() updates chunks in which some parameters have no gradient. Tiles on a
# disk are written next to the committed version, and step() commits them; see [Note: Two versions of a record]. An
# error in the thread is kept until step(), where all ranks exchange whether they succeeded.
