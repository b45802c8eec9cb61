"""The functions of ``torch.distributed.checkpoint.state_dict`` for models and optimizers that are sharded here.

They return and accept what torch's functions do for ``fully_shard``: names with full tensors or ``DTensor``s, which
``torch.distributed.checkpoint.save`` and ``load`` write and read. Torch's own functions only know its wrappers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.core.base.validate import as_mapping
from shardwise.core.checkpoint.formats.dcp import flattened
from shardwise.core.comm import collectively
from shardwise.core.engine.checkpoint_state import EngineLocalState
from shardwise.core.engine.module import ShardedModule
from shardwise.core.engine.optimizer import ShardedOptimizer

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def get_model_state_dict(
    model: torch.nn.Module, *, submodules: Any = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return weights (fp32 masters if they exist) and buffers by name. Collective.

    Args:
        model: ``session.module``.
        submodules: must not be set.
        options: ``full_state_dict`` returns full tensors; with ``cpu_offload`` only on rank 0, in host memory.
            Otherwise this rank's rows of each parameter as a ``DTensor`` over all ranks, and full buffers.

    Raises:
        TypeError: ``model`` is not sharded here.
    """
    chosen, module = _options(options, submodules), _module(model)
    params = dict(module.unwrap().named_parameters(remove_duplicate=False))
    frozen = {name for name, param in params.items() if not param.requires_grad}
    form = _Form(module, chosen)
    values = {
        name: form(value, divided=name in params)
        for name, value in module.full_state()
        if not (chosen.ignore_frozen_params and name in frozen)
    }
    return form.for_rank({name: values[name] for name in module.state_layout() if name in values})


def get_optimizer_state_dict(
    model: torch.nn.Module,
    optimizers: Optimizers,
    *,
    submodules: Any = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return state and param groups of all ``optimizers`` by parameter names, without loss scale. Collective.

    Raises:
        RuntimeError: an optimizer has no state yet.
        TypeError: a model or optimizer is not sharded here.
    """
    chosen, module = _options(options, submodules), _module(model)
    form = _Form(module, chosen)
    trained = {name for name, param in module.unwrap().named_parameters() if param.requires_grad}
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer, names in _with_names(module, optimizers):
        saved = optimizer.state_dict()
        shapes = module.state_layout()
        if not saved[STATE]:
            raise RuntimeError(
                f"{type(optimizer.optimizer).__name__} has no state yet, so there is nothing to save or to load into: "
                "session.checkpoints.load(directory) reads a directory of torch.distributed.checkpoint as it is"
            )
        flat = [name for group in names for name in group]
        for number, values in saved[STATE].items():
            shape = shapes[flat[number]].shape
            state[flat[number]] = {key: form(each, divided=_like(each, shape)) for key, each in values.items()}
        # A parameter that was never stepped (unused, or empty) gets an empty entry, so that it is not missing.
        state |= {name: {} for name in flat if name in trained and name not in state}
        for group, own in zip(saved[GROUPS], names, strict=True):
            groups.append({**group, PARAMS: list(own)})
    full = {STATE: state, GROUPS: groups}
    return form.for_rank(flattened(full) if chosen.flatten_optimizer_state_dict else full)


def get_state_dict(
    model: torch.nn.Module, optimizers: Optimizers, *, submodules: Any = None, options: StateDictOptions | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state of model and optimizers. Collective."""
    weights = get_model_state_dict(model, submodules=submodules, options=options)
    return weights, get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options)


