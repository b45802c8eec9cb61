"""How much of each memory there is, what may be in it, and who holds what: tiers, placement, budgets and accounts.

Nothing here moves a tensor.
"""
