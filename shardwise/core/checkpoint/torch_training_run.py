"""Runs that torch trains without our engine: one process, ``DistributedDataParallel``, ``fully_shard``.

A rank holds its module's tensors: full ones, or the local part of a ``DTensor`` that is sharded along its first
dimension.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.core.base.state_dict_names import (
    StateNames,
    call_load_hooks,
    hand_back,
    is_extra,
    keeper,
    load_entries,
    takers,
    with_load_hooks,
)
from shardwise.core.base.torch_internals import offset_of_part
from shardwise.core.checkpoint.training_run import Ranks, Scaler
from shardwise.core.comm import Activity
from shardwise.core.engine.checkpoint_state import Fill, Fragment, FragmentBlock, FragmentPlan, Stored, TensorShape
from shardwise.core.mesh.mesh import CALLS
from shardwise.core.optim.nested_state import flat, nested
from shardwise.core.optim.state_form import constructed_state


class TorchRunOptimizer:
    """A torch optimizer and its loss scale."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        self.index, self.optimizer = 0, optimizer
        self.scaler: Scaler | None = None if scaler is None else _TorchScale(scaler)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the optimizer's own ``zero_grad``."""
        self.optimizer.zero_grad(set_to_none=set_to_none)


class _TorchScale:
    """Torch's loss scale with the state of ours, so that each can load the other's."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, float]:
        return {
            "scale": float(self._scaler.get_scale()),
            "overflows": 0.0,
            "good_steps": float(self._scaler._get_growth_tracker()),
        }

    def load_state_dict(self, state: dict[str, float], /) -> None:
        own = self._scaler
        own.load_state_dict(
            {
                "scale": float(state["scale"]),
                "growth_factor": own.get_growth_factor(),
                "backoff_factor": own.get_backoff_factor(),
                "growth_interval": own.get_growth_interval(),
                "_growth_tracker": int(state["good_steps"]),
            }
        )


class TorchRun:
    """One module, with at most one optimizer.

    Args:
        module: the user's own; ``None`` if only the optimizer is known: its parameters are ``#0``, ``#1``, ...
        optimizer: the user's own.
        scaler: torch's loss scale.
        ranks: the group for messages between all ranks. ``None`` is the program's default group, which a time-out ends.
    """

    def __init__(
        self,
        module: nn.Module | None,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        # Weak: a dictionary of runs by module must not keep the module alive.
        self._module = None if module is None else weakref.ref(module)
        self.optimizers = () if optimizer is None else (TorchRunOptimizer(optimizer, scaler),)
        self._ranks = ranks
        self._activity = Activity() if ranks is None else ranks.activity

    members = None
    """All ranks."""

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @property
    def size(self) -> int:
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @property
    def data_rank(self) -> int:
        """Return the rank, because every rank sees different data."""
        return self.rank

    @property
    def device(self) -> torch.device:
        parameters = self.local_state().parameters
        return parameters[0].device if parameters else torch.device("cpu")

    def gather(self, value: object, /) -> list[Any]:
        """Return every rank's JSON-able ``value``. Collective."""
        if self._ranks is None or self._ranks.outdated:
            self._ranks = Ranks(own=False, activity=self._activity)
        return self._ranks.gather(value)

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Return a context whose activity is named in errors of ranks that are out of sync."""
        return self._activity.doing(what, CALLS)

    def world(self) -> dict[str, int]:
        """Return the number of ranks."""
        return {"size": self.size}

    def settle(self) -> None:
        """Do nothing: no work is pending between two steps."""

    def local_state(self) -> TorchLocalState:
        """Return the module's and the optimizer's tensors."""
        module = None if self._module is None else self._module()
        if self._module is not None and module is None:
            raise RuntimeError(f"the module of this run of {self.size} ranks is gone; keep it as long as it is trained")
        return TorchLocalState(module, self.optimizers, self.rank, self.size)

    def replaced(self, parameters: bool, complete: bool, optimizers: Collection[int]) -> AbstractContextManager[None]:
        """Return an empty context: after an interrupt the program loads again."""
        return nullcontext()

    @contextmanager
    def adopting(self, optimizers: Collection[int]) -> Iterator[None]:
        """Drop gradients."""
        for each in self.optimizers:
            each.zero_grad()
        yield


class TorchLocalState:
    """The tensors of a module and its optimizer that this rank holds.

    See :class:`shardwise.core.checkpoint.training_run.LocalState`.

    Raises:
        ValueError: the optimizer has a parameter that is not the module's, or a tensor is divided in another way than
            along its first dimension.
    """

    other_shapes = True
    """State need not be element-wise."""

    def __init__(self, module: nn.Module | None, trainers: Sequence[TorchRunOptimizer], rank: int, size: int) -> None:
        self.optimizers = tuple(trainers)
        self.module, self._rank, self._size = module, rank, size
        self.buffers_and_extra: dict[str, Any] = {}
        if module is None:
            trained = dict.fromkeys(p for each in trainers for group in each.param_groups for p in group["params"])
            self.parameters: list[torch.Tensor] = list(trained)
            self.names: list[tuple[str, ...]] = [(f"#{number}",) for number in range(len(trained))]
        else:
            # fully_shard may have unsharded parameters registered until state_dict() is called
            module.state_dict(keep_vars=True)
            own = list(module.parameters())
            self.parameters = list(own)
            state_names = StateNames.read(module, own)
            every: dict[int, list[str]] = {}
            for name, parameter in module.named_parameters(remove_duplicate=False):
                every.setdefault(id(parameter), []).append(name)
            self.names = [tuple(state_names.of_parameter.get(i, every[id(p)])) for i, p in enumerate(own)]
            self.buffers_and_extra = dict(state_names.buffers_and_extra)
        self._name = {id(p): names[0] for p, names in zip(self.parameters, self.names, strict=True)}

    # ---- names and shapes

    def aliases(self) -> dict[str, str]:
        """Return other names of tied parameters with the name that is saved."""
        return {other: names[0] for names in self.names for other in names[1:]}

    def model_shapes(self) -> dict[str, TensorShape]:
        """Return the shape of every parameter and tensor buffer by its saved name."""
        tensors = {names[0]: p for p, names in zip(self.parameters, self.names, strict=True)} | self.buffers()
        return {name: TensorShape(tuple(value.shape), value.dtype) for name, value in tensors.items()}

    def compute_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype in which each parameter is used."""
        return {names[0]: p.dtype for p, names in zip(self.parameters, self.names, strict=True)}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return tensors of the module's state that are not parameters."""
        return {name: value for name, value in self.buffers_and_extra.items() if not is_extra(name, value)}

    def extra_names(self) -> list[str]:
        """Return the names of :meth:`extra`."""
        return list(self.extra())

    def owns(self, _name: str) -> bool:
        """Return True if this rank saves the value of a buffer or of extra state."""
        return self._rank == 0

    def extra(self) -> dict[str, Any]:
        """Return the values of ``get_extra_state``, and others that hooks add to the state."""
        own = self.buffers()
        return {name: value for name, value in self.buffers_and_extra.items() if name not in own}

    def group_names(self, optimizer: TorchRunOptimizer, /) -> list[list[str]]:
        """Return the saved names of the parameters, by param group."""
        for number, group in enumerate(optimizer.param_groups):
            strange = [tuple(p.shape) for p in group["params"] if id(p) not in self._name]
            if strange:
                raise ValueError(
                    f"group {number} of the optimizer has parameters of shapes {strange} that the model "
                    "does not have; give the optimizer that was boosted with this model"
                )
        return [[self._name[id(p)] for p in group["params"]] for group in optimizer.param_groups]

    def trained(self, optimizer: TorchRunOptimizer, /) -> set[str]:
        """Return the saved names of all parameters, because each may have state."""
        return {name for names in self.group_names(optimizer) for name in names}

    def small_state(self, optimizer: TorchRunOptimizer, /) -> dict[str, dict[str, Any]]:
        """Return by parameter the state that is not element-wise: numbers, and tensors of other shapes."""
        self.group_names(optimizer)  # raises for parameters that the model does not have
        small: dict[str, dict[str, Any]] = {}
        for parameter, state in optimizer.state.items():
            own = {key: value for key, value in flat(state).items() if not _is_element_wise(value, parameter, key)}
            for key, value in own.items():
                if isinstance(value, DTensor):
                    raise ValueError(
                        f"optimizer state {key!r} of {self._name[id(parameter)]} is sharded and has shape "
                        f"{tuple(value.shape)}, not the parameter's; only element-wise state can be saved"
                    )
            small[self._name[id(parameter)]] = own
        return small

    # ---- saving

    def plan(self, most_bytes: int, shared: bool = True) -> FragmentPlan:
        """Return the values that this rank writes. With ``shared`` replicas divide the work; otherwise the first writes
        all."""
        full: list[FragmentBlock] = []
        divided: list[FragmentBlock] = []
        place = (0, 1)
        for name, tensor in self._tensors():
            local, start = _local(tensor, name)
            if isinstance(tensor, DTensor):
                place = _replica(tensor)
            if local.numel():
                fragment = Fragment(name, tuple(tensor.shape), tensor.dtype, start, local.numel())
                block = FragmentBlock(nullcontext, ((fragment, partial(_return, local)),))
                (divided if isinstance(tensor, DTensor) else full).append(block)

        def plan(blocks: list[FragmentBlock], replica: int, replicas: int) -> FragmentPlan:
            if shared:
                return FragmentPlan(blocks, most_bytes, replica, replicas)
            return FragmentPlan(blocks if replica == 0 else [], most_bytes, 0, 1)

        return plan(divided, *place).extend(plan(full, self._rank, self._size))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter, names in zip(self.parameters, self.names, strict=True):
            yield f"model/{names[0]}", parameter
            for each in self.optimizers:
                for key, value in flat(each.state.get(parameter, {})).items():
                    if _is_element_wise(value, parameter, key):
                        yield f"optimizer/{each.index}/{names[0]}/{key}", value

    # ---- loading

    @torch.no_grad()
    def load_into(
        self,
        fill: Fill,
        stored: Callable[[str], str | None],
        state_of: Callable[[str], dict[str, Any] | None],
        optimizers: Collection[int],
    ) -> None:
        """Load parameters and optimizer state, as
        :meth:`shardwise.core.engine.checkpoint_state.EngineLocalState.load_into` does."""
        for parameter, names in zip(self.parameters, self.names, strict=True):
            name = stored(names[0])
            if name is not None:
                _fill(fill, name, parameter)
        for each in self.optimizers:
            if each.index in optimizers:
                self._put_state(each, fill, state_of)

    def _put_state(
        self, trainer: TorchRunOptimizer, fill: Fill, state_of: Callable[[str], dict[str, Any] | None]
    ) -> None:
        group_of = {p: group for group in trainer.param_groups for p in group["params"]}
        ordered = dict.fromkeys(p for group in trainer.param_groups for p in group["params"])
        state: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(ordered):
            entry = state_of(self._name[id(parameter)])
            if entry is None:
                fresh = constructed_state(trainer.optimizer, group_of[parameter], parameter)
                state |= {number: fresh} if fresh else {}
                continue
            own, current = dict[str, Any](), flat(trainer.state.get(parameter, {}))
            for key, value in entry.items():
                if isinstance(value, Stored):
                    own[key] = there = _room(current.get(key), parameter, value)
                    _fill(fill, value.name, there)
                else:
                    own[key] = value.clone() if isinstance(value, torch.Tensor) else value
            state[number] = nested(own)
        groups = trainer.optimizer.state_dict()["param_groups"]
        trainer.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def check_buffers_and_extra(self, values: dict[str, Any]) -> None:
        """Check buffers and extra state before anything is changed.

        Raises:
            ValueError: a hook of the module saves a tensor, but no hook loads it.
        """
        self._check_loadable(values, [name for name, chain in self._made(values).items() if not chain])

    def _check_loadable(self, values: dict[str, Any], refused: Sequence[str]) -> None:
        lost = [name for name in refused if not _same(values[name], self.buffers_and_extra[name])]
        if lost:
            raise ValueError(
                f"{', '.join(lost)}: a hook of the model saves this value, and no hook loads it; add one that does"
            )

    def _made(self, values: dict[str, Any]) -> dict[str, list[str]]:
        """Return the values that hooks of the module created, each with the modules that may have a hook to load it."""
        if self.module is None:
            return {}
        modules, registered = dict(self.module.named_modules()), {id(buffer) for buffer in self.module.buffers()}

        def is_made(name: str) -> bool:
            value = self.buffers_and_extra[name]
            return not is_extra(name, value) and keeper(modules, name) is None and id(value) not in registered

        return {name: takers(modules, name) for name in values if is_made(name)}

    @torch.no_grad()
    def load_buffers_and_extra(self, values: dict[str, Any]) -> None:
        """Load buffers and extra state by name.

        Raises:
            ValueError: see :meth:`check_buffers_and_extra`.
        """
        if self.module is None:
            return
        modules, made = dict(self.module.named_modules()), self._made(values)
        loaded = {name: value for name, value in values.items() if name not in made}
        load_entries(modules, self.buffers_and_extra, loaded, {chain[0] for chain in made.values() if chain})
        self._check_loadable(values, hand_back(modules, values, made))

    def loaded(self, missing: list[str], unexpected: list[str]) -> None:
        """Call the module's load hooks, as torch does."""
        for _, module in with_load_hooks(self.module) if self.module is not None else ():
            call_load_hooks(module, missing, unexpected)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.to(other.device, other.dtype), other)


