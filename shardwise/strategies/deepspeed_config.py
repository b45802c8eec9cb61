"""The DeepSpeed configuration of ``DeepSpeedStrategy``: from its arguments, completed by the Trainer's values."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch

from shardwise.compat.arguments import changed, listed, names_of, unused_arguments
from shardwise.core.base.validate import boolean, integer
from shardwise.core.base.warnings import warn_user
from shardwise.core.mesh.launch import read_variable
from shardwise.deepspeed import zero
from shardwise.deepspeed.config import Report, Settings, Source, load_config, read_config
from shardwise.deepspeed.leaf_modules import get_z3_leaf_modules
from shardwise.deepspeed.plan import data_parallel, data_ranks, home_of_parameters, plan_of
from shardwise.plan import Plan
from shardwise.strategies.lightning_packages import Namespace
from shardwise.strategies.precision import NumberFormat

AUTO = "auto"
MICRO, TOGETHER = "train_micro_batch_size_per_gpu", "train_batch_size"
ACCUMULATION, CLIPPING = "gradient_accumulation_steps", "gradient_clipping"
ZERO, PARAM, OPTIM = "zero_optimization", "offload_param", "offload_optimizer"
DEVICES = ("cpu", "nvme")
HOMES = {
    "none": "they are not offloaded: that is the device that trains",
    "cpu": "they are offloaded to the host ('cpu')",
    "nvme": "they are offloaded to the disk ('nvme')",
}
TOP = ("zero_allow_untested_optimizer",)
FP16 = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
ACTIVATIONS = (
    "partition_activations",
    "cpu_checkpointing",
    "contiguous_memory_optimization",
    "synchronize_checkpoint_boundary",
)
AIO = ("block_size", "queue_depth", "single_submit", "overlap_events", "thread_count")
OF_ZERO = (
    "stage",
    "contiguous_gradients",
    "overlap_comm",
    "allgather_partitions",
    "reduce_scatter",
    "allgather_bucket_size",
    "reduce_bucket_size",
    "sub_group_size",
)
OF_OPTIM = {
    "device": "offload_optimizer_device",
    "nvme_path": "nvme_path",
    "buffer_count": "optimizer_buffer_count",
    "pin_memory": "pin_memory",
}
OF_PARAM = {
    "device": "offload_params_device",
    "nvme_path": "nvme_path",
    "buffer_count": "params_buffer_count",
    "buffer_size": "params_buffer_size",
    "max_in_cpu": "max_in_cpu",
    "pin_memory": "pin_memory",
}
NEW_NAME = "intra_op_parallelism"  # DeepSpeed's name of thread_count since 0.16
PLACES = {f"{ZERO}.{name}": name for name in OF_ZERO} | {name: name for name in TOP}
PLACES |= {f"{ZERO}.{OPTIM}.{key}": name for key, name in OF_OPTIM.items()}
PLACES |= {f"{ZERO}.{PARAM}.{key}": name for key, name in OF_PARAM.items()}
PLACES |= {f"aio.{name}": name for name in AIO} | {f"aio.{NEW_NAME}": "thread_count"}
PLACES |= {f"fp16.{name}": name for name in FP16} | {f"activation_checkpointing.{name}": name for name in ACTIVATIONS}
"""Keys of the configuration, with the arguments that give them."""


@dataclass(frozen=True)
class DeepSpeedArguments:
    """The arguments of the strategy that make a DeepSpeed configuration; see :class:`~.deepspeed.DeepSpeed`.

    Sizes and ``max_in_cpu`` are in elements, ``block_size`` in bytes.

    Raises:
        TypeError: a number or a switch has another type.
        ValueError: a value is out of range.
    """

    zero_optimization: bool = True
    stage: int = 2
    remote_device: str | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_params_device: str = "cpu"
    nvme_path: str = "/local_nvme"
    params_buffer_count: int = 5
    params_buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    offload_optimizer_device: str = "cpu"
    optimizer_buffer_count: int = 4
    block_size: int = 1048576
    queue_depth: int = 8
    single_submit: bool = False
    overlap_events: bool = True
    thread_count: int = 1
    pin_memory: bool = False
    sub_group_size: int = 1_000_000_000_000
    contiguous_gradients: bool = True
    overlap_comm: bool = True
    allgather_partitions: bool = True
    reduce_scatter: bool = True
    allgather_bucket_size: int = 200_000_000
    reduce_bucket_size: int = 200_000_000
    zero_allow_untested_optimizer: bool = True
    logging_batch_size_per_gpu: str | int | None = AUTO
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: int = 1
    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    synchronize_checkpoint_boundary: bool = False

    def __post_init__(self) -> None:
        if self.remote_device not in (None, *DEVICES):
            raise ValueError(f"remote_device={self.remote_device!r}: give None, 'cpu' or 'nvme'")
        for name in ("offload_params_device", "offload_optimizer_device"):
            if getattr(self, name) not in DEVICES:
                raise ValueError(f"{name}={getattr(self, name)!r}: give 'cpu' or 'nvme'")
        batch = self.logging_batch_size_per_gpu
        if batch not in (None, AUTO):
            integer("logging_batch_size_per_gpu", batch, 1, what="'auto', or a number of samples")
        for name in ("zero_optimization", "offload_optimizer", "offload_parameters"):
            boolean(name, getattr(self, name))
        try:
            plan_of(read_config(self.to_config() | {"fp16": self.fp16()}), 1)
        except (ValueError, NotImplementedError) as error:
            path, sign, problem = str(error).partition("=")
            raise type(error)(PLACES.get(path, path) + sign + problem) from None

    def fp16(self) -> dict[str, Any]:
        """Return the block ``fp16`` of the configuration."""
        return {"enabled": True, **{name: getattr(self, name) for name in FP16}}

    def to_config(self) -> dict[str, Any]:
        """Return the DeepSpeed configuration without the Trainer's values."""
        tree: dict[str, Any] = {}
        if self.logging_batch_size_per_gpu not in (None, AUTO):
            tree[MICRO] = self.logging_batch_size_per_gpu
        if self.zero_optimization:
            sharding: dict[str, Any] = {name: getattr(self, name) for name in OF_ZERO}
            if self.offload_optimizer:
                sharding[OPTIM] = {key: getattr(self, name) for key, name in OF_OPTIM.items()}
            if self.offload_parameters:
                sharding[PARAM] = {key: getattr(self, name) for key, name in OF_PARAM.items()}
            tree |= {name: getattr(self, name) for name in TOP} | {ZERO: sharding}
        tree["activation_checkpointing"] = {name: getattr(self, name) for name in ACTIVATIONS}
        tree["aio"] = {name: getattr(self, name) for name in AIO}
        return tree


