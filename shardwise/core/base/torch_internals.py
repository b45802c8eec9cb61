"""Every private name of torch that this package uses, each behind a function that says why, so that a new torch breaks
one file.

Where torch has a public way this is the place to take it. What has a fallback names it; nothing works without the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed import distributed_c10d
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import Parameter
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = [
    "DispatchMode",
    "abort_group",
    "accumulate_hooks",
    "add_each",
    "at_end_of_backward",
    "can_share_object",
    "compiles_frames",
    "copy_each",
    "cpu_flash_attention",
    "cpu_flash_attention_backward",
    "current_graph_task",
    "current_node",
    "default_store",
    "dispatch_modes",
    "each_leaf",
    "exchange_content",
    "fused_adam",
    "give_subclass",
    "group_is_known",
    "in_transform",
    "incompatible_keys",
    "is_transformed",
    "is_wrapper",
    "map_leaves",
    "map_leaves_of",
    "move_hooks",
    "never_compiled",
    "new_group",
    "no_own_torch_function",
    "no_subclass_dispatch",
    "no_torch_function",
    "offset_of_part",
    "parse_to",
    "plain",
    "point",
    "pop_saved_hooks",
    "push_saved_hooks",
    "running_ddp",
    "saved_hooks_enabled",
    "storage_holders",
    "storage_id",
    "stored_at",
    "tensor_holders",
    "top_saved_hooks",
    "version_of",
    "versions_of",
    "with_negative_bit",
    "without_global_step_hooks",
    "without_modes",
    "without_transforms",
    "wrapper_subclass",
]

# ---- storages and what tensors point at


def storage_id(storage: torch.UntypedStorage) -> int:
    """The identity of a storage, also on the meta device, where all addresses are 0. Python objects of one differ."""
    return int(storage._cdata)


_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def storage_holders(tensor: Tensor) -> int:
    """How many tensors and graphs hold the storage of ``tensor``. Fallback: 0, always, so that none is ever reused."""
    return _use_count(tensor.untyped_storage()._cdata) if _use_count is not None else 0


def tensor_holders(tensor: Tensor) -> int:
    """How many hold the tensor itself in C++: Python's one, autograd graphs, C++ code."""
    return int(tensor._use_count())  # type: ignore[attr-defined]


def version_of(tensor: Tensor) -> int:
    """A number that grows with every in-place change of ``tensor`` (0 for inference tensors, which have none)."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """:func:`version_of` each, in a quarter of the time."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # an inference tensor is among them
        return [version_of(tensor) for tensor in tensors]


def point(tensor: Tensor, values: Tensor) -> None:
    """Make ``tensor``, an object that others hold (a parameter), have the memory of ``values``.

    Autograd does not see it, and the version stays. ``torch.utils.swap_tensors`` would need that nobody holds either.
    """
    if type(tensor) is Tensor or type(tensor) is Parameter:
        tensor.data = values
        return
    with no_torch_function():  # a class may make something else of it
        tensor.data = values


def plain(tensor: Tensor) -> Tensor:
    """The same memory as a ``torch.Tensor`` without a graph, whatever the class of ``tensor`` makes of ``detach``."""
    with no_torch_function():
        return tensor.detach()


def can_share_object(tensor: Tensor, values: Tensor) -> bool:
    """Whether :func:`point` can: both are of one kind of implementation (a meta tensor and one on the CPU are not)."""
    return bool(torch._has_compatible_shallow_copy_type(tensor, values))


def exchange_content(tensor: Tensor, other: Tensor) -> None:
    """Swap what two tensor objects are.

    ``torch.utils.swap_tensors`` refuses tensors with Python weak references (the RNN modules hold some). These stay
    valid, since they point to the object, and only its content is exchanged.
    """
    torch._C._swap_tensor_impl(tensor, other)


def move_hooks(source: Tensor, target: Tensor) -> None:
    """``target`` gets the gradient hooks of ``source``, the same objects, so that their handles go on working."""
    target._backward_hooks = source._backward_hooks
    target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def accumulate_hooks(param: Tensor) -> dict[int, Any]:
    """Its post-accumulate-gradient hooks by number, in the order in which they run."""
    return param._post_accumulate_grad_hooks or {}


