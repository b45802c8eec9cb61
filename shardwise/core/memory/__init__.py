"""How much of each memory there is, what may be in it, and who holds what: tiers, placement, budgets and accounts.

Nothing here moves a tensor. Accounts are asked of those who hold memory whenever they are needed, so that none is kept
twice; to make room is the holders' work, which they offer the ledger.
"""
