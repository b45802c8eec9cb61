"""``fully_shard``'s published arguments (FSDP2) as a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise.core.base.checked import refuse
from shardwise.plan import ByModule, Plan, zero
from shardwise.pytorch.fsdp import names_of_ignored, on_host
from shardwise.pytorch.precision import with_formats
from shardwise.pytorch.ranks import all_ranks, mesh_of

__all__ = ["plan_of_fully_shard"]


def plan_of_fully_shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    *,
    units: Iterable[nn.Module] = (),
) -> Plan:
    """What ``fully_shard`` makes of ``model`` and the ``units`` inside it, for ``shard(model, optimizer, plan)``.

    Args:
        model: not sharded yet; it stays as it is.
        mesh: all ranks, or (replicas, ranks that shard); ``None``: all ranks.
        reshard_after_forward: False keeps gathered what was, and so does 1; ``None`` and True do not, the outermost
            module's included. A number k of ranks: backward gathers from k neighbours, who keep a second copy
            (:attr:`MeshPlan.secondary`).
        shard_placement_fn: refused: shards are slices of many parameters one behind the other.
        mp_policy: dtypes; fp16 brings a loss scale.
        offload_policy: ``CPUOffloadPolicy`` has parameters, masters and optimizer state at home on the host.
        ignored_params: stay gathered on every rank. Trainable ones warn: they are averaged, too.
        dp_mesh_dims: refused: a mesh has data-parallel dimensions alone.
        units: the modules that ``fully_shard`` was called on before the model; none: one a block.

    Raises:
        NotImplementedError, ValueError: what no plan says; the argument is named.
    """
    if shard_placement_fn is not None:
        refuse(
            "shard_placement_fn", shard_placement_fn, "no dimension is divided; leave it out, the numbers are the same"
        )
    if dp_mesh_dims is not None:
        refuse("dp_mesh_dims", dp_mesh_dims, "give a mesh of data-parallel ranks; tensor parallelism is the plan's tp")
    kept_by = reshard_after_forward if type(reshard_after_forward) is int else None
    if (kept_by is None and reshard_after_forward not in (None, True, False)) or (kept_by is not None and kept_by < 1):
        raise ValueError(f"reshard_after_forward={reshard_after_forward!r}: give True, False or a number of ranks >= 1")
    stays = reshard_after_forward is False or kept_by == 1
    ranks = all_ranks() if mesh is None else mesh_of(mesh)
    name_of = {module: name for name, module in model.named_modules()}
    given = list(units)
    strange = [type(each).__name__ for each in given if each not in name_of]
    if strange:
        raise ValueError(f"units={strange} are no modules of the {type(model).__name__}: give some of model.modules()")
    names = tuple(name_of[each] for each in given if each is not model)
    plan = zero(3).but(
        mesh=ranks if stays else replace(ranks, secondary=kept_by),
        gathered_fraction=1.0 if stays else 0.0,
        packing=ByModule(unit_classes=(), unit_names=names),
        kept=names_of_ignored(model, ignored_params or (), ()),
        sync_init=False,
    )
    if mp_policy is not None:
        plan = with_formats(plan, mp_policy)
    if isinstance(offload_policy, CPUOffloadPolicy):
        plan = on_host(plan, offload_policy.pin_memory)
    return plan
