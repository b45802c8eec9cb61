"""``ColossalAIStrategy``: Gemini's chunks under Lightning's Trainer and Fabric, on CPUs and GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
from torch import nn

from shardwise.booster.plugin import gemini
from shardwise.compat.arguments import listed, names_of, picked, unused_arguments
from shardwise.core.base.validate import MOST_NUMEL, boolean, fraction, integer
from shardwise.core.base.warnings import warn_user
from shardwise.plan import MOST_SEARCHED, ByTensor, Plan
from shardwise.plan.scaler_arguments import ScalerArguments, scaler_plan
from shardwise.strategies.fabric import FabricStrategy
from shardwise.strategies.precision import NumberFormat
from shardwise.strategies.trainer import ShardedStrategy, StartMethod, passed_on

MIB = 2**20
PLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "auto": {"placement_policy": "auto"},
    "cpu": {"placement_policy": "static", "offload_optim_frac": 1.0, "offload_param_frac": 1.0},
    "cuda": {"placement_policy": "static"},
}
SEARCH = ("chunk_search_range", "chunk_search_n_grids", "min_chunk_size")
SCALER = names_of(ScalerArguments)


@dataclass(frozen=True)
class _First:
    """Base class with the fields before those of the loss scale, because fields of the last base come first."""

    use_chunk: bool = True
    chunk_size: int | None = None
    enable_distributed_storage: bool = True
    placement_policy: str = "auto"
    force_outputs_fp32: bool = False
    gpu_margin_mem_ratio: float = 0.0
    chunk_search_range: int = 64 * MIB
    chunk_search_n_grids: int = 4096
    min_chunk_size: int = 32 * MIB


@dataclass(frozen=True)
class ColossalAIArguments(ScalerArguments, _First):
    """The arguments of the strategy that describe chunks and the loss scale; see :class:`ColossalAI`.

    Raises:
        ValueError: a value is out of range.
    """

    def __post_init__(self) -> None:
        if self.placement_policy not in PLACEMENTS:
            raise ValueError(
                f"placement_policy={self.placement_policy!r}: give one of {', '.join(map(repr, PLACEMENTS))}"
            )
        for name in ("use_chunk", "enable_distributed_storage", "force_outputs_fp32"):
            boolean(name, getattr(self, name))
        if self.chunk_size is not None:
            what = "a size in elements (None searches for one)"
            integer("chunk_size", self.chunk_size, 1, MOST_NUMEL, what, floats=True)
        for name, least, most in (
            ("chunk_search_range", 0, MOST_NUMEL),
            ("chunk_search_n_grids", 1, MOST_SEARCHED - 1),
            ("min_chunk_size", 0, MOST_NUMEL),
        ):
            integer(name, getattr(self, name), least, most, "a number", floats=True)
        fraction("gpu_margin_mem_ratio", self.gpu_margin_mem_ratio)
        scaler_plan(self)


def without_effect(arguments: ColossalAIArguments, precision: str = "fp16") -> dict[str, list[str]]:
    """Return arguments that differ from their defaults and have no effect with the others, by reason.

    Args:
        arguments: checked by their constructor.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
    """
    a = arguments
    unused: dict[str, tuple[str, ...]] = {}
    if not a.use_chunk:
        unused["use_chunk=False gives each parameter a chunk of its own"] = ("chunk_size", *SEARCH)
    elif a.chunk_size is not None:
        unused["chunk_size is given, so none is searched"] = SEARCH
    if a.placement_policy != "auto":
        unused["for placement_policy='auto' only"] = ("gpu_margin_mem_ratio",)
    if precision != "fp16":
        unused[f"the loss scale is for fp16, and the precision is {precision}"] = SCALER
    return unused_arguments(a, unused)


def to_plan(arguments: ColossalAIArguments, precision: str, world_size: int, master_weights: bool = True) -> Plan:
    """Return the plan of the arguments, translated by Gemini's own arguments.

    Args:
        arguments: checked by their constructor.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
        world_size: number of all ranks.
        master_weights: keep fp32 copies of 16-bit parameters.

    Raises:
        ValueError: an unknown precision.
    """
    a = arguments
    replicas = 1 if a.enable_distributed_storage else world_size
    placement = dict(PLACEMENTS[a.placement_policy])
    if a.placement_policy == "auto":
        placement["gpu_margin_mem_ratio"] = a.gpu_margin_mem_ratio
    chunks = None
    if a.use_chunk and a.chunk_size is not None:
        chunks = {world_size // replicas: {"chunk_size": int(a.chunk_size)}}
    translated = gemini.GeminiPlugin(
        chunk_config_dict=chunks,
        **placement,
        precision=precision,
        master_weights=master_weights,
        force_outputs_fp32=a.force_outputs_fp32,
        search_range_m=a.chunk_search_range / MIB,  # type: ignore[arg-type]  # a size of less than 2**20 is one too
        hidden_dim=max(1, math.ceil(a.chunk_search_range / a.chunk_search_n_grids)),
        min_chunk_size_m=max(1, a.min_chunk_size) / MIB,
        extra_dp_size=replicas,
        **{name: getattr(a, name) for name in SCALER},
    )
    plan = gemini.to_plan(translated, world_size)
    return plan if a.use_chunk else plan.but(packing=ByTensor(persist_numel=0))


# ---- ``ColossalAIStrategy``: Gemini's chunks under Lightning's Trainer, on CPUs and GPUs.


NAMES: dict[torch.dtype | None, str] = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def plan_in(arguments: ColossalAIArguments, chosen: NumberFormat, world_size: int) -> Plan:
    """Return the plan of the arguments in the number format of Lightning's precision."""
    name = NAMES.get(chosen.dtype, "fp32")
    plan = to_plan(arguments, name, world_size, master_weights=chosen.masters)
    if chosen.dtype is torch.float64:
        plan = plan.but(param_dtype=chosen.dtype, buffer_dtype=chosen.dtype, cast_inputs=True)
    return plan if chosen.scaled else plan.but(scaler=None)


