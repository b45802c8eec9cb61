"""Side-by-side measurements against other systems: ``python -m benchmarks.training`` and ``.collectives``."""
