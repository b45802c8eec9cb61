"""The optimizer's work on this rank's shards, tile by tile: in ``step()`` or during backward, in memory or on a disk.

Everything here is one rank's own: nothing reduces, gathers or talks to peers. What a failed disk or a wrong guess means
for the other ranks is the engine's affair (:mod:`shardwise.engine.updates`).
"""

# [Note: Guesses and their undoing]
# With update="backward" each optimizer has a thread (early.py) that updates chunks as soon as they are reduced, in that
# order. It writes masters, state and new parameters, never what backward reads: masters are memory of their own then
# (Storage.master_dtype), and parameters change at step(). The caller waits for it at the end of every reduced pass, so
# between passes nothing runs beside it.
# * In place: nothing that comes later can change the update (no clipping, no loss scale, no disk). The gradient's
#   memory serves the next chunk, so there is no way back. What would need one, another pass, gradients that are
#   dropped, a changed learning rate, is an error.
# * As a guess: that gradients are finite and the norm within bounds, that the step has as many passes as the one
#   before, that options stay as they are, that the disk does not fail. Old values are copied before
#   (EarlyUpdates._keep); on a disk the new ones are written beside the committed ones instead, see [Note: Two versions
#   of a record].
# step() compares the factor and the options that the guess was made with (confirm). If they differ, or a gradient
# changes before, all is put back, the newest first: exactly, since what is put back are copies. Chunks are noted as
# updated before the thread has them, and that they are being put back before the first is; so whoever is interrupted in
# between puts them back again, which changes nothing the second time. What fails in the thread is kept until step(),
# where all ranks meet.
