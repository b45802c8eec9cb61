"""Activation checkpointing: ``configure`` once, then ``checkpoint(function, *args)`` inside the model.

What is kept of a call for backward are its tensor arguments; everything inside is computed again. The arguments can be
divided over the ranks of a model-parallel group, moved to the host, or put side by side in buffers that are used again.

Source: DeepSpeed's documentation of ``deepspeed.checkpointing``, and ZeRO (arXiv 1910.02054), section 6.1: partitioned
activations, and their offload to the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from shardwise.checked import whole
from shardwise.deepspeed.activations import Keeper, Kept
from shardwise.deepspeed.config import Settings, Source, load_config, read_config
from shardwise.deepspeed.logs import LOG
from shardwise.device import synchronize
from shardwise.remarks import warn_user
from shardwise.worlds import lookup, read_world

__all__ = ["checkpoint", "configure", "held_bytes", "is_configured", "reset", "use_settings"]

BLOCK = "activation_checkpointing"
NAMES = {
    "partition": f"{BLOCK}.partition_activations",
    "contiguous": f"{BLOCK}.contiguous_memory_optimization",
    "number": f"{BLOCK}.number_checkpoints",
    "host": f"{BLOCK}.cpu_checkpointing",
    "synchronize": f"{BLOCK}.synchronize_checkpoint_boundary",
    "profile": f"{BLOCK}.profile",
}


class _Present:
    """What was set last.

    Attributes:
        by_program: whether :func:`configure` set it, not a training configuration.
        mpu: what :func:`configure` was given last for the model-parallel ranks.
    """

    def __init__(self) -> None:
        self.keeper: Keeper | None = None
        self.by_program = False
        self.mpu: Any = None
        self.synchronize = self.profile = False
        self.warned: set[str] = set()


_PRESENT = _Present()


def configure(
    mpu_: Any = None,
    deepspeed_config: Source | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """How :func:`checkpoint` keeps arguments from here on. The order of the arguments is DeepSpeed's.

    Args:
        mpu_: the model-parallel ranks: an object with ``get_model_parallel_group()`` (or
            ``get_tensor_model_parallel_group()``), or the process group itself. Their arguments are the same tensors.
        deepspeed_config: a configuration with a block ``activation_checkpointing``; the arguments below go before it.
        partition_activations: each rank of that group keeps one part of every tensor, gathered again in backward.
            Without a group nothing is divided, and a warning says so once.
        contiguous_checkpointing: tensors are kept side by side in buffers that later steps use again.
        num_checkpoints: tensors of one size in a buffer; ``None``: buffers double as they are needed.
        checkpoint_in_cpu: tensors are kept in the host's memory.
        synchronize: wait for the GPU at the beginning and end of each call.
        profile: log the time of each call and of its recomputation (rank 0).

    Raises:
        ValueError, NotImplementedError: a fault in the configuration, ``num_checkpoints`` < 1, or an ``mpu_`` without
            a group.
    """
    tree = load_config(deepspeed_config) if deepspeed_config is not None else {}
    settings = read_config({BLOCK: tree.get(BLOCK)})
    given = {
        "partition": partition_activations,
        "contiguous": contiguous_checkpointing,
        "number": num_checkpoints,
        "host": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    _use({name: settings[path] if given[name] is None else given[name] for name, path in NAMES.items()}, mpu_)
    _PRESENT.by_program, _PRESENT.mpu = True, mpu_


def use_settings(settings: Settings) -> None:
    """:func:`configure` by the block of a configuration that was read.

    One that asks for nothing undoes what another one asked for, and leaves what the program configured itself.
    The model-parallel ranks, of which it says nothing, stay those that :func:`configure` was given.
    """
    options = {name: settings[path] for name, path in NAMES.items()}
    if any(options.values()):
        _use(options, _PRESENT.mpu)
        _PRESENT.by_program = False
    elif not _PRESENT.by_program:
        _PRESENT.keeper, _PRESENT.synchronize, _PRESENT.profile = None, False, False


def _use(options: Mapping[str, Any], mpu: Any) -> None:
    number = options["number"]
    if number is not None:
        whole("num_checkpoints", number, 1, what="how many tensors a buffer holds (None: any),")
    group = _group_of(mpu) if options["partition"] else None
    if options["partition"] and (group is None or dist.get_world_size(group) == 1):
        _warn_once(
            "partition_activations=True without a model-parallel group of several ranks: activations are kept whole; "
            "give the group with configure(mpu_=...), or leave partition_activations out"
        )
        group = None
    if number is not None and not options["contiguous"]:
        _warn_once(f"num_checkpoints={number} has no effect without contiguous_memory_optimization")
    _PRESENT.keeper = Keeper(group, host=options["host"], contiguous=options["contiguous"], number=number)
    _PRESENT.synchronize, _PRESENT.profile = options["synchronize"], options["profile"]


def _group_of(mpu: Any) -> Any:
    if mpu is None or isinstance(mpu, dist.ProcessGroup):
        return mpu
    for name in ("get_model_parallel_group", "get_tensor_model_parallel_group"):
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    raise ValueError(f"mpu_={mpu!r:.80}: give a process group, or an object with get_model_parallel_group()")


def _warn_once(message: str) -> None:
    if message not in _PRESENT.warned and _is_first():
        warn_user(message)
    _PRESENT.warned.add(message)


def _is_first() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def is_configured() -> bool:
    """Whether :func:`configure` was called. Without it :func:`checkpoint` keeps its arguments as they are."""
    return _PRESENT.keeper is not None


def reset() -> None:
    """Give back the memory of contiguous buffers that nothing is kept in, and start :func:`held_bytes` from zero."""
    if _PRESENT.keeper is not None:
        _PRESENT.keeper.reset()


def held_bytes() -> dict[str, int]:
    """Bytes of what is kept on this rank now, on its ``device`` and on the ``host``, and all that was moved
    ``to_host`` since :func:`configure` or :func:`reset`."""
    keeper = _PRESENT.keeper
    return dict(keeper.bytes) if keeper is not None else {"device": 0, "host": 0, "to_host": 0}


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, computed again in backward: values, gradients and random numbers are the same.

    Tensors among the arguments are kept as :func:`configure` says (parameters, integers, and tensors inside containers
    as they are). A call inside another one keeps nothing of its own. Without gradients it is a plain call.
    """
    keeper = _PRESENT.keeper
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    call = _Call(function, len(args), tuple(kwargs))
    flat = (*args, *kwargs.values())
    if keeper is None or keeper.inside or not keeper.changes_anything:
        return torch_checkpoint(call.run, *flat, use_reentrant=False)
    kept = [keeper.keep(each) for each in flat]
    call.first = flat
    # torch looks for devices, whose random numbers it has to repeat, among the tensors that it is given.
    devices = {each.device for each in flat if isinstance(each, Tensor)}
    markers = [torch.empty(0, device=device) for device in devices if device.type != "cpu"]
    del flat, args, kwargs
    return torch_checkpoint(call.run, *kept, *markers, use_reentrant=False)


