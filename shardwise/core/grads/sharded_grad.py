"""The tensor in ``.grad`` of a sharded parameter: it has no memory, and its operations act on the shards.

Norms and element-wise edits (all that gradient clipping needs) act on this rank's part and gather nothing. Any other
operation gathers the parameter's full gradient, averaged and unscaled, and writes go back into the shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch

from shardwise.core.base.tensors import ordinary_tensors
from shardwise.core.base.torch_internals import (
    current_node,
    each_leaf,
    map_leaves,
    no_own_torch_function,
    wrapper_subclass,
)


class NoMemory(torch.UntypedStorage):
    """A storage of no bytes, for tools that count memory and for the compiler. Access to its elements raises."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(without_memory("the storage", "a gradient of a sharded parameter"))

    tolist = data_ptr = clone = cpu = cuda = copy_ = resize_ = _refuse
    __getitem__ = __setitem__ = __iter__ = _refuse


def without_memory(what: str, of: object) -> str:
    """Return the message of the error for operation ``what``."""
    return f"{what} of {of}: it has no memory of its own; call clone() on every rank first"


aten = torch.ops.aten
View = Callable[[torch.Tensor], torch.Tensor]


class GradOwner(Protocol):
    """The object that has the gradients. ``index`` is a parameter's.

    Attributes:
        loss_scaled: whether a step is skipped if some value is not finite.
    """

    loss_scaled: bool

    def check_use(self, index: int, what: str) -> None:
        """Raise unless the gradient can be used now by operation ``what``."""

    def check_caller(self, index: int, what: str) -> None:
        """Raise if an optimizer of the user's own, made on sharded parameters, does ``what``."""

    def full(self, index: int, wide: bool) -> torch.Tensor:
        """Return the full averaged, unscaled gradient in a new tensor. Collective.

        With ``wide`` the dtype is at least fp32.
        """

    def zeroed(self, index: int) -> bool:
        """Return whether the gradient, which is to be set to zero, has been used already, so that nothing is left."""

    def norms(self, indices: Sequence[int], p: float) -> list[torch.Tensor]:
        """Return the p-norm of each gradient, 0-dim. Collective."""

    def part(self, index: int, operands: tuple[Any, ...] | None, replaces: bool) -> tuple[torch.Tensor, slice, float]:
        """Return this rank's part (1-D) for a write, its place in the flat parameter, and its scale.

        Args:
            index: index of the parameter.
            operands: numbers and full tensors of the edit; ``None`` if they may differ between ranks.
            replaces: whether the first operand replaces the gradient.
        """

    def writes_parameter(self, index: int, target: torch.Tensor) -> bool:
        """Return whether ``target`` shares memory with the parameter."""

    def name(self, index: int) -> str:
        """Return the parameter's name."""


