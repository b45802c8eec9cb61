"""The user's own model, sharded in place: what programs do with it under every front-end, on all ranks and on one."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
import shardwise.deepspeed as deepspeed
from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from shardwise.testing import assert_close, run_ranks

RANKS, ROWS, LR, STEPS = 2, 3, 0.1, 3
State = dict[str, Tensor]


class Body(nn.Module):
    """A class of the user's, with methods and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 10), nn.Linear(10, 4)
        self.register_buffer("offset", torch.full((4,), 0.5))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))) * self.factor + self.offset

    def generate(self, x: Tensor) -> Tensor:
        return self(x).argmax(-1)  # type: ignore[no-any-return]


def body(dtype: torch.dtype = torch.float32) -> Body:
    torch.manual_seed(3)
    return Body().to(dtype)


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def plain() -> State:
    """After :data:`STEPS` steps of one process on all rows, the factor changed after the first."""
    model = body()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        sum(model(rows(step, rank)).square().mean() / RANKS for rank in range(RANKS)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        model.factor = 2.0
    return dict(model.state_dict())


@dataclass
class Front:
    """What a front-end made of a model.

    Attributes:
        own: what it gives for the user's model.
        wrapped: what it returned, which runs the model as well.
        backward, step: of a loss, and after it.
        close: the end of it.
    """

    own: nn.Module
    wrapped: nn.Module
    backward: Callable[[Tensor], Any]
    step: Callable[[], Any]
    close: Callable[[], Any]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def stepping(optimizer: Any) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def native(model: nn.Module, stage: int, precision: str) -> Front:
    session = shardwise.shard(model, sgd(model), stage=stage, precision=precision)
    assert session.model is session.module.unwrap() is session.module.module
    return Front(session.model, session.module, session.backward, stepping(session.optimizer), session.close)


def as_deepspeed(model: nn.Module, stage: int, precision: str) -> Front:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    engine = deepspeed.initialize(model=model, config=config)[0]
    assert next(name for name, _ in engine.named_parameters()) == "module.first.weight"
    return Front(engine.module, engine, engine.backward, engine.step, engine.destroy)


def boosted(plugin: Any, **arguments: Any) -> Callable[[nn.Module], Front]:
    def make(model: nn.Module) -> Front:
        booster = Booster(plugin=plugin(**arguments))
        wrapped, optimizer, *_ = booster.boost(model, sgd(model))
        assert wrapped.unwrap() is model
        backward, step = partial(booster.backward, optimizer=optimizer), stepping(optimizer)
        return Front(wrapped.module, wrapped, backward, step, booster.close)

    return make


FRONTS: dict[str, tuple[Callable[[nn.Module], Front], bool, str]] = {
    # by name: what makes it, whether parameters stay gathered, and in which numbers they are
    **{
        f"{kind} {stage} {precision}": (lambda m, f=front, s=stage, p=precision: f(m, s, p), stage < 3, precision)
        for kind, front, stages in (("native", native, (1, 3)), ("deepspeed", as_deepspeed, (0, 1, 3)))
        for stage in stages
        for precision in ("fp32", "bf16")
    },
    "booster zero2": (boosted(LowLevelZeroPlugin, stage=2, precision="bf16"), True, "bf16"),
    "booster gemini": (boosted(GeminiPlugin, precision="fp32", min_chunk_size_m=1e-5), False, "fp32"),
}


def whole(front: Front) -> State:
    """Every rank calls it; copies."""
    return {name: value.detach().float().clone() for name, value in front.wrapped.state_dict().items()}


def first_alone(front: Front, gathered: bool, dtype: torch.dtype, name: str) -> None:
    """What the first rank does without the others, who go on to a barrier."""
    own: Any = front.own
    state: State = {}
    if dist.get_rank() == 0:
        str(own), str(front.wrapped), dict(own.named_parameters())
        if gathered:
            # Before anything else: what a step has left under way has to be waited for.
            state = {key: value.clone() for key, value in own.state_dict().items()}
            assert {value.dtype for key, value in state.items() if key != "offset"} == {dtype}, name
            first = {key.removeprefix("first."): value for key, value in state.items() if key.startswith("first.")}
            assert_close(dict(own.first.state_dict()), first, 0.0, name)
            assert all(torch.isfinite(param.data.norm()) for param in own.parameters())
        else:
            said = r"state_dict\(\) of the sharded {}.*first.weight.*every rank"
            with pytest.raises(RuntimeError, match=said.format("Body")):
                own.state_dict()
            names = own.first.state_dict()  # of a layer these alone are there
            weight = names["weight"]
            assert list(names) == ["weight", "bias"] and weight.shape == own.first.weight.shape
            assert re.search(said.format("Linear"), str(weight))
            reads: list[Callable[[], object]] = [
                weight.clone,
                weight.sum,
                weight.tolist,
                lambda: copy.deepcopy(names),
                lambda: torch.save(names, io.BytesIO()),
                lambda: torch.empty(weight.shape).copy_(weight),
                lambda: safetensors.torch.save(names),
            ]
            for read in reads:
                with pytest.raises(RuntimeError, match=said.format("Linear")):
                    read()
    dist.barrier()
    after = whole(front)
    if state:
        assert_close({k: v.float() for k, v in state.items()}, after, 0.0 if dtype == torch.float32 else 4e-3, name)


def loads(front: Front, name: str) -> None:
    """``load_state_dict`` of the model itself takes full values, masters included, or changes nothing."""
    own: Any = front.own
    before = whole(front)
    # A buffer has no master, so what it is given is a number of 16 bits.
    given = {key: value + (0.25 if key == "offset" else 1 / 3) for key, value in before.items()}
    assert str(own.load_state_dict(given)) == "<All keys matched successfully>"
    assert_close(whole(front), given, 0.0 if "ddp" not in name else 1e-7, f"{name}: loaded")
    with pytest.raises(RuntimeError, match=r"last\.bias: \(5,\)"):
        own.load_state_dict({**before, "last.bias": torch.zeros(5)})
    partly = own.load_state_dict({"last.bias": before["last.bias"]}, strict=False)
    assert "first.weight" in partly.missing_keys and not partly.unexpected_keys
    assert_close(whole(front), {**given, "last.bias": before["last.bias"]}, 1e-7, f"{name}: one of it")


def _habits(name: str) -> State:
    make, gathered, precision = FRONTS[name]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = body()
    front = make(model)
    own: Any = front.own
    assert own is model and isinstance(own, Body), name
    assert [each for each, _ in own.named_parameters()] == [each for each, _ in body().named_parameters()], name
    for step in range(STEPS):
        # Called by itself, and through what the front-end returned.
        run = own if step != 1 else front.wrapped
        front.backward(run(rows(step, dist.get_rank()).to(dtype)).float().square().mean())
        front.step()
        if step == 0:
            first_alone(front, gathered, dtype, f"{name}: after a step")
            assert front.wrapped.factor == 1.0
            own.factor = 2.0
            assert front.wrapped.factor == 2.0
    trained = whole(front)
    x = rows(9, 0).to(dtype)
    with torch.no_grad():
        assert torch.equal(own.generate(x), own(x).argmax(-1)), name
        assert not own.eval().first.training and own.train().first.training
    if not isinstance(front.wrapped, deepspeed.DeepSpeedEngine):
        front.wrapped.factor = 3.0  # what the model has and its wrapper has not is the model's
        assert own.factor == 3.0 and "factor" not in vars(front.wrapped), name
        own.mark = 1
        del front.wrapped.mark
        assert not hasattr(own, "mark"), name
    loads(front, name)
    front.close()
    return trained


def _everywhere(names: list[str]) -> dict[str, State]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: _habits(name) for name in names}


QUICK = ["native 3 fp32", "deepspeed 1 bf16", "booster gemini"]
"""Each way to wrap a model once."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="one of each"),
        pytest.param([name for name in FRONTS if name not in QUICK], id="others", marks=pytest.mark.full),
    ],
)
def test_the_model_that_every_front_end_gives_is_the_users_own(names: list[str]) -> None:
    expected = plain()
    for found in run_ranks(RANKS, _everywhere, names, timeout=240.0):
        for name, state in found.items():
            assert_close(state, expected, 1e-5 if FRONTS[name][2] == "fp32" else 4e-2, name)
