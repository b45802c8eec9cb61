"""Errors for uses of a sharded model that would silently go wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.core.base.device import Later, runs_ahead
from shardwise.core.base.tensors import SPARSE
from shardwise.core.base.torch_internals import running_ddp
from shardwise.core.checks.broken import Broken
from shardwise.core.checks.shared_storage import check_no_shared_storage
from shardwise.core.checks.state_dict_guard import StateDictGuard
from shardwise.core.shards.chunk import Chunk, absent_value, is_absent
from shardwise.core.shards.gather import ChunkPool
from shardwise.core.shards.layout import Layout

MARK = "_is_sharded"
READ_BY_DDP, READ_BY_DATA_PARALLEL = "_ddp_params_and_buffers_to_ignore", "_replicate_for_data_parallel"
"""Attributes of a module that torch's ``DistributedDataParallel`` and ``DataParallel`` ask for before they use it."""


def check_shardable(model: nn.Module) -> None:
    """Check that the model can be sharded, before anything is changed.

    Raises:
        ValueError: A trainable parameter is complex or an integer, two parameters share memory, the model is sharded
            already (also by torch's ``FullyShardedDataParallel``), a module is a ``DistributedDataParallel`` or
            ``DataParallel``, a parameter or buffer is a ``DTensor``, or a parameter or persistent buffer is sparse.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # its import is slow; no FSDP model exists before
    for name, module in model.named_modules():
        subject = f"module {name!r} of the model" if name else "the model"
        if MARK in module.__dict__:
            raise ValueError(f"{subject} is sharded already; close its session first, or create a new model")
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise ValueError(
                f"{subject} is a {type(module).__name__}, which has sharded its parameters already: "
                "pass the model as it was before that"
            )
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ValueError(
                f"{subject} is a {type(module).__name__}, whose own reduction would see no "
                "gradients: pass the wrapped model (its .module); stage=0 is data parallelism without sharding"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{name} {tuple(tensor.shape)} is a DTensor, sharded already by fully_shard, parallelize_module "
                "or distribute_tensor: pass the model as it was before that"
            )
    _check_layouts(model)
    for name, param in model.named_parameters():
        if param.requires_grad and not param.is_floating_point():
            raise ValueError(f"{name} is trainable and {param.dtype}: only real floating-point ones can be sharded")
        # The placeholder of an absent parameter has no strides, except if it has a single element.
        absent = _without_memory(param) and not param.is_meta
        if absent and param.is_floating_point() and bool(torch.isnan(param.detach().flatten()[0])):
            raise ValueError(
                f"{name} {tuple(param.shape)} is not gathered: the model is sharded already; build a new one"
            )
    check_no_shared_storage(model)


def _check_layouts(model: nn.Module) -> None:
    """Refuse sparse parameters and persistent sparse buffers: checkpoints hold strided tensors."""
    for path, module in model.named_modules():
        for leaf, tensor in {**module._parameters, **module._buffers}.items():
            unsaved = leaf in module._non_persistent_buffers_set
            if tensor is None or tensor.layout is torch.strided or (unsaved and tensor.layout in SPARSE):
                continue
            name = f"{path}.{leaf}" if path else leaf
            raise ValueError(
                f"{name} {tuple(tensor.shape)} has the layout {tensor.layout}, which no checkpoint can hold: make it "
                "dense (to_dense()), or register it with persistent=False and make it when the model is made"
            )


# [Note: What torch would put around a sharded model]
# DistributedDataParallel averages the tensors in ``.grad`` when its own hooks run. The engine has taken the gradient by
# then, so DDP would average zeros and write them over the engine's gradients. A copy that DataParallel makes for
# another GPU has the hooks but not the parameters. Both first read an attribute of the module. While the model is
# sharded, it has such an attribute, which raises, and wrappers that pass attributes on have it, too. If a module in
# between has no such attribute (a user's module, or one that is sharded at its first use), DDP is detected when the
# model runs inside its forward pass.
class _RefusesDDP:
    """Raises when DistributedDataParallel asks which parameters it should ignore."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError(_around(self._name))


