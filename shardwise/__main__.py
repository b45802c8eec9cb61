"""``python -m shardwise``: the same as the ``shardwise`` command."""

from __future__ import annotations

import sys

from shardwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
