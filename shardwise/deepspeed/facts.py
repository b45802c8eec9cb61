"""What an engine says of itself and of its configuration, by DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch

from shardwise.core.base.attributes import ModeOfModule
from shardwise.core.base.checked import whole
from shardwise.core.comm import ranks_of
from shardwise.deepspeed.config import Batch, Settings
from shardwise.deepspeed.config_object import OffloadDeviceEnum, OffloadStateTypeEnum, Section
from shardwise.deepspeed.process_groups import get_sequence_parallel_group
from shardwise.deepspeed.schema import KEYS, SECTIONS
from shardwise.session import Session

__all__ = ["ABSENT", "Facts", "getter"]

_REDUCED = "gradients are reduced inside backward passes; use torch.distributed for tensors of your own"
ABSENT = {
    **dict.fromkeys(("allreduce_bucket", "allreduce_and_copy", "buffered_allreduce_fallback"), _REDUCED),
    **dict.fromkeys(("timers", "engine_timers", "flops_profiler"), "use torch.profiler"),
    "_config": "engine.settings is what was configured, and optimizer.clip_grad the norm that steps clip to",
    "clip_fp32_gradients": "step() clips to gradient_clipping; optimizer.clip_grad_by_norm(norm) does it before",
    "set_data_post_process_func": "give initialize a collate_fn",
    "load_moe_state_dict": "there are no experts on ranks of their own here; load_checkpoint reads whole models",
}
"""Of DeepSpeed's engine and not of this one: what to do instead, in the error of who asks for it."""

_GETTERS = {
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "loss_scale": "fp16.loss_scale",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "steps_per_print": "steps_per_print",
    "zero_optimization_stage": "zero_optimization.stage",
}
_PREFIXES = {
    "zero_": ("zero_optimization.", "zero_optimization.stage3_", "zero_optimization.zero_", "zero_"),
    "mics_": ("zero_optimization.mics_",),
    "fp16_": ("fp16.", "fp16.fp16_"),
    "bfloat16_": ("bf16.",),
    "bf16_": ("bf16.bf16_",),
    "torch_autocast_": ("torch_autocast.",),
}
"""By the beginning of a getter's name: what its key may begin with."""


def getter(settings: Settings, name: str) -> Callable[[], Any] | None:
    """The engine's method ``name`` where DeepSpeed has it for a key: what was configured, or the key's default."""
    paths = [_GETTERS[name]] if name in _GETTERS else []
    for prefix, starts in _PREFIXES.items():
        if name.startswith(prefix):
            paths += [f"{start}{name.removeprefix(prefix)}" for start in starts]
    for path in paths:
        if path in SECTIONS:
            return lambda: Section(settings, path) if path in settings.sections else None
        if path in KEYS:
            return lambda: settings[path]
    return None


class ThroughputTimer:
    """For programs that tell DeepSpeed's timer of their epochs: nothing is timed."""

    def update_epoch_count(self) -> None:
        """Nothing."""


