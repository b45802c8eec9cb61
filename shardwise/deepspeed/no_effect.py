"""What programs write into objects of DeepSpeed and nobody would read."""

from __future__ import annotations

__all__ = ["no_effect"]


def no_effect(owner: object, path: str, value: object, advice: str) -> AttributeError:
    """To be raised where ``value`` is set under ``path``, the name as a program writes it: what to do instead."""
    name = path.rpartition(".")[2]
    return AttributeError(f"{path} = {value!r:.80} would change nothing: {advice}", name=name, obj=owner)
