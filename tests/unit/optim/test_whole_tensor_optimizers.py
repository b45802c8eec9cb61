"""Tests of LAMB and Muon, which need whole tensors, and of the trial steps of ``couples_elements``.

LAMB and Muon match their formulas, and invalid arguments raise an error. ``couples_elements`` steps a copy of an
optimizer to find out if it can be stepped in flat shards; the optimizer itself is unchanged afterwards.
"""

import copy
import math
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from test_update_tiles import element_wise
from torch import Tensor, nn

from shardwise.core.optim import HybridAdam
from shardwise.core.optim.element_wise import MOST_GROUPS, couples_elements, couples_parameters
from shardwise.core.optim.muon import MuonWithAuxAdam, muon_update
from shardwise.core.update.tiles import needs_whole_tensors
from shardwise.nn import optimizer as own
from tests.support.on_ranks import raises

SHAPES = [(6, 4), (3, 5), (5,), (2, 3, 4), (1, 4), (4, 1), ()]


def params(dtype: torch.dtype = torch.float64, dims: int | None = None) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]
    return [nn.Parameter(each) for each in drawn if dims in (None, each.dim())]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def walk(optimizer: torch.optim.Optimizer, steps: int = 5) -> list[Tensor]:
    own_params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(steps):
        left = list(gradients(step))
        for param in own_params:
            index = next(i for i, each in enumerate(left) if each.shape == param.shape)
            param.grad = left.pop(index).to(param.dtype)
        optimizer.step()
    return [param.detach() for param in own_params]


def check(actual: list[Tensor], expected: list[Tensor], rtol: float = 1e-12) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("corrected", [False, True])
def test_lamb(corrected: bool) -> None:
    optimizer = own.Lamb(params(), lr=0.1, weight_decay=0.01, bias_correction=corrected)
    expected = []
    for index, weight in enumerate(each.detach().clone() for each in params()):
        first, second = torch.zeros_like(weight), torch.zeros_like(weight)
        for step in range(5):
            grad = gradients(step)[index]
            first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
            update = first / (second**0.5 + 1e-6) + 0.01 * weight
            rate = 0.1 * weight.square().sum() ** 0.5 / update.square().sum() ** 0.5
            if corrected:
                rate *= math.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
            weight = weight - rate * update
        expected.append(weight)
    check(walk(optimizer), expected)
    zero = nn.Parameter(torch.zeros(1))
    zero.grad = torch.ones(1)
    own.Lamb([zero], lr=0.1).step()  # with a ratio of 1
    assert zero.item() == pytest.approx(-0.1 * 0.1 / (0.001**0.5 + 1e-6))


def test_fused_lamb_is_lamb_but_for_its_options() -> None:
    same = own.FusedLAMB(params(), lr=0.1, bias_correction=False, weight_decay=0.01, max_grad_norm=0)
    check(walk(same), walk(own.Lamb(params(), lr=0.1, weight_decay=0.01)))
    clipped, plain = (own.FusedLAMB(params(), lr=0.1, max_grad_norm=most) for most in (0.5, 0))

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)

    plain.register_step_pre_hook(clip)
    check(walk(clipped), walk(plain), 1e-4)  # torch adds 1e-6 to the norm, so the tolerance is wider
    check(walk(own.FusedLAMB(params(), weight_decay=0, max_grad_norm=0)), walk(torch.optim.Adam(params(), eps=1e-6)))


def test_16_bit_parameters_are_stepped_in_fp32() -> None:
    for make in (own.Lamb, lambda p: own.FusedLAMB(p, max_grad_norm=0)):
        half, wide = params(torch.bfloat16), [nn.Parameter(each.float()) for each in params(torch.bfloat16)]
        for one, other, grad in zip(half, wide, gradients(0), strict=True):
            one.grad = grad.bfloat16()
            other.grad = one.grad.float()
        optimizers = make(half), make(wide)
        for optimizer in optimizers:
            optimizer.step()
        assert all(torch.equal(one, other.bfloat16()) for one, other in zip(half, wide, strict=True))
        tensors = [v for state in optimizers[0].state.values() for v in state.values() if isinstance(v, Tensor)]
        assert all(value.dtype == torch.float32 for value in tensors)


KEPT: dict[str, Any] = {
    "HybridAdam": HybridAdam,
    "Lamb": own.Lamb,
    "FusedLAMB": own.FusedLAMB,
    "Muon": lambda p: MuonWithAuxAdam([{"params": p, "use_muon": True}]),
    "Muon's Adam": lambda p: MuonWithAuxAdam([{"params": p, "use_muon": False}]),
}


@pytest.mark.parametrize("name", KEPT)
def test_loaded_state_of_16_bit_parameters_is_fp32(name: str) -> None:
    first = KEPT[name](params(torch.bfloat16, 2))
    walk(first, 3)
    second = KEPT[name]([nn.Parameter(each.detach().clone()) for each in first.param_groups[0]["params"]])
    second.register_load_state_dict_pre_hook(lambda _, state: dict(state))
    for _ in range(2):
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert len(second._optimizer_load_state_dict_pre_hooks) == 1
    check(walk(first), walk(second), 0.0)
    for one, other in zip(first.state.values(), second.state.values(), strict=True):
        assert one.keys() == other.keys()
        check(*([torch.as_tensor(value) for value in each.values()] for each in (one, other)), 0.0)


