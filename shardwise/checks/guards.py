"""Uses of a sharded model that would silently go wrong, made into errors that say what to do."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checks.edits import Edits
from shardwise.checks.overlaps import check_apart
from shardwise.checks.structure import Structure
from shardwise.chunk.chunk import Chunk
from shardwise.chunk.layout import Layout
from shardwise.device import runs_ahead
from shardwise.gather.pool import ChunkPool

__all__ = ["Guards", "check_shardable"]

MARK = "_is_sharded"


def check_shardable(model: nn.Module) -> None:
    """Before anything is changed.

    Raises:
        ValueError: a trainable parameter is complex or an integer, two parameters share memory, the model is sharded
            already (torch's ``FullyShardedDataParallel`` included), or a parameter or buffer of it is a ``DTensor``.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whose import takes long, and nobody has such a model before
    for name, module in model.named_modules():
        if MARK in module.__dict__:
            raise ValueError(f"module {name!r} of the model is sharded already ({MARK}); close that session first")
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise ValueError(
                f"module {name!r} of the model is a {type(module).__name__}, which has divided its parameters already: "
                "give the model as it was before, and this divides it"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{name} {tuple(tensor.shape)} is a DTensor, which fully_shard, parallelize_module or "
                "distribute_tensor divided already: give the model as it was before, and this divides it"
            )
    for name, param in model.named_parameters():
        if param.requires_grad and not param.is_floating_point():
            raise ValueError(f"{name} is trainable and {param.dtype}: only real floating-point ones can be sharded")
        # What stands for an absent parameter has no strides; one element has none that tell.
        absent = param.numel() > 1 and not param.is_meta and not any(param.stride())
        if absent and param.is_floating_point() and bool(torch.isnan(param.detach().flatten()[0])):
            raise ValueError(
                f"{name} {tuple(param.shape)} is not gathered: the model is sharded already; build a new one"
            )
    check_apart(model)


class Guards:
    """Watches one sharded model.

    Args:
        model: the user's module.
        params: its sharded parameters, by index.
        chunks, layout: where they lie.
        pool: knows whether everything is gathered.
    """

    def __init__(
        self, model: nn.Module, params: Sequence[nn.Parameter], chunks: Sequence[Chunk], layout: Layout, pool: ChunkPool
    ) -> None:
        self._model, self._params, self._chunks, self._layout, self._pool = model, params, chunks, layout, pool
        self._structure = Structure(model, params, self._name)
        self.edits = Edits(chunks, self._name, pool.drop_changed)
        self._reads_cost = any(runs_ahead(chunk.device) for chunk in chunks)
        self.given_back = False
        """The parameters are the user's again, with their values in them: what the engine has is old."""
        for module in model.modules():
            # Past nn.Module's own __setattr__, which subclasses override.
            module.__dict__[MARK] = True

    def check_held(self) -> None:
        """The engine still has the parameters.

        Raises:
            RuntimeError: ``unshard()`` has given them back.
        """
        if self.given_back:
            name = type(self._model).__name__
            raise RuntimeError(
                f"the {name} is sharded no more since unshard(): it is an ordinary module, with its values in it; call "
                f"the {name} itself and its own methods, or shard it again with a new optimizer"
            )

    def check_structure(self) -> None:
        """See :meth:`Structure.check`."""
        self._structure.check()

    def check_forward(self) -> None:
        """Before a forward pass.

        Raises:
            RuntimeError: modules or the data of parameters were replaced, or parameters written to where it is lost.
        """
        if not torch.compiler.is_compiling():
            self._structure.check_children()
            self.check_edits(values=not self._reads_cost, held=False)

    def after_forward(self) -> None:
        """After one: nothing was written to copies that end; see :meth:`check_edits`."""
        if not torch.compiler.is_compiling():
            self.check_edits(values=False, held=False)

    def check_edits(self, values: bool, held: bool) -> None:
        """See :meth:`Edits.check_placed`; inside ``gathered()`` writing is allowed."""
        with self._pool.lock:  # another thread may be gathering
            writable = self._pool.all_held
            self.edits.check_placed(values and not writable)
            if not writable:
                self.edits.check_written(held)

    def check(self) -> None:
        """Every parameter is still the one that was sharded, where the engine put it.

        Raises:
            RuntimeError: one was added, replaced, moved, cast, unfrozen, or written to where it is lost; it is named.
        """
        self.check_held()
        self._structure.check()
        self.check_edits(values=True, held=True)
        for chunk in self._chunks:
            if chunk.spec.trainable:
                continue
            for slot, param in zip(chunk.spec.slots, chunk.params, strict=True):
                if param.requires_grad:
                    raise RuntimeError(
                        f"{self._name(slot.param)} has requires_grad={param.requires_grad} but was frozen when the "
                        "model was sharded, so it has no gradient shard; set requires_grad before boost/build (and "
                        "freeze after it what is to wait)"
                    )

    def _name(self, param: int) -> str:
        return self._layout.facts[param].names[0]

    def remove(self) -> None:
        """Stop watching."""
        for module in self._model.modules():
            module.__dict__.pop(MARK, None)
