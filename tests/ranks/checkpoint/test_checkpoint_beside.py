"""Several models of one process that save into one directory: none replaces or rotates away another's."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_setup import Held
from sets import full
from torch import nn

from shardwise.build import Session, build
from shardwise.checkpoint import TorchRun
from shardwise.checkpoint.directory import scan
from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.session import Checkpointer
from shardwise.plan import zero
from shardwise.testing import run_ranks


class Generator(nn.Linear):
    pass


class Critic(nn.Linear):
    pass


def session_of(model: nn.Module) -> Session:
    return build(model, torch.optim.SGD(model.parameters(), lr=0.1), zero(3))


def both() -> tuple[Session, Session]:
    return session_of(Generator(3, 2)), session_of(Critic(4, 1))


def tags(root: str) -> list[str]:
    return sorted(each.tag for each in scan(root))


def heard(session: Session, root: str, tag: str, **arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session.checkpoints.save(root, tag, **arguments)
    return [str(each.message) for each in caught]


def side_by_side(root: str) -> list[str]:
    first, second = both()
    first.checkpoints.save(root)
    said = []
    for tag in (None, "step-0"):
        with pytest.raises(ValueError, match="directory of its own") as raised:
            second.checkpoints.save(root, tag)
        said.append(str(raised.value))
    first.checkpoints.save(root)  # its own it may replace
    assert first.checkpoints.load(root, "step-0") is not None
    told = [heard(second, root, f"critic-{turn}", keep=1) for turn in range(3)]
    assert [len(each) for each in told[1:]] == [0, 0], "once is enough"
    assert tags(root) == ["critic-2", "step-0"]
    first.checkpoints.save(root, "step-1", keep=1)
    assert tags(root) == ["critic-2", "step-1"]
    for each in (first, second):
        each.close()
    return [*said, *told[0]]


@pytest.mark.parametrize("ranks", [2, *full(1)])
def test_models_of_one_process_do_not_replace_each_other(ranks: int, tmp_path: Path) -> None:
    """The second's default tag was the first's, and its ``keep`` removed what the first had."""
    first, *others = run_ranks(ranks, side_by_side, str(tmp_path))
    for said in (first, *others):
        assert all("saved by another model of this process (Generator)" in each for each in said[:2]), said
        assert all(f"{tmp_path}/generator and {tmp_path}/discriminator" in each for each in said[:2]), said
    assert len(first) == 3 and f"another model of this process (Generator) saves into {tmp_path} too" in first[2]
    assert all(len(each) == 2 for each in others), "the first rank warns"


def test_what_ended_stands_in_nobodys_way(tmp_path: Path) -> None:
    """A session that was closed, one that gave the model back, and one that a program has let go of."""
    root = str(tmp_path)
    model = Generator(3, 2)
    closed = session_of(model)
    closed.checkpoints.save(root, "step-1")
    closed.close()
    given = session_of(Generator(3, 2))
    assert heard(given, root, "step-1") == []
    given.unshard()
    gone, last = both()
    gone.circle = gone  # type: ignore[attr-defined]
    assert heard(gone, root, "step-1") == []
    gc.disable()
    try:
        del gone
        assert heard(last, root, "step-1") == heard(last, root, "step-2", keep=1) == []
    finally:
        gc.enable()
    assert tags(root) == ["step-2"]
    last.close()


def test_one_that_follows_goes_on_where_another_was(tmp_path: Path) -> None:
    """A second run in one process, resumed or begun anew, while the program still holds the first."""
    root = str(tmp_path)
    first = session_of(Generator(3, 2))
    assert heard(first, root, "last") == heard(first, root, "older") == []
    second = session_of(Generator(3, 2))
    assert heard(second, root, "last", keep=1) == []
    assert tags(root) == ["last"]
    with pytest.raises(ValueError, match="directory of its own"):
        first.checkpoints.save(root, "last")  # now they save in turns
    first.checkpoints.load(root, "last")
    assert heard(first, root, "last") == []
    with pytest.raises(ValueError, match="directory of its own"):
        second.checkpoints.save(root, "last")
    for each in (first, second):
        each.close()


def test_a_saver_that_was_closed_stands_in_nobodys_way(tmp_path: Path) -> None:
    model, other = Generator(3, 2), Critic(4, 1)
    first, second = Checkpointer(TorchRun(model)), Checkpointer(TorchRun(other))
    first.save(tmp_path, "one")
    with pytest.raises(ValueError, match=r"another model of this process .Generator."):
        second.save(tmp_path, "one")
    first.close()
    second.save(tmp_path, "one")


def test_what_was_moved_or_removed_is_free(tmp_path: Path) -> None:
    first, second = both()
    first.checkpoints.save(tmp_path, "one")
    (tmp_path / "one").rename(tmp_path / "best")
    second.checkpoints.save(tmp_path, "one")
    with pytest.raises(ValueError, match=r"another model of this process .Critic."):
        first.checkpoints.save(tmp_path, "one")
    for each in (first, second):
        each.close()


@pytest.mark.parametrize("fail", [False, True])
def test_what_a_thread_still_writes_is_taken_and_what_failed_is_free(tmp_path: Path, fail: bool) -> None:
    first, second = both()
    files = Held()
    saver = Checkpointer(first, files)
    saver.save(tmp_path, "one", use_async=True)
    with pytest.raises(ValueError, match=r"another model of this process .Generator."):
        second.checkpoints.save(tmp_path, "one")
    files.fail = fail
    files.go.set()
    if fail:
        with pytest.raises(CheckpointError, match="No space left"):
            saver.wait_for_saves()
        second.checkpoints.save(tmp_path, "one")
    else:
        saver.wait_for_saves()
        with pytest.raises(ValueError, match=r"another model of this process .Generator."):
            second.checkpoints.save(tmp_path, "one")
    for each in (first, second):
        each.close()


def test_models_of_torchs_own_and_several_savers_of_one_model(tmp_path: Path) -> None:
    """A Checkpointer of the same model, as front-ends make them, is the same run."""
    model, other = Generator(3, 2), Critic(4, 1)
    beside = Checkpointer(TorchRun(other))
    Checkpointer(TorchRun(model)).save(tmp_path, "one")
    Checkpointer(TorchRun(model)).save(tmp_path, "one")
    with pytest.raises(ValueError, match=r"another model of this process .Generator."):
        beside.save(tmp_path, "one")
    del model
    beside.save(tmp_path, "one")
