"""``LazyInitContext`` and ``ColoInitContext``: models that are described without memory until they are boosted."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn

from shardwise.checked import refuse
from shardwise.deferred import deferred_init
from shardwise.deferred.construction import adopt, initial_values, set_buffer

__all__ = ["ColoInitContext", "LazyInitContext"]


class _Context:
    """Entered as a ``with`` block, any number of times, one after the other."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def _enter(self, stack: ExitStack) -> None:
        raise NotImplementedError(f"{type(self).__name__} says what is entered")

    def __enter__(self) -> Any:
        with ExitStack() as stack:
            self._enter(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


class LazyInitContext(_Context):
    """Modules built inside have no memory for their parameters; boost, or :meth:`materialize`, makes the values, which
    are those of an ordinary construction.

    Args:
        tensor_cls: only ``None``.
        default_device: where the construction draws random numbers; ``None``: the CPU.

    Raises:
        NotImplementedError: a ``tensor_cls``.
    """

    def __init__(self, tensor_cls: Any = None, default_device: torch.device | str | int | None = None) -> None:
        super().__init__()
        if tensor_cls is not None:
            refuse("tensor_cls", tensor_cls, "leave it None: shardwise.deferred has a class of its own")
        self.default_device = default_device

    def _enter(self, stack: ExitStack) -> None:
        if self.default_device is not None and torch.device(self.default_device).type != "cpu":
            stack.enter_context(torch.device(self.default_device))
        stack.enter_context(deferred_init())

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """``module`` with values in its parameters and buffers, as without this context.

        Args:
            module: built inside the context, which has been left.
            verbose: say how many values were made.
        """
        made = 0
        for names, tensor, value, is_parameter in initial_values(module, torch.device("cpu")):
            made += 1
            if is_parameter:
                adopt(tensor, value)
            else:
                set_buffer(module, names, value)
        if verbose:
            print(f"{type(module).__name__}: {made} tensors have their values")
        return module


class ColoInitContext(_Context):
    """As :class:`LazyInitContext`, with a device and a dtype for what is made.

    Args:
        device: where the construction draws random numbers.
        dtype: of floating tensors that are made inside.
        default_pg: only ``None``.
        default_dist_spec: only ``None``.

    Raises:
        NotImplementedError: parameters that are divided from the start.
    """

    def __init__(
        self,
        device: torch.device | str | int = "cpu",
        dtype: torch.dtype = torch.float,
        default_pg: Any = None,
        default_dist_spec: Any = None,
    ) -> None:
        super().__init__()
        for name, given in (("default_pg", default_pg), ("default_dist_spec", default_dist_spec)):
            if given is not None:
                refuse(
                    name, given, "leave it None; GeminiPlugin(tp_size=) cuts layers, and every plugin shards the rest"
                )
        self._inner, self._dtype = LazyInitContext(default_device=device), dtype

    def _enter(self, stack: ExitStack) -> None:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(self._dtype)
        stack.enter_context(self._inner)