# See [Note: What stands in .grad].
class ShardedGrad(torch.Tensor):
    """The gradient of one sharded parameter, of its shape, dtype and device. Views of it are of this class, too.

    Every operation is collective: norms cost one small exchange for all parameters, operations that read elements one
    gather. Every rank has to make the same in-place edits. Printing a gradient gathers nothing.
    """

    # Calls go directly to the dispatcher.
    __torch_function__ = no_own_torch_function  # type: ignore[assignment]

    owner: Callable[[], GradOwner | None]
    param_index: int
    views: tuple[View, ...]
    complete: bool
    arrived: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        owner: Callable[[], GradOwner | None],
        index: int,
        like: torch.Tensor,
        device: torch.device,
        views: tuple[View, ...] = (),
        complete: bool = True,
    ) -> ShardedGrad:
        """Initialize a gradient or a view of it.

        Args:
            owner: returns the owner of the gradients, or ``None`` when the session is closed.
            index: the parameter's.
            like: a tensor on any device with the shape, strides and dtype.
            device: device of the results.
            views: functions that make the view from the gradient, applied in order.
            complete: whether the view has each element of the gradient once.
        """
        self: ShardedGrad = wrapper_subclass(cls, like, device)
        self.owner, self.param_index, self.views, self.complete, self.arrived = owner, index, views, complete, None
        return self

    def checked_owner(self, what: str) -> GradOwner:
        """Return the owner, for operation ``what``.

        Raises:
            RuntimeError: the gradient cannot be used now.
        """
        owner = self.owner()
        if owner is None:
            raise RuntimeError(
                f"{what} of a gradient (parameter {self.param_index}) whose session is gone: keep a clone()"
            )
        owner.check_use(self.param_index, what)
        return owner

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        """False. Optimizers read this before they change anything, so one that must not step gets its error here."""
        owner = self.owner()
        if owner is not None:
            owner.check_caller(self.param_index, "is_sparse")
        return False

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        owner = self.owner()
        name = "of a session that is gone" if owner is None else f"of {owner.name(self.param_index)!r}"
        return f"ShardedGrad({name}, shape={tuple(self.shape)}, dtype={self.dtype}; every rank: clone() to see it)"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self) if self.dim() or not spec else format(self.item(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def data_ptr(self) -> int:
        """Raise, because there is no memory to point to."""
        raise RuntimeError(without_memory("data_ptr()", self))

    def untyped_storage(self) -> torch.UntypedStorage:
        """A storage of no bytes; access to its elements raises."""
        return NoMemory(0, device=self.device)  # type: ignore[no-untyped-call]

    def storage(self) -> NoReturn:
        """Raise, as :meth:`data_ptr`."""
        raise RuntimeError(without_memory("storage()", self))

    def __dlpack__(self, **_kwargs: Any) -> Any:
        """Raise, since a consumer could write to the array, which would be a copy."""
        raise BufferError(without_memory("__dlpack__()", self))

    def is_shared(self) -> bool:
        """False, since another process gets a copy."""
        return False

    def share_memory_(self) -> ShardedGrad:
        """Do nothing, so that a model with gradients can be shared."""
        return self

    def numpy(self, *, force: bool = False) -> Any:
        """As :meth:`torch.Tensor.numpy`, read-only, since writes to a copy would be lost."""
        array = self.clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """As :meth:`torch.Tensor.tolist`."""
        return self.clone().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError(without_memory("__array__()", self))
        array = self.numpy()
        return array.astype(array.dtype if dtype is None else dtype, copy=bool(copy))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet in (aten.add_, aten.add):
            node = current_node()
            if node is not None and node.name().endswith("AccumulateGrad"):
                return _arrive(packet, args[0], args[1])
        handler = _HANDLERS.get(packet)
        if handler is not None:
            done = handler(*args, **kwargs)
            if done is not NotImplemented:
                return done
        if packet in _SAME:
            return _view(args[0], None, args[0], complete=True)
        if packet in _LIKE:
            return func(_stand_in(args[0]), *args[1:], **kwargs)
        if _is_view(func):
            return _take_view(func, args, kwargs)
        name = str(packet).removeprefix("aten.")
        if name.startswith("_foreach_") and name.endswith("_"):
            return _one_by_one(getattr(aten, name.removeprefix("_foreach_"), None), func, args, kwargs)
        return _on_full_grads(func, args, kwargs)


_SAME = {aten.detach, aten.alias, aten.lift_fresh}
_LIKE = {aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like}
_LIKE |= {aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty_strided}
_COMPLETE = {aten.view, aten._reshape_alias, aten.t, aten.transpose, aten.permute, aten.unsqueeze, aten.squeeze}


def _arrive(packet: Any, present: Any, arriving: torch.Tensor) -> torch.Tensor:
    """Take the running pass's gradient, which autograd adds to the one in ``.grad``."""
    if not isinstance(present, ShardedGrad):  # the arriving gradient is ours: the loss depends on a gradient
        return packet(present, arriving.clone())  # type: ignore[no-any-return]
    present.arrived = arriving
    return present if packet is aten.add_ else arriving


# ---- views


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write


def _view(base: ShardedGrad, view: View | None, like: torch.Tensor, complete: bool) -> ShardedGrad:
    views = base.views if view is None else (*base.views, view)
    return ShardedGrad(base.owner, base.param_index, like, base.device, views, base.complete and complete)


def _take_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base, arguments = args[0], args[1:]
    flat = torch.empty_strided(base.size(), base.stride(), dtype=base.dtype, device="meta")
    shape = func(flat, *arguments, **kwargs)
    complete = func.overloadpacket in _COMPLETE
    if isinstance(shape, torch.Tensor):
        return _view(base, lambda grad: func(grad, *arguments, **kwargs), shape, complete)
    return [
        _view(base, lambda grad, at=at: func(grad, *arguments, **kwargs)[at], one, False)  # type: ignore[misc]
        for at, one in enumerate(shape)
    ]


def _stand_in(like: ShardedGrad) -> torch.Tensor:
    return torch.empty((), dtype=like.dtype, device=like.device).expand(like.size())


# ---- norms


def _vector_norm(
    x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    p = float(ord)
    if not isinstance(x, ShardedGrad) or not x.complete or dim not in (None, []) or keepdim or not p > 0.0:
        return NotImplemented
    (norm,) = x.checked_owner("the norm").norms([x.param_index], p)
    return norm if dtype is None else norm.to(dtype)


def _norm(x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return _vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


def _foreach_norm(tensors: Sequence[Any], ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
    ours = [each for each in tensors if isinstance(each, ShardedGrad)]
    if not all(each.complete for each in ours) or not float(ord) > 0.0:
        return NotImplemented
    owners = {id(owner): owner for owner in (each.checked_owner("the norm") for each in ours)}
    by_id: dict[int, torch.Tensor] = {}
    for owner in owners.values():
        own = [each for each in ours if each.owner() is owner]
        by_id.update(zip(map(id, own), owner.norms([each.param_index for each in own], float(ord)), strict=True))
    norms = [by_id[id(each)] if id(each) in by_id else torch.linalg.vector_norm(each, float(ord)) for each in tensors]
    return norms if dtype is None else [norm.to(dtype) for norm in norms]


# ---- edits of this rank's part


def _plain(value: Any) -> bool:
    return not isinstance(value, torch.Tensor)


def _local(name: str, edit: Callable[..., None], operands: int, bounds: bool = False) -> Callable[..., Any]:
    """Return a handler that calls ``edit(part, scale, *operands)`` with numbers and this rank's parts of tensors.

    Under a loss scale non-finite values stay if the edit only ``bounds`` values, so that the step is skipped.
    """

    def handler(x: Any, *arguments: Any, **kwargs: Any) -> Any:
        if not isinstance(x, ShardedGrad) or not x.complete:
            return NotImplemented
        values = list(arguments[:operands])
        if any(isinstance(each, ShardedGrad) for each in arguments) or not all(map(_plain, kwargs.values())):
            return NotImplemented
        tensors = [each for each in values if isinstance(each, torch.Tensor) and each.dim()]
        if tensors and (x.views or any(each.size() != x.size() for each in tensors)):
            return NotImplemented
        operands_of_all = (*arguments, *kwargs.values())
        owner = x.checked_owner(f"{name}()")
        part, where, scale = owner.part(x.param_index, operands_of_all, name == "copy_")
        for at, each in enumerate(values):
            if isinstance(each, torch.Tensor) and each.dim():
                values[at] = each.detach().reshape(-1)[where].to(part.device)
            elif isinstance(each, torch.Tensor):
                values[at] = each.detach().to(part.device)
        if part.numel() and bounds and owner.loss_scaled:
            bounded = part.clone()
            edit(bounded, scale, *values, *arguments[operands:], **kwargs)
            part.copy_(torch.where(part.isfinite(), bounded, part))
        elif part.numel():
            edit(part, scale, *values, *arguments[operands:], **kwargs)
        return x

    return handler


def _add(part: torch.Tensor, scale: float, other: Any, alpha: Any = 1) -> None:
    # Cast the other operand to the wider of both dtypes before it is scaled.
    part.add_(other, alpha=alpha * scale)


def _sub(part: torch.Tensor, scale: float, other: Any, alpha: Any = 1) -> None:
    part.add_(other, alpha=-alpha * scale)


def _bound(value: Any, scale: float, dtype: torch.dtype) -> Any:
    """Return a bound in the units of the stored values; an infinite bound stays infinite, a finite one finite."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return value.double() * scale
    limit = torch.finfo(dtype).max
    return value if math.isinf(value) else max(-limit, min(limit, value * scale))


def _clamp(part: torch.Tensor, scale: float, min: Any = None, max: Any = None) -> None:
    low, high = _bound(min, scale, part.dtype), _bound(max, scale, part.dtype)
    if isinstance(low, torch.Tensor) or isinstance(high, torch.Tensor):
        part.copy_(torch.clamp(part.double(), _as_tensor(low, part), _as_tensor(high, part)))
    else:
        part.clamp_(low, high)


def _as_tensor(value: Any, part: torch.Tensor) -> torch.Tensor | None:
    if value is None or isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64, device=part.device)


def _copy(part: torch.Tensor, scale: float, source: Any, non_blocking: bool = False) -> None:
    if isinstance(source, torch.Tensor):
        part.copy_(source)
    else:
        part.fill_(source)
    if scale != 1.0:
        part.mul_(scale)


def _nan_to_num(
    part: torch.Tensor, scale: float, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> None:
    values = [_bound(value, scale, part.dtype) for value in (nan, posinf, neginf)]
    part.nan_to_num_(*values)


def _mul(part: torch.Tensor, scale: float, other: Any) -> None:
    part.mul_(other)


_zero_part = _local("zero_", lambda part, scale: part.zero_(), 0)


def _zero(x: Any) -> Any:
    owner = x.owner() if isinstance(x, ShardedGrad) and x.complete else None
    return x if owner is not None and owner.zeroed(x.param_index) else _zero_part(x)


def _div(x: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None:  # rounding values in other units gives another result
        return NotImplemented
    return _local("div_", lambda part, scale, by: part.div_(by), 1)(x, other)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm: _vector_norm,
    aten.norm: _norm,
    aten._foreach_norm: _foreach_norm,
    aten.mul_: _local("mul_", _mul, 1),
    aten.div_: _div,
    aten.add_: _local("add_", _add, 1),
    aten.sub_: _local("sub_", _sub, 1),
    aten.neg_: _local("neg_", lambda part, scale: part.neg_(), 0),
    aten.zero_: _zero,
    aten.fill_: _local("fill_", _copy, 1),
    aten.copy_: _local("copy_", _copy, 1),
    aten.clamp_: _local("clamp_", _clamp, 2, bounds=True),
    aten.clamp_min_: _local("clamp_min_", lambda part, scale, low: _clamp(part, scale, low), 1, bounds=True),
    aten.clamp_max_: _local("clamp_max_", lambda part, scale, high: _clamp(part, scale, None, high), 1, bounds=True),
    aten.nan_to_num_: _local("nan_to_num_", _nan_to_num, 0, bounds=True),
}


# ---- anything else


def _one_by_one(op: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Apply an in-place operation on lists to each element."""
    if op is None:
        _on_full_grads(func, args, kwargs)
        return
    count = len(args[0])
    for at in range(count):
        own = [each[at] if isinstance(each, (list, tuple)) else each for each in args]
        named = {key: each[at] if isinstance(each, (list, tuple)) else each for key, each in kwargs.items()}
        op(*own, **named)


def _on_full_grads(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply any operation to gathered gradients, and write changes of them back into the shards."""
    what = str(func.overloadpacket).removeprefix("aten.") + "()"
    ours = {id(each): each for each in each_leaf((args, kwargs)) if isinstance(each, ShardedGrad)}
    if func.namespace in ("c10d", "_c10d_functional"):
        first = next(iter(ours.values()))
        raise RuntimeError(
            f"{what} with {first!r}: .grad of a sharded parameter is averaged over the ranks already; leave this out"
        )
    written = _written(func, args, kwargs)
    _check_targets(what, written, list(ours.values()))
    wide = func.overloadpacket is aten._to_copy
    full: dict[tuple[int, int], torch.Tensor] = {}
    before: dict[tuple[int, int], torch.Tensor] = {}
    changed = {(id(each.owner()), each.param_index): each for each in written if isinstance(each, ShardedGrad)}

    def plain(each: Any) -> Any:
        if not isinstance(each, ShardedGrad):
            return each
        owner = each.checked_owner(what)
        key = (id(owner), each.param_index)
        if key not in full:
            with ordinary_tensors():
                full[key] = owner.full(each.param_index, wide)
            if key in changed:
                before[key] = full[key].clone()
        grad = full[key]
        for view in each.views:
            grad = view(grad)
        return grad

    plain_args, plain_kwargs = map_leaves(plain, (args, kwargs))
    if wide:
        plain_kwargs.setdefault("dtype", args[0].dtype)
        if plain_kwargs["dtype"] is None:
            plain_kwargs["dtype"] = args[0].dtype
    result = func(*plain_args, **plain_kwargs)
    for key, grad in changed.items():
        _take_over(grad, before[key], full[key])
    returned = func._schema.returns
    return written[0] if written and returned and returned[0].alias_info is not None else result


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            tensors += [each for each in each_leaf(value) if isinstance(each, torch.Tensor)]
    return tensors


def _check_targets(what: str, written: Sequence[torch.Tensor], ours: Sequence[ShardedGrad]) -> None:
    for target in written:
        if isinstance(target, ShardedGrad):
            continue
        for grad in ours:
            owner = grad.checked_owner(what)
            if owner.writes_parameter(grad.param_index, target):
                raise RuntimeError(
                    f"{what} updates {owner.name(grad.param_index)!r} with its .grad by hand; a sharded parameter is "
                    "only changed by step() of the sharded optimizer: pass its optimizer when you shard the model"
                )


def _take_over(grad: ShardedGrad, before: torch.Tensor, after: torch.Tensor) -> None:
    """Write the changed elements back; unchanged elements keep a precision that the parameter's dtype may not have."""
    part, where, scale = grad.checked_owner("a change").part(grad.param_index, None, False)
    old, new = (each.reshape(-1)[where].to(part.device) for each in (before, after))
    part.copy_(torch.where(old == new, part, new.to(part.dtype) * scale))
