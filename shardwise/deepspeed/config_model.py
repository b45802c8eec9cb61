"""``DeepSpeedConfigModel``: a base for blocks of configuration that programs define themselves. It needs pydantic."""

from __future__ import annotations

import functools
from typing import Any

from shardwise.remarks import warn_user

try:
    from pydantic import BaseModel, ConfigDict
except ImportError as missing:
    raise ImportError(
        "runtime.config_utils.DeepSpeedConfigModel derives from pydantic's BaseModel, and pydantic is not installed: "
        "install it, or write the block as a dataclass"
    ) from missing

__all__ = ["DeepSpeedConfigModel"]


class DeepSpeedConfigModel(BaseModel):
    """Fields as in pydantic. Keys that no field has are an error, and values are checked when they are assigned, too.

    A field whose ``json_schema_extra`` has ``deprecated`` may name the one that takes its place, ``new_param`` (with
    dots for one of a block inside), with ``new_param_fn`` for what becomes of its value. ``deprecated_msg`` is said in
    the one warning, and ``set_new_param=False`` leaves the other field alone.

    Args:
        strict: also hand on values that are ``"auto"``; without it these are left out.
        data: values by field.

    Raises:
        pydantic.ValidationError: a value that does not fit (it is a ``ValueError``).
        AssertionError: both a field and the one that takes its place are given.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        kept = data if strict else {name: value for name, value in data.items() if value != "auto"}
        super().__init__(**kept)
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("deprecated") and name in self.model_fields_set:
                self._replace(name, extra)

    def _replace(self, old: str, extra: dict[str, Any]) -> None:
        """Give the value of an older field to the one that takes its place."""
        new = str(extra.get("new_param", ""))
        advice = f": give {new}" if new else ""
        warn_user(f"{type(self).__name__}.{old} is deprecated{advice}. {extra.get('deprecated_msg', '')}")
        if not new or not extra.get("set_new_param", True):
            return
        value = extra.get("new_param_fn", lambda each: each)(getattr(self, old))
        *blocks, last = new.split(".")
        holder = functools.reduce(getattr, blocks, self)
        if last in holder.model_fields_set:
            raise AssertionError(f"{old}={value!r} and {new}={getattr(holder, last)!r} mean the same; give one of them")
        delattr(self, old)
        setattr(holder, last, value)
