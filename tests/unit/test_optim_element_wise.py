"""Which optimizers can be stepped in flat parts is found by trying, and the trial leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.engine.tiles import check_element_wise
from shardwise.optim import CPUAdam, FusedAdam, HybridAdam
from shardwise.optim.element_wise import couples_elements

CPU = torch.device("cpu")
Rule = Callable[["Own", Tensor, Tensor, dict[str, Any]], None]


class Own(torch.optim.Optimizer):
    """Somebody's optimizer: ``rule(self, values, gradient, state)`` for each parameter."""

    def __init__(self, params: Any, rule: Rule, lr: float | Tensor = 0.01, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})
        self.rule, self.calls = rule, 0

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


FINE = [momentum, counted, signs, noise]
COUPLED = [trust_ratio, clipped, centred, by_rows, decayed_if_a_matrix, counted_by_call, late]


def own(rule: Rule, **options: Any) -> Own:
    return Own([nn.Parameter(torch.ones(2, 2))], rule, **options)


@pytest.mark.parametrize("lr", [0.01, 0.0, 1e-9, torch.tensor(0.0)], ids=str)
@pytest.mark.parametrize("rule", FINE + COUPLED, ids=lambda rule: rule.__name__)
def test_found_by_trying(rule: Rule, lr: float | Tensor) -> None:
    """Also where the learning rate of a warm-up is 0 at first."""
    optimizer = own(rule, lr=lr)
    assert couples_elements(optimizer, CPU) == (rule in COUPLED)
    if rule in COUPLED:
        with pytest.raises(ValueError, match=r"optimizer Own gives a matrix other values.*element_wise=True"):
            check_element_wise(optimizer, CPU)
    else:
        check_element_wise(optimizer, CPU)


@pytest.mark.parametrize("rule", [momentum, trust_ratio], ids=lambda rule: rule.__name__)
def test_what_the_optimizer_says_is_believed(rule: Rule) -> None:
    optimizer = own(rule)
    for said in (True, False):
        optimizer.element_wise = said  # type: ignore[attr-defined]
        assert couples_elements(optimizer, CPU) == (not said)


def test_every_group_is_tried() -> None:
    def in_some_groups(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        (trust_ratio if self.param_groups[0]["adapts"] else momentum)(self, values, gradient, state)

    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    groups = [{"params": [p], "adapts": False, "lr": 0.1 * i} for i, p in enumerate(params)]
    optimizer = Own(groups, in_some_groups, adapts=False)
    assert not couples_elements(optimizer, CPU)
    assert optimizer.calls == 0
    groups[2] = {"params": [params[2]], "adapts": True}
    assert couples_elements(Own(groups, in_some_groups, adapts=False), CPU)


@pytest.mark.parametrize("rule", [counted, clipped], ids=lambda rule: rule.__name__)
def test_the_trial_leaves_nothing_behind(rule: Rule) -> None:
    optimizer = own(rule)
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones(2, 2)
    optimizer.step()
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    attributes, numbers = dict(vars(optimizer)), torch.get_rng_state()
    groups, state = [dict(group) for group in optimizer.param_groups], {p: dict(s) for p, s in optimizer.state.items()}
    values = param.detach().clone()
    couples_elements(optimizer, CPU)
    assert vars(optimizer).keys() == attributes.keys()
    assert all(vars(optimizer)[name] is value for name, value in attributes.items())
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert {p: dict(s) for p, s in optimizer.state.items()} == state
    assert torch.equal(param.detach(), values) and torch.equal(param.grad, torch.ones(2, 2))
    assert torch.equal(torch.get_rng_state(), numbers) and seen == [] and optimizer.calls == 1


def test_one_that_cannot_be_tried_is_left_to_fail_by_itself() -> None:
    def fails(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        raise RuntimeError("only on Sundays")

    optimizer = own(fails)
    assert not couples_elements(optimizer, CPU)
    assert optimizer.calls == 0 and len(optimizer.param_groups[0]["params"]) == 1


ELEMENT_WISE = [
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    CPUAdam,
    FusedAdam,
    HybridAdam,
]


@pytest.mark.parametrize("kind", ELEMENT_WISE, ids=lambda kind: kind.__name__)
def test_torchs_and_ours_pass(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """They are not asked, but would be found to be what they are."""
    assert not couples_elements(kind([nn.Parameter(torch.ones(2))], lr=0.1), CPU)


def test_torchs_adafactor_would_be_found() -> None:
    assert couples_elements(torch.optim.Adafactor([nn.Parameter(torch.ones(2))]), CPU)
