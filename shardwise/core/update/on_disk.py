"""What stands in the optimizer's ``state`` for a tensor that is on a disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.core.base.torch_internals import give_subclass, no_subclass_dispatch

__all__ = ["OnDisk"]

DESCRIBE = ("dim", "size", "numel", "nelement", "element_size", "is_floating_point", "data_ptr", "__hash__", "__len__")


class OnDisk(torch.Tensor):
    """Has shape and dtype and no values. Another tensor may be put in its place; every use of it is an error."""

    @staticmethod
    def like(tensor: torch.Tensor) -> OnDisk:
        """In place of ``tensor``, which goes to the disk."""
        fill = float("nan") if tensor.is_floating_point() else 0
        absent = torch.full((), fill, dtype=tensor.dtype, device="cpu").expand(tensor.shape)
        made: OnDisk = give_subclass(OnDisk, absent)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in DESCRIBE and name != "__get__":
            raise RuntimeError(
                f"{name}() of optimizer state that is on a disk: assign a new tensor, state[parameter][key] = ...; "
                "to read it call state_dict() of what boost/build returned; to change it in place keep it in memory "
                "(a smaller share on the disk)"
            )
        with no_subclass_dispatch():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"OnDisk({tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, _memo: object) -> torch.Tensor:
        raise RuntimeError(f"a copy of {self!r}: call state_dict() of what boost/build returned")

    def __reduce_ex__(self, _protocol: object) -> Any:
        raise RuntimeError(f"saving {self!r}: call state_dict() of what boost/build returned")
