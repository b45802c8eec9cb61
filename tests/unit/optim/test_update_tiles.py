"""Tests of the optimizer update in tiles: ``plan_tiles``, ``TileStepper``, ``BareStep`` and ``needs_whole_tensors``.

- ``plan_tiles`` covers each element of a shard once, in order, by param group, in tiles of a limited length.
- Small tiles are stepped in one call, and the results equal those of separate calls.
- A tile is stepped without the hooks of the user's optimizer, and the optimizer is unchanged afterwards.
- No optimizer changes the reduced gradients, for any kernel and options.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwise.core.optim import CPUAdam, FusedAdam, HybridAdam
from shardwise.core.optim.lamb import FusedLAMB, Lamb
from shardwise.core.shards.layout import ParamInfo, make_layout
from shardwise.core.update import tiles as update_tiles
from shardwise.core.update.tile_plan import TILE_NUMEL, plan_tiles
from shardwise.core.update.tiles import NEVER, WHOLE_TENSORS, BareStep, PendingTile, TileStepper, needs_whole_tensors
from shardwise.plan import ByNumel, Plan, zero
from shardwise.session import build
from tests.support.on_ranks import raises
from tests.support.sets import full


def test_needs_whole_tensors() -> None:
    params = [nn.Parameter(torch.ones(2, 2))]
    assert needs_whole_tensors(torch.optim.Adafactor(params)) and needs_whole_tensors(torch.optim.Muon(params))
    assert needs_whole_tensors(Lamb(params)) and not needs_whole_tensors(torch.optim.AdamW(params))
    assert needs_whole_tensors(FusedLAMB(params, max_grad_norm=0))
    told = r"FusedLAMB cannot be sharded: max_grad_norm=1\.0 needs all gradients"
    raises(ValueError, told, needs_whole_tensors, FusedLAMB(params))


@pytest.mark.parametrize("there", [False, True])
def test_a_fused_kernel_is_chosen_for_the_device_of_a_tile(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.12 Adagrad has no fused kernel on GPUs. The meta device stands for a GPU; CPU tiles stay fused."""
    monkeypatch.setattr(update_tiles, "ADAGRAD_ON_GPUS", there)
    host, gpu = torch.zeros(2), torch.zeros(2, device="meta")
    for asked, of_host, of_gpu in ((None, True, True if there else None), (False, False, False), (True, True, True)):
        stepper = TileStepper(torch.optim.Adagrad([nn.Parameter(torch.zeros(2))], fused=asked), [])
        with stepper.groups() as groups:
            found = [stepper._group_for(groups, 0, value) for value in (host, gpu, host)]
        assert [group["fused"] for group in found] == [of_host, of_gpu, of_host]
        assert found[1]["foreach"] is (False if of_gpu and asked is None else None)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    groups=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    ranks=st.integers(1, 5),
    tile_numel=st.integers(1, 70),
)
def test_plan_tiles_covers_every_element_once(sizes: list[int], groups: list[int], ranks: int, tile_numel: int) -> None:
    facts = [ParamInfo((f"p{i}",), torch.Size([n]), torch.float32, True, 0, groups[i]) for i, n in enumerate(sizes)]
    layout = make_layout(facts, nn.Module(), ByNumel(chunk_numel=50), ranks, 1)
    covered: dict[int, list[int]] = {i: [] for i in range(len(sizes))}
    for spec in layout.chunks:
        for rank in range(ranks):
            last = 0
            for tile in plan_tiles(spec, rank, groups, tile_numel):
                assert tile.pieces and tile.end - tile.start <= tile_numel
                for piece in tile.pieces:
                    assert groups[piece.param] == tile.group
                    assert last <= piece.start < piece.end <= spec.shard_numel(rank)
                    last = piece.end
                    slot = spec.slots[piece.slot]
                    assert slot.param == piece.param
                    assert spec.bounds[rank] + piece.start == slot.start + piece.offset
                    covered[piece.param] += range(piece.offset, piece.offset + piece.end - piece.start)
    assert {i: sorted(found) for i, found in covered.items()} == {i: list(range(n)) for i, n in enumerate(sizes)}


def test_parameters_of_one_group_share_tiles() -> None:
    facts = [ParamInfo((f"p{i}",), torch.Size([n]), torch.float32, True, 0, 0) for i, n in enumerate((4, 4, 4, 10))]
    (spec,) = make_layout(facts, nn.Module(), ByNumel(chunk_numel=100), 1, 1).chunks
    spans = [(t.start, t.end, len(t.pieces)) for t in plan_tiles(spec, 0, [0] * 4, 8)]
    assert [end - start for start, end, _ in spans] == [8, 4, 8, 2]
    assert len(plan_tiles(spec, 0, [0, 0, 1, 0], 100)) == 3


WIDTHS = [3, 5, 0, 7, 2, 4]