@pytest.mark.parametrize("kind", [own.FusedAdam, own.HybridAdam, own.CPUAdam, own.FusedLAMB, own.Lamb])
def test_step_count_in_the_groups_is_loaded(kind: Any) -> None:
    first = kind(params())
    walk(first, 3)
    given = first.state_dict()
    theirs = {n: {key: x.clone() for key, x in s.items() if key != "step"} for n, s in given["state"].items()}
    groups = [group | {"step": 3} for group in given["param_groups"]]
    second = kind([nn.Parameter(each.detach().clone()) for each in first.param_groups[0]["params"]])
    second.load_state_dict({"state": theirs, "param_groups": groups})
    assert "step" not in second.param_groups[0] and groups[0]["step"] == 3
    assert all("step" not in each for each in theirs.values())
    check(walk(first), walk(second), 0.0)


def test_invalid_arguments() -> None:
    for kind, error, told, given in (
        (own.Lamb, ValueError, "lr=-1", {"lr": -1}),
        (own.Lamb, ValueError, r"betas\[1\]=1\.0", {"betas": (0.9, 1.0)}),
        (own.FusedLAMB, RuntimeError, "amsgrad=True", {"amsgrad": True}),
        (own.FusedSGD, NotImplementedError, "wd_after_momentum=True", {"lr": 0.1, "wd_after_momentum": True}),
        (own.HybridAdam, TypeError, "did you mean 'weight_decay'", {"weigth_decay": 0.1}),
        (own.HybridAdam, ValueError, "amsgrad=True of HybridAdam", {"amsgrad": True}),
    ):
        raises(error, told, kind, params(), **given)


def test_options_by_name() -> None:
    up, down = own.HybridAdam(params(), maximize=True, amsgrad=False), own.HybridAdam(params())
    assert up.param_groups[0]["maximize"] and up.defaults["maximize"]
    moved = [each - start.detach() for each, start in zip(walk(up, 1), params(), strict=True)]
    check(moved, [start.detach() - each for each, start in zip(walk(down, 1), params(), strict=True)], 1e-9)
    check(walk(own.FusedSGD(params(), lr=0.1, momentum=0.9)), walk(torch.optim.SGD(params(), lr=0.1, momentum=0.9)))


