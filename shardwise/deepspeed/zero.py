"""``zero.Init`` and ``zero.GatheredParameters``."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.compat import alias_table, lookup
from shardwise.core.base.warnings import warn_user
from shardwise.core.comm import PeerError, differences, ranks_of
from shardwise.core.deferred.construction import adopt, deferred_init, paused
from shardwise.core.deferred.replay import replay, tape_of
from shardwise.deepspeed.collectives import init_distributed
from shardwise.deepspeed.config import load_config, read_config
from shardwise.deepspeed.groups import MARK, marking
from shardwise.deepspeed.groups import data_parallel_group as group_of_mpu
from shardwise.deepspeed.parameter_attributes import ZeroParamStatus, ZeroParamType, mark
from shardwise.deepspeed.plan import number_format
from shardwise.session import Session

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "ZeroParamType", "forget", "remember", "sessions_of"]
__all__ += ["register_external_parameter", "session_of", "unregister_external_parameter", "unwrap_model_for_generation"]

_SESSIONS: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
"""In the order of their creation, which is the same on every rank."""


def remember(session: Session) -> None:
    """Make :class:`GatheredParameters` find the parameters of ``session``."""
    _SESSIONS[id(session)] = session


def forget(session: Session) -> None:
    """Undo :func:`remember`."""
    _SESSIONS.pop(id(session), None)


class Init:
    """Context in which models are built without memory. ``initialize`` creates the same values, tensor by tensor.

    Masters keep the unrounded values. The arguments are DeepSpeed's, in their order. The configuration of
    ``initialize`` decides about devices and dtypes.

    Args:
        module: no effect; ``initialize`` shards an existing module.
        data_parallel_group: the ranks that ``initialize`` shards the model over, including this rank.
        mem_efficient_linear, remote_device, pin_memory: no effect.
        config_dict_or_path: checked if it is given; ``config`` is its older name.
        config: see ``config_dict_or_path``.
        enabled: ``False``: models are built as usual.
        dtype: no effect, with a warning if the configuration has another one.
        mpu: an object with ``get_data_parallel_group()``; give it to ``initialize`` as well.
        zero_param_parallel_group: not available; ``zero_hpz_partition_size`` of the configuration is.
        zero_quantized_weights, zero_quantized_nontrainable_weights: give them in the configuration.
        sequence_data_parallel_group: the older name of ``data_parallel_group``.

    Raises:
        ValueError: an invalid configuration, or a group without this rank.
        NotImplementedError: an ``mpu`` with more than data and tensor parallelism, or an option that only the
            configuration may have.
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
        for name, value in {
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
            "zero_hpz_partition_size": zero_param_parallel_group,
        }.items():
            if value:
                raise NotImplementedError(
                    f"zero.Init takes no argument for zero_optimization.{name}; give that key in the configuration"
                )
        groups = {
            "data_parallel_group": data_parallel_group,
            "sequence_data_parallel_group": sequence_data_parallel_group,
            "mpu.get_data_parallel_group()": group_of_mpu(mpu) if mpu is not None else None,
        }
        ranks = {name: ranks_of(name, each) for name, each in groups.items() if each is not None}
        if len(set(ranks.values())) > 1:
            raise ValueError(f"zero.Init with groups of different ranks ({ranks}); give one group")
        group = next((groups[name] for name in ranks), None)
        self._group = None if group is dist.group.WORLD else group
        source = config_dict_or_path if config_dict_or_path is not None else config
        if source is not None:
            tree = load_config(source)  # optimizer and scheduler may still contain "auto"
            settings = read_config({key: each for key, each in tree.items() if key not in ("optimizer", "scheduler")})
            wide = number_format(settings) or torch.float32
            if enabled and dtype not in (None, wide):
                warn_user(f"zero.Init(dtype={dtype}) has no effect, because the configuration has {wide}")
        self.enabled = enabled
        if enabled:
            init_distributed()  # programs expect a process group from here on
        self._contexts: list[ExitStack] = []

    def __enter__(self) -> Init:
        if self.enabled:
            with ExitStack() as stack:
                stack.enter_context(deferred_init())
                stack.enter_context(marking(self._mark))
                self._contexts.append(stack.pop_all())
        return self

    def _mark(self, param: nn.Parameter) -> None:
        """Set DeepSpeed's attributes of a parameter without values, and its group."""
        if not hasattr(param, "ds_id"):
            mark(param, ZeroParamStatus.NOT_AVAILABLE)
        if self._group is not None and not hasattr(param, MARK):
            setattr(param, MARK, self._group)

    def __exit__(self, *failure: Any) -> None:
        if self._contexts:
            self._contexts.pop().__exit__(*failure)


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], target_fp_dtype: torch.dtype) -> Callable[..., Any]:
    """Wrap ``fn``, which creates a tensor, to return floating-point tensors in ``target_fp_dtype``."""

    @functools.wraps(fn)
    def made(*args: Any, **kwargs: Any) -> Any:
        value = fn(*args, **kwargs)
        return value.to(target_fp_dtype) if value.is_floating_point() else value

    return made


def _parameters(params: Any) -> list[nn.Parameter]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, torch.Tensor):
        return [params] if isinstance(params, nn.Parameter) else []
    members = params.values() if isinstance(params, dict) else params if isinstance(params, Iterable) else ()
    return [param for member in members for param in _parameters(member)]