def report(unused: dict[str, list[str]], arguments: ColossalAIArguments) -> None:
    """Warn about arguments without effect, by reason."""
    for reason, names in unused.items():
        warn_user(f"{listed(arguments, names)} without effect: {reason}")


class ColossalAI(ShardedStrategy):
    """Chunk-based ZeRO-3 with parameters and optimizer state on the host as memory demands.

    The arguments are those of Lightning 1.9, in its order. Any accelerator, any precision, any number of element-wise
    optimizers, gradient accumulation, clipping by norm and by value, and evaluation before training work.

    Args:
        use_chunk: parameters share chunks; ``False``: each parameter has its own chunk.
        chunk_size: elements of a chunk; ``None``: search for a size. For ``use_chunk`` only.
        enable_distributed_storage: each rank keeps ``1/N`` of the model; ``False``: each rank keeps the full model with
            its masters and optimizer state.
        placement_policy: ``"cpu"``: parameters, masters, optimizer state and reduced gradients stay in CPU memory
            between uses. ``"cuda"``: everything stays on the device. ``"auto"``: as much stays on the device as its
            memory allows, according to a trace of the first step.
        force_outputs_fp32: cast floating outputs of a step to fp32.
        gpu_margin_mem_ratio: with ``"auto"``, the fraction of the free device memory that optimizer state moves into
            after the first step.
        chunk_search_range: range of the search for a size, above ``max(min_chunk_size, largest parameter)``.
        chunk_search_n_grids: number of steps through that range.
        min_chunk_size: smallest chunk, in elements (Lightning's documentation said bytes).
        initial_scale: first loss scale (fp16 only, as the next six).
        min_scale: smallest loss scale.
        growth_factor: factor of the scale after ``growth_interval`` good steps.
        backoff_factor: factor of the scale on overflow, after ``hysteresis`` overflows.
        growth_interval: number of good steps.
        hysteresis: number of overflows before the scale falls.
        max_scale: largest loss scale.
        accelerator: an ``Accelerator`` of Lightning; ``None``: that of the Trainer.
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
        >>> from shardwise.lightning import ColossalAIStrategy
        >>> trainer = pl.Trainer(strategy=ColossalAIStrategy(placement_policy="cpu"), devices=2, max_steps=2)
        >>> trainer.fit(module, loader)
    """

    # fmt: off
    def __init__(
        self, use_chunk: bool = True, chunk_size: int | None = None, enable_distributed_storage: bool = True,
        placement_policy: str = "auto", force_outputs_fp32: bool = False, gpu_margin_mem_ratio: float = 0.0,
        chunk_search_range: int = 64 * MIB, chunk_search_n_grids: int = 4096, min_chunk_size: int = 32 * MIB,
        initial_scale: float = 2**16, min_scale: float = 1, growth_factor: float = 2, backoff_factor: float = 0.5,
        growth_interval: int = 1000, hysteresis: int = 2, max_scale: float = 2**32, accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None, cluster_environment: Any = None,
        checkpoint_io: Any = None, precision_plugin: Any = None, *, process_group_backend: str | None = None,
        timeout: timedelta | None = None, start_method: StartMethod = "popen",
    ) -> None:
        # fmt: on
        values = dict(locals())
        arguments = self.arguments = picked(ColossalAIArguments, values)
        self._reported_precision = False
        report(without_effect(arguments), arguments)
        super().__init__(**passed_on(values))

    # ---- the plan

    def _plan(self, module: Any) -> Plan:
        return plan_in(self.arguments, self.format, self.world_size)

    def _check(self, trainer: Any) -> None:
        if self._reported_precision or trainer.state.fn.value != "fit":
            return
        self._reported_precision = True
        scaled = "fp16" if self.format.scaled else self.format.name
        known = without_effect(self.arguments)
        unused = {why: names for why, names in without_effect(self.arguments, scaled).items() if why not in known}
        if self.is_global_zero:
            report(unused, self.arguments)

    # ---- properties

    @property
    def root_device(self) -> torch.device:
        """Return the device of this rank; the CPU before the Trainer has set devices."""
        return torch.device("cpu") if self.parallel_devices is None else cast(torch.device, super().root_device)

    # ---- collectives

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Concatenate the tensors of all ranks along dimension 0 (other strategies stack them).

        Args:
            tensor: ``[n, ...]``, of the same shape on every rank; a scalar counts as ``[1]``.
            group: a group of torch.distributed; ``None``: all ranks.
            sync_grads: send gradients back to the ranks of the parts.

        Returns:
            ``[ranks * n, ...]``.
        """
        part = tensor.reshape(1) if tensor.dim() == 0 else tensor
        gathered: torch.Tensor = super().all_gather(part, group=group, sync_grads=sync_grads)
        return gathered.flatten(0, 1) if gathered.dim() > part.dim() else gathered

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "sum") -> Any:
        """Return the sum, ``"mean"`` or another reduction over ranks on every rank. ``tensor`` is unchanged.

        A value that is not a tensor is returned unchanged.
        """
        value = tensor.clone() if isinstance(tensor, torch.Tensor) else tensor
        return super().reduce(value, group=group, reduce_op=reduce_op)

    # ---- passes and steps

    def optimizer_step(
        self, optimizer: Any, opt_idx: Any = None, closure: Any = None, model: Any = None, **kwargs: Any
    ) -> Any:
        """Run one optimizer step.

        The arguments are those of Lightning 1.x, ``(optimizer, opt_idx, closure, model)``, or the same without the
        second one.
        """
        if callable(opt_idx):
            closure, model = opt_idx, closure if model is None else model
        if not callable(closure):
            raise TypeError(f"optimizer_step(closure={closure!r:.80}): give a function that computes the loss")
        step: Callable[..., Any] = super().optimizer_step
        return step(optimizer, closure, model, **kwargs)

    # ---- state

    def lightning_module_state_dict(self, rank_zero_only: bool = False) -> dict[str, Any]:
        """Return the full state on the host, in fp32 if there are masters. Collective.

        Args:
            rank_zero_only: other ranks get the names with empty tensors, and never hold the full model.
        """
        if not rank_zero_only:
            return super().lightning_module_state_dict()
        keep = self.is_global_zero
        state: dict[str, Any] = {}
        for name, value in self.session.module.full_state():
            if isinstance(value, torch.Tensor):
                value = value.cpu() if keep else value.new_empty(0, device="cpu")
            state[name] = value
        return {name: state[name] for name in self.session.module.state_layout() if name in state}


class FabricColossalAI(FabricStrategy):
    """Chunk-based ZeRO-3 with parameters and optimizer state on the host as memory demands.

    Args:
        use_chunk: parameters share chunks; ``False``: each parameter has its own chunk.
        chunk_size: elements of a chunk; ``None``: search for a size. For ``use_chunk`` only.
        enable_distributed_storage: each rank keeps ``1/N`` of the model; ``False``: each rank keeps the full model with
            its masters and optimizer state.
        placement_policy: ``"cpu"``: parameters, masters, optimizer state and reduced gradients stay in CPU memory
            between uses. ``"cuda"``: everything stays on the device. ``"auto"``: as much stays on the device as its
            memory allows, according to a trace of the first step.
        force_outputs_fp32: cast floating outputs of a step to fp32.
        gpu_margin_mem_ratio: with ``"auto"``, the fraction of the free device memory that optimizer state moves into
            after the first step.
        chunk_search_range: range of the search for a size, above ``max(min_chunk_size, largest parameter)``.
        chunk_search_n_grids: number of steps through that range.
        min_chunk_size: smallest chunk, in elements (Lightning's documentation said bytes).
        initial_scale: first loss scale (fp16 only, as the next six).
        min_scale: smallest loss scale.
        growth_factor: factor of the scale after ``growth_interval`` good steps.
        backoff_factor: factor of the scale on overflow, after ``hysteresis`` overflows.
        growth_interval: number of good steps.
        hysteresis: number of overflows before the scale falls.
        max_scale: largest loss scale.
        accelerator: an ``Accelerator`` of Lightning; ``None``: that of the Trainer.
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
        self, use_chunk: bool = True, chunk_size: int | None = None, enable_distributed_storage: bool = True,
        placement_policy: str = "auto", force_outputs_fp32: bool = False, gpu_margin_mem_ratio: float = 0.0,
        chunk_search_range: int = 64 * MIB, chunk_search_n_grids: int = 4096, min_chunk_size: int = 32 * MIB,
        initial_scale: float = 2**16, min_scale: float = 1, growth_factor: float = 2, backoff_factor: float = 0.5,
        growth_interval: int = 1000, hysteresis: int = 2, max_scale: float = 2**32, accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None, cluster_environment: Any = None,
        checkpoint_io: Any = None, precision: Any = None, *, process_group_backend: str | None = None,
        timeout: timedelta | None = None, start_method: StartMethod = "popen",
    ) -> None:
        # fmt: on
        values = dict(locals())
        arguments = self.arguments = picked(ColossalAIArguments, values)
        report(without_effect(arguments), arguments)
        super().__init__(**passed_on(values))

    def _plan(self, module: nn.Module) -> Plan:
        return plan_in(self.arguments, self.format, self.world_size)
