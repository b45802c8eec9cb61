"""Access to one parameter of a sharded model: read and set its value, gradient and optimizer state.

For programs that look at a few parameters between passes and steps. Every method is collective, also with ``own=True``,
which reads or sets this rank's shard instead of the full tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from shardwise.core.base.fingerprint import sample_words
from shardwise.core.checks.broken import PARAMETERS, state_of
from shardwise.core.checks.collective_calls import collective
from shardwise.core.comm import Description, collectively
from shardwise.core.engine.full_values import LOAD, READ_AGAIN, READING, READING_STATE, WRITING_STATE, gather_parts
from shardwise.core.engine.gradients import Gradients
from shardwise.core.engine.mixed_precision import map_tensors
from shardwise.core.engine.optimizer import ShardedOptimizer
from shardwise.core.engine.param_writer import ParamWriter
from shardwise.core.engine.parameters import ParameterValues
from shardwise.core.update.tiles import ParamShard


class OneParameter:
    """Access to one parameter. Its value is the fp32 master if there is a master.

    All methods except :meth:`unreduced` are collective, also with ``own=True``. Under tensor parallelism the
    full tensor is that of this rank's layer, with the shape of the parameter itself.

    Args:
        values: the parameter values of the model.
        grads: the gradients of the model.
        optimizers: all optimizers of the model.
        index: index of the parameter, in the order of the session's ``params``.

    Examples:
        >>> bias = session.one(session.model.bias)
        >>> bias.name
        'bias'
        >>> session.backward(loss)
        >>> bias.gradient().shape
        torch.Size([4])
        >>> session.optimizer.step()
        >>> bias.state("exp_avg").shape
        torch.Size([4])
    """

    def __init__(
        self, values: ParameterValues, grads: Gradients, optimizers: Sequence[ShardedOptimizer], index: int
    ) -> None:
        self._values, self._grads, self.index = values, grads, index
        self._shards, self._guards, self._mesh = values.shards, values.guards, values.shards.mesh
        chunk_index, self._slot = self._shards.layout.where[index]
        self._chunk = self._shards.chunks[chunk_index]
        owners = [each for each in optimizers if each.index == self._chunk.spec.optimizer]
        self._optimizer = owners[0] if owners and self._chunk.spec.trainable else None
        start, end = self._chunk.overlap(self._slot)
        self._first = min(start, end) - self._slot.start if start < end else 0
        self._numel = max(end - start, 0)

    @property
    def name(self) -> str:
        """The first name of the parameter in the model."""
        return self._shards.name(self.index)

    @property
    def resident(self) -> bool:
        """Whether every rank has the full parameter at all times."""
        return self._chunk.resident

    @property
    def unit(self) -> int:
        """Index of the unit with which it is gathered."""
        return self._chunk.spec.unit

    # ---- its value

    def value(self, own: bool = False) -> torch.Tensor:
        """Return a copy of the value, on the device.

        Args:
            own: return this rank's shard (1-D, may be empty) instead of the full value.

        Returns:
            The full value in the shape of the parameter, or the shard; fp32 if there is a master.
        """
        return self._read() if own else self._read_full()

    @collective("reading a parameter")
    def _read_full(self) -> torch.Tensor:
        return self._gather(self._read())

    def _read(self) -> torch.Tensor:
        """Return this rank's shard."""
        self._values.settle(f"reading {self.name}")
        with self._shards.storage.disk_access(READING, READ_AGAIN, self._mesh.stage_group), ExitStack() as stack:
            state = self._shards.states.get(self._chunk.spec.index)
            shard = None if state is None else stack.enter_context(state.opened())
            if shard is None:
                shard = stack.enter_context(self._chunk.opened())
            at = self._slot.start + self._first - self._chunk.shard_start if self._numel else 0
            return shard[at : at + self._numel].to(self._mesh.device, copy=True)

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        """Gather the shards of all ranks. Collective."""
        group = self._mesh.shard
        group.exchange([], f"shards of {self.name}")  # ranks that read different parameters raise
        return gather_parts(group, self._chunk.spec, self._slot, part).view(self._slot.shape)

    @collective("writing a parameter")
    @torch.no_grad()
    def set_value(self, value: torch.Tensor, own: bool = False) -> None:
        """Replace parameter and master by ``value``: the full value, the same on every rank, or this rank's shard.

        Args:
            value: the new value, on any device.
            own: it is this rank's shard.

        Raises:
            ValueError: the number of elements is wrong, or ranks give different full values; nothing has changed.
            PeerError: another rank's shape does not fit.
            RuntimeError: the model was closed, or given back by ``unshard()``.
        """
        self._guards.check_open(f"writing {self.name}")
        new = self._compared(value, own, "the value")
        if own:
            new = self._gather(new)
        values = self._values
        values.make_current(f"writing {self.name}")
        values.before_update()
        with self._guards.broken.replacing(f"writing {self.name}", [PARAMETERS]):
            with ParamWriter(self._shards.storage) as writer:
                writer.store(self.index, new, local=True)
            values.publish(everything=True)

    def _compared(self, value: torch.Tensor, own: bool, what: str) -> torch.Tensor:
        """As :meth:`_checked`, on all ranks, which compare full values. See [Note: States that ranks are given].

        Raises:
            ValueError: ranks give different values; nothing has changed.
            PeerError: another rank's shape does not fit.
        """
        new = value

        def describe() -> Description:
            return {} if own else {what: {"a sample of the values": sample_words([new])[0]}}

        doing = f"replacing {what} of {self.name}"
        with collectively(self._mesh.world, doing, "Nothing has changed.", describe=describe):
            new = self._checked(value, own)
        return new

    def _checked(self, value: torch.Tensor, own: bool) -> torch.Tensor:
        shape = torch.Size([self._numel]) if own else torch.Size(self._slot.shape)
        what = "this rank's part of it has" if own else "it has"
        if value.numel() != shape.numel():
            raise ValueError(f"{self.name} := a tensor of shape {tuple(value.shape)}, but {what} {tuple(shape)}")
        return value.detach().to(self._mesh.device).reshape(shape)

    # ---- its gradient

    def gradient(self, own: bool = False) -> torch.Tensor | None:
        """Return the gradient that the next step would apply, before clipping: averaged and unscaled, at least fp32.

        Args:
            own: return this rank's shard (1-D, may be empty) instead of the full gradient.

        Returns:
            The gradient; ``None`` if there is no gradient.

        Raises:
            RuntimeError: the gradient is not averaged yet, or the plan does not keep it.
        """
        facade = self._grads.facade
        with nullcontext() if own else self._mesh.doing("reading a gradient"):
            facade.collect()
            if not facade.has(self.index):
                return None
            facade.check_use(self.index, "the gradient")
            full = facade.full(self.index, wide=True)
        return full.reshape(-1)[self._first : self._first + self._numel].clone() if own else full

    @torch.no_grad()
    def unreduced(self) -> torch.Tensor | None:
        """Return a copy of the gradient of this rank's passes under ``no_sync()``, unscaled, at least fp32.

        It is not collective.

        Returns:
            The full gradient; ``None`` without such passes.
        """
        state = self._grads.states.get(self._chunk.spec.index)
        grad = None if state is None else state.local_grad(self._chunk.spec.slots.index(self._slot))
        if grad is None or not self._grads.passes.unreduced:
            return None
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        return grad.to(wide, copy=True).div_(self._grads.counts.loss_scale)

    @collective("writing a gradient")
    @torch.no_grad()
    def set_gradient(self, value: torch.Tensor, own: bool = False) -> None:
        """Replace the gradient, as assigning ``.grad`` does in one process.

        Args:
            value: the new gradient, averaged and unscaled.
            own: it is this rank's shard.

        Raises:
            ValueError: the number of elements is wrong.
        """
        self._guards.check_open(f"writing the gradient of {self.name}")
        grad = self._checked(value, own)
        self._grads.facade.collect()
        self._grads.facade.replace(self.index, self._gather(grad) if own else grad)

    # ---- its optimizer state

    @collective("reading the state of a parameter")
    def state(self, key: str, own: bool = False) -> torch.Tensor | None:
        """Return an entry of the parameter's optimizer state.

        Args:
            key: the name of the entry in the optimizer, such as ``"exp_avg"`` or ``"step"``.
            own: return this rank's shard (1-D, may be empty) instead of the full tensor.

        Returns:
            A tensor, or a number (``step``); ``None`` before a step, and for a frozen parameter.

        Raises:
            KeyError: the state has no such entry.
            ValueError: the entry is neither element-wise nor a number (as rows and columns of Adafactor).
        """
        if self._optimizer is None:
            return None
        self._values.make_current(f"reading the state of {self.name}")
        kinds, parts = dict[str, Any](), list[torch.Tensor]()
        with self._shards.storage.disk_access(READING_STATE, READ_AGAIN, self._mesh.stage_group):
            for _, piece, state in self._pieces(self._optimizer):
                kinds = {name: self._kind(value, piece) for name, value in state.items()}
                if isinstance(kinds.get(key), str):
                    parts.append(state[key].reshape(-1).to(self._mesh.device, copy=True))
        posts = [post for post in self._mesh.shard.exchange_object(kinds, f"the state of {self.name}") if post]
        if not posts:
            return None
        if key not in posts[0]:
            raise KeyError(f"{key!r}: the optimizer state of {self.name} has {sorted(posts[0])}; give one of them")
        kind = posts[0][key]
        if kind is None:
            raise ValueError(
                f"{key!r} of the optimizer state of {self.name} has another shape than the parameter: read it from "
                "optimizer.state_dict(), on every rank"
            )
        if not isinstance(kind, str):
            return torch.tensor(kind[0], dtype=getattr(torch, kind[1]), device="cpu")
        empty = torch.empty(0, dtype=getattr(torch, kind), device=self._mesh.device)
        part = torch.cat(parts) if parts else empty
        return part if own else self._gather(part)

    @staticmethod
    def _kind(value: Any, piece: ParamShard) -> Any:
        """Return the dtype of element-wise state, value and dtype of a number, or ``None`` for other shapes."""
        if isinstance(value, torch.Tensor) and value.shape == piece.value.shape:
            return str(value.dtype).removeprefix("torch.")
        if not isinstance(value, torch.Tensor | bool | int | float) or getattr(value, "ndim", 0) > 0:
            return None
        number = torch.as_tensor(value)
        return [number.item(), str(number.dtype).removeprefix("torch.")]

    @collective("writing the state of a parameter")
    @torch.no_grad()
    def set_state(self, key: str, value: torch.Tensor, own: bool = False) -> None:
        """Replace an element-wise entry of the parameter's optimizer state.

        Args:
            key: the name of the entry.
            value: the new entry, on any device.
            own: it is this rank's shard.

        Raises:
            ValueError: the number of elements is wrong, or ranks give different full values; nothing has changed.
            PeerError: another rank's shape does not fit.
            RuntimeError: no optimizer has it, or it has no state yet.
            KeyError: the state has no such entry.
        """
        self._guards.check_open(f"writing the state of {self.name}")
        state, optimizer = self.state(key, own=True), self._optimizer
        if state is None or optimizer is None:
            raise RuntimeError(
                f"the optimizer state {key!r} of {self.name} := ... (it has {state}): a frozen parameter has none, and "
                "others have theirs after the first step; set it then"
            )
        new = self._compared(value, own, f"the state {key!r}").reshape(-1)
        new = new if own else new[self._first : self._first + self._numel]
        storage = self._shards.storage
        with optimizer.updates.replacing_state(), storage.disk_access(WRITING_STATE, LOAD):
            for position, piece, _ in self._pieces(optimizer):
                part = new[piece.offset - self._first : piece.offset - self._first + piece.end - piece.start]
                self._rewrite(optimizer, position, piece, key, part)
        storage.commit()
        self._guards.broken.loaded(state_of(optimizer.index))

    @staticmethod
    def _rewrite(optimizer: ShardedOptimizer, position: int, piece: ParamShard, key: str, part: torch.Tensor) -> None:
        """Replace one shard's state in a tile. After an error the optimizer's state is broken until it is loaded."""
        updates, states = optimizer.updates, optimizer.state
        tile = updates.tiles[position]
        with updates.opened(position):
            entries = [dict(states.get(one.value, {})) for one in tile.pieces]
            if tile.state.on_disk:  # its buffers are reused after the block
                entries = map_tensors(entries, torch.Tensor.clone)
        own = entries[tile.pieces.index(piece)]
        if own:
            own[key] = own[key].clone().copy_(part.view(own[key].shape))
        updates.replace(position, [entry or None for entry in entries])

    def _pieces(self, optimizer: ShardedOptimizer) -> Iterator[tuple[int, ParamShard, dict[str, Any]]]:
        """Yield tile position, shard and its state, which is valid until the next one, in order."""
        for position, tile in enumerate(optimizer.updates.tiles):
            for piece in tile.pieces:
                if piece.param == self.index:
                    with optimizer.updates.opened(position):
                        state = dict(optimizer.state.get(piece.value, {}))
                        yield position, piece, state
