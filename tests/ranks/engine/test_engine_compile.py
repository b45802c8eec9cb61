"""torch.compile of blocks and of the full model equals the uncompiled model; kernel launches of ``step()``.

Kernels are counted as calls of torch operators that are not views.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core.mesh import Mesh
from shardwise.core.update.tile_plan import TILE_NUMEL
from shardwise.plan import ByNumel, Plan, zero
from shardwise.session import build
from tests.ranks.engine.test_host_waits import as_on_a_gpu
from tests.support.engine_setup import PLANS, adam, check, data, one_mesh, seeded, sharded
from tests.support.modules import TinyGpt
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import campaign, full

WIDTH, LAYERS = 16, 32
NO_KERNEL = ("empty", "detach", "set_", "_local_scalar_dense", "new_empty")


class Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op._schema.name.removeprefix("aten::")
        if not op.is_view and not name.startswith(NO_KERNEL):
            self.names.append(name)
        return op(*args, **(kwargs or {}))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + sum(each(y) for each in self.attention)
        return x + self.down(self.up(self.norms[1](x)).relu())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_step_launches_fewer_kernels_than_layers(stage: Any, max_norm: float, ranks: int) -> None:
    """Count the third step, with tiles of a GPU's size."""
    plan = zero(stage, torch.bfloat16).but(max_norm=max_norm, shared_memory=False)
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with mock.patch.dict(TILE_NUMEL, cpu=TILE_NUMEL["cuda"]), as_on_a_gpu(), sharded(model, optimizer, plan) as session:
        for _ in range(3):
            x = torch.randn(4, WIDTH, dtype=plan.precision.param_dtype)
            session.backward(session.module(x).float().square().mean())
            with Kernels() as kernels:
                session.optimizer.step()
    assert 0 < len(kernels.names) < LAYERS, {name: kernels.names.count(name) for name in kernels.names}


def train(plan: Plan, mesh: Mesh, way: str, backend: str, depth: int) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model = seeded(lambda: TinyGpt(depth=depth))
    if way == "blocks":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend=backend)
    with sharded(model, adam(model), plan, mesh) as session:
        call: nn.Module = session.module
        if way == "whole":
            call = torch.compile(session.module, backend=backend)
        if way == "whole user module":
            call = torch.compile(model, backend=backend)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + mesh.rank)
            tokens = torch.randint(17, (2, 6), generator=generator)
            session.backward(nn.functional.cross_entropy(call(tokens).flatten(0, 1), tokens.flatten()))
            session.optimizer.step()
        with torch.no_grad():
            call(tokens)
        state = session.module.state_dict()
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


# Nearly all time is compilation. Blocks share compiled code, so two blocks test more than one. In a compiled full model
# a second block is only twice the code, and test_compiled_region_... below compiles a full model of two blocks.
@pytest.mark.parametrize(
    ("name", "backend", "ways", "depth"),
    [
        *full(("zero2", "eager", ["whole"], 1), ("zero3", "aot_eager", ["whole"], 1)),
        ("zero3_gloo", "aot_eager", ["blocks"], 2),
        *full(("zero3_tensor", "eager", ["blocks"], 2)),  # no block is a unit
        *campaign(
            ("zero2", "eager", ["whole"], 2),
            ("zero3", "eager", ["whole", "whole user module"], 2),
            ("zero3_gloo", "eager", ["whole"], 2),
            ("zero3", "aot_eager", ["blocks", "whole"], 2),
        ),
    ],
)
@on_ranks(2, timeout=200.0)
def test_compiled_equals_uncompiled(name: str, backend: str, ways: list[str], depth: int) -> None:
    with one_mesh(PLANS[name]) as mesh:
        expected = train(PLANS[name], mesh, "none", backend, depth)
        for way in ways:
            found = train(PLANS[name], mesh, way, backend, depth)
            check([found], expected, f"{name}, {way}, {backend}", rtol=1e-9)


@pytest.mark.parametrize("in_place", [True, False])
@on_ranks(2)
def test_cuda_graphs_are_refused_with_resharded_parameters(in_place: bool) -> None:
    model = seeded(lambda: TinyGpt(depth=2))
    if in_place:
        model.blocks[1].compile(mode="reduce-overhead")
    else:
        model.blocks[1] = torch.compile(model.blocks[1], mode="reduce-overhead")
    words = "^module 'blocks.1' is compiled into CUDA graphs.*mode='default'"
    raises(ValueError, words, build, model, adam(model), PLANS["zero3"])
    assert all(param.numel() for param in model.parameters()), "nothing has changed"
    with sharded(model, adam(model), PLANS["zero2"]):
        pass


# ---- parameters of modules that are not called


class Reader(nn.Module):
    """Calls one child, and reads a weight, a one-element vector and a scalar of two other children."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read, self.scales = nn.Linear(6, 6), nn.Linear(6, 6), nn.Module()
        self.scales.scalar = nn.Parameter(torch.ones(()))
        self.scales.single = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(nn.functional.linear(self.called(x), self.read.weight))
        return x * self.scales.scalar * self.scales.single


class Readers(nn.Module):
    """Two blocks of one class, which share compiled code, and a root that reads a child's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Reader(), Reader()]), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.head.weight)


def read_without_call(plan: Plan, mesh: Mesh, way: str) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model = seeded(Readers)
    with sharded(model, adam(model), plan, mesh) as session:
        if way == "blocks":
            for block in model.blocks:
                block.compile(backend="eager")
        call = torch.compile(session.module, backend="eager") if way == "whole" else session.module
        for step in range(3):
            session.backward(call(data(mesh.rank, step)).pow(2).sum())
            session.optimizer.step()
        return dict(session.module.state_dict())


REGIONS = {
    "blocks are units": (PLANS["zero3"], "whole"),
    "tensors are units": (PLANS["zero3_tensor"], "blocks"),
    "some kept": (PLANS["zero3_straddling"].but(gathered_fraction=0.5), "blocks"),
    "renewed late": (zero(2).but(packing=ByNumel(chunk_numel=40), gather_on_use=True), "blocks"),
}


@pytest.mark.parametrize("names", [["some kept"], *full(["blocks are units", "tensors are units", "renewed late"])])
@on_ranks(2, timeout=200.0)
def test_compiled_region_reads_parameters_of_uncalled_modules(names: list[str]) -> None:
    """ZeRO-3 gathers them in each case; ZeRO-2 with ``gather_on_use`` does not leave the values of the last step."""
    with one_mesh(PLANS["zero3"]) as mesh:
        expected = read_without_call(PLANS["zero3"], mesh, "none")
        for name in names:
            plan, way = REGIONS[name]
            check([read_without_call(plan, mesh, way)], expected, name, rtol=1e-9)


# ---- blocks share compiled code


@on_ranks(2, timeout=200.0)
def test_blocks_of_one_class_share_their_graph() -> None:
    """torch compiles a function eight times: without sharing, the ninth block would run uncompiled."""
    with one_mesh(PLANS["zero3"]) as mesh:
        for way in ("plain", "before", "after"):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            model = seeded(lambda: TinyGpt(depth=10))
            for block in model.blocks:
                if way != "after":
                    block.compile(backend="eager")
            if way == "plain":
                model(torch.zeros(2, 6, dtype=torch.long)).sum().backward()
            else:
                with sharded(model, adam(model), PLANS["zero3"], mesh) as session:
                    for block in model.blocks:
                        if way == "after":
                            block.compile(backend="eager")
                    session.backward(session.module(torch.zeros(2, 6, dtype=torch.long)).sum())
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, way
