"""``ShardedOptimizerV2``: the published arguments and methods of the optimizer of a sharded model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.compat.arguments import picked
from shardwise.plan.scaler_arguments import PublishedDefault
from shardwise.session import ShardedOptimizer
from shardwise.zero.arguments import OptimizerArguments
from shardwise.zero.fronts import OptimizerFront
from shardwise.zero.sharded_model import ShardedModelV2
from shardwise.zero.sharded_model.sharded_model_v2 import require_same_ranks


class ShardedOptimizerV2(OptimizerFront):
    """Wraps and shards an optimizer of a :class:`~shardwise.zero.sharded_model.ShardedModelV2`.

    Masters are fp32. ``step`` averages over the data-parallel ranks, divides by the loss scale, and drops the
    gradients; if a gradient is not finite on any rank, all ranks skip the step. ``param_groups`` and ``state`` are
    those of the wrapped optimizer.

    Args:
        sharded_model: the model that the optimizer updates.
        optimizer: any element-wise torch optimizer over ``sharded_model.parameters()``.
        cpu_offload: keep masters, state and reduced gradients in host memory and update them there. The model needs
            ``offload_config={"device": "cpu"}``.
        gpu_margin_mem_ratio: fraction of the device memory that the traced step leaves free for state; only with
            ``cpu_offload`` and the model's ``use_memory_tracer``. The trace then defines all placement.
        initial_scale: first loss scale (fp16 only, as the next six). The default means 2**16; an explicit 2**32 is
            used.
        min_scale: smallest loss scale.
        growth_factor: factor of the scale after ``growth_interval`` good steps.
        backoff_factor: factor of the scale on overflow, after ``hysteresis`` overflows.
        growth_interval: number of good steps.
        hysteresis: number of overflows before the scale falls.
        max_scale: largest loss scale.
        keep_unsharded: no effect: the state of replicated parameters is sharded too.
        dp_process_group: ``None``, or one of the model's own ranks (its ``process_group``).
        mp_process_group: the ranks with the other parts of the model (tensor parallelism), no other of which is in the
            data-parallel group: overflow and the norm of gradients are combined over them. Parameters marked
            ``tensor_model_parallel = True`` (or ``model_parallel``, ``is_tensor_parallel``) are sharded; others are
            replicated and count once in the norm.
        verbose: report skipped steps with the reason.

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
        values = dict(locals())
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
        arguments = picked(OptimizerArguments, values)
        inner = sharded_model.attach(optimizer, arguments, mp_process_group).optimizer
        assert inner is not None
        super().__init__(inner)
        self.model = sharded_model

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """Run the backward pass from ``tensor`` with its true gradient ``grad`` (same shape), scaled as in
        :meth:`backward`.
        """
        self.target.backward_by_grad(tensor, grad)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> float:
        """Clip the global norm of the next step's gradients. Return the unscaled norm before clipping. Collective.

        Raises:
            ValueError: ``model`` is not this optimizer's; ``max_norm`` is not positive.
        """
        if model is not self.model:
            raise ValueError(f"model ({type(model).__name__}) is not the ShardedModelV2 of this optimizer: give that")
        norm: float = self.target.clip_grad_by_norm(max_norm)
        return norm

    def sync_grad(self) -> None:
        """Do nothing: backward passes reduce gradients."""

    @property
    def loss_scale(self) -> float:
        """Return the current loss scale; 1 without fp16."""
        return float(self.target.loss_scale)

    @property
    def grad_scaler(self) -> Any:
        """Return the loss scale and its counters; ``None`` without fp16."""
        return self.target.scaler

    def get_memory_usage(self) -> tuple[int, int]:
        """Return the bytes of masters and state of this rank: (on its GPU, in host memory)."""
        session = self.model.session
        kinds = ("masters", "optimizer state")
        by_tier = session.memory().by_tier
        device, host = (sum(by_tier.get(tier, {}).get(kind, 0) for kind in kinds) for tier in ("device", "host"))
        return (device, host) if session.mesh.device.type == "cuda" else (0, device + host)