def quiet_paths(arguments: DeepSpeedArguments) -> frozenset[str]:
    """Return the paths of keys whose arguments have their defaults, about which there is no warning."""
    names = set(changed(arguments, names_of(DeepSpeedArguments)))
    return frozenset(path for path, name in PLACES.items() if name not in names)


def chosen_config(
    config: Any, from_environment: str | None, variable: str, error: type[Exception]
) -> dict[str, Any] | None:
    """Return a copy of the configuration: the argument, or else the file that the environment variable names.

    Args:
        config: a dict, a path, or ``None``.
        from_environment: the value of ``variable``.
        variable: the environment variable's name, for messages.
        error: raised if a path does not exist.

    Returns:
        ``None`` if there is neither (an empty dict is a configuration).

    Raises:
        TypeError: ``config`` is something else.
    """
    source: Source | None = config if config is not None else from_environment
    if source is None:
        return None
    try:
        return load_config(source)
    except FileNotFoundError:
        where = "" if config is not None else f" (it is the value of {variable} in the environment)"
        raise error(
            f"You passed in a path to a DeepSpeed config but the path does not exist: {source}{where}"
        ) from None


@dataclass(frozen=True)
class TrainerFacts:
    """Values of the Trainer for keys that a configuration leaves out.

    Attributes:
        accumulation: ``accumulate_grad_batches`` of the Trainer.
        micro_batch: samples of a rank's batch.
        clip: ``gradient_clip_val`` of the Trainer, if the Trainer clips by norm.
        precision: Lightning's name, for example ``"16-mixed"``.
    """

    accumulation: int
    micro_batch: int
    clip: float
    precision: str


