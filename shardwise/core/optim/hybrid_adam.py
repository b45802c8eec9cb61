"""HybridAdam: CPUAdam under its other name, which takes options of groups by name."""

from __future__ import annotations

import difflib
from typing import Any

from shardwise.core.optim.adam import NOT_HERE, CPUAdam

__all__ = ["HybridAdam"]

OPTIONS = ("maximize", "foreach", "fused", *NOT_HERE)


class HybridAdam(CPUAdam):
    """Adam and AdamW for a model whose parameters are on the host, on GPUs, or some here and some there.

    Args:
        model_params: as :class:`CPUAdam` takes it, like all others that are named.
        defaults: options of groups, for those that do not say otherwise; see :meth:`CPUAdam.add_param_group`.

    Raises:
        ValueError: a number is out of range, or an option is not available.
        TypeError: there is no such option.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        **defaults: Any,
    ) -> None:
        for name, value in defaults.items():
            if name not in OPTIONS:
                near = difflib.get_close_matches(name, [*OPTIONS, "lr", "betas", "eps", "weight_decay"], 1, 0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(OPTIONS)}"
                raise TypeError(f"{name}={value!r} is no option of HybridAdam; {hint}")
            if value and name in NOT_HERE:
                raise ValueError(f"{name}={value} of HybridAdam: {NOT_HERE[name]}")
        super().__init__(
            model_params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            adamw_mode,
            nvme_offload_fraction,
            nvme_offload_dir,
        )
        self.defaults.update(defaults)
        for group in self.param_groups:
            for name, value in defaults.items():
                group.setdefault(name, value)
