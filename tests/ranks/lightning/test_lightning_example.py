"""``examples/lightning_strategies.py`` as printed, on ranks that look to it as if torchrun had started them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from shardwise.testing import run_ranks
from tests.support.sets import campaign

EXAMPLE = Path(__file__).parents[3] / "examples" / "lightning_strategies.py"
RANKS = 2


def _run(strategy: str, folder: str) -> str:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    launched = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    launched |= {"TORCHELASTIC_RUN_ID": "example", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    arguments = [str(EXAMPLE), "--strategy", strategy, "--directory", folder, "--epochs", "2"]
    out = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, launched))
        stack.enter_context(mock.patch.object(sys, "argv", arguments))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return out.getvalue()


@pytest.mark.parametrize("strategy", [*campaign("colossalai", "deepspeed"), "ddp_fully_sharded"])
def test_it_learns_under_each_strategy_and_leaves_one_checkpoint(strategy: str, tmp_path: Path) -> None:
    first, second = run_ranks(RANKS, _run, strategy, str(tmp_path))
    found = re.search(rf"{strategy}: validation loss (\S+) -> (\S+); rank 0 keeps (\d+) of (\d+) bytes", first)
    assert found is not None, first
    before, after, kept, whole = map(float, found.groups())
    assert after < before and 0.5 * whole <= kept < 0.55 * whole
    (left,) = tmp_path.iterdir()
    assert left.is_dir() and left.name in first
    assert strategy not in second
