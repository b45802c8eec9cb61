"""``get_model_profile``: the operations and parameters of one call of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def _text(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:g}"


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
    """Return operations, MACs (half of them) and parameters of one call of ``model`` in evaluation mode.

    ``torch.utils.flop_counter`` counts the operations of matrix products, convolutions and attention.

    Args:
        model: the module to call; its mode is restored afterwards.
        input_shape: call it with one tensor of ones of that shape.
        args, kwargs: or with these arguments.
        print_profile: print the operations of each module, or write them to ``output_file``.
        module_depth: the deepest level that is printed; -1: all.
        as_string: return strings instead of numbers.
        output_file: see ``print_profile``.
        mode: ``"generate"`` calls that method.
        detailed, top_modules, warm_up, ignore_modules: no effect.
    """
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(0))
        args = [torch.ones(input_shape, dtype=like.dtype, device=like.device)]
    call: Any = model.generate if mode == "generate" else model
    was_training = model.training
    model.eval()
    try:
        with FlopCounterMode(display=False) as counter:
            call(*args, **(kwargs or {}))
    finally:
        model.train(was_training)
    if print_profile:
        table = "\n".join(
            f"{name}: {_text(sum(counts.values()))} operations"
            for name, counts in sorted(counter.get_flop_counts().items())
            if module_depth < 0 or name.count(".") <= module_depth
        )
        if output_file:
            Path(output_file).write_text(table, encoding="utf-8")
        else:
            print(table, flush=True)
    flops, params = counter.get_total_flops(), sum(param.numel() for param in model.parameters())
    if as_string:
        return _text(flops), f"{_text(flops // 2)}MACs", _text(params)
    return flops, flops // 2, params
