"""Parameters in flat chunks: their layout, where shards are kept, and how they are gathered and freed.

Layouts are pure arithmetic and equal on every rank. The pool is the only part that gathers and frees. Nothing in this
folder knows of gradients or optimizers.
"""
