"""Tests of NVMe offload in the Adam family (``nvme_offload_fraction``): moments are on disk between steps.

The results equal those without offload, and a failed disk request changes neither parameters nor state.
"""

import copy
import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.memory.disk import store as disk
from shardwise.core.memory.disk.errors import DiskError
from shardwise.core.optim import CPUAdam, HybridAdam, disk_moments
from shardwise.testing import assert_close
from tests.support.disk_setup import Log
from tests.support.on_ranks import raises

SHAPES = [(40,), (3, 5), (0,), (), (100,), (2, 3, 4, 5), (7,)]


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    torch.manual_seed(100 + step)
    for index, param in enumerate(params):
        gradient = torch.randn(param.shape).to(param.dtype)
        param.grad = None if (index + step) % 5 == 0 else gradient


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def assert_equal(found: list[nn.Parameter], expected: list[nn.Parameter]) -> None:
    assert_close(*({str(at): param for at, param in enumerate(each)} for each in (found, expected)), 0.0, "parameters")


@pytest.fixture(params=["whole", "pieces"], autouse=True)
def piece_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pieces":
        monkeypatch.setattr(disk_moments, "PIECE_NUMEL", 16)


def make(params: Any, fraction: float, folder: Path) -> HybridAdam:
    return HybridAdam(params, lr=0.1, nvme_offload_fraction=fraction, nvme_offload_dir=str(folder))


@pytest.mark.parametrize("fraction", [0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_offload_changes_no_bit(fraction: float, dtype: torch.dtype, tmp_path: Path) -> None:
    """Compare bit for bit, also after the states are exchanged between both optimizers."""
    plain, moved = make_params(dtype), make_params(dtype)
    expected = HybridAdam(plain, lr=0.1)
    optimizer = make(moved, fraction, tmp_path)
    train(expected, plain, range(4))
    train(optimizer, moved, range(4))
    state = optimizer.state_dict()
    for number, entry in expected.state_dict()["state"].items():
        assert torch.equal(state["state"][number]["exp_avg"], entry["exp_avg"])
        assert torch.equal(state["state"][number]["exp_avg_sq"], entry["exp_avg_sq"])
    optimizer = make(moved, fraction, tmp_path)
    optimizer.load_state_dict(copy.deepcopy(expected.state_dict()))
    expected.load_state_dict(copy.deepcopy(state))
    train(expected, plain, range(4, 8))
    train(optimizer, moved, range(4, 8))
    assert_equal(moved, plain)


def test_loading_a_state_discards_moments_on_disk(tmp_path: Path) -> None:
    """Parameters without moments in the loaded state start from zero."""
    params, plain = make_params(), make_params()
    optimizer, expected = make(params, 1.0, tmp_path), HybridAdam(plain, lr=0.1)
    empty = copy.deepcopy(optimizer.state_dict())
    train(optimizer, params, range(3))
    optimizer.load_state_dict(empty)
    for a, b in zip(params, plain, strict=True):
        b.data.copy_(a.data)
    train(optimizer, params, range(3, 5))
    train(expected, plain, range(3, 5))
    assert_equal(params, plain)


def test_offload_fraction_is_respected(tmp_path: Path) -> None:
    """Entire parameters are offloaded in order while the fraction allows it; they have no moments in memory."""
    params = make_params()
    optimizer = make(params, 0.5, tmp_path)
    raises(TypeError, r"nvme_offload_fraction=0\.5", copy.deepcopy, optimizer)
    train(optimizer, params, range(1, 4))
    away = [p.numel() for p in params if p in optimizer.state and "exp_avg" not in optimizer.state[p]]
    total = sum(p.numel() for p in params)
    assert away == [40, 15, 1, 7]
    assert 0 < sum(away) <= total * 0.5


def test_take_offload(tmp_path: Path) -> None:
    params, plain = make_params(), make_params()
    optimizer, expected = make(params, 1.0, tmp_path), HybridAdam(plain, lr=0.1)
    train(optimizer, params, range(3))
    assert optimizer.take_offload() == (1.0, str(tmp_path))
    assert optimizer.take_offload()[0] == 0.0 and list(tmp_path.iterdir()) == []
    train(optimizer, params, range(3, 6))
    train(expected, plain, range(6))
    assert_equal(params, plain)


def test_files_are_in_the_directory_and_are_removed(tmp_path: Path) -> None:
    params = make_params()
    optimizer = CPUAdam(params, nvme_offload_fraction=1.0, nvme_offload_dir=str(tmp_path))
    train(optimizer, params, range(2))
    assert list(tmp_path.iterdir())
    del optimizer
    gc.collect()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 0]


def bits(value: Any) -> Any:
    """Return nested dicts and lists in which each tensor is its dtype, shape and bytes, for exact comparison."""
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().view(-1)
        return value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items()}
    return [bits(entry) for entry in value] if isinstance(value, list) else value


