"""Parameters are gathered while they are read: the pool that moves them, what it evicts, and the hooks that ask.

Nothing here knows of gradients, optimizers or passes.
"""