def with_negative_bit(tensor: Tensor) -> Tensor:
    """A view whose elements count as negated (``is_neg()``), as ``x.conj().imag`` gives: no public call makes one."""
    return torch._neg_view(tensor)


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool, Any]:
    """Arguments of ``Tensor.to`` as ``(device, dtype, non_blocking, memory_format)``."""
    found: tuple[torch.device | None, torch.dtype | None, bool, Any] = torch._C._nn._parse_to(*args, **kwargs)
    return found


# ---- subclasses of Tensor, and modes

DispatchMode = TorchDispatchMode
"""A mode that sees every operation below autograd."""


def give_subclass(kind: type[Any], data: Tensor, requires_grad: bool = False) -> Any:
    """``data`` as a tensor of class ``kind`` that shares its memory; ``as_subclass`` keeps it in the graph instead."""
    return torch.Tensor._make_subclass(kind, data, requires_grad)


def wrapper_subclass(kind: type[Any], like: Tensor, device: torch.device) -> Any:
    """A tensor of class ``kind`` without memory, with shape, strides and dtype of ``like``."""
    made = torch.Tensor._make_wrapper_subclass(
        kind, like.size(), like.stride(), dtype=like.dtype, device=device, storage_size=0
    )
    torch._C._set_throw_on_mutable_data_ptr(made)  # for who asks in C++ (``to_dlpack``), and would read at address 0
    return made


no_own_torch_function = torch._C._disabled_torch_function_impl
"""As a class's ``__torch_function__``: what is called on it goes to the dispatcher at once."""
no_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""Inside the block no ``__torch_function__`` runs, neither of subclasses nor of modes."""


def no_subclass_dispatch() -> AbstractContextManager[None]:
    """Inside the block no ``__torch_function__`` of subclasses runs; those of modes do."""
    block: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return block


def without_modes() -> AbstractContextManager[Any]:
    """Inside the block no dispatch mode is active."""
    block: AbstractContextManager[Any] = _disable_current_modes()
    return block


def dispatch_modes() -> Sequence[Any]:
    """Those that are active in this thread, the innermost last."""
    return _get_current_dispatch_mode_stack()


is_wrapper = is_traceable_wrapper_subclass
"""Whether a tensor unfolds into plain ones (``__tensor_flatten__``)."""

each_leaf = tree_leaves
"""The leaves of nested containers, those that others have registered included."""
map_leaves = tree_map
map_leaves_of = tree_map_only

# ---- autograd

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that runs in this thread; -1: none does."""
current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node of the graph whose backward runs in this thread, or ``None``."""


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have the running backward pass call it when it ends. One that fails drops it."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# saved_tensors_hooks is a context manager; ours begin in a hook before a module's forward and end in one after it.
def top_saved_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The innermost pair of saved-tensor hooks, or ``None``."""
    found: tuple[Callable[..., Any], Callable[..., Any]] | None
    found = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found


def saved_hooks_enabled() -> bool:
    """Whether saved-tensor hooks may be pushed: some ``torch.func`` transforms take none."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def push_saved_hooks(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """What is saved from here on goes through them, until :func:`pop_saved_hooks`."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


pop_saved_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
"""The innermost pair ends."""


# ---- torch.compile


def compiles_frames(callback: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback) -> bool:
    """Whether what is called now is traced, or may be compiled: a compiled function is on the stack."""
    return torch.compiler.is_compiling() or callback() is not None


def never_compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, which is no frame to compile from now on, and no function to trace into; what it calls may be."""
    from torch._dynamo.decorators import skip  # takes as long to import as torch

    return skip(call)


# ---- torch.func


def in_transform() -> bool:
    """Whether ``torch.func`` (vmap, grad, jvp, ...) or ``make_fx`` transforms what runs in this thread now."""
    functorch: object = torch._C._functorch.peek_interpreter_stack()
    return functorch is not None or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


@contextlib.contextmanager
def without_transforms() -> Iterator[None]:
    """Inside the block tensors are made and written as if there were no transform and no dispatch mode."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