def complete(
    tree: Mapping[str, Any], arguments: DeepSpeedArguments, facts: TrainerFacts, error: type[Exception]
) -> dict[str, Any]:
    """Return a copy of ``tree`` with the Trainer's batch size, clipping and precision for missing keys.

    Args:
        tree: the configuration.
        arguments: their loss scale is used if the configuration has no ``fp16``.
        facts: see :class:`TrainerFacts`.
        error: raised if the configuration contradicts the Trainer.
    """
    config = load_config(tree)
    steps = config.get(ACCUMULATION)
    if steps not in (None, AUTO) and steps != facts.accumulation:
        raise error(
            f"gradient_accumulation_steps={steps!r} in the DeepSpeed config, but Trainer has "
            f"accumulate_grad_batches={facts.accumulation}: leave the key out, or give the same number"
        )
    values = ((ACCUMULATION, facts.accumulation), (MICRO, facts.micro_batch), (CLIPPING, facts.clip))
    for name, value in values:
        if config.get(name) in (None, AUTO):
            config[name] = value
    if config.get(TOGETHER) == AUTO:
        del config[TOGETHER]
    _set_precision(config, arguments, facts.precision, error)
    return config


def _set_precision(
    config: dict[str, Any], arguments: DeepSpeedArguments, precision: str, error: type[Exception]
) -> None:
    half = {"16": "fp16", "bf16": "bf16"}.get(precision.partition("-")[0])
    for name in ("fp16", "bf16", "bfloat16"):
        block = config.get(name)
        if isinstance(block, Mapping) and block.get("enabled") == AUTO:
            config[name] = {**block, "enabled": half is not None and half == name.replace("bfloat16", "bf16")}
    bf16 = "bfloat16" if "bfloat16" in config else "bf16"
    on = {"fp16": _enabled(config.get("fp16")), "bf16": _enabled(config.get(bf16))}
    other = {"fp16": "bf16", "bf16": "fp16"}.get(half or "")
    if half is not None and other is not None and on[other]:
        raise error(
            f"the DeepSpeed config enables {other} and Trainer has precision={precision!r}: fp16 and bf16 cannot both "
            "be on; change one of them"
        )
    if half == "fp16" and "fp16" not in config:
        config["fp16"] = arguments.fp16()
    elif half == "bf16" and bf16 not in config:
        config[bf16] = {"enabled": True}


