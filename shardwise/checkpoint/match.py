"""How the names, shapes and groups of a checkpoint fit a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.checkpoint import tree
from shardwise.checkpoint.format import PIECE_BYTES
from shardwise.checkpoint.read import NativeSource
from shardwise.checkpoint.source import CheckpointSource
from shardwise.engine.fragments import Held, Stored

__all__ = ["Match"]


class Match:
    """How a checkpoint's names fit a session's.

    Args:
        source: the checkpoint.
        held: the session's names.
        strict: whether missing and unexpected names are errors.

    Raises:
        ValueError: names or shapes do not fit; all of them are listed.
    """

    def __init__(self, source: CheckpointSource, held: Held, strict: bool) -> None:
        self.source, self.held, self.state = source, held, source.state()
        self.facts = source.tensors()
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._wrong: list[str] = []
        self._aliases: dict[str, str] = self.state.get("aliases", {})
        self.stored_name: dict[str, str | None] = {names[0]: self._stored(names) for names in held.names}
        """By the name of a parameter here, that in the checkpoint."""
        self._match_model()
        self._entries = self._match_optimizers()
        self.optimizers = self._match_groups()
        if self._wrong or (strict and (self.missing or self.unexpected)):
            lists = [("missing from the checkpoint", self.missing), ("not in the model", self.unexpected)]
            lines = [f"{what}: {', '.join(names)}" for what, names in lists if names and strict]
            listed = "\n  ".join([*lines, *self._wrong])
            advice = "" if self._wrong else "\npass strict=False to load what fits"
            raise ValueError(f"the checkpoint does not fit, nothing was loaded:\n  {listed}{advice}")

    def _stored(self, names: Sequence[str]) -> str | None:
        known = (self._aliases.get(name, name) for name in names)
        return next((name for name in known if f"model/{name}" in self.facts), None)

    def _match_model(self) -> None:
        expected = set()
        for index, names in enumerate(self.held.names):
            stored = self.stored_name[names[0]]
            shape = tuple(self.held.engine.layout.facts[index].shape)
            if stored is None:
                self.missing.append(names[0])
            else:
                # Formats of others hold a tied parameter once, or under each of its names.
                for name in {stored, *(n for n in names if f"model/{n}" in self.facts)}:
                    expected.add(name)
                    self._check(f"model/{name}", shape)
        for name, value in self.held.buffers().items():
            if f"model/{name}" in self.facts:
                expected.add(name)
                self._check(f"model/{name}", tuple(value.shape))
            else:
                self.missing.append(name)
        extra = self.state.get("extra", {})
        self.missing += [name for name in self.held.extra() if name not in extra]
        self.unexpected += [name for name in extra if name not in self.held.extra()]
        there = (name.removeprefix("model/") for name in self.facts if name.startswith("model/"))
        self.unexpected += [name for name in there if name not in expected]

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if self.facts[name].shape != shape:
            self._wrong.append(f"{name}: {self.facts[name].shape} in the checkpoint, {shape} in the model")

    def _match_optimizers(self) -> dict[str, dict[str, Any]]:
        """Optimizer state by the parameter's name in the checkpoint."""
        entries: dict[str, dict[str, Any]] = {}
        for saved in self.state.get("optimizers", []):
            for name, small in saved["small"].items():
                entries.setdefault(name, {}).update({key: _decode_number(value) for key, value in small.items()})
        for full in self.facts:
            if full.startswith("optimizer/"):
                name, _, key = full.split("/", 2)[2].rpartition("/")
                entries.setdefault(name, {})[key] = Stored(full, self.facts[full].dtype)
        if self.held.optimizers:
            own = {}
            for each in self.held.optimizers:
                for name in (name for names in self.held.group_names(each) for name in names):
                    own[self.stored_name[name]] = self.held.engine.layout.facts[self._index(name)].shape
            self.unexpected += [f"optimizer state of {name}" for name in entries if name not in own]
            for name, entry in entries.items():
                for value in entry.values():
                    if isinstance(value, Stored) and name in own:
                        self._check(value.name, tuple(own[name]))
        order = list(dict.fromkeys(key for saved in self.state.get("optimizers", []) for key in saved["keys"]))
        place = {key: index for index, key in enumerate(order)}
        return {n: dict(sorted(e.items(), key=lambda item: place.get(item[0], len(place)))) for n, e in entries.items()}

    def _index(self, name: str) -> int:
        return next(index for index, names in enumerate(self.held.names) if names[0] == name)

    def _match_groups(self) -> list[int]:
        """Indices of the optimizers that the checkpoint has, with the same groups."""
        fitting = []
        saved = self.state.get("optimizers", [])
        if not saved and not isinstance(self.source, NativeSource):
            return []  # a model's weights; the optimizers stay as they are
        for each in self.held.optimizers:
            if each.index >= len(saved):
                self.missing.append(f"optimizer {each.index} ({type(each.optimizer).__name__})")
                continue
            ours = [{self.stored_name[name] for name in names} for names in self.held.group_names(each)]
            theirs = [set(group["params"]) for group in saved[each.index]["groups"]]
            if ours == theirs:
                fitting.append(each.index)
            else:
                self.missing.append(
                    f"optimizer {each.index} with groups of {[len(group) for group in ours]} such parameters (the "
                    f"checkpoint's have {[len(group) for group in theirs]})"
                )
        if self.held.optimizers and len(saved) > len(self.held.optimizers):
            self.unexpected += [
                f"optimizer {i} ({saved[i]['class']})" for i in range(len(self.held.optimizers), len(saved))
            ]
        return fitting

    def state_of(self, name: str) -> dict[str, Any] | None:
        """Optimizer state of a parameter here; ``None``: it was never stepped."""
        stored = self.stored_name[name]
        return None if stored is None else self._entries.get(stored)

    def tensor_of(self, name: str) -> str | None:
        """The tensor that holds a parameter here."""
        stored = self.stored_name[name]
        return None if stored is None else f"model/{stored}"

    def fill(self, name: str, start: int, out: torch.Tensor) -> None:
        """See :data:`shardwise.engine.fragments.Fill`."""
        dtype = self.facts[name].dtype
        straight = out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous()
        if straight and isinstance(self.source, NativeSource):
            self.source.read_into(name, start, out)
            return
        step, at = PIECE_BYTES // dtype.itemsize, 0
        while at < out.numel():
            stop = min(at + step - (start + at) % step, out.numel())
            out[at:stop].copy_(self.source.read(name, start + at, stop - at))
            at = stop


def _decode_number(value: Any) -> Any:
    if isinstance(value, dict) and "dtype" in value and "value" in value:
        plain = tree.decode(value["value"], {})
        return torch.tensor(plain, dtype=getattr(torch, value["dtype"])).reshape(value.get("shape", ()))
    return tree.decode(value, {})