def is_transformed(tensor: Tensor) -> bool:
    """Whether it is a transform's view of another tensor (a batch of vmap, a dual number, ...)."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


# ---- kernels over lists of tensors


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """``target.copy_(source)`` of each pair in one call (on CUDA a few kernels)."""
    torch._foreach_copy_(list(targets), list(sources))


def add_each(tensors: Sequence[Tensor], value: Tensor) -> None:
    """Add a number, a tensor on their device, to each. A Python number would be made a tensor once for each."""
    torch._foreach_add_(list(tensors), value, alpha=1.0)


def fused_adam(decoupled: bool) -> Callable[..., None]:
    """The kernel of ``Adam(fused=True)`` or ``AdamW(fused=True)``, for flat pieces with state of another dtype."""
    return torch._fused_adamw_ if decoupled else torch._fused_adam_


# ---- attention

# The public function does not give the log-sum-exp of the scores, without which attention to some keys cannot be merged
# with attention to others, and autograd's formula takes that of these keys alone.


def cpu_flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention, and the log-sum-exp of each query's scores: ``[rows, heads, length, size]`` of all, and without the
    last dimension, in fp32 at least."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q.detach(), k.detach(), v.detach(), 0.0, causal, scale=scale)
    return out, lse


def cpu_flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, where ``out`` and ``lse`` are those of all keys."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = op(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    return dq, dk, dv


# ---- optimizers and modules


@contextlib.contextmanager
def without_global_step_hooks() -> Iterator[None]:
    """Inside the block no step hooks run that somebody registered for all optimizers."""
    registered: tuple[dict[int, Any], ...] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    before = [dict(hooks) for hooks in registered]
    for hooks in registered:
        hooks.clear()  # in place: the handles that remove them know this object
    try:
        yield
    finally:
        for hooks, own in zip(registered, before, strict=True):
            hooks.update(own)


def incompatible_keys(missing: list[str], unexpected: list[str]) -> Any:
    """What ``load_state_dict`` of a module returns."""
    return _IncompatibleKeys(missing, unexpected)


# ---- torch.distributed

running_ddp: Callable[[], torch.nn.Module | None] = DistributedDataParallel._get_active_ddp_module
"""The ``DistributedDataParallel`` whose forward pass runs now, the innermost; ``None``: none does."""


def stored_at(file: str, start: int, length: int) -> Any:
    """Where a checkpoint of torch.distributed has a value, in bytes; its readers expect this class."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # takes a while to import

    return _StorageInfo(file, start, length)


def offset_of_part(tensor: Any) -> tuple[int, ...]:
    """Where this rank's part of a DTensor begins in the whole one."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # takes a while to import

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)


def default_store() -> Any:
    """The store that the default group met through.

    Raises:
        Exception: there is none.
    """
    return distributed_c10d._get_default_store()


def new_group(ranks: Sequence[int], backend: str, name: str, described: str, timeout: timedelta) -> dist.ProcessGroup:
    """A process group that its members alone make; ``dist.new_group`` is collective over all ranks.

    Args:
        ranks: of the default group, this rank among them, in the order that they are to have.
        backend: its name.
        name: the same on all members, and used once.
        described: for messages.
        timeout: of its operations.
    """
    order = list(ranks)
    unique: Any = name
    made, _ = distributed_c10d._new_process_group_helper(
        len(order),
        order.index(dist.get_rank()),
        order,
        dist.Backend(backend),
        default_store(),
        unique,
        timeout=timeout,
        group_desc=described,
    )
    distributed_c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(order)}
    group: dist.ProcessGroup = made
    return group


def group_is_known(group: dist.ProcessGroup) -> bool:
    """Whether torch has it still: nobody has destroyed it, nor the default group."""
    return dist.is_initialized() and group in distributed_c10d._world.pg_map


def abort_group(group: dist.ProcessGroup) -> None:
    """End it without waiting for the peers."""
    distributed_c10d._abort_process_group(group)
