"""``ColossalAIStrategy``: Gemini's chunks under Lightning's Trainer, on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.compat.published import documented, listed, names_of, takes
from shardwise.core.base.remarks import warn_user
from shardwise.plan import Plan
from shardwise.strategies.base import LightningArguments, ShardedStrategy
from shardwise.strategies.colossalai_arguments import ColossalAIArguments, to_plan, without_effect
from shardwise.strategies.lightning_precision import NumberFormat

__all__ = ["ColossalAI", "plan_in", "report"]

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
