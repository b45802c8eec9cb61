"""Errors of blocks of a configuration that programs make themselves, as DeepSpeed raises them."""

from __future__ import annotations

__all__ = ["validation_error"]


def validation_error(block: str, error: ValueError) -> ValueError:
    """``error`` as pydantic's ``ValidationError``, a ``ValueError`` that programs catch; itself without pydantic."""
    try:
        from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError
    except ImportError:
        return error
    told = PydanticCustomError("value_error", "{text}", {"text": str(error)})
    return ValidationError.from_exception_data(block, [InitErrorDetails(type=told, input=None)])
