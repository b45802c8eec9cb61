"""Tests of the Adam family (``CPUAdam``, ``HybridAdam``, ``FusedAdam``) and of ColossalAI's learning-rate schedulers.

- The schedulers follow their formulas at every step, also when they are resumed from a saved state.
- The optimizers match torch's Adam and AdamW and the plain formula, and exchange states with them.
- They work with torch's schedulers and gradient scaler. Unsupported options raise an error.
- Schedulers of the original and of the sharded optimizer work without warnings.
"""

import copy
import itertools
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as plain

from shardwise.core.checkpoint import write_lr_scheduler
from shardwise.core.checkpoint.schedulers import SavedScheduler, fitting_state
from shardwise.core.optim import AdamRule, AdamSlot, AdamTiles, CPUAdam, FusedAdam, HybridAdam, adam_reference
from shardwise.nn import lr_scheduler as own
from shardwise.plan import zero
from shardwise.session import build
from tests.support.on_ranks import raises
from tests.support.sets import full

SHAPES = [(3,), (), (0,), (1, 1), (17, 5), (129,), (2, 3, 4), (64, 33)]
KINDS = [CPUAdam, HybridAdam, FusedAdam]
Kind = Callable[..., Any]


def make_params(dtype: torch.dtype, shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def set_gradients(params: list[nn.Parameter], seed: int, skip: int = -1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for index, param in enumerate(params):
        value = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
        param.grad = None if index == skip else value


def assert_close(actual: list[Any], expected: list[Any], tolerance: float) -> None:
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        difference = (a.detach().double() - b.detach().double()).abs()
        # "not all <=" so that NaN fails.
        assert bool((difference <= tolerance * (1 + b.detach().double().abs())).all()), (index, difference.max())


TOTAL, WARM, STEPS = 20, 4, 26
RATES = (0.1, 0.03)


def _warm(then: Callable[[int, float], float], steps: int = WARM) -> Callable[[int, float], float]:
    return lambda n, lr: (n + 1) / steps * lr if n < steps else then(n - steps, lr)


def _cosine(steps: int, low: float = 0.0) -> Callable[[int, float], float]:
    return lambda n, lr: low + (lr - low) * (1 + math.cos(math.pi * n / steps)) / 2


def _flat(steps: int, then: Callable[[int, float], float]) -> Callable[[int, float], float]:
    return lambda n, lr: lr if n < steps else then(n - steps, lr)


def _power(steps: int, low: float, power: float = 1.0) -> Callable[[int, float], float]:
    return lambda n, lr: low + (lr - low) * (1 - min(n, steps) / steps) ** power


def _linear(n: int, lr: float) -> float:
    return (n + 1) / (WARM + 1) * lr if n < WARM else max(0, TOTAL - n) / (TOTAL - WARM) * lr


WARM_FLAT = {"warmup_steps": WARM, "pct_start": 0.5, "eta_min": 0.002}
WARM_STEPS = {"warmup_steps": WARM, "milestones": [WARM, 9], "gamma": 0.5}
CASES: dict[str, tuple[str, dict[str, Any], Callable[[int, float], float]]] = {
    "cosine": ("CosineAnnealingLR", {"eta_min": 0.01}, _cosine(TOTAL, 0.01)),
    "cosine, warm": ("CosineAnnealingWarmupLR", {"warmup_steps": WARM}, _warm(_cosine(TOTAL - WARM))),
    "cosine, not warm": ("CosineAnnealingWarmupLR", {"eta_min": 0.001}, _cosine(TOTAL, 0.001)),
    "cosine of one step": ("CosineAnnealingWarmupLR", {"warmup_steps": TOTAL - 1}, _warm(_cosine(1), TOTAL - 1)),
    "flat": ("FlatAnnealingLR", {}, _flat(14, _cosine(6))),
    "flat, to a floor": ("FlatAnnealingLR", {"pct_start": 0.5, "eta_min": 0.01}, _flat(10, _cosine(10, 0.01))),
    "flat, warm": ("FlatAnnealingWarmupLR", WARM_FLAT, _warm(_flat(8, _cosine(8, 0.002)))),
    "linear": ("LinearWarmupLR", {"warmup_steps": WARM}, _linear),
    "steps": ("MultiStepLR", {"milestones": [5, 9]}, lambda n, lr: lr * 0.1 ** ((n >= 5) + (n >= 9))),
    "steps, warm": ("MultiStepWarmupLR", WARM_STEPS, _warm(lambda n, lr: lr * 0.5 ** (1 + (n >= 9 - WARM)))),
    "power": ("PolynomialLR", {"power": 2.0}, _power(TOTAL, 0.0001, 2.0)),
    "power, warm": ("PolynomialWarmupLR", {"warmup_steps": WARM}, _warm(_power(TOTAL - WARM, 0.0001))),
    "function": ("LambdaLR", {"lr_lambda": lambda n: 1 / (n + 1)}, lambda n, lr: lr / (n + 1)),
    "factors": ("MultiplicativeLR", {"lr_lambda": lambda n: 0.9}, lambda n, lr: lr * 0.9**n),
    "every third": ("StepLR", {"step_size": 3}, lambda n, lr: lr * 0.1 ** (n // 3)),
    "exponential": ("ExponentialLR", {"gamma": 0.8}, lambda n, lr: lr * 0.8**n),
}


def optimizer() -> torch.optim.Optimizer:
    """Return an SGD with momentum and two groups with different learning rates."""
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in RATES]
    return torch.optim.SGD(groups, lr=1.0, momentum=0.9)


def _make(case: str, of: torch.optim.Optimizer, **more: Any) -> Any:
    name, arguments, _ = CASES[case]
    return getattr(own, name)(of, TOTAL, **arguments, **more)


def _rates(of: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in of.param_groups]


def _walk(of: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[list[float]]:
    found = []
    for _ in range(steps):
        of.step()
        scheduler.step()
        found.append(_rates(of))
        assert scheduler.get_last_lr() == found[-1]
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("error")
def test_schedulers_follow_their_formulas(case: str) -> None:
    one = optimizer()
    scheduler = _make(case, one)
    walked = [_rates(one), *_walk(one, scheduler, STEPS)]
    expected = [[CASES[case][2](n, lr) for lr in RATES] for n in range(STEPS + 1)]
    torch.testing.assert_close(torch.tensor(walked), torch.tensor(expected), rtol=1e-11, atol=1e-13)


def test_one_cycle_peaks_at_the_rate_of_the_optimizer() -> None:
    one, other, again = optimizer(), optimizer(), optimizer()
    phases: dict[str, Any] = {"pct_start": 0.4, "three_phase": True}
    walked = _walk(one, own.OneCycleLR(one, TOTAL, **phases), TOTAL - 1)
    assert walked == _walk(other, plain.OneCycleLR(other, list(RATES), total_steps=TOTAL, **phases), TOTAL - 1)
    # A resumed run takes its peak from the group's initial rate, not from its current rate.
    _walk(again, own.OneCycleLR(again, TOTAL, **phases), 3)
    assert _walk(again, own.OneCycleLR(again, TOTAL, **phases, last_epoch=2), 4) == walked[3:7]


OF_A_KIND = ("cosine, not warm", "cosine of one step", "flat, to a floor", "power, warm", "factors", "exponential")
"""Not in the quick set, which has cases of the same class or with the same formula."""


@pytest.mark.parametrize("case", [*(case for case in CASES if case not in OF_A_KIND), *full(*OF_A_KIND)])
def test_scheduler_state_resumes_at_every_step(case: str, tmp_path: Path) -> None:
    one = optimizer()
    scheduler = _make(case, one)
    for _ in range(12):
        path = tmp_path / "scheduler.json"
        write_lr_scheduler(scheduler, path)
        fresh = optimizer()
        resumed = _make(case, fresh)
        state = fitting_state(resumed, path)
        fresh.load_state_dict(copy.deepcopy(one.state_dict()))
        resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
        walked = _walk(fresh, resumed, 9)
        other = optimizer()
        straight = _walk(other, _make(case, other), scheduler.last_epoch + 9)[-9:]
        assert walked == straight
        _walk(one, scheduler, 1)


# torch's StepLR with last_epoch at one of its decay steps applies the decay twice.
@pytest.mark.parametrize("case", [case for case in CASES if case != "every third"])
def test_last_epoch_resumes_a_schedule(case: str) -> None:
    for last in (0, 2, 3, 7, 15):
        one = optimizer()
        _walk(one, _make(case, one), last)
        again = _make(case, one, last_epoch=last - 1)
        other = optimizer()
        straight = _walk(other, _make(case, other), last + 6)[-6:]
        torch.testing.assert_close(torch.tensor(_walk(one, again, 6)), torch.tensor(straight), rtol=1e-9, atol=1e-12)
    untouched = optimizer()
    raises(KeyError, "initial_lr", lambda: _make(case, untouched, last_epoch=2))


def test_colossalai_scheduler_state_is_loaded() -> None:
    """Load a state in ColossalAI's layout: after the warm-up only the inner scheduler's ``last_epoch`` advances."""
    for steps in (2, 9):
        one = optimizer()
        scheduler = _make("power, warm", one)
        _walk(one, scheduler, steps)
        state = {key: value for key, value in scheduler.state_dict().items() if key in ("base_lrs", "_last_lr")}
        second = {"last_epoch": max(0, steps - WARM), "power": 1.0}
        state |= {"last_epoch": min(steps, WARM), "finished": steps > WARM, "warmup_epochs": WARM}
        state |= {"after_scheduler_type": "PolynomialLR", "after_scheduler_dict": second}
        fresh = optimizer()
        resumed = _make("power, warm", fresh)
        assert SavedScheduler(state).misfit(resumed) is None
        fresh.load_state_dict(one.state_dict())
        resumed.load_state_dict(state)
        assert resumed.last_epoch == steps
        assert _walk(fresh, resumed, 3) == _walk(one, scheduler, 3)


def test_invalid_scheduler_arguments() -> None:
    for kind, arguments, told in (
        (own.CosineAnnealingLR, {"total_steps": 0}, "total_steps=0"),
        (own.CosineAnnealingWarmupLR, {"warmup_steps": TOTAL}, "after the warm-up"),
        (own.PolynomialWarmupLR, {"warmup_steps": -1}, "warmup_steps=-1"),
        (own.FlatAnnealingLR, {"pct_start": 72}, "pct_start=72"),
        (own.MultiStepLR, {}, "milestones=None"),
        (own.LambdaLR, {}, "lr_lambda=None"),
    ):
        given: dict[str, Any] = {"total_steps": TOTAL, **arguments}
        raises(ValueError, told, kind, optimizer(), **given)
        raises(TypeError, "num_steps_per_epoch", kind, optimizer(), **given, num_steps_per_epoch=5)


TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}


def moments(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[Tensor]:
    stepped = [optimizer.state[p] for p in params if p in optimizer.state]
    return [state[key] for state in stepped for key in ("exp_avg", "exp_avg_sq", "step")]


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda of: plain.CosineAnnealingLR(of, 40),
    "one cycle": lambda of: plain.OneCycleLR(of, max_lr=0.1, total_steps=40),  # also changes the first beta
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rate", ["number", "tensor"])
def test_equals_torch(kind: Kind, adamw_mode: bool, dtype: torch.dtype, schedule: str, rate: str) -> None:
    """Compare 30 steps with odd shapes, two groups, a changing rate, and a gradient that some steps do not have."""
    ours, theirs = make_params(dtype), make_params(dtype)
    options = {"betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
    other = torch.optim.AdamW if adamw_mode else torch.optim.Adam

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        rates: list[Any] = [torch.tensor(each, dtype=dtype) if rate == "tensor" else each for each in (0.01, 0.1)]
        return [{"params": params[:4], "lr": rates[0]}, {"params": params[4:], "lr": rates[1], "weight_decay": 0.0}]

    own = kind(groups(ours), adamw_mode=adamw_mode, **options)
    reference = other(groups(theirs), foreach=False, **options)
    schedulers = [SCHEDULES[schedule](each) for each in (own, reference)]
    for step in range(30):
        for params in (ours, theirs):
            set_gradients(params, step, skip=6 if step % 3 else -1)
        for each in (own, reference, *schedulers):
            each.step()
    assert_close(ours, theirs, TOLERANCE[dtype])
    assert_close(moments(own, ours), moments(reference, theirs), TOLERANCE[dtype])
    assert own.state[ours[6]]["step"] == 10 and isinstance(own.param_groups[0]["lr"], Tensor) == (rate == "tensor")


def rule(**changes: Any) -> AdamRule:
    return AdamRule(**({"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1} | changes))


def slots_of(
    param_dtype: torch.dtype, grad_dtype: torch.dtype, out: torch.dtype | None, shapes: list[tuple[int, ...]] = SHAPES
) -> list[AdamSlot]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if param_dtype == torch.float64 else torch.float32
    made = []
    for shape in shapes:
        param, grad, first, second = (torch.randn(shape, generator=generator) for _ in range(4))
        given = None if out is None else torch.zeros(shape, dtype=out)
        tensors = (param.to(param_dtype), grad.to(grad_dtype), first.to(wide), second.abs().to(wide))
        made.append(AdamSlot(*tensors, step=torch.tensor(7.0), out=given))
    return made


CASTS = [
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16, torch.float16),
    (torch.float32, torch.float32, None),
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, None),
    (torch.float16, torch.float32, None),
    (torch.bfloat16, torch.float16, torch.float32),
    (torch.float64, torch.float32, torch.float16),
]


TILES = [1, 7, 64, None]
RULES: list[dict[str, Any]] = [{}, {"decoupled": False}, {"bias_correction": False, "maximize": True}]


def _cases() -> Iterator[Any]:
    """Yield all combinations; the quick set has each dtype with each tile size once."""
    factors = (enumerate(CASTS), enumerate(TILES), enumerate([1.0, 0.3]), enumerate(RULES))
    for (cast, dtypes), (size, tile), (number, scale), (rule_, changes) in itertools.product(*factors):
        name = f"changes{rule_}-{scale}-{tile}-dtypes{cast}"
        case = pytest.param(dtypes, tile, scale, changes, id=name)
        turn = cast + size
        yield case if (number, rule_) == (turn % 2, turn % 3) else full(case)[0]


@pytest.mark.parametrize(("dtypes", "tile", "scale", "changes"), _cases())
def test_adam_tiles_match_the_reference(dtypes: Any, tile: int | None, scale: float, changes: dict[str, Any]) -> None:
    shapes = SHAPES[:-1] if tile == 1 else SHAPES  # one tile for each element is slow
    fast, plain = slots_of(*dtypes, shapes), slots_of(*dtypes, shapes)
    AdamTiles(tile).update(fast, rule(**changes), scale)
    for slot in plain:
        adam_reference(slot, rule(**changes), scale)
    for name in AdamSlot._fields if dtypes[2] is not None else AdamSlot._fields[:-1]:
        found, expected = ([getattr(slot, name) for slot in slots] for slots in (fast, plain))
        # The two may fall on either side of a 16-bit rounding boundary: one unit in the last place.
        narrow = name in ("param", "out") and found[0].dtype.itemsize == 2
        assert_close(found, expected, torch.finfo(found[0].dtype).eps if narrow else 1e-6)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(fast, slots_of(*dtypes, shapes), strict=True))


def test_without_bias_correction() -> None:
    """Without it the first step moves by lr (1 - beta1) g / (sqrt(1 - beta2) |g|), not by lr."""
    for beta1, moved in ((0.9, 0.1), (0.5, 0.5)):
        param = nn.Parameter(torch.zeros(3))
        param.grad = torch.tensor([1.0, -2.0, 4.0])
        HybridAdam([param], lr=0.1, bias_correction=False, betas=(beta1, 0.99)).step()
        assert_close([param], [torch.tensor([-moved, moved, -moved])], 1e-5)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda base: base,
    "transposed": lambda base: base.transpose(1, 3),
    "channels_last": lambda base: base.contiguous(memory_format=torch.channels_last),
    "sliced": lambda base: base[:, :, :, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gradient", ["as parameter", "contiguous", "expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_layouts(layout: str, gradient: str, dtype: torch.dtype) -> None:
    """Parameters and gradients may have any strides; memory between elements is not written."""
    values = LAYOUTS[layout](torch.arange(48.0).reshape(2, 3, 2, 4) / 48).to(dtype)
    param = nn.Parameter(values.clone(memory_format=torch.preserve_format) if layout != "sliced" else values)
    plain = nn.Parameter(values.contiguous().clone())
    ours, theirs = HybridAdam([param], lr=0.1), HybridAdam([plain], lr=0.1)
    for _ in range(3):
        grad = torch.randn(() if gradient == "expanded" else plain.shape).to(dtype).expand(plain.shape)
        plain.grad = grad.clone(memory_format=torch.contiguous_format)
        param.grad = torch.empty_like(param).copy_(grad) if gradient == "as parameter" else grad
        ours.step()
        theirs.step()
    assert_close([param], [plain], 1e-6)
    assert_close([ours.state[param]["exp_avg"]], [theirs.state[plain]["exp_avg"]], 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters_are_rounded_once(dtype: torch.dtype) -> None:
    """Moments are fp32. The 16-bit result equals an fp32 step from the 16-bit value, rounded once."""
    param = nn.Parameter(torch.randn(1000).to(dtype))
    wide = nn.Parameter(param.detach().float())
    ours, theirs = HybridAdam([param], lr=0.01), torch.optim.AdamW([wide], lr=0.01, weight_decay=0)
    for step in range(5):
        set_gradients([param], step)
        assert param.grad is not None
        wide.data.copy_(param.detach())
        wide.grad = param.grad.float()
        ours.step()
        theirs.step()
        assert torch.equal(param.detach(), wide.detach().to(dtype))
    assert ours.state[param]["exp_avg"].dtype == torch.float32
    assert torch.equal(ours.state[param]["exp_avg_sq"], theirs.state[wide]["exp_avg_sq"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_div_scale_divides_and_leaves_the_gradient(kind: Kind, dtype: torch.dtype) -> None:
    (scaled,), (plain,) = make_params(dtype, [(50,)]), make_params(torch.float32, [(50,)])
    plain.data.copy_(scaled.data)
    set_gradients([scaled], 3)
    assert scaled.grad is not None
    gradient = scaled.grad.clone()
    plain.grad = gradient.float() / 1000
    # With a large eps the update depends on the gradient's size.
    first, second = kind([scaled], eps=1.0), kind([plain], eps=1.0)
    first.step(div_scale=1000.0)
    second.step()
    assert torch.equal(scaled.grad, gradient)
    assert_close([first.state[scaled]["exp_avg"]], [second.state[plain]["exp_avg"]], 1e-7)
    assert_close([scaled], [plain.detach().to(dtype)], 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_gradient_is_refused_before_anything_changes(kind: Kind) -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(4, 2))
    first.grad, second.grad = torch.ones(2), torch.ones(4, 2).to_sparse()
    optimizer = kind([{"params": [first]}, {"params": [second]}])
    raises(RuntimeError, r"sparse.*\(4, 2\).*SparseAdam", lambda: optimizer.step())
    assert torch.equal(first.detach(), torch.ones(2))
    assert not optimizer.state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adamw_mode", [True, False])
def test_state_is_compatible_with_torch(kind: Kind, adamw_mode: bool) -> None:
    """Move the state from torch to our optimizer and back, and compare with torch all the way."""
    other = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    options = {"lr": 0.02, "weight_decay": 0.1}
    straight, travelling = make_params(torch.float32), make_params(torch.float32)
    reference = other(straight, **options)
    current: torch.optim.Optimizer = other(travelling, **options)
    for step in range(9):
        if step in (3, 6):
            state = copy.deepcopy(current.state_dict())
            current = kind(travelling, lr=9.0, adamw_mode=adamw_mode) if step == 3 else other(travelling, lr=9.0)
            current.load_state_dict(state)
        for params in (straight, travelling):
            set_gradients(params, step)
        reference.step()
        current.step()
    assert_close(travelling, straight, 1e-6)


def test_amsgrad_state_is_refused() -> None:
    params = make_params(torch.float32)
    theirs = torch.optim.AdamW(params, amsgrad=True)
    set_gradients(params, 0)
    theirs.step()
    raises(ValueError, r"amsgrad=\[True\]", lambda: HybridAdam(params).load_state_dict(theirs.state_dict()))
    raises(RuntimeError, "AMSGrad", lambda: FusedAdam(params, amsgrad=True))


def test_invalid_group_is_not_added() -> None:
    optimizer = HybridAdam([nn.Parameter(torch.ones(1))])
    raises(ValueError, "lr=-1", lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": -1}))
    with pytest.raises(ValueError, match="complex64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1


def test_fused_adam_zero_grad_and_removed_arguments() -> None:
    param = nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    FusedAdam([param], set_grad_none=False).zero_grad()
    assert param.grad is not None and param.grad.item() == 0
    FusedAdam([param]).zero_grad()
    assert param.grad is None
    raises(RuntimeError, "scale", lambda: FusedAdam([param]).step(scale=2.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", [None, 5])
@pytest.mark.parametrize("turned", [False, True])
def test_moments_in_16_bits_are_rounded_after_each_step(dtype: torch.dtype, tile: int | None, turned: bool) -> None:
    """The arithmetic is fp32, for tiles of several sizes and for moments without a flat view."""
    generator, tiles = torch.Generator().manual_seed(0), AdamTiles(tile)
    param, grad = (torch.randn(7, 3, generator=generator).to(dtype) for _ in range(2))
    first, second = torch.zeros(3, 7, dtype=dtype), torch.zeros(7, 3, dtype=dtype)
    moments = [first.T if turned else first.view(7, 3), second]
    expected, wide = param.clone(), [torch.zeros(7, 3), torch.zeros(7, 3)]
    for step in range(1, 5):
        count = torch.tensor(float(step))
        tiles.update([AdamSlot(param, grad * step, *moments, count)], rule(lr=0.1), 0.5)  # type: ignore[misc]
        wide = [moment.to(dtype).float() for moment in wide]
        adam_reference(AdamSlot(expected, grad * step, *wide, count), rule(lr=0.1), 0.5)  # type: ignore[misc]
        assert_close([param], [expected], 1e-6)
        assert_close([moment.float() for moment in moments], [moment.to(dtype).float() for moment in wide], 1e-6)


def test_weight_decay_mismatch_warns_once() -> None:
    """torch's groups record decoupled weight decay; ours have an argument for it, so a mismatch is warned of once."""
    params = make_params(torch.float32)
    set_gradients(params, 0)
    states = {}
    for decay in (0.1, 0.0):
        theirs = torch.optim.Adam(params, weight_decay=decay)
        theirs.step()
        states[decay] = theirs.state_dict()
    ours = HybridAdam(params)
    said = r"decoupled_weight_decay=False and weight_decay=\[0\.1\].*adamw_mode=True"
    with pytest.warns(UserWarning, match=said) as seen:
        ours.load_state_dict(states[0.1])
    assert [warning.filename for warning in seen] == [__file__]
    with warnings.catch_warnings(action="error"):
        ours.load_state_dict(ours.state_dict())
        ours.load_state_dict(states[0.0])
        HybridAdam(params, adamw_mode=False).load_state_dict(states[0.1])
    assert "decoupled_weight_decay" in states[0.1]["param_groups"][0]
    back = torch.optim.Adam(params)
    back.load_state_dict(HybridAdam(params).state_dict() | {"state": {}})
    assert back.param_groups[0]["decoupled_weight_decay"] is False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable"])
def test_options_that_would_change_the_step_are_refused(kind: Kind, option: str) -> None:
    first, second = make_params(torch.float32, [(2,), (3,)])
    raises(ValueError, f"{option}=True in a group of {kind.__name__}", kind, [{"params": [first], option: True}])
    optimizer = kind([{"params": [first], option: False}])
    raises(ValueError, f"{option}=True", lambda: optimizer.add_param_group({"params": [second], option: True}))
    assert len(optimizer.param_groups) == 1
    raises(TypeError, "nothing_like_this", lambda: kind([first], nothing_like_this=True))


@pytest.mark.parametrize("kind", KINDS)
def test_torch_grad_scaler(kind: Kind) -> None:
    """A gradient that is not finite skips the step; other gradients are unscaled first."""
    ours, theirs = make_params(torch.float32), make_params(torch.float32)
    own, reference = kind(ours), torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for step in range(3):
        for params, optimizer, scaler in ((ours, own, scalers[0]), (theirs, reference, scalers[1])):
            optimizer.zero_grad()
            loss = sum((param.square().sum() for param in params), start=torch.zeros(()))
            scaler.scale(loss * math.inf if step == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0
    assert own.state[ours[0]]["step"] == 2
    assert_close(ours, theirs, 1e-6)


@pytest.mark.filterwarnings("error")
def test_schedulers_built_before_and_after_do_not_warn() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    session = build(model, optimizer, zero(2))
    after = torch.optim.lr_scheduler.StepLR(session.optimizer, 1, gamma=0.1)
    for _ in range(3):
        session.backward(session.module(torch.ones(2, 4)).sum())
        session.optimizer.step()
        session.optimizer.zero_grad()
        before.step()
        after.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05**3)
