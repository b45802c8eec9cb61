"""``Booster.checkpoint_io``: the Booster's methods that save and load, as an object of their own."""

from __future__ import annotations

from typing import Any

__all__ = ["CheckpointIO"]

METHODS = ("model", "optimizer", "lr_scheduler", "checkpoint")
NAMES = frozenset({*(f"{verb}_{what}" for verb in ("save", "load") for what in METHODS), "save_lora_as_pretrained"})


class CheckpointIO:
    """``save_model``, ``load_model`` and so on, as :class:`~shardwise.booster.Booster` has them; under any plugin.

    Args:
        booster: whose they are.
    """

    def __init__(self, booster: Any) -> None:
        self._booster = booster

    def __getattr__(self, name: str) -> Any:
        if name not in NAMES:
            raise AttributeError(f"{type(self).__name__} has no {name!r}, but {', '.join(sorted(NAMES))}")
        return getattr(self._booster, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *NAMES})

    def synchronize(self) -> None:
        """Return when nothing is being written any more; see ``Booster.wait``."""
        self._booster.wait()

    # ColossalAI's own names of the two halves of a wait, which its examples and tests call; here a save is one thing.
    _sync_d2h = synchronize
    _sync_io = synchronize
