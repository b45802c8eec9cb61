"""TorchFSDPPlugin: applies torch's ``fully_shard`` to the model, with FSDP1's published arguments translated.

Source: PyTorch FSDP, arXiv 2304.11277; ``torch.distributed.fsdp``. ``docs/booster-plugins.md`` lists the differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)

from shardwise.booster.plugin.arguments import check_types
from shardwise.booster.plugin.base import Boosted, DPPluginBase, start_ranks
from shardwise.booster.plugin.fp8_communication import check_dtypes, compress_unit
from shardwise.booster.plugin.fsdp_state import TorchFSDPOptimizer, full_model_state, load_full_model_state, repoint
from shardwise.booster.plugin.fsdp_units import materialize, unit_modules
from shardwise.booster.wrappers import ModelWrapper
from shardwise.core.base.validate import refuse


@dataclass(frozen=True, kw_only=True)
class FSDPPlan:
    """Arguments for ``fully_shard``.

    Attributes:
        mesh: ``"shard"`` over all ranks, ``"hybrid"`` (replicas of nodes), or ``"replicate"`` (nothing is sharded).
        reshard_after_forward: release gathered parameters between forward and backward.
        offload: offload to the host.
        root_precision: precision of parameters outside units.
        unit_precision: precision of units.
        buffer_dtype: dtype of floating-point buffers other than fp64 ones; ``None``: no cast.
        full_precision_classes: modules computed in fp32 between casts.
    """

    mesh: Literal["shard", "hybrid", "replicate"]
    reshard_after_forward: bool
    offload: bool
    root_precision: MixedPrecisionPolicy
    unit_precision: MixedPrecisionPolicy
    buffer_dtype: torch.dtype | None
    full_precision_classes: tuple[type[nn.Module], ...]


_STRATEGIES: dict[ShardingStrategy, tuple[Literal["shard", "hybrid", "replicate"], bool]] = {
    ShardingStrategy.FULL_SHARD: ("shard", True),
    ShardingStrategy.SHARD_GRAD_OP: ("shard", False),
    ShardingStrategy.NO_SHARD: ("replicate", False),
    ShardingStrategy.HYBRID_SHARD: ("hybrid", True),
    ShardingStrategy._HYBRID_SHARD_ZERO2: ("hybrid", False),
}


def to_plan(arguments: TorchFSDPPlugin) -> FSDPPlan:
    """Return the ``fully_shard`` arguments for the published arguments.

    Raises:
        NotImplementedError: ``backward_prefetch=BACKWARD_POST``, ``mixed_precision.keep_low_precision_grads``, or
            ``fp8_communication`` with replicas; fully_shard has none of these.
        ValueError: the process group does not fit the strategy.
    """
    if arguments.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
        refuse("backward_prefetch", arguments.backward_prefetch, "fully_shard prefetches as BACKWARD_PRE does")
    mesh, reshard = _STRATEGIES[arguments.sharding_strategy or ShardingStrategy.FULL_SHARD]
    if arguments.fp8_communication and mesh != "shard":
        refuse("fp8_communication", True, f"{arguments.sharding_strategy} sums over replicas by itself: use FULL_SHARD")
    if isinstance(arguments.process_group, tuple) and mesh != "hybrid":
        raise ValueError(
            f"process_group of {len(arguments.process_group)} groups with sharding_strategy="
            f"{arguments.sharding_strategy}: a pair of groups is for HYBRID_SHARD; give one group"
        )
    if arguments.process_group is not None and mesh == "hybrid" and not isinstance(arguments.process_group, tuple):
        raise ValueError(
            f"process_group={arguments.process_group!r:.60} with {arguments.sharding_strategy}: give a pair "
            "(shard group, replicate group), or None to shard within each node"
        )
    mixed = arguments.mixed_precision or MixedPrecision()
    if mixed.keep_low_precision_grads:
        refuse(
            "mixed_precision.keep_low_precision_grads", True, "gradients have their parameter's dtype; leave it False"
        )
    common: dict[str, Any] = {"param_dtype": mixed.param_dtype, "reduce_dtype": mixed.reduce_dtype}
    return FSDPPlan(
        mesh=mesh,
        reshard_after_forward=reshard,
        offload=arguments.cpu_offload is not None and arguments.cpu_offload.offload_params,
        root_precision=MixedPrecisionPolicy(
            **common, cast_forward_inputs=mixed.cast_forward_inputs or mixed.cast_root_forward_inputs
        ),
        unit_precision=MixedPrecisionPolicy(**common, cast_forward_inputs=mixed.cast_forward_inputs),
        buffer_dtype=mixed.buffer_dtype,
        full_precision_classes=() if mixed.param_dtype is None else tuple(mixed._module_classes_to_ignore),
    )


class TorchFSDPModel(ModelWrapper):
    """A fully sharded module whose ``state_dict`` and ``load_state_dict`` use full tensors. Both are collective."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which ranks keep unsharded gradients. The next pass afterwards reduces the sum."""
        sharded = cast(FSDPModule, self.module)
        try:
            sharded.set_requires_gradient_sync(False)  # set unit by unit; an interrupt may come in between
            yield
        finally:
            sharded.set_requires_gradient_sync(True)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return full CPU tensors under the module's own names on every rank. Collective."""
        return full_model_state(self.module, self.module.state_dict(*args, **kwargs))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors, the same on every rank.

        Raises:
            NotImplementedError: ``assign=True``, which would replace shards by full tensors.
        """
        if assign:
            refuse("assign", assign, "leave it False")
        return load_full_model_state(self.module, state_dict, strict)


@dataclass(frozen=True, eq=False)
class TorchFSDPPlugin(DPPluginBase):
    """Sharding by torch's ``fully_shard``, with the published arguments of FSDP1.

    Args:
        process_group: ranks over which the model is sharded; for a hybrid strategy a pair (shard group, replicate
            group). ``None``: all ranks.
        sharding_strategy: FSDP1's strategy; ``None`` is FULL_SHARD.
        cpu_offload: keep parameters, gradients and optimizer state on the host.
        auto_wrap_policy: selects submodules that are gathered separately: a torch policy or ``f(module, recurse,
            nonwrapped_numel) -> bool``. ``None``: the model is one unit.
        backward_prefetch: ``None`` and BACKWARD_PRE are the behavior of fully_shard.
        mixed_precision: dtypes of parameters, reductions and buffers; ``None``: no casts.
        ignored_modules: modules that are not sharded; every rank has all of their parameters.
        param_init_fn: function that initializes a module; called on each module with meta parameters of its own.
        sync_module_states: all ranks start from the first rank's parameters and buffers.
        fp8_communication: communicate parameters and gradients in 8 bits, if there are no replicas.

    Examples:
        >>> from shardwise.booster import Booster
        >>> from shardwise.booster.plugin import TorchFSDPPlugin
        >>> plugin = TorchFSDPPlugin()
        >>> booster = Booster(plugin=plugin)
    """

    process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    sharding_strategy: ShardingStrategy | None = None
    cpu_offload: CPUOffload | None = None
    auto_wrap_policy: Callable[..., Any] | None = None
    backward_prefetch: BackwardPrefetch | None = None
    mixed_precision: MixedPrecision | None = None
    ignored_modules: Iterable[nn.Module] | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool = False
    fp8_communication: bool = False

    def __post_init__(self) -> None:
        check_types(self, own=("auto_wrap_policy",))
        policy = self.auto_wrap_policy
        if policy is not None and not callable(policy) and not hasattr(policy, "_run_policy"):
            raise TypeError(
                f"auto_wrap_policy={policy!r:.80}: give a policy of torch.distributed.fsdp.wrap, a function of "
                "(module, recurse, nonwrapped_numel), or None"
            )
        to_plan(self)

    def data_parallel(self) -> tuple[int, int]:
        """Return this rank's index and the number of ranks in ``process_group``, or among all ranks."""
        if isinstance(self.process_group, dist.ProcessGroup):
            return dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        return super().data_parallel()

    def configure(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Boosted:
        device = start_ranks()
        if not dist.is_initialized():  # fully_shard needs a group even in a single process
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        plan = to_plan(self)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._shard(model, plan, _device_mesh(plan.mesh, self.process_group, device), device)
        boosted = TorchFSDPModel(model)
        if optimizer is not None:
            repoint(optimizer, names, dict(model.named_parameters()))
            optimizer = TorchFSDPOptimizer(optimizer)
        return boosted, optimizer

    def _shard(self, model: nn.Module, plan: FSDPPlan, mesh: DeviceMesh, device: torch.device) -> None:
        ignored = {inner for module in self.ignored_modules or () for inner in module.modules()}
        if model in ignored:
            raise ValueError(f"ignored_modules holds the whole model ({type(model).__name__}); ignore parts of it")
        left_alone = {parameter for module in ignored for parameter in module.parameters(recurse=False)}
        for module in ignored:
            module.to(device)
        materialize(model, ignored, device, self.param_init_fn)
        if self.sync_module_states:
            _sync_states(model, mesh, device)
        if plan.buffer_dtype is not None:
            for module in set(model.modules()) - ignored:
                for name, buffer in module.named_buffers(recurse=False):
                    if buffer.is_floating_point() and buffer.dtype != torch.float64:
                        module.register_buffer(
                            name, buffer.to(plan.buffer_dtype), name not in module._non_persistent_buffers_set
                        )
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if plan.offload else OffloadPolicy()
        fp32 = MixedPrecisionPolicy(
            param_dtype=torch.float32, output_dtype=plan.root_precision.param_dtype, cast_forward_inputs=True
        )
        if self.fp8_communication:
            check_dtypes(model)
        for unit in unit_modules(model, self.auto_wrap_policy, ignored, plan.full_precision_classes):
            root = unit is model
            precision = plan.root_precision if root else plan.unit_precision
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=plan.reshard_after_forward,
                mp_policy=fp32 if isinstance(unit, plan.full_precision_classes) else precision,
                offload_policy=offload,
                ignored_params=left_alone,
            )
            if self.fp8_communication:
                compress_unit(cast(FSDPModule, unit))