def _around(name: str) -> str:
    return (
        f"DistributedDataParallel around a sharded {name}: it would average zeros, and write "
        "them over the gradients. Leave it out: gradients are reduced over the ranks already"
    )


def refusals_of_wrappers(model: nn.Module) -> dict[str, Any]:
    """Return attributes for a sharded model that make torch's own data-parallel wrappers raise."""
    name = type(model).__name__

    def refuse_replica() -> Any:
        raise RuntimeError(
            f"DataParallel around a sharded {name}: its copies on other GPUs would have no parameters. Leave it out, "
            "and start one rank per GPU"
        )

    return {READ_BY_DDP: _RefusesDDP(name), READ_BY_DATA_PARALLEL: refuse_replica}


# [Note: Identities and their objects]
# Modules and parameters are compared by ``id``, which takes microseconds; names would take a walk through the model. An
# ``id`` belongs to an object only while the object lives. So every object that is identified by its ``id`` is kept
# alive here (``_kept_alive``, ``_known``), and no later object can have the same ``id``.
class Structure:
    """The modules of ``model`` and the places of its parameters.

    Each rank would train a new parameter alone, and a parameter in the place of another one would be saved under the
    wrong name. Modules without trainable parameters may be added and removed: activations, caches, metrics, wrappers.

    Args:
        model: the user's module, sharded.
        sharded: the sharded parameters of the model, by index.
        name_of: returns the name of a parameter by its index.
    """

    def __init__(self, model: nn.Module, sharded: Sequence[nn.Parameter], name_of: Callable[[int], str]) -> None:
        self._model, self._name_of = model, name_of
        self._sharded = {id(param): index for index, param in enumerate(sharded)}
        places = list(_places(model))
        self._known = {id(param): param for _, _, _, param in places}
        """All original parameters. They stay alive, so that no other object gets the ``id`` of a parameter."""
        self._places = {(id(module), leaf): param for module, _, leaf, param in places}
        self._names = {name for _, name, _, param in places if id(param) in self._sharded}
        self._guests: list[tuple[str, nn.Parameter]] = []
        """Frozen parameters that were added later."""
        self._remember()

    def _remember(self) -> None:
        modules = list(self._model.modules())
        self._children: list[dict[str, Any]] = [module._modules for module in modules]
        self._parameters: list[dict[str, Any]] = [module._parameters for module in modules]
        self._kept_alive = [*_objects(self._children), *_objects(self._parameters)]
        self._child_ids, self._parameter_ids = _ids(self._children), _ids(self._parameters)

    def check(self, parameters: bool = True) -> None:
        """Check that modules and parameters are the original objects, or harmless additions.

        Args:
            parameters: ``False``: of modules only, since a forward pass may swap parameters (``functional_call``).

        Raises:
            RuntimeError: A parameter was added, removed, moved or replaced; it is named.
        """
        if _ids(self._children) != self._child_ids or (parameters and _ids(self._parameters) != self._parameter_ids):
            self._look()
        # Later parameters are accepted as long as they are frozen.
        for name, guest in self._guests:
            if guest.requires_grad:
                self._refuse(name, guest)

    def _refuse(self, name: str, param: nn.Parameter) -> NoReturn:
        was = "replaced a parameter of" if name in self._names else "was added to"
        raise RuntimeError(
            f"{name} {tuple(param.shape)} {was} the model after sharding: each rank would train it alone, and it "
            "would be saved wrongly. Replace and add modules and parameters, resize embeddings, and add adapters or "
            "parametrizations before sharding"
        )

    def _look(self) -> None:
        seen, guests = set(), []
        for module, name, leaf, param in _places(self._model):
            if id(param) in self._sharded:
                seen.add(id(param))
                if self._places.get((id(module), leaf)) is not param:
                    raise RuntimeError(
                        f"{self._name_of(self._sharded[id(param)])} {tuple(param.shape)} now stands at {name}, where "
                        "it would not be gathered: tie or move parameters before sharding"
                    )
            elif id(param) not in self._known:
                if param.requires_grad or name in self._names:
                    self._refuse(name, param)
                guests.append((name, param))
        for key, index in self._sharded.items():
            if key not in seen:
                raise RuntimeError(
                    f"{self._name_of(index)} {tuple(self._known[key].shape)} was removed from the sharded model: "
                    "remove modules and parameters before sharding"
                )
        # The changes are harmless: compare with the present modules from here on.
        self._guests = guests
        self._remember()


