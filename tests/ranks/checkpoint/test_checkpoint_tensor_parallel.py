"""Checkpoints of tensor-parallel models: a run saved under one layout of ranks continues under any other."""

import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwise.core.checkpoint import Checkpointer, EngineRun, PortableFiles, verify
from shardwise.core.checkpoint.formats import write_huggingface, write_single_optimizer
from shardwise.core.checkpoint.native_format import read_manifest
from shardwise.core.parallel.tensor import ShardSpec, TPPlan
from shardwise.plan import TensorPlan, zero
from shardwise.session import Session
from shardwise.testing import assert_close, run_ranks
from tests.support.checkpoint_setup import differences, everything
from tests.support.engine_setup import sharded
from tests.support.on_ranks import on_ranks
from tests.support.sets import campaign, full
from tests.support.tensor_model import made
from tests.support.tensor_runs import flat, plan_of, train, training

DOCUMENT = Path(__file__).parents[3] / "docs" / "checkpoint-format.md"
States = tuple[dict[str, Any], dict[str, Any]]
"""The full state when it was saved or loaded, and after two more steps."""


def directory(root: str) -> str:
    """Return the directory of the disk tier."""
    return root + "-disk"


def parts_are_of(session: Session, state: dict[str, Any]) -> list[str]:
    """Return the parameters whose local values are not this rank's part of ``state``, zeros in the padding."""
    with session.module.gathered():
        facts = zip(session.names(), session.params, session._engine.shards.layout.facts, strict=True)
        values = [(names[0], param.detach().clone(), fact.part) for names, param, fact in facts]
    wholes = [(name, value, part, state[f"model/{name}"].to(value.dtype)) for name, value, part in values]
    return [name for name, v, part, whole in wholes if not torch.equal(v, whole if part is None else part.of(whole))]


def saved(root: str, name: str, tied: bool) -> States:
    """Train, save and train on, on one rank; return both states."""
    with training(plan_of(name, directory(root)), tied) as session:
        train(session, 0, 2)
        saver = Checkpointer(session)
        state = everything(session)
        saver.save(root, "here", data_position=session.mesh.rank, user_state="mine", use_async="small" in name)
        train(session, 2, 4)
        saver.close()
        return state, everything(session)


def loaded(root: str, names: list[str], tied: bool) -> list[States]:
    """Load under each plan, train on, and return the same states."""
    found = []
    for name in names:
        with training(plan_of(name, directory(root)), tied, seed=8) as session:
            train(session, 50, 51)  # the load replaces this state
            saver = Checkpointer(session)
            restored = saver.load(root)
            assert restored is not None and restored.user_state == "mine"
            assert restored.data_position == (session.mesh.rank if session.mesh.rank < restored.world_size else 0)
            state = everything(session)
            assert not parts_are_of(session, state)
            train(session, 2, 4)
            found.append((state, everything(session)))
            saver.close()
    return found


def check(found: list[list[States]], names: list[str], expected: States, steps: bool) -> None:
    for rank, results in enumerate(found):
        for name, (state, after) in zip(names, results, strict=True):
            assert not differences(state, expected[0]), f"{name}, rank {rank}"
            if steps:
                numbers, reference = (
                    {k: v for k, v in each.items() if isinstance(v, Tensor)} for each in (after, expected[1])
                )
                assert_close(numbers, reference, 1e-11, f"{name}, rank {rank}, after more steps")


CASES = {
    "zero1 tp2": ["zero3 tp4", "zero3 tp1"],
    "zero2 tp2 small": ["zero1 tp4 small", "zero3 tp2 disk"],
    "zero3 tp4": ["zero2 tp2", "zero3 tp1 small"],
    "zero3 tp1": ["zero3 tp4"],
    "zero1 tp2 replicas": ["zero3 tp2 host"],
    "zero3 tp2 disk": ["zero1 tp2", "zero2 tp4"],
}


QUICK = ("zero3 tp1", "zero1 tp2 replicas")
FULL = ("zero1 tp2", "zero3 tp2 disk")


@pytest.mark.parametrize("name", [*QUICK, *full(*FULL), *campaign("zero2 tp2 small", "zero3 tp4")])
def test_run_continues_under_any_layout(tmp_path: Path, name: str) -> None:
    """fp64: padded and tied vocabulary, six heads over four ranks, matrices fused in rows and in columns."""
    tied = list(CASES).index(name) % 2 == 0
    root = str(tmp_path / "root")
    states = run_ranks(4, saved, root, name, tied, timeout=240.0)
    assert all(not differences(state, states[0][0]) for state, _ in states), "ranks have other states"
    shapes = {n.removeprefix("model/"): tuple(v.shape) for n, v in states[0][0].items() if n.startswith("model/")}
    assert shapes == {n: tuple(v.shape) for n, v in made(tied).state_dict().items()}
    assert verify(f"{root}/here") == []
    check(run_ranks(4, loaded, root, CASES[name], tied, timeout=240.0), CASES[name], states[0], steps=True)
    check(run_ranks(1, loaded, root, ["zero3 tp1"], tied), ["zero3 tp1"], states[0], steps=True)
    if name == "zero3 tp4":  # three ranks split the batches of a step differently
        check(run_ranks(3, loaded, root, ["zero3 tp3"], tied, timeout=240.0), ["zero3 tp3"], states[0], steps=False)


