"""What the library does with streams beside training, on the late device; every function is run on ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shardwise.booster.targets import model_writer
from shardwise.core.base.device import Accelerator, copy_ahead, page_locked
from shardwise.core.checkpoint import PortableFiles
from shardwise.core.checkpoint.run import EngineRun
from shardwise.deepspeed.hardware import Accelerator as DeepSpeedAccelerator
from shardwise.plan import Plan, zero
from shardwise.session import Session, build
from tests.support import late_setup
from tests.support.late import LateDevice, late_collectives, late_device
from tests.support.late_setup import GPU, PLANS, TOLERANCE, Found, adamw, differing, reference, there
from tests.support.models import MODELS
from tests.support.tier_setup import with_tiers


@contextmanager
def on_ranks(seed: int, over_gloo: bool = False) -> Iterator[LateDevice]:
    """This rank's late device, with collectives where there are several ranks, unless they are gloo's."""
    with late_device(seed + 4 * dist.get_rank(), check=False) as device, ExitStack() as undo:
        if dist.get_world_size() > 1 and not over_gloo:
            undo.callback(late_collectives(device))
        yield device


def found_by(device: LateDevice, wrong: list[str]) -> Found:
    """With the races of a device whose block has ended."""
    return Found(wrong=wrong, races=[str(race) for race in device.races])


@contextmanager
def _session(plan: Plan, module: nn.Module) -> Iterator[Session]:
    session = build(module, adamw(module), plan, device=GPU)
    try:
        yield session
    finally:
        session.close()
        session.mesh.close()


class _Two(nn.Module):
    """A layer whose weights have two dtypes, so its unit has two chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(24, 24), nn.Linear(24, 24, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).bfloat16()).float()


def failed_gather(name: str, seed: int) -> Found:
    """The first half of a unit is on its way when the second fails; the memory of the first is used by others."""
    module = nn.Sequential(_Two(), _Two())
    with on_ranks(seed) as device, _session(PLANS["host"].but(prefetch=0), module) as session:
        first, second = (
            c for c in session.engine.shards.chunks if c.spec.unit == session.engine.shards.chunks[0].spec.unit
        )

        def fails(*_: object) -> Any:
            raise OSError("no second half")

        gather, second.source.gather = second.source.gather, fails  # type: ignore[method-assign]
        x, wrong = torch.ones(2, 24, device=GPU), list[str]()
        with torch.no_grad():
            try:
                session.module(x)
                wrong.append(f"{name}: no error")
            except OSError:
                pass
        taken = torch.full((first.spec.padded_numel,), 9.0, dtype=first.spec.dtype, device=GPU)
        second.source.gather = gather  # type: ignore[method-assign]
        wrong += [] if bool((taken == 9.0).all()) else [f"{name}: {taken[:3]}"]
    return found_by(device, wrong)


# ---- what resident parameters' renewal, under way after a step, must not be read or overtaken by


def _state(session: Session) -> dict[str, Tensor]:
    return {key: value.cpu() for key, value in session.module.full_state() if isinstance(value, Tensor)}


def _in_compute_dtype(session: Session) -> dict[str, Tensor]:
    return {key: value.cpu() for key, value in session.module.full_state(masters=False) if isinstance(value, Tensor)}


def _inside(session: Session) -> dict[str, Tensor]:
    with session.module.gathered():
        return {key: value.detach().cpu() for key, value in session.model.named_parameters()}


def _one_by_one(session: Session) -> dict[str, Tensor]:
    found = {}
    for key, param in session.model.named_parameters():
        one = session.one(param)
        found[key] = one.value().cpu()
    return found


def _own(session: Session) -> dict[str, Tensor]:
    return {key: value.cpu() for key, value in session.model.state_dict().items()}


def _unsharded(session: Session) -> dict[str, Tensor]:
    session.unshard()
    return {key: value.detach().cpu() for key, value in session.model.named_parameters()}


def _as_in_a_trace(session: Session) -> dict[str, Tensor]:
    hooks = session.engine.attachment.hooks
    assert hooks is not None
    hooks._on_trace()  # what a graph that is traced calls
    return {key: value.detach().cpu() for key, value in session.model.named_parameters()}


def _waited_for(session: Session) -> dict[str, Tensor]:
    session.module.wait_for_gathers()
    return {key: value.detach().cpu() for key, value in session.model.named_parameters()}


def _save_apart(session: Session, directory: str) -> str:
    """The model alone, as others read it, where every rank finds it."""
    (where, *_) = session.mesh.mesh_group.exchange_object(f"{directory}/model.bin")
    writer = model_writer(session.model, where, False, True, None, 1024.0, False)
    PortableFiles().save_model(EngineRun(session), writer, "save the model")
    session.mesh.mesh_group.barrier()
    return str(where)


def _saved_apart(session: Session) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as directory:
        found: dict[str, Tensor] = torch.load(_save_apart(session, directory))
        session.mesh.mesh_group.barrier()
    return found


def _loaded_apart(session: Session) -> dict[str, Tensor]:
    """Behind one more step, whose gathers are under way."""
    case = MODELS["mlp"]
    with tempfile.TemporaryDirectory() as directory:
        where = _save_apart(session, directory)
        session.backward(case.loss(session.module, there(case.batch(7))))
        session.optimizer.step()
        PortableFiles().load_model(EngineRun(session), where, strict=True)
        session.mesh.mesh_group.barrier()
    return _inside(session)


