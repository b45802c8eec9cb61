"""Several runs of the demo in one launch, since starting ranks takes longer than what they train here.

Run as ``shardwise run --nproc N demo_several.py OPTIONS OPTIONS ...``, each a run's options in one argument. The runs
print what the demo prints, each after a line ``== OPTIONS``, and ``refused: ...`` on every rank that refuses.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from unittest.mock import patch

from shardwise.cli import demo
from shardwise.cli.demo_train import train
from shardwise.cli.errors import BadInput
from shardwise.cli.stop import StopRequest
from shardwise.mesh import shutdown


def main() -> None:
    """Run them in order; stop at the first that fails."""
    for options in sys.argv[1:]:
        parser = argparse.ArgumentParser()
        demo.add_parser(parser.add_subparsers())
        config = demo.check(parser.parse_args(["demo", *shlex.split(options)]))
        Path(config.out).mkdir(parents=True, exist_ok=True)
        if os.environ["RANK"] == "0":
            print(f"== {options}", flush=True)
        # The ranks of a launch meet once: torch cannot make a second process group through the same store.
        with patch("shardwise.cli.demo_train.shutdown"):
            try:
                status = train(config, StopRequest())
            except BadInput as problem:
                status = 0
                print(f"refused: {problem}", flush=True)
        if status:
            sys.exit(status)
    shutdown()


if __name__ == "__main__":
    main()
