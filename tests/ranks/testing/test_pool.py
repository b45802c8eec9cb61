"""``shardwise.testing``: the plain oracle, ``RankPool`` and ``run_ranks``, and the simulated mesh of one rank.

The oracle (``train_plain``) is compared with torch's DistributedDataParallel. Real pools are tested for results,
failures of every kind, reuse and cleanup. A rank of ``alike_mesh`` makes the same calls, of the same sizes, as a real
one.
"""

import contextlib
import copy
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.testing import PlainRecipe, RankError, RankPool, assert_close, run_ranks, train_plain
from shardwise.testing import pool as implementation
from tests.support.alike import alike_mesh
from tests.support.alike_setup import PLANS, counted, made, real_steps, train
from tests.support.models import MODELS, make_batches
from tests.support.on_ranks import raises
from tests.support.sets import campaign, full

# DDP cannot run these: reentrant checkpointing together with its search for unused parameters.
DDP_CASES = [name for name in MODELS if name not in ("checkpointed_reentrant",)]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def train_with_ddp(name: str, max_norm: float, norm_type: float) -> list[tuple[list[float], dict[str, Tensor]]]:
    case = MODELS[name]
    batches = make_batches(case, dist.get_world_size(), steps=2, micro_batches=2, dtype=torch.float64)
    model = case.factory(torch.float64)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adam(model)
    record = []
    for step in batches:
        for micro in step:
            case.loss(wrapped, micro[dist.get_rank()]).backward()
        graded = [p for p in model.parameters() if p.grad is not None and p.numel()]
        norm = torch.nn.utils.clip_grad_norm_(graded, max_norm, norm_type)
        optimizer.step()
        optimizer.zero_grad()
        record.append(([float(norm)], {key: p.detach().clone() for key, p in model.named_parameters()}))
    return record


@pytest.mark.parametrize("name", DDP_CASES)
def test_oracle_equals_ddp(name: str) -> None:
    case = MODELS[name]
    batches = make_batches(case, 2, steps=2, micro_batches=2, dtype=torch.float64)
    recipe = PlainRecipe(max_norm=0.1, norm_type=2.0)
    run = train_plain(lambda: case.factory(torch.float64), case.loss, adam, batches, recipe)
    rtol = 1e-2 if name == "mixed_bf16" else 1e-9
    for step, (norms, parameters) in enumerate(run_ranks(2, train_with_ddp, name, 0.1, 2.0)[0]):
        assert run.norms[step] == pytest.approx(norms[0], rel=rtol)
        assert_close(parameters, run.parameters[step], rtol, f"{name} after step {step}")


def weighted_count(batch: dict[str, Tensor]) -> float:
    return float(batch["target"].ne(0).sum())


def test_token_weights_give_the_mean_over_all_tokens() -> None:
    case = MODELS["mlp"]
    batches = make_batches(case, 2, steps=1, micro_batches=3, dtype=torch.float64)
    for micro, rows in zip(batches[0], (1, 2, 4), strict=True):
        micro[0].update(args=(micro[0]["args"][0][:rows],), target=micro[0]["target"][:rows])
    joined = {
        "args": (torch.cat([batch["args"][0] for micro in batches[0] for batch in micro]),),
        "target": torch.cat([batch["target"] for micro in batches[0] for batch in micro]),
    }

    def factory() -> nn.Module:
        return case.factory(torch.float64)

    run = train_plain(factory, case.loss, adam, batches, PlainRecipe(tokens=weighted_count))
    whole = train_plain(factory, case.loss, adam, [[[joined]]])
    assert_close(run.gradients[0], whole.gradients[0], 1e-12, "token-weighted gradients")


KINDS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}


@pytest.mark.parametrize("kind", KINDS)
def test_training_without_masters_trains_the_cast_model(kind: str) -> None:
    """The expected result is computed here for two ranks: a bf16 model, gradients summed in fp32 and rounded once, a
    bf16 step."""
    case = MODELS["mlp"]
    batches = make_batches(case, 2, steps=3)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return KINDS[kind](model.parameters(), lr=0.02)

    model = case.factory().bfloat16()
    own = optimizer(model)
    for step in batches:
        by_rank = []
        for batch in step[0]:
            output = model(batch["args"][0].bfloat16())
            loss = (output.float() - batch["target"]).square().mean()
            by_rank.append(torch.autograd.grad(loss, list(model.parameters())))
        for parameter, first, second in zip(model.parameters(), *by_rank, strict=True):
            parameter.grad = ((first.float() + second.float()) / 2).bfloat16()
        own.step()
    recipe = PlainRecipe(param_dtype=torch.bfloat16, masters=False)
    run = train_plain(case.factory, case.loss, optimizer, batches, recipe)
    expected = dict(model.named_parameters())
    assert_close(run.parameters[-1], expected, 0.0, kind)
    assert_close(run.masters[-1], expected, 0.0, kind)
    kept = train_plain(case.factory, case.loss, optimizer, batches, replace(recipe, masters=True))
    assert kept.masters[-1].keys() == expected.keys()
    assert any(not torch.equal(kept.parameters[-1][name], value) for name, value in expected.items())