def _sync_states(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    model.to(device)
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for group in mesh.get_all_groups():
        source = dist.get_process_group_ranks(group)[0]
        for tensor in tensors.values():
            full = tensor.detach().contiguous()
            dist.broadcast(full, src=source, group=group)
            tensor.detach().copy_(full)


def _device_mesh(
    kind: str,
    group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None,
    device: torch.device,
) -> DeviceMesh:
    names = ("dp_replicate", "dp_shard")
    if isinstance(group, tuple):
        shard, replicate = group
        rows: list[list[int] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, sorted(dist.get_process_group_ranks(shard)))
        unique = sorted({tuple(row) for row in rows if row is not None})
        return DeviceMesh.from_group(
            [replicate, shard], device.type, torch.tensor(unique, device="cpu"), mesh_dim_names=names
        )
    if group is not None and kind == "shard":
        return DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp_shard",))
    world = dist.get_world_size()
    if kind == "shard":
        return init_device_mesh(device.type, (world,), mesh_dim_names=("dp_shard",))
    if kind == "hybrid":
        node = _ranks_per_node(world)
        return init_device_mesh(device.type, (world // node, node), mesh_dim_names=names)
    if group is not None:
        ranks = torch.tensor(dist.get_process_group_ranks(group), device="cpu").reshape(-1, 1)
        return DeviceMesh(device.type, ranks, mesh_dim_names=names)
    return init_device_mesh(device.type, (world, 1), mesh_dim_names=names)


def _ranks_per_node(world: int) -> int:
    from shardwise.core.mesh.launch import LaunchFacts

    node = LaunchFacts.read().local_world_size
    if world % node:
        raise ValueError(
            f"{world} ranks cannot be divided into nodes of {node} ranks; give process_group=(shard group, replicate "
            "group)"
        )
    return node
