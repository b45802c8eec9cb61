"""``ColossalAIStrategy``'s own arguments as data, and the plan that they mean: Gemini under its names of 2022."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.booster.plugin import gemini
from shardwise.compat.published import documented, given_in_vain, names_of
from shardwise.core.base.checked import MOST_NUMEL, share, switch, whole
from shardwise.plan import MOST_SEARCHED, ByTensor, Plan
from shardwise.plan.loss_scale import ScalerArguments, scaler_plan

__all__ = ["ColossalAIArguments", "to_plan", "without_effect"]

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