def set_model_state_dict(
    model: torch.nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Load weights, full tensors or ``DTensor``s, into shards and masters. Collective.

    Raises:
        RuntimeError: names or shapes do not fit; nothing was changed.
    """
    chosen, module = _options(options), _module(model)
    state = _broadcast(module, model_state_dict, "the model") if chosen.broadcast_from_rank0 else model_state_dict
    return module.load_state_dict({name: _full_tensor(value) for name, value in state.items()}, strict=chosen.strict)


def set_optimizer_state_dict(
    model: torch.nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load state and options of groups, nested or flattened. Collective.

    Raises:
        RuntimeError: a trained parameter has no entry (``strict``), or a group has no options.
    """
    chosen, module = _options(options), _module(model)
    full = _broadcast(module, optim_state_dict, "the optimizers") if chosen.broadcast_from_rank0 else optim_state_dict
    trained = {name for name, param in module.unwrap().named_parameters() if param.requires_grad}
    for optimizer, names in _with_names(module, optimizers):
        nested = full if STATE in full else _nested(full, [n for group in names for n in group])
        flat = [name for group in names for name in group]
        missing = [name for name in flat if name in trained and name not in nested[STATE]]
        if missing and chosen.strict:
            raise RuntimeError(
                f"no optimizer state for {', '.join(missing[:3])} ({len(missing)} of {len(flat)}): give that of the "
                "same model, or StateDictOptions(strict=False)"
            )
        state = {
            number: {key: _full_tensor(value) for key, value in nested[STATE][name].items()}
            for number, name in enumerate(flat)
            if nested[STATE].get(name)
        }
        groups, at = [], 0
        for own in names:
            there = next((group for group in nested[GROUPS] if set(own) & set(group[PARAMS])), None)
            if there is None and own:
                raise RuntimeError(f"no param group of the state has {own[0]}: give the state of the same optimizer")
            groups.append({**(there or {}), PARAMS: list(range(at, at + len(own)))})
            at += len(own)
        optimizer.load_state_dict({STATE: state, GROUPS: groups})


def set_state_dict(
    model: torch.nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Load the state of model and optimizers. Collective."""
    outcome = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return outcome


# ---- shared by models and optimizers


def _options(options: StateDictOptions | None, submodules: Any = None) -> StateDictOptions:
    if submodules:
        raise NotImplementedError(f"submodules={submodules!r:.60}: take those names of the whole model's state")
    chosen = options or StateDictOptions()
    if chosen.broadcast_from_rank0 and not chosen.full_state_dict:
        raise ValueError(
            f"broadcast_from_rank0=True with full_state_dict={chosen.full_state_dict}: give full_state_dict=True"
        )
    return chosen


def _module(model: torch.nn.Module) -> ShardedModule:
    if not isinstance(model, ShardedModule):
        raise TypeError(f"model is a {type(model).__name__}: give session.module, or use torch's own function")
    return model


def _with_names(module: ShardedModule, chosen: Optimizers) -> list[tuple[ShardedOptimizer, list[list[str]]]]:
    """Return each optimizer with the names of its parameters by group."""
    optimizers = [chosen] if isinstance(chosen, torch.optim.Optimizer) else list(chosen)
    for each in optimizers:
        if not isinstance(each, ShardedOptimizer):
            raise TypeError(f"an optimizer is a {type(each).__name__}: give session.optimizer, or session.optimizers")
    own = [each for each in optimizers if isinstance(each, ShardedOptimizer)]
    local_state = EngineLocalState(module.sharded_values, own)
    return [(each, local_state.group_names(each)) for each in own]


class _Form:
    """Converts full tensors: unchanged, on the host, or this rank's rows."""

    def __init__(self, module: ShardedModule, options: StateDictOptions) -> None:
        self._full, self._host = options.full_state_dict, options.cpu_offload
        mesh = module.sharded_values.shards.mesh
        _check_everybody(module)
        self._first, self._device = mesh.is_rank0, mesh.device
        kind = "cpu" if self._host else mesh.device.type
        self._mesh: DeviceMesh | None = None
        if not self._full and dist.is_initialized():
            self._mesh = init_device_mesh(kind, (dist.get_world_size(),))

    def __call__(self, value: Any, divided: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        if self._full and self._host and not self._first:
            return None
        value = value.detach()
        if self._full or self._mesh is None or not divided or not value.dim():
            return value.to("cpu" if self._host or not value.dim() else self._device, copy=True)
        rows = value.tensor_split(_row_ends(value.shape[0], self._mesh.size()))[self._mesh.get_local_rank()]
        local = rows.to("cpu" if self._host else self._device, copy=True).contiguous()
        options = {"run_check": False, "shape": value.shape, "stride": value.contiguous().stride()}
        return DTensor.from_local(local, self._mesh, [Shard(0)], **options)

    def for_rank(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state``, or nothing on ranks that get no state."""
        return {} if self._full and self._host and not self._first else state


def _check_everybody(module: ShardedModule) -> None:
    """Raise if the model does not use all ranks of the job, as torch's functions assume."""
    ranks, job = (
        module.sharded_values.shards.mesh.mesh_group.size,
        dist.get_world_size() if dist.is_initialized() else 1,
    )
    if ranks != job:
        raise NotImplementedError(
            f"DCP's state functions for a model of {ranks} of {job} ranks are not available: save it by "
            "session.checkpoints.save(directory), or take session.module.state_dict()"
        )


def _row_ends(rows: int, parts: int) -> list[int]:
    """Return the ends of the parts of ``torch.chunk``; parts after the last row are empty."""
    each = -(-rows // parts)
    return [min(each * part, rows) for part in range(1, parts)]


def _like(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape and value.dim() > 0


def _full_tensor(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _broadcast(module: ShardedModule, state: Mapping[str, Any], into: str) -> Mapping[str, Any]:
    """Return rank 0's state on all ranks.

    Raises:
        TypeError: the state on rank 0 is not a mapping.
        PeerError: another rank raised such an error.
    """
    _check_everybody(module)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return state
    mesh, box = module.sharded_values.shards.mesh, list[Any]()
    with mesh.doing(f"loading rank 0's state into {into}"):
        # This fails first if rank 0 has no valid state or a rank is missing; the program's own group would wait
        # instead.
        with collectively(mesh.mesh_group, f"loading {into}"):
            advice = "a dict with broadcast_from_rank0=True"
            box.append(dict(as_mapping("the state on rank 0", state, advice)) if mesh.is_rank0 else None)
        dist.broadcast_object_list(box, 0)
    received: Mapping[str, Any] = box[0]
    return received


def _nested(flat: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    groups = []
    for name in names:
        own, options = f"{STATE}.{name}.", f"{GROUPS}.{name}."
        entries = {key.removeprefix(own): value for key, value in flat.items() if key.startswith(own)}
        state |= {name: entries} if entries else {}
        own_options = {k.removeprefix(options): v for k, v in flat.items() if k.startswith(options)}
        # In the flattened form, an empty state has no entries.
        state |= {name: {}} if own_options and not entries else {}
        groups.append(own_options | {PARAMS: [name]})
    return {STATE: state, GROUPS: groups}