class Facts(ModeOfModule):
    """The part of an engine that answers."""

    settings: Settings
    session: Session
    optimizer: Any
    training_dataloader: Any
    _batch: Batch
    tput_timer = ThroughputTimer()

    def gradient_clipping(self) -> float:
        """The largest norm, as ``optimizer.clip_grad`` may have set it; 0 is none."""
        return float(self.settings["gradient_clipping"] if self.optimizer is None else self.optimizer.max_norm)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.session.mesh.device

    @property
    def global_rank(self) -> int:
        """Of this process, among all."""
        mesh = self.session.mesh
        return mesh.ranks[mesh.rank]

    @property
    def local_rank(self) -> int:
        """The number of this rank's GPU; its rank, on a CPU."""
        index = self.device.index
        return self.global_rank if index is None else index

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return len(ranks_of("all ranks", None))

    @property
    def dp_world_size(self) -> int:
        """How many see different samples: all, but for tensor and sequence parallelism, and what an ``mpu`` says."""
        return self.session.mesh.data_ranks

    @property
    def config(self) -> dict[str, Any]:
        """The values that were given, in their blocks."""
        tree: dict[str, Any] = {}
        for path, value in self.settings.values.items():
            *blocks, name = path.split(".")
            place = tree
            for block in blocks:
                place = place.setdefault(block, {})
            place[name] = value
        return tree

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping; ``None`` before the first."""
        return self.optimizer.get_grad_norm() if self.optimizer is not None else None

    def _of_groups(self, name: str) -> list[Any]:
        return [group.get(name, 0.0) for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def get_lr(self) -> list[float]:
        """By param group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Betas, or the momentum of an optimizer without them, by param group."""
        betas = self._of_groups("betas")
        return betas if any(betas) else self._of_groups("momentum")

    def train_batch_size(self) -> int:
        """Samples a step, over all ranks."""
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples a backward pass and rank."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Backward passes a step."""
        return self._batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """All three of them."""
        return self._batch.train, self._batch.micro, self._batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of backward passes a step.

        Raises:
            ValueError: it is no multiple of the micro-batch over all ranks.
        """
        together = self._batch.micro * self.dp_world_size
        if whole("train_batch_size", train_batch_size, 1, what="a number of samples") % together:
            raise ValueError(f"train_batch_size={train_batch_size}: give a multiple of {together} samples (all ranks')")
        self._batch = Batch(train_batch_size, self._batch.micro, train_batch_size // together)
        self.session.divide_own_passes(self._batch.accumulation)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch, and with it the batch."""
        whole("micro_batch_size", micro_batch_size, 1, what="a number of samples")
        accumulation = self._batch.accumulation
        self._batch = Batch(micro_batch_size * accumulation * self.dp_world_size, micro_batch_size, accumulation)

    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move masters and optimizer state to host memory, and drop what is gathered, until :meth:`reload_states`.

        Masters and state have one home and move together. Parameters stay on the device (``offload_param`` moves these
        for good), and so do exchange buffers of gradients. Between steps, on every rank.

        Args:
            include: of :class:`~shardwise.deepspeed.config_object.OffloadStateTypeEnum`; ``None``: all that can move.
            device: ``"cpu"``; ``"none"`` does nothing.
            pin_memory: page-lock that memory, and keep it for the next time.
            non_blocking: no effect: the copies are waited for.

        Raises:
            NotImplementedError: ``lp_params`` in ``include``, or another device.
            RuntimeError: between a backward pass and its step.
        """
        if device == OffloadDeviceEnum.none:
            return
        if device != OffloadDeviceEnum.cpu or (include is not None and OffloadStateTypeEnum.lp_params in include):
            raise NotImplementedError(
                f"offload_states({include=!r:.80}, {device=}) is not available: give device='cpu', and leave lp_params "
                "out; zero_optimization.offload_param keeps parameters in host memory"
            )
        movable = (OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params)
        if include is None or any(kind in include for kind in movable):
            self.session.offload_states(pin_memory)
        else:
            self.session.drop_gathered()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back what :meth:`offload_states` moved; without that nothing happens."""
        self.session.reload_states()

    @property
    def mp_world_size(self) -> int:
        """Ranks that hold parts of the same layers."""
        mesh = self.session.mesh
        return mesh.joined.size if mesh.joined is not None else mesh.tensor.size

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.settings.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether each rank keeps a shard of the gradients."""
        return self.settings.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether each rank keeps a shard of the parameters."""
        return self.settings.stage >= 3

    is_first_weights_partition_group = zero_optimization_partition_weights

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves."""
        return self.settings["fp16.enabled"] and self.settings["fp16.loss_scale"] == 0  # type: ignore[no-any-return]

    @property
    def communication_data_type(self) -> torch.dtype | None:
        """The dtype in which gradients travel; not given: that of the parameters."""
        given: torch.dtype | None = self.settings["communication_data_type"]
        return given or self.session.plan.precision.param_dtype

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of parameters, and in which gradients add up."""
        params = self.session.plan.precision.param_dtype or torch.float32
        return params, self.settings["data_types.grad_accum_dtype"] or params

    def optimizer_name(self) -> str | None:
        """The class of the optimizer that was given to ``initialize``; otherwise ``optimizer.type``."""
        if "optimizer.type" in self.settings.findings.ignored or self.settings["optimizer.type"] is None:
            return None if self.optimizer is None else type(self.optimizer.optimizer).__name__
        return str(self.settings["optimizer.type"])

    def _backward_epilogue(self) -> None:
        """After a pass of outputs of ``module``, where DeepSpeed's engine has to be told: nothing is left to do."""

    def get_tensor_parallel_rank(self) -> int:
        """Which part of its layers this rank holds."""
        mesh = self.session.mesh
        return mesh.joined.rank if mesh.joined is not None else mesh.tensor.rank

    get_model_parallel_rank = get_tensor_parallel_rank

    get_sequence_parallel_group = staticmethod(get_sequence_parallel_group)

    def get_data_parallel_rank(self) -> int:
        """Which samples this rank sees."""
        return self.session.mesh.data_rank

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that is stepped on the shards."""
        return None if self.optimizer is None else self.optimizer.optimizer

    client_optimizer = basic_optimizer