class GatheredParameters:
    """Gather ``params`` on every rank inside. Collective.

    Blocks may be nested and share parameters. Parameters of a model under construction by :class:`Init` get their
    memory here and keep it.

    Args:
        params: a parameter, nested iterables of parameters, or a module; the same on every rank, in any order.
        modifier_rank: the rank of the data-parallel group whose changes are broadcast at the end; ``None``: changes to
            sharded parameters are lost.
        fwd_module: no effect: reading a parameter in another module gathers it.
        enabled: ``False`` does nothing.

    Raises:
        ValueError: ranks have different ``params``. At stage 3 it is raised on entering; at stages 0 to 2 at the end,
            and only with a ``modifier_rank``.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        # In an order that all ranks share: transformers gives list(set(...)), which each rank has in its own order.
        members = dict.fromkeys(_parameters(params) if enabled else ())
        self.params = sorted(members, key=lambda param: getattr(param, "ds_id", math.inf))
        self.modifier_rank, self.enabled = modifier_rank, enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if not self.enabled:
            return
        # Paused, because Init would record operations on these values.
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
            if self.modifier_rank is not None and (kind is None or issubclass(kind, Exception)):
                self._meet(error)
            if kind is None and self.modifier_rank is not None:
                self._spread(self.modifier_rank)
        finally:
            self._stack.__exit__(kind, error, trace)

    def _shares(self) -> list[tuple[Session, list[nn.Parameter]]]:
        """Return by session the parameters that it has, in its order."""
        shares = sessions_of({id(param) for param in self.params})
        return [(session, [param for param in session.params if id(param) in own]) for session, own in shares]

    def _alone(self, shares: Sequence[tuple[Session, list[nn.Parameter]]]) -> list[nn.Parameter]:
        """Return the parameters that no session has; none if there is only one rank."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        sharded = {id(param) for _, own in shares for param in own}
        return [param for param in self.params if several and id(param) not in sharded]

    def _meet(self, error: Exception | None) -> None:
        """Check that all ranks will send the same parameters without a session.

        Raises:
            PeerError: the block failed on other ranks only.
            ValueError: ranks have different numbers or shapes of them.
        """
        alone = self._alone(self._shares())
        if not alone:
            return
        group = getattr(alone[0], MARK, None)
        shapes = {f"parameter {at}": {"shape": str(tuple(each.shape))} for at, each in enumerate(alone)}
        reports: list[Any] = [(None, shapes)] * dist.get_world_size(group)
        with nullcontext() if error is None else suppress(Exception):  # the block's own error is raised in any case
            text = None if error is None else f"{type(error).__name__}: {error}"
            dist.all_gather_object(reports, (text, shapes), group=group)
        failed = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in enumerate(reports) if text)
        if failed and error is None:
            raise PeerError(f"the block of GatheredParameters failed, so no changes were broadcast: {failed}")
        if error is None and any(each != shapes for _, each in reports):
            text = differences([each for _, each in reports])
            raise ValueError(f"the ranks disagree on params of GatheredParameters: {text}; give the same on every rank")

    @torch.no_grad()
    def _spread(self, rank: int) -> None:
        shares = self._shares()
        for session, own in shares:
            if session.resident:  # parameters of other sessions were compared on entering
                session.compare(own)
            session.values.accept_assigned_data()
            for param in own:
                _overwrite(param, functools.partial(session.mesh.world.broadcast, src=rank))
        for param in self._alone(shares):
            _overwrite(param, functools.partial(dist.broadcast, group=getattr(param, MARK, None), group_src=rank))
        for session, own in shares:
            session.write_back(own)


def _overwrite(param: nn.Parameter, broadcast: Callable[[torch.Tensor], Any]) -> None:
    value = param.detach().contiguous()
    broadcast(value)
    if value.data_ptr() != param.data_ptr():
        param.copy_(value)


def sessions_of(params: set[int]) -> Iterator[tuple[Session, set[int]]]:
    """Yield sessions that have some of these parameters, and the ids of those, with the newest session first.

    A closed session counts as long as its parameters are sharded.
    """
    left = set(params)
    for session in reversed(list(_SESSIONS.values())):
        sharded = left.intersection(map(id, session.params))
        left -= sharded
        if sharded and _counts(session):
            yield session, sharded


def session_of(param: nn.Parameter) -> Session | None:
    """Return the session of ``param``, or ``None``; see :func:`sessions_of`."""
    sessions = (each for each in reversed(list(_SESSIONS.values())) if each.one(param) is not None)
    session = next(sessions, None)
    return session if session is not None and _counts(session) else None


def _counts(session: Session) -> bool:
    return not (session.closed and session.resident)


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the user's model with all parameters gathered. Collective."""
    session = getattr(model, "session", None)
    if not isinstance(session, Session):
        yield model
        return
    with session.module.gathered():
        yield session.module.unwrap()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: reading a parameter in another module gathers it."""


unregister_external_parameter = register_external_parameter


def __getattr__(name: str) -> Any:
    """Return DeepSpeed's other names of this module."""
    return lookup(alias_table("deepspeed"), "runtime.zero", name)
