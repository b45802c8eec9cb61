"""``DDPFullyShardedStrategy`` for Lightning's Trainer and Fabric, with FairScale's arguments, and ``wrap``.

Models of Lightning 1.x call ``wrap`` and ``auto_wrap`` in ``configure_sharded_model``. They return the module itself,
marked as a unit that is gathered and reduced at once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from shardwise.compat.arguments import picked
from shardwise.core.base.validate import MOST_BYTES, MOST_NUMEL, boolean, integer
from shardwise.core.base.warnings import warn_user
from shardwise.core.deferred import deferred_init
from shardwise.plan import (
    ByModule,
    ByNumel,
    ByTensor,
    CommPlan,
    GradPlan,
    MeshPlan,
    Packing,
    Plan,
    PrecisionPlan,
    ShardPlan,
    TierPlan,
)
from shardwise.plan.scaler_arguments import TORCH_SCALER
from shardwise.strategies.fabric import FabricStrategy
from shardwise.strategies.precision import NumberFormat
from shardwise.strategies.trainer import ShardedStrategy, StartMethod, passed_on

_MARK = "_shardwise_unit"
LEAVES: tuple[type[nn.Module], ...] = (nn.MultiheadAttention,)
CONTAINERS: tuple[type[nn.Module], ...] = (nn.ModuleList, nn.ModuleDict)


# The policy of the innermost enable_wrap in a tuple; an empty tuple outside.
_ENABLED: ContextVar[tuple[Callable[..., bool] | None, ...]] = ContextVar("enabled", default=())


@contextmanager
def enable_wrap(auto_wrap_policy: Callable[..., bool] | None = None, **wrapper_kwargs: Any) -> Iterator[None]:
    """Make :func:`wrap` and :func:`auto_wrap` mark modules inside. A strategy uses it around the model's construction.

    Args:
        auto_wrap_policy: default policy of :func:`auto_wrap`.
        wrapper_kwargs: arguments of FairScale (``wrapper_cls`` and its arguments). They have no effect, because the
            strategy defines how a unit is sharded; all but ``wrapper_cls`` cause a warning.

    Examples:
        >>> from shardwise.lightning import enable_wrap, wrap
        >>> with enable_wrap():
        ...     block = wrap(torch.nn.Linear(8, 4))
    """
    _warn_of(wrapper_kwargs, "enable_wrap")
    token = _ENABLED.set((auto_wrap_policy,))
    try:
        yield
    finally:
        _ENABLED.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Return ``module``, marked to be gathered and reduced at once; outside :func:`enable_wrap` it is not marked.

    Args:
        module: any module.
        wrap_overrides: arguments of FairScale, without effect as for :func:`enable_wrap`.
    """
    _warn_of(wrap_overrides, "wrap")
    if _ENABLED.get():
        module.__dict__[_MARK] = True
    return module


def auto_wrap(module: nn.Module, auto_wrap_policy: Callable[..., bool] | None = None, **kwargs: Any) -> nn.Module:
    """Return ``module`` after marking the modules in it (and itself) that the policy chooses.

    Args:
        module: any module.
        auto_wrap_policy: ``f(module, recurse, unwrapped_params, ...) -> bool``; by default that of the context.
        kwargs: see :func:`wrap`.

    Examples:
        >>> from functools import partial
        >>> from shardwise.lightning import auto_wrap, default_auto_wrap_policy, enable_wrap
        >>> with enable_wrap(partial(default_auto_wrap_policy, min_num_params=1000)):
        ...     model = auto_wrap(torch.nn.Sequential(torch.nn.Linear(64, 64)))
    """
    _warn_of(kwargs, "auto_wrap")
    for policy in _ENABLED.get():
        _mark_units(module, auto_wrap_policy or policy or default_auto_wrap_policy, True)
    return module


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool = False,
    min_num_params: int = 100_000_000,
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """Return True for units of at least ``min_num_params`` elements.

    Args:
        module: the module.
        recurse: return whether to visit the children, instead of whether the module is a unit.
        unwrapped_params: number of its elements that are not in a unit yet.
        module_is_root: whether ``auto_wrap`` was called with this module.
        min_num_params: smallest unit, in elements.
        force_leaf_modules: classes whose children are not visited; by default MultiheadAttention.
        exclude_wrap_modules: classes that are not units; by default ModuleList and ModuleDict.
        skip_params_check_for_root: the root is a unit of any size.
    """
    leaves = tuple(force_leaf_modules) if force_leaf_modules is not None else LEAVES
    excluded = tuple(exclude_wrap_modules) if exclude_wrap_modules is not None else CONTAINERS
    large = unwrapped_params >= min_num_params or (module_is_root and skip_params_check_for_root)
    return large and not isinstance(module, leaves if recurse else excluded)


