"""What ``torch.compile`` sees of the hooks on modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from shardwise.core.base.torch_internals import compiles_frames, never_compiled

__all__ = ["outside_compile", "same_number", "skipped_in_compile", "while_tracing"]


# [Note: Blocks share compiled code]
# Blocks of one class are compiled once, and each call is held against the guards of what was compiled. After eight
# different results torch compiles a function no more, and what comes then runs uncompiled. So nothing of ours may make
# blocks differ:
# * Guards look at numbers of hooks. Torch counts them up over all modules, ours have the same on each (same_number).
# * A hook that gathers runs outside any graph, and is nothing to compile either (outside_compile): its arguments and
#   the gradient mode differ from call to call.
def outside_compile(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Run outside any compiled graph: the hooks make a graph break before and after the module.

    Where nothing is compiled it is called as it is: to switch the compiler off takes longer than most hooks.
    """
    disabled: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]

    def outside(*args: Any) -> Any:
        return disabled(*args) if compiles_frames() else hook(*args)

    return never_compiled(outside)


never_compiled(compiles_frames)  # called from a frame that is not compiled, it would be one to compile


def skipped_in_compile(hook: Callable[..., None]) -> Callable[..., None]:
    """Inside a compiled block the block's own hooks have gathered what the module needs."""

    def unless_compiling(*args: object) -> None:
        if not torch.compiler.is_compiling():
            hook(*args)

    return unless_compiling


def while_tracing(call: Callable[[], None]) -> Callable[[], None]:
    """Called when a graph is traced, and left out of the graph."""

    def now() -> None:
        call()

    constant: Callable[[], None] = torch.compiler.assume_constant_result(now)  # type: ignore[no-untyped-call]
    return constant


def same_number(handle: RemovableHandle) -> RemovableHandle:
    """``handle`` of a hook that was just registered, with a number that it has on every module where as many of these
    hooks are: torch numbers from 0 up, these go from -1 down. The order of the hooks stays."""
    hooks = handle.hooks_dict_ref()
    assert hooks is not None
    number = min([0, *(key for key in hooks if isinstance(key, int))]) - 1
    for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        named = ref()
        if named is not None and handle.id in named:
            items = [(number if key == handle.id else key, hook) for key, hook in named.items()]
            named.clear()
            named.update(items)
    handle.id = number
    return handle
