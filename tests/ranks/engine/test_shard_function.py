"""shardwise.shard with tensor, pipeline and sequence parallelism against plain PyTorch in fp64; the default device.

``torch.set_default_device`` must not change where the library creates its tensors; the meta device stands for a GPU.
"""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

import shardwise
from shardwise.plan import Plan
from shardwise.testing import assert_close, run_ranks
from tests.sources import ROOT
from tests.support.engine_setup import PLANS, data, one_mesh, seeded, sharded
from tests.support.hybrid_setup import MAX_NORM, STEPS, VOCABULARY, Texts, made, optimizer_of, plain
from tests.support.on_ranks import everywhere
from tests.support.sets import full

RANKS, BATCH = 4, 2
SETTINGS: list[dict[str, Any]] = [
    {"stage": 0, "tp": 2},
    {"stage": 3, "tp": 2, "offload": "host"},
    {"stage": 1, "pp": 2, "microbatches": 2},
    {"stage": 2, "pp": 2, "tp": 2, "sequence": "split_gather"},
    {"stage": 1, "pp": 2, "sp": 2, "microbatches": 2},
    {"stage": 2, "pp": 2, "sp": 2, "sequence": "ring_attn"},
]


def criterion(outputs: Any, inputs: Any) -> Tensor:
    # With logits sharded by vocabulary, the model's own loss is computed in fp64.
    if outputs.logits.shape[:2] != inputs["labels"].shape or outputs.logits.shape[-1] != VOCABULARY:
        return outputs.loss
    return functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


def _trained(settings: dict[str, Any]) -> None:
    model = made("llama")
    session = shardwise.shard(model, optimizer_of(model), max_norm=MAX_NORM, **settings)
    tp, pp, sp = (settings.get(name, 1) for name in ("tp", "pp", "sp"))
    assert session.data_ranks == RANKS // (tp * pp * sp)
    # With split sequences the loss is that of transformers, in fp32.
    most = 1e-9 if sp == 1 else 1e-6
    texts = Texts(STEPS * BATCH * session.data_ranks)
    # With unevenly padded labels, the mean over micro-batches would differ from the mean over the batch.
    texts.items["labels"] = texts.items["input_ids"]
    sampler: Any = DistributedSampler(texts, session.data_ranks, session.data_rank, shuffle=False)
    facts = session._engine.shards.layout.facts
    oracle = plain("llama", session.data_ranks, BATCH, of_parts=sp == 1, full=True)
    for (loss, norm, values), inputs in zip(oracle, DataLoader(texts, BATCH, sampler=sampler), strict=True):
        if session.pipeline is not None:
            own = session.pipeline.everywhere(session.pipeline.step(inputs, criterion, train=True).loss)
        else:
            own = session.module(**inputs).loss
            session.backward(own)
        losses = everywhere(own.item())
        session.optimizer.step()
        assert abs(sum(losses) / RANKS - loss) < most * loss
        assert abs(session.optimizer.get_grad_norm() - norm) < most * norm
        session.optimizer.zero_grad()
        with session.module.gathered():
            held = {fact.names[0]: p.detach() for fact, p in zip(facts, session.params, strict=True)}
            parts = {f.names[0]: values[f.names[0]] if f.part is None else f.part.of(values[f.names[0]]) for f in facts}
            assert_close(held, parts, most, "parameters")
    session.close()


@pytest.mark.parametrize("at", [3, *full(0, 1, 2, 4, 5)])
def test_shard_with_model_parallelism(at: int) -> None:
    run_ranks(RANKS, _trained, SETTINGS[at])


MADE = {"tensor", "zeros", "empty", "ones", "full", "arange", "rand", "randn", "randint", "randperm", "eye", "linspace"}
ROOMS = (
    *("comm", "mesh", "checkpoint", "shards", "grads", "engine", "checks", "update", "base/device", "memory"),
    *("optim", "parallel/pipeline"),
)


@contextmanager
def by_default(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        # None, because "cpu" would leave torch's function mode on, and patched tensor methods would be called twice.
        torch.set_default_device(None)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(plan: Plan, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save after two of four steps, load, and repeat the last two; return the states after the load and at the end."""
    model = seeded(net)
    batches = {(rank, step): data(rank, step) for rank in range(2) for step in range(4)}
    with by_default("meta"), one_mesh(plan) as mesh, sharded(model, sgd(model), plan, mesh) as session:
        for step in range(4):
            session.backward(session.module(batches[mesh.rank, step]).square().mean())
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            session.optimizer.step()
            session.optimizer.zero_grad()
            if step == 1:
                session.checkpoints.save(folder, "two")
        session.checkpoints.load(folder, "two")
        loaded = session.module.state_dict()
        for step in (2, 3):
            session.backward(session.module(batches[mesh.rank, step]).square().mean())
            session.optimizer.clip_grad_by_norm(0.5)
            session.optimizer.step()
            session.optimizer.zero_grad()
        return loaded, session.module.state_dict()


@pytest.mark.parametrize("name", ["zero3", *full("ddp", "zero2", "zero3_gloo")])
def test_default_device_does_not_change_training_and_checkpoints(name: str, tmp_path: Path) -> None:
    model, found = seeded(net), []
    optimizer = sgd(model)
    for step in range(4):
        for rank in range(2):
            (model(data(rank, step)).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append({key: value.clone() for key, value in model.state_dict().items()})
    for loaded, state in run_ranks(2, trained, PLANS[name], str(tmp_path)):
        assert_close(loaded, found[1], 1e-6, "loaded")
        assert_close(state, found[3], 1e-6, "trained on")


def test_tensor_factories_name_their_device() -> None:
    silent = []
    for path in sorted(path for room in ROOMS for path in (ROOT / "shardwise" / "core" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MADE:
                of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
                if of_torch and not any(each.arg in ("device", None) for each in node.keywords):
                    silent.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert silent == []
