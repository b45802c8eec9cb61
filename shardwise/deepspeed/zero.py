"""``zero.Init`` and ``zero.GatheredParameters``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.compat import lookup, read_world
from shardwise.core.base.remarks import warn_user
from shardwise.core.comm import ranks_of
from shardwise.core.deferred.construction import adopt, deferred_init, paused
from shardwise.core.deferred.replay import replay, tape_of
from shardwise.deepspeed.collectives import init_distributed
from shardwise.deepspeed.config import load_config, read_config
from shardwise.deepspeed.groups import MARK, marking
from shardwise.deepspeed.groups import data_parallel_group as group_of_mpu
from shardwise.deepspeed.marks import ZeroParamStatus, ZeroParamType, mark
from shardwise.deepspeed.plan import number_format
from shardwise.session import Session

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "forget",
    "register_external_parameter",
    "remember",
    "session_of",
    "sessions_of",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]

_SESSIONS: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
"""In the order in which they were made, which is the same on every rank."""


def remember(session: Session) -> None:
    """Parameters of ``session`` are found by :class:`GatheredParameters` from here on."""
    _SESSIONS[id(session)] = session


def forget(session: Session) -> None:
    """They are not: they are the program's own again."""
    _SESSIONS.pop(id(session), None)


class Init:
    """Models built inside have no memory: ``initialize`` makes their values one tensor at a time, the same values.

    Masters keep the values of the construction, unrounded. The arguments are DeepSpeed's, in their order. Where values
    are made, and in which dtype, is decided by the configuration of ``initialize``.

    Args:
        module: nothing is done to one that exists already; ``initialize`` shards it.
        data_parallel_group: the ranks that ``initialize`` divides the model over, a group that this rank belongs to.
        mem_efficient_linear, remote_device, pin_memory: no effect.
        config_dict_or_path: checked, where it is given; ``config`` is its older name.
        config: see ``config_dict_or_path``.
        enabled: ``False``: models are built as usual.
        dtype: no effect, with a warning where the configuration has another one.
        mpu: an object with ``get_data_parallel_group()``, instead of that; give it to ``initialize`` as well.
        zero_param_parallel_group: not available; ``zero_hpz_partition_size`` of the configuration is.
        zero_quantized_weights, zero_quantized_nontrainable_weights: give them in the configuration.
        sequence_data_parallel_group: the older name of ``data_parallel_group``.

    Raises:
        ValueError: a configuration with a fault, or a group that this rank is not in.
        NotImplementedError: an ``mpu`` with more than data and tensor parallelism, or what only the configuration may
            have.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
    ) -> None:
        asked = {
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
            "zero_hpz_partition_size": zero_param_parallel_group is not None,
        }
        for name, wanted in asked.items():
            if wanted:
                raise NotImplementedError(
                    f"zero.Init with what zero_optimization.{name} stands for: give that key in the configuration"
                )
        groups = {
            "data_parallel_group": data_parallel_group,
            "sequence_data_parallel_group": sequence_data_parallel_group,
            "mpu.get_data_parallel_group()": group_of_mpu(mpu) if mpu is not None else None,
        }
        ranks = {name: ranks_of(name, each) for name, each in groups.items() if each is not None}
        if len(set(ranks.values())) > 1:
            raise ValueError(f"zero.Init with groups of different ranks ({ranks}): give one group")
        group = next((groups[name] for name in ranks), None)
        self._group = None if group is dist.group.WORLD else group
        given = config_dict_or_path if config_dict_or_path is not None else config
        if given is not None:
            tree = load_config(given)  # what trains the model may still be "auto" in it
            settings = read_config({key: each for key, each in tree.items() if key not in ("optimizer", "scheduler")})
            wide = number_format(settings) or torch.float32
            if enabled and dtype not in (None, wide):
                warn_user(f"zero.Init(dtype={dtype}) has no effect: the configuration says {wide}")
        self.enabled = enabled
        if enabled:
            init_distributed()  # programs count on ranks to know each other from here on
        self._contexts: list[ExitStack] = []

    def __enter__(self) -> Init:
        if self.enabled:
            with ExitStack() as stack:
                stack.enter_context(deferred_init())
                stack.enter_context(marking(self._mark))
                self._contexts.append(stack.pop_all())
        return self

    def _mark(self, param: nn.Parameter) -> None:
        """What programs ask of a parameter that has no values yet, and whom it is built for."""
        if not hasattr(param, "ds_id"):
            mark(param, ZeroParamStatus.NOT_AVAILABLE)
        if self._group is not None and not hasattr(param, MARK):
            setattr(param, MARK, self._group)

    def __exit__(self, *failure: Any) -> None:
        if self._contexts:
            self._contexts.pop().__exit__(*failure)


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], target_fp_dtype: torch.dtype) -> Callable[..., Any]:
    """``fn``, which makes a tensor: one of floating-point numbers comes in ``target_fp_dtype``, whatever was asked."""

    @functools.wraps(fn)
    def made(*args: Any, **kwargs: Any) -> Any:
        value = fn(*args, **kwargs)
        return value.to(target_fp_dtype) if value.is_floating_point() else value

    return made


def _parameters(params: Any) -> list[nn.Parameter]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, torch.Tensor):
        return [params]  # type: ignore[list-item]
    if isinstance(params, dict):
        return [each for value in params.values() for each in _parameters(value)]
    return [each for value in params for each in _parameters(value)] if isinstance(params, Iterable) else []


class GatheredParameters:
    """Inside, ``params`` are whole on every rank. Every rank enters.

    They alone are gathered; others are where a module's forward pass, or its own code in one, reads them. Blocks may be
    inside each other and have the same parameters. Parameters of a model under construction by :class:`Init` get their
    memory here and keep it.

    Args:
        params: one, any nesting of iterables, or a module; the same on every rank, in whatever order.
        modifier_rank: changes of this rank of the data-parallel group reach its others at the end; ``None``: changes
            to sharded parameters are lost.
        fwd_module: no effect: a parameter that another module reads is gathered by the read.
        enabled: ``False`` does nothing.

    Raises:
        ValueError: on entering, on every rank, where ranks have different ``params`` of a model at stage 3; at stages 0
            to 2, where nothing is gathered, at the end and with a ``modifier_rank``.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        self.params = _parameters(params) if enabled else []
        self.modifier_rank, self.enabled = modifier_rank, enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if not self.enabled:
            return
        # Paused: inside of Init what is done on the values that come would be recorded, too.
        with torch.no_grad(), paused():
            for param in self.params:
                if tape_of(param) is not None:
                    adopt(param, replay(param))
                    if hasattr(param, "ds_id"):
                        mark(param, ZeroParamStatus.AVAILABLE)
        with paused(), ExitStack() as stack:
            for session, own in self._shares():
                stack.enter_context(session.gathered(own))
            self._stack = stack.pop_all()

    @paused()
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not self.enabled:
            return
        try:
            if kind is None and self.modifier_rank is not None:
                self._spread(self.modifier_rank)
        finally:
            self._stack.__exit__(kind, error, trace)

    def _shares(self) -> list[tuple[Session, list[nn.Parameter]]]:
        """By model, those of the parameters that an engine has, in its order, each once."""
        shares = held_by_sessions({id(param) for param in self.params})
        return [(session, [param for param in session.params if id(param) in own]) for session, own in shares]

    @torch.no_grad()
    def _spread(self, rank: int) -> None:
        shares = self._shares()
        for session, own in shares:
            if session.resident:  # of others they were compared on entering
                session.compare(own)
            session.take_given()
            for param in own:
                _overwrite(param, functools.partial(session.mesh.world.broadcast, src=rank))
        sharded = {id(param) for _, own in shares for param in own}
        for param in (each for each in self.params if id(each) not in sharded):
            _overwrite(param, functools.partial(_broadcast_alone, getattr(param, MARK, None), rank))
        for session, own in shares:
            session.write_back(own)


