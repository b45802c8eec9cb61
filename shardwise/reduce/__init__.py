"""Gradients, from where backward leaves them to reduced shards: their arrays, the order of reductions, norm and scale.

Nothing here updates a parameter.
"""
