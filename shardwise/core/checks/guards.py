"""Errors for uses of a sharded model that would silently go wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.core.base.tensors import SPARSE
from shardwise.core.base.torch_internals import running_ddp
from shardwise.core.checks.edits import Edits
from shardwise.core.checks.overlaps import check_apart
from shardwise.core.checks.structure import Structure
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.layout import Layout
from shardwise.core.shards.pool import ChunkPool

__all__ = ["Guards", "check_shardable", "refusals_of_wrappers"]

MARK = "_is_sharded"
ASKED_BY_DDP, ASKED_BY_REPLICAS = "_ddp_params_and_buffers_to_ignore", "_replicate_for_data_parallel"
"""Attributes of a module that torch's ``DistributedDataParallel`` and ``DataParallel`` ask for before they use it."""


def check_shardable(model: nn.Module) -> None:
    """Check that the model can be sharded, before anything is changed.

    Raises:
        ValueError: A trainable parameter is complex or an integer, two parameters share memory, the model is sharded
            already (also by torch's ``FullyShardedDataParallel``), a module is a ``DistributedDataParallel`` or
            ``DataParallel``, a parameter or buffer is a ``DTensor``, or a parameter or persistent buffer is sparse.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whose import takes long, and nobody has such a model before
    for name, module in model.named_modules():
        if MARK in module.__dict__:
            raise ValueError(f"module {name!r} of the model is sharded already ({MARK}); close that session first")
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise ValueError(
                f"module {name!r} of the model is a {type(module).__name__}, which has sharded its parameters already: "
                "pass the model as it was before that"
            )
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ValueError(
                f"module {name!r} of the model is a {type(module).__name__}, whose own reduction would see no "
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
        # What stands for an absent parameter has no strides; one element has none that tell.
        absent = param.numel() > 1 and not param.is_meta and not any(param.stride())
        if absent and param.is_floating_point() and bool(torch.isnan(param.detach().flatten()[0])):
            raise ValueError(
                f"{name} {tuple(param.shape)} is not gathered: the model is sharded already; build a new one"
            )
    check_apart(model)


def _check_layouts(model: nn.Module) -> None:
    """Refuse sparse parameters and persistent sparse buffers: checkpoints hold strided tensors."""
    for path, module in model.named_modules():
        own = {**module._parameters, **module._buffers}
        for leaf, tensor in own.items():
            if tensor is None or tensor.layout is torch.strided:
                continue
            if leaf in module._non_persistent_buffers_set and tensor.layout in SPARSE:
                continue
            name = f"{path}.{leaf}" if path else leaf
            raise ValueError(
                f"{name} {tuple(tensor.shape)} has the layout {tensor.layout}, which no checkpoint can hold: make it "
                "dense (to_dense()), or register it with persistent=False and make it when the model is made"
            )


# [Note: What torch would put around a sharded model]
# DistributedDataParallel averages what stands in ``.grad`` when its own hooks run. The engine has taken the gradient by
# then, so it would average zeros, and put them where the engine's are. A copy that DataParallel makes for another GPU
# has the hooks, and not the parameters. Both first ask the module for an attribute: one that refuses is there as long
# as the model is sharded, and wrappers of it that pass attributes on have it too. Where a module in between has none of
# its own (a user's, or one that is sharded at its first use) DDP shows when the model runs inside of its forward pass.
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

    return {ASKED_BY_DDP: _RefusesDDP(name), ASKED_BY_REPLICAS: refuse_replica}


class Guards:
    """Watches one sharded model.

    Args:
        model: the user's module.
        params: its sharded parameters, by index.
        chunks, layout: where they lie.
        pool: knows what is gathered.
    """

    def __init__(
        self, model: nn.Module, params: Sequence[nn.Parameter], chunks: Sequence[Chunk], layout: Layout, pool: ChunkPool
    ) -> None:
        self._model, self._params, self._chunks, self._layout, self._pool = model, params, chunks, layout, pool
        self._structure = Structure(model, params, self._name)
        self.edits = Edits(chunks, self._name, pool.drop_changed)
        self.given_back = False
        """``unshard()`` has given the parameters back to the user; the engine's values are outdated."""
        for module in model.modules():
            # Past nn.Module's own __setattr__, which subclasses override.
            module.__dict__[MARK] = True

    def check_held(self) -> None:
        """Check that the engine still has the parameters.

        Raises:
            RuntimeError: ``unshard()`` has given them back.
        """
        if self.given_back:
            name = type(self._model).__name__
            raise RuntimeError(
                f"the {name} is no longer sharded since unshard(): use the {name} itself, an ordinary module, or "
                "shard it again with a new optimizer"
            )

    def check_structure(self) -> None:
        """See :meth:`Structure.check`."""
        self._structure.check()

    def check_forward(self) -> None:
        """Check the model before a forward pass.

        Raises:
            RuntimeError: modules or the data of parameters were replaced, or parameters written to where it is lost;
                or ``DistributedDataParallel`` has them as well.
        """
        if not torch.compiler.is_compiling():
            self._check_alone()
            self._structure.check_children()
            self.check_edits()

    def _check_alone(self) -> None:
        outer = running_ddp()
        if outer is None:
            return
        # It has nothing to do with a model that its own only calls, nor with one that is frozen.
        own = {id(param) for param in self._params if param.requires_grad}
        if any(id(param) in own for param in outer.parameters()):
            raise RuntimeError(_around(type(self._model).__name__))

    def after_forward(self) -> None:
        """Check after a forward pass that nothing was written to copies that end; see :meth:`check_edits`."""
        if not torch.compiler.is_compiling():
            self.check_edits()

    def check_edits(self, absent: bool = False) -> None:
        """See :class:`Edits`; inside ``gathered()`` what it holds may be written to.

        Args:
            absent: also look at what stands for parameters that are not gathered.
        """
        with self._pool.lock:  # another thread may be gathering
            self.edits.check_placed()
            if self._pool.blocks.all_held:
                return
            if absent:
                self.edits.check_absent()
            self.edits.check_written(self._pool.blocks.holds)

    def check(self) -> None:
        """Check that every parameter is the one that was sharded, where the engine put it.

        Raises:
            RuntimeError: one was added, replaced, moved, cast, unfrozen, or written to where it is lost; it is named.
        """
        self.check_held()
        self._structure.check()
        self.check_edits(absent=True)
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
