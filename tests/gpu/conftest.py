"""Fixtures of ``python -m pytest tests/gpu``, which is skipped without a GPU; two or more GPUs use NCCL.

``--gpu-device cpu`` runs the tests that do not need CUDA on the CPU, as ``make test-full`` does without a GPU.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.testing import RankPool

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-device", choices=("cuda", "cpu"), help="device of the tests in tests/gpu")


def _device_type(config: pytest.Config) -> str:
    stand_in = "cpu" if config.getoption("--full", False) and not torch.cuda.is_available() else "cuda"
    return str(config.getoption("--gpu-device", None) or stand_in)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all tests of this folder ``gpu``, and skip those that cannot run."""
    device_type = _device_type(config)
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        packages = [name for mark in item.iter_markers("packages") for name in mark.args]
        reason = _reason_to_skip(device_type, [int(mark.args[0]) for mark in item.iter_markers("gpus")], packages)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _reason_to_skip(device_type: str, needed: Sequence[int], packages: Sequence[str] = ()) -> str:
    """Return why a test with ``gpus(n)`` for each of ``needed`` and with ``packages(...)`` cannot run, or an empty
    string.
    """
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        return f"needs {', '.join(absent)}: pip install {' '.join(absent)}"
    if device_type == "cpu" and not needed:
        return ""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = max(needed, default=1)
    return f"needs {wanted} CUDA device(s), {gpus} visible" if gpus < wanted else ""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpus(count): needs this many CUDA devices, and CUDA itself")
    config.addinivalue_line("markers", "packages(*names): needs these")


@pytest.fixture(scope="session")
def device_type(request: pytest.FixtureRequest) -> str:
    """The device type: ``cuda``, or ``cpu`` if requested."""
    return _device_type(request.config)


def _pool(ranks: int) -> Any:
    """Return a fixture with a pool of ranks: one GPU for each over NCCL, or a shared one over gloo."""

    @pytest.fixture(scope="session")
    def pool_of(device_type: str) -> Iterator[RankPool]:
        # NCCL refuses two ranks on one GPU; gloo moves CUDA tensors through the host, which tests the same engine code.
        own_gpu = device_type == "cuda" and torch.cuda.device_count() >= ranks
        over = {"backend": "cpu:gloo,cuda:nccl"} if own_gpu else {"backend": "gloo"} if device_type == "cuda" else {}
        with RankPool(ranks, **over) as made:
            yield made

    return pool_of


one_rank, two_ranks, four_ranks = _pool(1), _pool(2), _pool(4)


@pytest.fixture(params=[1, 2], ids=["1rank", "2ranks"])
def pool(request: pytest.FixtureRequest) -> RankPool:
    """A pool of one and of two ranks, in turn."""
    return request.getfixturevalue("one_rank" if request.param == 1 else "two_ranks")
