"""LAMB, LARS, Adafactor, CAME and GaLore beside their formulas, their arguments, and what is an error."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.nn import optimizer as own
from shardwise.optim.muon import MuonWithAuxAdam, muon_update

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
    assert own.DistributedLamb(params()).defaults["bias_correction"]
    zero = nn.Parameter(torch.zeros(1))
    zero.grad = torch.ones(1)
    own.Lamb([zero], lr=0.1).step()  # with a ratio of 1
    assert zero.item() == pytest.approx(-0.1 * 0.1 / (0.001**0.5 + 1e-6))


def test_lamb_without_ratios_is_adam_without_bias_correction() -> None:
    plain = own.HybridAdam(params(), lr=0.1, bias_correction=False, eps=1e-6)
    check(walk(own.Lamb(params(), lr=0.1, adam=True)), walk(plain), 1e-9)


def test_fused_lamb_is_lamb_but_for_its_options() -> None:
    same = own.FusedLAMB(params(), lr=0.1, bias_correction=False, weight_decay=0.01, max_grad_norm=0)
    check(walk(same), walk(own.Lamb(params(), lr=0.1, weight_decay=0.01)))
    clipped, plain = (
        own.FusedLAMB(params(), lr=0.1, max_grad_norm=0.5),
        own.FusedLAMB(params(), lr=0.1, max_grad_norm=0),
    )
    for step in range(3):
        for optimizer in (clipped, plain):
            (group,) = optimizer.param_groups
            for param, grad in zip(group["params"], gradients(step), strict=True):
                param.grad = grad
        nn.utils.clip_grad_norm_(plain.param_groups[0]["params"], 0.5)
        clipped.step()
        plain.step()
    check([*clipped.param_groups[0]["params"]], [*plain.param_groups[0]["params"]], 1e-4)  # torch adds 1e-6 to the norm
    check(walk(own.FusedLAMB(params(), weight_decay=0, max_grad_norm=0)), walk(torch.optim.Adam(params(), eps=1e-6)))


def test_lars() -> None:
    optimizer = own.Lars(params(), lr=0.5, momentum=0.9, eeta=0.1, weight_decay=0.01, epsilon=1e-6)
    expected = []
    for index, weight in enumerate(each.detach().clone() for each in params()):
        buffer: Tensor | float = 0.0
        for step in range(5):
            grad = gradients(step)[index]
            norms = weight.square().sum() ** 0.5, grad.square().sum() ** 0.5
            ratio = min(0.1 * norms[0] / (norms[1] + 0.01 * norms[0] + 1e-6), torch.tensor(50.0))
            buffer = 0.9 * buffer + (grad + 0.01 * weight).clamp(-10, 10)
            weight = weight - 0.5 * ratio * buffer
        expected.append(weight)
    check(walk(optimizer), expected)
    flat = own.Lars([{"params": params(), "lars": False}], lr=0.1, momentum=0.9, weight_decay=0.01)
    check(walk(flat), walk(torch.optim.SGD(params(), lr=0.1, momentum=0.9)))


def _factored(rows: Tensor, columns: Tensor) -> Tensor:
    return rows.unsqueeze(-1) * columns.unsqueeze(-2) / rows.mean(-1, keepdim=True).unsqueeze(-1)


@pytest.mark.parametrize("relative", [True, False])
def test_adafactor(relative: bool) -> None:
    options: dict[str, Any] = {} if relative else {"lr": 0.01, "relative_step": False}
    optimizer = own.Adafactor(params(), beta1=0.9, weight_decay=0.1, **options)
    expected = []
    for index, weight in enumerate(each.detach().clone() for each in params()):
        moments: list[Any] = [0.0, 0.0, 0.0]
        for step in range(1, 6):
            grad = gradients(step - 1)[index]
            kept, squares = 1 - step**-0.8, grad**2 + 1e-30
            means = [squares.mean(-1), squares.mean(-2)] if grad.dim() > 1 else [squares, squares]
            moments[:2] = [kept * old + (1 - kept) * new for old, new in zip(moments, means, strict=False)]
            update = grad / (_factored(*moments[:2]) if grad.dim() > 1 else moments[0]) ** 0.5
            update = update / max(1.0, float(update.square().mean() ** 0.5))
            rate = max(1e-3, float(weight.square().mean() ** 0.5)) * (min(1e-2, step**-0.5) if relative else 0.01)
            moments[2] = 0.9 * moments[2] + 0.1 * rate * update
            weight = weight - 0.1 * rate * weight - moments[2]
        expected.append(weight)
    check(walk(optimizer), expected)
    assert {tuple(sorted(state)) for state in optimizer.state.values()} == {
        ("exp_avg", "exp_avg_sq", "step"),
        ("exp_avg", "exp_avg_sq_col", "exp_avg_sq_row", "step"),
    }


def test_came() -> None:
    optimizer = own.CAME(params(), lr=0.01, weight_decay=0.1)
    expected = []
    for index, weight in enumerate(each.detach().clone() for each in params()):
        square: list[Any] = [0.0, 0.0]
        unsure: list[Any] = [0.0, 0.0]
        average: Tensor | float = 0.0
        for step in range(5):
            grad = gradients(step)[index]
            squares = grad**2 + 1e-30
            means = [squares.mean(-1), squares.mean(-2)] if grad.dim() > 1 else [squares, squares]
            square = [0.999 * old + 0.001 * new for old, new in zip(square, means, strict=True)]
            update = grad / (_factored(*square) if grad.dim() > 1 else square[0]) ** 0.5
            update = update / max(1.0, float(update.square().mean() ** 0.5))
            average = 0.9 * average + 0.1 * update
            moved = average
            if grad.dim() > 1:
                off = (update - average) ** 2 + 1e-16
                unsure = [0.9999 * o + 0.0001 * n for o, n in zip(unsure, (off.mean(-1), off.mean(-2)), strict=True)]
                moved = average / _factored(*unsure) ** 0.5
            weight = weight - 0.1 * 0.01 * weight - 0.01 * moved
        expected.append(weight)
    check(walk(optimizer), expected, 1e-10)


@pytest.mark.parametrize("kind", ["std", "reverse_std", "left", "right", "full"])
def test_galore_of_full_rank_is_exact_but_for_its_scale(kind: str) -> None:
    """With all singular vectors SGD's sum of gradients comes back; Adam's moments are those of the rotated gradient."""

    def galore(rank: int) -> Any:
        groups = [{"params": params(dims=2), "rank": rank, "update_proj_gap": 3, "scale": 1.0, "proj_type": kind}]
        return own.GaLoreAdamW(groups, lr=0.01, eps=1e-3)

    expected = []
    for index in (i for i, shape in enumerate(SHAPES) if len(shape) == 2):
        weight = params()[index].detach().clone()
        first = second = left = right = None
        for step in range(5):
            grad = gradients(step)[index]
            if step % 3 == 0:
                u, _, v = torch.linalg.svd(grad, full_matrices=False)
                tall = grad.shape[0] >= grad.shape[1]
                on_left = kind in ("left", "full") or (kind == "std" and not tall) or (kind == "reverse_std" and tall)
                left = u[:, :2] if on_left else torch.eye(grad.shape[0], dtype=grad.dtype)
                right = v[:2] if not on_left or kind == "full" else torch.eye(grad.shape[1], dtype=grad.dtype)
            assert left is not None and right is not None
            low = left.T @ grad @ right.T
            first = 0.1 * low if first is None else 0.9 * first + 0.1 * low
            second = 0.001 * low**2 if second is None else 0.999 * second + 0.001 * low**2
            rate = 0.01 * math.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
            weight = weight - rate * left @ (first / (second**0.5 + 1e-3)) @ right
        expected.append(weight)
    optimizer = galore(2)
    check(walk(optimizer), expected, 1e-10)
    assert all("exp_avg" in state and "projection" in state for state in optimizer.state.values())


def test_galore_without_a_rank_is_adam() -> None:
    ours = own.DistGaloreAwamW(params(), lr=0.01, weight_decay=0, nbits=32)
    check(walk(ours), walk(torch.optim.AdamW(params(), lr=0.01, weight_decay=0)))
    check(walk(own.GaLoreAdafactor(params())), walk(own.Adafactor(params())))


def test_groups_for_galore() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 5), nn.Conv1d(1, 2, 3))
    matrices, others, plain = own.get_galore_param_groups(model, 0.1, rank=2)
    assert [tuple(p.shape) for p in matrices["params"]] == [(3, 4), (5, 4)] and matrices["rank"] == 2
    assert [tuple(p.shape) for p in others["params"]] == [(2, 1, 3)] and plain["weight_decay"] == 0
    assert len(plain["params"]) == 2


def test_16_bit_parameters_are_computed_with_in_fp32() -> None:
    for make in (own.Lamb, own.Adafactor, own.GaLoreAdafactor, lambda p: own.CAME(p, lr=0.01), own.Lars):
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
    "Lamb": own.Lamb,
    "FusedLAMB": own.FusedLAMB,
    "Lars": lambda p: own.Lars(p, momentum=0.9),
    "Adafactor": lambda p: own.Adafactor(p, beta1=0.9),
    "CAME": lambda p: own.CAME(p, lr=0.01),
    "GaLore": lambda p: own.GaLoreAdamW([{"params": p, "rank": 2}]),
    "Muon": lambda p: MuonWithAuxAdam([{"params": p, "use_muon": True}]),
    "Muon's Adam": lambda p: MuonWithAuxAdam([{"params": p, "use_muon": False}]),
}


@pytest.mark.parametrize("name", KEPT)
def test_state_of_16_bit_parameters_goes_on_in_fp32(name: str) -> None:
    first = KEPT[name](params(torch.bfloat16, 2))
    walk(first, 3)
    second = KEPT[name]([nn.Parameter(each.detach().clone()) for each in first.param_groups[0]["params"]])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert all(torch.equal(one, other) for one, other in zip(walk(first), walk(second), strict=True))
    for one, other in zip(first.state.values(), second.state.values(), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one)


@pytest.mark.parametrize("kind", [own.FusedAdam, own.HybridAdam, own.CPUAdam, own.FusedLAMB, own.Lamb])
def test_a_count_in_the_groups_goes_on(kind: Any) -> None:
    first = kind(params())
    walk(first, 3)
    given = first.state_dict()
    theirs = {n: {key: x.clone() for key, x in s.items() if key != "step"} for n, s in given["state"].items()}
    groups = [group | {"step": 3} for group in given["param_groups"]]
    second = kind([nn.Parameter(each.detach().clone()) for each in first.param_groups[0]["params"]])
    second.load_state_dict({"state": theirs, "param_groups": groups})
    assert "step" not in second.param_groups[0] and groups[0]["step"] == 3
    assert all("step" not in each for each in theirs.values())
    assert all(torch.equal(one, other) for one, other in zip(walk(first), walk(second), strict=True))


def test_second_names_are_the_same_optimizers() -> None:
    for make, kind in (
        (own.Lamb, own.DistributedLamb),
        (own.Adafactor, own.DistributedAdaFactor),
        (lambda p: own.CAME(p, lr=0.1), own.DistributedCAME),
        (lambda p: own.GaLoreAdamW8bit(p, nbits=32), own.DistGaloreAwamW),
    ):
        optimizer: Any = make(params())
        walk(optimizer, 2)
        cast: Any = own.cast_to_distributed(optimizer)
        assert cast is optimizer and type(cast) is kind
        cast.setup_distributed(None, None, {id(p): p for g in cast.param_groups for p in g["params"]}, None, True)
        other = make(params())
        check(walk(cast, 3), [walk(other, 2), walk(other, 3)][1])
        with pytest.raises(ValueError, match="shard_to_working_param has 1 parameters that are shards"):
            cast.setup_distributed(shard_to_working_param={1: torch.ones(2)})
    adam = torch.optim.AdamW(params())
    assert own.cast_to_distributed(adam) is adam and type(adam) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: own.Lamb(params(), lr=-1), ValueError, "lr=-1"),
        (lambda: own.Lamb(params(), betas=(0.9, 1.0)), ValueError, r"betas\[1\]=1\.0"),
        (lambda: own.Lars(params(), eeta=2), ValueError, "eeta=2"),
        (lambda: own.Lars(params(), momentum=-0.1), ValueError, "momentum=-0.1"),
        (lambda: own.FusedLAMB(params(), amsgrad=True), RuntimeError, "amsgrad=True"),
        (lambda: own.Adafactor(params(), lr=0.1), ValueError, "lr=0.1 with relative_step=True"),
        (lambda: own.Adafactor(params(), relative_step=False), ValueError, "lr=None"),
        (lambda: own.Adafactor(params(), lr=1.0, relative_step=False, warmup_init=True), ValueError, "warmup_init"),
        (lambda: own.CAME(params()), ValueError, "lr=None: CAME needs"),
        (lambda: own.GaLoreAdamW8bit(params()), NotImplementedError, "nbits=8.*give nbits=32"),
        (lambda: own.DistGaloreAwamW(params(), nbits=32, is_paged=True), NotImplementedError, "is_paged=True"),
        (lambda: own.GaLoreAdamW([{"params": params(), "rank": 2}]), ValueError, r"shapes \[\(5,\)"),
        (lambda: own.GaLoreAdamW([{"params": params(dims=2), "rank": 0}]), ValueError, "rank=0"),
        (
            lambda: own.GaLoreAdamW([{"params": params(dims=2), "rank": 1, "proj_type": "up"}]),
            ValueError,
            "proj_type='up'",
        ),
        (lambda: own.FusedSGD(params(), lr=0.1, wd_after_momentum=True), NotImplementedError, "wd_after_momentum=True"),
        (lambda: own.HybridAdam(params(), weigth_decay=0.1), TypeError, "did you mean 'weight_decay'"),
        (lambda: own.HybridAdam(params(), amsgrad=True), ValueError, "amsgrad=True of HybridAdam"),
    ],
)
def test_wrong_arguments(make: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        make()


def test_options_by_name() -> None:
    up, down = own.HybridAdam(params(), maximize=True, amsgrad=False), own.HybridAdam(params())
    assert up.param_groups[0]["maximize"] and up.defaults["maximize"]
    moved = [each - start.detach() for each, start in zip(walk(up, 1), params(), strict=True)]
    check(moved, [start.detach() - each for each, start in zip(walk(down, 1), params(), strict=True)], 1e-9)
    check(walk(own.FusedSGD(params(), lr=0.1, momentum=0.9)), walk(torch.optim.SGD(params(), lr=0.1, momentum=0.9)))


def test_sparse_gradients_are_refused_before_anything_changes() -> None:
    dense, sparse = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, 2))
    optimizer = own.Lamb([dense, sparse])
    dense.grad, sparse.grad = torch.ones(2), torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match=r"shape \(3, 2\)"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(2)) and not optimizer.state


def test_muon_is_torchs_and_its_other_half_is_adamw() -> None:
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
def test_muon_of_every_shape_is_its_formula(shape: tuple[int, ...], method: str) -> None:
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


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({}, "use_muon=None of group 0: give True or False"),
        ({"use_muon": True, "momentum": 1.0}, "momentum=1.0"),
        ({"use_muon": True, "ns_method": "exact"}, "ns_method='exact': give one of 'gram', 'standard'"),
        ({"use_muon": False, "betas": (0.9, 1.0)}, "betas=1.0"),
        ({"use_muon": False, "eps": -1.0}, "eps=-1.0"),
    ],
)
def test_wrong_groups_of_muon(group: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MuonWithAuxAdam([{"params": params(dims=2), **group}])
    with pytest.raises(ValueError, match="give False for what is no matrix"):
        MuonWithAuxAdam([{"params": params(dims=1), "use_muon": True}])


def test_a_count_in_the_groups_goes_on_in_shards() -> None:
    weight = nn.Linear(4, 3, bias=False).double()
    plain = own.FusedAdam([nn.Parameter(weight.weight.detach().clone())])
    session = shardwise.shard(weight, own.FusedAdam(weight.parameters()), stage=2, device="cpu")
    moments = {"exp_avg": torch.full((3, 4), 0.5), "exp_avg_sq": torch.full((3, 4), 0.25)}
    group = {key: value for key, value in plain.state_dict()["param_groups"][0].items() if key != "step"}
    full = {"state": {0: {k: v.double() for k, v in moments.items()}}, "param_groups": [group | {"step": 1000}]}
    plain.load_state_dict(copy.deepcopy(full))
    session.optimizer.load_state_dict(full)
    session.backward(session.module(torch.ones(1, 4, dtype=torch.float64)).sum())
    plain.param_groups[0]["params"][0].grad = torch.ones(3, 4, dtype=torch.float64)
    session.optimizer.step()
    plain.step()
    assert float(session.optimizer.state_dict()["state"][0]["step"]) == 1001
    check([session.module.state_dict()["weight"]], [plain.param_groups[0]["params"][0].detach()])
    session.close()
