"""``python -m benchmarks.gpu.model``: compute the timeline of a training step on GPUs that nobody needs to have.

Operators, bytes and collectives of a step are counted in one process on the CPU, of this library with peers that are
simulated (:func:`tests.support.alike.alike_mesh`) and of torch's FSDP2 with torch's fake process group. The data sheet
of a GPU turns them into seconds: every row is computed, not measured. ``--write`` puts the table into the docs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.train import Checkpointed
from benchmarks.job import SIZES, Size
from benchmarks.model import GPT, batch, make_model
from benchmarks.systems import adamw
from benchmarks.table import replace_section
from shardwise.core.checks import batches, guards
from shardwise.core.engine import optimizer
from shardwise.core.update.tile_plan import TILE_NUMEL
from shardwise.plan import zero
from shardwise.session import build
from tests.support.alike import AlikeProcessGroup, alike_mesh

__all__ = ["H100", "Counts", "Device", "Timeline", "counts_of", "home_of", "main", "table", "timeline", "units_of"]

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "inside" / "benchmarks.md"
MODELS = {"1.3B": SIZES["1.3B"], "7B": SIZES["7B"], "70B": Size(8192, 80, 64, 32000, sequence=1024, micro_batch=4)}
RANKS = (1, 8, 64)


@dataclass(frozen=True)
class Device:
    """Data sheet of a GPU and its host: FLOP/s, bytes and bytes/s in one direction; then what of it is reached.

    ``hop_s`` is the latency of one step of a ring, ``operator_s`` the host's time to launch one operator.
    """

    flops: float = 989e12
    hbm: float = 3.35e12
    memory: float = 80e9
    nvlink: float = 450e9
    network: float = 50e9
    pcie: float = 64e9
    host_memory: float = 50e9
    host_bytes: float = 256e9
    gpus_a_host: int = 8
    of_flops: float = 0.6
    of_bandwidth: float = 0.8
    hop_s: float = 2e-6
    operator_s: float = 6e-6

    def link(self, ranks: int) -> float:
        """Bytes/s of a ring of ``ranks``; every GPU of a host has a network card of its own."""
        return self.of_bandwidth * min(self.nvlink, self.gpus_a_host * self.network if ranks > 8 else self.nvlink)


H100 = Device()
"""H100 SXM, eight a host, 400 Gb/s a GPU, PCIe 5."""


# ---- counts


class Operators(TorchDispatchMode):
    """Count operators that are no views, the bytes that they read and write, and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.moved = self.gathers = self.reductions = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        name = op._schema.name
        if op.is_view or name.startswith(
            ("profiler::", "aten::empty", "aten::new_empty", "aten::detach", "aten::set_")
        ):
            return out
        self.operators += 1
        if name.startswith("c10d::"):
            self.gathers += "allgather" in name
            self.reductions += "reduce_scatter" in name
            return out
        read = args[0] if name == "fsdp::all_gather_copy_in" else (args, kwargs, out)  # its output is a slice of all
        local = [getattr(each, "_local_tensor", each) for each in tree_leaves(read)]  # of a DTensor
        tensors = {(t.data_ptr(), t.nbytes): t.nbytes for t in local if isinstance(t, Tensor)}
        twice = name == "fsdp::all_gather_copy_in" or name.startswith(
            ("aten::_fused", "aten::_foreach_add", "aten::add_")
        )
        self.moved += (2 if twice else 1) * sum(tensors.values())
        return out


class Counts(NamedTuple):
    """What a step asks for on a rank. Bytes are what operators read and write, in passes and in the update."""

    operators: float
    moved: float
    update_operators: float
    update_moved: float
    gathers: float
    reductions: float

    def minus(self, other: Counts, times: float = 1) -> Counts:
        """Without ``times`` of the other."""
        return Counts(*(mine - times * theirs for mine, theirs in zip(self, other, strict=True)))


def _counted(passes: Callable[[], object], inner: Any, asked: dict[str, int]) -> Counts:
    """Of the fourth step, when every order has been recorded. ``inner``: the optimizer."""
    for _ in range(3):
        passes()
        inner.step()
        inner.zero_grad()
    asked.clear()
    with Operators() as first:
        passes()
    with Operators() as second:
        inner.step()
    gathers = first.gathers + second.gathers + asked.get("all_gather", 0)
    reductions = first.reductions + asked.get("reduce_scatter", 0)
    return Counts(first.operators, first.moved, second.operators, second.moved, gathers, reductions)


def _model(layers: int) -> tuple[GPT, tuple[Tensor, Tensor]]:
    size = Size(width=64, layers=layers, heads=4, vocabulary=512, sequence=16, micro_batch=1)
    model = make_model(size, "bf16")
    model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
    return model, batch(size, 0, 0)


