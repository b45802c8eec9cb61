"""``ZeroInitContext``: marks parameters for sharding while modules are built, without memory for sharded parameters."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardwise.core.comm import ranks_of
from shardwise.core.deferred import deferred_init
from shardwise.zero.shard_utils import BaseShardStrategy

__all__ = ["ParameterMark", "ZeroInitContext", "mark_of", "no_shard_zero_context", "no_shard_zero_decrator"]

MARK = "colo_attr"  # the published name
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class ParameterMark:
    """Settings of a parameter from the context, stored as ``parameter.colo_attr``.

    Attributes:
        param_is_sharded: sharded over the ranks between uses; otherwise replicated.
        dtype: compute dtype; ``None``: the parameter's own.
        target_device: device between uses.
        is_replicated: every rank has the same values.
        ranks: ranks to shard over, if the context has a group.
    """

    param_is_sharded: bool
    dtype: torch.dtype | None
    target_device: torch.device
    is_replicated: bool = True
    ranks: tuple[int, ...] | None = None


_ACTIVE: list[ZeroInitContext] = []


class ZeroInitContext:
    """Build modules for :class:`~shardwise.zero.sharded_model.ShardedModelV2` inside.

    Values keep their initial dtype until the model is sharded, so that the fp32 masters of 16-bit parameters are exact.
    Every rank of a data-parallel group must build the same modules from the same seed.

    Args:
        target_device: device of parameters between uses, as a device, a name or the number of a GPU. The CPU in a run
            on GPUs means host memory.
        shard_strategy: a ``TensorShardStrategy()`` or ``BucketTensorShardStrategy()``, the one of the model.
        shard_param: parameters are sharded over the ranks between uses, and have no memory until the model is sharded;
            False: every rank keeps full parameters (ZeRO-2).
        rm_torch_payload_on_the_fly: parameters that are not sharded have no memory until then either. Values that
            ``__init__`` reads are created for it and dropped.
        model_numel_tensor: an integer tensor; the number of elements of all parameters (tied ones once) is added to it
            at the end.
        dp_process_group: the ``process_group`` of the model; ``None``: any. Nothing is communicated here.
        seed: seed of the initial values, the same on all ranks; the generators are restored afterwards. ``None``: use
            the current state of the generators.
        default_dtype: dtype of tensors created inside.
        bf16: compute in bfloat16 instead of float16.
        convert_fp16: False: compute in the parameters' dtypes.

    Raises:
        TypeError: ``shard_strategy`` is not a strategy.
        ValueError: ``bf16`` with ``convert_fp16=False``; a ``model_numel_tensor`` that is not one integer; a group that
            this rank does not belong to.
    """

    def __init__(
        self,
        target_device: torch.device | str | int,
        shard_strategy: BaseShardStrategy,
        shard_param: bool = False,
        rm_torch_payload_on_the_fly: bool = False,
        model_numel_tensor: torch.Tensor | None = None,
        dp_process_group: dist.ProcessGroup | None = None,
        *,
        seed: int | None = None,
        default_dtype: torch.dtype | None = None,
        bf16: bool = False,
        convert_fp16: bool = True,
    ) -> None:
        if not isinstance(shard_strategy, BaseShardStrategy):
            raise TypeError(f"shard_strategy={shard_strategy!r:.80}: give a TensorShardStrategy() or another instance")
        if bf16 and not convert_fp16:
            raise ValueError(f"bf16={bf16} with convert_fp16={convert_fp16}: give one of them")
        numel = torch.zeros(1, dtype=torch.long) if model_numel_tensor is None else model_numel_tensor
        if numel.numel() != 1 or numel.is_floating_point() or numel.is_complex():
            raise ValueError(f"model_numel_tensor of {tuple(numel.shape)} x {numel.dtype}: give one integer")
        ranks = ranks_of("dp_process_group", dp_process_group) if dp_process_group is not None else None
        self.model_numel_tensor, self.shard_strategy = numel, shard_strategy
        self._rm_on_the_fly, self._seed, self._default_dtype = rm_torch_payload_on_the_fly, seed, default_dtype
        where = torch.device("cuda", target_device) if isinstance(target_device, int) else torch.device(target_device)
        dtype = torch.bfloat16 if bf16 else torch.float16 if convert_fp16 else None
        self._mark = ParameterMark(shard_param, dtype, where, ranks=ranks)
        self._made: dict[int, weakref.ref[nn.Parameter]] = {}
        self._stack = ExitStack()

    @property
    def target_device(self) -> torch.device:
        """Return the device of parameters between uses."""
        return self._mark.target_device

    @property
    def shard_param(self) -> bool:
        """Return True if parameters that are created now will be sharded."""
        return self._mark.param_is_sharded

    @property
    def is_replicated(self) -> bool:
        """Return True: all ranks start from the same values."""
        return self._mark.is_replicated

    def __enter__(self) -> ZeroInitContext:
        if self in _ACTIVE:
            raise RuntimeError(f"{self!r} is active already: create another context for a nested part")
        with ExitStack() as stack:
            if self._seed is not None:
                devices = [self.target_device] if self.target_device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(devices=devices))
                torch.manual_seed(self._seed)
            if self._default_dtype is not None:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._default_dtype)
            if self.shard_param or self._rm_on_the_fly:
                stack.enter_context(deferred_init())
            stack.callback(register_module_parameter_registration_hook(self._mark_parameter).remove)
            _ACTIVE.append(self)
            stack.callback(_ACTIVE.remove, self)
            self._stack = stack.pop_all()
        return self

    def _mark_parameter(self, module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        if _ACTIVE[-1] is self and value is not None and mark_of(value) is None:
            setattr(value, MARK, self._mark)
            self._made[id(value)] = weakref.ref(value)

    def __exit__(self, *failure: Any) -> None:
        self._stack.close()
        parameters = [reference() for reference in self._made.values()]
        self._made.clear()
        if failure[0] is None:
            self.model_numel_tensor += sum(each.numel() for each in parameters if each is not None)

    @contextmanager
    def marking(self, mark: ParameterMark) -> Iterator[None]:
        """Give parameters created inside the mark ``mark``."""
        before, self._mark = self._mark, mark
        try:
            yield
        finally:
            self._mark = before


def mark_of(parameter: nn.Parameter) -> ParameterMark | None:
    """Return the settings of ``parameter``; ``None`` if it was created outside of a context."""
    mark = parameter.__dict__.get(MARK)
    return mark if isinstance(mark, ParameterMark) else None


@contextmanager
def no_shard_zero_context(is_replicated: bool = True) -> Iterator[None]:
    """Keep full parameters of modules built inside on every rank. No effect outside of :class:`ZeroInitContext`.

    Raises:
        NotImplementedError: ``is_replicated=False``, values that differ between ranks (experts).

    Examples:
        >>> from shardwise.zero import no_shard_zero_context
        >>> with no_shard_zero_context():
        ...     router = torch.nn.Linear(8, 2)
    """
    if not is_replicated:
        raise NotImplementedError(f"is_replicated={is_replicated} is not available: all ranks hold the same values")
    if not _ACTIVE:
        yield
        return
    context = _ACTIVE[-1]
    with context.marking(replace(context._mark, param_is_sharded=False)):
        yield


def no_shard_zero_decrator(is_replicated: bool = True) -> Callable[[F], F]:
    """Return a decorator for ``__init__`` (or any function) that runs it inside :func:`no_shard_zero_context`."""

    def wrap(function: F) -> F:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with no_shard_zero_context(is_replicated):
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    return wrap