def make() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    for number, width in enumerate(WIDTHS):
        model.register_parameter(f"w{number}", nn.Parameter(torch.randn(width, 3)))
        model.register_parameter(f"b{number}", nn.Parameter(torch.randn(width)))

    def forward(step: int) -> torch.Tensor:
        used = [p for name, p in model.named_parameters() if step != 1 or not name.endswith("2")]
        return torch.stack([(p * (step + 1)).square().sum() for p in used if p.numel()]).sum()

    model.forward = forward
    return model


Make = Callable[[nn.Module], torch.optim.Optimizer]


def grouped(kind: type[torch.optim.Optimizer], **options: object) -> Make:
    """Return a factory for an optimizer with weights and biases in separate groups, as with and without weight decay.

    The kernel is fused where torch has one, because shards are stepped with it and other kernels round differently.
    """

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        rates = {"w": 0.1, "b": 0.3}
        groups = [{"params": [p for n, p in named.items() if n[0] == one], "lr": rates[one]} for one in rates]
        return kind(groups, **options)  # type: ignore[call-arg]

    return optimizer


OPTIMIZERS: dict[str, Make] = {
    "AdamW": grouped(torch.optim.AdamW, fused=True),
    "AdamW, foreach": grouped(torch.optim.AdamW, foreach=True),
    "Adam with amsgrad": grouped(torch.optim.Adam, amsgrad=True, fused=True),
    "SGD with momentum": grouped(torch.optim.SGD, momentum=0.9, fused=True),
    "Adagrad": grouped(torch.optim.Adagrad, fused=True),
    "NAdam": grouped(torch.optim.NAdam),
}


@contextmanager
def calls_of(optimizer: torch.optim.Optimizer) -> Iterator[list[int]]:
    """Record the number of tensors in each call of ``optimizer.step()`` inside the context."""
    calls: list[int] = []
    kind, real = type(optimizer), type(optimizer).step

    def step(self: torch.optim.Optimizer, *args: object) -> object:
        calls.append(sum(len(group["params"]) for group in self.param_groups))
        return real(self, *args)

    with mock.patch.object(kind, "step", step):
        yield calls


def trained(kind: Make, plan: Plan | None, tile_numel: int) -> tuple[list[torch.Tensor], list[int]]:
    model = make()
    optimizer = kind(model)
    if plan is None:
        for step in range(3):
            optimizer.zero_grad()
            model(step).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()], []
    with mock.patch.dict(TILE_NUMEL, {"cpu": tile_numel}), calls_of(optimizer) as calls:
        session = build(model, optimizer, plan)
        for step in range(3):
            session.backward(session.module(step))
            session.optimizer.step()
            session.optimizer.zero_grad()
        values = session.module.state_dict()
        session.close()
        return [values[name] for name, _ in make().named_parameters()], calls


def _cases() -> Iterator[Any]:
    """Yield all combinations; the quick set has every optimizer with both chunk sizes, and every tile size at least
    once.
    """
    chunks, tiles = enumerate([8, 10**6]), [1, 4, 10, 30, 10**6]
    for (row, chunk_numel), (column, (name, kind)) in itertools.product(chunks, enumerate(OPTIMIZERS.items())):
        for layer, tile_numel in enumerate(tiles):
            case = pytest.param(kind, tile_numel, chunk_numel, id=f"{chunk_numel}-{name}-{tile_numel}")
            yield case if layer == (column + 2 * row) % len(tiles) else full(case)[0]


@pytest.mark.parametrize(("kind", "tile_numel", "chunk_numel"), _cases())
def test_parameters_match_torch(kind: Make, tile_numel: int, chunk_numel: int) -> None:
    plan = zero(2).but(packing=ByNumel(chunk_numel=chunk_numel))
    expected, _ = trained(kind, None, 1)
    found, calls = trained(kind, plan, tile_numel)
    assert len(expected) == len(found) == 2 * len(WIDTHS)
    for one, other in zip(found, expected, strict=True):
        if tile_numel >= max(p.numel() for p in make().parameters()):
            assert torch.equal(one, other)
        else:  # kernels vectorize, but compute the last elements of a piece one by one
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert calls and min(calls) >= 1


class Own(torch.optim.SGD):
    element_wise = True


def test_one_step_call_updates_all_chunks_of_a_group() -> None:
    plan = zero(2).but(packing=ByNumel(chunk_numel=8))
    calls, alone = (trained(OPTIMIZERS["AdamW"], plan, tile_numel)[1] for tile_numel in (10**6, 1))
    assert len(calls) == 3 * 2  # one call for each group in each step
    assert len(alone) > 10 * len(calls)
    # A user's step() may treat tensors of one call together, so the engine does not merge the calls.
    assert len(trained(grouped(Own), plan, 10**6)[1]) > 3 * 4


class Borrows(torch.optim.SGD):
    """An optimizer whose ``param_groups`` is a property."""

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self._groups = groups


