"""Gathers that are played, on the late device, and ranks that leave the script; every function is run on ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from unittest import mock

import torch
import torch.distributed as dist
from engine_setup import data
from late_setup import GPU, TOLERANCE, Found, differing
from stream_setup import LAYERS, Branching
from torch import Tensor, nn

from shardwise.build import build
from shardwise.comm import PeerError
from shardwise.comm.asking import MOST_COPIES, _Reader
from shardwise.plan import zero
from tests.support.late import late_collectives, late_device

STEPS, STRAYS_AT, LATE_S = 7, 5, 0.3
USUAL = tuple(range(LAYERS))


def way(rank: int, step: int) -> Sequence[int]:
    """All ranks but the first take fewer layers once, in another order."""
    return (4, 1, 6) if rank and step == STRAYS_AT else USUAL


class Reading(Branching):
    """The host waits for the device at each layer, in forward and backward passes."""

    def forward(self, x: Tensor, way: Sequence[int]) -> Tensor:
        for index in way:
            x = torch.tanh(self.layers[index](x))
            assert x.sum().item() < 1e9
            x.register_hook(self._read)
        return x

    def _read(self, grad: Tensor) -> None:
        assert grad.sum().item() < 1e9


def _model(reads: bool = False) -> nn.Module:
    torch.manual_seed(3)
    return (Reading() if reads else Branching()).float()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _batch(rank: int, step: int) -> torch.Tensor:
    return data(rank, step).float()


def play(seed: int, prefetch: int, reads: bool = False) -> tuple[Found, list[bool], bool]:
    """What is wrong, which steps were played, and whether this rank has strayed; ``reads``: :class:`Reading`."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    with late_device(seed + 4 * rank, check=False) as device, ExitStack() as undo:
        undo.callback(late_collectives(device))
        module = _model(reads)
        session = build(module, _sgd(module), zero(3).but(prefetch=prefetch), device=GPU)
        scripts, played, strayed = session.engine.pool.rounds.scripts, list[bool](), False
        try:
            assert session.optimizer is not None
            batches = [_batch(rank, step).to(GPU) for step in range(STEPS)]  # a copy would wait for the last update
            for step, batch in enumerate(batches):
                played.append(scripts.playing)
                if (rank, step, reads) == (0, STRAYS_AT, False):
                    time.sleep(LATE_S)  # what rank 1 asks for is answered before the host comes to wait for anything
                loss = session.module(batch, way(rank, step)).square().mean()
                strayed |= scripts.strayed
                session.backward(loss)
                session.optimizer.step()
                session.optimizer.zero_grad()
                del loss
            kept = {key: value.cpu() for key, value in session.module.state_dict().items()}
            expected = _plain(ranks, True)
        finally:
            session.close()
            session.mesh.close()
    wrong = differing(kept, expected, TOLERANCE)
    return Found(wrong=wrong, races=[str(race) for race in device.races]), played, strayed


def asked_by_several(seed: int) -> tuple[Found, int, int]:
    """As :func:`play`, with how often this rank has answered, and of how many copies."""
    answered, read = [], _Reader.read

    def noted(reader: _Reader, shard: Tensor) -> Tensor:
        answered.append(read(reader, shard))
        return answered[-1]

    with mock.patch.object(_Reader, "read", noted):
        found, _, _ = play(seed, 1)
    return found, len(answered), len({id(each) for each in answered})


def copies(seed: int) -> list[str]:
    """What is wrong with what a reader gives of shards that are written again and again on this rank's late device."""
    wrong, kept = list[str](), list[Tensor]()
    with late_device(seed, check=False) as device:
        reader, shards = _Reader(GPU), [torch.zeros(300, device=GPU) for _ in range(MOST_COPIES + 2)]
        for update in range(4):
            for number, shard in enumerate(shards):
                shard.fill_(10 * update + number)
            reader.written()
            for number in (0, 1, 0, 1, *range(len(shards)), len(shards) - 1):
                found = reader.read(shards[number])
                if not torch.equal(found, torch.full((300,), 10.0 * update + number)):
                    wrong.append(f"shard {number} after update {update}: {found[0]}")
                kept.append(found)
            if len(reader._copies) != MOST_COPIES:
                wrong.append(f"{len(reader._copies)} copies are kept after update {update}")
        if len({id(each) for each in kept}) != 4 * len(shards):
            wrong.append(f"{len({id(each) for each in kept})} copies of {4 * len(shards)} values")
        reader.written()
        if reader._copies:
            wrong.append("copies of what was written")
    return wrong + [str(race) for race in device.races]


def strayed(name: str, seed: int) -> Found:
    """As :func:`play`, where hosts read values meanwhile, or are ``running ahead``."""
    return play(seed, 1, name != "running ahead")[0]


def evaluates_alone(seed: int) -> tuple[Found, list[str]]:
    """Rank 0 evaluates where the others play a step; all drop that, and go on. What each was told."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    with late_device(seed + 4 * rank, check=False) as device, ExitStack() as undo:
        undo.callback(late_collectives(device))
        module = _model()
        session = build(module, _sgd(module), zero(3), device=GPU)
        said = list[str]()
        try:
            assert session.optimizer is not None
            for step in range(STEPS):
                for attempt in range(4):
                    try:
                        x = _batch(rank, step).to(GPU)
                        if (rank, step, attempt) == (0, STRAYS_AT, 0):
                            assert session.engine.pool.rounds.scripts.playing
                            with torch.no_grad():
                                session.module(x, USUAL)
                        session.backward(session.module(x, way(0, step)).square().mean())
                        break
                    except PeerError as error:
                        said.append(str(error))
                        with suppress(PeerError):
                            session.optimizer.zero_grad()
                session.optimizer.step()
                session.optimizer.zero_grad()
            kept = {key: value.cpu() for key, value in session.module.state_dict().items()}
            expected = _plain(ranks, False)
        finally:
            session.close()
            session.mesh.close()
    wrong = differing(kept, expected, TOLERANCE)
    return Found(wrong=wrong, races=[str(race) for race in device.races]), said


def _plain(ranks: int, strays: bool) -> dict[str, torch.Tensor]:
    model = _model()
    optimizer = _sgd(model)
    for step in range(STEPS):
        for rank in range(ranks):
            (model(_batch(rank, step), way(rank if strays else 0, step)).square().mean() / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())
