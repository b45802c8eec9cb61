"""``ColossalAIStrategy``'s own arguments as data, and the plan that they mean: Gemini under its names of 2022."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.booster.plugin import gemini
from shardwise.compat.published import documented, given_in_vain, listed, names_of, takes
from shardwise.core.base.checked import MOST_NUMEL, share, switch, whole
from shardwise.core.base.remarks import warn_user
from shardwise.plan import MOST_SEARCHED, ByTensor, Plan
from shardwise.plan.loss_scale import ScalerArguments, scaler_plan
from shardwise.strategies.base import LightningArguments, ShardedStrategy
from shardwise.strategies.fabric import FabricArguments, FabricStrategy
from shardwise.strategies.precision import NumberFormat

__all__ = ["ColossalAI", "ColossalAIArguments", "FabricColossalAI", "plan_in", "report", "to_plan", "without_effect"]


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
    """What is published before the loss scale's: the fields of the last base come first."""

    use_chunk: bool = True
    chunk_size: int | None = None
    enable_distributed_storage: bool = True
    placement_policy: str = "auto"
    force_outputs_fp32: bool = False
    gpu_margin_mem_ratio: float = 0.0
    chunk_search_range: int = 64 * MIB
    chunk_search_n_grids: int = 4096
    min_chunk_size: int = 32 * MIB


@documented()
@dataclass(frozen=True)
class ColossalAIArguments(ScalerArguments, _First):
    """The published arguments of Lightning 1.9's ``ColossalAIStrategy``. Sizes are in elements.

    Attributes:
        use_chunk: parameters share chunks; ``False``: each has one of its own.
        chunk_size: elements of a chunk, larger parameters have their own; ``None``: searched. For ``use_chunk`` only.
        enable_distributed_storage: each rank keeps ``1/N`` of the model; ``False``: each keeps all of it, gathered
            where it is at home on the device, with its masters and optimizer state.
        placement_policy: ``"cpu"``: parameters, masters, optimizer state and reduced gradients are on the host between
            uses. ``"cuda"``: all on the device. ``"auto"``: on the host, and as much on the device as a traced first
            step shows that its memory allows at each moment.
        force_outputs_fp32: cast floating outputs of a step to fp32.
        gpu_margin_mem_ratio: for ``"auto"`` only: share of what remains of the device's memory that optimizer state
            moves into after the first step.
        chunk_search_range: sizes from ``max(min_chunk_size, largest parameter)`` on are searched over this range.
        chunk_search_n_grids: how many steps the search takes through that range.
        min_chunk_size: smallest chunk. In elements, which is what ColossalAI compared it with; Lightning's text said
            bytes.

    Raises:
        ValueError: a value out of range.
    """

    def __post_init__(self) -> None:
        if self.placement_policy not in PLACEMENTS:
            raise ValueError(
                f"placement_policy={self.placement_policy!r}: give one of {', '.join(map(repr, PLACEMENTS))}"
            )
        for name in ("use_chunk", "enable_distributed_storage", "force_outputs_fp32"):
            switch(name, getattr(self, name))
        if self.chunk_size is not None:
            what = "a size in elements (None searches for one)"
            whole("chunk_size", self.chunk_size, 1, MOST_NUMEL, what, floats=True)
        for name, least, most in (
            ("chunk_search_range", 0, MOST_NUMEL),
            ("chunk_search_n_grids", 1, MOST_SEARCHED - 1),
            ("min_chunk_size", 0, MOST_NUMEL),
        ):
            whole(name, getattr(self, name), least, most, "a number", floats=True)
        share("gpu_margin_mem_ratio", self.gpu_margin_mem_ratio)
        scaler_plan(self)


def without_effect(arguments: ColossalAIArguments, precision: str = "fp16") -> dict[str, list[str]]:
    """Arguments that differ from their defaults and mean nothing beside the others, by reason.

    Args:
        arguments: checked by their constructor.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
    """
    a = arguments
    found: dict[str, tuple[str, ...]] = {}
    if not a.use_chunk:
        found["use_chunk=False gives each parameter a chunk of its own"] = ("chunk_size", *SEARCH)
    elif a.chunk_size is not None:
        found["chunk_size is given, so none is searched"] = SEARCH
    if a.placement_policy != "auto":
        found["for placement_policy='auto' only"] = ("gpu_margin_mem_ratio",)
    if precision != "fp16":
        found[f"the loss scale is for fp16, and the precision is {precision}"] = SCALER
    return given_in_vain(a, found)


