"""Waits between streams taken out one by one, on a device that is late; ``python -m tests.late.mutations``."""
