"""Checks of published arguments, and plans of arguments that several plugins share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch

from shardwise.compat.arguments import unused_arguments
from shardwise.core.base.sizes import device_bytes
from shardwise.core.base.validate import MOST_NUMEL, integer, number, refuse, short_repr
from shardwise.core.base.warnings import warn_user
from shardwise.plan import CommPlan, GradPlan, PrecisionPlan, SequencePlan, TierPlan
from shardwise.plan.scaler_arguments import scaler_plan

WORDS = {"bool": "True or False", "int": "a whole number", "float": "a number", "torch.dtype": "a torch.dtype"}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}
MODES = ("split_gather", "ring", "all_to_all", "ring_attn")


def check_types(arguments: Any, fractions: Collection[str] = (), own: Collection[str] = ()) -> None:
    """Check that each argument has the type of its annotation. Equal values are converted, such as 8.0 to 8.

    Args:
        arguments: an instance of a dataclass.
        fractions: names that are annotated as whole numbers, as published, and may be fractions.
        own: names that are checked elsewhere.

    Raises:
        TypeError: an argument of another type.
    """
    hints = get_type_hints(type(arguments))
    for field in fields(arguments):
        hint = float if field.name in fractions else hints[field.name]
        value = getattr(arguments, field.name)
        if field.name in own:
            continue
        if fits(value, hint):
            object.__setattr__(arguments, field.name, _same(value, hint))  # the dataclass is frozen
            continue
        kind, optional, _ = str(field.type).partition(" | None")
        word = "a number" if field.name in fractions else WORDS.get(kind, kind)
        raise TypeError(f"{field.name}={short_repr(value)}: give {word}{', or None' if optional else ''}")


def _same(value: Any, hint: Any) -> Any:
    """Return ``value`` as the int or bool of ``hint`` if it is equal to one: 8 for 8.0 and numpy's 8."""
    if hint is bool:
        return bool(value)
    numbers = isinstance(value, Real) and not isinstance(value, bool)
    return int(value) if numbers and int in (hint, *get_args(hint)) and fits(value, int) else value


