"""Private names of torch that this package uses, each behind a function that documents why.

A new torch version then breaks only this file. Where torch has a public alternative, use it here. Functions with a
fallback name it; the package does not work without the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
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

P = ParamSpec("P")
R = TypeVar("R")

# ---- storages and shallow copies


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return the identity of a storage, also on the meta device; several Python objects may share it."""
    return int(storage._cdata)


_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def storage_holders(tensor: Tensor) -> int:
    """Return how many tensors and graphs hold the storage of ``tensor``; without torch's count always 0 (no reuse)."""
    return _use_count(tensor.untyped_storage()._cdata) if _use_count is not None else 0


def tensor_holders(tensor: Tensor) -> int:
    """Return the number of references to the tensor in C++: one from Python, autograd graphs, and C++ code."""
    return int(tensor._use_count())  # type: ignore[attr-defined]


def version_of(tensor: Tensor) -> int:
    """Return a number that grows with every in-place change of ``tensor``; always 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return :func:`version_of` for each tensor, in a quarter of the time."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # an inference tensor is among them
        return [version_of(tensor) for tensor in tensors]


def point(tensor: Tensor, values: Tensor) -> None:
    """Make ``tensor``, an object with other references (a parameter), use the memory of ``values``.

    Autograd does not see the change, and the version stays. ``torch.utils.swap_tensors`` would require that there are
    no other references to either.
    """
    if type(tensor) is Tensor or type(tensor) is Parameter:
        tensor.data = values
        return
    with no_torch_function():  # a subclass may override the assignment
        tensor.data = values


def plain(tensor: Tensor) -> Tensor:
    """Return a plain ``torch.Tensor`` with the same memory and no graph, for any class of ``tensor``."""
    with no_torch_function():
        return tensor.detach()


def can_share_object(tensor: Tensor, values: Tensor) -> bool:
    """Return True if :func:`point` supports these tensors: same implementation (a meta and a CPU tensor differ)."""
    return bool(torch._has_compatible_shallow_copy_type(tensor, values))


def exchange_content(tensor: Tensor, other: Tensor) -> None:
    """Swap the contents of two tensor objects.

    ``torch.utils.swap_tensors`` refuses tensors with Python weak references (the RNN modules have some). These stay
    valid here, since they refer to the object, and only its content is exchanged.
    """
    torch._C._swap_tensor_impl(tensor, other)


def move_hooks(source: Tensor, target: Tensor) -> None:
    """Move the gradient hooks of ``source`` to ``target``: the same objects, so that their handles stay valid."""
    target._backward_hooks = source._backward_hooks
    target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def accumulate_hooks(param: Tensor) -> dict[int, Any]:
    """Return the post-accumulate-gradient hooks of a parameter by number, in the order in which they run."""
    return param._post_accumulate_grad_hooks or {}


def with_negative_bit(tensor: Tensor) -> Tensor:
    """Return a view with the negative bit (``is_neg()``), like ``x.conj().imag``; torch has no public function."""
    return torch._neg_view(tensor)


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool, Any]:
    """Parse the arguments of ``Tensor.to`` to ``(device, dtype, non_blocking, memory_format)``."""
    target: tuple[torch.device | None, torch.dtype | None, bool, Any] = torch._C._nn._parse_to(*args, **kwargs)
    return target


# ---- subclasses of Tensor, and modes

DispatchMode = TorchDispatchMode
"""A mode that sees every operation below autograd."""


def give_subclass(kind: type[Any], data: Tensor, requires_grad: bool = False) -> Any:
    """Return ``data`` as a tensor of class ``kind`` that shares its memory; ``as_subclass`` would keep the graph."""
    return torch.Tensor._make_subclass(kind, data, requires_grad)


def wrapper_subclass(kind: type[Any], like: Tensor, device: torch.device) -> Any:
    """Return a tensor of class ``kind`` without memory, with shape, strides and dtype of ``like``."""
    made = torch.Tensor._make_wrapper_subclass(
        kind, like.size(), like.stride(), dtype=like.dtype, device=device, storage_size=0
    )
    torch._C._set_throw_on_mutable_data_ptr(made)  # C++ code (``to_dlpack``) would otherwise read at address 0
    return made


no_own_torch_function = torch._C._disabled_torch_function_impl
"""Value for a class's ``__torch_function__``: calls on it go directly to the dispatcher."""
no_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""Context in which no ``__torch_function__`` runs, neither of subclasses nor of modes."""


def no_subclass_dispatch() -> AbstractContextManager[None]:
    """Return a context in which no ``__torch_function__`` of subclasses runs. Modes still run."""
    block: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return block


def without_modes() -> AbstractContextManager[Any]:
    """Return a context in which no dispatch mode is active."""
    block: AbstractContextManager[Any] = _disable_current_modes()
    return block


def dispatch_modes() -> Sequence[Any]:
    """Return the dispatch modes that are active in this thread, the innermost last."""
    return _get_current_dispatch_mode_stack()


is_wrapper = is_traceable_wrapper_subclass
"""Returns True if a tensor consists of plain tensors (``__tensor_flatten__``)."""

each_leaf = tree_leaves
"""Returns the leaves of nested containers, including types that other code has registered."""
map_leaves = tree_map
map_leaves_of = tree_map_only

# ---- autograd

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward pass that runs in this thread, or -1."""
current_node: Callable[[], Any] = torch._C._current_autograd_node
"""Returns the node of the graph whose backward runs in this thread, or ``None``."""


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Register a callback for the end of the running backward pass. A pass that fails does not call it."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# saved_tensors_hooks is a context manager, but ours begin in a hook before a module's forward and end in one after it.
def top_saved_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost pair of saved-tensor hooks, or ``None``."""
    hooks: tuple[Callable[..., Any], Callable[..., Any]] | None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def saved_hooks_enabled() -> bool:
    """Return True if saved-tensor hooks may be pushed; some ``torch.func`` transforms do not allow them."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def push_saved_hooks(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """Push a pair of hooks for tensors that are saved from here on, until :func:`pop_saved_hooks`."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


