"""``FullyShardedDataParallel``: FairScale's arguments and methods, on one session for the outermost wrapper."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.attributes import TransparentModule
from shardwise.build import Session, agreed_load, build
from shardwise.checked import as_mapping, whole
from shardwise.comm import ranks_of
from shardwise.fairscale.arguments import NUMERIC, FullyShardedOptions, plan_of_fully_sharded
from shardwise.fairscale.local_state import consolidated, joined, own_part
from shardwise.late import LateSession, drive, optimizers_of
from shardwise.mesh import Mesh, init_distributed
from shardwise.plan import Plan
from shardwise.precision_plan import HALF_DTYPES
from shardwise.published import picked
from shardwise.remarks import warn_user
from shardwise.torch_internals import point

__all__ = ["FullyShardedDataParallel", "get_fsdp_instances"]


class FullyShardedDataParallel(TransparentModule):
    """Parameters, gradients and optimizer state are divided over the ranks; what runs is gathered.

    The optimizer is made afterwards, from :meth:`parameters`, as plain torch has it. It is found when the model is
    called for the first time in a pass that trains, and from then on its ``step()``, ``zero_grad()`` and states are
    those of the sharded model. Wrappers inside are gathered by themselves; the outermost one holds the session.

    Args:
        module: any; wrapped modules may be inside.
        process_group: the ranks that share the model; ``None``: all.
        process_group_reduce_scatter: no effect: reductions take the same ranks.
        reshard_after_forward: gathered parameters are dropped after their forward pass. The outermost wrapper's counts.
        disable_reshard_on_root: no effect: what is used next stays as long as it is needed.
        mixed_precision: compute in ``compute_dtype`` (fp16), update fp32 masters.
        fp32_reduce_scatter: gradients travel in fp32, under mixed precision.
        flatten_parameters: parameters that are gathered together are one flat array; ``False``: each by itself.
        move_params_to_cpu: parameter shards (and by default all else) are at home on the host.
        compute_dtype: what is computed in.
        buffer_dtype: of floating buffers; ``None``: as ``compute_dtype``.
        move_grads_to_cpu: gradients, masters and state are on the host; ``None``: as ``move_params_to_cpu``.
        bucket_cap_mb: MiB that are gathered and reduced together of what no wrapper inside holds; <= 0: by module.
        compute_device: ``None``: this rank's GPU where there is one a rank.
        no_broadcast_optim_state: no effect: states are always whole.
        state_dict_device: where :meth:`state_dict` puts tensors; ``None``: the host.
        clear_autocast_cache: no effect: nothing is cast by autocast.
        force_input_to_fp32: no effect: inputs are cast to what is computed in.
        verbose: no effect.
        cpu_offload: another name of ``move_params_to_cpu``.
        state_dict_on_rank_0_only: :meth:`state_dict` is empty on the other ranks, which call it as well.
        gradient_predivide_factor: gradients are divided by it before their sum over ranks, and by what is left after.
        allow_reset_parameters: whether :meth:`reset_parameters` works.

    Raises:
        ValueError: an argument is out of range, or other than that of a wrapper inside where all have to be the same.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        process_group_reduce_scatter: Any = None,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool = False,
        flatten_parameters: bool = True,
        move_params_to_cpu: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: int = 25,
        compute_device: torch.device | None = None,
        no_broadcast_optim_state: bool | None = False,
        state_dict_device: torch.device | None = None,
        clear_autocast_cache: bool = False,
        force_input_to_fp32: bool = False,
        verbose: bool = False,
        cpu_offload: bool = False,
        state_dict_on_rank_0_only: bool = False,
        gradient_predivide_factor: float | None = None,
        allow_reset_parameters: bool = False,
    ) -> None:
        given = dict(locals())
        super().__init__()
        given["move_params_to_cpu"] = move_params_to_cpu or cpu_offload
        own: dict[str, Any] = self.__dict__
        own["options"] = picked(FullyShardedOptions, given)
        own["_state_device"], own["_first_only"] = state_dict_device, state_dict_on_rank_0_only
        own["allow_reset_parameters"] = allow_reset_parameters
        own["_device"], own["process_group"] = init_distributed(compute_device), process_group
        own["rank"] = dist.get_rank(process_group) if dist.is_initialized() else 0
        own["world_size"] = dist.get_world_size(process_group) if dist.is_initialized() else 1
        own["_outer"], own["_summoned"] = None, frozenset[int]()
        own["late"] = LateSession(module, self._shard, self._make_whole)
        own["_rounded"] = False
        self.module = module
        for inner in get_fsdp_instances(module):
            self._take_in(inner)

    def _take_in(self, inner: FullyShardedDataParallel) -> None:
        if inner.late.built:
            raise ValueError(
                f"a {type(inner.module).__name__} inside the {type(self.module).__name__} is sharded already: "
                "wrap the whole model before any part of it is used"
            )
        for name in NUMERIC:
            one, other = getattr(self.options, name), getattr(inner.options, name)
            if one != other:
                raise ValueError(
                    f"{name}={other!r} of the wrapped {type(inner.module).__name__}, and {one!r} of the wrapper around "
                    "it: give all wrappers of one model the same"
                )
        if dist.is_initialized() and self._ranks() != inner._ranks():
            raise ValueError(
                f"a wrapper of ranks {list(inner._ranks())} inside one of {list(self._ranks())}: give all wrappers of "
                "one model the same process_group"
            )
        inner.__dict__["_outer"] = weakref.ref(self)
        inner.late.close()  # this one's is that of both

    def _ranks(self) -> tuple[int, ...]:
        return ranks_of("process_group", self.process_group)

    # ---- the session

    @property
    def _root(self) -> FullyShardedDataParallel:
        outer = self.__dict__["_outer"]
        found: FullyShardedDataParallel | None = outer() if outer is not None else None
        return self if found is None else found._root

    @property
    def session(self) -> Session:
        """That of the outermost wrapper, sharded here where it is not yet. Collective."""
        root = self._root
        root._look_for_optimizers()
        session: Session = root.late.session
        return session

    def _plan(self, module: nn.Module) -> Plan:
        inner = {id(each.module) for each in get_fsdp_instances(module)}
        units = tuple(name for name, each in module.named_modules() if id(each) in inner and name)
        return plan_of_fully_sharded(self.options, units)

    def _build(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], plan: Plan) -> Session:
        return build(module, optimizers, plan, Mesh.create(plan.mesh, self._device, plan.comm, self.process_group))

    def _shard(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Session:
        plan = self._plan(module)
        narrow, wide = plan.precision.param_dtype in HALF_DTYPES, (torch.float32, torch.float64)
        self.__dict__["_rounded"] = (
            narrow and not optimizers and any(p.requires_grad and p.dtype in wide for p in module.parameters())
        )
        session = self._build(module, optimizers, plan)
        for optimizer, sharded in zip(optimizers, session.optimizers, strict=True):
            drive(optimizer, sharded)
        return session

    def _make_whole(self, session: Session) -> None:
        """For an optimizer that came after the first use."""
        if self.__dict__["_rounded"] and session.mesh.first:
            warn_user(
                f"the {type(self.module).__name__} was used before there was an optimizer, when nobody keeps the "
                f"values that its weights had before they became {session.plan.precision.param_dtype}: what follows "
                "starts from the rounded ones. Make the optimizer before the first use, or load the weights again"
            )
        session.unshard()

    # [Note: Loading before there is an optimizer]
    # Masters belong to what an optimizer trains, and a session without one has none: what it loads is rounded to 16
    # bits. Where an optimizer may still come, values are loaded by a session in the model's own numbers, which leaves
    # the model whole. A model without memory of its own is taken to be too large for that.
    def _load(self, use: Callable[[Session], Any]) -> Any:
        root = self._root
        root._look_for_optimizers()
        late: LateSession = root.late
        tensors = [*self.module.parameters(), *self.module.buffers()]
        if late.built or late.optimizers or not self.options.mixed_precision or any(each.is_meta for each in tensors):
            return use(self.session)
        homes = {param: param.device for param in self.module.parameters()}
        found = late.once(lambda module, _: self._build(module, (), _unrounded(self._plan(module))), use)
        for param, device in homes.items():
            point(param, param.detach().to(device))
        return found

    def _look_for_optimizers(self) -> None:
        """Before the model is used: optimizers that were made of its parameters."""
        late: LateSession = self.late
        if late.optimizers and late.built:
            return
        for optimizer in optimizers_of(list(self.module.parameters())):
            if optimizer not in late.optimizers:
                late.add(optimizer)

    # ---- passes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module on the arguments, cast under mixed precision."""
        if self._root is not self:
            return self.module(*args, **kwargs)
        late: LateSession = self.late
        if torch.is_grad_enabled():
            self._look_for_optimizers()
        return late.session.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing to do: each pass is reduced into the shards, and the sums are the same."""
        return nullcontext()

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """Parameters that have a gradient."""
        return [param for param in self.parameters() if param.grad is not None]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of the whole model by their norm over all ranks, which comes back. Collective.

        Raises:
            RuntimeError: called on a wrapper inside.
        """
        if self._root is not self:
            raise RuntimeError(
                f"clip_grad_norm_({max_norm}) of a wrapped {type(self.module).__name__} inside the model: call it on "
                "the outermost wrapper"
            )
        return nn.utils.clip_grad_norm_(self.parameters(), float(max_norm), float(norm_type))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        late: LateSession = self._root.late
        if late.built:
            late.session.module.zero_grad(set_to_none)
        else:
            super().zero_grad(set_to_none)

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool = True) -> None:
        """Divide gradients by ``pre`` before their sum over ranks and by ``post`` after; before the first use.

        Raises:
            ValueError: together they are not the number of ranks, so that it would be no mean.
            RuntimeError: the model is sharded already.
        """
        root = self._root
        if not math.isclose(pre * post, root.world_size):
            raise ValueError(
                f"set_gradient_divide_factors({pre}, {post}) on {root.world_size} ranks: pre * post has to be that"
            )
        if root.late.built:
            raise RuntimeError(f"set_gradient_divide_factors({pre}, {post}) after the first use: call it before")
        for each in get_fsdp_instances(root):
            each.__dict__["options"] = picked(
                FullyShardedOptions, {**vars(each.options), "gradient_predivide_factor": float(pre)}
            )

    # ---- parameters

    @contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
        """Whole parameters of the wrapped module inside the block. Every rank enters.

        Args:
            recurse: those of wrappers inside it, too.
            volatile: changes are dropped; otherwise kept, each rank its own part.
        """
        root, session = self._root, self.session
        inner = [] if recurse else get_fsdp_instances(self.module)
        others = {id(param) for each in inner for param in each.parameters()}
        wanted = [param for param in self.parameters() if id(param) not in others]
        around: frozenset[int] = root.__dict__["_summoned"]
        if around.issuperset(map(id, wanted)):
            yield
            return
        with session.gathered(wanted, write_back=not volatile):
            root.__dict__["_summoned"] = around.union(map(id, wanted))
            try:
                yield
            finally:
                root.__dict__["_summoned"] = around

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """``fn`` of every module inside, with whole parameters."""
        with self.summon_full_params() if self._root.late.built else nullcontext():
            super().apply(fn)
        return self

    def reset_parameters(self) -> None:
        """The wrapped module's own.

        Raises:
            RuntimeError: without ``allow_reset_parameters``.
        """
        if not self.allow_reset_parameters:
            raise RuntimeError(f"reset_parameters() with allow_reset_parameters={self.allow_reset_parameters}")
        with self.summon_full_params() if self._root.late.built else nullcontext():
            reset: Callable[[], None] = self.module.reset_parameters  # type: ignore[assignment]
            reset()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the module, under the names that they have without wrappers."""
        for name, param in self.module.named_parameters(prefix, recurse, remove_duplicate):
            yield self._without_wrappers(name, prefix), param

    def _without_wrappers(self, name: str, prefix: str) -> str:
        found: list[str] = []
        module: nn.Module | None = self.module
        rest = name.removeprefix(prefix).lstrip(".")
        for part in rest.split("."):
            if isinstance(module, FullyShardedDataParallel) and part == "module":
                module = module.module
                continue
            found.append(part)
            module = module._modules.get(part, None) if isinstance(module, nn.Module) else None
        return ".".join(([prefix] if prefix else []) + found)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FullyShardedDataParallel:
        late: LateSession = self._root.late
        if late.built:
            late.session.module._apply(fn, recurse)
        else:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    # ---- states

    def state_dict(  # type: ignore[override]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The full state under the names without wrappers, fp32 where there are masters. Every rank calls it.

        Args:
            destination: entries are added to it.
            prefix: put before every name.
            keep_vars: only False, but for a wrapper inside, which the module around it asks.
        """
        root = self._root
        if self is not root:
            summoned = root.__dict__["_summoned"].issuperset(map(id, self.parameters()))
            if destination is not None or not root.late.built or summoned:
                # Asked by the module around it, of names or with what it has gathered.
                into = {} if destination is None else destination
                return self.module.state_dict(destination=into, prefix=prefix, keep_vars=keep_vars)
            own = next(name for name, each in root.module.named_modules() if each is self)
            inside = root._without_wrappers(own, "") + "."
            whole = root.state_dict()
            return {prefix + n.removeprefix(inside): value for n, value in whole.items() if n.startswith(inside)}
        found = self.session.module.state_dict(destination, prefix, keep_vars, only_rank_0=self._first_only)
        if self._state_device is not None:
            for name, value in found.items():
                found[name] = value.to(self._state_device) if isinstance(value, torch.Tensor) else value
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over a full state, the same on every rank; each keeps its part.

        Raises:
            RuntimeError: names or shapes do not fit, or called on a wrapper inside.
        """
        self._only_whole("load_state_dict()")
        return self._load(lambda session: session.module.load_state_dict(state_dict, strict, assign))

    def _only_whole(self, call: str) -> None:
        if self._root is not self:
            raise RuntimeError(
                f"{call} of a wrapped {type(self.module).__name__} inside the model: call it on the outermost wrapper"
            )

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's part: of every parameter a range of its elements, flat, by which the ranks divide it; and this
        rank's buffers, whole. Collective."""
        self._only_whole("local_state_dict()")
        shapes, state = _shapes(self.session), self.session.module.full_state()
        return {name: own_part(value, self.rank, self.world_size, name in shapes) for name, value in state}

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Take over what every rank's own :meth:`local_state_dict` gave, at the same number of ranks. Collective.

        Raises:
            TypeError: this rank's is no dict; nothing was loaded, and the others have a PeerError.
        """
        self._only_whole("load_local_state_dict()")

        def load(session: Session) -> Any:
            with session.mesh.doing("load_local_state_dict()"):
                with agreed_load(session.mesh.everyone, "the model", dict):
                    as_mapping("state_dict", state_dict, "what local_state_dict() gave on this rank")
                whole = joined(state_dict, _shapes(session), self.process_group, self.world_size)
                return session.module.load_state_dict(whole, strict)

        return self._load(load)

    def local_metadata_dict(self) -> dict[str, Any]:
        """What :meth:`consolidate_shard_weights` needs beside this rank's part."""
        shapes = {name: list(shape) for name, shape in _shapes(self.session).items()}
        return {"rank": self.rank, "world_size": self.world_size, "shapes": shapes}

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: Sequence[Mapping[str, Any]],
        shard_metadata: Sequence[Mapping[str, Any]],
        with_module_buffers: bool = True,
        strict: bool = True,
    ) -> dict[str, Any]:
        """The full state of the parts of all ranks, in one process.

        Args:
            shard_weights: each rank's :meth:`local_state_dict`.
            shard_metadata: each rank's :meth:`local_metadata_dict`, in the same order.
            with_module_buffers: no effect: buffers are there, and are rank 0's.
            strict: no effect: all parts have to be there.

        Raises:
            ValueError: a rank's part is missing.
        """
        return consolidated(shard_weights, shard_metadata)

    def gather_full_optim_state_dict(
        self, optim: torch.optim.Optimizer, recipient_rank: int | None = 0
    ) -> dict[str, Any] | None:
        """The full state of ``optim``, as plain torch has it, on one rank; ``None`` on the others. Every rank calls it.

        Args:
            optim: one of this model's parameters.
            recipient_rank: of the wrapper's process group; ``None``: every rank.

        Raises:
            ValueError: ``optim`` is none of this model's, or there is no such rank.
            TypeError: ``recipient_rank`` is no whole number.
        """
        if recipient_rank is not None:
            whole("recipient_rank", recipient_rank, 0, self.world_size - 1, f"a rank of {self.world_size}, or None,")
        state = self._sharded(optim).state_dict(only_rank_0=recipient_rank == 0)
        return state if recipient_rank in (None, self.rank) else None

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: dict[str, Any]) -> dict[str, Any]:
        """What ``optim.load_state_dict`` takes: the full state itself, of which each rank keeps its part."""
        return full_optim_state_dict

    def _sharded(self, optim: torch.optim.Optimizer) -> Any:
        session = self.session
        for given, sharded in zip(self._root.late.optimizers, session.optimizers, strict=True):
            if optim is given:
                return sharded
        raise ValueError(f"{type(optim).__name__} is not an optimizer of this model's parameters: give the one that is")

    # ---- facts

    @property
    def cpu_offload(self) -> bool:
        """Whether parameter shards are on the host."""
        return bool(self.options.move_params_to_cpu)

    @property
    def mixed_precision(self) -> bool:
        """See the argument."""
        return bool(self.options.mixed_precision)

    def extra_repr(self) -> str:
        """Rank, number of ranks and what was told."""
        told = ", ".join(f"{name}={value}" for name, value in vars(self.options).items())
        return f"rank={self.rank}, world_size={self.world_size}, {told}"

    def close(self) -> None:
        """Remove what sharding put on the model. Call :meth:`state_dict` before."""
        self._root.late.close()


def _shapes(session: Session) -> dict[str, torch.Size]:
    """Of parameters, by all their names."""
    layout = session.module.state_layout()
    return {name: value.shape for name, value in layout.items() if isinstance(value, nn.Parameter)}


def _unrounded(plan: Plan) -> Plan:
    """The same in the model's own numbers."""
    return plan.but(param_dtype=None, buffer_dtype=None, reduce_dtype=None, accumulate_dtype=None, master_weights=False)


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[FullyShardedDataParallel]:
    """Wrappers in ``mod``, itself included; ``skip_empty``: without those that hold no parameters."""
    found = [each for each in mod.modules() if isinstance(each, FullyShardedDataParallel)]
    return [each for each in found if not skip_empty or next(each.parameters(), None) is not None]
