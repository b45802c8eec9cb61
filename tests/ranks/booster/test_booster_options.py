"""What arguments of the engine's plugins do in a run: updates during backward, offloading, reports, input casts."""

from __future__ import annotations

import contextlib
import functools
import io
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from shardwise.booster.plugin.base import ShardedPlugin, updates_early
from shardwise.core.deferred import deferred_init
from shardwise.core.optim import HybridAdam
from shardwise.testing import run_ranks
from tests.support.booster_setup import Run, batch
from tests.support.early_setup import Case, Seen, check_equal, counting
from tests.support.sets import full
from tests.support.tier_setup import digest

RANKS = 2
PIECES = {"chunk_config_dict": {RANKS: {"chunk_size": 40}}}  # several chunks of the small model
PLUGINS: dict[str, Callable[..., ShardedPlugin]] = {
    "zero1": functools.partial(LowLevelZeroPlugin, stage=1, precision="fp32"),
    "zero2": functools.partial(LowLevelZeroPlugin, stage=2, precision="fp32"),
    "zero2-bf16": functools.partial(LowLevelZeroPlugin, stage=2, precision="bf16"),
    "gemini": functools.partial(GeminiPlugin, precision="fp32", **PIECES),
    "gemini-fp16": functools.partial(GeminiPlugin, precision="fp16", initial_scale=1024.0, **PIECES),
}


# -- updates during backward, and memories of the host


@dataclass
class Options:
    """A run with ``given`` must equal, bit for bit, the run without the arguments named in ``tried``."""

    name: str
    given: dict[str, Any]
    tried: tuple[str, ...] = ("update",)


def trained(plugin: ShardedPlugin, steps: int = 5) -> Seen:
    run = Run(plugin)
    rank, losses, norms = dist.get_rank(), [], []
    with counting() as counts:
        for step in range(steps):
            inputs, targets = batch(step)
            loss = run.criterion(run.model(inputs[rank::RANKS]).float(), targets[rank::RANKS])
            run.booster.backward(loss, run.optimizer)
            losses.append(loss.item())
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.scheduler.step()
            norms.append(run.optimizer.get_grad_norm())
            assert not run.optimizer.last_step_skipped
    state = digest([run.model.state_dict(), run.optimizer.state_dict()])
    return Seen(state, losses, norms, **counts)


def _pairs(cases: list[Options]) -> list[tuple[Seen, Seen]]:
    pairs = []
    for case in cases:
        make = PLUGINS[case.name]
        usual = {name: value for name, value in case.given.items() if name not in case.tried}
        pairs.append((trained(make(**usual)), trained(make(**case.given))))
    return pairs


EARLY = {"update": "backward"}
UPDATES = [
    Options("zero1", EARLY),
    Options("zero2", EARLY),
    Options("zero2-bf16", EARLY | {"cpu_offload": True}),
    Options("gemini", EARLY),
    Options("gemini", EARLY | {"offload_optim_frac": 0.5}),
]


@pytest.mark.parametrize("cases", [UPDATES[:1] + UPDATES[-1:], *full(UPDATES[1:-1])], ids=["two", "others"])
def test_updates_during_backward_give_the_same_bits(cases: list[Options]) -> None:
    check_equal(run_ranks(RANKS, _pairs, cases), [Case() for _ in cases])


HOST, HALVES = {"cpu_offload": True}, {"offload_optim_frac": 0.5, "offload_param_frac": 0.5}
OFFLOADED = [
    Options("zero1", HOST, tuple(HOST)),
    Options("zero2-bf16", HOST, tuple(HOST)),
    Options("gemini", HALVES, tuple(HALVES)),
    Options("gemini-fp16", HALVES, tuple(HALVES)),
]


@pytest.mark.parametrize(
    "options", [OFFLOADED[1], OFFLOADED[2], *full(OFFLOADED[0], OFFLOADED[3])], ids=lambda each: each.name
)
def test_offloading_gives_the_same_bits(options: Options) -> None:
    for ((usual, offloaded),) in run_ranks(RANKS, _pairs, [options]):
        assert all(map(math.isfinite, usual.losses + usual.norms))
        assert str(offloaded) == str(usual)  # the digest of masters and state, losses and norms


def _homes(options: Options) -> dict[str, dict[str, int]]:
    run = Run(plugin := PLUGINS[options.name](**options.given))
    run.steps(0, 1)
    return plugin.session(run.model).memory().by_tier


@pytest.mark.parametrize("options", OFFLOADED, ids=lambda options: options.name)
def test_offloading_puts_it_on_the_host(options: Options) -> None:
    for by_tier in run_ranks(RANKS, _homes, options):
        device, host = by_tier["device"], by_tier["host"]
        if "cpu_offload" in options.given:
            assert "optimizer state" not in device and "masters" not in device and "parameters" not in host
            assert host["optimizer state"] > 0
        else:
            assert all(tier["optimizer state"] > 0 and tier["parameters"] > 0 for tier in (device, host))


def _second_pass() -> str:
    run = Run(PLUGINS["gemini"](**EARLY))
    run.booster.backward(run.model(batch(0)[0]).sum(), run.optimizer)
    with pytest.raises(RuntimeError) as error:
        run.booster.backward(run.model(batch(1)[0]).sum(), run.optimizer)
    return str(error.value)


