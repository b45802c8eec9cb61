"""``LazyInitContext``: models without memory for their parameters until they are boosted."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from shardwise.core.base.validate import refuse
from shardwise.core.deferred import deferred_init
from shardwise.core.deferred.construction import adopt, initial_values, set_buffer


class LazyInitContext:
    """Build modules without memory for their parameters inside.

    Boost, or :meth:`materialize`, creates the values of an ordinary construction. A context may be entered again after
    its end.

    Args:
        tensor_cls: must be ``None``.
        default_device: device of the random numbers of the construction; ``None``: the CPU.

    Raises:
        NotImplementedError: ``tensor_cls`` is given.
    """

    def __init__(self, tensor_cls: Any = None, default_device: torch.device | str | int | None = None) -> None:
        if tensor_cls is not None:
            refuse("tensor_cls", tensor_cls, "leave it None: shardwise.core.deferred has a class of its own")
        self.default_device = default_device
        self._stack = ExitStack()

    def __enter__(self) -> LazyInitContext:
        with ExitStack() as stack:
            if self.default_device is not None and torch.device(self.default_device).type != "cpu":
                stack.enter_context(torch.device(self.default_device))
            stack.enter_context(deferred_init())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._stack.close()

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Give the parameters and buffers of ``module`` the values of an ordinary construction.

        Args:
            module: built inside a context that has ended.
            verbose: print the number of tensors.
        """
        count = 0
        for names, tensor, value, is_parameter in initial_values(module, torch.device("cpu")):
            count += 1
            if is_parameter:
                adopt(tensor, value)
            else:
                set_buffer(module, names, value)
        if verbose:
            print(f"{type(module).__name__}: {count} tensors have their values")
        return module
