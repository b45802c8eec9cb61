"""Names of DeepSpeed's ``ds_to_universal``: universal checkpoints are read here, and none is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

__all__ = ["enable_universal_checkpoint", "main", "parse_arguments"]


def parse_arguments(*_: Any, **__: Any) -> NoReturn:
    """Raises NotImplementedError, which says what to do."""
    _refuse("parse_arguments")


def main(*_: Any, **__: Any) -> NoReturn:
    """Raises NotImplementedError, which says what to do."""
    _refuse("main")


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"ds_to_universal.{name}: universal checkpoints are not written here. Every checkpoint is loaded at any stage "
        "and number of ranks without a conversion; for a run under DeepSpeed itself zero_to_fp32 writes the model"
    )


def enable_universal_checkpoint(param_list: Iterable[Any]) -> None:
    """Nothing: engines load whatever checkpoint there is, into parameters as they are."""


if __name__ == "__main__":
    main()