def test_a_second_pass_is_refused() -> None:
    for message in run_ranks(RANKS, _second_pass):
        assert "update='backward'" in message and "Call step() before it" in message


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_on_a_gpu_only_what_is_at_home_elsewhere_is_updated_during_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = LowLevelZeroPlugin(update="backward", precision="bf16")
    assert updates_early(plugin.plan(1), CPU) and not updates_early(plugin.plan(1), GPU)
    assert not updates_early(LowLevelZeroPlugin(cpu_offload=True).plan(1), GPU)
    for placed in (
        LowLevelZeroPlugin(update="backward", precision="bf16", cpu_offload=True),
        GeminiPlugin(update="backward", precision="bf16", offload_optim_frac=0.25),
        GeminiPlugin(update="backward", precision="bf16", placement_policy="auto"),
    ):
        assert updates_early(placed.plan(1), GPU)
    built = SimpleNamespace(module=nn.Linear(1, 1), optimizer=None, optimizers=())
    monkeypatch.setattr("shardwise.session.build", lambda *arguments: built)
    vars(plugin)["_mesh"] = SimpleNamespace(size=1, device=GPU, mesh_group=SimpleNamespace(size=1))
    with pytest.warns(UserWarning, match="update='backward' updates nothing during backward.*on cuda") as caught:
        plugin.configure(nn.Linear(1, 1))
    assert len(caught) == 1


# -- reports


def _said(kind: type[ShardedPlugin], verbose: bool) -> list[str]:
    """What a rank prints while a model is boosted and one step is skipped."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        given = {"hidden_dim": 11, "min_chunk_size_m": 1e-4, "search_range_m": 1} if kind is GeminiPlugin else {}
        model = nn.Sequential(nn.Linear(10, 11), nn.Linear(11, 10), nn.Linear(10, 11))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        booster = Booster(plugin=kind(initial_scale=2.0**32, verbose=verbose, **given))  # type: ignore[call-arg]
        boosted, optimizer, *_ = booster.boost(model, optimizer)
        booster.backward(boosted(torch.ones(1, 10)).float().sum(), optimizer)
        optimizer.step()
        assert optimizer.last_step_skipped  # type: ignore[attr-defined]
    return printed.getvalue().splitlines()


SEARCHED = "chunk search: 121 elements a chunk (242 bytes of float16), chunks: 3, empty: 4 of 728 bytes (0.55%)"
SKIPPED = "step skipped: the gradient of 0.weight is not finite (loss scale 4.29497e+09)"


@pytest.mark.parametrize(("kind", "lines"), [(LowLevelZeroPlugin, [SKIPPED]), (GeminiPlugin, [SEARCHED, SKIPPED])])
def test_verbose_is_said_once(kind: type[ShardedPlugin], lines: list[str]) -> None:
    assert run_ranks(RANKS, _said, kind, True) == [lines, []]
    assert run_ranks(RANKS, _said, kind, False) == [[], []]


# -- input casts


class Watching(nn.Module):
    """Notes which dtypes reach its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, inputs: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen += [inputs.dtype, more["scale"].dtype, more["index"].dtype]
        return self.linear(inputs.to(self.linear.weight.dtype)) * more["scale"]


@pytest.mark.parametrize(("given", "floats"), [({}, torch.bfloat16), ({"cast_inputs": False}, torch.float32)])
def test_cast_inputs(given: dict[str, Any], floats: torch.dtype) -> None:
    model = Watching()
    plugin = LowLevelZeroPlugin(precision="bf16", **given)
    boosted, optimizer, *_ = Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    output = boosted(torch.ones(1, 4), {"scale": torch.ones(()), "index": torch.ones((), dtype=torch.long)})
    assert model.seen == [floats, floats, torch.long]
    before = boosted.state_dict()["linear.weight"]
    optimizer.backward(output.float().sum())
    optimizer.step()
    assert not torch.equal(boosted.state_dict()["linear.weight"], before)


# -- what docs/booster.md says of sessions and of models without memory


def _described(name: str, how: str) -> list[torch.Tensor]:
    torch.manual_seed(5)
    with deferred_init() if how == "deferred" else torch.device("meta") if how == "meta" else nullcontext():
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = HybridAdam(model.parameters(), lr=0.1)
    if how == "meta":
        torch.manual_seed(5)
    boosted, optimizer, *_ = Booster(plugin=PLUGINS[name]()).boost(model, optimizer)
    first = boosted.state_dict()
    optimizer.backward(boosted(torch.ones(3, 4)).sum())
    optimizer.step()
    return [*first.values(), *boosted.state_dict().values()]


@pytest.mark.parametrize("name", ["zero2", "gemini"])
def test_models_without_memory_can_be_boosted(name: str) -> None:
    usual = run_ranks(RANKS, _described, name, "usual")
    assert not torch.equal(usual[0][0], usual[0][4])
    for how in ("deferred", "meta"):
        for found, expected in zip(run_ranks(RANKS, _described, name, how), usual, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), how


def _traffic(folder: str) -> list[dict[str, int]]:
    model = nn.Linear(4, 8)
    optimizer = HybridAdam(model.parameters(), lr=0.1, nvme_offload_fraction=1.0, nvme_offload_dir=folder)
    plugin = PLUGINS["zero2"]()
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    session = plugin.session(boosted)
    assert session.module is boosted and session.optimizer is optimizer
    found = []
    for _ in range(2):
        session.reset_traffic()
        booster.backward(boosted(torch.ones(3, 4)).sum(), optimizer)
        optimizer.step()
        found.append(session.traffic())
    return found


def test_a_plugin_gives_the_session_of_a_model(tmp_path: Path) -> None:
    for first, second in run_ranks(RANKS, _traffic, str(tmp_path)):
        assert first["reduce_scatter"] == second["reduce_scatter"] > 0
        assert second["disk_read"] > 0 and second["disk_write"] > 0
    plugin = PLUGINS["zero2"]()
    for model in (nn.Linear(1, 1), Booster(plugin=TorchDDPPlugin()).boost(nn.Linear(1, 1))[0]):
        with pytest.raises(ValueError, match=rf"session\({type(model).__name__}\): give the model that boost returned"):
            plugin.session(model)
