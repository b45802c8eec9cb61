"""``python -m pytest tests/gpu``: skipped without a GPU. One GPU is enough; two or more use NCCL between them.

``--gpu-device cpu`` runs what does not need CUDA itself on the CPU. So does ``make test-full`` without a GPU.
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
    """Mark everything here ``gpu``, and skip it where there is none."""
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
    """Why a test that is marked with ``gpus(n)`` for each of ``needed``, and with ``packages(...)``, cannot run; empty
    where it can."""
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
    """``cuda``, or ``cpu`` if that was asked for."""
    return _device_type(request.config)


def _pool(ranks: int) -> Any:
    """Of so many ranks: with a GPU each over NCCL, or sharing one over gloo."""

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
    """Each of them in turn."""
    return request.getfixturevalue("one_rank" if request.param == 1 else "two_ranks")