def _plain(layers: int) -> Counts:
    model, given = _model(layers)
    model.bfloat16()
    return _counted(lambda: model(*given).backward(), adamw(model.parameters()), {})


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Tiles and reads of values as on a GPU; what the simulated transport itself does is not counted."""

    def uncounted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with _disable_current_modes():
                return real(*args)

        return call

    transport = [(name, real) for name, real in vars(AlikeProcessGroup).items() if not name.startswith("__")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(TILE_NUMEL, cpu=TILE_NUMEL["cuda"]))
        for module in (batches, guards, optimizer):
            stack.enter_context(mock.patch.object(module, "runs_ahead", lambda _device: True))
        for name, real in transport:
            stack.enter_context(mock.patch.object(AlikeProcessGroup, name, uncounted(real)))
        yield


def _shardwise(layers: int, ranks: int) -> Counts:
    plan = zero(3, torch.bfloat16)
    model, given = _model(layers)
    with _as_on_a_gpu(), alike_mesh(plan, 0, ranks, "queued") as (mesh, asked):
        session = build(model, adamw(model.parameters()), plan, mesh)
        found = _counted(lambda: session.backward(session.module(*given)), session.optimizer, asked.calls)
        session.close()
    return found


def _fsdp2(layers: int, ranks: int) -> Counts:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        model, given = _model(layers)
        policy, mesh = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16), init_device_mesh("cpu", (ranks,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        return _counted(lambda: model(*given).backward(), adamw(model.parameters()), {})
    finally:
        dist.destroy_process_group()


SYSTEMS: dict[str, Callable[[int, int], Counts]] = {"shardwise": _shardwise, "FSDP2": _fsdp2}
ON_PCIE = {"shardwise": (0, 2, 2), "FSDP2": (4, 4, 0)}
"""Bytes a parameter that cross PCIe with a gather, a reduction and the update where state is at home on the host. FSDP2
keeps fp32 parameters there and uploads them for each gather; here 16-bit ones stay on the GPU."""


@functools.cache
def counts_of(system: str, ranks: int) -> tuple[Counts, Counts]:
    """Count a step at ZeRO-3 in bf16 with fp32 masters on one of ``ranks`` ranks: of a layer, and of the rest.

    ``moved`` is without the bytes of the plain model, and both sums of bytes are divided by the layer's parameters.
    """
    few, many = (SYSTEMS[system](layers, ranks) for layers in (1, 2))
    plain, numel = _plain(2).minus(_plain(1)).moved, sum(p.numel() for p in _model(1)[0].blocks.parameters())
    layer = many.minus(few)
    a_parameter = layer._replace(moved=(layer.moved - plain) / numel, update_moved=layer.update_moved / numel)
    return a_parameter, few.minus(layer)


# ---- timeline


@dataclass
class Timeline:
    """Seconds of a step. ``total`` is the sum of ``compute``, ``copies``, ``update`` and the three that are exposed.

    ``gathers``, ``reductions`` and ``host`` are all the work of each kind; most of it runs beside the rest.
    """

    compute: float = 0.0
    copies: float = 0.0
    gathers: float = 0.0
    reductions: float = 0.0
    host: float = 0.0
    exposed_gathers: float = 0.0
    exposed_reductions: float = 0.0
    exposed_host: float = 0.0
    update: float = 0.0
    total: float = 0.0


class Unit(NamedTuple):
    """What is gathered at once: parameters, operators, and how often a pass multiplies by all of it."""

    numel: float
    operators: float
    forward: int
    backward: int


def units_of(size: Size, layer: Counts, rest: Counts) -> list[Unit]:
    """Embedding, blocks and head in the order of forward. Backward computes the activations of a block again."""
    block = 12 * size.width**2 + 13 * size.width
    ends, half = size.width * size.vocabulary, rest.operators / 2
    return [Unit(ends, half, 0, 0), *[Unit(block, layer.operators, 1, 3)] * size.layers, Unit(ends, half, 1, 2)]


def home_of(size: Size, ranks: int, device: Device = H100) -> str:
    """Where masters and moments are, ``device`` or ``host``; empty where 16 bytes a parameter fit into neither."""
    block, ends = 12 * size.width**2, size.width * size.vocabulary
    numel = (size.layers * block + 2 * ends) / ranks
    room = 0.9 * device.memory - 4 * (ends + 2 * block)  # gathered units and their gradients, and activations
    on_host = 4 * numel <= room and 16 * numel <= device.host_bytes
    return "device" if 16 * numel <= room else "host" if on_host else ""


def timeline(system: str, size: Size, ranks: int, layer: Counts, rest: Counts, device: Device = H100) -> Timeline:
    """Run a step: units compute one after the other; one link carries the gather of a unit while the unit before it
    computes, then the reduction of that one."""
    found, tokens, units = Timeline(), size.micro_batch * size.sequence, units_of(size, layer, rest)
    rate, memory = device.of_flops * device.flops, device.of_bandwidth * device.hbm
    offloaded = home_of(size, ranks, device) != "device"
    pcie = ranks * device.of_bandwidth * device.pcie if offloaded else math.inf
    up, down, back = (each / pcie for each in ON_PCIE[system])

    def message(numel: float) -> float:
        return (ranks - 1) * device.hop_s + 2 * numel * (1 - 1 / ranks) / device.link(ranks) if ranks > 1 else 0.0

    now = ahead = link = reduced = downloaded = 0.0
    for forward in (True, False):
        for unit in units if forward else units[::-1]:
            work = 2 * unit.numel * tokens * (unit.forward if forward else unit.backward) / rate
            copy = layer.moved * unit.numel / 2 / memory
            launch = unit.operators * device.operator_s * (0.25 if forward else 0.75)
            gather = 0.0 if not forward and unit is units[-1] else message(unit.numel) + up * unit.numel
            link = max(link, ahead) + gather
            link, arrived = max(link, now if reduced else 0.0) + reduced, link
            ahead = max(now, arrived)
            found.exposed_gathers += ahead - now
            found.exposed_host += max(0.0, launch - work - copy)
            now = ahead + max(work + copy, launch)
            reduced = 0.0 if forward else message(unit.numel)
            if not forward:  # PCIe carries both ways at once
                downloaded = max(downloaded, now) + reduced + down * unit.numel
            found.compute, found.copies, found.host = found.compute + work, found.copies + copy, found.host + launch
            found.gathers += gather
            found.reductions += 0.0 if forward else reduced + down * unit.numel
    link = max(max(link, now) + reduced, downloaded if offloaded else 0.0)
    found.exposed_reductions = link - now
    numel = sum(unit.numel for unit in units)
    found.update = max(layer.update_moved * numel / memory, rest.update_operators * device.operator_s)
    if offloaded:  # Adam reads 14 bytes a parameter and writes as many
        found.update = numel * (28 / device.host_memory / ranks + back)
    found.total = link + found.update
    return found


def table() -> str:
    """Every model on every number of GPUs, this library and FSDP2."""
    lines = [
        f"**Computed, not measured.** H100 SXM at {H100.of_flops:.0%} of its bf16 FLOP/s and {H100.of_bandwidth:.0%} "
        f"of its bandwidths; an operator takes {H100.operator_s * 1e6:.0f} us of the host. Milliseconds; in "
        "brackets all work of the kind, with what is hidden.",
        "",
        "| model | GPUs | system | state | compute | copies | exposed gathers | exposed reductions | exposed host | "
        "update | step |",
        "|" + "---|" * 11,
    ]
    for name, size in MODELS.items():
        for ranks in RANKS:
            home = home_of(size, ranks)
            if not home:
                lines.append(f"| {name} | {ranks} | both | does not fit |" + " |" * 7)
                continue
            for system in SYSTEMS:
                t = timeline(system, size, ranks, *counts_of(system, ranks))
                hidden = [
                    (t.exposed_gathers, t.gathers),
                    (t.exposed_reductions, t.reductions),
                    (t.exposed_host, t.host),
                ]
                cells = [f"{t.compute * 1e3:.0f}", f"{t.copies * 1e3:.0f}"]
                cells += [f"{part * 1e3:.1f} ({whole * 1e3:.0f})" for part, whole in hidden]
                cells += [f"{t.update * 1e3:.0f}", f"{t.total * 1e3:.0f}"]
                lines.append(f"| {name} | {ranks} | {system} | {home} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *counts_table()])


def counts_table() -> list[str]:
    """What the rows are computed from."""
    lines = [
        "| GPUs | system | operators a layer | gathers a layer | reductions a layer | operators besides | operators of "
        "the update | bytes a parameter in passes | in the update |",
        "|" + "---|" * 9,
    ]
    for ranks in RANKS:
        for system in SYSTEMS:
            layer, rest = counts_of(system, ranks)
            numbers = (layer.operators, layer.gathers, layer.reductions, rest.operators, rest.update_operators)
            cells = [f"{number:.0f}" for number in numbers] + [f"{layer.moved:.1f}", f"{layer.update_moved:.1f}"]
            lines.append(f"| {ranks} | {system} | {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.model", description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help=f"into {DOCUMENT.name}")
    options = parser.parse_args(arguments)
    text = table()
    if options.write:
        replace_section(DOCUMENT, "model", text)
    print(text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
