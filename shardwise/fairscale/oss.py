"""``OSS`` and ``ShardedDataParallel``: optimizer state and gradients divided over ranks that hold whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.attributes import TransparentModule, attribute_of
from shardwise.build import Session, ShardedOptimizer, build
from shardwise.comm import ranks_of
from shardwise.fairscale.arguments import ShardedOptions, plan_of_sharded
from shardwise.mesh import Mesh, init_distributed
from shardwise.published import picked

__all__ = ["OSS", "ShardedDataParallel"]


class OSS(torch.optim.Optimizer):
    """A torch optimizer whose state is divided over the ranks, once its model is in a :class:`ShardedDataParallel`.

    Args:
        params: of the model, or groups of them.
        optim: the class of the optimizer; any element-wise one.
        group: the ranks; ``None``: those of the model.
        broadcast_buffer_size: no effect: updated parameters travel with the model's chunks.
        broadcast_fp16: no effect: updated parameters travel in their own dtype.
        force_broadcast_object: no effect.
        default: arguments of ``optim``.

    Raises:
        ValueError: see ``optim``.
    """

    def __init__(
        self,
        params: Any,
        optim: type[torch.optim.Optimizer] = torch.optim.SGD,
        group: dist.ProcessGroup | None = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **default: Any,
    ) -> None:
        # Optimizer.__init__ is not called: it would build param groups of its own.
        self.optim, self.group = optim(params, **default), group
        self._sharded: ShardedOptimizer | None = None
        self._consolidated: dict[str, Any] | None = None

    @property
    def sharded(self) -> ShardedOptimizer:
        """What the engine has in its place.

        Raises:
            RuntimeError: its model is in no :class:`ShardedDataParallel`.
        """
        if self._sharded is None:
            raise RuntimeError(
                f"OSS({type(self.optim).__name__}) is not sharded yet ({self._sharded}): wrap its model first, "
                "ShardedDataParallel(model, optimizer), also where DistributedDataParallel was"
            )
        return self._sharded

    # The user's own objects, so that learning-rate schedulers built on either optimizer act on both.

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
        if name in ("optim", "_sharded"):
            raise AttributeError(name)
        return attribute_of(self.optim if self._sharded is None else self._sharded, name, self)

    def __repr__(self) -> str:
        return f"OSS({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{self!r:.80} lives on several ranks and cannot be pickled; use consolidate_state_dict()")

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One update. Every rank calls it.

        Raises:
            NotImplementedError: arguments of the wrapped optimizer's own ``step``, which is called on pieces of
                parameters, several times a step.
        """
        if kwargs:
            given = ", ".join(f"{name}={value!r:.40}" for name, value in kwargs.items())
            raise NotImplementedError(
                f"step({given}) of OSS({type(self.optim).__name__}): nothing but a closure can be handed on; set "
                "options in param_groups, and scale losses by ShardedGradScaler"
            )
        return self.sharded.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        (self.optim if self._sharded is None else self._sharded).zero_grad(set_to_none)

    def clip_grad_norm(
        self, max_norm: float, norm_type: float = 2.0, filter_params_fn: Callable[[Any], Any] | None = None
    ) -> torch.Tensor:
        """Clip the gradients of this optimizer by their norm over all ranks, which comes back. Collective.

        Args:
            max_norm: of the averaged gradients together.
            norm_type: p of the p-norm.
            filter_params_fn: ``None``; a choice of parameters is not for pieces of them.

        Raises:
            NotImplementedError: ``filter_params_fn`` is given.
        """
        if filter_params_fn is not None:
            raise NotImplementedError(
                f"clip_grad_norm(filter_params_fn={filter_params_fn!r:.80}): clip those parameters by "
                "torch.nn.utils.clip_grad_norm_(chosen, max_norm), which counts all ranks"
            )
        return torch.tensor(self.sharded.clip_grad_by_norm(float(max_norm), float(norm_type)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Possible until the model is in a :class:`ShardedDataParallel`."""
        (self.optim if self._sharded is None else self._sharded).add_param_group(param_group)

    def refresh_trainable(self) -> None:
        """Nothing to do: parameters are packed when the model is wrapped."""

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Collect the full state for :meth:`state_dict` of ``recipient_rank``. Every rank calls it."""
        state = self.sharded.state_dict()
        rank = dist.get_rank(self.group) if dist.is_initialized() else 0
        self._consolidated = state if rank == recipient_rank else None

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The full state, as plain torch has it, as of the last :meth:`consolidate_state_dict`.

        Args:
            all_ranks: collect it now, on every rank, which all call it.

        Raises:
            RuntimeError: it was not collected for this rank.
        """
        if all_ranks:
            return self.sharded.state_dict()
        if self._consolidated is None:
            raise RuntimeError(
                f"state_dict(all_ranks={all_ranks}) of a state that was not consolidated on this rank: all call "
                "consolidate_state_dict(recipient_rank=...) before, and the recipient state_dict()"
            )
        return self._consolidated

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a full state, the same on every rank; before or after the model is wrapped."""
        if self._sharded is None:
            self.optim.load_state_dict(state_dict)
        else:
            self._sharded.load_state_dict(state_dict)

    def attach(self, sharded: ShardedOptimizer) -> None:
        """The model was sharded."""
        self._sharded = sharded


class ShardedDataParallel(TransparentModule):
    """Whole parameters on every rank; each reduces and keeps its part of gradients and optimizer state.

    Args:
        module: the model.
        sharded_optimizer: its :class:`OSS`, or all of them.
        process_group: the ranks; ``None``: all.
        broadcast_buffers: rank 0's buffers are everybody's before each forward pass that trains.
        sync_models_at_startup: all start from rank 0's parameters.
        reduce_buffer_size: elements that are reduced together; 0: each parameter by itself.
        auto_refresh_trainable: no effect, see :meth:`refresh_trainable`.
        reduce_fp16: gradients travel in fp16.
        warn_on_trainable_params_changed: no effect: it is an error.

    Raises:
        TypeError: an optimizer is no :class:`OSS`.
        ValueError: an argument out of range, or groups that differ.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: OSS | Sequence[OSS],
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
    ) -> None:
        given = dict(locals())
        super().__init__()
        single = not isinstance(sharded_optimizer, (list, tuple))
        optimizers: list[Any] = [sharded_optimizer] if single else list(sharded_optimizer)
        for each in optimizers:
            if not isinstance(each, OSS):
                raise TypeError(f"sharded_optimizer={each!r:.80}: give an OSS, made of the module's parameters")
        device = init_distributed()
        for each in optimizers:
            if each.group is not None and ranks_of("group", each.group) != ranks_of("process_group", process_group):
                raise ValueError(
                    f"an OSS with group={each.group} and process_group={process_group} of the model: give the same, or "
                    "no group to the OSS"
                )
        plan = plan_of_sharded(picked(ShardedOptions, given))
        own: dict[str, Any] = self.__dict__
        own["process_group"], own["_broadcasts"] = process_group, broadcast_buffers
        mesh = Mesh.create(plan.mesh, device, plan.comm, process_group)
        own["session"] = build(module, [each.optim for each in optimizers], plan, mesh)
        own["_trained"] = [param.requires_grad for param in self.session.params]
        for each, sharded in zip(optimizers, self.session.optimizers, strict=True):
            each.attach(sharded)
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module on the arguments."""
        if self._broadcasts and self.training and torch.is_grad_enabled():
            self.sync_buffers()
        session: Session = self.session
        return session.module(*inputs, **kwargs)

    def sync_buffers(self, blocking: bool = True) -> None:
        """Rank 0's buffers become everybody's. Collective."""
        ranks = ranks_of("process_group", self.process_group)
        if len(ranks) > 1:
            with torch.no_grad():
                for buffer in self.module.buffers():
                    dist.broadcast(buffer, ranks[0], group=self.process_group)

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing to do: each pass is reduced into the shards, and the sums are the same."""
        return nullcontext()

    def reduce(self) -> None:
        """Nothing to do: gradients are reduced when the backward pass ends."""

    def refresh_trainable(self) -> None:
        """Nothing to do while the same parameters are trained.

        Raises:
            NotImplementedError: others are: which ones is decided when the model is wrapped.
        """
        now = [param.requires_grad for param in self.session.params]
        changed = [names[0] for names, a, b in zip(self.session.names(), now, self._trained, strict=True) if a != b]
        if changed:
            raise NotImplementedError(
                f"refresh_trainable(): requires_grad of {', '.join(changed[:3])} changed after the model was wrapped; "
                "close() this one, and make OSS and ShardedDataParallel anew"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self.session.module.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The full state under the module's own names. Every rank calls it."""
        found: dict[str, Any] = self.session.module.state_dict(*args, **kwargs)
        return found

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Take over a full state, the same on every rank."""
        return self.session.module.load_state_dict(state_dict, strict, assign)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """Those of the module, under its own names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ShardedDataParallel:
        self.session.module._apply(fn, recurse)
        return self

    def close(self) -> None:
        """Remove what sharding put on the model: parameters are whole again, optimizers are not to be used any more."""
        self.session.unshard()
