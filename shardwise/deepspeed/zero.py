"""``zero.Init`` and ``zero.GatheredParameters``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.build import Session
from shardwise.deepspeed.config import read_config
from shardwise.engine.deferred import adopt, deferred_init
from shardwise.engine.deferred_replay import replay, tape_of

__all__ = ["GatheredParameters", "Init", "register_external_parameter", "remember"]

_SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()


def remember(session: Session) -> None:
    """Parameters of ``session`` are found by :class:`GatheredParameters` from here on."""
    _SESSIONS.add(session)


class Init:
    """Models built inside have no memory: ``initialize`` makes their values one tensor at a time, the same values.

    Args:
        module: nothing is done to one that exists already; ``initialize`` shards it.
        remote_device: ``None``, ``"cpu"`` or ``"nvme"``; values are made where the configuration puts their shards.
        config_dict_or_path: checked, where it is given; ``config`` is its older name.
        enabled: ``False``: models are built as usual.

    The other arguments are accepted and have no effect: masters keep the values of the construction in fp32.

    Raises:
        ValueError: another ``remote_device``, or a configuration with a fault.
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
        if remote_device not in (None, "none", "cpu", "nvme"):
            raise ValueError(f"remote_device={remote_device!r}: give None, 'cpu' or 'nvme'")
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            raise NotImplementedError(
                f"{zero_quantized_weights=}, {zero_quantized_nontrainable_weights=} is not available; leave them False"
            )
        given = config_dict_or_path if config_dict_or_path is not None else config
        if given is not None:
            read_config(given)
        self.enabled = enabled
        self._contexts: list[AbstractContextManager[None]] = []

    def __enter__(self) -> Init:
        if self.enabled:
            self._contexts.append(deferred_init())
            self._contexts[-1].__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        if self._contexts:
            self._contexts.pop().__exit__(*failure)


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

    All parameters of the models that hold them are gathered. Parameters of a model under construction by
    :class:`Init` get their memory here and keep it.

    Args:
        params: one, any nesting of iterables, or a module.
        modifier_rank: this rank's changes reach all ranks at the end; ``None``: changes to sharded parameters are lost.
        fwd_module: no effect: a parameter that another module reads is gathered by the read.
        enabled: ``False`` does nothing.
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
        with torch.no_grad():
            for param in self.params:
                if tape_of(param) is not None:
                    adopt(param, replay(param))
        mine = {id(param) for param in self.params}
        for session in _sessions_of(mine):
            self._stack.enter_context(session.module.gathered())

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not self.enabled:
            return
        try:
            if kind is None and self.modifier_rank is not None:
                self._spread(self.modifier_rank)
        finally:
            self._stack.__exit__(kind, error, trace)

    @torch.no_grad()
    def _spread(self, rank: int) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        for param in self.params if several else ():
            value = param.detach().contiguous()
            dist.broadcast(value, src=rank)
            if value.data_ptr() != param.data_ptr():
                param.copy_(value)
        for session in _sessions_of({id(param) for param in self.params}):
            session.engine.write_back()


def _sessions_of(params: set[int]) -> Iterator[Session]:
    for session in list(_SESSIONS):
        if any(id(param) in params for param in session.engine.params):
            yield session


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do: a parameter that another module reads is gathered by the read."""
