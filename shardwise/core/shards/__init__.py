"""Parameters in flat chunks, gathered while they are used.

``layout.py`` packs parameters into chunks, ``chunk.py`` and ``shard_memory.py`` have one chunk's memory and the home of
its shard. ``gather_hooks.py`` notices uses; ``gather.py`` gathers and evicts, by the rules of ``prefetch.py``, in an
order that ``gather_order.py`` keeps equal on all ranks. ``memory_meter.py`` measures the memory of a step. Layouts are
pure arithmetic and equal on every rank; only the pool gathers and frees. Nothing in this folder knows of gradients or
optimizers.
"""