class Counts(torch.optim.SGD):
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        assert type(self).__name__ == "Counts" and isinstance(self, Counts)
        return super().step(closure)


def own_step(self: torch.optim.Optimizer) -> None:
    for group in self.param_groups:
        group["params"][0].data.sub_(group["lr"] * group["params"][0].grad)


def replaced(optimizer: Any, bound: bool) -> torch.optim.Optimizer:
    optimizer.step = own_step.__get__(optimizer) if bound else lambda: own_step(optimizer)
    return optimizer


CASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "its class's": lambda params: Counts(params, lr=0.5),
    "a method in its place": lambda params: replaced(torch.optim.SGD(params, lr=0.5), True),
    "a function in its place": lambda params: replaced(torch.optim.SGD(params, lr=0.5), False),
    "a property": lambda params: Borrows(params, lr=0.5),
}


@pytest.mark.parametrize("case", CASES)
def test_bare_step_runs_no_hooks(case: str) -> None:
    optimizer = CASES[case]([nn.Parameter(torch.ones(2))])
    hooks: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: hooks.append("before"))
    groups, before = optimizer.param_groups, optimizer._optimizer_step_pre_hooks
    value = nn.Parameter(torch.ones(2))
    value.grad = torch.ones(2)
    bare = BareStep(optimizer)
    with bare.hidden():
        bare.step({**groups[0], "params": [value]})
    assert value.tolist() == [0.5, 0.5] and groups[0]["params"][0].tolist() == [1.0, 1.0]
    assert optimizer.param_groups is groups and optimizer._optimizer_step_pre_hooks is before and not hooks
    assert getattr(optimizer, "calls", 1) == 1


FLAGS = ("maximize", "nesterov", "amsgrad", "centered", "decoupled_weight_decay", "adamw_mode")
CHOICES: dict[str, tuple[Any, ...]] = {"weight_decay": (0.0, 0.1), "momentum": (0.0, 0.9), "dampening": (0.0, 0.1)}
CHOICES |= dict.fromkeys(FLAGS, (False, True))
KERNELS: tuple[dict[str, bool], ...] = ({}, {"foreach": True}, {"foreach": False}, {"fused": True})
"""With the first, torch chooses the kernel."""


def element_wise() -> list[type[torch.optim.Optimizer]]:
    found = [getattr(torch.optim, name) for name in torch.optim.__all__ if name != "Optimizer"]
    classes = [c for c in found if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)]
    own: list[type[torch.optim.Optimizer]] = [CPUAdam, HybridAdam, FusedAdam]
    return [c for c in classes if c.__name__.lower() not in (*NEVER, *WHOLE_TENSORS)] + own


def options_of(kind: type[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    """Yield every combination of options that the class accepts."""
    takes = inspect.signature(kind).parameters
    names = [name for name in CHOICES if name in takes]
    for values in itertools.product(*(CHOICES[name] for name in names)):
        chosen = dict(zip(names, values, strict=True))
        if chosen.get("nesterov") and (not chosen.get("momentum", 1.0) or chosen.get("dampening")):
            continue
        for kernel in KERNELS:
            if all(name in takes for name in kernel):
                yield chosen | kernel


@contextmanager
def looking_at_gradients() -> Iterator[list[bool]]:
    """Record for each call of ``step_tiles`` inside the context whether it left the gradients unchanged."""
    kept: list[bool] = []
    real = TileStepper.step_tiles

    def step_tiles(self: TileStepper, due: Sequence[PendingTile], *rest: Any) -> None:
        held = [each.reduced for each in due]
        before = [each.clone() for each in held]
        real(self, due, *rest)
        kept.append(bool(held) and all(map(torch.equal, held, before)))

    with mock.patch.object(TileStepper, "step_tiles", step_tiles):
        yield kept


OF_A_KIND = ("Adam", "RMSprop", "RAdam", "Adamax", "FusedAdam")
"""Not in the quick set, which has optimizers with the same options or the same kernel."""
ALL_OPTIMIZERS = [full(kind)[0] if kind.__name__ in OF_A_KIND else kind for kind in element_wise()]


@pytest.mark.parametrize("kind", ALL_OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_optimizers_do_not_change_gradients(kind: type[torch.optim.Optimizer]) -> None:
    tried = 0
    for options in options_of(kind):
        model = nn.Linear(3, 2)
        try:
            optimizer = kind(model.parameters(), **options)  # type: ignore[call-arg]
        except (RuntimeError, ValueError):  # the class does not support this combination
            continue
        with looking_at_gradients() as kept:
            session = build(model, optimizer, zero(2))
            for _ in range(3):
                session.backward(session.module(torch.ones(2, 3)).square().sum())
                session.optimizer.step()
            session.close()
        assert len(kept) >= 3 and all(kept), f"{kind.__name__} with {options}"
        tried += 1
    assert tried
