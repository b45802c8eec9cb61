"""``ShardedOptimizerV2``: the published arguments and methods of the optimizer of a sharded model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.compat.published import picked
from shardwise.plan.loss_scale import PublishedDefault
from shardwise.session import ShardedOptimizer
from shardwise.zero.arguments import OptimizerArguments
from shardwise.zero.fronts import OptimizerFront
from shardwise.zero.sharded_model import ShardedModelV2
from shardwise.zero.sharded_model.sharded_model_v2 import require_same_ranks

__all__ = ["ShardedOptimizerV2"]


class ShardedOptimizerV2(OptimizerFront):
    """Wraps an optimizer of a :class:`~shardwise.zero.sharded_model.ShardedModelV2`, whose parameters it divides.

    Masters are fp32. ``step`` averages over the data-parallel ranks, takes the loss scale out, and drops the gradients;
    one that is not finite on any rank has the step skipped on all. ``param_groups`` and ``state`` are those of the
    wrapped optimizer.

    Args:
        sharded_model: the model.
        optimizer: any element-wise torch optimizer over ``sharded_model.parameters()``.
        cpu_offload: masters, state and reduced gradients are in host memory and updated there. The model needs
            ``offload_config={"device": "cpu"}``.
        gpu_margin_mem_ratio: share of what the traced step leaves of the device that state moves into; with
            ``cpu_offload`` and the model's ``use_memory_tracer`` only. Everything is then placed by the trace.
        initial_scale: first loss scale (fp16 only, as the six after it). Left at its default it starts at 2**16;
            2**32 given explicitly is used.
        min_scale: the scale never falls below it.
        growth_factor: the scale is multiplied by it after ``growth_interval`` good steps.
        backoff_factor: the scale is multiplied by it on overflow, once ``hysteresis`` overflows were seen.
        growth_interval: in steps.
        hysteresis: number of overflows tolerated before the scale falls.
        max_scale: the scale never rises above it.
        keep_unsharded: no effect: the state of replicated parameters is sharded too.
        dp_process_group: ``None``, or one of the model's own ranks (its ``process_group``).
        mp_process_group: the ranks that hold the other parts of the model (tensor parallelism), of which no other is in
            the data-parallel group: whether a step overflowed and the norm of the gradients are agreed with them.
            Parameters marked ``tensor_model_parallel = True`` (or ``model_parallel``, ``is_tensor_parallel``) are
            parts; others are the same on all of them and count once in the norm.
        verbose: say when a step is skipped, and why.

    Raises:
        TypeError: the model is not a ShardedModelV2, or the optimizer is sharded already.
        RuntimeError: ``cpu_offload`` with a model that does not offload; the model has an optimizer already.
        ValueError: an argument out of range, an optimizer with other parameters, or groups that do not fit the model's.
        NotImplementedError: state on a disk (``nvme_offload_fraction``).
    """

    def __init__(
        self,
        sharded_model: ShardedModelV2,
        optimizer: torch.optim.Optimizer,
        cpu_offload: bool = False,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = PublishedDefault(2**32),
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: float = 1000,
        hysteresis: float = 2,
        max_scale: float = 2**32,
        keep_unsharded: bool = False,
        dp_process_group: dist.ProcessGroup | None = None,
        mp_process_group: dist.ProcessGroup | None = None,
        verbose: bool = False,
    ) -> None:
        given = dict(locals())
        if not isinstance(sharded_model, ShardedModelV2):
            raise TypeError(f"sharded_model={sharded_model!r:.80}: give a ShardedModelV2")
        if isinstance(optimizer, ShardedOptimizerV2 | ShardedOptimizer) or not isinstance(
            optimizer, torch.optim.Optimizer
        ):
            raise TypeError(f"optimizer={optimizer!r:.80}: give a plain torch optimizer, an instance")
        require_same_ranks("dp_process_group", dp_process_group, sharded_model.ranks, "the model")
        fraction = getattr(optimizer, "nvme_offload_fraction", 0.0)
        if fraction:
            raise NotImplementedError(
                f"nvme_offload_fraction={fraction} of {type(optimizer).__name__} is not available here: use "
                "cpu_offload=True, or GeminiPlugin of shardwise.booster"
            )
        arguments = picked(OptimizerArguments, given)
        inner = sharded_model.attach(optimizer, arguments, mp_process_group).optimizer
        if inner is None:
            raise RuntimeError(f"the session has no optimizer ({inner}); report this")
        super().__init__(inner)
        self.model = sharded_model

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """Backward pass from ``tensor`` with its true gradient ``grad`` (same shape), scaled as in :meth:`backward`."""
        self.target.backward_by_grad(tensor, grad)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> float:
        """Clip the global norm of what the next step applies; returns the true (unscaled) norm before. Collective.

        Raises:
            ValueError: ``model`` is not this optimizer's; ``max_norm`` is not positive.
        """
        if model is not self.model:
            raise ValueError(f"model ({type(model).__name__}) is not the ShardedModelV2 of this optimizer: give that")
        norm: float = self.target.clip_grad_by_norm(max_norm)
        return norm

    def sync_grad(self) -> None:
        """Nothing to do: backward passes reduce."""

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by now; 1 without fp16."""
        return float(self.target.loss_scale)

    @property
    def grad_scaler(self) -> Any:
        """The loss scale and its counters; ``None`` without fp16."""
        return self.target.scaler

    def get_memory_usage(self) -> tuple[int, int]:
        """Bytes of masters and state on this rank: (on its GPU, in host memory)."""
        session = self.model.session
        kept = ("masters", "optimizer state")
        by_tier = session.memory().by_tier
        device, host = (sum(by_tier.get(tier, {}).get(kind, 0) for kind in kept) for tier in ("device", "host"))
        return (device, host) if session.mesh.device.type == "cuda" else (0, device + host)
