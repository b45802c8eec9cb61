"""``DeepSpeedConfig`` and its parts: a configuration that was read, by the attributes that programs ask for."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Any

from shardwise.comm import ranks_of
from shardwise.deepspeed.config import Batch, Settings, Source, batch_of, load_config, read_config
from shardwise.deepspeed.groups import data_parallel_group
from shardwise.deepspeed.plan import data_ranks
from shardwise.deepspeed.schema import ALIASES, BLOCKS, KEYS, SECTIONS
from shardwise.deepspeed.validation import validation_error

__all__ = [
    "MONITORS",
    "DeepSpeedBF16Config",
    "DeepSpeedConfig",
    "DeepSpeedFP16Config",
    "DeepSpeedMonitorConfig",
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "Section",
    "ZeroStageEnum",
    "get_bfloat16_config",
    "get_float16_config",
    "get_gradient_clipping",
    "required_batch",
]

MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")


class ZeroStageEnum(IntEnum):
    """Names of the stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(StrEnum):
    """Where something is offloaded to; equal to its text."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """What ``engine.offload_states`` can be told to move; equal to its text."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class Section:
    """One block of a configuration; absent keys have their defaults, and blocks that are optional are ``None``.

    Args:
        settings: the configuration.
        path: of the block, ``"zero_optimization"``.
    """

    def __init__(self, settings: Settings, path: str) -> None:
        self._settings, self._path = settings, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        path = f"{self._path}.{name}"
        path = ALIASES.get(path, path)
        if path in SECTIONS:
            kind = _KINDS.get(path, Section)
            return kind._of(self._settings, path) if path in self._settings.sections else None
        if path in BLOCKS:
            return None  # whatever would ask for something of it is refused
        if path not in KEYS:
            raise AttributeError(
                f"{name!r} is no key of {self._path!r}; there are {', '.join(SECTIONS[self._path])}",
                name=name,
                obj=self,
            )
        value = self._settings[path]
        return OffloadDeviceEnum(value) if path.endswith(".device") else value

    @classmethod
    def _of(cls, settings: Settings, path: str) -> Section:
        made = cls.__new__(cls)
        Section.__init__(made, settings, path)
        return made

    def __repr__(self) -> str:
        return f"{self._path}({', '.join(f'{name}={getattr(self, name)!r}' for name in SECTIONS[self._path])})"

    def as_dict(self) -> dict[str, Any]:
        """Every key of the block with its value."""
        return {name: getattr(self, name) for name in SECTIONS[self._path]}


def _block(path: str, keys: Mapping[str, Any]) -> Settings:
    """A configuration of nothing but the block at ``path``.

    Raises:
        ValueError: as pydantic's, see :func:`~shardwise.deepspeed.validation.validation_error`.
    """
    tree: dict[str, Any] = dict(keys)
    for name in reversed(path.split(".")):
        tree = {name: tree}
    try:
        return read_config(tree)
    except ValueError as error:
        raise validation_error(path, error) from error


class DeepSpeedZeroConfig(Section):
    """The block ``zero_optimization``, of its keys: ``DeepSpeedZeroConfig(stage=2, reduce_bucket_size=10)``.

    Raises:
        ValueError, NotImplementedError: see :func:`~shardwise.deepspeed.config.read_config`.
    """

    def __init__(self, **keys: Any) -> None:
        super().__init__(_block("zero_optimization", keys), "zero_optimization")

    @property
    def overlap_comm(self) -> bool:
        """Whether reductions overlap backward; without the key they do at stage 3."""
        given = self._settings["zero_optimization.overlap_comm"]
        return self._settings.stage == 3 if given is None else bool(given)


class DeepSpeedZeroOffloadParamConfig(Section):
    """The block ``offload_param``, of its keys."""

    def __init__(self, **keys: Any) -> None:
        path = "zero_optimization.offload_param"
        super().__init__(_block(path, keys), path)


class DeepSpeedZeroOffloadOptimizerConfig(Section):
    """The block ``offload_optimizer``, of its keys."""

    def __init__(self, **keys: Any) -> None:
        path = "zero_optimization.offload_optimizer"
        super().__init__(_block(path, keys), path)

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes are asked to overlap updates."""
        return bool(self.pipeline_read or self.pipeline_write)


class DeepSpeedFP16Config(Section):
    """The block ``fp16``, of its keys."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(_block("fp16", keys), "fp16")

    def initial_dynamic_scale(self) -> float:
        """The first loss scale, where none is given."""
        return 2.0 ** int(self.initial_scale_power)


class DeepSpeedBF16Config(Section):
    """The block ``bf16``, of its keys."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(_block("bf16", keys), "bf16")


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """The block ``fp16`` of a whole configuration; without one its defaults."""
    return DeepSpeedFP16Config(**(param_dict.get("fp16") or {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The block ``bf16``, or of its older name ``bfloat16``, of a whole configuration; without one its defaults."""
    return DeepSpeedBF16Config(**(param_dict.get("bf16", param_dict.get("bfloat16")) or {}))


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """The norm that gradients are clipped to, of a whole configuration."""
    return float(read_config(param_dict)["gradient_clipping"])