@pytest.mark.parametrize("name", [*full("zero2 tp2 bf16"), *campaign("zero3 tp2 bf16 disk")])
def test_master_weights_are_restored_under_other_layouts(tmp_path: Path, name: str) -> None:
    root = str(tmp_path / "root")
    states = run_ranks(4, saved, root, name, False, timeout=240.0)
    loads = ["zero3 tp4 bf16", "zero1 tp1 bf16 host"]
    check(run_ranks(4, loaded, root, loads, False, timeout=240.0), loads, states[0], steps=False)
    check(run_ranks(1, loaded, root, ["zero1 tp1 bf16"], False), ["zero1 tp1 bf16"], states[0], steps=False)


def test_a_ranks_parts_are_stored_in_few_pieces(tmp_path: Path) -> None:
    """Column-split matrices, too: the manifest describes the split, and the documented reader returns full tensors."""
    root = str(tmp_path / "root")
    states = run_ranks(4, saved, root, "zero3 tp2", False, timeout=240.0)
    manifest = read_manifest(f"{root}/here")
    assert manifest.cuts["model/blocks.0.out.weight"].ranges == (((0, 12),), ((12, 24),))
    assert manifest.cuts["model/blocks.1.qkv.weight"].dim == 1, "three matrices side by side in the columns"
    assert "optimizer/0/blocks.0.out.weight/exp_avg" in manifest.cuts and "model/embedding.weight" not in manifest.cuts
    # Each column-split part is divided once, over two shards; so is each of three matrices fused in rows.
    assert all(len(manifest.pieces[name]) <= 4 for name in manifest.cuts)
    assert max(len(pieces) for pieces in manifest.pieces.values()) <= 3 * 2 * 2
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.S)
    documented: dict[str, Any] = {}
    exec(code, documented)
    read = {n: documented["read"](f"{root}/here", n) for n in states[0][0] if n.startswith("model/")}
    assert not differences({n: torch.from_numpy(v) for n, v in read.items()}, {n: states[0][0][n] for n in read})


# ---- Hugging Face files


def tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flat(state).items() if isinstance(value, Tensor)}


@on_ranks(4, timeout=240.0)
@pytest.mark.parametrize("name", ["zero1 tp2", *full("zero3 tp4 small")])
def test_huggingface_files_equal_the_plain_model(tmp_path: Path, name: str) -> None:
    """Files under Hugging Face's names have the plain model's state, and load."""
    with training(plan_of(name, directory(str(tmp_path))), True) as session:
        run, files, adam = EngineRun(session), PortableFiles(), tmp_path / "adam.safetensors"
        train(session, 0, 2)
        state = session.module.state_dict()
        for folder, megabytes in {"one": 5000.0, "several": 0.01}.items():
            write = partial(write_huggingface, path=tmp_path / folder, size_per_shard=megabytes)
            files.save_model(run, write, "save")
            held: dict[str, Tensor] = {}
            for file in sorted((tmp_path / folder).glob("*.safetensors")):
                held |= load_file(file)
            assert not differences(held | {"head.weight": held["embedding.weight"]}, state), folder
        assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
        train(session, 2, 3)
        files.load_model(run, f"{tmp_path}/several", strict=True)
        assert not differences(session.module.state_dict(), state)
        optimizer_state = session.optimizer.state_dict()
        files.save_optimizer(run, 0, partial(write_single_optimizer, path=adam), "save", use_async=True)
        train(session, 3, 4)  # during the asynchronous save
        files.load_optimizer(run, str(adam))
        assert not differences(tensors_of(session.optimizer.state_dict()), tensors_of(optimizer_state))
        shapes = sorted(tuple(value.shape) for value in load_file(adam).values() if value.dim())
        moments = [v for n, v in tensors_of(optimizer_state).items() if not n.endswith("step")]
        assert shapes == sorted(tuple(value.shape) for value in moments)
        files.close()


# ---- parts that several ranks share


class Shared(nn.Module):
    """Two key heads on four ranks: as rows, as columns, and as a bias."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.rows = nn.Linear(5, 8).double()
        self.columns = nn.Linear(8, 5, bias=False).double()


class SharedParts:
    def collect(self, model: Shared, tp_plan: TPPlan) -> None:
        ranks = tp_plan.axis.size
        ranges = tuple(((rank * 2 // ranks * 4, rank * 2 // ranks * 4 + 4),) for rank in range(ranks))
        tp_plan.columns(model.rows, ShardSpec(0, 8, ranges))
        tp_plan.rows(model.columns, ShardSpec(1, 8, ranges))


@on_ranks(4)
@pytest.mark.parametrize(("tp", "others"), [(4, (4, 2, 1)), (2, (4,))])
def test_shared_parts_are_stored_once_and_loaded_by_all(tmp_path: Path, tp: int, others: tuple[int, ...]) -> None:
    """Ranks that did not write the shared part load it, too."""
    plain = Shared(1).state_dict()
    for seed, each in ((1, tp), *((2, other) for other in others)):
        plan = zero(3).but(tp=each, tensor=TensorPlan(architecture=SharedParts()))
        with sharded(Shared(seed), None, plan) as session:
            saver = Checkpointer(session)
            saver.save(tmp_path, "one") if seed == 1 else saver.load(tmp_path)
            saver.close()
            assert not differences(session.module.state_dict(), plain)
            assert not parts_are_of(session, {f"model/{name}": value for name, value in plain.items()})
    assert verify(tmp_path / "one") == []
    for name, pieces in read_manifest(tmp_path / "one").pieces.items():
        assert all(a.start + a.numel == b.start for a, b in pairwise(pieces)), name
