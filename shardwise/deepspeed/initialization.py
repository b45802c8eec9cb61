"""``initialize``, which creates the engine of a model and a DeepSpeed configuration, and ``tp_model_init``."""

from __future__ import annotations

import argparse
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from shardwise.core.base.torch_internals import point
from shardwise.core.base.validate import Names, check_type, integer, short_repr
from shardwise.core.base.warnings import warn_user
from shardwise.core.comm import collectively, ranks_of
from shardwise.core.deferred.construction import paused
from shardwise.core.mesh import default_device, init_distributed
from shardwise.core.mesh.launch import check_known_ranks
from shardwise.deepspeed.backward_passes import drop_after_passes
from shardwise.deepspeed.config import AssertedError, Settings, load_config, read_config
from shardwise.deepspeed.config_object import required_batch
from shardwise.deepspeed.engine import DeepSpeedEngine
from shardwise.deepspeed.groups import groups_of, mesh_of, remember_groups
from shardwise.deepspeed.leaf_modules import get_z3_leaf_modules
from shardwise.deepspeed.monitors import Monitor
from shardwise.deepspeed.optimizers import give_names, make_optimizer, wide_states
from shardwise.deepspeed.parameter_attributes import mark_session
from shardwise.deepspeed.plan import TENSOR_SIZES, data_ranks, parallel_sizes, plan_of
from shardwise.deepspeed.schedules import make_schedule
from shardwise.deepspeed.zero import forget, remember, sessions_of
from shardwise.plan import Plan
from shardwise.session import Session, build

OptimizerSource = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]
Result = tuple[DeepSpeedEngine, torch.optim.Optimizer | None, DataLoader[Any] | None, Any]


@paused()
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerSource | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> Result:
    """Shard a model as a DeepSpeed configuration describes. Collective.

    Args:
        args: an object whose ``deepspeed_config`` (or ``deepscale_config``, its first name) is the configuration, if
            ``config`` is not given.
        model: any module, including one built under ``zero.Init``. An existing engine of the model ends, with a
            warning.
        optimizer: any element-wise torch optimizer over the model's parameters, or a callable that makes one from
            ``model_parameters``. It replaces the configuration's optimizer.
        model_parameters: parameters or param groups for the optimizer; by default all trainable parameters.
        training_data: a dataset; the engine makes a data loader of micro-batches for it.
        lr_scheduler: a scheduler of the optimizer, or a callable that makes one. It replaces the configuration's.
        distributed_port: no effect; the launcher's environment variables define the rendezvous.
        mpu: an object with ``get_data_parallel_group()``, the ranks that shard the model, and with tensor parallelism
            ``get_model_parallel_group()``, over which gradient norms and overflow are combined.
        dist_init_required: ``False``: do not create a process group.
        collate_fn: ``collate_fn`` of the data loader.
        config: a dict, which is not changed, or the path of a JSON or Hjson file; ``config_params`` is its older name.
        mesh_param: ``(data-parallel size, sequence-parallel size)``, as the configuration's ``data_parallel_size`` and
            ``sequence_parallel_size``.
        config_params: DeepSpeed's older name of ``config``.

    Returns:
        ``(engine, optimizer, data loader or None, scheduler or None)``.

    Raises:
        ValueError: no model, no configuration or several, an invalid configuration, or one that contradicts
            ``tp_model_init``.
        NotImplementedError: the configuration or ``mpu`` asks for something that is not available.
        RuntimeError: accelerate was initialized without the other ranks, so each rank would get all batches.

    Examples:
        >>> import shardwise.deepspeed as deepspeed
        >>> config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
        >>> config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
        >>> engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config=config)
        >>> loss = engine(inputs.to(engine.device)).square().mean()
        >>> loss = engine.backward(loss)
        >>> engine.step()
    """
    if model is None:
        raise AssertedError(f"model={model}: give the module to train")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={short_repr(model)}: give the module to train, a torch.nn.Module")
    if isinstance(model, DeepSpeedEngine):
        raise TypeError(
            f"model is already a {type(model).__name__} of a {type(model.module).__name__}: call initialize() once, "
            "with the model's optimizer"
        )
    if dist_init_required is not False:
        init_distributed()
    state = sys.modules.get("accelerate.state")
    if state is not None and state.AcceleratorState._shared_state:  # there is an Accelerator, which divides batches
        without_gpu = "give TrainingArguments(use_cpu=True), or call accelerate.PartialState(cpu=True) first"
        check_known_ranks("accelerate", state.PartialState().num_processes, without_gpu)
    group, model_axis = groups_of(mpu, model)
    ranks = len(ranks_of("group", group))
    settings = read_config(with_tp_size(_with_mesh(_chosen(args, config, config_params), mesh_param), model))
    if mpu is not None and max(parallel_sizes(settings)) > 1:
        raise ValueError(
            f"mpu={mpu!r:.80} with tensor_parallel.autotp_size, sequence_parallel_size = {parallel_sizes(settings)}: "
            "an mpu is for a program that divides the model itself; give one of them"
        )
    batch = required_batch(settings, data_ranks(settings, ranks))
    plan = _plan(settings, ranks, model)
    chosen = _optimizer(settings, model, optimizer, model_parameters)
    schedule = _schedule(settings, chosen, lr_scheduler)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        settings.findings.warn()
    _take_back(model)
    mesh = mesh_of(plan, default_device(), group, model_axis)
    with collectively(mesh.mesh_group, "opening the monitors"):  # a directory may be missing on the rank that writes
        monitor = Monitor(settings)
    names = Names("engine.session.module", "engine.step()", "engine.save_checkpoint(directory)")
    session = build(model, chosen, plan, mesh, names=names)
    remember(session)
    remember_groups(session, mpu)
    mark_session(session, settings.stage)
    drop_after_passes(session, settings)
    engine = DeepSpeedEngine(session, settings, batch, schedule, monitor)
    give_names(engine)
    engine.collate_fn = collate_fn
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, engine.optimizer, engine.training_dataloader, schedule


