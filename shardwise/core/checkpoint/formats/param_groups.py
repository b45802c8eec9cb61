"""Parameter groups of an optimizer as JSON: names in place of parameters, and the options, exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.core.checkpoint import tree

__all__ = ["group_options", "group_record"]


def group_record(names: Sequence[str], group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group as JSON: the parameters' names and everything else in ``group``."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {"params": list(names), "options": tree.encode(options, None)}


def group_options(record: Mapping[str, Any]) -> dict[str, Any]:
    """The options of such a group, as an optimizer has them."""
    return dict(tree.decode(record.get("options", {}), None))
