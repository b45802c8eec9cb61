"""Which optimizers can be stepped in flat parts is found by trying, and the trial leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.optim import CPUAdam, FusedAdam, HybridAdam
from shardwise.core.optim.element_wise import MOST_GROUPS, couples_elements, couples_parameters
from shardwise.core.update.tiles import needs_whole_tensors

Rule = Callable[["Own", Tensor, Tensor, dict[str, Any]], None]


class Own(torch.optim.Optimizer):
    """Somebody's optimizer: ``rule(self, values, gradient, state)`` for each parameter."""

    def __init__(self, params: Any, rule: Rule, lr: float | Tensor = 0.01, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})
        self.rule, self.calls = rule, 0
        self.seen: list[Any] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    gradient = param.grad * float(group["lr"])
                    self.rule(self, param, gradient, self.state[param])


def momentum(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    state["average"] = 0.9 * state.get("average", torch.zeros_like(values)) + gradient
    values.sub_(state["average"])


def counted(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    state["step"] = state.get("step", 0) + 1
    values.sub_(gradient / state["step"])


def signs(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    values.sub_(gradient.sign())


def noise(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    values.sub_(gradient + torch.randn_like(values) * torch.rand_like(values))


def trust_ratio(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    values.sub_(gradient * values.norm() / gradient.norm())


def clipped(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    values.sub_(gradient / gradient.norm().clamp(min=0.1))


def centred(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    values.sub_(gradient - gradient.mean(-1, keepdim=True) if values.dim() > 1 else gradient)


def by_rows(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    state["rows"] = state.get("rows", 0.0) + gradient.square().mean(-1, keepdim=True)
    values.sub_(gradient / state["rows"].sqrt())


def decayed_if_a_matrix(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    values.mul_(0.9 if values.dim() > 1 else 1.0).sub_(gradient)


def counted_by_call(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    values.sub_(gradient / self.calls)


def late(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    counted(self, values, gradient, state)
    if state["step"] == 3:
        trust_ratio(self, values, gradient, state)


def counted_in_a_list(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    self.seen.append(1)
    values.sub_(gradient / len(self.seen))


def factored_if_large(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    (by_rows if min(values.shape) >= 128 and values.dim() > 1 else momentum)(self, values, gradient, state)


FINE = [momentum, counted, signs, noise]
WHOLE = [trust_ratio, clipped, centred, by_rows, decayed_if_a_matrix, late, factored_if_large]
BY_CALL = [counted_by_call, counted_in_a_list]
COUPLED = [*WHOLE, *BY_CALL]


def own(rule: Rule, **options: Any) -> Own:
    return Own([nn.Parameter(torch.ones(2, 2))], rule, **options)


@pytest.mark.parametrize("lr", [0.01, 0.0, 1e-9, torch.tensor(0.0)], ids=str)
@pytest.mark.parametrize("rule", FINE + COUPLED, ids=lambda rule: rule.__name__)
def test_found_by_trying(rule: Rule, lr: float | Tensor) -> None:
    """Also where the learning rate of a warm-up is 0 at first."""
    optimizer = own(rule, lr=lr)
    assert couples_elements(optimizer) == (rule in COUPLED)
    assert couples_parameters(optimizer) == (rule in BY_CALL)
    if rule in BY_CALL:
        with pytest.raises(ValueError, match=r"optimizer Own gives parameters other values.*element_wise=True"):
            needs_whole_tensors(optimizer)
    else:
        assert needs_whole_tensors(optimizer) == (rule in WHOLE)


def test_what_it_says_of_whole_tensors_counts_first() -> None:
    """It is believed, as the refusal of what depends on calls says."""
    for rule in (noise, counted_by_call):
        optimizer: Any = own(rule)
        optimizer.whole_tensors = True
        assert needs_whole_tensors(optimizer)
    with pytest.raises(ValueError, match="whole_tensors=True"):
        needs_whole_tensors(own(counted_by_call))
    optimizer = own(trust_ratio)
    optimizer.element_wise = False
    with pytest.raises(ValueError, match="gives parameters other values"):
        needs_whole_tensors(optimizer)


@pytest.mark.parametrize("rule", [momentum, trust_ratio], ids=lambda rule: rule.__name__)
def test_what_the_optimizer_says_is_believed(rule: Rule) -> None:
    optimizer = own(rule)
    for said in (True, False):
        optimizer.element_wise = said  # type: ignore[attr-defined]
        assert couples_elements(optimizer) == (not said)


@pytest.mark.parametrize("rule", [counted, clipped, counted_in_a_list], ids=lambda rule: rule.__name__)
def test_the_trial_leaves_nothing_behind(rule: Rule) -> None:
    optimizer: Any = own(rule)
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones(2, 2)
    optimizer.step()
    steps_seen = list(optimizer.seen)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    attributes, numbers = dict(vars(optimizer)), torch.get_rng_state()
    groups, state = [dict(group) for group in optimizer.param_groups], {p: dict(s) for p, s in optimizer.state.items()}
    values = param.detach().clone()
    couples_elements(optimizer)
    assert vars(optimizer).keys() == attributes.keys()
    assert all(vars(optimizer)[name] is value for name, value in attributes.items())
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert {p: dict(s) for p, s in optimizer.state.items()} == state
    assert torch.equal(param.detach(), values) and torch.equal(param.grad, torch.ones(2, 2))
    assert torch.equal(torch.get_rng_state(), numbers) and seen == [] and optimizer.calls == 1
    assert optimizer.seen == steps_seen


class Passing(torch.optim.Optimizer):
    """As accelerate's: everything is the base's."""

    def __init__(self, base: Own) -> None:
        self.__dict__["of"] = lambda: base

    param_groups = property(lambda self: self.of().param_groups, lambda self, groups: self.pass_on(groups))  # type: ignore[assignment]
    state = property(lambda self: self.of().state)  # type: ignore[assignment]

    def pass_on(self, groups: list[dict[str, Any]]) -> None:
        self.of().param_groups = groups

    def step(self, closure: Any = None) -> None:
        self.of().step()


def test_one_that_wraps_another_is_not_tried() -> None:
    seen: list[int] = []

    class Noted(Own):
        def step(self, closure: Any = None) -> None:
            seen.append(1)
            super().step(closure)

    param = nn.Parameter(torch.ones(2, 2))
    base = Noted([param], trust_ratio)
    groups = base.param_groups
    param.grad = torch.ones(2, 2)
    wrapped: Any = Passing(base)
    assert not couples_elements(wrapped)
    assert seen == [] and base.param_groups is groups and groups[0]["params"][0] is param
    assert torch.equal(param, torch.ones(2, 2)) and not base.state
    wrapped.element_wise = False
    assert couples_elements(wrapped)


@pytest.mark.parametrize(
    "thing", [threading.Lock(), nn.Linear(1, 1), {"nets": [nn.Linear(1, 1)]}], ids=["lock", "net", "nets"]
)
def test_one_that_cannot_be_copied_is_not_tried(thing: object) -> None:
    seen: list[int] = []
    optimizer: Any = own(lambda *_: seen.append(1))
    optimizer.thing = thing
    assert not couples_elements(optimizer) and seen == []
    assert optimizer.thing is thing


def test_few_groups_are_tried() -> None:
    calls: list[int] = []

    def noted(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        calls.append(1)
        group = self.param_groups[0]
        (trust_ratio if group.get("adapts") or group.get("kind") == "lamb" else momentum)(self, values, gradient, state)

    def tried(options: list[dict[str, Any]]) -> bool:
        calls.clear()
        return couples_elements(Own([{"params": [nn.Parameter(torch.ones(1))], **o} for o in options], noted))

    numbered = [{"name": f"layer {i}", "layer_id": i, "lr_scale": 0.9**i} for i in range(30)]
    assert not tried(numbered) and len(calls) == 18 * MOST_GROUPS
    # A name does not hide what differs otherwise, and may be what tells rules apart.
    named = [{"name": f"layer {i}"} for i in range(30)]
    assert tried([*named, {"name": "last", "adapts": True}])
    assert tried([{"kind": "adam"}, {"kind": "adam"}, {"kind": "lamb"}])
    assert not tried([{"kind": "adam"}, {"kind": "adam"}]) and len(calls) == 18


def test_one_that_cannot_be_tried_is_left_to_fail_by_itself() -> None:
    def fails(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        raise RuntimeError("only on Sundays")

    optimizer = own(fails)
    assert not couples_elements(optimizer)
    assert optimizer.calls == 0 and len(optimizer.param_groups[0]["params"]) == 1


ELEMENT_WISE = [
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
    torch.optim.SGD, CPUAdam, FusedAdam, HybridAdam,
]  # fmt: skip


@pytest.mark.parametrize("kind", ELEMENT_WISE, ids=lambda kind: kind.__name__)
def test_torchs_and_ours_pass(kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not asked, but would be found to be what they are."""
    optimizer: Any = kind([nn.Parameter(torch.ones(2))], lr=0.1)  # type: ignore[call-arg]
    steps: list[bool] = []
    step = kind.step

    def noted(self: Any) -> None:
        step(self)
        steps.append(True)

    monkeypatch.setattr(kind, "step", noted)
    assert not couples_elements(optimizer)
    assert len(steps) == 18


def test_torchs_adafactor_would_be_found() -> None:
    assert couples_elements(torch.optim.Adafactor([nn.Parameter(torch.ones(2))]))
