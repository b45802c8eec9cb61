"""Checkpoints of ``DeepSpeedStrategy``: those that DeepSpeed wrote, and those without frozen parameters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from shardwise.core.checkpoint.formats.detect import detect_format
from shardwise.core.checkpoint.session import Checkpointer
from shardwise.deepspeed.saving import WithoutFrozen, take_over
from shardwise.session import Session
from shardwise.strategies.saving import ModelOnly, Saving, outline
from shardwise.strategies.scheduler_states import check_schedulers

__all__ = ["SavingWithoutFrozen", "is_of_deepspeed", "load_deepspeed"]


class SavingWithoutFrozen(Saving):
    """Leaves parameters that do not require gradients out of what is saved."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self._writers: dict[tuple[int, bool], Checkpointer] = {}

    def _writer(self, session: Session, whole: bool) -> Checkpointer:
        key = (id(session), whole)
        if key not in self._writers:
            self.wait_for_saves()
            self._writers = {key: Checkpointer(WithoutFrozen(session if whole else ModelOnly(session)))}
        self._writers[key].steps = session.checkpoints.steps
        return self._writers[key]

    def wait_for_saves(self) -> None:
        """Until nothing is being written any more."""
        for writer in self._writers.values():
            writer.wait_for_saves()


def is_of_deepspeed(path: str) -> bool:
    """Whether DeepSpeed itself wrote the directory."""
    try:
        return Path(path).is_dir() and detect_format(path) == "deepspeed"
    except OSError:
        return False


def load_deepspeed(strategy: Any, path: str) -> dict[str, Any]:
    """What DeepSpeed wrote under Lightning: values into the strategy's session; its client state is Lightning's."""
    module = strategy.lightning_module
    fitting = module.trainer.state.fn.value == "fit"
    strict, configs = module.strict_loading, strategy.lr_scheduler_configs
    check = partial(check_schedulers, configs, strict=strict) if fitting else None
    found = take_over(strategy.session, path, strict, fitting, [], check)
    state = {"lr_schedulers": [], "epoch": 0, "global_step": 0, **found.client_state}
    state.setdefault("pytorch-lightning_version", strategy.ns.version)
    state["state_dict"] = outline(strategy.session)
    return state
