"""Gradients, from backward to reduced shards.

A gradient goes down these files: ``backward_passes.py`` notices the backward pass, ``reducer.py`` takes each gradient
from its hook (``Reducer.add``) and orders the reductions, ``chunk_grads.py`` has the chunk's bucket and its gradient
shard, which it may copy to the host. ``norm.py`` and ``scaler.py`` are the global norm and the loss
scale; ``sharded_grad.py`` is the tensor in ``.grad``. Nothing here updates a parameter.
"""