def _plan(settings: Settings, ranks: int, model: nn.Module) -> Plan:
    plan = plan_of(settings, ranks, [p.numel() for p in model.parameters()])
    # Children of leaf modules run in a different order on each rank.
    return plan.but(same_order=False) if get_z3_leaf_modules(model) else plan


def _chosen(args: Any, config: Any, config_params: Any) -> Any:
    """Return the one given configuration."""
    places = {"config": config, "config_params": config_params if config is None else None}
    places["args.deepspeed_config"] = getattr(args, "deepspeed_config", None)
    places["args.deepscale_config"] = getattr(args, "deepscale_config", None)  # the name before 2020
    sources = {name: value for name, value in places.items() if value is not None}
    if len(sources) != 1:
        raise ValueError(f"{len(sources)} configurations given: {sorted(sources)}; give one, as config or in args")
    return next(iter(sources.values()))


def _with_mesh(config: Any, mesh_param: Any) -> Any:
    """Return the configuration with the sizes of ``mesh_param``.

    Raises:
        ValueError: ``mesh_param`` is not a pair of sizes, or the configuration has other sizes.
    """
    if mesh_param is None:
        return config
    if not isinstance(mesh_param, list | tuple) or len(mesh_param) != 2:
        raise ValueError(f"{mesh_param=!r:.80}: give (data-parallel size, sequence-parallel size)")
    tree = load_config(config)
    for name, size in zip(("data_parallel_size", "sequence_parallel_size"), mesh_param, strict=True):
        if tree.setdefault(name, size) != size:
            raise ValueError(f"{mesh_param=} and {name}={tree[name]!r:.80} of the configuration: give the same")
    return tree


def _optimizer(
    settings: Settings, model: nn.Module, source: OptimizerSource | None, parameters: Iterable[Any] | None
) -> torch.optim.Optimizer | None:
    name, findings = settings["optimizer.type"], settings.findings
    if source is None and name is None:
        return None
    trained = [p for p in model.parameters() if p.requires_grad] if parameters is None else list(parameters)
    if source is None:
        return make_optimizer(name, trained, settings["optimizer.params"] or {}, model, wide_states(settings))
    for path in ("optimizer.type", "optimizer.params"):
        if settings.has(path):
            findings.ignore(path, "an optimizer was given to initialize")
    if not isinstance(source, torch.optim.Optimizer) and not callable(source):
        raise TypeError(f"optimizer={short_repr(source)}: give a torch.optim.Optimizer, or a function that makes one")
    made = source if isinstance(source, torch.optim.Optimizer) else source(trained)
    if wide_states(settings) is False and getattr(made, "fp32_optimizer_states", False):
        raise AssertedError(
            f"bf16.bf16_optimizer_states={settings['bf16.bf16_optimizer_states']} with a {type(made).__name__} whose "
            "moments are fp32: give it fp32_optimizer_states=False"
        )
    fraction = getattr(made, "nvme_offload_fraction", 0.0)
    if fraction:
        raise ValueError(
            f"nvme_offload_fraction={fraction} of {type(made).__name__}: give "
            "zero_optimization.offload_optimizer={'device': 'nvme', 'ratio': ...} in the configuration instead"
        )
    return made