STEPS, BLOCKS = 3, 3
QUICK = [(2, "zero1", "native"), (2, "zero2", "gloo"), (2, "zero3", "native"), (2, "hybrid", "gloo")]
QUICK += [(4, "hybrid", "native")]
PAIRS = [(4, "zero1", "gloo"), (4, "zero2", "native"), (4, "zero3", "gloo")]
REST = [case for case in product((2, 4), PLANS, ("native", "gloo")) if case not in QUICK + PAIRS]


@pytest.mark.parametrize(("ranks", "name", "transport"), [*QUICK, *full(*PAIRS), *campaign(*REST)])
def test_simulated_rank_makes_the_calls_of_a_real_one(ranks: int, name: str, transport: str) -> None:
    real = run_ranks(ranks, real_steps, name, transport, STEPS, BLOCKS)
    for rank in range(ranks):
        log, groups, shard_numel = real[rank]
        with alike_mesh(PLANS[name], rank, ranks, transport) as (mesh, asked):
            session = made(PLANS[name], mesh, BLOCKS)
            mesh.reset_traffic()
            asked.reset()
            train(session, STEPS)
            # In any order: the start of a reduction among other operations depends on timing.
            assert sorted(asked.log) == sorted(log), f"rank {rank}"
            assert counted(mesh) == groups
            assert sum(chunk.shard_end - chunk.shard_start for chunk in session._engine.shards.chunks) == shard_numel
            session.close()
    assert len(log) > STEPS


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def gone(pids: tuple[int, ...]) -> bool:
    """Return whether the processes end; on a busy machine this may take a while."""
    end = time.monotonic() + 60.0
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def sum_over_ranks(x: torch.Tensor) -> tuple[int, torch.Tensor]:
    x += dist.get_rank()
    dist.all_reduce(x)
    return dist.get_rank(), x


def raise_on(rank: int) -> None:
    dist.barrier()  # the other ranks are in the collective soon after
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} is unhappy")
    dist.all_reduce(torch.ones(1))


def raise_unpicklable() -> None:
    raise Unpicklable(1, 2)


