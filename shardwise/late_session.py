"""Facades of sharded models and optimizers, and sessions that are built at the first use of the model.

The engine packs parameters by their optimizers. Interfaces that wrap the model before its optimizers exist use a
:class:`LateSession`: the first forward pass (or the first request for a state) builds the session, with the optimizers
that were added until then. An interface that is never given the optimizers
(``torch.optim.Adam(wrapped.parameters())``) finds them with :func:`optimizers_of` and redirects their ``step()`` with
:func:`drive`.

:class:`ModuleFacade` and :class:`OptimizerFacade` are the bases of all wrappers of front-ends. Published names and
arguments belong into the front-ends.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.core.base.module_wrapper import TransparentModule, attribute_of
from shardwise.core.engine.model_hooks import weakly
from shardwise.session import Session, ShardedOptimizer, sharded_of

Make = Callable[[nn.Module, Sequence[torch.optim.Optimizer]], Session]


class ModuleFacade(TransparentModule):
    """Calls the sharded module in place of ``self.module``. Other attributes are those of the user's module."""

    module: nn.Module

    # Private, so that attributes of the user's module are not shadowed.
    @property
    def _sharded(self) -> Any:
        """The sharded module; made here if there is none yet, which is collective."""
        raise NotImplementedError(f"{type(self).__name__}._sharded")

    @property
    def _built(self) -> bool:
        """Whether there is a sharded module."""
        raise NotImplementedError(f"{type(self).__name__}._built")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Floating-point tensors among the arguments are cast to the dtype of the model."""
        return self._sharded(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        if self._built:
            self._sharded.zero_grad(set_to_none)
        else:
            super().zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the full state on the host, under the module's own names. Collective.

        Parameters with masters are in fp32.
        """
        state: dict[str, Any] = self._sharded.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a full state, the same on every rank; each rank keeps its shard. Collective.

        Raises:
            RuntimeError: missing, unexpected or wrongly shaped entries. All are listed, and nothing has changed.
        """
        return self._sharded.load_state_dict(state_dict, strict, assign)


class OptimizerFacade(torch.optim.Optimizer):
    """An optimizer in front of another one.

    ``param_groups``, ``defaults`` and ``state`` are the objects of :attr:`optim`, so that learning-rate schedulers may
    hold either of the two. Methods and unknown attributes are those of :attr:`target`.

    Args:
        optim: the wrapped optimizer.
        target: the optimizer whose methods the facade calls. ``None`` is ``optim`` itself.
    """

    def __init__(self, optim: torch.optim.Optimizer, target: torch.optim.Optimizer | None = None) -> None:
        # Optimizer.__init__ is not called: it would build param groups of its own.
        self.optim, self._target = optim, optim if target is None else target

    @property
    def target(self) -> Any:
        """The optimizer that updates the parameters."""
        return self._target

    @property
    def _current(self) -> Any:
        """The optimizer that has the attributes now. Reading it builds nothing."""
        return self._target

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    def __getattr__(self, name: str) -> Any:
        if name in ("optim", "_target", "late"):  # before __init__
            raise AttributeError(name)
        return attribute_of(self._current, name, self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{self!r:.80} cannot be pickled: its state may be on several ranks; save its state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which is possible until the model is sharded."""
        self._current.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update. Collective. All ranks skip it if a scaled gradient of any rank is not finite."""
        return self.target.step() if closure is None else self.target.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self._current.zero_grad(set_to_none)

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Any:
        """Clip the global norm of all gradients, and return the norm before clipping. Collective."""
        return self.target.clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp every element of the gradients to ``[-clip_value, clip_value]``. Collective."""
        self.target.clip_grad_by_value(clip_value)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the full state, keyed as plain torch keys it. Collective.

        A sharded optimizer takes ``only_rank_0``: the other ranks get groups without state.
        """
        state: dict[str, Any] = self.target.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state, ours or that of plain torch for the same parameters. Collective.

        Raises:
            ValueError: groups or shapes do not match.
        """
        self.target.load_state_dict(state_dict)


