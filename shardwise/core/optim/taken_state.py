"""States that optimizers of other libraries saved, in the form of ours."""

from __future__ import annotations

from typing import Any

__all__ = ["counted"]


def counted(full: dict[str, Any]) -> dict[str, Any]:
    """A state of an optimizer that counts steps by group (apex's and ColossalAI's fused ones), with the count in the
    state of each parameter; another one itself. What is given stays as it is."""
    groups = full.get("param_groups") or ()
    if not any("step" in group for group in groups):
        return full
    state, own = dict(full["state"]), []
    for group in groups:
        for number in group["params"]:
            entry = state.get(number)
            if entry and "step" not in entry and group.get("step") is not None:
                state[number] = entry | {"step": int(group["step"])}
        own.append({key: value for key, value in group.items() if key != "step"})
    return {**full, "state": state, "param_groups": own}
