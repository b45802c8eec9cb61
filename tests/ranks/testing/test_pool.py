"""The pool of ranks for real: results, failures of every kind, reuse, and nothing left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.testing import RankError, RankPool, close_pools, run_ranks


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
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} is unhappy")
    dist.all_reduce(torch.ones(1))


def raise_unpicklable() -> None:
    raise Unpicklable(1, 2)


def kill_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def crash_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def exit_on(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        os._exit(code)
    dist.barrier()


def system_exit() -> None:
    sys.exit("not today")


def hang_on(rank: int) -> int:
    while dist.get_rank() == rank:
        time.sleep(0.05)
    return dist.get_rank()


def wait_in_collective(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.barrier()
    hang_on(rank)


def spin() -> None:
    while True:
        pass


def start_child_and_hang(path: str) -> None:
    child = subprocess.Popen(["sleep", "300"])
    Path(path).write_text(str(child.pid))
    time.sleep(300)


def nothing() -> None:
    pass


def own_pid() -> int:
    return os.getpid()


def disturb() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.rand(5)


def observe() -> tuple[torch.Tensor, float, bool, int]:
    return torch.rand(3), random.random(), torch.is_grad_enabled(), torch.get_num_threads()


def leave_group() -> None:
    dist.destroy_process_group()


def talk() -> None:
    print(f"hello from {dist.get_rank()}", flush=False)


def echo(value: object) -> object:
    return value


def working_directory() -> str:
    return os.getcwd()


def bad_result() -> object:
    return lambda: None


def start_pool() -> None:
    RankPool(1).run(nothing)


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture
def pool(shared_pool: RankPool) -> RankPool:
    """Running, with this module imported, so that short time-outs measure the task."""
    shared_pool.run(nothing)
    return shared_pool


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def gone(pids: tuple[int, ...]) -> bool:
    """Whether they end; a busy machine may need a while to tell."""
    end = time.monotonic() + 60.0
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_by_rank(world_size: int) -> None:
    x = torch.zeros(3)
    results = run_ranks(world_size, sum_over_ranks, x)
    assert [rank for rank, _ in results] == list(range(world_size))
    for _, value in results:
        assert torch.equal(value, torch.full((3,), float(sum(range(world_size)))))
    assert torch.equal(x, torch.zeros(3)), "ranks work on copies"


def test_processes_are_kept_between_tasks(pool: RankPool) -> None:
    first = pool.run(own_pid)
    assert pool.run(own_pid) == first == list(pool.pids)
    assert len(set(first)) == 2


def test_exception_shows_rank_and_traceback(pool: RankPool) -> None:
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


def test_all_ranks_raising_are_all_shown(pool: RankPool) -> None:
    with pytest.raises(RankError, match="1 and 2") as caught:
        pool.run(raise_unpicklable)
    assert caught.value.exception is None
    assert "--- rank 0 traceback ---" in str(caught.value)
    assert "--- rank 1 traceback ---" in str(caught.value)
    assert not caught.value.stacks


def test_killed_rank_is_reported_at_once(pool: RankPool) -> None:
    pids = pool.pids
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL") as caught:
        pool.run(kill_on, 1, timeout=3600)
    assert (caught.value.rank, caught.value.exit_code, caught.value.timed_out) == (1, -9, False)
    assert gone(pids)


def test_crash_shows_where(pool: RankPool) -> None:
    with pytest.raises(RankError, match="killed by SIGSEGV") as caught:
        pool.run(crash_on, 0)
    assert "crash_on" in str(caught.value)


def test_exit_code_is_shown(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 of 2 exited with code 7") as caught:
        pool.run(exit_on, 0, 7)
    assert caught.value.exit_code == 7


def test_system_exit_is_a_failure(pool: RankPool) -> None:
    with pytest.raises(RankError, match="SystemExit: not today"):
        pool.run(system_exit)


def test_rank_killed_while_idle_is_replaced(pool: RankPool) -> None:
    os.kill(pool.pids[0], signal.SIGKILL)
    assert wait([pool._ranks[0].process.sentinel], 60), "its end is known a moment after the signal"
    assert pool.run(echo, 5) == [5, 5]


def test_hang_ends_with_stacks(pool: RankPool) -> None:
    pids = pool.pids
    with pytest.raises(RankError, match=r"ranks 1 of 2 did not finish within 0.5 s") as caught:
        pool.run(hang_on, 1, timeout=0.5)
    assert caught.value.timed_out
    assert list(caught.value.stacks) == [1]
    assert "in hang_on" in caught.value.stacks[1]
    assert "ranks that finished: 0" in str(caught.value)
    assert gone(pids)


def test_hang_shows_every_waiting_rank(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(wait_in_collective, 0, timeout=0.5)
    assert "in barrier" in caught.value.stacks[1]
    assert "in hang_on" in caught.value.stacks[0]


def test_busy_loop_is_ended(pool: RankPool) -> None:
    with pytest.raises(RankError, match="ranks 0, 1 of 2 did not finish") as caught:
        pool.run(spin, timeout=0.3)
    assert "in spin" in caught.value.stacks[0]


def test_stopped_rank_is_ended(pool: RankPool) -> None:
    pids = pool.pids
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(RankError, match="ranks 1 of 2 did not finish") as caught:
        pool.run(nothing, timeout=0.3)
    assert "no answer" in caught.value.stacks[1]
    assert gone(pids)


def test_children_of_a_killed_rank_go_too(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with pytest.raises(RankError):
        pool.run(start_child_and_hang, str(path), timeout=1.0)
    assert gone((int(path.read_text()),))


def test_works_again_after_each_failure(pool: RankPool) -> None:
    for attempt in range(2):
        with pytest.raises(RankError):
            pool.run(raise_on, attempt)
        assert [rank for rank, _ in pool.run(sum_over_ranks, torch.zeros(1))] == [0, 1]


def test_state_does_not_leak_between_tasks(pool: RankPool) -> None:
    first = pool.run(observe)
    pool.run(disturb)
    second = pool.run(observe)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a[0], b[0])
        assert a[1:] == b[1:] == (a[1], True, 1)
    assert first[0][0].dtype is torch.float32


def test_lost_process_group_is_made_again(pool: RankPool) -> None:
    pool.run(leave_group)
    assert pool.run(sum_over_ranks, torch.zeros(1))[1][1].item() == 1


def test_result_that_cannot_be_sent_is_an_error(pool: RankPool) -> None:
    with pytest.raises(RankError, match="lambda"):
        pool.run(bad_result)


def test_values_travel_by_copy(pool: RankPool) -> None:
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
    for got in pool.run(echo, sent):
        assert isinstance(got, dict)
        for name in ("transposed", "strided", "scalar", "empty", "flags", "frozen"):
            assert type(got[name]) is type(sent[name])
            assert got[name].dtype is sent[name].dtype
            assert got[name].requires_grad is sent[name].requires_grad
            assert torch.equal(got[name], sent[name])
        assert got["transposed"].stride() == sent["transposed"].stride()
        assert got["class"] is Box
        assert torch.equal(got["box"].value, torch.ones(2, 2))


def test_ranks_follow_the_callers_directory(pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert pool.run(working_directory) == [str(tmp_path)] * 2


def test_a_rank_cannot_start_ranks(pool: RankPool) -> None:
    with pytest.raises(RankError, match="a rank tried to start a pool"):
        pool.run(start_pool)


@pytest.mark.campaign  # only a clock can tell
def test_small_tasks_are_cheap(pool: RankPool) -> None:
    begin = time.perf_counter()
    for _ in range(200):
        pool.run(nothing)
    mean_ms = (time.perf_counter() - begin) / 200 * 1e3
    print(f"{mean_ms:.2f} ms a task")
    assert mean_ms < 50, f"{mean_ms} ms a task: about 2 are usual, 50 allows for a busy machine"


def test_nothing_is_left_after_close() -> None:
    pool = RankPool(2)
    pool.run(nothing)
    pids, directory = pool.pids, pool._directory
    assert directory is not None and Path(directory).exists()
    pool.close()
    pool.close()
    assert pool.pids == ()
    assert gone(pids)
    assert not Path(directory).exists()
    assert pool.run(echo, 1) == [1, 1], "a closed pool starts again"
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
    path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": ROOT}
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, env=environment)


def test_functions_of_a_script(tmp_path: Path) -> None:
    done = run_script(tmp_path / "script.py", SCRIPT.format(guard="if __name__ == '__main__':"))
    assert done.returncode == 0, done.stderr
    assert "[10, 11]" in done.stdout
    assert "rank 0" in done.stdout and "rank 1" in done.stdout, "the ranks' output passes through"


@pytest.mark.campaign
def test_unguarded_script_says_what_to_do(tmp_path: Path) -> None:
    done = run_script(tmp_path / "script.py", SCRIPT.format(guard="if True:"))
    assert done.returncode != 0
    assert "if __name__ == '__main__':" in done.stderr


KILLED = """
import os, signal, threading, time
from shardwise.testing import RankPool

def pid():
    return os.getpid()

def hang():
    time.sleep(300)

if __name__ == "__main__":
    pool = RankPool(2)
    print(*pool.run(pid), pool._directory, flush=True)
    threading.Thread(target=pool.run, args=(hang,), daemon=True).start()
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_leave_when_the_caller_is_killed(tmp_path: Path) -> None:
    done = run_script(tmp_path / "killed.py", KILLED)
    assert done.returncode == -signal.SIGKILL, done.stderr
    *pids, directory = done.stdout.split()
    assert gone(tuple(map(int, pids)))
    assert not Path(directory).exists()


def test_cached_pools_close() -> None:
    pids = tuple(run_ranks(2, own_pid))
    assert tuple(run_ranks(2, own_pid)) == pids
    close_pools()
    assert gone(pids)
    assert run_ranks(2, echo, "again") == ["again", "again"]
