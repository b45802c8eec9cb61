"""Checks of ``state_dict()`` and ``load_state_dict()`` of the user's own modules while they are sharded.

A state with full values is returned; otherwise an error names the call that returns full values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from shardwise.core.base.state_dict_names import StateNames
from shardwise.core.base.torch_internals import each_leaf, no_own_torch_function, wrapper_subclass
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.gather import ChunkPool
from shardwise.core.shards.layout import Layout


class AbsentTensor(torch.Tensor):
    """A tensor with the shape, dtype and device of a value, which raises when it is read, copied or saved.

    Programs such as adapters request the state of a layer to see its names, which a single rank has.
    """

    why: str
    # Shapes and dtypes can be read without the values.
    __torch_function__ = no_own_torch_function  # type: ignore[assignment]

    @staticmethod
    def of(like: torch.Tensor, why: str) -> AbsentTensor:
        """Return the stand-in for ``like``. ``why`` is the message of the error that a read of it raises."""
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
# Programs call the model itself, on one rank alone: `if rank == 0: torch.save(model.state_dict(), path)`. If parameters
# stay gathered, the result is that of plain torch, in the compute dtype, and needs no other rank: gathers of these
# parameters that are under way began on all ranks, and end without further calls. If this rank lacks some values, the
# call raises at once, since waiting for ranks that do something else would raise only after a timeout. The parameters
# of each module are checked separately, because each module has a state_dict(). Programs may need only the names of
# these, so the error is raised when a value is used (AbsentTensor).
class StateDictGuard:
    """Watches ``state_dict()`` and ``load_state_dict()`` of one sharded model and of the modules in it.

    Args:
        model: the user's module.
        params: the sharded parameters of the model, by index.
        chunks, layout: the chunks in which the parameters are stored, and their layout.
        pool: the pool of gathered units.
        staged: whether other ranks have other layers.
        check: raises if values are half-changed.
        structure: raises if modules were replaced.

    Attributes:
        allows_loads: whether writes to parameters are kept now, that is, inside ``gathered(write_back=True)``.
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
        self._naming = self._giving = self.allows_loads = False
        self._lacks: dict[int, str] = {}
        """By ``id`` of a parameter that this rank never has in full, not even inside ``gathered()``: the reason."""
        self._transient: dict[int, tuple[int, str]] = {}
        """By ``id`` of a parameter that is not always gathered: its unit, and the message while it is not gathered."""
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
                # Torch sets an attribute on the hook, which a bound method does not allow.
                after = partial(self._after_saving)
                saved = module.register_state_dict_post_hook(after)  # type: ignore[no-untyped-call]
                self._handles += [saving, loading, saved]

    def names(self) -> StateNames:
        """Return the names under which the user's module saves its values."""
        # Only the names are used; no value of this state is saved.
        self._naming = True
        try:
            return StateNames.read(self.model, self._params)
        finally:
            self._naming = False

    @contextmanager
    def giving(self) -> Iterator[None]:
        """Return a context in which modules load values that are not parameters by their own methods."""
        before, self._giving = self._giving, True
        try:
            yield
        finally:
            self._giving = before

    def watches(self, hook: Any) -> bool:
        """Return whether a pre-hook of loads belongs to this guard."""
        return getattr(getattr(hook, "hook", None), "__self__", None) is self

    def _missing(self, module: nn.Module) -> str:
        """Return which part of a module's own parameters (for the model: of all) this rank lacks; empty if it lacks
        none."""
        of_model = module is self.model
        if of_model and self._stages:
            return self._stages
        return next(filter(None, map(self._lacked, module.parameters(recurse=of_model))), "")

    def _lacked(self, param: nn.Parameter) -> str:
        """Return why this rank does not have the full parameter; empty if it has."""
        unit, absent = self._transient.get(id(param), (-1, ""))
        return self._lacks.get(id(param), "" if self._pool.blocks.holds(unit) else absent)

    def _before_saving(self, module: nn.Module, *_args: object) -> None:
        if self._naming:
            return
        self._check()
        self._pool.settle()
        if module is self.model and (missing := self._missing(module)):
            self._check_structure()  # adapters that were added too late: they read a state first
            raise RuntimeError(self._lacking(module, missing))

    def _after_saving(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        if self._naming:
            return
        for name, param in module._parameters.items():
            if param is not None and prefix + name in state and (missing := self._lacked(param)):
                state[prefix + name] = AbsentTensor.of(param, self._lacking(module, missing))

    def _lacking(self, module: nn.Module, missing: str) -> str:
        names = self._pool.names
        return (
            f"state_dict() of the sharded {type(module).__name__} itself would save only this rank's shards: {missing};"
            f" use {names.save}, or call it, on every rank, on {names.module} or inside its gathered() block, and give "
            "the result to save_pretrained(path, state_dict=...)"
        )

    def _before_loading(self, module: nn.Module, *_args: object) -> None:
        if self._giving or (self.allows_loads and self._pool.blocks.all_gathered):
            return
        self._pool.settle()  # otherwise a pending renewal of the last step would overwrite loaded values
        missing = self._missing(module)
        if not missing and self.allows_loads:
            return
        if not missing and self._pool.blocks.any_open:
            missing = "inside gathered() without write_back=True"
        # Another method loads the whole model, unless a class of the user overrides load_state_dict().
        elif not missing and module is self.model:
            missing = "fp32 masters"
        if missing:
            self._check_structure()
            raise RuntimeError(
                f"load_state_dict() of the sharded {type(module).__name__} itself would bypass shards and masters "
                f"({missing}); call it, on every rank, on the whole model or {self._pool.names.module}, or inside its "
                "gathered(write_back=True) block"
            )

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
