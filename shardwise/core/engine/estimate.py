"""The memory that a plan will need, computed from the model's shapes without a build."""

from __future__ import annotations

import inspect
from collections import Counter
from functools import cache, partial

import torch
from torch import nn

from shardwise.core.comm import LocalGroup
from shardwise.core.engine.mixed_precision import buffer_bytes
from shardwise.core.engine.partition import parameter_facts
from shardwise.core.engine.placement import ChunkPlacement, RankFacts, place
from shardwise.core.grads.reducer import BucketPool
from shardwise.core.memory.tier import Tier
from shardwise.core.parallel.tensor import Axis, cut_model
from shardwise.core.shards.layout import make_layout
from shardwise.core.update.tiles import needs_whole_tensors
from shardwise.plan import Plan


def estimate_memory(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, ranks: int, rank: int = 0, device: str = "cuda"
) -> dict[str, dict[str, int]]:
    """Return bytes by tier and kind, as ``session.memory().by_tier`` reports them from the second step on.

    Gathered parameters are not included.

    Args:
        model: the model, which may be on the meta device.
        optimizer: the optimizer of the model's parameters. Factored state (Adafactor) is not counted.
        plan: without pipeline stages, secondary shards and updates during backward.
        ranks: number of ranks.
        rank: index among the ranks that shard parameters.
        device: ``"cpu"`` or ``"cuda"``.
    """
    sizes = plan.mesh.resolve(ranks)
    axis = LocalGroup("tp", torch.device("meta"))
    axis.size = sizes.tp  # nothing is sent; dividing layers needs rank and size only
    tp_plan = cut_model(model, Axis(axis), plan.tensor) if sizes.tp > 1 else None
    facts = parameter_facts(list(model.parameters()), model, [optimizer], plan, tp_plan)
    rule, shard, unsharded = plan.shard, sizes.dp_shard, [0] if needs_whole_tensors(optimizer) else []
    layout = make_layout(facts, model, rule.packing, shard, sizes.dp_replicate, rule.groups, unsharded)
    table = place(plan, layout, RankFacts(rank, shard, device)).chunks
    exchanged = shard > 1 < sizes.dp_replicate  # on the device, by replicas
    by_tier = {tier: Counter[str]() for tier in ("device", "host", "disk")}
    state_bytes = cache(partial(_state_bytes, optimizer))
    for each in table:
        home, numel = each.home, each.shard_numel
        by_tier[home.param.value]["parameters"] += each.param_bytes
        state = by_tier[home.state.value]
        state["masters"] += numel * each.master_dtype.itemsize if each.master_dtype is not None else 0
        for piece in (piece for tile in each.tiles for piece in tile.pieces):
            dims = len(facts[piece.param].shape) if each.spec.unsplit else 1
            once, element = state_bytes(dims, each.master_dtype or each.spec.dtype)
            state["optimizer state"] += once + (piece.end - piece.start) * element
        if each.spec.trainable and exchanged:
            by_tier["device"]["gradients"] += numel * each.reduce_dtype.itemsize
        # Full and exchanged gradients include the shard, unless a GPU moves it to the host.
        apart = (plan.shard.reduce == "every" and not exchanged) or (home.grad is not Tier.DEVICE and device == "cuda")
        if each.spec.trainable and (apart or each.reduce_dtype != each.accumulate_dtype):
            by_tier[home.grad.value]["gradients"] += numel * each.accumulate_dtype.itemsize
    by_tier["device"]["gradients"] += _exchange_bytes([each for each in table if each.spec.trainable], plan)
    by_tier["device"]["buffers"] = buffer_bytes(model, plan.precision.buffer_dtype)
    return {tier: {kind: size for kind, size in kinds.items() if size} for tier, kinds in by_tier.items()}


def _state_bytes(optimizer: torch.optim.Optimizer, dims: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of state for each stepped tensor, and for each of its elements, by a step of a small one."""
    probe = nn.Parameter(torch.zeros((2,) * dims, dtype=dtype, device="cpu"))
    probe.grad = torch.zeros_like(probe)
    known = inspect.signature(type(optimizer)).parameters
    # A new optimizer, since some create state in their constructors.
    stepped = type(optimizer)([probe], **{key: value for key, value in optimizer.defaults.items() if key in known})
    stepped.step()
    tensors = [value for value in stepped.state[probe].values() if isinstance(value, torch.Tensor)]
    of_elements = [value for value in tensors if value.shape == probe.shape]
    return sum(v.nbytes for v in tensors) - sum(v.nbytes for v in of_elements), sum(v.itemsize for v in of_elements)


def _exchange_bytes(chunks: list[ChunkPlacement], plan: Plan) -> int:
    """Return the bytes of unsharded gradients: of all chunks, or of the buckets that they share."""
    own = [(each.spec, each.reduce_dtype) for each in chunks]
    shared = BucketPool(own, 2 if plan.comm.overlap else 1).specs
    separate = [(spec.padded_numel, dtype) for spec, dtype in own]
    return sum(numel * dtype.itemsize for numel, dtype in (separate if plan.shard.reduce == "last" else shared))