class LateSession:
    """The session of one model, built when it is first needed.

    Args:
        module: the user's plain module.
        make: shards the module with its optimizers; collective.
        undo: restores the plain module; ``None``: :meth:`~shardwise.session.Session.unshard`.
    """

    def __init__(self, module: nn.Module, make: Make, undo: Callable[[Session], None] | None = None) -> None:
        self.module, self._make, self._undo = module, make, undo or Session.unshard
        self._optimizers: list[torch.optim.Optimizer] = []
        self._session: Session | None = None
        self._watching: list[Any] = []
        self._watch()

    def _watch(self) -> None:
        """Refuse a backward pass of the plain model, in which each rank would train its own copy."""
        params = [param for param in self.module.parameters() if param.requires_grad and param.is_leaf]
        hook = weakly(self._refuse_gradient)
        self._watching = [each.register_post_accumulate_grad_hook(hook) for each in params]  # type: ignore[no-untyped-call]

    def _refuse_gradient(self, param: torch.Tensor) -> None:
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if ranks > 1:
            param.grad = None
            raise RuntimeError(
                f"backward pass of the plain {type(self.module).__name__}, which is sharded over {ranks} ranks at the "
                "first forward pass of its wrapper. Until then each rank would train its own copy. Call the wrapper "
                "instead"
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
        """The session. The first access builds it, which is collective."""
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
        """The user's optimizers that were added until now."""
        return tuple(self._optimizers)

    def add(self, optimizer: torch.optim.Optimizer) -> LateOptimizer:
        """Add an optimizer with which the model will be sharded, and return the optimizer to use instead.

        A model that was sharded without optimizers (it was used before) is unsharded, and sharded again at its next
        use.

        Raises:
            RuntimeError: the model is sharded with other optimizers, or has gradients.
        """
        if self._session is not None:
            if self._session.optimizers or self._session.has_gradients:
                what = f"{len(self._session.optimizers)} optimizers" if self._session.optimizers else "gradients"
                raise RuntimeError(
                    f"{type(optimizer).__name__} was added after the first use of the {type(self.module).__name__}, "
                    f"which is sharded and has {what}. Make all optimizers before the model's first forward pass"
                )
            session, self._session = self._session, None
            self._undo(session)
            self._watch()
        self._optimizers.append(optimizer)
        return LateOptimizer(self, optimizer)

    def once(self, make: Make, use: Callable[[Session], Any]) -> Any:
        """Return ``use(session)`` of a session that exists during this call only. Collective.

        Raises:
            RuntimeError: there is a session, or an optimizer.
        """
        if self.built or self._optimizers:
            raise RuntimeError(f"the {type(self.module).__name__} has a session or an optimizer already: use those")
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
        """Remove everything that sharding put on the model; see :meth:`~shardwise.session.Session.close`."""
        self._unwatch()
        if self._session is not None:
            self._session.close()
            self._session = None


class LateModule(ModuleFacade):
    """The user's module, sharded at its first use."""

    def __init__(self, late: LateSession) -> None:
        super().__init__()
        self.__dict__["late"] = late
        self.module = late.module

    @property
    def _sharded(self) -> Any:
        return self.__dict__["late"].session.module

    @property
    def _built(self) -> bool:
        return bool(self.__dict__["late"].built)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> LateModule:
        """``to()``, ``half()`` and the like; they change nothing once the model is sharded."""
        if self._built:
            self._sharded._apply(fn, recurse)
        else:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


class LateOptimizer(OptimizerFacade):
    """An optimizer of a model that is sharded at its first use. All methods except ``zero_grad`` shard the model."""

    def __init__(self, late: LateSession, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.late, self._place = late, len(late.optimizers) - 1

    @property
    def target(self) -> Any:
        """The sharded optimizer. Collective if the model is not sharded yet."""
        return self.late.session.optimizers[self._place]

    @property
    def _current(self) -> Any:
        return self.target if self.late.built else self.optim


# [Note: Finding optimizers]
# The user may make an optimizer from the parameters of a wrapper and never give it to the interface: torch has no hook
# for the construction of an optimizer, only for its steps, and at the first step the gradients must already be packed
# by optimizer. So before the first training pass Python's garbage collector is asked once for the live optimizers.
# Garbage is collected first, so that leftovers of a learning-rate finder do not count.
def optimizers_of(params: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Return the live plain torch optimizers that have any of ``params`` and are not sharded, in the model's order."""
    positions = {id(param): index for index, param in enumerate(params)}
    gc.collect()
    optimizers: list[tuple[int, torch.optim.Optimizer]] = []
    for each in gc.get_objects():
        kind = type(each)  # not isinstance(), which may run code of the object
        if not issubclass(kind, torch.optim.Optimizer) or issubclass(kind, ShardedOptimizer):
            continue
        groups = vars(each).get("param_groups")  # wrappers that show the groups of another optimizer have none
        own = [positions[id(param)] for group in groups or () for param in group["params"] if id(param) in positions]
        if own and sharded_of(each) is None:
            optimizers.append((min(own), each))
    # The model's order is the same on every rank.
    return [optimizer for _, optimizer in sorted(optimizers, key=lambda pair: pair[0])]


def drive(optimizer: torch.optim.Optimizer, sharded: ShardedOptimizer) -> None:
    """Redirect ``step()`` of the user's ``optimizer`` to ``sharded``, as its other methods already are."""

    def step(closure: Callable[[], Any] | None = None) -> Any:
        return sharded.step(closure)

    # Schedulers look for this mark, to see that nobody replaced the step() that they count.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    vars(optimizer)["step"] = step