_KINDS: dict[str, type[Section]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
}


class DeepSpeedMonitorConfig:
    """The blocks of monitors, each by its name: ``tensorboard``, ``wandb``, ``csv_monitor`` and ``comet``.

    Raises:
        ValueError: see :func:`~shardwise.deepspeed.config.read_config`.
    """

    def __init__(self, **blocks: Any) -> None:
        self._take(read_config(blocks))

    @classmethod
    def of(cls, settings: Settings) -> DeepSpeedMonitorConfig:
        """Those of a whole configuration."""
        made = cls.__new__(cls)
        made._take(settings)
        return made

    def _take(self, settings: Settings) -> None:
        self.tensorboard, self.wandb, self.csv_monitor, self.comet = (Section(settings, name) for name in MONITORS)

    @property
    def enabled(self) -> bool:
        """Whether one of them is."""
        return any(getattr(self, name).enabled for name in MONITORS)


class DeepSpeedConfig:
    """A configuration, checked, with batch sizes derived. Every key of the top level is an attribute.

    Args:
        config: a dict, a path, or a text in base64; see :func:`~shardwise.deepspeed.config.load_config`.
        mpu: as for ``initialize``: its data-parallel ranks are those that batches are divided over.
        mesh_device: not available; give ``sequence_parallel_size``.

    Attributes:
        zero_config, float16_config, bfloat16_config, activation_checkpointing_config, flops_profiler_config,
            tensor_parallel_config, aio_config: blocks, whose keys are attributes.
        monitor_config: those of monitors.
        world_size: ranks that see different samples.

    Raises:
        ValueError, NotImplementedError: see :func:`~shardwise.deepspeed.config.read_config`; or there are no batch
            sizes, or some that do not fit the ranks.
    """

    def __init__(self, config: Source, mpu: Any = None, mesh_device: Any = None) -> None:
        if mesh_device is not None:
            raise NotImplementedError(f"{mesh_device=!r:.80} is not available; give sequence_parallel_size")
        self._param_dict = load_config(config)
        self._settings = settings = read_config(self._param_dict)
        if hasattr(mpu, "get_data_parallel_world_size"):
            ranks = mpu.get_data_parallel_world_size()
        else:
            ranks = len(ranks_of("mpu", data_parallel_group(mpu) if mpu is not None else None))
        self.world_size = data_ranks(settings, ranks)
        self._take(settings, required_batch(settings, self.world_size))

    @classmethod
    def of(cls, settings: Settings, batch: Batch, ranks: int) -> DeepSpeedConfig:
        """Of a configuration that was read, for an engine over that many data-parallel ranks."""
        made = cls.__new__(cls)
        made._settings, made._param_dict, made.world_size = settings, dict(settings.values), ranks
        made._take(settings, batch)
        return made

    def _take(self, settings: Settings, batch: Batch) -> None:
        self.train_batch_size, self.train_micro_batch_size_per_gpu = batch.train, batch.micro
        self.gradient_accumulation_steps = batch.accumulation
        self.zero_config = DeepSpeedZeroConfig._of(settings, "zero_optimization")
        self.float16_config = DeepSpeedFP16Config._of(settings, "fp16")
        self.bfloat16_config = DeepSpeedBF16Config._of(settings, "bf16")
        self.activation_checkpointing_config = Section(settings, "activation_checkpointing")
        self.flops_profiler_config = Section(settings, "flops_profiler")
        self.tensor_parallel_config = Section(settings, "tensor_parallel")
        self.checkpoint_config = Section(settings, "checkpoint").as_dict()
        self.aio_config = Section(settings, "aio").as_dict()
        self.monitor_config = DeepSpeedMonitorConfig.of(settings)
        self.zero_optimization_stage = settings.stage
        self.zero_enabled = settings.stage > 0
        for kind in ("optimizer", "scheduler"):
            setattr(self, f"{kind}_name", settings[f"{kind}.type"])
            setattr(self, f"{kind}_params", settings[f"{kind}.params"])
        self.checkpoint_tag_validation_enabled = settings["checkpoint.tag_validation"] != "IGNORE"
        self.checkpoint_tag_validation_fail = settings["checkpoint.tag_validation"] == "FAIL"
        self.load_universal_checkpoint = settings["checkpoint.load_universal"]
        for name in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
            setattr(self, name, settings[f"data_types.{name}"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in SECTIONS[""]:
            raise AttributeError(f"DeepSpeedConfig has no attribute {name!r}", name=name, obj=self)
        return self._settings[name]

    def print_user_config(self) -> None:
        """Print what was given."""
        print(self._param_dict)


def required_batch(settings: Settings, ranks: int) -> Batch:
    """See :func:`~shardwise.deepspeed.config.batch_of`.

    Raises:
        ValueError: there is neither a batch size nor a micro-batch size; or they do not fit.
    """
    batch = batch_of(settings, ranks)
    if batch is None:
        raise ValueError(
            f"train_batch_size={settings['train_batch_size']} and train_micro_batch_size_per_gpu="
            f"{settings['train_micro_batch_size_per_gpu']}: give at least one of them"
        )
    return batch
