"""Training on the late device, on one rank and on two, compared with plain PyTorch; every function runs on ranks."""

import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.core.base import device as base
from shardwise.core.checkpoint import Checkpointer
from shardwise.core.grads.norm import LateNorm
from shardwise.core.memory.host import host_block
from shardwise.core.mesh import Mesh
from shardwise.core.shards.shard_memory import SecondarySource
from shardwise.plan import ByNumel, Plan, on_device, replicated, zero
from shardwise.session import Session, build
from shardwise.testing import PlainRecipe, PlainRun, train_plain
from tests.support.late import LateDevice, late_collectives, late_device
from tests.support.models import MODELS, adamw, make_batches, to_device

GPU = torch.device("cuda", 0)
STEPS, PASSES = 3, 2
TOLERANCE = 1e-4
"""Tolerance of losses and parameters: the CPU has other kernels for some modules, and sums have another order."""


def _tiers(params: float, state: float) -> Any:
    return replace(on_device(), param_host_fraction=params, state_host_fraction=state, pin_memory=True)


PLANS: dict[str, Plan] = {
    "ddp": replicated(),
    "zero1": zero(1),
    "zero2": zero(2),
    "few_chunks": zero(2).but(packing=ByNumel(chunk_numel=150)),
    "zero3": zero(3),
    "ahead": zero(3).but(prefetch=2),
    "state_host": zero(3).but(tiers=_tiers(0.0, 1.0)),
    "zero2_state_host": zero(2).but(tiers=_tiers(0.0, 1.0)),
    "host": zero(3).but(tiers=_tiers(1.0, 1.0), prefetch=2),
    "mixed": zero(3).but(tiers=_tiers(0.5, 0.5), prefetch=3),
    "clipped": zero(3).but(tiers=_tiers(1.0, 1.0), prefetch=2, max_norm=0.5),
    "early": zero(3).but(tiers=_tiers(0.0, 1.0), prefetch=2, update="backward"),
    "early_host": zero(3).but(tiers=_tiers(1.0, 1.0), prefetch=2, update="backward"),
    "eight_bits": zero(3).but(compress="fp8", prefetch=2),
    "eight_bits2": zero(2).but(compress="fp8"),
    "secondary": zero(3).but(secondary=2),
    "frozen_host": zero(3).but(compress_frozen="int8", tiers=_tiers(1.0, 1.0), prefetch=2),
    "secondary_eight_bits": zero(3).but(secondary=2, compress="fp8"),
    "on_use": zero(2).but(gather_on_use=True),
    "replicas": zero(3, None, 2),
    "replicas_in_pieces": zero(3, None, 2).but(packing=ByNumel(chunk_numel=50)),
    "replicas_eight_bits": zero(2, None, 2).but(compress="fp8"),
    "replicas_host": zero(3, None, 2).but(tiers=_tiers(1.0, 1.0), prefetch=2),
}


class Branches(nn.Module):
    """Branches of one input, each on its own stream on a GPU. Autograd uses these streams for gradients, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for layer in self.layers:
            with another_stream() if x.is_cuda else nullcontext():
                made.append(layer(x))
            if x.is_cuda:
                base.recorded(made[-1], base.current_stream(GPU))
        return torch.stack(made).sum(0)


CASES = MODELS | {"branches": replace(MODELS["mlp"], name="branches", build=lambda _: Branches())}


def there(value: Any) -> Any:
    """Move the tensors inside dicts, lists and tuples to the device."""
    return to_device(value, GPU)


def on_host(named: Iterable[tuple[str, Any]]) -> dict[str, Tensor]:
    """Return the tensors among the values, on the host."""
    return {key: value.detach().cpu() for key, value in named if isinstance(value, Tensor)}


@dataclass(frozen=True, kw_only=True)
class Found:
    """The outcome of one run: differences from plain PyTorch, and races.

    ``in_passes`` and ``in_steps`` are thread and line of the host's waits after the first step.
    """

    wrong: list[str]
    races: list[str]
    in_passes: list[tuple[str, str]] = field(default_factory=list)
    in_steps: list[tuple[str, str]] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether there are neither."""
        return not self.wrong and not self.races


@contextmanager
def on_ranks(seed: int, over_gloo: bool = False) -> Iterator[LateDevice]:
    """Yield this rank's late device, with collectives of late devices if there are several ranks, unless
    ``over_gloo``."""
    with late_device(seed + 4 * dist.get_rank(), check=False) as device, ExitStack() as undo:
        if dist.get_world_size() > 1 and not over_gloo:
            undo.callback(late_collectives(device))
        yield device


