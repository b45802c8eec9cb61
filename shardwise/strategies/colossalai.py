"""``ColossalAIStrategy``: Gemini's chunks under Lightning's Trainer, on CPUs and GPUs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch

from shardwise.plan import Plan
from shardwise.strategies.base import ShardedStrategy
from shardwise.strategies.colossalai_arguments import ColossalAIArguments, to_plan, without_effect

__all__ = ["ColossalAI"]

NAMES: dict[torch.dtype | None, str] = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def _report(unused: dict[str, list[str]], arguments: ColossalAIArguments, stacklevel: int) -> None:
    for reason, names in unused.items():
        given = ", ".join(f"{name}={getattr(arguments, name)!r}" for name in names)
        warnings.warn(f"{given} without effect: {reason}", stacklevel=stacklevel + 1)


class ColossalAI(ShardedStrategy):
    """Chunk-based ZeRO-3 with parameters and optimizer state on the host as memory demands.

    The arguments are those of Lightning 1.9, in its order; :class:`ColossalAIArguments` says what each means here. Its
    limits are gone: any accelerator and precision, any number of optimizers of any element-wise class, gradient
    accumulation, clipping by norm and by value, models built anywhere, evaluation before training.

    Args:
        use_chunk: parameters share chunks; ``False``: each has one of its own.
        chunk_size: elements of a chunk; ``None``: searched.
        enable_distributed_storage: each rank keeps ``1/N`` of the model; ``False``: all of it.
        placement_policy: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        force_outputs_fp32: cast floating outputs of a step to fp32.
        gpu_margin_mem_ratio: for ``"auto"``: share of the device's remaining memory that optimizer state moves into.
        chunk_search_range: range of the search for a chunk size, in elements.
        chunk_search_n_grids: number of steps of that search.
        min_chunk_size: smallest chunk, in elements.
        initial_scale: first loss scale (fp16 only, as the six after it).
        min_scale: the scale never falls below it.
        growth_factor: the scale is multiplied by it after ``growth_interval`` good steps.
        backoff_factor: the scale is multiplied by it on overflow, once ``hysteresis`` overflows were seen.
        growth_interval: in steps.
        hysteresis: number of overflows tolerated before the scale falls.
        max_scale: the scale never rises above it.
        accelerator: as Lightning's strategies take it, like the four after it.
        parallel_devices: see above.
        cluster_environment: see above.
        checkpoint_io: checkpoints become what it writes; ``None``: a directory, each rank its part.
        precision_plugin: see above.
        process_group_backend: as in Lightning's ``DDPStrategy``, like the two after it.
        timeout: see above.
        start_method: see above.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        use_chunk: bool = True,
        chunk_size: int | None = None,
        enable_distributed_storage: bool = True,
        placement_policy: str = "auto",
        force_outputs_fp32: bool = False,
        gpu_margin_mem_ratio: float = 0.0,
        chunk_search_range: int = 64 * 1024**2,
        chunk_search_n_grids: int = 4096,
        min_chunk_size: int = 32 * 1024**2,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        self.arguments = ColossalAIArguments(
            use_chunk=use_chunk,
            chunk_size=chunk_size,
            enable_distributed_storage=enable_distributed_storage,
            placement_policy=placement_policy,
            force_outputs_fp32=force_outputs_fp32,
            gpu_margin_mem_ratio=gpu_margin_mem_ratio,
            chunk_search_range=chunk_search_range,
            chunk_search_n_grids=chunk_search_n_grids,
            min_chunk_size=min_chunk_size,
            initial_scale=initial_scale,
            min_scale=min_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            max_scale=max_scale,
        )
        self._reported_precision = False
        _report(without_effect(self.arguments), self.arguments, stacklevel=2)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )

    # ---- the plan

    def _plan(self, module: Any) -> Plan:
        chosen = self.format
        name = NAMES.get(chosen.dtype, "fp32")
        plan = to_plan(self.arguments, name, self.world_size, master_weights=chosen.masters)
        if chosen.dtype is torch.float64:
            plan = plan.but(param_dtype=chosen.dtype, buffer_dtype=chosen.dtype, cast_inputs=True)
        return plan if chosen.scaled else plan.but(scaler=None)

    def _check(self, trainer: Any) -> None:
        if self._reported_precision or trainer.state.fn.value != "fit":
            return
        self._reported_precision = True
        scaled = "fp16" if self.format.scaled else self.format.name
        known = without_effect(self.arguments)
        unused = {why: names for why, names in without_effect(self.arguments, scaled).items() if why not in known}
        if self.is_global_zero:
            _report(unused, self.arguments, stacklevel=2)

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
