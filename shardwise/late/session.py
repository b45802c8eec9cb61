"""The session of a model, from when it is asked for, and what stands for model and optimizer until then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.core.base.attributes import TransparentModule, attribute_of
from shardwise.core.engine.attachment import weakly
from shardwise.session import Session

__all__ = ["LateModule", "LateOptimizer", "LateSession"]

Make = Callable[[nn.Module, Sequence[torch.optim.Optimizer]], Session]


class LateSession:
    """The session of one model, from when it is asked for.

    Args:
        module: the user's, whole.
        make: shards it with the optimizers; collective.
        undo: makes it whole again; ``None``: :meth:`~shardwise.session.Session.unshard`.
    """

    def __init__(self, module: nn.Module, make: Make, undo: Callable[[Session], None] | None = None) -> None:
        self.module, self._make, self._undo = module, make, undo or Session.unshard
        self._optimizers: list[torch.optim.Optimizer] = []
        self._session: Session | None = None
        self._watching: list[Any] = []
        self._watch()

    def _watch(self) -> None:
        """A backward pass of the whole model would train each rank's alone."""
        whole = [param for param in self.module.parameters() if param.requires_grad and param.is_leaf]
        hook = weakly(self._refuse_gradient)
        self._watching = [each.register_post_accumulate_grad_hook(hook) for each in whole]  # type: ignore[no-untyped-call]

    def _refuse_gradient(self, param: torch.Tensor) -> None:
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if ranks > 1:
            param.grad = None
            raise RuntimeError(
                f"a backward pass of the {type(self.module).__name__} itself, which is sharded over {ranks} ranks at "
                "the first forward pass of what wraps it: until then each rank would train its own; call the wrapper "
                "first"
            )

    def _unwatch(self) -> None:
        for handle in self._watching:
            handle.remove()
        self._watching.clear()

    @property
    def built(self) -> bool:
        """Whether there is a session."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """The session; built here where there is none yet, which is collective."""
        if self._session is None:
            self._unwatch()
            try:
                self._session = self._make(self.module, tuple(self._optimizers))
            finally:
                if self._session is None:
                    self._watch()
        return self._session

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Those that came until now, the user's own."""
        return tuple(self._optimizers)

    def add(self, optimizer: torch.optim.Optimizer) -> LateOptimizer:
        """Have the model sharded with one more optimizer; what updates it.

        A model that was sharded without any (used before) is made whole, and sharded anew at its next use.

        Raises:
            RuntimeError: it was sharded with others, or has gradients already.
        """
        if self._session is not None:
            if self._session.optimizers or self._session.has_gradients:
                what = f"{len(self._session.optimizers)} optimizers" if self._session.optimizers else "gradients"
                raise RuntimeError(
                    f"{type(optimizer).__name__} came after the first use of the {type(self.module).__name__}, which "
                    f"is sharded and has {what}: make all optimizers before the model's first forward pass"
                )
            session, self._session = self._session, None
            self._undo(session)
            self._watch()
        self._optimizers.append(optimizer)
        return LateOptimizer(self, optimizer)

    def once(self, make: Make, use: Callable[[Session], Any]) -> Any:
        """``use`` of a session that lasts only for it: the model is whole before and after. Collective.

        Raises:
            RuntimeError: there is a session, or an optimizer.
        """
        if self.built or self._optimizers:
            raise RuntimeError(f"the {type(self.module).__name__} has a session or an optimizer: use these")
        self._unwatch()
        try:
            session = make(self.module, ())
            try:
                return use(session)
            finally:
                session.unshard()
        finally:
            self._watch()

    def close(self) -> None:
        """Remove what sharding put on the model; see :meth:`~shardwise.session.Session.close`."""
        self._unwatch()
        if self._session is not None:
            self._session.close()
            self._session = None


class LateModule(TransparentModule):
    """Calls the sharded module; its other attributes are the user's."""

    def __init__(self, late: LateSession) -> None:
        super().__init__()
        self.__dict__["late"] = late
        self.module = late.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user's module on the (cast) arguments."""
        return self._sharded(*args, **kwargs)

    @property
    def _sharded(self) -> Any:
        late: LateSession = self.__dict__["late"]
        return late.session.module

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        if self.late.built:
            self._sharded.zero_grad(set_to_none)
        else:
            super().zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The full state on every rank; see ``state_dict``. Collective."""
        found: dict[str, Any] = self._sharded.state_dict(*args, **kwargs)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over a full state; every rank gives it. Collective."""
        return self._sharded.load_state_dict(state_dict, strict, assign)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> LateModule:
        """``to()``, ``half()`` and the like: of a model that is sharded, where they change nothing."""
        if self.late.built:
            self._sharded._apply(fn, recurse)
        else:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


class LateOptimizer(torch.optim.Optimizer):
    """Steps the sharded model; ``param_groups``, ``defaults`` and ``state`` are the user's own objects."""

    def __init__(self, late: LateSession, optimizer: torch.optim.Optimizer) -> None:
        # Optimizer.__init__ is not called: it would build param groups of its own.
        self.late, self.given = late, optimizer
        self._place = len(late.optimizers) - 1

    @property
    def sharded(self) -> Any:
        """What the session has in its place. Collective where the model is not sharded yet."""
        return self.late.session.optimizers[self._place]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.given.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.given.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.given.state

    def __getattr__(self, name: str) -> Any:
        if name in ("late", "given", "_place"):
            raise AttributeError(name)
        return attribute_of(self.sharded if self.late.built else self.given, name, self)

    def __repr__(self) -> str:
        return f"LateOptimizer({self.given!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{self!r:.80} lives on several ranks and cannot be pickled; use state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Possible until the model is used for the first time."""
        (self.sharded if self.late.built else self.given).add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; see :meth:`shardwise.core.engine.optimizer.ShardedOptimizer.step`. Every rank calls it."""
        return self.sharded.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        (self.sharded if self.late.built else self.given).zero_grad(set_to_none)

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """See :meth:`shardwise.core.engine.optimizer.ShardedOptimizer.clip_grad_by_norm`. Every rank calls it."""
        norm: float = self.sharded.clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """See :meth:`shardwise.core.engine.optimizer.ShardedOptimizer.clip_grad_by_value`. Every rank calls it."""
        self.sharded.clip_grad_by_value(clip_value)

    def state_dict(self, only_rank_0: bool = False) -> dict[str, Any]:
        """The full state, keyed as plain torch keys it. Collective."""
        found: dict[str, Any] = self.sharded.state_dict(only_rank_0)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a full state, ours or plain torch's for the same parameters. Collective."""
        self.sharded.load_state_dict(state_dict)