def end_by(number: int, rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
    dist.all_reduce(torch.ones(1))


def hang_on(rank: int, folder: str) -> int:
    begun(folder)
    while dist.get_rank() == rank:
        time.sleep(0.05)
    return dist.get_rank()


def start_child_and_hang(folder: str) -> None:
    child = subprocess.Popen(["sleep", "300"])
    Path(folder, f"child-{dist.get_rank()}").write_text(str(child.pid), "utf-8")
    begun(folder)
    time.sleep(300)


def begun(folder: str) -> None:
    Path(folder, str(dist.get_rank())).touch()


def nothing() -> None:
    pass


def disturb() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.rand(5)


def observe() -> tuple[torch.Tensor, float, bool, int]:
    return torch.rand(3), random.random(), torch.is_grad_enabled(), torch.get_num_threads()


def load_batches() -> tuple[str | None, list[float]]:
    loader = torch.utils.data.DataLoader(torch.arange(6.0), batch_size=2, num_workers=2)  # type: ignore[arg-type]
    return multiprocessing.get_start_method(allow_none=True), [batch[0].item() for batch in loader]


def bad_result() -> object:
    return lambda: None


def start_pool() -> None:
    RankPool(1).run(nothing)


@pytest.fixture
def pool(own_pool: RankPool) -> RankPool:
    """Return a running pool whose ranks have imported this module, so that none waits for another one's imports."""
    own_pool.run(nothing)
    return own_pool


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pool wait long enough for the other ranks after the first failure, even on a busy machine."""
    monkeypatch.setattr(implementation, "_GRACE_SECONDS", 120.0)


@contextlib.contextmanager
def giving_up(pool: RankPool, hanging: set[int], folder: Path) -> Iterator[None]:
    """Let the time-out pass exactly when only these ranks are unfinished, and all of them have begun.

    A rank that has to finish may then take as long as it needs on a busy machine.
    """

    def passed(handles: list[Any], _seconds: float) -> list[Any]:
        end = time.monotonic() + 120.0
        while not (ready := wait(handles, 0.1)) and time.monotonic() < end:
            pending = {rank.rank for rank in pool._ranks if rank.connection in handles}
            if pending == hanging and all((folder / str(rank)).exists() for rank in hanging):
                break
        return ready

    with mock.patch.object(implementation, "wait", passed):
        yield


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_by_rank(world_size: int) -> None:
    x = torch.zeros(3)
    results = run_ranks(world_size, sum_over_ranks, x)
    assert [rank for rank, _ in results] == list(range(world_size))
    for _, value in results:
        assert torch.equal(value, torch.full((3,), float(sum(range(world_size)))))
    assert torch.equal(x, torch.zeros(3)), "ranks work on copies"


def test_processes_are_reused_between_tasks(pool: RankPool) -> None:
    first = pool.run(os.getpid)
    assert pool.run(os.getpid) == first == list(pool.pids)
    assert len(set(first)) == 2


def test_exception_has_rank_and_traceback(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(raise_on, 1)
    error = caught.value
    assert error.rank == 1
    assert isinstance(error.exception, ValueError)
    assert str(error).startswith("rank 1 of 2 raised ValueError: rank 1 is unhappy")
    assert 'raise ValueError(f"rank {rank} is unhappy")' in error.traceback
    assert error.traceback.rstrip() in str(error)
    assert "all_reduce" in error.stacks[0], "shows where the other rank was waiting"
    assert "leave_with_parent" not in str(error)


def test_all_exceptions_of_ranks_are_shown(pool: RankPool, patient: None) -> None:
    with pytest.raises(RankError, match="1 and 2") as caught:
        pool.run(raise_unpicklable)
    assert caught.value.exception is None
    assert "--- ranks 0, 1 traceback ---" in str(caught.value)
    assert str(caught.value).count("raise Unpicklable(1, 2)") == 1
    assert not caught.value.stacks


def test_killed_rank_is_reported_at_once(pool: RankPool) -> None:
    pids = pool.pids
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL") as caught:
        pool.run(end_by, signal.SIGKILL, 1, timeout=3600)
    assert (caught.value.rank, caught.value.exit_code, caught.value.timed_out) == (1, -9, False)
    assert gone(pids)


def test_crash_shows_its_place(pool: RankPool) -> None:
    caught = raises(RankError, "killed by SIGSEGV", lambda: pool.run(end_by, signal.SIGSEGV, 0))
    assert "end_by" in caught


def test_rank_killed_while_idle_is_replaced(pool: RankPool) -> None:
    os.kill(pool.pids[0], signal.SIGKILL)
    assert wait([pool._ranks[0].process.sentinel], 60), "its end is known a moment after the signal"
    assert pool.run(copy.copy, 5) == [5, 5]


def test_hang_ends_with_stacks(pool: RankPool, tmp_path: Path) -> None:
    pids = pool.pids
    with (
        pytest.raises(RankError, match=r"ranks 1 of 2 did not finish within 0.5 s") as caught,
        giving_up(pool, {1}, tmp_path),
    ):
        pool.run(hang_on, 1, str(tmp_path), timeout=0.5)
    assert caught.value.timed_out
    assert list(caught.value.stacks) == [1]
    assert "in hang_on" in caught.value.stacks[1]
    assert "ranks that finished: 0" in str(caught.value)
    assert gone(pids)


@pytest.mark.full
def test_children_of_a_killed_rank_are_killed(pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError), giving_up(pool, {0, 1}, tmp_path):
        pool.run(start_child_and_hang, str(tmp_path), timeout=1.0)
    assert gone(tuple(int((tmp_path / f"child-{rank}").read_text("utf-8")) for rank in range(2)))


def test_state_does_not_leak_between_tasks(pool: RankPool) -> None:
    first = pool.run(observe)
    pool.run(disturb)
    second = pool.run(observe)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a[0], b[0])
        assert a[1:] == b[1:] == (a[1], True, 1)
    assert first[0][0].dtype is torch.float32


@pytest.mark.parametrize("method", [None, "fork"])
def test_data_loaders_start_workers_as_in_the_caller(pool: RankPool, method: str | None) -> None:
    with mock.patch("multiprocessing.get_start_method", lambda allow_none=False: method):
        assert pool.run(load_batches) == [(method, [0.0, 2.0, 4.0])] * 2


def test_lost_process_group_is_created_again(pool: RankPool) -> None:
    pool.run(dist.destroy_process_group)
    assert pool.run(sum_over_ranks, torch.zeros(1))[1][1].item() == 1


def test_result_that_cannot_be_sent_is_an_error(pool: RankPool) -> None:
    raises(RankError, "lambda", lambda: pool.run(bad_result))


def test_values_are_sent_as_copies(pool: RankPool) -> None:
    sent = {
        "transposed": torch.nn.Parameter(torch.randn(5, 7).t()),
        "strided": torch.arange(12.0)[::3],
        "scalar": torch.tensor(3.0, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
        "box": Box(torch.ones(2, 2)),
        "class": Box,
        "frozen": torch.nn.Parameter(torch.ones(1), requires_grad=False),
    }
    for got in pool.run(copy.copy, sent):
        assert isinstance(got, dict)
        for name in ("transposed", "strided", "scalar", "empty", "flags", "frozen"):
            assert type(got[name]) is type(sent[name])
            assert got[name].dtype is sent[name].dtype
            assert got[name].requires_grad is sent[name].requires_grad
            assert torch.equal(got[name], sent[name])
        assert got["transposed"].stride() == sent["transposed"].stride()
        assert got["class"] is Box
        assert torch.equal(got["box"].value, torch.ones(2, 2))


def test_a_rank_cannot_start_ranks(pool: RankPool) -> None:
    raises(RankError, "a rank tried to start a pool", lambda: pool.run(start_pool))


def test_close_leaves_no_processes_or_files() -> None:
    pool = RankPool(2)
    pool.run(nothing)
    pids, directory = pool.pids, pool._directory
    assert directory is not None and Path(directory).exists()
    pool.close()
    pool.close()
    assert pool.pids == ()
    assert gone(pids)
    assert not Path(directory).exists()
    assert pool.run(copy.copy, 1) == [1, 1], "a closed pool starts again"
    pids = pool.pids
    pool.close()
    assert gone(pids)


SCRIPT = """
import sys
import torch.distributed as dist
from dataclasses import dataclass
from shardwise.testing import RankPool, run_ranks

@dataclass
class Answer:
    rank: int

def ask(answer):
    print("rank", dist.get_rank(), flush=True)
    return Answer(dist.get_rank() + answer.rank)

{guard}
    results = run_ranks(2, ask, Answer(10))
    assert all(type(result) is Answer for result in results)
    print([result.rank for result in results], RankPool)
"""


ROOT = str(Path(__file__).parents[3])


def run_script(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text, "utf-8")
    environment = {**os.environ, "PYTHONPATH": ROOT, "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, str(path)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120, env=environment)


@pytest.mark.full
def test_functions_of_a_script(tmp_path: Path) -> None:
    done = run_script(tmp_path / "script.py", SCRIPT.format(guard="if __name__ == '__main__':"))
    assert done.returncode == 0, done.stderr
    assert "[10, 11]" in done.stdout
    assert "rank 0" in done.stdout and "rank 1" in done.stdout, "the ranks' output passes through"


BY_ITS_FILE = """
import sys
import pytest
from shardwise.testing import run_ranks

def name():
    return __name__

def test_ranks():
    assert "." in name() and run_ranks(2, name) == [name()] * 2 == run_ranks(2, name)

if __name__ == "__main__":
    folder = sys.path.pop(0)
    raise SystemExit(pytest.main(["--import-mode=importlib", f"--rootdir={folder}/..", __file__]))
"""


@pytest.mark.full
def test_module_that_pytest_imports_by_its_file(tmp_path: Path) -> None:
    done = run_script(tmp_path / "test_itself.py", BY_ITS_FILE)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


KILLED = """
import os, signal, subprocess, threading, time
from shardwise.testing import RankPool

def pids():
    child = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return f"{os.getpid()} {child.pid}"

def hang():
    time.sleep(300)

if __name__ == "__main__":
    pool = RankPool(2)
    print(*pool.run(pids), pool._directory, sep="\\n", flush=True)
    threading.Thread(target=pool.run, args=(hang,), daemon=True).start()
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full
def test_ranks_exit_when_the_caller_is_killed(tmp_path: Path) -> None:
    done = run_script(tmp_path / "killed.py", KILLED)
    assert done.returncode == -signal.SIGKILL, done.stderr
    *pids, directory = done.stdout.splitlines()
    assert gone(tuple(map(int, " ".join(pids).split()))), "ranks, and what their tasks started"
    assert not Path(directory).exists()
