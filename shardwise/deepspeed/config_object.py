"""``DeepSpeedConfig`` and its blocks, with DeepSpeed's attributes."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any

from shardwise.core.comm import ranks_of
from shardwise.deepspeed.config import Batch, Settings, Source, batch_of, load_config, read_config
from shardwise.deepspeed.groups import data_parallel_group
from shardwise.deepspeed.plan import data_ranks
from shardwise.deepspeed.schema import ALIASES, SECTIONS


class ZeroStageEnum(IntEnum):
    """Names of the ZeRO stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(StrEnum):
    """Offload targets; each member equals its string."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """States that ``engine.offload_states`` can move; each member equals its string."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class Section:
    """One block of a configuration; absent keys have their defaults, and blocks that are optional are ``None``.

    Args:
        settings: the configuration.
        path: path of the block, such as ``"zero_optimization"``.
    """

    def __init__(self, settings: Settings, path: str) -> None:
        self._settings, self._path = settings, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        path = ALIASES.get(f"{self._path}.{name}", f"{self._path}.{name}")
        if path in SECTIONS:
            return Section(self._settings, path) if path in self._settings.sections else None
        if path.rpartition(".")[2] not in SECTIONS[self._path]:
            raise AttributeError(f"{name!r} is not a key of {self._path!r}", name=name, obj=self)
        return self._settings[path]


class DeepSpeedConfig:
    """A configuration, checked, with batch sizes derived. Every key of the top level is an attribute.

    Args:
        config: a dict or a path; see :func:`~shardwise.deepspeed.config.load_config`.
        mpu: the ``mpu`` of ``initialize``; batches are divided over its data-parallel ranks.
        mesh_device: not available; give ``sequence_parallel_size``.

    Attributes:
        zero_config, float16_config, bfloat16_config: blocks, with their keys as attributes.
        world_size: number of data-parallel ranks.

    Raises:
        ValueError, NotImplementedError: see :func:`~shardwise.deepspeed.config.read_config`; or there are no batch
            sizes, or some that do not fit the ranks.
    """

    def __init__(self, config: Source, mpu: Any = None, mesh_device: Any = None) -> None:
        if mesh_device is not None:
            raise NotImplementedError(f"{mesh_device=!r:.80} is not available; give sequence_parallel_size")
        self._settings = settings = read_config(load_config(config))
        ranks = len(ranks_of("mpu", data_parallel_group(mpu) if mpu is not None else None))
        self.world_size = data_ranks(settings, ranks)
        batch = required_batch(settings, self.world_size)
        self.train_batch_size, self.train_micro_batch_size_per_gpu = batch.train, batch.micro
        self.gradient_accumulation_steps = batch.accumulation
        self.zero_config = Section(settings, "zero_optimization")
        self.float16_config, self.bfloat16_config = Section(settings, "fp16"), Section(settings, "bf16")
        self.zero_optimization_stage, self.zero_enabled = settings.stage, settings.stage > 0
        self.optimizer_name, self.optimizer_params = settings["optimizer.type"], settings["optimizer.params"]
        self.scheduler_name, self.scheduler_params = settings["scheduler.type"], settings["scheduler.params"]

    def __getattr__(self, name: str) -> Any:
        if name not in SECTIONS[""]:
            raise AttributeError(f"DeepSpeedConfig has no attribute {name!r}", name=name, obj=self)
        return self._settings[name]


def required_batch(settings: Settings, ranks: int) -> Batch:
    """Return the batch sizes; see :func:`~shardwise.deepspeed.config.batch_of`.

    Raises:
        ValueError: there is neither a batch size nor a micro-batch size, or they do not fit.
    """
    batch = batch_of(settings, ranks)
    if batch is None:
        both = "train_batch_size and train_micro_batch_size_per_gpu"
        raise ValueError(f"{both} are missing, or 'auto', which is no size here: give at least one of them")
    return batch