READS: dict[str, Callable[[Session], dict[str, Tensor]]] = {
    "state": _state,
    "state in the compute dtype": _in_compute_dtype,
    "gathered": _inside,
    "one by one": _one_by_one,
    "own state": _own,
    "unsharded": _unsharded,
    "as in a trace": _as_in_a_trace,
    "waited for": _waited_for,
    "saved apart": _saved_apart,
    "loaded apart": _loaded_apart,
}


def renewed(name: str, seed: int, plan: str = "on_use") -> Found:
    """Parameters are read in one of the ways of :data:`READS` right after an update, whose gathers are under way."""
    chosen, case, ranks, rank = PLANS[plan], MODELS["mlp"], dist.get_world_size(), dist.get_rank()
    module = case.factory()
    with on_ranks(seed) as device, _session(chosen, module) as session:
        for micro in late_setup._batches(chosen, "mlp", ranks)[0]:
            session.backward(case.loss(session.module, there(micro[rank])))
        session.optimizer.step()
        found = READS[name](session)
        wrong = differing(found, reference(chosen, "mlp", ranks).parameters[0], TOLERANCE)
    return found_by(device, wrong)


def loaded_over(name: str, seed: int) -> Found:
    """A layer's own ``load_state_dict`` while gathers of an update are under way."""
    chosen, case, rank = PLANS["on_use"], MODELS["mlp"], dist.get_rank()
    module = case.factory()
    states = {key: layer.state_dict() for key, layer in module.named_modules()}
    zeros = {key: {each: torch.zeros_like(value) for each, value in own.items()} for key, own in states.items()}
    with on_ranks(seed) as device, _session(chosen, module) as session:
        for micro in late_setup._batches(chosen, "mlp", dist.get_world_size())[0]:
            session.backward(case.loss(session.module, there(micro[rank])))
        session.optimizer.step()
        wrong = []
        for key, layer in module.named_modules():
            if layer is not module and layer._parameters:
                layer.load_state_dict(zeros[key])
                wrong += [f"{name}: {key}" for x in layer.parameters() if bool(x.detach().any())]
    return found_by(device, wrong)


class _Traced(nn.Module):
    """Reads its weight as a graph does that was traced: nobody is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.__dict__["held"] = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.__dict__["held"][0])


def traced_graph(name: str, seed: int) -> Found:
    """A forward pass of such a graph right after an update."""
    torch.manual_seed(0)
    plain = _Traced()
    module = deepcopy(plain)
    module.__dict__["held"] = [module.layer.weight]
    with on_ranks(seed) as device, _session(PLANS["on_use"], module) as session:
        _as_in_a_trace(session)
        x, losses = torch.ones(3, 16), list[Tensor]()
        optimizer = adamw(plain)
        for model, given in ((session.module, x.to(GPU)), (plain, x)):
            for step in range(3):
                loss = model(given).square().mean()
                losses.append(loss.detach())
                if step < 2:
                    session.backward(loss) if model is session.module else loss.backward()
                    (session.optimizer if model is session.module else optimizer).step()
                    (session.optimizer if model is session.module else optimizer).zero_grad()
        told = [float(each) for each in losses]
    wrong = [f"{name}: {a} for {b}" for a, b in zip(told[:3], told[3:], strict=True) if not abs(a - b) < TOLERANCE]
    return found_by(device, wrong)


def discarded(name: str, seed: int) -> Found:
    """Gradients are dropped while they are on their way to the host, and the next ones go into the same memory."""
    chosen, case, ranks, rank = PLANS["host"], MODELS["mlp"], dist.get_world_size(), dist.get_rank()
    module = case.factory()
    with on_ranks(seed) as device, _session(chosen, module) as session:
        first, again = late_setup._batches(chosen, "mlp", ranks)[:2]
        for micro in again:
            session.backward(case.loss(session.module, there(micro[rank])))
        session.optimizer.zero_grad()
        for micro in first:
            session.backward(case.loss(session.module, there(micro[rank])))
        session.optimizer.step()
        expected = reference(chosen, "mlp", ranks).parameters[0]
        wrong = differing(_state(session), expected, TOLERANCE)
    return found_by(device, [f"{name}: {each}" for each in wrong])


def disk(name: str, seed: int) -> Found:
    """Training with parameters and state on a disk."""
    with tempfile.TemporaryDirectory() as directory:
        plan = with_tiers(zero(3), name, directory)
        PLANS[f"disk {name}"] = plan
        try:
            return late_setup.train(f"disk {name}", seed)
        finally:
            del PLANS[f"disk {name}"]


# ---- what programs ask for themselves


def program_waits(name: str, seed: int) -> Found:
    """The program waits for its device, by each interface, and reads what a copy wrote."""
    wrong = []
    with late_device(seed, check=False) as device:
        for index, each in enumerate((Accelerator(GPU), DeepSpeedAccelerator(GPU))):
            host = page_locked((1000,), torch.float32)
            copy_ahead(host, torch.full((1000,), float(index), device=GPU))
            each.synchronize()
            wrong += [] if bool((host == index).all()) else [f"{name}: {type(each).__module__}: {host[:3]}"]
    return found_by(device, wrong)

    return found_by(device, wrong)
