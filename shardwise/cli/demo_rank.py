"""One rank of the demo: takes over the signals first, then imports what is heavy."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shardwise.cli.demo import DemoConfig
from shardwise.cli.demo_tiers import MEMORY_MARKER
from shardwise.cli.errors import BadInput
from shardwise.cli.stop import StopRequest

__all__ = ["main"]


def main() -> int:
    """Train as the JSON in the first argument says, and return this rank's exit status."""
    stop = StopRequest()
    stop.install()
    from shardwise.cli.demo_train import train

    config = DemoConfig.from_json(sys.argv[1])
    try:
        return train(config, stop)
    except BadInput as problem:
        if os.environ.get("RANK", "0") == "0":
            print(f"shardwise demo: error: {problem}", file=sys.stderr)
        return 2
    except Exception:
        # What other ranks see when one has run out of memory is a lost peer; that was said already.
        if Path(config.out, MEMORY_MARKER).exists():
            return 1
        raise


if __name__ == "__main__":
    sys.exit(main())
