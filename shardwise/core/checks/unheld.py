"""What stands in a state for a value that its rank has not."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from shardwise.core.base.torch_internals import each_leaf, no_own_torch_function, wrapper_subclass

__all__ = ["Unheld"]


class Unheld(torch.Tensor):
    """Has the shape, dtype and device of a value, and is an error as soon as that is read, copied or saved.

    Programs ask a layer for its state to see its names (adapters do), which one rank can tell.
    """

    why: str
    # Shapes and dtypes are no values.
    __torch_function__ = no_own_torch_function  # type: ignore[assignment]

    @staticmethod
    def of(like: torch.Tensor, why: str) -> Unheld:
        """In the place of ``like``; ``why`` is what the error says."""
        made: Unheld = wrapper_subclass(Unheld, like, like.device)
        made.why = why
        return made

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(self.why)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        found = [each for each in each_leaf((args, kwargs)) if isinstance(each, Unheld)]
        raise RuntimeError(found[0].why)

    __reduce_ex__ = __deepcopy__ = __dlpack__ = _refuse
    tolist = data_ptr = untyped_storage = _refuse
    numpy = _refuse

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"<{self.why}>"