class _Call:
    """One call, made a first time in the forward pass and again in backward."""

    def __init__(self, function: Callable[..., Any], positional: int, names: tuple[str, ...]) -> None:
        self.function, self.positional, self.names = function, positional, names
        self.first: tuple[Any, ...] = ()
        """The arguments of the forward pass, where torch was given what is kept of them."""
        self._again = False

    def run(self, *given: Any) -> Any:
        total = self.positional + len(self.names)
        flat, self.first = self.first, ()
        found = [each for each in (*flat, *given) if isinstance(each, Tensor | Kept)]
        with self._watched({each.device for each in found}):
            if not flat:
                flat = tuple(each.restore() if isinstance(each, Kept) else each for each in given[:total])
            named = dict(zip(self.names, flat[self.positional :], strict=True))
            flat = flat[: self.positional]
            return self.function(*flat, **named)

    @contextmanager
    def _watched(self, devices: set[torch.device]) -> Iterator[None]:
        what, self._again = "recomputation" if self._again else "forward", True
        keeper = _PRESENT.keeper
        if keeper is None:
            yield
            return
        waits_for, profile = devices if _PRESENT.synchronize else (), _PRESENT.profile
        for device in waits_for:
            synchronize(device)
        start = time.perf_counter()
        try:
            with keeper.within():
                yield
        finally:  # torch ends a recomputation by an exception, when it has what it needs
            for device in waits_for:
                synchronize(device)
            if profile and _is_first():
                name = getattr(self.function, "__qualname__", type(self.function).__name__)
                LOG.info("%s of %s: %.2f ms", what, name, 1000.0 * (time.perf_counter() - start))


def __getattr__(name: str) -> Any:
    """What DeepSpeed has there and this file does not."""
    return lookup(read_world("deepspeed"), "runtime.activation_checkpointing.checkpointing", name)