pop_saved_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
"""Removes the innermost pair of saved-tensor hooks."""


# ---- torch.compile


def compiles_frames(callback: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback) -> bool:
    """Return True if calls are traced, or may be compiled: a compiled function is on the stack."""
    return torch.compiler.is_compiling() or callback() is not None


def never_compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call`` so that it is neither compiled nor traced. The functions that it calls may be compiled."""
    from torch._dynamo.decorators import skip  # this import takes as long as that of torch

    return skip(call)


def makes_cuda_graphs(module: nn.Module) -> bool:
    """Return True if ``torch.compile`` was asked for CUDA graphs of the module, as by ``mode="reduce-overhead"``."""
    calls = module._compiled_call_impl, module.forward  # of module.compile(), and of torch.compile(module)
    configs: list[Any] = [getattr(call, "get_compiler_config", dict)() or {} for call in calls]
    return any(config.get("triton.cudagraphs") for config in configs)


# ---- torch.func


def in_transform() -> bool:
    """Return True if ``torch.func`` (vmap, grad, jvp, ...) or ``make_fx`` transforms the code in this thread."""
    functorch: object = torch._C._functorch.peek_interpreter_stack()
    return functorch is not None or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


@contextlib.contextmanager
def without_transforms() -> Iterator[None]:
    """Run the block without transforms and dispatch modes, so that tensors are created and written directly."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


def is_transformed(tensor: Tensor) -> bool:
    """Return True if the tensor is a transform's wrapper of another tensor (a batch of vmap, a dual number, ...)."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


# ---- kernels over lists of tensors


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Call ``target.copy_(source)`` for each pair in one call (on CUDA a few kernels)."""
    torch._foreach_copy_(list(targets), list(sources))


def add_each(tensors: Sequence[Tensor], value: Tensor) -> None:
    """Add ``value``, a tensor on their device, to each tensor. A Python number would be converted once per tensor."""
    torch._foreach_add_(list(tensors), value, alpha=1.0)


def norm_of_each(tensors: Sequence[Tensor], p: float, dtype: torch.dtype) -> Sequence[Tensor]:
    """Return the p-norm of each tensor, computed in ``dtype``, in one call (on CUDA a few kernels)."""
    return torch._foreach_norm(list(tensors), p, dtype=dtype)


def fused_adam(decoupled: bool) -> Callable[..., None]:
    """Return the kernel of ``Adam(fused=True)`` or ``AdamW(fused=True)``, which supports flat slices."""
    return torch._fused_adamw_ if decoupled else torch._fused_adam_


# ---- attention

# The public function does not return the log-sum-exp of the scores, which is required to merge attention to some keys
# with attention to others; and autograd would use the log-sum-exp of these keys only.
CPU_FLASH, FLASH, EFFICIENT = "flash_attention_for_cpu", "flash_attention", "efficient_attention"


def attention_kernel(q: Tensor) -> str | None:
    """Return the name of torch's kernel for :func:`attention` of ``q`` to keys of its shape, or ``None`` if none fits.

    On a GPU, that is flash attention for 16 bits, and the memory-efficient kernel for fp32 and older GPUs. Both need
    head sizes that are multiples of 8; torch's own checks know the other limits.
    """
    if q.device.type != "cuda" or q.shape[-1] % 8:
        return CPU_FLASH if q.device.type == "cpu" else None
    inputs = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, False, False)
    if torch.backends.cuda.can_use_flash_attention(inputs):
        return FLASH
    return EFFICIENT if torch.backends.cuda.can_use_efficient_attention(inputs) else None


