"""Gradients, from where backward leaves them to reduced shards: their arrays, the order of reductions, norm and scale.

A gradient comes in whole, from a hook, and is left as this rank's reduced shard. Nothing here updates a parameter;
whoever works on results ahead of the step hears of them by events, and is waited for at the end of a pass.
"""
