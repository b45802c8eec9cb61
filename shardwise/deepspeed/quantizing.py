"""``optimizer.quantize_nontrainable_params()``, which programs call when they have made adapters of a model."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.deepspeed.engine import DeepSpeedEngine

__all__ = ["show_quantizing"]

KEY = "zero_optimization.zero_quantized_nontrainable_weights"


def show_quantizing(engine: DeepSpeedEngine) -> None:
    """Put it where DeepSpeed's optimizer of stage 3 has it."""
    own = weakref.ref(engine)

    def quantize_nontrainable_params() -> None:
        """Nothing is left to do: what is frozen travels in 8 bits since ``initialize``, where the configuration says
        so; without it a warning says that nothing is done.

        Raises:
            RuntimeError: parameters were frozen since then.
        """
        found = own()
        if found is None:
            return
        if not found.settings[KEY]:
            warnings.warn(f"quantize_nontrainable_params() without {KEY}: nothing is done", stacklevel=2)
            return
        late = found.session.frozen_since()
        if late:
            raise RuntimeError(
                f"quantize_nontrainable_params(): {len(late)} parameters (as {late[0]!r}) were frozen behind "
                "initialize, and travel as trained ones do: freeze them before it"
            )

    if engine.optimizer is not None and engine.settings.stage == 3:
        engine.optimizer.__dict__["quantize_nontrainable_params"] = quantize_nontrainable_params
