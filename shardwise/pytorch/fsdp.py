"""``FullyShardedDataParallel``'s published arguments (FSDP1) as a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from shardwise.booster.plugin.fsdp_units import unit_modules
from shardwise.core.base.checked import refuse
from shardwise.core.base.remarks import warn_user
from shardwise.plan import ByModule, MeshPlan, Plan, replicated, zero
from shardwise.pytorch.precision import check_full_precision, with_formats
from shardwise.pytorch.ranks import all_ranks, check_all_ranks, mesh_of, name_device, nodes

__all__ = ["names_of_ignored", "on_host", "plan_of_fsdp"]

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
STAYS = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


def plan_of_fsdp(
    model: nn.Module,
    process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
    sharding_strategy: ShardingStrategy | None = None,
    cpu_offload: CPUOffload | None = None,
    auto_wrap_policy: Any = None,
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    mixed_precision: MixedPrecision | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    device_id: int | torch.device | None = None,
    sync_module_states: bool = False,
    forward_prefetch: bool = False,
    limit_all_gathers: bool = True,
    use_orig_params: bool = False,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
    device_mesh: DeviceMesh | None = None,
) -> Plan:
    """What ``FullyShardedDataParallel(model, ...)`` shards, for ``shard(model, optimizer, plan)``.

    Args:
        model: not wrapped; it stays as it is.
        process_group, device_mesh: all ranks; a pair of groups, or a mesh of two dimensions, for a hybrid strategy.
        sharding_strategy: FULL_SHARD is the default; NO_SHARD replicates; SHARD_GRAD_OP keeps gathered what was.
        cpu_offload: parameters, masters and optimizer state are at home on the host, where the update is.
        auto_wrap_policy: the units; ``None``: one a block, which needs no policy.
        backward_prefetch: ``None`` gathers nothing ahead, unless ``forward_prefetch`` asks for it.
        mixed_precision: fp16 brings a loss scale of its own, in the place of ``ShardedGradScaler``.
        ignored_modules, ignored_states: stay gathered on every rank. Trainable ones warn: they are averaged, too.
        param_init_fn: refused where the model is on the meta device: build it under ``deferred_init()``.
        device_id: this rank's; a warning if not.
        sync_module_states: start from rank 0's values.
        forward_prefetch, limit_all_gathers, use_orig_params: need not be said: what comes next is fetched ahead in both
            passes, one unit (between hosts without GPUs small ones up to 16 MiB), and parameters are the model's own.

    Raises:
        NotImplementedError, ValueError: what no plan says; the argument is named.
    """
    strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
    name_device("device_id", device_id)
    if param_init_fn is not None and any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        refuse("param_init_fn", param_init_fn, "build the model under shardwise.deferred_init(), and leave it")
    plan = replicated() if strategy is ShardingStrategy.NO_SHARD else zero(3)
    plan = plan.but(mesh=_sizes(strategy, process_group, device_mesh), sync_init=bool(sync_module_states))
    ignored = set(ignored_modules or ())
    states = list(ignored_states or ())
    ignored |= {each for each in states if isinstance(each, nn.Module)}
    kept = names_of_ignored(model, [p for p in states if isinstance(p, nn.Parameter)], ignored)
    if strategy is not ShardingStrategy.NO_SHARD:
        prefetch = 0 if backward_prefetch is None and not forward_prefetch else 1
        plan = plan.but(prefetch=prefetch, gathered_fraction=1.0 if strategy in STAYS else 0.0, kept=kept)
    if backward_prefetch is BackwardPrefetch.BACKWARD_POST:
        warn_user(f"backward_prefetch={backward_prefetch}: one unit is fetched ahead, as BACKWARD_PRE")
    if auto_wrap_policy is not None and strategy is not ShardingStrategy.NO_SHARD:
        name_of = {module: name for name, module in model.named_modules()}
        units = tuple(name_of[each] for each in unit_modules(model, auto_wrap_policy, ignored) if each is not model)
        plan = plan.but(packing=ByModule(unit_classes=(), unit_names=units))
    if mixed_precision is not None:
        check_full_precision(model, mixed_precision)
        plan = with_formats(plan, mixed_precision)
    return on_host(plan, pin=True) if cpu_offload is not None and cpu_offload.offload_params else plan


def on_host(plan: Plan, pin: bool) -> Plan:
    """``plan`` with everything that is not gathered at home on the host."""
    tiers = replace(plan.tiers, param_host_fraction=1.0, state_host_fraction=1.0, pin_memory=pin)
    return replace(plan, tiers=tiers)


def names_of_ignored(model: nn.Module, params: Iterable[nn.Parameter], modules: Iterable[nn.Module]) -> tuple[str, ...]:
    """Names of parameters that are not to be sharded; warns of trainable ones.

    Raises:
        ValueError: one is none of the model's.
    """
    wanted = {id(param): param for param in params}
    wanted |= {id(param): param for module in modules for param in module.parameters()}
    found = {id(param): name for name, param in model.named_parameters()}
    strange = [tuple(param.shape) for key, param in wanted.items() if key not in found]
    if strange:
        raise ValueError(f"ignored parameters of shapes {strange} are not the model's: give some of model.parameters()")
    trained = [found[key] for key, param in wanted.items() if param.requires_grad]
    if trained:
        warn_user(
            f"{', '.join(trained[:3])}: {len(trained)} ignored parameters stay whole on every rank, and their "
            "gradients are averaged all the same, which torch leaves to you"
        )
    return tuple(found[key] for key in found if key in wanted)


def _sizes(strategy: ShardingStrategy, group: Any, mesh: DeviceMesh | None) -> MeshPlan:
    pair = group if isinstance(group, tuple) else None
    if (pair is not None or (mesh is not None and mesh.ndim == 2)) != (strategy in HYBRID) and (group or mesh):
        given = f"process_group={group!r:.60}, device_mesh={mesh!r:.60}"
        raise ValueError(
            f"{given} with {strategy}: two groups, or dimensions, are for HYBRID_SHARD, one for the others"
        )
    if mesh is not None:
        sizes = mesh_of(mesh)
    elif strategy in HYBRID:
        sizes = nodes(pair)
    else:
        check_all_ranks("process_group", group)
        sizes = all_ranks()
    if strategy is ShardingStrategy.NO_SHARD:
        return MeshPlan(dp_shard=1, dp_replicate=-1)
    return sizes