def _places(model: nn.Module) -> list[tuple[nn.Module, str, str, nn.Parameter]]:
    """Return every parameter with its module, full name and name there; once for each module that has it."""
    return [
        (module, f"{path}.{leaf}" if path else leaf, leaf, param)
        for path, module in model.named_modules()
        for leaf, param in module._parameters.items()
        if param is not None
    ]


def _objects(tables: Sequence[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, tables)))


def _ids(tables: Sequence[dict[str, Any]]) -> list[int]:
    return list(map(id, chain.from_iterable(map(dict.values, tables))))


# [Note: Where a write to a parameter shows]
# * ``param.data = x``: the parameter's address is not where the engine put it (Chunk.misplaced).
# * In place, through the parameter: its version counter, which views of it share (Chunk.written).
# * Through ``.data`` of an absent parameter: its NaN has become a number. Each absent parameter has a NaN of its own;
#   those of one dtype are in one tensor, so that one comparison is enough. This is checked in steps and states.
# * Through ``.data`` of a gathered parameter: it cannot be detected, and is lost.
# The others are checked in passes, steps and states. If a write is found, it is dropped together with all gathered
# copies, so that no part of it remains.
class Edits:
    """Watches for writes to the parameters of ``chunks`` that would be lost.

    A parameter shows memory of the engine: the gathered array, or one NaN while it is not gathered.

    Args:
        chunks: all of one model, set up.
        name_of: returns the name of a parameter by its index in the layout.
        pool: the pool of gathered units.
    """

    def __init__(self, chunks: Sequence[Chunk], name_of: Callable[[int], str], pool: ChunkPool) -> None:
        self._chunks, self._name_of, self._pool = chunks, name_of, pool
        self._transient = [chunk for chunk in chunks if not chunk.resident]
        self._params = [param for chunk in chunks for param in chunk.params]
        self._dtypes = [chunk.spec.dtype for chunk in chunks for _ in chunk.params]
        self._absent: dict[torch.dtype, torch.Tensor] = {}
        self._pending: list[Later] = []
        for dtype in dict.fromkeys(chunk.spec.dtype for chunk in self._transient):
            own = [chunk for chunk in self._transient if chunk.spec.dtype is dtype]
            slots = [len(c.spec.slots) for c in own]
            nothing = torch.full((sum(slots),), absent_value(dtype), dtype=dtype, device=own[0].device)
            for chunk, part in zip(own, torch.split(nothing, slots), strict=True):
                chunk.use_absent(part)
            self._absent[dtype] = nothing
        self.accept()

    def accept(self, among: Sequence[Chunk] | None = None) -> None:
        """Accept the present values (of these chunks). Later writes are detected."""
        for chunk in self._chunks if among is None else among:
            chunk.note_versions()
            chunk.lost = None

    def check_placed(self) -> None:
        """Check that every parameter is where the engine put it, with the data that the engine gave it.

        Raises:
            RuntimeError: a parameter was replaced. The message names it, and all parameters are put back.
        """
        # Comparing three lists of the whole model in C takes a fifth of the time of a loop over chunks.
        expected = [address for chunk in self._chunks for address in chunk.addresses]
        placed = [param.data_ptr() for param in self._params] == expected
        placed = placed and [param.dtype for param in self._params] == self._dtypes
        for chunk in () if placed else self._chunks:
            wrong = chunk.misplaced()
            if wrong is not None:
                param = chunk.params[wrong]
                # Read before it is put back, which changes the result.
                state = f"now {param.dtype} of shape {tuple(param.shape)} on {param.device}"
                self._put_back()
                raise RuntimeError(
                    f"{self._name(chunk, wrong)} ({state}) was moved, cast or given other data after the model was "
                    "sharded, which is dropped; do that before sharding, write to it inside a "
                    f"gathered(write_back=True) block of {self._pool.names.module}, or load a state"
                )

    def check_absent(self) -> None:
        """Check that nothing was written to the placeholders of parameters that are not gathered.

        Raises:
            RuntimeError: something was written; as :meth:`check_written`. On a GPU the check is of the state at the
                previous call, so that the host does not wait.
        """
        if self._changed():
            where = next(c for c in self._transient if not all(map(_is_untouched, c.absent)))
            self._refuse_write(where, next(i for i, each in enumerate(where.absent) if not _is_untouched(each)))

    def _changed(self) -> bool:
        """Return whether something was written to the placeholders of absent parameters."""
        pending, self._pending = self._pending, []
        if not any(runs_ahead(values.device) for values in self._absent.values()):
            return not all(bool(is_absent(values).all()) for values in self._absent.values())
        self._pending = [Later(is_absent(values).all()) for values in self._absent.values()]
        return not all(later.value() for later in pending)

    def check_written(self, writable: Callable[[int], bool]) -> None:
        """Check that nothing was written to a parameter that would be lost.

        Args:
            writable: returns whether the parameters of a unit may be written to now.

        Raises:
            RuntimeError: something was written; the message names the parameter, and the write is dropped.
        """
        for chunk in self._transient:
            wrong = chunk.lost if chunk.lost is not None else chunk.written()
            if wrong is not None and not writable(chunk.spec.unit):
                self._refuse_write(chunk, wrong)

    def _refuse_write(self, chunk: Chunk, slot: int) -> None:
        name = self._name(chunk, slot)
        self._put_back()
        raise RuntimeError(
            f"{name} {tuple(chunk.spec.slots[slot].shape)} was written to, or given other data, where that is lost: "
            "each rank keeps a shard, and modules see a temporary copy. Change it inside a "
            f"gathered(write_back=True) block of {self._pool.names.module}; if a module does so in its forward pass "
            "(nn.Embedding(max_norm=...), codebooks), keep the values in a buffer, or choose a stage that keeps "
            "parameters gathered (ZeRO-1 or 2). The write was dropped"
        )

    def _put_back(self) -> None:
        # Copies first: dropping them drops the writes, and they are gathered again.
        self._pool.drop_idle(stale=True)
        self._pending = []
        for dtype, values in self._absent.items():
            values.fill_(absent_value(dtype))
        for chunk in self._chunks:
            chunk.put_back()
        self.accept()

    def _name(self, chunk: Chunk, slot: int) -> str:
        return self._name_of(chunk.spec.slots[slot].param)


