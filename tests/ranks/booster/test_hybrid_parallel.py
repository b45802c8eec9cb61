"""HybridParallelPlugin behind the Booster, against plain PyTorch in one process: fp64, dp x tp on four ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hybrid_setup import MAX_NORM, POLICIES, STEPS, Texts, made, optimizer_of, plain
from torch import Tensor

from shardwise.booster import Booster
from shardwise.booster.plugin import HybridParallelPlugin
from shardwise.testing import assert_close, run_ranks

RANKS, BATCH = 4, 2


def wide(numbers: dict[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _trained(kind: str, given: dict[str, Any], changes: dict[str, Any]) -> None:
    plugin = HybridParallelPlugin(pp_size=1, precision="fp32", max_norm=MAX_NORM, **given)
    tp, (replica, replicas) = plugin.tp_size, plugin.data_parallel()
    assert (replica, replicas) == (dist.get_rank() // tp, dist.get_world_size() // tp)
    model = made(kind, **changes)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(Texts(STEPS * replicas * BATCH), BATCH)
    model, optimizer, *_ = booster.boost(model, optimizer_of(model), None, loader)
    session = plugin.session(model)
    facts = session.engine.layout.facts
    assert (session.mesh.tensor.size, session.mesh.size) == (tp, replicas)
    assert tp == 1 or any(fact.part is not None for fact in facts)
    for (loss, norm, values), inputs in zip(plain(kind, replicas, BATCH, **changes), loader, strict=True):
        out = model(**inputs)
        told = everywhere((out.loss.item(), inputs["input_ids"]))
        for first in range(0, len(told), tp):  # ranks with parts of one model see the same, and say the same
            assert all(one[0] == told[first][0] for one in told[first : first + tp])
            assert all(torch.equal(one[1], told[first][1]) for one in told[first : first + tp])
        booster.backward(out.loss, optimizer)
        optimizer.step()
        mean = sum(one[0] for one in told) / len(told)
        numbers = wide({"loss": mean, "norm": optimizer.get_grad_norm()})
        assert_close(numbers, wide({"loss": loss, "norm": norm}), 1e-10, "loss and norm")
        optimizer.zero_grad()
        with session.module.gathered():
            held = {fact.names[0]: p.detach() for fact, p in zip(facts, session.params, strict=True)}
            parts = {f.names[0]: values[f.names[0]] if f.part is None else f.part.of(values[f.names[0]]) for f in facts}
            assert_close(held, parts, 1e-9, "parameters")
    booster.close()


def _with_policy(kind: str, given: dict[str, Any]) -> None:
    _trained(kind, {"custom_policy": POLICIES[kind](), **given}, {})


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_policy_of_the_users_own(kind: str, zero_stage: int) -> None:
    run_ranks(RANKS, _with_policy, kind, {"tp_size": 2, "zero_stage": zero_stage, "parallel_output": False})
