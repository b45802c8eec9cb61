"""What the user holds instead of the model: the same module, plus what only a sharded one can do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from shardwise.chunk.chunk import Chunk
from shardwise.engine.engine import Engine
from shardwise.engine.memory import MemoryReport, memory_report
from shardwise.engine.optimizer_state import gather_shards

__all__ = ["ShardedModule"]

EXTRA_STATE = "_extra_state"  # what torch appends to a module's name


class ShardedModule(nn.Module):
    """Runs the sharded module; attributes that it does not have itself come from the user's module."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.module = engine.model
        self.__dict__["engine"] = engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user's module on the (cast) arguments."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def unwrap(self) -> nn.Module:
        """The user's module."""
        return self.__dict__["engine"].model  # type: ignore[no-any-return]

    def gathered(self, write_back: bool = False) -> AbstractContextManager[None]:
        """Full parameters in place inside the block, gathered once: for generation and inspection. Every rank enters.

        Args:
            write_back: keep changes made to the parameters inside (each rank its own part of them).
        """
        return self._engine.gathered(write_back)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside are not reduced; see :meth:`shardwise.engine.engine.Engine.no_sync`."""
        return self._engine.no_sync()

    def memory(self) -> MemoryReport:
        """Live bytes of model data on this rank."""
        return memory_report(self._engine)

    @property
    def _engine(self) -> Engine:
        engine: Engine = self.__dict__["engine"]
        return engine

    def full_state(self, masters: bool = True) -> Iterator[tuple[str, Any]]:
        """Every parameter (all its names) and buffer as a full tensor, a chunk at a time, and extra state. Collective.

        Args:
            masters: parameters with an fp32 master are given in fp32, so that nothing is lost; otherwise in the
                compute dtype.
        """
        engine = self._engine
        engine.pool.settle()
        for chunk in engine.chunks:
            for slot, value in zip(chunk.spec.slots, chunk.views(self._full(chunk, masters)), strict=True):
                for name in engine.layout.facts[slot.param].names:
                    yield name, value
        seen = {name for fact in engine.layout.facts for name in fact.names}
        for name, value in self.unwrap().state_dict(keep_vars=True).items():
            if name not in seen:
                yield name, value.detach() if isinstance(value, torch.Tensor) else value

    def _full(self, chunk: Chunk, masters: bool) -> torch.Tensor:
        master = self._engine.masters.get(chunk.spec.index) if masters else None
        if master is not None:
            return gather_shards(self._engine, master)
        if chunk.full is not None and chunk.pending is None and chunk.resident:
            return chunk.full.clone()
        return gather_shards(self._engine, chunk.shard)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The full state on every rank, on the host, in the module's own order and names. Collective."""
        full = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in self.full_state()}
        order = list(self.unwrap().state_dict(keep_vars=True))
        prefix = kwargs.get("prefix", "")
        return {prefix + name: full[name] for name in order if name in full}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over a full state; every rank gives it and keeps its part (fp32 masters included).

        Raises:
            RuntimeError: missing, unexpected or wrongly shaped entries, all of them listed; nothing is changed then.
                Shapes are checked even where ``strict`` is False.
        """
        if assign:
            raise ValueError(f"load_state_dict(assign={assign}): sharded storage cannot be replaced; use assign=False")
        engine = self._engine
        own = self.unwrap().state_dict(keep_vars=True)
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in own]
        wrong = [
            f"{name}: {tuple(state_dict[name].shape)} instead of {tuple(value.shape)}"
            for name, value in own.items()
            if name in state_dict and isinstance(value, torch.Tensor) and state_dict[name].shape != value.shape
        ]
        # A tied parameter may be given under one of its names only.
        for fact in engine.layout.facts:
            if any(name in state_dict for name in fact.names):
                missing = [name for name in missing if name not in fact.names]
        if wrong or (strict and (missing or unexpected)):
            raise RuntimeError(
                f"the state does not fit the model: missing {missing}, unexpected {unexpected}, wrong shapes {wrong}"
            )
        self._load(state_dict, own)
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)

    @torch.no_grad()
    def _load(self, state: Mapping[str, torch.Tensor], own: Mapping[str, Any]) -> None:
        engine = self._engine
        engine.before_update()
        parameters: set[str] = set()
        for index, fact in enumerate(engine.layout.facts):
            parameters |= set(fact.names)
            name = next((n for n in fact.names if n in state), None)
            if name is not None:
                engine.store_value(index, state[name])
        for name, value in own.items():
            if name in parameters or name not in state:
                continue
            if isinstance(value, torch.Tensor):
                value.copy_(state[name])
            elif name.endswith(EXTRA_STATE):
                owner = name.removesuffix(EXTRA_STATE).rstrip(".")
                engine.model.get_submodule(owner).set_extra_state(state[name])
        engine.publish()