def to_plan(arguments: ColossalAIArguments, precision: str, world_size: int, master_weights: bool = True) -> Plan:
    """The plan that the arguments mean, by way of Gemini's own translation.

    Args:
        arguments: checked by their constructor.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
        world_size: all ranks.
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
    translated = gemini.GeminiArguments(
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
    """The plan of the arguments in the number format that Lightning's precision means."""
    name = NAMES.get(chosen.dtype, "fp32")
    plan = to_plan(arguments, name, world_size, master_weights=chosen.masters)
    if chosen.dtype is torch.float64:
        plan = plan.but(param_dtype=chosen.dtype, buffer_dtype=chosen.dtype, cast_inputs=True)
    return plan if chosen.scaled else plan.but(scaler=None)


def report(unused: dict[str, list[str]], arguments: ColossalAIArguments) -> None:
    """Warn of arguments that mean nothing beside the others, by reason."""
    for reason, names in unused.items():
        warn_user(f"{listed(arguments, names)} without effect: {reason}")


@documented(ColossalAIArguments, LightningArguments)
@takes(
    *names_of(ColossalAIArguments),
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    by_name=("process_group_backend", "timeout", "start_method"),
)
class ColossalAI(ShardedStrategy):
    """Chunk-based ZeRO-3 with parameters and optimizer state on the host as memory demands.

    The arguments are those of Lightning 1.9, in its order; :class:`ColossalAIArguments` says what each means here. Its
    limits are gone: any accelerator and precision, any number of optimizers of any element-wise class, gradient
    accumulation, clipping by norm and by value, models built anywhere, evaluation before training.

    Args:

    Raises:
        ValueError: a value out of range.
    """

    def __init__(self, arguments: ColossalAIArguments, lightning: LightningArguments) -> None:
        self.arguments = arguments
        self._reported_precision = False
        report(without_effect(arguments), arguments)
        super().__init__(**vars(lightning))

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

    # ---- facts

    @property
    def root_device(self) -> torch.device:
        """Where this rank computes; the CPU before the Trainer has given devices."""
        if self.parallel_devices is None:
            return torch.device("cpu")
        device: torch.device = super().root_device
        return device

    # ---- between ranks

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks, one after the other along dimension 0 (other strategies stack them).

        Args:
            tensor: ``[n, ...]``, of the same shape on every rank; a scalar counts as ``[1]``.
            group: of torch.distributed; ``None``: all ranks.
            sync_grads: let gradients flow back to the ranks that the parts came from.

        Returns:
            ``[ranks * n, ...]``.
        """
        part = tensor.reshape(1) if tensor.dim() == 0 else tensor
        gathered: torch.Tensor = super().all_gather(part, group=group, sync_grads=sync_grads)
        return gathered.flatten(0, 1) if gathered.dim() > part.dim() else gathered

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "sum") -> Any:
        """The sum over ranks (or their ``"mean"`` and so on), on every rank; ``tensor`` is left as it is.

        What is no tensor is returned unchanged.
        """
        given = tensor.clone() if isinstance(tensor, torch.Tensor) else tensor
        return super().reduce(given, group=group, reduce_op=reduce_op)

    # ---- passes and steps

    def optimizer_step(
        self, optimizer: Any, opt_idx: Any = None, closure: Any = None, model: Any = None, **kwargs: Any
    ) -> Any:
        """One step. Called as in Lightning 1.x, ``(optimizer, opt_idx, closure, model)``, or without the second."""
        if callable(opt_idx):
            closure, model = opt_idx, closure if model is None else model
        if not callable(closure):
            raise TypeError(f"optimizer_step(closure={closure!r:.80}): give a function that computes the loss")
        step: Callable[..., Any] = super().optimizer_step
        return step(optimizer, closure, model, **kwargs)

    # ---- state

    def lightning_module_state_dict(self, rank_zero_only: bool = False) -> dict[str, Any]:
        """The full state on the host, fp32 where there are masters. Collective.

        Args:
            rank_zero_only: the other ranks get the names with empty tensors, and never hold the whole model.
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


@documented(ColossalAIArguments, FabricArguments)
@takes(
    *names_of(ColossalAIArguments),
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision",
    by_name=("process_group_backend", "timeout", "start_method"),
)
class FabricColossalAI(FabricStrategy):
    """Chunk-based ZeRO-3 with parameters and optimizer state on the host as memory demands.

    Args:

    Raises:
        ValueError: a value out of range.
    """

    def __init__(self, arguments: ColossalAIArguments, lightning: FabricArguments) -> None:
        self.arguments = arguments
        report(without_effect(arguments), arguments)
        super().__init__(**vars(lightning))

    def _plan(self, module: nn.Module) -> Plan:
        return plan_in(self.arguments, self.format, self.world_size)