def _is_untouched(value: torch.Tensor) -> bool:
    return not value.numel() or bool(is_absent(value.flatten()[0]))


def _without_memory(param: torch.Tensor) -> bool:
    """Return whether one element stands for all of them, as in the placeholder of an absent parameter."""
    return param.numel() > 1 and not any(param.stride())


def _refuse_absent(model: nn.Module, *_: object) -> None:
    """Raise if parameters have no values, and the model is not sharded again: a hook of passes and states."""
    if MARK not in vars(model) and any(map(_without_memory, model.parameters())):
        raise RuntimeError(
            f"a {type(model).__name__} that was closed while its parameters were sharded has no values: build it again "
            "and load a state, or call unshard() instead of close()"
        )


class Guards:
    """Errors for wrong uses of one sharded model. Nothing is watched before :meth:`install`.

    Args:
        model: the user's module.
        params: the sharded parameters of the model, by index.
        chunks, layout: the chunks in which the parameters are stored, and their layout.
        pool: the pool of gathered units.
        broken: the parts that failed changes have left half-changed.
        staged: whether other ranks have other layers.

    Attributes:
        broken: the argument ``broken``.
        closed: the session was closed.
        unsharded: ``unshard()`` has given the parameters back to the user; the engine's values are outdated.
        edits: writes to parameters, after :meth:`install`.
        state_dicts: states of the user's own modules, after :meth:`install`.
    """

    edits: Edits
    state_dicts: StateDictGuard

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[nn.Parameter],
        chunks: Sequence[Chunk],
        layout: Layout,
        pool: ChunkPool,
        broken: Broken,
        staged: bool,
    ) -> None:
        self._model, self._params, self._chunks, self._layout, self._pool = model, params, chunks, layout, pool
        self.broken, self._staged = broken, staged
        self.closed = self.unsharded = False

    def install(self) -> None:
        """Begin to watch the model, whose parameters are in their final places."""
        model, params = self._model, self._params
        self._structure = Structure(model, params, self._name)
        self.edits = Edits(self._chunks, self._name, self._pool)
        check = partial(self.broken.check, "a state")
        places = self._chunks, self._layout, self._pool
        self.state_dicts = StateDictGuard(model, params, *places, self._staged, check, self._structure.check)
        for module in model.modules():
            # Bypass nn.Module's own __setattr__, which subclasses override.
            module.__dict__[MARK] = True

    def check_open(self, call: str) -> None:
        """Raise if the model is closed. ``call`` is the call that needs it, for the message.

        Raises:
            RuntimeError: the session was closed, or ``unshard()`` was called.
        """
        if self.closed:
            self.check_sharded()
            raise RuntimeError(
                f"{call} of a {type(self._model).__name__} that was closed: build it again, and load a state"
            )

    def check_sharded(self) -> None:
        """Check that the engine still has the parameters.

        Raises:
            RuntimeError: ``unshard()`` has given them back.
        """
        if self.unsharded:
            name = type(self._model).__name__
            raise RuntimeError(
                f"the {name} is no longer sharded since unshard(): use the {name} itself, an ordinary module, or "
                "shard it again with a new optimizer"
            )

    def check_forward(self) -> None:
        """Check the model before a forward pass.

        Raises:
            RuntimeError: modules or the data of parameters were replaced; a write to a parameter would be lost; or
                ``DistributedDataParallel`` wraps the parameters, too.
        """
        if torch.compiler.is_compiling():
            return
        if (outer := running_ddp()) is not None:
            # DDP does not affect a model that its own module only calls, or a frozen model.
            own = {id(param) for param in self._params if param.requires_grad}
            if any(id(param) in own for param in outer.parameters()):
                raise RuntimeError(_around(type(self._model).__name__))
        self._structure.check(parameters=False)
        self.check_edits()

    def check_edits(self, absent: bool = False) -> None:
        """Check the program's writes; see :class:`Edits`. Inside ``gathered()`` its parameters may be written to.

        Args:
            absent: whether to check the placeholders of parameters that are not gathered, too.
        """
        with self._pool.lock:  # another thread may be gathering
            self.edits.check_placed()
            if self._pool.blocks.all_gathered:
                return
            if absent:
                self.edits.check_absent()
            self.edits.check_written(self._pool.blocks.holds)

    def check(self) -> None:
        """Check that every parameter is the one that was sharded, where the engine put it.

        Raises:
            RuntimeError: a parameter was added, replaced, moved, cast, unfrozen, or written to where the write would be
                lost; the message names it.
        """
        self.check_sharded()
        self._structure.check()
        self.check_edits(absent=True)
        for chunk in [chunk for chunk in self._chunks if not chunk.spec.trainable]:
            for slot, param in zip(chunk.spec.slots, chunk.params, strict=True):
                if param.requires_grad:
                    raise RuntimeError(
                        f"{self._name(slot.param)} has requires_grad={param.requires_grad} but was frozen when the "
                        "model was sharded, so it has no gradient shard; set requires_grad before sharding (and "
                        "freeze after it what is to wait)"
                    )

    def _name(self, param: int) -> str:
        return self._layout.facts[param].names[0]

    def remove(self) -> None:
        """Stop watching the model. A model without values still raises errors if it is called or saved."""
        self.state_dicts.remove()
        if self._pool.has_transient and not self.unsharded:
            self._model.register_forward_pre_hook(_refuse_absent)
            self._model.register_state_dict_pre_hook(_refuse_absent)  # type: ignore[no-untyped-call]
        for module in self._model.modules():
            module.__dict__.pop(MARK, None)