def _schedule(settings: Settings, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> Any:
    name = settings["scheduler.type"]
    if scheduler is not None:
        for path in ("scheduler.type", "scheduler.params"):
            if settings.has(path):
                settings.findings.ignore(path, "a scheduler was given to initialize")
        return scheduler(optimizer) if callable(scheduler) and not hasattr(scheduler, "step") else scheduler
    if name is None:
        return None
    if optimizer is None:
        raise ValueError(f"scheduler.type={name!r} without an optimizer: name one, or give one to initialize")
    return make_schedule(name, optimizer, settings["scheduler.params"] or {})


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments ``--deepspeed`` and ``--deepspeed_config``.

    Args:
        parser: the program's parser, which is changed.

    Returns:
        The parser.

    Examples:
        >>> import argparse
        >>> import shardwise.deepspeed as deepspeed
        >>> parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
        >>> arguments = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="use the configuration")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of the JSON configuration")
    return parser


@torch.no_grad()
def _take_back(model: nn.Module) -> None:
    """End the existing engine of ``model``: its parameters become full and plain again, in the masters' dtype.

    The optimizer state is lost, as in DeepSpeed. Collective if there is an engine. A model with tensor parallelism
    stays as it is, and sharding it again is an error.
    """
    for session, _ in sessions_of({id(param) for param in model.parameters()}):
        if session.closed or session.mesh.tensor.size > 1:
            continue
        if session.mesh.rank == 0:
            warn_user(
                f"initialize() of a {type(model).__name__} that already has an engine: that engine and its optimizer "
                f"state end here{'. Call engine.destroy() first to avoid this warning' * session.resident}"
            )
        _end(session)


def _end(session: Session) -> None:
    module, device = session.module.unwrap(), session.mesh.device
    state = session.module.state_dict()
    session.close()
    session.mesh.close()
    forget(session)
    for name, param in module.named_parameters():
        param.grad = None
        point(param, state[name].to(device, copy=True))


# ---- ``tp_model_init``: the tensor-parallel size of a model, which ``initialize`` applies.


_TP_SIZES: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, tp_group: Any = None) -> Any:
    """Return ``model`` unchanged; ``initialize`` applies tensor parallelism.

    Args:
        model: the module for ``initialize``, or a part of it.
        tp_size: number of tensor-parallel ranks, unless the configuration has ``tensor_parallel.autotp_size``.
        dtype, config: no effect; ``fp16`` and ``bf16`` of the configuration of ``initialize`` decide.
        tp_group: not available.

    Raises:
        NotImplementedError: ``tp_group``.
    """
    check_type("model", model, nn.Module, "the module that initialize will be given")
    if tp_group is not None:
        raise NotImplementedError(f"{tp_group=!r:.80} is not available; leave it out: neighboring ranks form groups")
    _TP_SIZES[model] = integer("tp_size", tp_size, 1, what="a number of ranks,")
    return model


def with_tp_size(config: Any, model: nn.Module) -> Any:
    """Return the configuration with the tensor-parallel size that :func:`tp_model_init` set for ``model`` or its parts.

    Raises:
        ValueError: the configuration has another size, or parts of ``model`` have different ones.
    """
    sizes = {_TP_SIZES[module] for module in model.modules() if module in _TP_SIZES}
    if not sizes:
        return config
    settings = read_config(config)
    if any(settings.has(path) for path in TENSOR_SIZES):
        sizes.add(parallel_sizes(settings)[0])
    if len(sizes) > 1:
        raise ValueError(
            f"tp_size of tp_model_init and tensor_parallel.autotp_size of the configuration are {sorted(sizes)}: give "
            "the same"
        )
    tree = load_config(config)
    return tree | {"tensor_parallel": {**(tree.get("tensor_parallel") or {}), "autotp_size": sizes.pop()}}
