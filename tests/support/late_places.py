"""Uses of streams outside of training, on the late device; every function runs on ranks."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shardwise.booster.checkpoint_io import model_writer
from shardwise.colossalai.hardware import Accelerator
from shardwise.core.base.device import copy_ahead, page_locked
from shardwise.core.checkpoint import PortableFiles
from shardwise.core.checkpoint.training_run import EngineRun
from shardwise.deepspeed.hardware import Accelerator as DeepSpeedAccelerator
from shardwise.plan import Plan, zero
from shardwise.session import Session
from tests.support import late_setup as late
from tests.support.late_setup import GPU, PLANS, Found, off, on_host, on_late_device, session_on_device, there
from tests.support.models import MODELS
from tests.support.tier_setup import with_tiers


class _Two(nn.Module):
    """A layer whose weights have two dtypes, so its unit has two chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(24, 24), nn.Linear(24, 24, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).bfloat16()).float()


@on_late_device
def failed_gather(name: str) -> Iterator[str]:
    """The first half of a unit is being gathered when the second fails; the memory of the first is then reused."""
    with session_on_device(PLANS["host"].but(prefetch=0), nn.Sequential(_Two(), _Two())) as session:
        chunks = session._engine.shards.chunks
        first, second = (chunk for chunk in chunks if chunk.spec.unit == chunks[0].spec.unit)
        x = torch.ones(2, 24, device=GPU)
        with torch.no_grad(), mock.patch.object(second.source, "gather", side_effect=OSError("no second half")):
            try:
                session.module(x)
                yield f"{name}: no error"
            except OSError:
                pass
        taken = torch.full((first.spec.padded_numel,), 9.0, dtype=first.spec.dtype, device=GPU)
        yield from off(name, taken.float(), torch.tensor(9.0))


# ---- reads and loads that must wait for the renewal of resident parameters, which runs after a step


def _inside(session: Session) -> dict[str, Tensor]:
    with session.module.gathered():
        return on_host(session.model.named_parameters())


def _unsharded(session: Session) -> dict[str, Tensor]:
    session.unshard()
    return on_host(session.model.named_parameters())


def _as_in_a_trace(session: Session) -> dict[str, Tensor]:
    session._engine.model_hooks.hooks._on_trace()  # what a traced graph calls
    return on_host(session.model.named_parameters())


def _waited_for(session: Session) -> dict[str, Tensor]:
    session.module.wait_for_gathers()
    return on_host(session.model.named_parameters())


@contextmanager
def _save_apart(session: Session) -> Iterator[str]:
    """Save the model alone, in the format of other libraries, where every rank finds it."""
    with tempfile.TemporaryDirectory() as directory:
        (where, *_) = session.mesh.mesh_group.exchange_object(f"{directory}/model.bin")
        writer = model_writer(session.model, where, False, True, None, 1024.0, False)
        PortableFiles().save_model(EngineRun(session), writer, "save the model")
        session.mesh.mesh_group.barrier()
        yield str(where)
        session.mesh.mesh_group.barrier()


def _saved_apart(session: Session) -> dict[str, Tensor]:
    with _save_apart(session) as where:
        found: dict[str, Tensor] = torch.load(where)
    return found


def _loaded_apart(session: Session) -> dict[str, Tensor]:
    """Load after one more step, whose gathers are still running."""
    case = MODELS["mlp"]
    with _save_apart(session) as where:
        session.backward(case.loss(session.module, there(case.batch(7))))
        session.optimizer.step()
        PortableFiles().load_model(EngineRun(session), where, strict=True)
    return _inside(session)


READS: dict[str, Callable[[Session], dict[str, Tensor]]] = {
    "state": lambda session: on_host(session.module.full_state()),
    "state in the compute dtype": lambda session: on_host(session.module.full_state(masters=False)),
    "gathered": _inside,
    "one by one": lambda session: on_host((key, session.one(p).value()) for key, p in session.model.named_parameters()),
    "own state": lambda session: on_host(session.model.state_dict().items()),
    "unsharded": _unsharded,
    "as in a trace": _as_in_a_trace,
    "waited for": _waited_for,
    "saved apart": _saved_apart,
    "loaded apart": _loaded_apart,
}


