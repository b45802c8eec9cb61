"""A full state of the model into shards and masters, on all ranks or on none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checked import as_mapping
from shardwise.checks.unfinished import PARAMETERS
from shardwise.engine.others import is_one_kind, put_others
from shardwise.engine.whole import state_names
from shardwise.engine.writer import ValueWriter
from shardwise.names import StateNames
from shardwise.torch_internals import incompatible_keys

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

__all__ = ["load_whole"]


def load_whole(engine: Engine, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
    """Take over a full state; every rank gives it and keeps its part (fp32 masters included). Collective.

    Raises:
        ValueError: ``assign=True``.
        RuntimeError: missing, unexpected or wrongly shaped entries, packed numbers for others or the other way
            round, all of them listed; nothing is changed then.
            Shapes are checked even where ``strict`` is False.
    """
    if assign:
        raise ValueError(f"load_state_dict(assign={assign}): sharded storage cannot be replaced; use assign=False")
    engine.guards.check_held()
    as_mapping("state_dict", state_dict, "what state_dict() of the model returned, values by name")
    names = state_names(engine)
    # A tied parameter may be given under one of its names only.
    tied = names.of_parameter.values()
    missing = [name for name in names.others if name not in state_dict]
    missing += [name for own in tied if not any(each in state_dict for each in own) for name in own]
    unexpected = [name for name in state_dict if name not in names.order]
    wrong = _wrong(engine, names, state_dict)
    if wrong or (strict and (missing or unexpected)):
        raise RuntimeError(
            f"the state does not fit the model: missing {missing}, unexpected {unexpected}, wrong shapes or dtypes "
            f"{wrong}"
        )
    _load(engine, state_dict, names)
    if not missing:
        engine.unfinished.end(PARAMETERS)
    return incompatible_keys(missing, unexpected)


def _wrong(engine: Engine, names: StateNames, state: Mapping[str, Any]) -> list[str]:
    """What has another shape than the model's, or is another kind of number."""
    facts = engine.division.census.facts
    shapes = {n: value.shape for n, value in names.others.items() if isinstance(value, torch.Tensor)}
    dtypes: dict[str, torch.dtype] = {}
    for param, own_names in names.of_parameter.items():
        shapes |= dict.fromkeys(own_names, facts[param].whole)
        dtypes |= dict.fromkeys(own_names, facts[param].dtype)
    wrong = [
        f"{name}: {tuple(state[name].shape)} instead of {tuple(shape)}"
        for name, shape in shapes.items()
        if name in state and state[name].shape != shape
    ]
    return wrong + [
        f"{name}: {state[name].dtype} instead of {dtype}, two kinds of numbers"
        for name, dtype in dtypes.items()
        if name in state and not is_one_kind(state[name].dtype, dtype)
    ]


@torch.no_grad()
def _load(engine: Engine, state: Mapping[str, Any], names: StateNames) -> None:
    engine.values.discard_early()
    engine.values.before_update()
    was_whole = PARAMETERS not in engine.unfinished
    engine.unfinished.begin("loading a state", PARAMETERS)
    with ValueWriter(engine.storage) as writer:
        for place, own_names in names.of_parameter.items():
            given = next((name for name in own_names if name in state), None)
            if given is not None and place in engine.division.census.index:
                writer.store(engine.division.census.index[place], state[given])
    # All stages' names are not those of this rank's modules.
    others = (names if engine.division.census.names is None else engine.attachment.own_state.names()).others
    put_others(engine, others, {name: state[name] for name in others if name in state})
    engine.values.publish(everything=True)
    if was_whole:
        engine.unfinished.end(PARAMETERS)
