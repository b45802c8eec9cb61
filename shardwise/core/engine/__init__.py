"""The rooms wired together for one model: its storage, its passes, its optimizers' steps, its state from and for files.

What one trade can do by itself belongs into that trade's room; what is here needs several of them at once (an update
that gathers, a state that is read from all tiers). Nothing here knows of front-ends or file formats.
"""
