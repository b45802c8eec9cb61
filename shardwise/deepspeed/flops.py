"""The profiler of a forward pass: operations, time and parameters of each module.

Operations are counted by ``torch.utils.flop_counter``: those of matrix products, convolutions and attention, two for
each multiplication with its addition. What else a model computes (norms, activations) is left out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from shardwise.device import synchronize

__all__ = [
    "FlopsProfiler",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]

UNITS = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
LINE = "-" * 30


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """``2.5e9`` as ``"2.5 G"``; with ``units`` ("G") in these."""
    if units is None:
        units = next((unit for unit, size in UNITS.items() if abs(num) >= size), "" if num == 0 else "u")
    return f"{round(num / UNITS[units], precision):g} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """``"2.5 GMACs"``."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Operations a second: ``"2.5 GFLOPS"``."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """``"2.5 M"``."""
    return number_to_string(params_num, units, precision).strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Of seconds: ``"2.5 ms"``."""
    return f"{number_to_string(duration, units, precision)}s"


@dataclass
class _Found:
    """Of one module and all inside it."""

    params: int
    flops: int = 0
    seconds: float = 0.0

    @property
    def macs(self) -> int:
        return self.flops // 2


class FlopsProfiler:
    """Counts what forward passes between :meth:`start_profile` and :meth:`stop_profile` compute.

    Under an engine parameters count whole, also where this rank has a shard of them, or a part of their layer alone is
    multiplied here: then "of the model" is what all ranks that hold it compute.

    Args:
        model: any module, or that of an engine.
        ds_engine: says how many ranks there are, and how long backward passes and steps take.
        recompute_fwd_factor: how much of a forward pass backward passes compute again: 1.0 under activation
            checkpointing.

    Attributes:
        started: between :meth:`start_profile` and :meth:`end_profile`.
        flops, macs, params: what was printed last.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started = False
        self.flops = self.macs = self.params = 0
        self._of: dict[nn.Module, _Found] = {}
        self._open: list[tuple[int, float]] = []
        self._handles: list[RemovableHandle] = []
        self._counter: FlopCounterMode | None = None

    @property
    def _root(self) -> nn.Module:
        """The user's own module, where an engine has wrapped it."""
        unwrap: Callable[[], nn.Module] | None = getattr(self.model, "unwrap", None)
        return unwrap() if callable(unwrap) else self.model

    def start_profile(self, ignore_list: Sequence[type] | None = None) -> None:
        """Count from here on, from nothing.

        Args:
            ignore_list: classes of modules that are not told apart from what they are in.
        """
        self.stop_profile()
        self.reset_profile()
        for module in self._of:
            if module is not self._root and ignore_list and type(module) in ignore_list:
                continue
            self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        self.started = True

    def stop_profile(self) -> None:
        """Count no further; what was counted stays."""
        while self._handles:
            self._handles.pop().remove()
        self._close()

    def reset_profile(self) -> None:
        """Forget what was counted."""
        self._of = {
            module: _Found(sum(p.numel() for p in module.parameters()))
            for module in dict.fromkeys(self._root.modules())
        }

    def end_profile(self) -> None:
        """:meth:`stop_profile`, and forget everything."""
        self.stop_profile()
        self.started = False
        self._of = {}

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if self._counter is None:
            # For as long as the outermost module runs, so that it ends with it, whatever the program does.
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()  # type: ignore[no-untyped-call]
        self._open.append((self._counter.get_total_flops(), self._now()))

    def _leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if self._counter is None or not self._open:
            return
        flops, start = self._open.pop()
        self._of[module].flops += self._counter.get_total_flops() - flops
        self._of[module].seconds += self._now() - start
        if not self._open:
            self._close()

    def _close(self) -> None:
        self._open.clear()
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _now(self) -> float:
        device = next((p.device for p in self._root.parameters()), torch.device("cpu"))
        synchronize(device)
        return time.perf_counter()

    # ---- what was found

    @property
    def _total(self) -> _Found:
        return self._of.get(self._root, _Found(0))

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Operations of the forward passes on this rank."""
        return number_to_string(self._total.flops) if as_string else self._total.flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiplications with their additions: half of the operations."""
        return macs_to_string(self._total.macs) if as_string else self._total.macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds that they took."""
        return duration_to_string(self._total.seconds) if as_string else self._total.seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters of the model, sharded ones whole, tied ones once."""
        return params_to_string(self._total.params) if as_string else self._total.params

    # ---- in words

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print what was found, between :meth:`start_profile` and :meth:`end_profile`.

        Args:
            profile_step: how many steps there had been.
            module_depth: the deepest level whose largest modules are listed; -1: all.
            top_modules: how many of a level.
            detailed: every module with its share.
            output_file: written instead of standard output.
        """
        if not self.started:
            return
        self.flops, self.macs, self.params = self._total.flops, self._total.macs, self._total.params
        lines = [f"\n{LINE} forward pass at step {profile_step} {LINE}", *self._summary()]
        lines += [*self._largest(module_depth, top_modules)]
        if detailed:
            lines += ["", "parameters, MACs, time of each module and what is inside it, with shares of the whole:"]
            lines += self._tree("", self._root, 0)
        text = "\n".join([*lines, LINE])
        if not output_file:
            print(text, flush=True)
            return
        Path(output_file).parent.mkdir(parents=True, exist_ok=True)
        Path(output_file).write_text(text + "\n", encoding="utf-8")

    def _summary(self) -> list[str]:
        engine, found = self.ds_engine, self._total
        parts = engine.mp_world_size if engine is not None else 1
        rows: dict[str, Any] = {}
        if engine is not None:
            rows |= {"ranks": engine.world_size, "ranks with samples of their own": engine.dp_world_size}
            rows |= {"ranks that hold one layer": parts, "samples a rank": engine.train_micro_batch_size_per_gpu()}
        rows["parameters"] = params_to_string(found.params)
        rows["MACs, forward, this rank"] = macs_to_string(found.macs)
        rows["operations, forward, this rank"] = number_to_string(found.flops)
        if parts > 1:
            rows["operations, forward, of the model"] = number_to_string(found.flops * parts)
        rows["time, forward"] = duration_to_string(found.seconds)
        if found.seconds:
            rows["operations a second, forward"] = flops_to_string(found.flops / found.seconds)
        rows["operations, backward, this rank"] = number_to_string(found.flops * (2 + self.recompute_fwd_factor))
        return [f"{name + ':':<50} {value}" for name, value in rows.items()]

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the classes of modules that have most parameters, operations and time, level by level."""
        print("\n".join(self._largest(module_depth, top_modules)), flush=True)

    def _largest(self, module_depth: int, top_modules: int) -> list[str]:
        levels: list[dict[str, _Found]] = []

        def walk(module: nn.Module, depth: int) -> None:
            if depth == len(levels):
                levels.append({})
            found, own = levels[depth].setdefault(type(module).__name__, _Found(0)), self._of[module]
            found.params, found.flops = found.params + own.params, found.flops + own.flops
            found.seconds += own.seconds
            for child in module.children():
                walk(child, depth + 1)

        if self._of:
            walk(self._root, 0)
        lines = ["", f"largest {top_modules} classes of modules by level:"]
        for depth, level in enumerate(levels):
            if module_depth != -1 and depth > module_depth:
                break
            for what, told in (("params", params_to_string), ("macs", macs_to_string), ("seconds", duration_to_string)):
                best = sorted(level.items(), key=lambda item: getattr(item[1], what), reverse=True)[:top_modules]
                named = ", ".join(f"{name} {told(getattr(found, what))}" for name, found in best)
                lines.append(f"  {depth}: {what:<8} {named}")
        return lines

    def _tree(self, name: str, module: nn.Module, depth: int) -> list[str]:
        found, total = self._of[module], self._total

        def share(own: float, whole: float) -> str:
            return f"{100.0 * own / whole if whole else 0.0:.4g}%"

        told = [
            f"{params_to_string(found.params)} = {share(found.params, total.params)}",
            f"{macs_to_string(found.macs)} = {share(found.macs, total.macs)}",
            f"{duration_to_string(found.seconds)} = {share(found.seconds, total.seconds)}",
        ]
        title = f"({name}): {type(module).__name__}" if name else type(module).__name__
        extra = f"  ({module.extra_repr()})" if module.extra_repr() else ""
        lines = [f"{'  ' * depth}{title}{extra}  {', '.join(told)}"]
        for child_name, child in module.named_children():
            lines += self._tree(child_name, child, depth + 1)
        return lines


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Operations, MACs and parameters of one call of ``model`` in evaluation.

    Args:
        model: its mode and the gradients' are as before, afterwards.
        input_shape: call it with one tensor of that shape, in the dtype and on the device of its parameters.
        args, kwargs: or with these.
        print_profile, detailed, module_depth, top_modules, output_file: see :meth:`FlopsProfiler.print_model_profile`.
        warm_up: calls before that.
        as_string: texts instead of numbers.
        ignore_modules: see :meth:`FlopsProfiler.start_profile`.
        mode: ``"forward"``, or ``"generate"``: the method that is called.

    Raises:
        ValueError: neither a shape nor arguments, or another mode.
    """
    if mode not in ("forward", "generate"):
        raise ValueError(f"mode={mode!r}: give 'forward' or 'generate'")
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(0))
        args = [torch.ones(input_shape, dtype=like.dtype, device=like.device)]
    if not args and not kwargs:
        raise ValueError(f"input_shape={input_shape}, args={list(args)!r}, kwargs={kwargs}: give one of them")
    call = model if mode == "forward" else model.generate
    profiler, was_training = FlopsProfiler(model), model.training
    model.eval()
    with contextlib.ExitStack() as undo:
        undo.callback(model.train, was_training)
        for _ in range(warm_up):
            call(*args, **(kwargs or {}))  # type: ignore[operator]
        undo.callback(profiler.end_profile)
        profiler.start_profile(ignore_modules)
        call(*args, **(kwargs or {}))  # type: ignore[operator]
        profiler.stop_profile()
        found = profiler._total
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    if as_string:
        return number_to_string(found.flops), macs_to_string(found.macs), params_to_string(found.params)
    return found.flops, found.macs, found.params