def attention(kernel: str, qkv: tuple[Tensor, Tensor, Tensor], causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention, and the log-sum-exp of each query's scores. All tensors are ``[rows, heads, length, size]``,
    except the log-sum-exp, which lacks the last dimension and is in fp32 at least."""
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")
    options = (None, True) if kernel == EFFICIENT else ()  # no bias, but the log-sum-exp
    out, lse, *_ = op(*(x.detach() for x in qkv), *options, 0.0, causal, scale=scale)
    return out, lse[..., : out.shape[2]]  # one kernel pads it


def attention_backward(
    kernel: str, grad: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values. ``out`` and ``lse`` are the results for all keys."""
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward")
    seed = () if kernel == CPU_FLASH else (torch.zeros(2, dtype=torch.int64, device=grad.device),) * 2
    if kernel == EFFICIENT:  # reads the log-sum-exp by 32 queries
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))
        mask = [True, True, True, False]
        dq, dk, dv, _ = op(grad, *qkv, None, out, padded, *seed, 0.0, mask, causal, scale=scale)
        return dq, dk, dv
    lengths = (None, None, out.shape[2], qkv[1].shape[2]) if kernel == FLASH else ()
    dq, dk, dv = op(grad, *qkv, out, lse.contiguous(), *lengths, 0.0, causal, *seed, scale=scale)
    return dq, dk, dv


# ---- optimizers and modules


@contextlib.contextmanager
def without_global_step_hooks() -> Iterator[None]:
    """Run the block without the step hooks that are registered for all optimizers."""
    registered: tuple[dict[int, Any], ...] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    before = [dict(hooks) for hooks in registered]
    for hooks in registered:
        hooks.clear()  # in place, since the handles that remove hooks refer to this object
    try:
        yield
    finally:
        for hooks, own in zip(registered, before, strict=True):
            hooks.update(own)


def incompatible_keys(missing: list[str], unexpected: list[str]) -> Any:
    """Return an object like the result of a module's ``load_state_dict``."""
    return _IncompatibleKeys(missing, unexpected)


# ---- torch.profiler


def labelled(kind: str, name: Callable[..., str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function, so that a profile shows its calls as ``shardwise::kind (name)``.

    Args:
        kind: the operation.
        name: returns the modules that it is for, from the arguments of the call. Not called without a profiler.
    """

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        @wraps(call)
        def labelled_call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not torch._C._autograd._profiler_enabled():  # a label is an operation, and modes would see it
                return call(*args, **kwargs)
            with torch.profiler.record_function(f"shardwise::{kind} ({name(*args, **kwargs)})"):
                return call(*args, **kwargs)

        return labelled_call

    return decorate


# ---- torch.distributed

running_ddp: Callable[[], torch.nn.Module | None] = DistributedDataParallel._get_active_ddp_module
"""Returns the innermost ``DistributedDataParallel`` whose forward pass is running, or ``None``."""


def stored_at(file: str, start: int, length: int) -> Any:
    """Return the location of a value in a checkpoint of torch.distributed, as the object that readers expect."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # takes a while to import

    return _StorageInfo(file, start, length)


def offset_of_part(tensor: Any) -> tuple[int, ...]:
    """Return the offset of this rank's part of a DTensor in the full tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # takes a while to import

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)


def default_store() -> Any:
    """Return the rendezvous store of the default group.

    Raises:
        Exception: there is no default group.
    """
    return distributed_c10d._get_default_store()


def new_group(ranks: Sequence[int], backend: str, name: str, described: str, timeout: timedelta) -> dist.ProcessGroup:
    """Create a process group by its members only; ``dist.new_group`` is collective over all ranks.

    Args:
        ranks: ranks of the default group, including this one, in the order of the new group.
        backend: name of the backend.
        name: name of the group, which is equal on all members and used once.
        described: description for messages.
        timeout: timeout of its operations.
    """
    order = list(ranks)
    unique: Any = name
    rank, kind, store = order.index(dist.get_rank()), dist.Backend(backend), default_store()
    made, _ = distributed_c10d._new_process_group_helper(
        len(order), rank, order, kind, store, unique, timeout=timeout, group_desc=described
    )
    distributed_c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(order)}
    group: dist.ProcessGroup = made
    return group


def group_is_known(group: dist.ProcessGroup) -> bool:
    """Return True if torch still has the group: neither it nor the default group has been destroyed."""
    return dist.is_initialized() and group in distributed_c10d._world.pg_map


def abort_group(group: dist.ProcessGroup) -> None:
    """Abort the group without waiting for the peers."""
    distributed_c10d._abort_process_group(group)
