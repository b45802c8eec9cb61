"""Stepping by tiles on one rank of several, without processes: what is cut, and that the update equals torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.base.events import Events
from shardwise.core.comm import Buffer
from shardwise.core.grads.grads import ChunkGrads
from shardwise.core.memory.tier import Home, Tier
from shardwise.core.optim.lamb import FusedLAMB, Lamb
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.layout import ChunkSpec, ParamInfo, make_layout
from shardwise.core.shards.source import MemorySource
from shardwise.core.update import tiles as update_tiles
from shardwise.core.update.masters import ChunkState
from shardwise.core.update.tile_plan import plan_tiles
from shardwise.core.update.tiles import TileStepper, UpdateTile, make_tiles, needs_whole_tensors
from shardwise.plan import ByNumel

SIZES = [5, 0, 7, 1, 20]
RANKS = 3
CPU = torch.device("cpu")


def spec() -> ChunkSpec:
    facts = [ParamInfo((f"p{i}",), torch.Size([n]), torch.float64, True, 0, i % 2) for i, n in enumerate(SIZES)]
    layout = make_layout(facts, nn.Module(), ByNumel(chunk_numel=1000), RANKS, 1)
    assert len(layout.chunks) == 1
    return layout.chunks[0]


HOME = Home(Tier.DEVICE, Tier.DEVICE)


def chunk_with(shard: Tensor, rank: int) -> Chunk:
    params = [nn.Parameter(torch.empty(n, dtype=torch.float64)) for n in SIZES]
    return Chunk(spec(), params, MemorySource(Buffer(shard), Tier.DEVICE), rank, CPU, resident=False)


def chunk_of(rank: int, whole: Tensor) -> Chunk:
    numel = spec().shard_numel(rank)
    return chunk_with(whole[rank * numel : (rank + 1) * numel].clone(), rank)


def step_all(stepper: TileStepper, factor: float) -> None:
    with stepper.stepping(factor) as update:
        for tile in stepper.tiles:
            update([(tile, tile.chunk.shard)])


def whole_values(seed: int) -> Tensor:
    return torch.randn(spec().padded_numel, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tiles_of(chunk: Chunk, tile_numel: int) -> tuple[list[UpdateTile], ChunkGrads]:
    grads = ChunkGrads(chunk, torch.float64, torch.float64, Tier.DEVICE, None)
    ranges = plan_tiles(chunk.spec, chunk.rank, [i % 2 for i in range(len(SIZES))], tile_numel)
    return make_tiles(grads, ChunkState(chunk, HOME, None, None, Events()), ranges), grads


def expected_values(kind: type[torch.optim.Optimizer], steps: list[set[int]], factor: float) -> list[Tensor]:
    start = spec()
    values = whole_values(0)
    params = [nn.Parameter(values[s.start : s.end].clone()) for s in start.slots]
    optimizer = kind([{"params": params[0::2]}, {"params": params[1::2], "lr": 0.5}], lr=0.1)
    for number, touched in enumerate(steps):
        gradient = whole_values(10 + number) * factor
        for index, slot in enumerate(start.slots):
            params[index].grad = gradient[slot.start : slot.end] if index in touched else None
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize("tile_numel", [1, 4, 1000])
def test_steps_equal_torchs(kind: type[torch.optim.Optimizer], tile_numel: int) -> None:
    """Parameters that a step does not touch keep their values and their step count."""
    steps = [{0, 2, 3, 4}, {0, 4}, {2}, {0, 1, 2, 3, 4}]
    expected = expected_values(kind, steps, 0.25)
    for rank in range(RANKS):
        chunk = chunk_of(rank, whole_values(0))
        tiles, grads = tiles_of(chunk, tile_numel)
        pieces: list[list[nn.Parameter]] = [[], []]
        for tile in tiles:
            pieces[tile.group] += [p.value for p in tile.pieces]
        groups = [{"params": pieces[0]}, {"params": pieces[1], "lr": 0.5}]
        optimizer = kind(groups, lr=0.1)
        stepper = TileStepper(optimizer, tiles)
        for number, touched in enumerate(steps):
            gradient = whole_values(10 + number)[chunk.shard_start : chunk.shard_end].clone()
            kept = gradient.clone()
            grads.reduced, grads.used_globally = gradient, set(touched)
            step_all(stepper, 0.25)
            assert torch.equal(gradient, kept)  # peers may still read it
            held = [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]
            assert stepper.state_bytes(HOME.state) == sum(value.nbytes for value in held)
        for index, slot in enumerate(chunk.spec.slots):
            start, end = chunk.overlap(slot)
            if start < end:
                mine = chunk.shard[start - chunk.shard_start : end - chunk.shard_start]
                torch.testing.assert_close(
                    mine, expected[index][start - slot.start : end - slot.start], rtol=1e-13, atol=0
                )
        assert optimizer.param_groups[0]["params"] == pieces[0] and all(p.grad is None for g in pieces for p in g)


def test_masters_are_updated_and_rounded_once() -> None:
    own = spec()
    chunk = chunk_with(torch.zeros(own.shard_numel(0), dtype=torch.bfloat16), 0)
    master = torch.full((own.shard_numel(0),), 1.0)
    grads = ChunkGrads(chunk, torch.bfloat16, torch.bfloat16, Tier.DEVICE, None)
    ranges = plan_tiles(own, 0, [0] * len(SIZES), 4)
    tiles = make_tiles(grads, ChunkState(chunk, HOME, torch.float32, master, Events()), ranges)
    optimizer = torch.optim.SGD([p.value for t in tiles for p in t.pieces], lr=1.0)
    stepper = TileStepper(optimizer, tiles)
    grads.used_globally = set(range(len(SIZES)))
    for _ in range(100):
        grads.reduced = torch.full((own.shard_numel(0),), 2.0**-4, dtype=torch.bfloat16)
        step_all(stepper, 2.0**-8)
    used = torch.zeros(own.shard_numel(0), dtype=torch.bool)
    for tile in tiles:
        used[tile.start : tile.end] = True
    assert torch.equal(master[used], torch.full((int(used.sum()),), 1 - 100 * 2.0**-12))
    assert torch.equal(chunk.shard[used], master[used].bfloat16())


def test_which_optimizers_need_whole_tensors() -> None:
    params = [nn.Parameter(torch.ones(2, 2))]
    assert needs_whole_tensors(torch.optim.Adafactor(params)) and needs_whole_tensors(torch.optim.Muon(params))
    assert needs_whole_tensors(Lamb(params)) and not needs_whole_tensors(torch.optim.AdamW(params))
    assert needs_whole_tensors(FusedLAMB(params, max_grad_norm=0))
    with pytest.raises(ValueError, match=r"FusedLAMB cannot be sharded: max_grad_norm=1\.0 needs all gradients"):
        needs_whole_tensors(FusedLAMB(params))


def test_a_subclass_is_refused_as_well() -> None:
    """The name alone does not tell: a subclass of LBFGS works on all parameters just the same."""

    class Mine(torch.optim.LBFGS):
        pass

    with pytest.raises(ValueError, match="Mine works on all parameters"):
        needs_whole_tensors(Mine([nn.Parameter(torch.ones(2))]))


@pytest.mark.parametrize("there", [False, True])
def test_a_fused_kernel_is_chosen_for_the_device_of_a_tile(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.12 Adagrad has none on GPUs, for which the meta device stands; tiles on the host keep theirs."""
    monkeypatch.setattr(update_tiles, "ADAGRAD_ON_GPUS", there)
    host, gpu = torch.zeros(2), torch.zeros(2, device="meta")
    for asked, of_host, of_gpu in ((None, True, True if there else None), (False, False, False), (True, True, True)):
        stepper = TileStepper(torch.optim.Adagrad([nn.Parameter(torch.zeros(2))], fused=asked), [])
        with stepper.groups() as groups:
            found = [stepper._group_for(groups, 0, value) for value in (host, gpu, host)]
        assert [group["fused"] for group in found] == [of_host, of_gpu, of_host]
        assert found[1]["foreach"] is (False if of_gpu and asked is None else None)