def _is_element_wise(value: object, parameter: torch.Tensor, key: str) -> bool:
    # The step count of a 0-dim parameter has the same shape as the parameter.
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and (value.dim() > 0 or key != "step")


def _return(values: torch.Tensor, _: Any) -> torch.Tensor:
    return values


def _local(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, int]:
    """Return this rank's part and its start in the flattened tensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    shards = [placement for placement in tensor.placements if not isinstance(placement, Replicate)]
    if len(shards) > 1 or any(not isinstance(each, Shard) or each.dim != 0 for each in shards):
        raise ValueError(f"{name} is sharded as {tensor.placements}; shard it along the first dimension only")
    local = tensor.to_local().detach()
    offset = offset_of_part(tensor)
    return local, offset[0] * tensor.shape[1:].numel() if offset else 0


def _replica(tensor: DTensor) -> tuple[int, int]:
    """Return this rank's number among its replicas, and their count."""
    replica, replicas = 0, 1
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            size = tensor.device_mesh.size(dimension)
            replica, replicas = replica * size + tensor.device_mesh.get_local_rank(dimension), replicas * size
    return replica, replicas


def _fill(fill: Fill, name: str, tensor: torch.Tensor) -> None:
    local, start = _local(tensor, name)
    if not local.numel():
        return
    if local.is_contiguous():
        fill(name, start, local.view(-1))
        return
    flat = local.reshape(-1).clone()  # some elements may stay unchanged
    fill(name, start, flat)
    local.copy_(flat.view(local.shape))


def _room(there: object, parameter: torch.Tensor, value: Stored) -> torch.Tensor:
    """Return a tensor of the parameter's shape for its state: the existing one if possible.

    A new one has the saved dtype, because the optimizer chooses the dtype of state of a 16-bit parameter and casts the
    value.
    """
    same_shape = isinstance(there, torch.Tensor) and there.shape == parameter.shape
    if same_shape and there.dtype.is_floating_point == value.dtype.is_floating_point:  # type: ignore[attr-defined]
        return there  # type: ignore[return-value]
    return torch.empty_like(parameter.detach(), dtype=value.dtype)
