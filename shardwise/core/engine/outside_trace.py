"""A memory trace that was made outside of training (``trace_memory``), as one of the engine's units.

Such a trace numbers modules, the engine numbers the units in which it gathers parameters; a module uses the units that
hold its own. What else a moment says, above all what it held beside model data, stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from shardwise.core.memory.trace.stats import NO_UNIT, MemStats, Moment
from shardwise.core.shards.pool import ChunkPool

__all__ = ["of_units"]


def of_units(
    stats: MemStats, model: nn.Module, units_of: Mapping[str, Sequence[int]], pool: ChunkPool
) -> MemStats | None:
    """``stats`` by units, or ``None`` where they are not of ``model``'s modules.

    Args:
        stats: what ``trace_memory`` gave for such a model.
        model: the one that is trained.
        units_of: by name of a module, the units that it uses.
        pool: the units.
    """
    modules = list(model.named_modules())
    shown = {number: name or type(module).__name__ for number, (name, module) in enumerate(modules)}
    if set(stats.gathered_bytes) != set(shown):
        return None
    moments: list[Moment] = []
    for moment in stats.moments:
        if moment.unit == NO_UNIT:
            moments.append(moment)
        elif shown.get(moment.unit) != moment.name:
            return None
        else:
            units = units_of.get(modules[moment.unit][0], ())
            moments += [replace(moment, unit=unit, name=pool.units[unit].title) for unit in units]
            moments += [] if units else [replace(moment, unit=NO_UNIT)]
    return replace(stats, moments=moments, gathered_bytes={unit: size for unit, size in pool.sizes.items() if size})
