"""A full state of the model into shards and masters, on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shardwise.core.base.checked import as_mapping
from shardwise.core.base.checksum import sample_words
from shardwise.core.base.names import StateNames, is_one_kind
from shardwise.core.base.torch_internals import incompatible_keys
from shardwise.core.checks.broken import PARAMETERS
from shardwise.core.checks.description import described
from shardwise.core.comm import Description, collectively
from shardwise.core.engine.load_hooks import run_load_hooks
from shardwise.core.engine.others import check_others, put_others
from shardwise.core.engine.whole import state_names
from shardwise.core.engine.writer import ValueWriter

if TYPE_CHECKING:
    from shardwise.core.engine.engine import Engine

__all__ = ["compare_given", "load_whole"]

LOADING, UNCHANGED = "loading the model", "Nothing has changed."


# [Note: States that ranks are given]
# Every rank gives a whole state and keeps its part, so ranks that give different ones would go on with a model, or with
# moments, that are in no file: the usual cause is a state that one rank alone has read. Before the first value is
# written they compare names, shapes, dtypes and, of what lies on several ranks in parts, a sample of the values. What
# each rank has for itself may differ: buffers, and extra state. A rank's own refusal is every rank's.
def load_whole(engine: Engine, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
    """Take over a full state; every rank gives it and keeps its part (fp32 masters included). Collective.

    Raises:
        ValueError: ``assign=True``; or ranks give other names, shapes, dtypes or values of parameters: on every rank.
        RuntimeError: missing, unexpected or wrongly shaped entries, packed numbers for others or the other way
            round, all of them listed.
            Shapes are checked even where ``strict`` is False.
        PeerError: that is so on another rank.

    Nothing is changed then.
    """
    engine.guards.check_held()
    missing, unexpected = list[str](), list[str]()
    everyone = engine.mesh.everyone
    with collectively(everyone, LOADING, UNCHANGED, describe=lambda: _described(names, state_dict)):
        if assign:
            raise ValueError(f"load_state_dict(assign={assign}): sharded storage cannot be replaced; use assign=False")
        as_mapping("state_dict", state_dict, "what state_dict() of the model returned, values by name")
        names = _loadable(engine)
        # A tied parameter may be given under one of its names only.
        tied = names.of_parameter.values()
        missing += [name for name in names.others if name not in state_dict]
        missing += [name for own in tied if not any(each in state_dict for each in own) for name in own]
        known = names.order.keys() | {name for own in tied for name in own}
        unexpected += [name for name in state_dict if name not in known]
        wrong = _wrong(engine, names, state_dict)
        if wrong or (strict and (missing or unexpected)):
            raise RuntimeError(
                f"the state does not fit the model: missing {missing}, unexpected {unexpected}, wrong shapes or dtypes "
                f"{wrong}"
            )
        others = _others_of(engine, names, state_dict)
        made = check_others(engine, *others)
    _load(engine, state_dict, names, lambda: put_others(engine, *others, made))
    whole = not missing
    run_load_hooks(engine, missing, unexpected)
    if whole:
        engine.broken.loaded(PARAMETERS)
    return incompatible_keys(missing, unexpected)


def compare_given(engine: Engine, state_dict: Mapping[str, Any]) -> None:
    """Before a module itself takes a state into gathered parameters, of which each rank keeps its part. Collective.

    Raises:
        ValueError, PeerError: as :func:`load_whole`.
    """
    everyone = engine.mesh.everyone
    with collectively(everyone, LOADING, UNCHANGED, describe=lambda: _described(_loadable(engine), state_dict)):
        as_mapping("state_dict", state_dict, "what state_dict() of the model returned, values by name")


def _loadable(engine: Engine) -> StateNames:
    """What a state may have: a parameter that a hook of the model leaves out of what is saved (a frozen backbone) is
    loaded under the names that it has in the model, as by plain torch."""
    names, facts = state_names(engine), engine.division.census.facts
    return replace(names, of_parameter={at: names.of_parameter.get(at, fact.names) for at, fact in enumerate(facts)})


def _described(names: StateNames, state: Mapping[str, Any]) -> Description:
    """What of a state is taken over."""
    found = {f"{name} in the state": _others(state[name]) for name in names.others if name in state}
    params = {own[0]: name for own in names.of_parameter.values() if (name := _given_name(own, state)) is not None}
    words = sample_words([state[name] for name in params.values()])
    for (own, name), word in zip(params.items(), words, strict=True):
        found[f"{own} in the state"] = described(state[name]) | {"a sample of the values": word}
    return found


def _others(value: Any) -> dict[str, Any]:
    """Of a buffer its form, of extra state its class alone."""
    return described(value) if isinstance(value, torch.Tensor) else {"class": type(value).__name__}


def _given_name(own_names: Sequence[str], state: Mapping[str, Any]) -> str | None:
    return next((name for name in own_names if name in state), None)


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


def _others_of(engine: Engine, names: StateNames, state: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """What this rank's modules have beside parameters, and what a state has of that."""
    # All stages' names are not those of this rank's modules.
    others = (names if engine.division.census.names is None else engine.attachment.own_state.names()).others
    return others, {name: state[name] for name in others if name in state}


@torch.no_grad()
def _load(engine: Engine, state: Mapping[str, Any], names: StateNames, rest: Callable[[], None]) -> None:
    """``rest`` puts what are no parameters."""
    engine.values.before_load(whole=all(_given_name(own, state) for own in names.of_parameter.values()))
    engine.values.before_update()
    with engine.broken.replacing("loading a state", [PARAMETERS], partly=[PARAMETERS]):
        with ValueWriter(engine.storage) as writer:
            for place, own_names in names.of_parameter.items():
                given = _given_name(own_names, state)
                if given is not None and place in engine.division.census.index:
                    writer.store(engine.division.census.index[place], state[given])
        rest()
        engine.values.publish(everything=True)