def fits(value: object, hint: Any) -> bool:
    """Return True if ``value`` fits the type ``hint``. 1.0 fits an int; 0 and 1 fit a bool. Strings are not checked."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in get_args(hint))
    if hint in (Any, str) or origin is Literal:
        return True
    if hint is bool:
        return isinstance(value, bool | np.bool_) or (isinstance(value, Integral) and value in (0, 1))
    if hint in (int, float):
        number = isinstance(value, Real) and not isinstance(value, bool)
        is_whole_number = isinstance(value, Integral) or (number and float(value).is_integer())  # type: ignore[arg-type]
        return number and (hint is float or is_whole_number)
    if hint is torch.device and isinstance(value, str):
        try:
            torch.device(value)
        except RuntimeError:
            return False
        return True
    return isinstance(value, origin or hint)


def warn_unused(arguments: Any, reasons: Mapping[str, Iterable[str]]) -> None:
    """Warn about changed arguments without effect. ``reasons`` has the names of arguments by reason."""
    for reason, names in unused_arguments(arguments, reasons).items():
        values = ", ".join(f"{name}={getattr(arguments, name)!r:.80}" for name in names)
        warn_user(f"{values} without effect: {reason}")


def check_update(arguments: Any, **sizes: int) -> None:
    """Check the argument ``update``.

    Raises:
        NotImplementedError: updates during backward of a model-parallel model (one of ``sizes`` is above 1).
    """
    parts = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    if parts and arguments.update == "backward":
        refuse("update", arguments.update, f"use update='step' with {', '.join(parts)}")


def precision_plan(
    precision: str,
    arguments: Any,
    *,
    master_weights: bool,
    reduce_dtype: torch.dtype | None = None,
    cast_inputs: bool = True,
    output_dtype: torch.dtype | None = None,
) -> PrecisionPlan:
    """Return number formats for ``"fp16"``, ``"bf16"`` (parameters, buffers and inputs are cast) or ``"fp32"`` (no
    casts).

    Raises:
        ValueError: another name, or a scaler value out of range.
    """
    if precision not in DTYPES:
        raise ValueError(f"precision={precision!r}: give one of {', '.join(map(repr, DTYPES))}")
    dtype = DTYPES[precision]
    return PrecisionPlan(
        param_dtype=dtype,
        buffer_dtype=dtype,
        master_weights=master_weights,
        reduce_dtype=reduce_dtype,
        cast_inputs=cast_inputs and dtype is not None,
        output_dtype=output_dtype,
        scaler=scaler_plan(arguments) if precision == "fp16" else None,
    )


def bucket_numel(name: str, size: float) -> int:
    """Return the elements of a bucket of ``size`` times 2**20 elements.

    Raises:
        ValueError: the argument ``name`` is out of range.
    """
    most = MOST_NUMEL // 2**20
    number(name, size, f"(0, {most}]", f"a size > 0 and at most {most} (times 2**20 elements)")
    return max(1, int(size * 2**20))


def zero_parts(arguments: Any) -> dict[str, Any]:
    """Return the parts of a :class:`~shardwise.plan.Plan` that are the same for the plugins with ZeRO-1 and ZeRO-2.

    Raises:
        ValueError: a value out of range.
    """
    a = arguments
    dtype = a.communication_dtype
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"communication_dtype={dtype}: give a floating-point torch.dtype, or None")
    return {
        "grad": GradPlan(max_norm=a.max_norm, norm_type=a.norm_type, update=a.update),
        "comm": CommPlan(
            overlap=a.overlap_communication,
            gather_on_use=a.overlap_allgather,
            compress="fp8" if a.fp8_communication else None,
        ),
        "tiers": TierPlan(
            state_host_fraction=1.0 if a.cpu_offload else 0.0,
            pin_memory=a.cpu_offload,
            device_capacity_bytes=device_bytes(a.device_memory),
        ),
    }


@dataclass(frozen=True, kw_only=True)
class SequenceArguments:
    """The published arguments of sequence parallelism.

    ``mode=None`` is ``"all_to_all"`` with ``sp_size > 1`` and otherwise ``"split_gather"``.

    Attributes:
        enabled: ``enable_sequence_parallelism``.
        mode: ``sequence_parallelism_mode``.
        overlap: ``enable_sequence_overlap``.
        tp_size, sp_size, inner_ring_size: as published.
        parallel_output: logits stay sharded by sequence if the model's own loss allows it.

    Raises:
        ValueError: the arguments contradict each other.
    """

    enabled: bool
    mode: str | None = None
    overlap: bool = False
    tp_size: int
    sp_size: int | None = None
    inner_ring_size: int | None = None
    parallel_output: bool = True

    def __post_init__(self) -> None:
        if self.mode not in (None, *MODES):
            raise ValueError(f"sequence_parallelism_mode={short_repr(self.mode)}: give None or one of {MODES}")
        for name in ("sp_size", "inner_ring_size"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), 1, what="a number of ranks, or None,")
        if not self.enabled:
            if self.sp_size not in (None, 1) or self.overlap:
                raise ValueError(
                    f"sp_size={self.sp_size}, enable_sequence_overlap={self.overlap} with "
                    "enable_sequence_parallelism=False: leave them None and False, or give True"
                )
            return
        if self.in_layers and self.tp_size == 1:
            instead = "sp_size > 1" if self.mode is None else "sequence_parallelism_mode='all_to_all' and sp_size > 1"
            raise ValueError(
                f"sequence_parallelism_mode={self.mode!r} with tp_size={self.tp_size}, sp_size={self.sp_size}: "
                f"{self.chosen!r} uses the ranks of tp_size; give tp_size > 1, or {instead}"
            )
        if self.chosen == "ring_attn" and self.inner_ring_size is not None and self.sp % self.inner_ring_size:
            raise ValueError(f"inner_ring_size={self.inner_ring_size}: give a number that divides sp_size={self.sp}")

    @property
    def chosen(self) -> str:
        """Return the mode in use."""
        return self.mode or ("all_to_all" if (self.sp_size or 1) > 1 else "split_gather")

    @property
    def in_layers(self) -> bool:
        """Return True if sequences are sharded over the ranks of ``tp_size`` between layers."""
        return self.enabled and self.chosen in ("split_gather", "ring")

    @property
    def sp(self) -> int:
        """Return the number of data-parallel ranks that share sequences."""
        return 1 if not self.enabled or self.in_layers else self.sp_size or 1

    @property
    def between_layers(self) -> Literal["split_gather"] | None:
        """Return the mode for :class:`~shardwise.plan.TensorPlan`."""
        return "split_gather" if self.in_layers else None

    @property
    def plan(self) -> SequencePlan:
        """Return the plan of attention over full sequences."""
        if self.sp == 1:
            return SequencePlan()
        return SequencePlan(
            mode="ring_attn" if self.chosen == "ring_attn" else "all_to_all",
            inner_ring=self.inner_ring_size if self.chosen == "ring_attn" else None,
            parallel_output=self.parallel_output,
        )

    def unused(self) -> dict[str, Any]:
        """Return the arguments without effect, by reason."""
        if not self.enabled:
            return {"for enable_sequence_parallelism=True only": ("sequence_parallelism_mode", "inner_ring_size")}
        if self.in_layers:
            return {
                f"{self.chosen!r} uses the ranks of tp_size": ("sp_size", "inner_ring_size"),
                "gathers of sequences and products do not overlap": ("enable_sequence_overlap",),
            }
        unused: dict[str, Any] = {f"{self.chosen!r} does not overlap communication": ("enable_sequence_overlap",)}
        if self.sp == 1:
            unused["sp_size is 1"] = ("enable_sequence_parallelism", "sequence_parallelism_mode", "inner_ring_size")
        elif self.chosen != "ring_attn":
            unused["for sequence_parallelism_mode='ring_attn' only"] = ("inner_ring_size",)
        return unused
