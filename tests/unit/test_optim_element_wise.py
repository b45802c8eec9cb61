"""Which optimizers can be stepped in flat parts is found by trying, and the trial leaves nothing behind."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.core.optim import CPUAdam, FusedAdam, HybridAdam
from shardwise.core.optim.element_wise import MOST_GROUPS, couples_elements, couples_parameters
from shardwise.core.update.tiles import needs_whole_tensors
from shardwise.plan import zero
from shardwise.session import build
from shardwise.testing import assert_close

CPU = torch.device("cpu")
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


def remembering(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    """As older versions of RAdam and Ranger: sizes of steps are kept by the step's number, with the learning rate."""
    state["step"] = state.get("step", 0) + 1
    (group,) = self.param_groups
    buffer = group.get("buffer") or self.__dict__.setdefault("buffer", empty_buffer())
    kept = buffer[state["step"] % 10]
    if kept[0] != state["step"]:
        kept[:] = [state["step"], group["lr"] / state["step"]]
    assert values.grad is not None
    values.sub_(kept[1] * values.grad)


def empty_buffer() -> list[list[Any]]:
    return [[None, None] for _ in range(10)]


def counted_in_a_list(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    self.seen.append(1)
    values.sub_(gradient / len(self.seen))


def signs_if_large(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    values.sub_(gradient.sign() if values.numel() >= 4096 else gradient)


def factored_if_large(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    (by_rows if min(values.shape) >= 128 and values.dim() > 1 else momentum)(self, values, gradient, state)


def by_blocks_if_even(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    values.sub_(gradient * 0.5 if values.numel() % 256 == 0 else gradient)


FINE = [momentum, counted, signs, noise, remembering]
WHOLE = [trust_ratio, clipped, centred, by_rows, decayed_if_a_matrix, late]
WHOLE += [signs_if_large, factored_if_large, by_blocks_if_even]
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


def test_every_group_is_tried() -> None:
    def in_some_groups(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        (trust_ratio if self.param_groups[0]["adapts"] else momentum)(self, values, gradient, state)

    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    groups = [{"params": [p], "adapts": False, "lr": 0.1 * i} for i, p in enumerate(params)]
    optimizer = Own(groups, in_some_groups, adapts=False)
    assert not couples_elements(optimizer)
    assert optimizer.calls == 0
    groups[2] = {"params": [params[2]], "adapts": True}
    assert couples_elements(Own(groups, in_some_groups, adapts=False))


def over_its_own_list(self: Any, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    for param in self.everything:
        if param.grad is not None:
            param.sub_(param.grad)


@pytest.mark.parametrize(
    "rule", [counted, clipped, counted_in_a_list, over_its_own_list], ids=lambda rule: rule.__name__
)
def test_the_trial_leaves_nothing_behind(rule: Rule) -> None:
    optimizer: Any = own(rule)
    (param,) = optimizer.everything = optimizer.param_groups[0]["params"]
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


@pytest.mark.parametrize("where", ["self", "group"])
def test_the_first_steps_are_plain_ones(where: str) -> None:
    """What the rule keeps in lists of its own is not that of the trial, which has another learning rate."""

    def trained(sharded: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        options = {"buffer": empty_buffer()} if where == "group" else {}
        optimizer: Any = Own(model.parameters(), remembering, **options)
        optimizer.buffer = empty_buffer()
        session = build(model, optimizer, zero(1)) if sharded else None
        for _ in range(4):
            loss = (model if session is None else session.module)(torch.ones(2, 4)).square().sum()
            (loss if session is None else session).backward(*([] if session is None else [loss]))
            (optimizer if session is None else session.optimizer).step()
            model.zero_grad()
        if session is None:
            return dict(model.state_dict())
        result = session.module.state_dict()
        session.close()
        session.mesh.close()
        return result

    assert_close(trained(sharded=True), trained(sharded=False), 1e-6, where)


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


class LookingAhead(torch.optim.Optimizer):
    """Every second step goes half way back."""

    def __init__(self, base: Own) -> None:
        self.base, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state, self.calls = defaultdict(dict), 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.calls += 1
        for param in self.param_groups[0]["params"]:
            slow = self.state[param].setdefault("slow", param.clone())
            if self.calls % 2 == 0:
                slow.lerp_(param, 0.5)
                param.copy_(slow)


@pytest.mark.parametrize("wrapper", [Passing, LookingAhead])
def test_one_that_wraps_another_is_not_tried(wrapper: type[Any]) -> None:
    seen: list[int] = []

    class Noted(Own):
        def step(self, closure: Any = None) -> None:
            seen.append(1)
            super().step(closure)

    param = nn.Parameter(torch.ones(2, 2))
    base = Noted([param], trust_ratio)
    groups = base.param_groups
    param.grad = torch.ones(2, 2)
    wrapped = wrapper(base)
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


class Derived(Own):
    """Its step calls that of its base, which runs torch's hooks for all optimizers as well."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)


@pytest.mark.parametrize("kind", [Own, Derived])
def test_hooks_of_all_optimizers_do_not_run(kind: type[Own]) -> None:
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    try:
        own(momentum)  # one of the base's kind exists, so that its step has hooks too
        optimizer = kind([nn.Parameter(torch.ones(2, 2))], trust_ratio)
        assert couples_elements(optimizer) and seen == []
        optimizer.step()
        assert seen[0] == "before" and seen[-1] == "after"
    finally:
        for handle in handles:
            handle.remove()
    del seen[:]
    optimizer.step()
    assert seen == []


def test_where_torch_makes_tensors_by_default_makes_no_difference() -> None:
    seen: set[torch.dtype] = set()

    def noted(self: Own, values: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        seen.add(values.dtype)
        trust_ratio(self, values, gradient, state)

    optimizer = own(noted)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert couples_elements(optimizer)
    finally:
        torch.set_default_dtype(before)
    assert seen == {torch.float32}


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
