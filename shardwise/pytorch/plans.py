"""``FullyShardedDataParallel``'s published arguments (FSDP1) as a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from shardwise.booster.plugin.fsdp_units import unit_modules
from shardwise.core.base.validate import MOST_BYTES, integer, refuse
from shardwise.core.base.warnings import warn_user
from shardwise.core.mesh.launch import read_variable
from shardwise.plan import ByModule, ByNumel, MeshPlan, ParamGroupPlan, Plan, replicated, zero
from shardwise.plan.precision import HALF_DTYPES
from shardwise.plan.scaler_arguments import TORCH_SCALER

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
    """Return the plan of ``FullyShardedDataParallel(model, ...)`` for ``shard(model, optimizer, plan)``.

    Args:
        model: a module that is not wrapped; it is unchanged.
        process_group: ``None`` or the group of all ranks; for a hybrid strategy the groups of shards and replicas.
        device_mesh: instead, a mesh of all ranks; for a hybrid strategy one of two dimensions.
        sharding_strategy: FULL_SHARD by default; NO_SHARD replicates; SHARD_GRAD_OP keeps parameters gathered.
        cpu_offload: keep parameters, masters and optimizer state on the host, and update them there.
        auto_wrap_policy: selects the units; ``None``: one per block, without a policy.
        backward_prefetch: ``None`` disables prefetching, unless ``forward_prefetch`` enables it.
        mixed_precision: fp16 has a loss scale, which replaces ``ShardedGradScaler``.
        ignored_modules: their parameters stay gathered on every rank. Trainable ones warn: they are averaged, too.
        ignored_states: parameters or modules that are treated as ``ignored_modules``.
        param_init_fn: an error if the model is on the meta device: build it under ``deferred_init()``.
        device_id: the device of this rank; another one warns.
        sync_module_states: start from rank 0's values.
        forward_prefetch: not needed: the next unit is prefetched in both passes (between hosts without GPUs, if it is
            not larger than 16 MiB).
        limit_all_gathers: not needed: at most one unit is prefetched.
        use_orig_params: not needed: optimizers get the model's own parameters.

    Raises:
        NotImplementedError: an argument is not supported; the message names it.
        ValueError: groups, meshes, units or ignored parameters do not fit the model, the ranks or each other.

    Examples:
        >>> from torch.distributed.fsdp import ShardingStrategy
        >>> from shardwise.pytorch import plan_of_fsdp
        >>> plan = plan_of_fsdp(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        >>> session = shardwise.shard(model, optimizer, plan)
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
    groups = stays_gathered(names_of_ignored(model, [p for p in states if isinstance(p, nn.Parameter)], ignored))
    if strategy is not ShardingStrategy.NO_SHARD:
        prefetch = 0 if backward_prefetch is None and not forward_prefetch else 1
        plan = plan.but(prefetch=prefetch, gathered_fraction=1.0 if strategy in STAYS else 0.0, groups=groups)
    if backward_prefetch is BackwardPrefetch.BACKWARD_POST:
        warn_user(f"backward_prefetch={backward_prefetch}: one unit is prefetched, as with BACKWARD_PRE")
    if auto_wrap_policy is not None and strategy is not ShardingStrategy.NO_SHARD:
        name_of = {module: name for name, module in model.named_modules()}
        units = tuple(name_of[each] for each in unit_modules(model, auto_wrap_policy, ignored) if each is not model)
        plan = plan.but(packing=ByModule(unit_classes=(), unit_names=units))
    if mixed_precision is not None:
        check_full_precision(model, mixed_precision)
        plan = with_formats(plan, mixed_precision)
    return on_host(plan, pin=True) if cpu_offload is not None and cpu_offload.offload_params else plan


def on_host(plan: Plan, pin: bool) -> Plan:
    """Return ``plan`` with everything that is not gathered on the host."""
    return plan.but(param_host_fraction=1.0, state_host_fraction=1.0, pin_memory=pin)


def stays_gathered(names: tuple[str, ...]) -> tuple[ParamGroupPlan, ...]:
    """Return the parameter group of ``names``, which stay gathered. Without names there is no group."""
    return (ParamGroupPlan(names=names, reshard_after_forward=False),) if names else ()


def names_of_ignored(model: nn.Module, params: Iterable[nn.Parameter], modules: Iterable[nn.Module]) -> tuple[str, ...]:
    """Return names of parameters that are not to be sharded; warn about trainable ones.

    Raises:
        ValueError: a parameter is not the model's.
    """
    ignored = {id(param): param for param in params}
    ignored |= {id(param): param for module in modules for param in module.parameters()}
    names = {id(param): name for name, param in model.named_parameters()}
    strange = [tuple(param.shape) for key, param in ignored.items() if key not in names]
    if strange:
        raise ValueError(f"ignored parameters of shapes {strange} are not the model's: give some of model.parameters()")
    trained = [names[key] for key, param in ignored.items() if param.requires_grad]
    if trained:
        warn_user(
            f"{', '.join(trained[:3])}: {len(trained)} ignored parameters are not sharded, and their "
            "gradients are averaged, which torch leaves to you"
        )
    return tuple(names[key] for key in names if key in ignored)


def _sizes(strategy: ShardingStrategy, group: Any, mesh: DeviceMesh | None) -> MeshPlan:
    pair = group if isinstance(group, tuple) else None
    if (pair is not None or (mesh is not None and mesh.ndim == 2)) != (strategy in HYBRID) and (group or mesh):
        shown = f"process_group={group!r:.60}, device_mesh={mesh!r:.60}"
        raise ValueError(
            f"{shown} with {strategy}: two groups, or dimensions, are for HYBRID_SHARD, one for the others"
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


# ---- ``fully_shard``'s published arguments (FSDP2) as a plan.


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
    """Return the plan of ``fully_shard`` on ``model`` and the ``units`` in it, for ``shard(model, optimizer, plan)``.

    Args:
        model: a module that is not sharded yet; it is unchanged.
        mesh: all ranks, or (replicas, ranks that shard); ``None``: all ranks.
        reshard_after_forward: False and 1 keep parameters gathered; ``None`` and True do not, including those of the
            root module. With a number k of ranks backward gathers from k neighbors, which keep a second copy
            (:attr:`MeshPlan.secondary`).
        shard_placement_fn: an error: shards are slices of many consecutive parameters.
        mp_policy: dtypes; fp16 has a loss scale.
        offload_policy: ``CPUOffloadPolicy`` keeps parameters, masters and optimizer state on the host.
        ignored_params: stay gathered on every rank. Trainable ones warn: they are averaged, too.
        dp_mesh_dims: an error: a mesh only has data-parallel dimensions.
        units: the modules on which ``fully_shard`` was called before the model; none: one unit per block.

    Raises:
        NotImplementedError: an argument is not supported; the message names it.
        ValueError: groups, meshes, units or ignored parameters do not fit the model, the ranks or each other.

    Examples:
        >>> from torch.distributed.fsdp import MixedPrecisionPolicy
        >>> from shardwise.pytorch import plan_of_fully_shard
        >>> plan = plan_of_fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        >>> session = shardwise.shard(model, optimizer, plan)
    """
    if shard_placement_fn is not None:
        refuse(
            "shard_placement_fn", shard_placement_fn, "no dimension is divided; leave it out, the numbers are the same"
        )
    if dp_mesh_dims is not None:
        refuse("dp_mesh_dims", dp_mesh_dims, "give a mesh of data-parallel ranks; tensor parallelism is the plan's tp")
    shard_ranks = reshard_after_forward if type(reshard_after_forward) is int else None
    if reshard_after_forward not in (None, True, False) if shard_ranks is None else shard_ranks < 1:
        raise ValueError(f"reshard_after_forward={reshard_after_forward!r}: give True, False or a number of ranks >= 1")
    stays = reshard_after_forward is False or shard_ranks == 1
    ranks = all_ranks() if mesh is None else mesh_of(mesh)
    name_of = {module: name for name, module in model.named_modules()}
    modules = list(units)
    strange = [type(each).__name__ for each in modules if each not in name_of]
    if strange:
        raise ValueError(f"units={strange} are no modules of the {type(model).__name__}: give some of model.modules()")
    names = tuple(name_of[each] for each in modules if each is not model)
    plan = zero(3).but(
        mesh=ranks if stays else replace(ranks, secondary=shard_ranks),
        gathered_fraction=1.0 if stays else 0.0,
        packing=ByModule(unit_classes=(), unit_names=names),
        groups=stays_gathered(names_of_ignored(model, ignored_params or (), ())),
        sync_init=False,
    )
    if mp_policy is not None:
        plan = with_formats(plan, mp_policy)
    if isinstance(offload_policy, CPUOffloadPolicy):
        plan = on_host(plan, offload_policy.pin_memory)
    return plan


# ---- ``DistributedDataParallel``'s published arguments as a plan.


MIB = 2**20
FLOAT_BYTES = 4  # element size of the gradients in DDP's buckets


def plan_of_ddp(
    device_ids: Sequence[int | torch.device] | None = None,
    output_device: int | torch.device | None = None,
    dim: int = 0,
    broadcast_buffers: bool | None = None,
    init_sync: bool = True,
    process_group: dist.ProcessGroup | None = None,
    bucket_cap_mb: int | None = None,
    find_unused_parameters: bool = False,
    check_reduction: bool = False,
    gradient_as_bucket_view: bool = False,
    static_graph: bool = False,
    delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
    param_to_hook_all_reduce: torch.nn.Parameter | None = None,
    mixed_precision: Any = None,
    device_mesh: DeviceMesh | None = None,
    skip_all_reduce_unused_params: bool = False,
    bucket_cap_mb_list: Sequence[float] | None = None,
    batched_grad_copy: bool = False,
    forward_sync_buffers: bool | None = None,
) -> Plan:
    """Return the plan of ``DistributedDataParallel``: replicated parameters, gradients averaged over all ranks.

    Args:
        device_ids: a list of this rank's device; another device causes a warning.
        output_device: this rank's device; another device causes a warning.
        dim: must be 0, as batches are divided by the sampler.
        broadcast_buffers: True warns: buffers are broadcast at the beginning, not in each pass.
        forward_sync_buffers: True warns as ``broadcast_buffers`` does.
        init_sync: ranks start from rank 0's values.
        process_group: ``None`` or the group of all ranks; another group raises an error.
        device_mesh: ``None`` or a mesh of all ranks.
        bucket_cap_mb: MiB of fp32 gradients that are reduced together; ``None``: 25.
        find_unused_parameters: not needed: unused parameters are detected without traversing the graph.
        skip_all_reduce_unused_params: not needed: unused parameters are neither reduced nor updated.
        static_graph: not needed: the parameters that a pass uses are found as it runs.
        gradient_as_bucket_view: not needed: gradients are always views of the buckets.
        batched_grad_copy: not needed, as views need no copies.
        check_reduction: must be False; torch ignores it as well.
        delay_all_reduce_named_params: must be ``None``: gradients are reduced in the order in which they come.
        param_to_hook_all_reduce: must be ``None``, for the same reason.
        bucket_cap_mb_list: must be ``None``: give one size as ``bucket_cap_mb``.
        mixed_precision: dtypes, as for :func:`~shardwise.pytorch.plan_of_fsdp`.

    Returns:
        The plan for ``shard(model, optimizer, plan)``.

    Raises:
        NotImplementedError: an unsupported argument.

    Examples:
        >>> from shardwise.pytorch import plan_of_ddp
        >>> session = shardwise.shard(model, optimizer, plan_of_ddp(bucket_cap_mb=50))
    """
    name_device("device_ids", device_ids)
    name_device("output_device", output_device)
    delayed, hook, sizes_of_buckets = delay_all_reduce_named_params, param_to_hook_all_reduce, bucket_cap_mb_list
    order = "gradients are reduced in the order in which they come"
    for name, value, fits, instead in (
        ("dim", dim, dim == 0, "batches are divided by the sampler; leave it 0"),
        ("check_reduction", check_reduction, not check_reduction, "leave it False: torch ignores it as well"),
        ("delay_all_reduce_named_params", delayed, delayed is None, order),
        ("param_to_hook_all_reduce", hook, hook is None, order),
        ("bucket_cap_mb_list", sizes_of_buckets, sizes_of_buckets is None, "give one size, bucket_cap_mb"),
    ):
        if not fits:
            refuse(name, value, instead)
    for name, flag in (("broadcast_buffers", broadcast_buffers), ("forward_sync_buffers", forward_sync_buffers)):
        if flag:
            warn_user(
                f"{name}={flag}: buffers are rank 0's at the beginning, and separate afterwards. Synchronize "
                "running statistics with nn.SyncBatchNorm, or before an evaluation"
            )
    check_all_ranks("process_group", process_group)
    plan = replicated()
    if device_mesh is not None:
        sizes = mesh_of(device_mesh)
        plan = plan.but(mesh=MeshPlan(dp_shard=1, dp_replicate=sizes.dp_replicate * sizes.dp_shard))
    cap = 25 if bucket_cap_mb is None else bucket_cap_mb
    size = integer("bucket_cap_mb", cap, 1, MOST_BYTES // MIB, "a size in MiB")
    plan = plan.but(packing=ByNumel(chunk_numel=size * MIB // FLOAT_BYTES), sync_init=bool(init_sync))
    return plan if mixed_precision is None else with_formats(plan, mixed_precision)


# ---- number formats of torch's policies as those of a plan


def with_formats(plan: Plan, policy: Any) -> Plan:
    """Return ``plan`` with the number formats of a ``MixedPrecision`` or ``MixedPrecisionPolicy``.

    Computation is in ``param_dtype``, and parameters are updated in their own dtype. fp16 has the loss scale of torch's
    ``GradScaler``.

    Raises:
        NotImplementedError: ``keep_low_precision_grads``.
    """
    if getattr(policy, "keep_low_precision_grads", False):
        refuse("mixed_precision.keep_low_precision_grads", True, "the optimizer gets gradients in fp32; leave it False")
    dtype = policy.param_dtype
    root = getattr(policy, "cast_root_forward_inputs", False)
    cast = bool(getattr(policy, "cast_forward_inputs", True) or root)
    return plan.but(
        param_dtype=dtype,
        buffer_dtype=getattr(policy, "buffer_dtype", None),
        reduce_dtype=policy.reduce_dtype,
        accumulate_dtype=torch.float32 if {dtype, policy.reduce_dtype} & set(HALF_DTYPES) else None,
        cast_inputs=cast and dtype is not None,
        output_dtype=getattr(policy, "output_dtype", None),
        scaler=TORCH_SCALER if dtype is torch.float16 else None,
    )


def check_full_precision(model: nn.Module, policy: Any) -> None:
    """Check that the policy does not keep modules of the model in fp32.

    Raises:
        NotImplementedError: the policy keeps modules of some classes in fp32, and the model has one.
    """
    classes = tuple(getattr(policy, "_module_classes_to_ignore", ()) or ())
    norm = next((name for name, module in model.named_modules() if classes and isinstance(module, classes)), None)
    if policy.param_dtype is not None and norm is not None:
        refuse(
            "mixed_precision.param_dtype",
            policy.param_dtype,
            f"{norm} ({type(model.get_submodule(norm)).__name__}) would be computed in fp32 by torch: use a norm "
            "without running statistics, or fp32",
        )


# ---- Process groups, device meshes and devices of torch's arguments; a plan only has numbers of ranks.


def check_all_ranks(name: str, group: dist.ProcessGroup | None) -> None:
    """Check that ``group`` has all ranks.

    Raises:
        NotImplementedError: ``group`` has only some ranks.
    """
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        refuse(name, f"{dist.get_world_size(group)} of {dist.get_world_size()} ranks", "a plan is for all that run")


def mesh_of(mesh: DeviceMesh) -> MeshPlan:
    """Return the mesh plan. One dimension shards. If there are two dimensions, the first one replicates.

    Raises:
        NotImplementedError: three dimensions, or not all ranks.
    """
    sizes = tuple(mesh.mesh.shape)
    if len(sizes) > 2:
        refuse("mesh", f"{sizes} ranks", "give (replicas, ranks that shard); tensor parallelism is the plan's tp")
    if mesh.size() != dist.get_world_size():
        refuse("mesh", f"{mesh.size()} of {dist.get_world_size()} ranks", "a plan is for all that run")
    return MeshPlan(dp_replicate=sizes[0] if len(sizes) == 2 else 1, dp_shard=sizes[-1])


def all_ranks() -> MeshPlan:
    """Return the mesh plan in which every rank has a shard."""
    return MeshPlan(dp_shard=-1, dp_replicate=1)


def nodes(pair: tuple[dist.ProcessGroup, dist.ProcessGroup] | None) -> MeshPlan:
    """Return the mesh plan that shards within a group and replicates the group.

    The group is the first of a pair of groups, or the ranks of a node.

    Raises:
        ValueError: the launcher's variables do not have the number of ranks per node.
    """
    if pair is not None:
        return MeshPlan(dp_shard=dist.get_world_size(pair[0]), dp_replicate=dist.get_world_size(pair[1]))
    local = read_variable("LOCAL_WORLD_SIZE")
    if local is None:
        raise ValueError(
            f"HYBRID_SHARD without groups, and LOCAL_WORLD_SIZE={local}: start the ranks with torchrun or `shardwise "
            "run`, or give a device_mesh of (nodes, ranks of a node)"
        )
    return MeshPlan(dp_shard=int(local), dp_replicate=-1)


def name_device(name: str, value: Any) -> None:
    """Warn if ``value`` is not the current device, because a plan has no device.

    Raises:
        NotImplementedError: several devices in one process.
    """
    devices = list(value) if isinstance(value, list | tuple) else [value] if value is not None else []
    if len(devices) > 1:
        refuse(name, value, "start one process per GPU")
    if devices and not _is_current(devices[0]):
        warn_user(
            f"{name}={value!r} is not in the plan, which names no device: shard(..., device=...) takes it; by default "
            "that is this rank's GPU"
        )


def _is_current(device: Any) -> bool:
    gpu = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if gpu.type != "cuda":
        return not torch.cuda.is_available()
    return torch.cuda.is_available() and gpu.index in (None, int(read_variable("LOCAL_RANK") or 0))
