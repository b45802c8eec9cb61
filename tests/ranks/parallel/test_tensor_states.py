"""State dicts under tensor parallelism equal those of the plain model: parameters, optimizer state, gradients."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.parallel.float8 import linear
from shardwise.core.parallel.tensor.layers import CutLayer
from shardwise.session import build
from shardwise.testing import assert_close
from tests.support.checkpoint_setup import differences, everything
from tests.support.on_ranks import on_ranks
from tests.support.sets import full
from tests.support.tensor_model import VOCABULARY, WIDTH, Block, made
from tests.support.tensor_runs import BATCHES, adam, flat, loss_of, passes, plan_of, train, training


def plain_steps(steps: int) -> dict[str, Tensor]:
    """Return Adam's state after some steps of the plain model."""
    model = made(True)
    optimizer = adam(model)
    for step in range(steps):
        optimizer.zero_grad()
        for index in range(BATCHES):
            (loss_of(model, step, index) / BATCHES).backward()
        optimizer.step()
    return {n: v for n, v in flat(optimizer.state_dict()).items() if isinstance(v, Tensor)}


@on_ranks(4, timeout=240.0)
@pytest.mark.parametrize("name", [*full("zero1 tp2"), "zero3 tp4", *full("zero3 tp2 small disk")])
def test_states_equal_those_of_the_plain_model(tmp_path: Path, name: str) -> None:
    """States are unsharded on all ranks, and can be loaded again."""
    with training(plan_of(name, str(tmp_path / "disk")), True) as session:
        train(session, 0, 2)
        state, optimizer_state = session.module.state_dict(), session.optimizer.state_dict()
        full = dict(session.module.full_state())
        assert list(state) == list(made(True).state_dict()) and not differences(full, state)
        outlines = {n: tuple(v.shape) for n, v in session.module.state_layout().items()}
        assert outlines == {n: tuple(v.shape) for n, v in state.items()}
        only = session.module.state_dict(only_rank_0=True), session.optimizer.state_dict(only_rank_0=True)
        assert bool(only[0]) == bool(only[1]["state"]) == session.mesh.is_rank0
        train(session, 2, 3)
        assert differences(session.module.state_dict(), state), "a step that changes nothing shows nothing"
        session.module.load_state_dict(state)
        session.optimizer.load_state_dict(optimizer_state)
        found = everything(session)
        assert not differences({n.removeprefix("model/"): v for n, v in found.items() if n[0] == "m"}, state)
        assert not differences({n: found[n] for n in found if n[0] == "0"}, flat(optimizer_state))
        with pytest.raises(RuntimeError, match=r"embedding.weight: \(32, 24\) instead of \(29, 24\)"):
            session.module.load_state_dict(state | {"embedding.weight": torch.zeros(32, 24)})
    model = made(True)
    model.load_state_dict(state)
    optimizer = adam(model)
    optimizer.load_state_dict(optimizer_state)
    shapes = [p.shape for group in optimizer.param_groups for p in group["params"]]
    assert [entry["exp_avg"].shape for _, entry in sorted(optimizer_state["state"].items())] == shapes
    tensors = plain_steps(2)
    assert_close({n: flat(optimizer_state)[n] for n in tensors}, tensors, 1e-9, "Adam's state")


@on_ranks(4, timeout=240.0)
@pytest.mark.parametrize("name", ["zero1 tp2", *full("zero3 tp4", "zero2 tp2 small")])
def test_gradients_prior_state_and_unshard_give_full_tensors(tmp_path: Path, name: str) -> None:
    """Gradients are the plain model's, prior optimizer state is sharded along, and ``unshard`` returns the plain
    model."""
    plain, model = made(False), made(False)
    reference, optimizer = adam(plain), adam(model)
    for step in range(2):
        reference.zero_grad()
        for index in range(BATCHES):
            (loss_of(plain, step, index) / BATCHES).backward()
        if step == 0:
            reference.step()
            model.load_state_dict(plain.state_dict())
            optimizer.load_state_dict(reference.state_dict())
    session = build(model, optimizer, plan_of(name, str(tmp_path / "disk")))
    before = everything(session)
    assert not differences({n: v for n, v in before.items() if n[0] == "0"}, flat(reference.state_dict()))
    passes(session, 1)
    grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert_close(session.full_gradients(), grads, 1e-10, "gradients")
    session.optimizer.step()
    reference.step()
    state = session.module.state_dict()
    assert_close(state, dict(plain.state_dict()), 1e-9, "after a step")
    cut = [module for module in model.modules() if isinstance(module, CutLayer)]
    for module in cut:
        vars(module)["multiply"] = linear  # as use_fp8 sets it
    session.unshard()
    assert cut and not any("multiply" in vars(module) for module in cut)
    session.mesh.close()
    assert not differences(dict(model.state_dict()), state)
    first = model.blocks[0]
    assert isinstance(first, Block) and type(first.out) is nn.Linear and first.out.in_features == WIDTH
    assert model.head.out_features == VOCABULARY
    ids = torch.arange(6).view(1, 6)
    assert_close({"logits": model(ids)}, {"logits": plain(ids)}, 1e-9, "the plain model again")
