"""Engines whose data-parallel ranks share sequences, compared step by step with plain PyTorch on the same batches."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwise.plan import Plan, SequencePlan, TensorPlan, zero
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import adam, sharded
from tests.support.sequence_setup import batch_of
from tests.support.sets import full
from tests.support.step_checks import assert_numbers
from tests.support.tensor_cases import CASES
from tests.support.tensor_setup import Case, Exact, loss_of

STEPS, MAX_NORM = 3, 0.3

LAYOUTS: list[tuple[str, Plan, str]] = [
    ("sp4 zero1", zero(1).but(sp=4), "all_to_all"),
    ("dp2 sp2 zero3", zero(3).but(sp=2), "all_to_all"),
    ("dp2 sp2 zero3, gloo", zero(3).but(sp=2, shared_memory=False), "ring_attn"),
    ("tp2 sp2 zero1", zero(1).but(sp=2, tp=2), "all_to_all"),
    ("dp2 sp2 zero1, replicas", zero(1, dp_replicate=2).but(sp=2), "ring_attn"),
    ("tp2 sp2 zero3", zero(3).but(sp=2, tp=2), "ring_attn"),
    ("sp4 zero2", zero(2).but(sp=4), "ring_attn"),
]


def batch(case: Case, step: int, which: int) -> dict[str, Tensor]:
    """Return the batch of the sequence-parallel group number ``which``; every other step its length divides evenly."""
    given = batch_of(case, length=(11, 8, 13)[step], padded=("right", "", "left")[step])
    generator = torch.Generator().manual_seed(10 * step + which)
    ids = torch.randint(0, 27, given["input_ids"].shape, generator=generator)
    return given | {"input_ids": torch.where(given["input_ids"] == 27, 27, ids)}


def many_heads() -> Case:
    case = CASES["llama"]()[1]
    return replace(case, config=case.config.__class__(**(case.config.to_dict() | {"num_attention_heads": 8})))


Steps = tuple[list[float], list[list[float]], dict[str, Tensor]]


@functools.cache
def plain_steps(groups: int) -> Steps:
    """Return clipped norms and each group's losses by step, and the final parameters; the test computes them for its
    ranks."""
    case = many_heads()
    model = case.made()
    optimizer = adam(model, 0.02)
    norms, losses = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append([])
        for which in range(groups):
            with Exact():
                loss = loss_of(model(**batch(case, step, which)))
            losses[-1].append(loss.item())
            (loss / groups).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return norms, losses, {name: param.detach() for name, param in model.named_parameters()}


def trained(plan: Plan, mode: str, steps_of_plain: Steps) -> None:
    case = many_heads()
    norms, losses, expected = steps_of_plain
    tensor = TensorPlan(vocabulary_multiple=4)
    plan = plan.but(max_norm=MAX_NORM, sequence=SequencePlan(mode=mode), tensor=tensor)  # type: ignore[arg-type]
    model = case.made()
    with sharded(model, adam(model, 0.02), plan) as session:
        which = session.mesh.rank // session.mesh.sequence.size
        for step in range(STEPS):
            with Exact():
                loss = loss_of(session.module(**batch(case, step, which)))
            session.backward(loss)
            session.optimizer.step()
            found = {"loss": loss.item(), "norm": session.optimizer.get_grad_norm()}
            assert_numbers(found, {"loss": losses[step][which], "norm": norms[step]}, 1e-11, f"step {step}")
        state = session.module.state_dict()
        assert_close({name: state[name] for name in expected}, expected, 1e-11, mode)
        session.unshard()
        with Exact():  # after unshard the model is on this rank alone
            alone = loss_of(model(**batch(case, 0, session.mesh.rank)))
    plain = case.made()
    plain.load_state_dict(expected, strict=False)
    with Exact():
        after = loss_of(plain(**batch(case, 0, session.mesh.rank)))
    assert_close({"loss": alone.detach()}, {"loss": after.detach()}, 1e-11, "after unshard()")
    assert all("forward" not in vars(module) for module in model.modules())
    assert model.config._attn_implementation == "sdpa"


QUICK = ("dp2 sp2 zero3", "tp2 sp2 zero3")


def in_sets() -> list[object]:
    rows = [(name, pytest.param(name, plan, mode, id=name)) for name, plan, mode in LAYOUTS]
    return [each for name, row in rows for each in ([row] if name in QUICK else full(row))]


@pytest.mark.parametrize(("name", "plan", "mode"), in_sets())
def test_steps_equal_those_of_full_sequences(name: str, plan: Plan, mode: str) -> None:
    groups = 4 // plan.mesh.tp // plan.mesh.sp
    assert groups == (2 if "dp2" in name else 1)
    run_ranks(4, trained, plan, mode, plain_steps(groups), timeout=300.0)
