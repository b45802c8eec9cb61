"""Checkpoints of models whose layers are cut: saved under one layout of ranks, they go on under any other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from shardwise.core.checkpoint.format import read_manifest
from shardwise.core.checkpoint.formats.huggingface import write_huggingface
from shardwise.core.checkpoint.formats.native import NativeSource, verify
from shardwise.core.checkpoint.formats.single import write_single_optimizer
from shardwise.core.checkpoint.portable import PortableFiles
from shardwise.core.checkpoint.run import EngineRun
from shardwise.core.checkpoint.session import Checkpointer
from shardwise.core.parallel.tensor import ShardSpec, TPPlan
from shardwise.plan import TensorPlan, zero
from shardwise.session import Session
from shardwise.testing import assert_close, run_ranks
from tests.support.checkpoint_setup import differences, everything
from tests.support.cut_setup import VOCABULARY, made
from tests.support.engine_setup import sharded
from tests.support.sets import campaign, full
from tests.support.tensor_cases import decoder
from tests.support.tensor_runs import adam, flat, plan_of, train, training
from tests.support.tensor_setup import Exact

DOCUMENT = Path(__file__).parents[3] / "docs" / "checkpoint-format.md"
States = tuple[dict[str, Any], dict[str, Any]]
"""Everything as it was saved or loaded, and after two more steps."""


def directory(root: str) -> str:
    """For the disk tier."""
    return root + "-disk"


def parts_are_of(session: Session, state: dict[str, Any]) -> list[str]:
    """Parameters of which this rank holds something else than its part of ``state``, zeros where that is padded."""
    with session.module.gathered():
        facts = zip(session.names(), session.params, session.engine.shards.layout.facts, strict=True)
        values = [(names[0], param.detach().clone(), fact.part) for names, param, fact in facts]
    wholes = [(name, value, part, state[f"model/{name}"].to(value.dtype)) for name, value, part in values]
    return [name for name, v, part, whole in wholes if not torch.equal(v, whole if part is None else part.of(whole))]


def saved(root: str, name: str, tied: bool) -> States:
    """On one rank."""
    with training(plan_of(name, directory(root)), tied) as session:
        train(session, 0, 2)
        saver = Checkpointer(session)
        state = everything(session)
        saver.save(root, "here", data_position=session.mesh.rank, user_state="mine", use_async="small" in name)
        train(session, 2, 4)
        saver.close()
        return state, everything(session)


def loaded(root: str, names: list[str], tied: bool) -> list[States]:
    """The same of runs that go on."""
    found = []
    for name in names:
        with training(plan_of(name, directory(root)), tied, seed=8) as session:
            train(session, 50, 51)  # what is restored replaces what is there
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
def test_a_run_goes_on_under_any_layout(tmp_path: Path, name: str) -> None:
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
    if name == "zero3 tp4":  # three ranks divide a step's batches in another way
        check(run_ranks(3, loaded, root, ["zero3 tp3"], tied, timeout=240.0), ["zero3 tp3"], states[0], steps=False)


@pytest.mark.parametrize("name", [*full("zero2 tp2 bf16"), *campaign("zero3 tp2 bf16 disk")])
def test_masters_of_half_parameters_come_back_under_other_layouts(tmp_path: Path, name: str) -> None:
    root = str(tmp_path / "root")
    states = run_ranks(4, saved, root, name, False, timeout=240.0)
    loads = ["zero3 tp4 bf16", "zero1 tp1 bf16 host"]
    check(run_ranks(4, loaded, root, loads, False, timeout=240.0), loads, states[0], steps=False)
    check(run_ranks(1, loaded, root, ["zero1 tp1 bf16"], False), ["zero1 tp1 bf16"], states[0], steps=False)


def test_what_a_rank_holds_is_stored_in_few_pieces(tmp_path: Path) -> None:
    """Of matrices that are cut in their columns too; the file says how, and every reader has the whole."""
    root = str(tmp_path / "root")
    states = run_ranks(4, saved, root, "zero3 tp2", False, timeout=240.0)
    manifest = read_manifest(f"{root}/here")
    assert manifest.cuts["model/blocks.0.out.weight"].ranges == (((0, 12),), ((12, 24),))
    assert manifest.cuts["model/blocks.1.qkv.weight"].dim == 1, "three matrices side by side in the columns"
    assert "optimizer/0/blocks.0.out.weight/exp_avg" in manifest.cuts and "model/embedding.weight" not in manifest.cuts
    # Each part of a matrix cut in its columns is divided once, over two shards; of three fused in rows each is.
    assert all(len(manifest.pieces[name]) <= 4 for name in manifest.cuts)
    assert max(len(pieces) for pieces in manifest.pieces.values()) <= 3 * 2 * 2
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.S)
    documented: dict[str, Any] = {}
    exec(code, documented)
    with NativeSource(f"{root}/here") as source:
        for name, fact in source.tensors().items():
            if name.startswith("model/"):
                value = source.read(name, 0, fact.numel).view(fact.shape)
                assert torch.equal(value, states[0][0][name]), name
                assert torch.equal(torch.from_numpy(documented["read"](f"{root}/here", name)), value), name


# ---- files of others


def kept_files(root: str, name: str) -> None:
    """Files in Hugging Face's names hold what the plain model's state has, and are taken over."""
    with training(plan_of(name, directory(root)), True) as session:
        run, files = EngineRun(session), PortableFiles()
        train(session, 0, 2)
        state = session.module.state_dict()
        sizes = {"one": 5000.0, "several": 0.01}
        for folder, megabytes in sizes.items():
            files.save_model(run, partial(write_huggingface, path=f"{root}/{folder}", size_per_shard=megabytes), "save")
            held: dict[str, Tensor] = {}
            for file in sorted(Path(root, folder).glob("*.safetensors")):
                held |= load_file(file)
            assert not differences(held | {"head.weight": held["embedding.weight"]}, state), folder
        assert len(list(Path(root, "several").glob("*.safetensors"))) > 2
        train(session, 2, 3)
        files.load_model(run, f"{root}/several", strict=True)
        assert not differences(session.module.state_dict(), state)
        assert session.optimizer is not None
        optimizer_state = session.optimizer.state_dict()
        files.save_optimizer(
            run, 0, partial(write_single_optimizer, path=f"{root}/adam.safetensors"), "save", use_async=True
        )
        train(session, 3, 4)  # while it is written
        files.load_optimizer(run, f"{root}/adam.safetensors")
        assert not differences(tensors_of(session.optimizer.state_dict()), tensors_of(optimizer_state))
        shapes = sorted(tuple(value.shape) for value in load_file(f"{root}/adam.safetensors").values() if value.dim())
        moments = [v for n, v in tensors_of(optimizer_state).items() if not n.endswith("step")]
        assert shapes == sorted(tuple(value.shape) for value in moments)
        files.close()


def tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flat(state).items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("name", ["zero1 tp2", *full("zero3 tp4 small")])
def test_model_files_are_those_of_the_plain_model(tmp_path: Path, name: str) -> None:
    assert run_ranks(4, kept_files, str(tmp_path), name, timeout=240.0) == [None] * 4


def llama(words: int = VOCABULARY) -> LlamaForCausalLM:
    """Six heads that read two key heads; a vocabulary of 29."""
    torch.manual_seed(3)
    config = decoder(
        "Llama", attention_bias=True, attn_implementation="eager", tie_word_embeddings=True, vocab_size=words
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).double()
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    return model


@contextmanager
def llama_run(tp: int, words: int = VOCABULARY) -> Iterator[Session]:
    model = llama(words)
    plan = zero(3).but(tp=tp, tensor=TensorPlan(vocabulary_multiple=4, parallel_output=False))
    with sharded(model, adam(model), plan) as session:
        yield session


def llama_trained(session: Session, first: int, last: int) -> None:
    for step in range(first, last):
        ids = torch.randint(0, VOCABULARY, (4, 3, 7), generator=torch.Generator().manual_seed(step))
        for each in ids.chunk(session.mesh.size)[session.mesh.rank]:
            with Exact():
                loss = session.module(input_ids=each, labels=each).loss
            session.backward(loss * session.mesh.size / 4)
        for optimizer in session.optimizers:
            optimizer.step()


def llama_saved(root: str, tp: int) -> States:
    with llama_run(tp) as session:
        llama_trained(session, 0, 2)
        saver, files = Checkpointer(session), PortableFiles()
        saver.save(root, "here")
        model = session.module.unwrap()
        write = partial(write_huggingface, path=f"{root}/model", size_per_shard=0.01, config=model.config)
        files.save_model(EngineRun(session), write, "save the model")
        state = everything(session)
        llama_trained(session, 2, 4)
        assert not parts_are_of(session, everything(session)), "holders of the same have other values"
        saver.close()
        files.close()
        return state, everything(session)


def llama_loaded(root: str, tp: int) -> States:
    with llama_run(tp) as session:
        saver = Checkpointer(session)
        saver.load(root)
        state = everything(session)
        assert not parts_are_of(session, state)
        llama_trained(session, 2, 4)
        saver.close()
        return state, everything(session)


@pytest.mark.parametrize("tp", [*full(4), *campaign(2)])
def test_a_llama_goes_on_and_from_pretrained_loads_it(tmp_path: Path, tp: int) -> None:
    """Over four ranks two have the same key head, and keep it the same."""
    root = str(tmp_path / "root")
    states = run_ranks(4, llama_saved, root, tp, timeout=240.0)
    for ranks, other in ((4, 6 - tp), (4, 1), (1, 1)):
        found = [[each] for each in run_ranks(ranks, llama_loaded, root, other, timeout=240.0)]
        check(found, [f"tp {other}"], states[0], steps=True)
    model = LlamaForCausalLM.from_pretrained(f"{root}/model", dtype=torch.float64)
    assert (model.config.vocab_size, model.config.num_key_value_heads) == (VOCABULARY, 2)
    assert len(list(Path(root, "model").glob("*.safetensors"))) > 2
    expected = {n.removeprefix("model/"): v for n, v in states[0][0].items() if n.startswith("model/")}
    assert not differences(dict(model.state_dict()), expected)
    wrong = {n for n, v in llama().state_dict().items() if v.shape != expected[n].shape or torch.equal(v, expected[n])}
    assert not wrong, "a state that steps did not change"


def grown(root: str, tp: int, how: str) -> dict[str, Any]:
    """With a larger vocabulary than was saved."""
    with llama_run(tp, VOCABULARY + 6) as session:
        session.checkpoints.load(root, rows={"lm_head.weight": how})
        state = everything(session)
        assert not parts_are_of(session, state)
        return state


@pytest.mark.full
def test_a_vocabulary_grows_under_another_cut(tmp_path: Path) -> None:
    """New rows are what they are without a cut: kept, or the mean; a rank has some of both, and padding."""
    root = str(tmp_path / "root")
    run_ranks(4, llama_saved, root, 2, timeout=240.0)
    for how in ("keep", "mean"):
        (plain,) = run_ranks(1, grown, root, 1, how)
        assert plain["model/lm_head.weight"].shape == (VOCABULARY + 6, 24)
        kept = torch.equal(
            plain["model/lm_head.weight"][VOCABULARY:], llama(VOCABULARY + 6).lm_head.weight[VOCABULARY:]
        )
        assert kept == (how == "keep")
        for state in run_ranks(4, grown, root, 4, how, timeout=240.0):
            assert not differences(state, plain), how


# ---- what several ranks hold alike


class Shared(nn.Module):
    """Two key heads for four ranks: as rows, as columns, and as a bias."""

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


def shared(root: str, tp: int, save: bool) -> list[str]:
    """Parameters that are not as they were saved on this rank: also where it is not the first to hold them."""
    model, plain = Shared(1 if save else 2), Shared(1).state_dict()
    plan = zero(3).but(tp=tp, tensor=TensorPlan(architecture=SharedParts()))
    with sharded(model, None, plan) as session:
        saver = Checkpointer(session)
        saver.save(root, "one") if save else saver.load(root)
        saver.close()
        assert not differences(session.module.state_dict(), plain)
        return parts_are_of(session, {f"model/{name}": value for name, value in plain.items()})


def test_what_several_ranks_hold_is_stored_once_and_comes_back_to_all(tmp_path: Path) -> None:
    for tp, others in ((4, (4, 2, 1)), (2, (4,))):
        root = str(tmp_path / str(tp))
        assert run_ranks(4, shared, root, tp, True) == [[]] * 4
        assert verify(f"{root}/one") == []
        for name, pieces in read_manifest(f"{root}/one").pieces.items():
            assert all(a.start + a.numel == b.start for a, b in pairwise(pieces)), name
        for other in others:
            assert run_ranks(4, shared, root, other, False) == [[]] * 4, (tp, other)