def test_muon_matches_torch_muon_and_adamw() -> None:
    matrices, rest = params(torch.float32, 2), params(torch.float32, 1)
    groups = [
        {"params": matrices, "use_muon": True, "lr": 0.1, "weight_decay": 0.1, "ns_method": "standard"},
        {"params": rest, "use_muon": False, "lr": 0.1, "weight_decay": 0.1},
    ]
    found = walk(MuonWithAuxAdam(groups))
    muon = torch.optim.Muon(params(torch.float32, 2), lr=0.1, weight_decay=0.1, momentum=0.95)
    adam = torch.optim.AdamW(params(torch.float32, 1), lr=0.1, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    check(found, walk(muon) + walk(adam), 1e-6)


@pytest.mark.parametrize("shape", [(6, 4), (3, 5), (7, 2, 5), (4, 3, 2, 2), (6, 6)])
@pytest.mark.parametrize("method", ["gram", "standard"])
def test_muon_matches_its_formula_for_every_shape(shape: tuple[int, ...], method: str) -> None:
    generator = torch.Generator().manual_seed(1)
    grad, before = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    momentum, kept = before.clone(), grad.clone()
    found = muon_update(grad, momentum, 0.9, ns_method=method)
    assert torch.equal(grad, kept) and found.shape == grad.shape and found.dtype == grad.dtype
    torch.testing.assert_close(momentum, 0.9 * before + 0.1 * grad)
    ahead = (0.1 * grad + 0.9 * momentum).double()
    several = ahead.reshape(1, shape[0], -1) if len(shape) != 3 else ahead
    expected = []
    for each in several:
        x = each.T if each.size(0) > each.size(1) else each
        x = x / x.norm()
        for _ in range(5):
            inner = x @ x.T
            x = 3.4445 * x + (-4.7750 * inner + 2.0315 * inner @ inner) @ x
        expected.append(x.T if each.size(0) > each.size(1) else x)
    tall = max(1.0, shape[-2] / shape[-1]) ** 0.5
    limit = 1e-5 if method == "gram" else 5e-2
    torch.testing.assert_close(found.double(), tall * torch.stack(expected).reshape(shape), rtol=limit, atol=limit)


def test_invalid_groups_of_muon() -> None:
    for dims, message, group in (
        (2, "use_muon=None of group 0: give True or False", {}),
        (2, "momentum=1.0", {"use_muon": True, "momentum": 1.0}),
        (2, "ns_method='exact': give one of 'gram', 'standard'", {"use_muon": True, "ns_method": "exact"}),
        (2, "betas=1.0", {"use_muon": False, "betas": (0.9, 1.0)}),
        (2, "eps=-1.0", {"use_muon": False, "eps": -1.0}),
        (1, "give False for what is no matrix", {"use_muon": True}),
    ):
        raises(ValueError, message, MuonWithAuxAdam, [{"params": params(dims=dims), **group}])


Rule = Callable[["Own", Tensor, Tensor, dict[str, Any]], None]


class Own(torch.optim.Optimizer):
    """A user's optimizer: it calls ``rule(self, values, gradient, state)`` for each parameter."""

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


def own_optimizer(rule: Rule, **options: Any) -> Own:
    return Own([nn.Parameter(torch.ones(2, 2))], rule, **options)


@pytest.mark.parametrize("lr", [0.01, 0.0, 1e-9, torch.tensor(0.0)], ids=str)
@pytest.mark.parametrize("rule", FINE + COUPLED, ids=lambda rule: rule.__name__)
def test_couples_elements(rule: Rule, lr: float | Tensor) -> None:
    """The result does not depend on the learning rate, which may start at 0 in a warm-up."""
    optimizer = own_optimizer(rule, lr=lr)
    assert couples_elements(optimizer) == (rule in COUPLED)
    assert couples_parameters(optimizer) == (rule in BY_CALL)
    if rule in BY_CALL:
        told = r"optimizer Own gives parameters other values.*element_wise=True"
        raises(ValueError, told, needs_whole_tensors, optimizer)
    else:
        assert needs_whole_tensors(optimizer) == (rule in WHOLE)


def test_attributes_of_the_optimizer_override_the_trial() -> None:
    """The attributes ``element_wise`` and ``whole_tensors`` override the trial, as the error message promises."""
    for rule in (noise, counted_by_call):
        optimizer: Any = own_optimizer(rule)
        for said in (True, False):
            optimizer.element_wise = said
            assert couples_elements(optimizer) == (not said)
        del optimizer.element_wise
        optimizer.whole_tensors = True
        assert needs_whole_tensors(optimizer)
    raises(ValueError, "whole_tensors=True", lambda: needs_whole_tensors(own_optimizer(counted_by_call)))
    optimizer = own_optimizer(trust_ratio)
    optimizer.element_wise = False
    raises(ValueError, "gives parameters other values", lambda: needs_whole_tensors(optimizer))


@pytest.mark.parametrize("rule", [counted, clipped, counted_in_a_list], ids=lambda rule: rule.__name__)
def test_the_trial_changes_nothing(rule: Rule) -> None:
    optimizer: Any = own_optimizer(rule)
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
    """A wrapper as accelerate's: it forwards everything to the base optimizer."""

    def __init__(self, base: Own) -> None:
        self.__dict__["of"] = lambda: base

    param_groups = property(lambda self: self.of().param_groups, lambda self, groups: self.pass_on(groups))  # type: ignore[assignment]
    state = property(lambda self: self.of().state)  # type: ignore[assignment]

    def pass_on(self, groups: list[dict[str, Any]]) -> None:
        self.of().param_groups = groups

    def step(self, closure: Any = None) -> None:
        self.of().step()


def test_optimizer_wrappers_are_not_tried() -> None:
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
def test_optimizers_that_cannot_be_copied_are_not_tried(thing: object) -> None:
    seen: list[int] = []
    optimizer: Any = own_optimizer(lambda *_: seen.append(1))
    optimizer.thing = thing
    assert not couples_elements(optimizer) and seen == []
    assert optimizer.thing is thing


def test_groups_that_differ_in_numbers_only_are_tried_once() -> None:
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
    # Names are ignored only where they are the sole difference; a name may also select the rule.
    named = [{"name": f"layer {i}"} for i in range(30)]
    assert tried([*named, {"name": "last", "adapts": True}])
    assert tried([{"kind": "adam"}, {"kind": "adam"}, {"kind": "lamb"}])
    assert not tried([{"kind": "adam"}, {"kind": "adam"}]) and len(calls) == 18


def test_a_failing_trial_is_ignored() -> None:
    def fails(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        raise RuntimeError("only on Sundays")

    optimizer = own_optimizer(fails)
    assert not couples_elements(optimizer)
    assert optimizer.calls == 0 and len(optimizer.param_groups[0]["params"]) == 1


@pytest.mark.parametrize("kind", element_wise(), ids=lambda kind: kind.__name__)
def test_torch_and_own_optimizers_pass_the_trial(kind: type[torch.optim.Optimizer]) -> None:
    """The trial is not used for these classes, but agrees with what is known of them, also of torch's Adafactor."""
    optimizer: Any = kind([nn.Parameter(torch.ones(2))], lr=0.1)  # type: ignore[call-arg]
    with mock.patch.object(kind, "step", autospec=True, side_effect=kind.step) as steps:
        assert not couples_elements(optimizer)
    assert steps.call_count == 18
    assert couples_elements(torch.optim.Adafactor([nn.Parameter(torch.ones(2))]))