def _passes(session: Session, plan: Plan, step: int) -> None:
    """Run the passes of a step of :func:`late_setup.train`, with the model "mlp"."""
    for micro in late.batches_of(plan, "mlp", dist.get_world_size())[step]:
        session.backward(MODELS["mlp"].loss(session.module, there(micro[dist.get_rank()])))


def _after_a_step(plan: Plan, found: dict[str, Tensor]) -> list[str]:
    return late.differing(found, late.reference(plan, "mlp", dist.get_world_size()).parameters[0], late.TOLERANCE)


@on_late_device
def renewed(name: str, plan: str = "on_use") -> Iterator[str]:
    """Parameters are read in one of the ways of :data:`READS` right after an update, while its gathers run."""
    with session_on_device(PLANS[plan], MODELS["mlp"].factory()) as session:
        _passes(session, PLANS[plan], 0)
        session.optimizer.step()
        yield from _after_a_step(PLANS[plan], READS[name](session))


@on_late_device
def loaded_over(name: str) -> Iterator[str]:
    """A layer's own ``load_state_dict`` while gathers of an update run."""
    module = MODELS["mlp"].factory()
    states = {key: layer.state_dict() for key, layer in module.named_modules()}
    zeros = {key: {each: torch.zeros_like(value) for each, value in own.items()} for key, own in states.items()}
    with session_on_device(PLANS["on_use"], module) as session:
        _passes(session, PLANS["on_use"], 0)
        session.optimizer.step()
        for key, layer in module.named_modules():
            if layer is not module and layer._parameters:
                layer.load_state_dict(zeros[key])
                yield from (f"{name}: {key}" for x in layer.parameters() if bool(x.detach().any()))


class _Traced(nn.Module):
    """Reads its weight as a traced graph does, without a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.__dict__["held"] = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.__dict__["held"][0])


@on_late_device
def traced_graph(name: str) -> Iterator[str]:
    """A forward pass of such a graph right after an update."""
    torch.manual_seed(0)
    plain = _Traced()
    module = deepcopy(plain)
    module.__dict__["held"] = [module.layer.weight]
    with session_on_device(PLANS["on_use"], module) as session:
        _as_in_a_trace(session)
        x, losses = torch.ones(3, 16), list[Tensor]()
        ours = (session.module, x.to(GPU), session.backward, session.optimizer)
        for model, given, backward, optimizer in (ours, (plain, x, Tensor.backward, late.adamw(plain))):
            for _ in range(3):
                loss = model(given).square().mean()
                losses.append(loss.detach())
                backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        told = torch.tensor([float(each) for each in losses])
        yield from off(name, told[:3], told[3:])


@on_late_device
def discarded(name: str) -> Iterator[str]:
    """Gradients are dropped during their copy to the host, and the next ones go into the same memory."""
    with session_on_device(PLANS["host"], MODELS["mlp"].factory()) as session:
        _passes(session, PLANS["host"], 1)
        session.optimizer.zero_grad()
        _passes(session, PLANS["host"], 0)
        session.optimizer.step()
        yield from _after_a_step(PLANS["host"], on_host(session.module.full_state()))


def disk(name: str, seed: int) -> Found:
    """Training with parameters and state on a disk."""
    with tempfile.TemporaryDirectory() as directory, mock.patch.dict(PLANS):
        PLANS[f"disk {name}"] = with_tiers(zero(3), name, directory)
        return late.train(f"disk {name}", seed)


# ---- waits of programs


@on_late_device
def program_waits(name: str) -> Iterator[str]:
    """The program waits for its device, by each interface, and reads what a copy wrote."""
    for index, each in enumerate((Accelerator(GPU), DeepSpeedAccelerator(GPU))):
        host = page_locked((1000,), torch.float32)
        copy_ahead(host, torch.full((1000,), float(index), device=GPU))
        each.synchronize()
        yield from off(f"{name}: {type(each).__module__}", host, torch.full((1000,), float(index)))