def _overwrite(param: nn.Parameter, broadcast: Callable[[torch.Tensor], Any]) -> None:
    value = param.detach().contiguous()
    broadcast(value)
    if value.data_ptr() != param.data_ptr():
        param.copy_(value)


def _broadcast_alone(group: dist.ProcessGroup | None, rank: int, value: torch.Tensor) -> None:
    """Of a parameter that no engine has yet, over the group that it was built for."""
    if _several():
        dist.broadcast(value, group=group, group_src=rank)


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def held_by_sessions(params: set[int]) -> Iterator[tuple[Session, set[int]]]:
    """Those that have some of the parameters with these ids, and which: of several that had one, the last, the newest
    first.

    One that is closed counts as long as it has parameters in parts, of which nobody else knows.
    """
    left = set(params)
    for session in reversed(list(_SESSIONS.values())):
        held = left.intersection(map(id, session.params))
        left -= held
        if held and _counts(session):
            yield session, held


def sessions_of(params: set[int]) -> Iterator[Session]:
    """Those of :func:`held_by_sessions`."""
    return (session for session, _ in held_by_sessions(params))


def session_of(param: nn.Parameter) -> Session | None:
    """The one that has it; see :func:`sessions_of`."""
    found = (each for each in reversed(list(_SESSIONS.values())) if each.one(param) is not None)
    session = next(found, None)
    return session if session is not None and _counts(session) else None


def _counts(session: Session) -> bool:
    return not (session.closed and session.resident)


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """The user's own model with all parameters whole, gathered once. Every rank enters."""
    session = getattr(model, "session", None)
    if not isinstance(session, Session):
        yield model
        return
    with session.module.gathered():
        yield session.module.unwrap()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do: a parameter that another module reads is gathered by the read."""


unregister_external_parameter = register_external_parameter


def __getattr__(name: str) -> Any:
    """What DeepSpeed has there and this file does not."""
    return lookup(read_world("deepspeed"), "runtime.zero", name)
