"""Call a program's hooks for accelerate's ``save_state`` and ``load_state`` with sharded models."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from shardwise.core.checkpoint import EngineRun
from shardwise.core.checkpoint.save import agree
from shardwise.session import Session

SAVING, LOADING = "_save_model_state_pre_hook", "_load_model_state_pre_hook"


# [Note: Hooks of a state]
# accelerate passes its models, their states and the directory to a hook. The hook removes from the lists what it has
# saved or loaded itself. Programs for diffusers do so: ``model.save_pretrained(...)``, ``weights.pop()``. They read the
# model on one rank or on all, so models are gathered during the hooks, and hooks get the user's modules. Our checkpoint
# is always written, because it has the optimizers' state. It is loaded before the hooks: if a hook loads the same
# values in the compute dtype, masters are unchanged (see take_over); other values replace them. Each rank keeps its
# own part of loaded values, so all ranks have to load. A single rank may save; the others take part in its gathers.
@contextmanager
def saving_hooks(accelerator: Any, sessions: Sequence[Session]) -> Iterator[None]:
    """Make accelerate's ``save_state`` inside call the hooks with the models of ``sessions``, too.

    accelerate does not see these models, so it saves only the others.
    """
    models = list(accelerator._models)

    def call(hooks: Sequence[Callable[..., None]], plain_models: list[Any], weights: list[Any], directory: str) -> None:
        if not any(_counts(sessions, hooks)):
            return
        of = {id(session.module): accelerator.get_state_dict(session.module) for session in sessions}
        outlines = {id(state): _outline(state) for state in of.values()}
        of |= {id(model): state for model, state in zip(plain_models, weights, strict=True)}
        states = [of[id(model)] for model in models]

        def run() -> None:
            seen = [_own(sessions, model) for model in models]
            for hook in hooks:
                hook(seen, states, directory)
            for state in states:
                _check(state, outlines, weights)

        _agreed(sessions, "save_state", run, write_back=False)
        _leave(weights, states)

    with _in_place_of(accelerator, SAVING, call):
        yield


@contextmanager
def loading_hooks(accelerator: Any, sessions: Sequence[Session], load: Callable[[str], None]) -> Iterator[None]:
    """Make accelerate's ``load_state`` inside call ``load(directory)``, then the hooks, as in :func:`saving_hooks`.

    Raises:
        ValueError: the ranks have different numbers of hooks (raised by ``load_state`` on every rank). Nothing was
            loaded.
    """
    models = list(accelerator._models)

    def call(hooks: Sequence[Callable[..., None]], plain_models: list[Any], directory: str) -> None:
        counts = _counts(sessions, hooks)
        if len(set(counts)) > 1:
            raise ValueError(
                f"load_state with {counts} hooks on ranks 0 to {len(counts) - 1}: a hook changes only the "
                "shards of its own rank; call register_load_state_pre_hook on every rank"
            )
        load(directory)
        if not hooks:
            return
        seen = [_own(sessions, model) for model in models]

        def run() -> None:
            for hook in hooks:
                hook(seen, directory)

        _agreed(sessions, "load_state", run, write_back=True)
        _leave(plain_models, seen)

    with _in_place_of(accelerator, LOADING, call):
        yield


@contextmanager
def _in_place_of(accelerator: Any, name: str, call: Callable[..., None]) -> Iterator[None]:
    """Make ``call`` the only hook inside; the other hooks are its first argument."""
    before = getattr(accelerator, name)
    setattr(accelerator, name, OrderedDict({0: partial(call, list(before.values()))}))
    try:
        yield
    finally:
        setattr(accelerator, name, before)


def _counts(sessions: Sequence[Session], hooks: Sequence[Any]) -> list[int]:
    """Return the number of hooks of each rank. Collective if a model is sharded."""
    return EngineRun(sessions[0]).gather(len(hooks)) if sessions else [len(hooks)]


def _own(sessions: Sequence[Session], model: Any) -> Any:
    """Return the user's module of a sharded model; other models are returned unchanged."""
    return next((session.model for session in sessions if session.module is model), model)


def _agreed(sessions: Sequence[Session], call: str, run: Callable[[], None], write_back: bool) -> None:
    """Run ``run`` with the models gathered; an error on one rank is raised on all."""
    if not sessions:
        run()
        return
    job = EngineRun(sessions[0])
    with ExitStack() as blocks:
        for session in sessions:
            blocks.enter_context(session.module.gathered(write_back))
        agree(job.gather, f"run the hooks of {call}", run, share=False)


def _leave(states: list[Any], weights: Sequence[Any]) -> None:
    """Remove from ``states``, the checkpoint's list, the items that hooks removed from accelerate's ``weights``."""
    left = {id(each) for each in weights}
    states[:] = [each for each in states if id(each) in left]


def _outline(state: Mapping[str, Any]) -> dict[str, int]:
    return {name: id(value) for name, value in state.items()}


def _check(state: Any, outlines: Mapping[int, Mapping[str, int]], plain_weights: Sequence[Any]) -> None:
    """Check that hooks did not change a sharded model's state, because the changes would not be saved."""
    before = outlines.get(id(state))
    if before is None and any(state is each for each in plain_weights):
        return
    if before is None or before != _outline(state):
        raise ValueError(
            f"a hook of save_state changed weights of a sharded model (one state has {len(state)} entries now), but "
            "the checkpoint saves the model's own weights. Write the weights to a file in the hook, and remove them "
            "from the list (weights.pop())"
        )