def on_late_device(body: Callable[..., Iterator[str]]) -> Callable[..., Found]:
    """Make a function of a name and a seed that returns the differences that ``body`` yields on this rank's late
    device.

    It returns races, too. If the function's name or ``name`` contains "gloo", the ranks share a GPU.
    """

    @functools.wraps(body)
    def found(name: str, seed: int, *more: Any) -> Found:
        with on_ranks(seed, "gloo" in f"{body.__name__} {name}") as device:
            wrong = [*body(name, *more)]
        return Found(wrong=wrong, races=[str(race) for race in device.races])

    return found


@contextmanager
def session_on_device(plan: Plan, module: nn.Module) -> Iterator[Session]:
    """Yield a session on the device."""
    session = build(module, adamw(module), plan, device=GPU)
    try:
        yield session
    finally:
        session.close()
        session.mesh.close()


def off(name: str, found: Tensor, expected: Tensor, far: float = TOLERANCE) -> list[str]:
    """Yield a message if a tensor of the device is not close."""
    close = torch.allclose(found.detach().cpu(), expected.detach(), far, far)
    return [] if close else [f"{name}: {found.flatten()[:3]} for {expected.flatten()[:3]}"]


def reference(plan: Plan, model: str, ranks: int) -> PlainRun:
    """Train with plain PyTorch, on the CPU."""
    case = CASES[model]
    recipe = PlainRecipe(max_norm=plan.grad.max_norm)
    return train_plain(case.factory, case.loss, adamw, batches_of(plan, model, ranks), recipe)


def batches_of(plan: Plan, model: str, ranks: int) -> Any:
    passes = 1 if plan.grad.update == "backward" else PASSES
    return make_batches(CASES[model], ranks, STEPS, passes)


def train(
    name: str,
    seed: int,
    model: str = "mlp",
    changing: bool = False,
    then: Callable[[Session, int, PlainRun | None], list[str]] | None = None,
) -> Found:
    """Train with the plan of that name on this rank's late device, and compare.

    Args:
        name: of :data:`PLANS`.
        seed: of the device; each rank adds its own.
        model: of :data:`CASES`.
        changing: the program uses another stream for each pass, which waits for the one before.
        then: called after each step, and at the end with the plain run; yields differences.
    """
    plan, case, ranks, rank = PLANS[name], CASES[model], dist.get_world_size(), dist.get_rank()
    plan = plan.but(same_order=False) if model == "mixture" else plan  # its ranks take different branches
    with on_ranks(seed) as device, session_on_device(plan, case.factory()) as session:
        losses, wrong, waits = [], list[str](), device.schedule.host_waits_at
        in_passes, in_steps = list[tuple[str, str]](), list[tuple[str, str]]()
        for index, step in enumerate(batches_of(plan, model, ranks)):
            for micro in step:
                with another_stream() if changing else nullcontext():
                    batch = there(micro[rank])
                    waits.clear()
                    loss = case.loss(session.module, batch)
                    session.backward(loss)
                    in_passes += waits if index else []  # the first loss is read
                    losses.append(loss.detach())
                    del loss
            waits.clear()
            session.optimizer.step()
            in_steps += waits
            session.optimizer.zero_grad()
            if then is not None:
                wrong += then(session, index, None)
        told, kept = [loss.item() for loss in losses], on_host(session.module.state_dict().items())
        run = reference(plan, model, ranks)  # now: the device has to exist before autograd's first backward pass
        if then is not None:
            wrong += then(session, STEPS, run)
    expected = [micro[rank] for step in run.losses for micro in step]
    far = 0.1 if plan.comm.compressed or plan.comm.compress_frozen else TOLERANCE
    pairs = enumerate(zip(told, expected, strict=True))
    wrong += [f"loss {index}: {one} for {other}" for index, (one, other) in pairs if not abs(one - other) <= far]
    wrong += differing(kept, run.parameters[-1], far)
    races = [str(race) for race in device.races]
    return Found(wrong=wrong, races=races, in_passes=in_passes, in_steps=in_steps)


@contextmanager
def another_stream() -> Iterator[None]:
    """Use a new stream inside this context, which waits for the current one, and which that waits for afterwards."""
    side = base.side_stream(GPU)
    with base.behind_current(GPU, side):
        yield
        done = base.record_event(GPU)
    base.wait_event(GPU, done)


def differing(found: dict[str, Tensor], expected: dict[str, Tensor], far: float) -> list[str]:
    """Yield what is not close, and by how much."""
    return [
        f"{key}: off by {float((found[key] - value).abs().max())}"
        for key, value in expected.items()
        if not torch.allclose(found[key], value, far, far)
    ]


