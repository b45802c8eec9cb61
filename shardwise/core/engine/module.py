"""The module that a build returns: it runs the user's module, and gathers, loads and saves full states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from shardwise.core.base.module_wrapper import TransparentModule
from shardwise.core.base.state_dict_names import StateNames
from shardwise.core.checks.collective_calls import collective
from shardwise.core.engine.full_values import full_buffers_and_extra, full_values, state_names
from shardwise.core.engine.load_state_dict import load_full
from shardwise.core.engine.memory_report import MemoryReport
from shardwise.core.engine.model_hooks import ModelHooks
from shardwise.core.engine.parameters import ParameterValues
from shardwise.core.memory.trace.stats import MemStats

READ_BY_TORCH = "_fqn_modifiers"
"""The attribute that torch's functions for states read first; they would use wrong names."""
MESH = attrgetter("sharded_values.shards.mesh")
"""Returns the mesh of a :class:`ShardedModule`."""


class ShardedModule(TransparentModule):
    """Runs the sharded module. Attributes and methods that are not listed here are those of the original module.

    Args:
        values: the parameter values of the model.
        model_hooks: the hooks on the model.
        report: returns the bytes of model data on this rank.

    Attributes:
        sharded_values, sharded_hooks, sharded_memory: the arguments, under names that shadow none of the module.

    Examples:
        >>> outputs = session.module(inputs)
        >>> state = session.module.state_dict()
    """

    sharded_values: ParameterValues
    sharded_hooks: ModelHooks
    sharded_memory: Callable[[], MemoryReport]

    def __init__(self, values: ParameterValues, model_hooks: ModelHooks, report: Callable[[], MemoryReport]) -> None:
        super().__init__()
        self.module = values.shards.model
        # Past __setattr__, which would give them to the user's module.
        self.__dict__.update(sharded_values=values, sharded_hooks=model_hooks, sharded_memory=report)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user's module on the (cast) arguments."""
        values = self.sharded_values
        if values.guards.closed and not all(chunk.resident for chunk in values.shards.chunks):
            values.guards.check_sharded()
            raise RuntimeError(
                f"forward of {type(self).__name__}: the {type(self.module).__name__} was closed, so its "
                "parameters cannot be gathered; build it again, and load a saved state"
            )
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            if (hooks := self.sharded_hooks.hooks) is not None:
                hooks.unwind()
                hooks.explain(error)
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, reduced or not."""
        self.sharded_values.grads.zero()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ShardedModule:
        """Accept ``to()``, ``half()`` and similar calls if they change nothing.

        Raises:
            RuntimeError: they would cast or move parameters that are sharded.
        """
        for chunk in self.sharded_values.shards.chunks:
            # The result of the function is known only after a call.
            probe = torch.empty(1, dtype=chunk.spec.dtype, device=chunk.device)
            result = fn(probe)
            if result.dtype != probe.dtype or result.device != probe.device:
                raise RuntimeError(
                    f"a sharded model of {probe.dtype} on {probe.device} cannot become {result.dtype} on "
                    f"{result.device}: move or cast it before sharding, or choose the precision in the plan. "
                    "param_host_fraction=1.0 (shard(offload='host')) keeps parameters in host memory between uses"
                )
        return self

    def __getattr__(self, name: str) -> Any:
        if name == READ_BY_TORCH:
            raise RuntimeError(
                f"torch.distributed.checkpoint.state_dict does not support {type(self).__name__}: use the functions of "
                "the same names in shardwise.pytorch.state_dict"
            )
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name not in ("join", "join_hook"):  # torch's Join, and DDP's, for ranks with fewer batches
                raise
            raise AttributeError(
                f"{error}: all ranks have to run the same number of passes; give them equally many batches, as "
                "DistributedSampler does, or leave the loop on all of them",
                name=name,
                obj=self,
            ) from error

    def unwrap(self) -> nn.Module:
        """The user's module."""
        return self.sharded_values.shards.model

    def wait_for_gathers(self) -> None:
        """Wait for gathers that a step has started (``gather_on_use``), so that parameters can be read without a
        forward pass."""
        self.sharded_values.pool.settle()

    def gathered(self, write_back: bool = False) -> AbstractContextManager[None]:
        """Gather full parameters in place inside the block, for generation and inspection. Every rank enters.

        Args:
            write_back: keep changes of the parameters inside, each rank its own part of them. The user's own module
                accepts ``load_state_dict()`` then.

        Examples:
            >>> with session.module.gathered():
            ...     outputs = session.model(inputs)
        """
        return self.sharded_values.gathered(write_back)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes are not reduced; the first later pass reduces the sum.

        Raises:
            ValueError: the plan reduces in every pass (stages 2 and 3), or updates during backward.

        Examples:
            >>> session = shardwise.shard(model, optimizer, stage=1)
            >>> with session.module.no_sync():
            ...     session.backward(session.module(inputs).square().mean())
        """
        return self.sharded_values.grads.no_sync()

    def memory(self) -> MemoryReport:
        """Return the bytes of model data on this rank."""
        return self.sharded_memory()

    def memory_stats(self) -> MemStats | None:
        """Return the memory trace of the last training step. ``None`` before a step, or without a device capacity."""
        return None if (meter := self.sharded_values.meter) is None else meter.stats

    def _state_names(self) -> StateNames:
        return state_names(self.sharded_values.shards, self.sharded_values.guards.state_dicts)

    def full_state(self, masters: bool = True) -> Iterator[tuple[str, Any]]:
        """Yield every parameter (under all its names) and buffer as a full tensor, a chunk at a time, and extra state;
        unsharded over all kinds of parallelism. Collective.

        Args:
            masters: yield fp32 masters, so that nothing is lost; otherwise values in the compute dtype.
        """
        values = self.sharded_values
        values.settle("a state")
        names = self._state_names()
        for place, value in full_values(values.shards, masters):
            for name in names.of_parameter.get(place, ()):
                yield name, value
        yield from full_buffers_and_extra(values.shards, values.guards.state_dicts)

    @collective("state_dict() of the model", MESH)
    def state_dict(  # type: ignore[override]
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        only_rank_0: bool = False,
    ) -> dict[str, Any]:
        """Return the full state on every rank, on the host, in the module's own order and names. Collective.

        Args:
            destination: entries are added to it.
            prefix: put before every name.
            keep_vars: must be False, since there are no full parameters.
            only_rank_0: other ranks, which call it too, get nothing and need no memory for it.

        Returns:
            Tensors by name, in fp32 if there are fp32 masters, with the shapes of the unsharded model.

        Raises:
            ValueError: ``keep_vars=True``.

        Examples:
            >>> state = session.module.state_dict(only_rank_0=True)
            >>> if state:  # empty on other ranks
            ...     torch.save(state, "model.pt")
        """
        if keep_vars:
            raise ValueError(f"state_dict(keep_vars={keep_vars}): ranks have only shards of parameters; leave it False")
        keeps = not only_rank_0 or self.sharded_values.shards.mesh.is_rank0
        full = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in self.full_state() if keeps}
        state = {} if destination is None else destination
        state.update({prefix + name: full[name] for name in self._state_names().order if name in full})
        return state

    def state_layout(self) -> dict[str, Any]:
        """Return names and shapes of :meth:`state_dict` without gathering. The values must not be read."""
        table, params = self.sharded_values.shards.partition.table, self.sharded_values.shards.params
        outlines = [
            params[table.index[place]]
            if place in table.index and fact.part is None
            else torch.empty(fact.full_shape, dtype=fact.dtype, device="meta")
            for place, fact in enumerate(table.facts)
        ]
        return self._state_names().layout(outlines)

    @collective("load_state_dict() of the model", MESH)
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a full state, including fp32 masters. Every rank passes it and keeps its part. Collective.

        Args:
            state_dict: the full state, the same on every rank.
            strict: missing and unexpected names are errors. Shapes are checked in any case.
            assign: must be False, since sharded parameters cannot be replaced.

        Returns:
            ``missing_keys`` and ``unexpected_keys``, as torch returns them.

        Raises:
            ValueError: ``assign=True``; or ranks give different names, shapes, dtypes or values. Nothing has changed.
            RuntimeError: entries are missing, unexpected, or have the wrong shape. Nothing has changed.
            PeerError: another rank raised such an error. Nothing has changed.
        """
        return load_full(self.sharded_values, state_dict, strict, assign)
