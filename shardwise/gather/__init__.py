"""Parameters are gathered while they are read: the pool that moves them, what it evicts, and the hooks that ask.

The pool is the only mover; where a shard is at home is the chunk's affair. Nothing here knows of gradients, optimizers
or passes: reductions that begin in rounds are numbers.
"""