def train_and_save(name: str, seed: int) -> Found:
    """Save an asynchronous checkpoint after each step; the first one must have the values of its own time."""
    saves: list[Checkpointer] = []

    def then(session: Session, index: int, run: PlainRun | None) -> list[str]:
        if not saves:
            saves.append(Checkpointer(session))
        if run is None:
            saves[0].save(where, tag=f"step{index}", use_async=True)
            return []
        saves[0].wait_for_saves()
        saves[0].load(where, tag="step0")
        found = on_host(session.module.state_dict().items())
        saves[0].close()
        saves[0].close()
        return [f"saved {each}" for each in differing(found, run.parameters[0], TOLERANCE)]

    with tempfile.TemporaryDirectory() as own:
        told = [own]
        dist.broadcast_object_list(told, 0)
        where = told[0]
        found = train(name, seed, "mlp", then=then)
        dist.barrier()
        return found


@on_late_device
def written_after_forward(name: str) -> Iterator[str]:
    """A forward pass whose parameters are written on the host before its work has run."""
    case = MODELS["mlp"]
    batch, module = case.batch(0, torch.float32), case.factory()
    expected = float(case.loss(module, batch).detach())
    with session_on_device(PLANS["host"], module) as session:
        moved = there(batch)
        with torch.no_grad():
            loss = case.loss(session.module, moved)
        zeros = {key: torch.zeros_like(value) for key, value in case.factory().state_dict().items()}
        session.module.load_state_dict(zeros)
        yield from off(name, loss, torch.tensor(expected))


@on_late_device
def late_norm(name: str) -> Iterator[str]:
    """Norms that are computed on the device and read when the next ones have been started."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = Mesh.create(zero(3).mesh, GPU, zero(3).comm)
    norm = LateNorm(mesh.shard)
    for index in range(4):
        read = norm.note([torch.full((3,), float(index + rank), device=GPU)], 2.0, 1.0)
        if index % 2:
            expected = sum(3.0 * (index + other) ** 2 for other in range(ranks)) ** 0.5
            yield from off(name, torch.tensor(read()), torch.tensor(expected))
    mesh.close()


@on_late_device
def secondary_twice(name: str) -> Iterator[str]:
    """A gather from secondary shards starts while the gather that fills these is running."""
    with session_on_device(PLANS["secondary"], MODELS["mlp"].factory()) as session:
        chunks = [chunk for chunk in session._engine.shards.chunks if isinstance(chunk.source, SecondarySource)]
        assert chunks
        for chunk in chunks:
            outs = [torch.empty(chunk.spec.padded_numel, device=GPU) for _ in range(2)]
            handles = [chunk.source.gather(session.mesh.shard, out) for out in outs]
            for handle in handles[::-1]:
                handle.wait()
            first, second = (out.cpu() for out in outs)
            if not torch.equal(first, second):
                yield f"{name}: chunk {chunk.spec.index}"


@on_late_device
def later_values(name: str) -> Iterator[str]:
    """Values being copied to the host are those of the time when the copy was started."""
    value = torch.ones(1, device=GPU) * 5
    later = base.Later(value)
    value.fill_(3.0)
    yield from off(name, torch.tensor([later.value(), base.Later(value).value()]), torch.tensor([5.0, 3.0]))


@on_late_device
def side_copies(name: str) -> Iterator[str]:
    """A copy is started on one stream of the program and waited for on another, which reads it and frees it."""
    first, second, uploads = (base.side_stream(GPU) for _ in range(3))
    found = []
    for index in range(3):
        source = base.page_locked((1000,), torch.float32).fill_(index)
        with base.on_stream(first):
            out = torch.empty(1000, device=GPU)
            copy = base.SideCopy(source, out, uploads)
        with base.on_stream(second):
            copy.wait()
            found.append(out + 0)
        del out, copy
        with base.on_stream(first):
            torch.full((1000,), 9.0, device=GPU)
    base.synchronize(GPU)
    for index, each in enumerate(found):
        yield from off(f"{name} {index}", each, torch.full((1000,), float(index)))


@on_late_device
def lent_memory(name: str) -> Iterator[str]:
    """Memory of the main stream that a side stream reads, and that a third one frees after waiting for that."""
    side, third = base.side_stream(GPU), base.side_stream(GPU)
    tensor, out = torch.full((1000,), 5.0, device=GPU), torch.zeros(1000, device=GPU)
    lent = base.Lent(tensor)
    with base.behind_current(GPU, side):
        out.copy_(tensor)
        done = base.record_event(GPU)
    del tensor
    with base.on_stream(third):
        base.wait_event(GPU, done)
        lent.drop()
    torch.full((1000,), 9.0, device=GPU)
    base.synchronize(GPU)
    yield from off(name, out, torch.full((1000,), 5.0))


@on_late_device
def locked_memory(name: str) -> Iterator[str]:
    """Page-locked memory is freed while a copy reads it."""
    block, out = host_block(4000, GPU), torch.empty(1000, device=GPU)
    block.view(torch.float32).fill_(7.0)
    base.copy_ahead(out, block.view(torch.float32))
    del block
    yield from off(name, out, torch.full((1000,), 7.0))