def _mark_units(module: nn.Module, policy: Callable[..., bool], root: bool) -> int:
    """Mark the modules in ``module`` that the policy makes units; return the number of elements that are in units."""
    takes_root = "module_is_root" in inspect.signature(policy).parameters
    ask = functools.partial(policy, **({"module_is_root": root} if takes_root else {}))
    numel = sum(parameter.numel() for parameter in module.parameters())
    if not ask(module=module, recurse=True, unwrapped_params=numel):
        return 0
    wrapped = sum(_mark_units(child, policy, False) for child in module.children())
    if ask(module=module, recurse=False, unwrapped_params=numel - wrapped):
        module.__dict__[_MARK] = True
        return numel
    return wrapped


def unit_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the marked modules of ``model`` with parameters, in module order."""
    return tuple(
        name
        for name, module in model.named_modules()
        if name and module.__dict__.get(_MARK) and next(module.parameters(), None) is not None
    )


def _warn_of(arguments: dict[str, Any], what: str) -> None:
    ignored = sorted(set(arguments) - {"wrapper_cls"})
    if ignored:
        warn_user(
            f"{what}({', '.join(ignored)}): how units are sharded is the strategy's choice; give these to "
            "DDPFullyShardedStrategy"
        )


# ---- ``DDPFullyShardedStrategy``: FairScale's published arguments as a plan.


MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class FullyShardedArguments:
    """The published arguments that define sharding, as data; see :class:`FullyShardedStrategy`."""

    cpu_offload: bool = False
    flatten_parameters: bool = True
    reshard_after_forward: bool = True
    move_grads_to_cpu: bool | None = None
    fp32_reduce_scatter: bool | None = None
    compute_dtype: torch.dtype | None = None
    bucket_cap_mb: int = 25
    min_num_params: int = 100_000_000
    state_dict_to_cpu: bool = True

    def __post_init__(self) -> None:
        dtype = self.compute_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"compute_dtype={dtype!r}: give a floating-point torch.dtype, or None")
        integer("min_num_params", self.min_num_params, 0, MOST_NUMEL, "a number of elements", floats=True)
        most = MOST_BYTES // MIB
        integer("bucket_cap_mb", self.bucket_cap_mb, -most, most, "a size in MiB", floats=True)
        for name in ("cpu_offload", "flatten_parameters", "reshard_after_forward", "state_dict_to_cpu"):
            boolean(name, getattr(self, name))
        for name in ("move_grads_to_cpu", "fp32_reduce_scatter"):
            if getattr(self, name) is not None:
                boolean(name, getattr(self, name))


def to_plan(arguments: FullyShardedArguments, number_format: NumberFormat, units: tuple[str, ...]) -> Plan:
    """Return the plan of the arguments.

    Args:
        arguments: the published ones.
        number_format: the Trainer's precision.
        units: names of the modules that :func:`~shardwise.strategies.fully_sharded.wrap` marked.

    Raises:
        ValueError: ``fp32_reduce_scatter`` without mixed precision.
    """
    if arguments.fp32_reduce_scatter and not number_format.masters:
        raise ValueError(
            f"fp32_reduce_scatter={arguments.fp32_reduce_scatter} requires mixed precision, and precision is "
            f"{number_format.name!r}; leave it out, or give precision='bf16-mixed' or '16-mixed'"
        )
    dtype = arguments.compute_dtype or number_format.dtype
    own_masters = arguments.compute_dtype is not None and number_format.name == "32-true"
    host = arguments.cpu_offload
    grads_on_host = host if arguments.move_grads_to_cpu is None else arguments.move_grads_to_cpu
    return Plan(
        mesh=MeshPlan(dp_shard=-1, dp_replicate=1),
        shard=ShardPlan(
            packing=_packing(arguments, dtype or torch.float32, units),
            gathered_fraction=0.0 if arguments.reshard_after_forward else 1.0,
            prefetch=1 if arguments.reshard_after_forward else 0,
            reduce="every",
        ),
        precision=PrecisionPlan(
            param_dtype=dtype,
            buffer_dtype=dtype if dtype is torch.float64 else None,
            master_weights=number_format.masters or own_masters,
            reduce_dtype=torch.float32 if arguments.fp32_reduce_scatter else None,
            cast_inputs=dtype is not None,
            scaler=TORCH_SCALER if number_format.scaled and dtype is torch.float16 else None,
        ),
        grad=GradPlan(),
        comm=CommPlan(),
        tiers=TierPlan(
            param_host_fraction=1.0 if host else 0.0,
            state_host_fraction=1.0 if grads_on_host else 0.0,
            pin_memory=host or grads_on_host,
        ),
    )


def _packing(arguments: FullyShardedArguments, dtype: torch.dtype, units: tuple[str, ...]) -> Packing:
    if not arguments.flatten_parameters:
        return ByTensor(persist_numel=0)
    bucket = int(arguments.bucket_cap_mb) * MIB // dtype.itemsize
    if units:
        return ByModule(unit_classes=(), unit_names=units, rest_numel=bucket if bucket > 0 else None)
    return ByNumel(chunk_numel=bucket, min_chunks=8) if bucket > 0 else ByModule(unit_classes=())


class FullyShardedStrategy(ShardedStrategy):
    """Parameters, gradients and optimizer state are sharded over all ranks; running modules are gathered.

    Args:
        accelerator: an ``Accelerator`` of Lightning; ``None``: that of the Trainer.
        cpu_offload: keep parameter shards (and by default everything else) in CPU memory, in any precision.
        flatten_parameters: gather several parameters as one flat array; ``False``: gather each separately.
        reshard_after_forward: free gathered parameters after their forward pass; ``False``: keep them.
        move_grads_to_cpu: keep reduced gradients, masters and optimizer state in CPU memory and step there; ``None``:
            as ``cpu_offload``.
        fp32_reduce_scatter: reduce gradients in fp32, with mixed precision.
        compute_dtype: dtype of gathered parameters; ``None``: the dtype of ``precision``.
        bucket_cap_mb: size in MiB of gathers and reductions of parameters outside wrapped modules; <= 0: by module.
        min_num_params: smallest unit of ``auto_wrap``, in elements.
        state_dict_to_cpu: :meth:`lightning_module_state_dict` returns tensors on the host; ``False``: on the device.
        parallel_devices: devices of this host's ranks; ``None``: those of ``Trainer(devices=...)``.
        cluster_environment: a ``ClusterEnvironment`` of Lightning, which has the rank of this process; ``None``: the
            Trainer detects it.
        checkpoint_io: writes each checkpoint as one file; ``None``: a directory into which each rank writes its shards.
        precision_plugin: such as ``ShardedPrecision``; ``None``: made from ``Trainer(precision=...)``.
        process_group_backend: such as ``"nccl"`` or ``"gloo"``; ``None``: by the device.
        timeout: timeout of the process group.
        start_method: how this host's other processes start: ``"popen"`` as commands, others by ``multiprocessing``.

    Raises:
        ValueError: a value is out of range.

    Examples:
        >>> import lightning.pytorch as pl
        >>> from shardwise.lightning import DDPFullyShardedStrategy
        >>> trainer = pl.Trainer(strategy=DDPFullyShardedStrategy(cpu_offload=True), devices=2, max_steps=2)
        >>> trainer.fit(module, loader)
    """

    # fmt: off
    def __init__(
        self, accelerator: Any = None, cpu_offload: bool = False, flatten_parameters: bool = True,
        reshard_after_forward: bool = True, move_grads_to_cpu: bool | None = None,
        fp32_reduce_scatter: bool | None = None, compute_dtype: torch.dtype | None = None, bucket_cap_mb: int = 25,
        min_num_params: int = 100_000_000, state_dict_to_cpu: bool = True,
        parallel_devices: list[torch.device] | None = None, cluster_environment: Any = None,
        checkpoint_io: Any = None, precision_plugin: Any = None, process_group_backend: str | None = None, *,
        timeout: timedelta | None = None, start_method: StartMethod = "popen",
    ) -> None:
        # fmt: on
        values = dict(locals())
        self.arguments = picked(FullyShardedArguments, values)
        super().__init__(**passed_on(values))

    def _plan(self, module: nn.Module) -> Plan:
        return to_plan(self.arguments, self.format, unit_names(module))

    def _check(self, trainer: Any) -> None:
        if self.arguments.min_num_params != 100_000_000 and not unit_names(self.lightning_module):
            warn_user(
                f"min_num_params={self.arguments.min_num_params} is for auto_wrap() in configure_model or "
                "configure_sharded_model, and no module of the model was wrapped"
            )

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Build models without memory inside, where :func:`auto_wrap` marks units of ``min_num_params`` elements."""
        policy = functools.partial(default_auto_wrap_policy, min_num_params=self.arguments.min_num_params)
        with deferred_init(), enable_wrap(auto_wrap_policy=policy):
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full state on every rank, in fp32 if there are masters; see ``state_dict_to_cpu``. Collective."""
        state = super().lightning_module_state_dict()
        if self.arguments.state_dict_to_cpu or self.root_device.type == "cpu":
            return state
        return {
            n: v.to(self.root_device) if isinstance(v, torch.Tensor) and not v.is_meta else v for n, v in state.items()
        }


class FabricFullySharded(FabricStrategy):
    """Parameters, gradients and optimizer state are sharded over all ranks; running modules are gathered.

    Args:
        accelerator: an ``Accelerator`` of Lightning; ``None``: that of the Trainer.
        cpu_offload: keep parameter shards (and by default everything else) in CPU memory, in any precision.
        flatten_parameters: gather several parameters as one flat array; ``False``: gather each separately.
        reshard_after_forward: free gathered parameters after their forward pass; ``False``: keep them.
        move_grads_to_cpu: keep reduced gradients, masters and optimizer state in CPU memory and step there; ``None``:
            as ``cpu_offload``.
        fp32_reduce_scatter: reduce gradients in fp32, with mixed precision.
        compute_dtype: dtype of gathered parameters; ``None``: the dtype of ``precision``.
        bucket_cap_mb: size in MiB of gathers and reductions of parameters outside wrapped modules; <= 0: by module.
        min_num_params: smallest unit of ``auto_wrap`` inside ``fabric.init_module()``, in elements.
        state_dict_to_cpu: no effect: ``model.state_dict()`` always returns tensors on the host.
        parallel_devices: devices of this host's ranks; ``None``: those of ``Trainer(devices=...)``.
        cluster_environment: a ``ClusterEnvironment`` of Lightning, which has the rank of this process; ``None``: the
            Trainer detects it.
        checkpoint_io: writes each checkpoint as one file; ``None``: a directory into which each rank writes its shards.
        precision: a precision plugin.
        process_group_backend: such as ``"nccl"`` or ``"gloo"``; ``None``: by the device.
        timeout: timeout of the process group.
        start_method: how this host's other processes start: ``"popen"`` as commands, others by ``multiprocessing``.

    Raises:
        ValueError: a value is out of range.
    """

    # fmt: off
    def __init__(
        self, accelerator: Any = None, cpu_offload: bool = False, flatten_parameters: bool = True,
        reshard_after_forward: bool = True, move_grads_to_cpu: bool | None = None,
        fp32_reduce_scatter: bool | None = None, compute_dtype: torch.dtype | None = None, bucket_cap_mb: int = 25,
        min_num_params: int = 100_000_000, state_dict_to_cpu: bool = True,
        parallel_devices: list[torch.device] | None = None, cluster_environment: Any = None,
        checkpoint_io: Any = None, precision: Any = None, process_group_backend: str | None = None, *,
        timeout: timedelta | None = None, start_method: StartMethod = "popen",
    ) -> None:
        # fmt: on
        values = dict(locals())
        self.arguments = picked(FullyShardedArguments, values)
        super().__init__(**passed_on(values))

    _plan, _building = FullyShardedStrategy._plan, FullyShardedStrategy._building
