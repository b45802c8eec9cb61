"""Loads a full state of the model into shards and masters, on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from shardwise.core.base.fingerprint import sample_words
from shardwise.core.base.state_dict_names import (
    StateNames,
    call_load_hooks,
    hand_back,
    is_one_kind,
    keeper,
    load_entries,
    takers,
    with_load_hooks,
)
from shardwise.core.base.torch_internals import incompatible_keys
from shardwise.core.base.validate import as_mapping, names_text
from shardwise.core.checks.broken import PARAMETERS
from shardwise.core.checks.build_fingerprint import described
from shardwise.core.checks.state_dict_guard import StateDictGuard
from shardwise.core.comm import Description, collectively
from shardwise.core.engine.full_values import state_names
from shardwise.core.engine.model_shards import ModelShards
from shardwise.core.engine.param_writer import ParamWriter
from shardwise.core.engine.parameters import ParameterValues

LOADING, UNCHANGED = "loading the model", "Nothing has changed."


# [Note: States that ranks are given]
# Every rank loads a full state and keeps its part. If the ranks loaded different states, the resulting model would be
# in no file; the usual cause is a state that only one rank has read. So before the first value is written they compare
# names, shapes, dtypes and a sample of the values of parameters. Buffers and extra state may differ between ranks. If
# one rank rejects its state, all of them raise.
def load_full(values: ParameterValues, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
    """Load a full state, including fp32 masters. Every rank passes it and keeps its part. Collective.

    Nothing changes if one of these is raised.

    Raises:
        ValueError: ``assign=True``; or ranks give different names, shapes, dtypes or values of parameters.
        RuntimeError: entries are missing, unexpected, or have the wrong shape or kind of numbers; the message lists
            them. Shapes are checked even if ``strict`` is False.
        PeerError: another rank raised such an error.
    """
    shards, state_dicts = values.shards, values.guards.state_dicts
    values.guards.check_sharded()
    missing, unexpected = list[str](), list[str]()
    with collectively(shards.mesh.mesh_group, LOADING, UNCHANGED, describe=lambda: _describe(names, state_dict)):
        if assign:
            raise ValueError(f"load_state_dict(assign={assign}): sharded storage cannot be replaced; use assign=False")
        as_mapping("state_dict", state_dict, "what state_dict() of the model returned, values by name")
        names = _loadable(values)
        # A tied parameter may be given under one of its names only.
        tied = names.of_parameter.values()
        missing += [name for name in names.buffers_and_extra if name not in state_dict]
        missing += [name for own in tied if not any(each in state_dict for each in own) for name in own]
        known = names.order.keys() | {name for own in tied for name in own}
        unexpected += [name for name in state_dict if name not in known]
        misfits = _misfits(shards, names, state_dict)
        if misfits or (strict and (missing or unexpected)):
            lists = {"missing": missing, "unexpected": unexpected, "wrong shapes or dtypes": misfits}
            problems = "; ".join(f"{what}: {names_text(names)}" for what, names in lists.items() if names)
            prefix = next(iter(unexpected), "").partition(".")[0] + "."
            wrapped = unexpected and all(name.removeprefix(prefix) in missing for name in unexpected)
            hint = f"; remove {prefix!r} from the names" if wrapped else ""
            raise RuntimeError(f"the state does not fit the model: {problems}{hint}")
        # The names of all stages are not those of this rank's modules.
        own = (names if shards.partition.table.names is None else state_dicts.names()).buffers_and_extra
        buffers = {name: state_dict[name] for name in own if name in state_dict}
        computed = check_buffers_and_extra(state_dicts, own, buffers)
    _load(values, state_dict, names, lambda: load_buffers_and_extra(state_dicts, own, buffers, computed))
    complete = not missing
    run_load_hooks(values, missing, unexpected)
    if complete:
        values.guards.broken.loaded(PARAMETERS)
    return incompatible_keys(missing, unexpected)


def compare_states(values: ParameterValues, state_dict: Mapping[str, Any]) -> None:
    """Compare the ranks' states before a module itself loads one into gathered parameters. Collective.

    Raises:
        ValueError, PeerError: see :func:`load_full`.
    """
    group = values.shards.mesh.mesh_group
    with collectively(group, LOADING, UNCHANGED, describe=lambda: _describe(_loadable(values), state_dict)):
        as_mapping("state_dict", state_dict, "what state_dict() of the model returned, values by name")


def _loadable(values: ParameterValues) -> StateNames:
    """Return the names that a state may have. A parameter that a hook of the model does not save (a frozen backbone) is
    loaded under its name in the model, as by plain torch."""
    names, facts = state_names(values.shards, values.guards.state_dicts), values.shards.partition.table.facts
    return replace(names, of_parameter={at: names.of_parameter.get(at, fact.names) for at, fact in enumerate(facts)})


def _describe(names: StateNames, state: Mapping[str, Any]) -> Description:
    """Describe the entries of a state that are loaded: of extra state only the class."""
    entries: dict[str, Mapping[str, Any]] = {}
    for name in names.buffers_and_extra:
        if name in state:
            value, entry = state[name], f"{name} in the state"
            entries[entry] = described(value) if isinstance(value, torch.Tensor) else {"class": type(value).__name__}
    params = {own[0]: state[key] for own in names.of_parameter.values() if (key := _name_in(own, state)) is not None}
    for (first, value), word in zip(params.items(), sample_words(list(params.values())), strict=True):
        entries[f"{first} in the state"] = described(value) | {"a sample of the values": word}
    return entries


def _name_in(own_names: Sequence[str], state: Mapping[str, Any]) -> str | None:
    return next((name for name in own_names if name in state), None)


def _misfits(shards: ModelShards, names: StateNames, state: Mapping[str, Any]) -> list[str]:
    """List entries with another shape than the model's, or another kind of numbers."""
    facts = shards.partition.table.facts
    shapes = {n: value.shape for n, value in names.buffers_and_extra.items() if isinstance(value, torch.Tensor)}
    dtypes: dict[str, torch.dtype] = {}
    for param, own_names in names.of_parameter.items():
        shapes |= dict.fromkeys(own_names, facts[param].full_shape)
        dtypes |= dict.fromkeys(own_names, facts[param].dtype)
    misfits = [
        f"{name}: {tuple(state[name].shape)} instead of {tuple(shape)}"
        for name, shape in shapes.items()
        if name in state and state[name].shape != shape
    ]
    return misfits + [
        f"{name}: {state[name].dtype} instead of {dtype}, two kinds of numbers"
        for name, dtype in dtypes.items()
        if name in state and not is_one_kind(state[name].dtype, dtype)
    ]


