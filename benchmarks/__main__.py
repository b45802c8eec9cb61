"""``python -m benchmarks``: the training comparison."""

from __future__ import annotations

from benchmarks.training import main

if __name__ == "__main__":
    main()
