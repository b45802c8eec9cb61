"""``register_load_state_dict_post_hook`` of the user's modules: what they make anew of what was loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from torch import nn

from shardwise.core.base.names import call_load_hooks, with_load_hooks
from shardwise.core.comm import collectively

if TYPE_CHECKING:
    from shardwise.core.engine.engine import Engine

__all__ = ["check_load_hooks", "run_load_hooks"]


def check_load_hooks(model: nn.Module, divided: Callable[[Sequence[nn.Parameter]], bool], why: str) -> None:
    """Before ``model`` is divided: a hook would see a part of what it computes from.

    Args:
        model: whole.
        divided: whether one rank has less than these parameters.
        why: that is so, for the message.

    Raises:
        ValueError: it is so of a module with such a hook, with what is below it.
    """
    for name, module in with_load_hooks(model):
        if divided(list(module.parameters())):
            raise ValueError(
                f"{name or 'the model itself'} ({type(module).__name__}) has a hook for loads "
                f"(register_load_state_dict_post_hook), which would see a part of its parameters: {why}. Register it "
                "on a module that stays whole"
            )


def run_load_hooks(engine: Engine, missing: list[str], unexpected: list[str]) -> None:
    """Once what was loaded is there, as torch does: children before parents, each with the lists of names, which it may
    change. Collective.

    A module with parameters, itself or below, has them gathered meanwhile, and what its hook writes to them is kept.
    Hooks of some ranks alone are called there.

    Raises:
        PeerError: a hook raised on another rank. The values are the loaded ones then.
    """
    index = {id(param): at for at, param in enumerate(engine.params)}
    own = dict(with_load_hooks(engine.model))
    failure: Exception | None = None
    for name, module in _on_any(engine, own):
        places = sorted({index[id(param)] for param in module.parameters() if id(param) in index})
        with engine.values.gathered(write_back=True, places=places) if places else nullcontext():
            try:
                if failure is None and name in own:
                    call_load_hooks(module, missing, unexpected)
            except Exception as error:
                failure = error  # the other ranks need this one for what they gather
    with collectively(engine.mesh.everyone, "running load hooks (register_load_state_dict_post_hook)"):
        if failure is not None:
            raise failure


def _on_any(engine: Engine, own: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that have a hook on any rank with the same layers, in the order of this rank's calls."""
    posts = engine.mesh.stage.exchange_object(list(own), "hooks of a load")
    everywhere = {name for post in posts for name in post}
    return with_load_hooks(engine.model, everywhere)
