"""The states of the user's own modules while they are sharded: whole, or an error that says who has them whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from shardwise.core.base.names import StateNames
from shardwise.core.base.torch_internals import each_leaf, no_own_torch_function, wrapper_subclass
from shardwise.core.base.validate import SHARDED_MODEL
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.layout import Layout
from shardwise.core.shards.pool import ChunkPool

SAVE = (
    f"call it, on every rank, on {SHARDED_MODEL}, or inside its gathered() block; give the result to "
    "save_pretrained(path, state_dict=...)"
)
LOAD = f"call it, on every rank, on the whole model or {SHARDED_MODEL}, or inside its gathered(write_back=True) block"


class AbsentTensor(torch.Tensor):
    """Has the shape, dtype and device of a value, and is an error as soon as that is read, copied or saved.

    Programs ask a layer for its state to see its names (adapters do), which one rank can tell.
    """

    why: str
    # Shapes and dtypes are no values.
    __torch_function__ = no_own_torch_function  # type: ignore[assignment]

    @staticmethod
    def of(like: torch.Tensor, why: str) -> AbsentTensor:
        """In the place of ``like``; ``why`` is what the error says."""
        made: AbsentTensor = wrapper_subclass(AbsentTensor, like, like.device)
        made.why = why
        return made

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(self.why)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        absent = [each for each in each_leaf((args, kwargs)) if isinstance(each, AbsentTensor)]
        raise RuntimeError(absent[0].why)

    __reduce_ex__ = __deepcopy__ = __dlpack__ = _refuse
    tolist = data_ptr = untyped_storage = _refuse
    numpy = _refuse

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"<{self.why}>"


# [Note: What one rank has of the user's own model]
# Programs ask the model itself, on one rank alone: `if rank == 0: torch.save(model.state_dict(), path)`. Where
# parameters stay gathered that is what plain torch gives, in the compute dtype, and no other rank is needed for it:
# gathers of them that are under way began on all ranks, and end without their calls. Where this rank has less than the
# whole it is an error at once, since a rank that waits for others that go elsewhere says so only when its time is over.
# Each module's own parameters are looked at, because each has a state_dict() of its own. Of these programs may want the
# names alone, so it is the values that are the error (AbsentTensor).
class StateDictGuard:
    """Watches ``state_dict()`` and ``load_state_dict()`` of one sharded model and of the modules in it.

    Args:
        model: the user's module.
        params: its sharded parameters, by index.
        chunks, layout: where they lie.
        pool: knows what is gathered.
        staged: other ranks have other layers.
        check: raises where values are neither old nor new.
        structure: raises where modules were replaced.

    Attributes:
        keeps_loads: what is written to parameters now is taken over: inside ``gathered(write_back=True)``.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[nn.Parameter],
        chunks: Sequence[Chunk],
        layout: Layout,
        pool: ChunkPool,
        staged: bool,
        check: Callable[[], None],
        structure: Callable[[], None],
    ) -> None:
        self.model, self._params, self._pool = model, params, pool
        self._check, self._check_structure = check, structure
        self._naming = self._giving = self.keeps_loads = False
        self._lacks: dict[int, str] = {}
        """By ``id`` of a parameter of which this rank has less than the whole even inside ``gathered()``: what."""
        self._transient: dict[int, tuple[int, str]] = {}
        """By ``id`` of a parameter that is not always gathered: its unit, and what is said while it is not."""
        for index, (param, fact) in enumerate(zip(params, layout.facts, strict=True)):
            if fact.part is not None:
                self._lacks[id(param)] = f"{fact.names[0]} is a part of a layer that ranks hold together"
            elif not (chunk := chunks[layout.where[index][0]]).resident:
                self._transient[id(param)] = chunk.spec.unit, f"{fact.names[0]} is not gathered"
        self._stages = "the other ranks' layers are not here" if staged else ""
        self._handles: list[Any] = []
        for module in model.modules():
            if module is model or module._parameters:
                saving = module.register_state_dict_pre_hook(self._before_saving)  # type: ignore[no-untyped-call]
                loading = module.register_load_state_dict_pre_hook(self._before_loading)  # type: ignore[no-untyped-call]
                # Torch puts a mark on what it is given, which a method does not take.
                after = partial(self._after_saving)
                saved = module.register_state_dict_post_hook(after)  # type: ignore[no-untyped-call]
                self._handles += [saving, loading, saved]

    def names(self) -> StateNames:
        """Under which names the user's module saves what."""
        # The module is asked for its names only; nothing of what it gives is saved.
        self._naming = True
        try:
            return StateNames.read(self.model, self._params)
        finally:
            self._naming = False

    @contextmanager
    def giving(self) -> Iterator[None]:
        """Inside the block modules get what is no parameter, by their own methods."""
        before, self._giving = self._giving, True
        try:
            yield
        finally:
            self._giving = before

    def watches(self, hook: Any) -> bool:
        """Whether a hook before loads is this one's."""
        return getattr(getattr(hook, "hook", None), "__self__", None) is self

    def _missing(self, module: nn.Module) -> str:
        """What of a module's own parameters, of the whole model's all, this rank lacks; empty where nothing."""
        of_model = module is self.model
        if of_model and self._stages:
            return self._stages
        return next(filter(None, map(self._lacked, module.parameters(recurse=of_model))), "")

    def _lacked(self, param: nn.Parameter) -> str:
        """Why this rank has less than the whole of a parameter; empty where it has all."""
        unit, absent = self._transient.get(id(param), (-1, ""))
        return self._lacks.get(id(param), "" if self._pool.blocks.holds(unit) else absent)

    def _before_saving(self, module: nn.Module, *_args: object) -> None:
        if self._naming:
            return
        self._check()
        self._pool.settle()
        if module is self.model and (missing := self._missing(module)):
            self._check_structure()  # adapters that came too late: what reads them reads a state first
            raise RuntimeError(self._lacking(module, missing))

    def _after_saving(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        if self._naming:
            return
        for name, param in module._parameters.items():
            if param is not None and prefix + name in state and (missing := self._lacked(param)):
                state[prefix + name] = AbsentTensor.of(param, self._lacking(module, missing))

    @staticmethod
    def _lacking(module: nn.Module, missing: str) -> str:
        return (
            f"state_dict() of the sharded {type(module).__name__} itself would save only this rank's shards: {missing};"
            f" {SAVE}"
        )

    def _before_loading(self, module: nn.Module, *_args: object) -> None:
        if self._giving or (self.keeps_loads and self._pool.blocks.all_held):
            return
        self._pool.settle()  # what a step has left under way would arrive over what is loaded
        missing = self._missing(module)
        if not missing and self.keeps_loads:
            return
        if not missing and self._pool.blocks.any_open:
            missing = "inside gathered() without write_back=True"
        # Of the whole model it is another method's affair, unless a class of the user's has its own.
        elif not missing and module is self.model:
            missing = "fp32 masters"
        if missing:
            self._check_structure()
            raise RuntimeError(
                f"load_state_dict() of the sharded {type(module).__name__} itself would bypass shards and masters "
                f"({missing}); {LOAD}"
            )

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