def _enabled(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("enabled") in (True, 1, "true", "True")


def read_lightning_config(tree: Source) -> Settings:
    """Read and check a configuration for Lightning.

    Raises:
        NotImplementedError: ``torch_autocast``, which needs the engine's own forward passes.
    """
    settings = read_config(tree)
    if settings["torch_autocast.enabled"]:
        raise NotImplementedError(
            f"torch_autocast.enabled=True (dtype={settings['torch_autocast.dtype']}) is not available under Lightning, "
            "which makes the forward passes itself: give precision='bf16-mixed' or '16-mixed'"
        )
    return settings


def read(tree: Mapping[str, Any], world_size: int) -> Settings:
    """Read and check a completed configuration.

    ``train_batch_size`` is only a number in the log here, because the data loader defines the batch. If it does not
    fit, it is left out with a note.
    """
    settings = read_lightning_config(tree)
    together, micro, steps = settings[TOGETHER], settings[MICRO], settings[ACCUMULATION]
    world_size = data_ranks(settings, world_size)
    if together is not None and together != micro * steps * world_size:
        settings = read_config({name: value for name, value in tree.items() if name != TOGETHER})
        settings.findings.ignore(
            TOGETHER,
            f"{together} is not {micro} samples x {steps} batches x {world_size} ranks; the data loader and "
            "accumulate_grad_batches decide",
        )
    for path in settings.values:
        if path.partition(".")[0] in ("csv_monitor", "tensorboard", "wandb"):
            settings.findings.ignore(path, "Trainer's loggers write what is measured")
    return settings


def to_plan(settings: Settings, world_size: int, numels: list[int], clip_outside: bool) -> tuple[Plan, Report]:
    """Return the plan and the report of settings from :func:`read`.

    Args:
        settings: the settings.
        world_size: number of all ranks.
        numels: elements of each parameter in the model's order.
        clip_outside: the Trainer clips instead of the step.
    """
    plan = plan_of(settings, world_size, numels)
    half = plan.precision.param_dtype is not None
    return plan.but(**({"max_norm": 0.0} if clip_outside else {}), cast_inputs=half), settings.findings


def without_effect(arguments: DeepSpeedArguments, config: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """Return changed arguments without effect, by reason.

    Arguments without effect because of the number format or the stage are in the report of :func:`to_plan`.

    Args:
        arguments: the arguments of the strategy.
        config: the DeepSpeed configuration that replaces them, or ``None``.
    """
    a = arguments
    apart = ("remote_device", *FP16)
    settings = read_config(a.to_config() if config is None else config)
    stage = settings.stage
    unused: dict[str, tuple[str, ...]] = {}
    if config is not None:
        names = tuple(name for name in names_of(DeepSpeedArguments) if name not in apart)
        unused["a DeepSpeed config was given, which says all of this"] = names
    elif not a.zero_optimization:
        offload = ("offload_optimizer", "offload_parameters", *OF_OPTIM.values(), *OF_PARAM.values())
        unused["zero_optimization=False replicates everything"] = (*OF_ZERO, *TOP, *offload)
    else:
        if not a.offload_optimizer:
            unused["offload_optimizer is False"] = ("offload_optimizer_device", "optimizer_buffer_count")
        if not a.offload_parameters:
            names = ("offload_params_device", "params_buffer_count", "params_buffer_size", "max_in_cpu")
            unused["offload_parameters is False"] = names
        if a.offload_optimizer and stage == 0:
            unused["offloading is for stages 1 to 3, and this is stage 0"] = ("offload_optimizer",)
        if a.offload_parameters and stage < 3:
            unused[f"parameters leave the device at stage 3 only, and this is stage {stage}"] = ("offload_parameters",)
        if not (a.offload_optimizer or a.offload_parameters):
            unused["nothing is offloaded"] = ("nvme_path", "pin_memory")
    home, _ = home_of_parameters(settings)
    if stage != 3:
        unused[f"it is for stage 3, and this is stage {stage}"] = ("remote_device",)
    elif a.remote_device != home:
        unused[f"parameters are made where their shards live, and {HOMES[home]}"] = ("remote_device",)
    return unused_arguments(a, unused)


def scale_without_effect(arguments: DeepSpeedArguments, completed: Mapping[str, Any]) -> str:
    """Return the changed arguments of the loss scale that ``completed`` does not use."""
    return "" if completed.get("fp16") == arguments.fp16() else listed(arguments, changed(arguments, FP16))


# ---- DeepSpeed's configuration of a strategy, shared by Trainer and Fabric.


# [Note: Edits of a configuration]
# Programs change `strategy.config` before the run, because Lightning passes it to DeepSpeed. It also contains values of
# the Trainer, which may differ in the next run. Therefore the user's configuration is kept separately. A top-level key
# of `config` that differs from the published value counts as the user's, with its whole block.
class ConfiguredByDeepSpeed:
    """The configuration of a strategy and its plan; see [Note: Edits of a configuration].

    Attributes:
        config: the configuration, with Lightning's values once it is in use. A program may change it until its model is
            sharded; later changes have no effect, with a warning.
    """

    DEEPSPEED_ENV_VAR = "PL_DEEPSPEED_CONFIG_PATH"
    ns: Namespace
    arguments: DeepSpeedArguments
    format: NumberFormat
    global_rank: int
    world_size: int
    config: dict[str, Any]

    def _choose(self, config: Any) -> None:
        """Choose the configuration, and warn about arguments without effect."""
        from_environment = read_variable(self.DEEPSPEED_ENV_VAR) if config is None else None
        chosen = chosen_config(config, from_environment, self.DEEPSPEED_ENV_VAR, self._misconfiguration)
        self._has_config = chosen is not None
        self._entries: dict[str, Any] = self.arguments.to_config() if chosen is None else chosen
        read_lightning_config(self._entries)  # raises errors now instead of when training begins
        self._show(self._entries)
        self._settings: Settings | None = None
        self._reported: set[str] = set()
        for reason, names in without_effect(self.arguments, chosen).items():
            self._warn(f"{listed(self.arguments, names)} without effect: {reason}")

    def _show(self, tree: Mapping[str, Any]) -> None:
        self.config, self._shown = copy.deepcopy(dict(tree)), copy.deepcopy(dict(tree))

    def _edits(self) -> dict[str, Any]:
        """Return the user's changes of ``config`` by key. ``None`` marks a key that was removed."""
        now, shown = load_config(self.config), self._shown
        return {name: now.get(name) for name in [*now, *(shown.keys() - now)] if now.get(name) != shown.get(name)}

    def _take_edits(self) -> None:
        """Apply the changes of ``config`` to the user's configuration."""
        edits = self._edits()
        if edits:
            self._entries = {name: value for name, value in {**self._entries, **edits}.items() if value is not None}
            self._shown = copy.deepcopy(self.config)

    @property
    def _misconfiguration(self) -> type[Exception]:
        return cast(type[Exception], self.ns.load("utilities.exceptions.MisconfigurationException"))

    def _warn(self, message: str) -> None:
        if message not in self._reported:
            self._reported.add(message)
            warn_user(message)

    @property
    def deepspeed_engine(self) -> Any:
        """Raise an error, because there is no DeepSpeed engine.

        Raises:
            AttributeError: always; the error names replacements.
        """
        raise AttributeError(
            f"{type(self).__name__} has no DeepSpeed engine; use strategy.session: optimizer.get_grad_norm(), "
            "optimizer.loss_scale, optimizer.max_norm, checkpoints.save() and checkpoints.load(). strategy.config is "
            "the configuration",
            name="deepspeed_engine",
            obj=self,
        )

    _deepspeed_engine = deepspeed_engine

    @property
    def zero_stage_3(self) -> bool:
        """Return True if the configuration has stage 3."""
        return read_config(self.config).stage == 3

    def _building(self) -> AbstractContextManager[Any]:
        """Return the context in which models are built."""
        return zero.Init() if self.zero_stage_3 else nullcontext()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return arguments of Lightning's ``DistributedSampler``: tensor- and sequence-parallel ranks get the same
        samples.
        """
        settings = self._settings or read_config(self.config)
        rank, ranks = data_parallel(settings, self.global_rank, self.world_size)
        return {"num_replicas": ranks, "rank": rank}

    @property
    def _clips_in_step(self) -> bool:
        """Return True if the configuration has a clipping norm, which replaces the Trainer's."""
        return self._entries.get(CLIPPING) not in (None, AUTO)

    def _translated(self, settings: Settings, module: Any) -> tuple[Plan, Report]:
        numels = [param.numel() for param in module.parameters()]
        plan, report = to_plan(settings, self.world_size, numels, clip_outside=not self._clips_in_step)
        if get_z3_leaf_modules(module):
            plan = plan.but(same_order=False)  # children of leaf modules run in a different order on each rank
        if self.format.dtype is torch.float64:
            if plan.precision.param_dtype is not None:
                raise self._misconfiguration(
                    f"precision={self.format.name!r}, but the DeepSpeed config enables {plan.precision.param_dtype}: "
                    "change one of them"
                )
            wide = torch.float64
            plan = plan.but(param_dtype=wide, buffer_dtype=wide, master_weights=False, cast_inputs=True)
        return plan, report

    def _tell(self, report: Report) -> None:
        quiet = frozenset() if self._has_config else quiet_paths(self.arguments)
        reported = Report(report.used, {k: v for k, v in report.ignored.items() if k not in quiet}, report.notes)
        if (reported.ignored or reported.notes) and str(reported) not in self._reported:
            self._reported.add(str(reported))
            reported.warn()