@torch.no_grad()
def _load(
    values: ParameterValues, state: Mapping[str, Any], names: StateNames, load_buffers: Callable[[], None]
) -> None:
    """Write the parameters, and call ``load_buffers`` for buffers and extra state."""
    table = values.shards.partition.table
    values.before_load(full_model=all(_name_in(own, state) for own in names.of_parameter.values()))
    values.before_update()
    with values.guards.broken.replacing("loading a state", [PARAMETERS], partly=[PARAMETERS]):
        with ParamWriter(values.shards.storage) as writer:
            for place, own_names in names.of_parameter.items():
                name = _name_in(own_names, state)
                if name is not None and place in table.index:
                    writer.store(table.index[place], state[name])
        load_buffers()
        values.publish(everything=True)


def run_load_hooks(values: ParameterValues, missing: list[str], unexpected: list[str]) -> None:
    """Call the modules' ``register_load_state_dict_post_hook`` hooks as torch does: children before parents, each with
    the lists of names, which it may change. Collective.

    The parameters of a module and of its children are gathered for its hook, and what the hook writes to them is kept.
    Ranks may have different hooks.

    Raises:
        PeerError: a hook raised on another rank. The values are the loaded ones then.
    """
    shards = values.shards
    index = {id(param): at for at, param in enumerate(shards.params)}
    own = dict(with_load_hooks(shards.model))
    failure: Exception | None = None
    posts = shards.mesh.stage_group.exchange_object(list(own), "hooks of a load")
    # Those that have a hook on any rank with the same layers, in the order of this rank's calls.
    for name, module in with_load_hooks(shards.model, {name for post in posts for name in post}):
        places = sorted({index[id(param)] for param in module.parameters() if id(param) in index})
        with values.gathered(write_back=True, places=places) if places else nullcontext():
            try:
                if failure is None and name in own:
                    call_load_hooks(module, missing, unexpected)
            except Exception as error:
                failure = error  # the other ranks need this one for their gathers
    with collectively(shards.mesh.mesh_group, "running load hooks (register_load_state_dict_post_hook)"):
        if failure is not None:
            raise failure


# ---- buffers, extra state, and tensors that modules compute for their state


def check_buffers_and_extra(
    state_dicts: StateDictGuard, own: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Check tensors that modules compute for each state (packed scales), before anything is loaded.

    Args:
        state_dicts: the state dicts of the model.
        own: the model's buffers and extra state now, by saved name.
        values: the values to load.

    Returns:
        For each computed tensor that differs, the modules that can restore it from the state.

    Raises:
        ValueError: a computed tensor differs, and no module can restore it.
    """
    modules = dict(state_dicts.model.named_modules())
    # Most models have none; their state is not computed again.
    unkept = [
        name
        for name in values
        if isinstance(own[name], torch.Tensor) and own[name].numel() and keeper(modules, name) is None
    ]
    now = state_dicts.names().buffers_and_extra if unkept else {}
    computed, differs = dict[str, list[str]](), False
    for name in unkept:
        before, again = own[name], now.get(name)
        if isinstance(again, torch.Tensor) and before.data_ptr() != again.data_ptr():
            computed[name] = takers(modules, name, state_dicts.watches)
            if not _same(before, values[name]):
                differs = True
                if not computed[name]:
                    raise _not_restored(name)
    return {name: chain for name, chain in computed.items() if chain} if differs else {}


def _same(before: torch.Tensor, value: torch.Tensor) -> bool:
    return torch.equal(before.cpu(), value.to(before.dtype).cpu())


def _not_restored(name: str) -> ValueError:
    return ValueError(
        f"{name} is recomputed whenever the model is saved. The state has other values, and no module restores them "
        "(_load_from_state_dict, or a load hook): build the model from those weights (from_pretrained) and shard that"
    )


@torch.no_grad()
def load_buffers_and_extra(
    state_dicts: StateDictGuard, own: Mapping[str, Any], values: Mapping[str, Any], computed: dict[str, list[str]]
) -> None:
    """Load tensors of the same shapes (cast), extra state, and what modules restore themselves.

    Args:
        state_dicts: the state dicts of the model.
        own: the model's buffers and extra state now, by saved name.
        values: the values to load.
        computed: the result of :func:`check_buffers_and_extra` for them.

    Raises:
        ValueError: no module has restored a computed tensor.
    """
    modules, before = dict(state_dicts.model.named_modules()), {name: own[name].clone() for name in computed}
    with state_dicts.giving():
        unchanged = {name: value for name, value in values.items() if name not in computed}
        load_entries(modules, own, unchanged, {chain[0] for chain in computed.values()})
        lost = [name for name in hand_back(modules, values, computed) if not _same(before[name], values[name])]
    if lost:
        raise _not_restored(lost[0])