def snapshot(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> dict[str, Any]:
    """Return everything that a step changes, and the gradients, with moments read from disk. Values must be finite."""
    assert all(bool(param.isfinite().all()) for param in params)
    return {"params": bits([*params]), "grads": bits([p.grad for p in params]), "state": bits(optimizer.state_dict())}


def mixed(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Return two groups with different options; one parameter is bf16, one is not contiguous."""
    params[4] = nn.Parameter(params[4].detach().to(torch.bfloat16))
    params[5] = nn.Parameter(params[5].detach().transpose(0, 3))
    return [{"params": params[::2], "lr": 0.01}, {"params": params[1::2], "weight_decay": 0.1}]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Record the requests of all stores that the test opens; ``results`` makes chosen requests fail."""
    log = Log()
    monkeypatch.setattr(disk, "ThreadQueue", log.queue)
    return log


def fail_in_turn(log: Log, look: Callable[[], Any], act: Callable[[], Any]) -> list[bool]:
    """Let the first request of ``act`` fail, then the second, and so on; ``look`` must return the same each time.

    Return when ``act`` succeeds after each of its requests failed once.

    Returns:
        For each failed request, whether it was a write.
    """
    failures: list[bool] = []
    before = look()
    while True:
        log.requests.clear()
        log.results = {len(failures): -errno.EIO}
        try:
            act()
        except DiskError as error:
            assert error.errno == errno.EIO
            assert not log.results
        else:
            break
        failures.append(log.requests[len(failures)].writing)
        assert look() == before
    assert len(log.requests) == len(failures)
    log.results.clear()
    return failures


def pieces(params: list[nn.Parameter]) -> int:
    return sum(-(-param.numel() // disk_moments.PIECE_NUMEL) for param in params)


@pytest.mark.parametrize("fraction", [0.7, 1.0])
def test_each_request_of_a_step_fails(fraction: float, tmp_path: Path, log: Log) -> None:
    """A failed step changes nothing, and the repeated step gives the result of an undisturbed one."""
    params, plain = make_params(), make_params()
    optimizer, expected = make(mixed(params), fraction, tmp_path), HybridAdam(mixed(plain), lr=0.1)
    for step in range(1, 3):
        set_gradients(params, step)
        known = set(optimizer.state)
        failures = fail_in_turn(log, lambda: snapshot(optimizer, params), optimizer.step)
        train(expected, plain, range(step, step + 1))
        assert snapshot(optimizer, params) == snapshot(expected, plain)
        away = [p for p in params if p.grad is not None and "exp_avg" not in optimizer.state[p]]
        assert sum(failures) == pieces(away) > 3
        assert failures.count(False) == pieces([p for p in away if p in known])
    assert (params[5].grad is not None and "exp_avg" in optimizer.state[params[5]]) == (fraction < 1.0)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_no_room_at_the_first_step(number: int, tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space for all records is reserved before anything is changed or written, whichever reservation fails."""
    params, plain = make_params(), make_params()
    optimizer, expected = make(mixed(params), 0.7, tmp_path), HybridAdam(mixed(plain), lr=0.1)
    room = [0]

    def fallocate(*arguments: int) -> None:
        if not room[0]:
            raise OSError(number, os.strerror(number))
        room[0] -= 1

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    set_gradients(params, 0)
    before = snapshot(optimizer, params)
    assert before["state"]["state"] == {}
    tries = 0
    for _ in range(100):
        try:
            optimizer.step()
            break
        except DiskError as error:
            assert error.errno == number
        assert snapshot(optimizer, params) == before
        assert not log.requests
        tries, room[0] = tries + 1, 1
    train(expected, plain, range(1))
    assert snapshot(optimizer, params) == snapshot(expected, plain)
    room[0] = 0
    train(optimizer, params, range(1, 5))
    train(expected, plain, range(1, 5))
    assert snapshot(optimizer, params) == snapshot(expected, plain)
    assert tries == pieces([p for p in params if "exp_avg" not in optimizer.state[p]]) > 3


def test_each_request_of_a_load_fails(tmp_path: Path, log: Log) -> None:
    """A failed load keeps the previous state and groups, and can be repeated."""
    params, plain = make_params(), make_params()
    expected = HybridAdam(mixed(plain), lr=0.1, betas=(0.8, 0.9))
    train(expected, plain, range(3))
    loaded = copy.deepcopy(expected.state_dict())
    optimizer = make(mixed(params), 0.7, tmp_path)
    train(optimizer, params, range(2))
    failures = fail_in_turn(log, lambda: snapshot(optimizer, params), lambda: optimizer.load_state_dict(loaded))
    assert len(failures) > 3
    assert snapshot(optimizer, params)["state"] == snapshot(expected, plain)["state"]


def test_each_request_of_state_dict_fails(tmp_path: Path, log: Log) -> None:
    """A failed ``state_dict`` or ``take_offload`` changes nothing and can be repeated."""
    params, plain = make_params(), make_params()
    optimizer, expected = make(mixed(params), 0.7, tmp_path), HybridAdam(mixed(plain), lr=0.1)
    train(optimizer, params, range(3))
    train(expected, plain, range(3))

    def look() -> dict[str, Any]:
        return snapshot(optimizer, params) | {"in memory": [sorted(optimizer.state[p]) for p in params]}

    assert not any(fail_in_turn(log, look, optimizer.state_dict))
    failures = fail_in_turn(log, look, optimizer.take_offload)
    assert len(failures) > 3
    assert not any(failures)
    train(optimizer, params, range(3, 5))
    train(expected, plain, range(3, 5))
    assert snapshot(optimizer, params) == snapshot(expected, plain)
