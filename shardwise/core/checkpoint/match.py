"""How the names, shapes and groups of a checkpoint fit a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from shardwise.core.base.names import is_one_kind
from shardwise.core.base.printable import printable
from shardwise.core.base.remarks import warn_user
from shardwise.core.checkpoint.format import PIECE_BYTES
from shardwise.core.checkpoint.match_optimizers import OptimizerMatch, Taken, shortened
from shardwise.core.checkpoint.read import NativeSource
from shardwise.core.checkpoint.run import Holding
from shardwise.core.checkpoint.source import CheckpointSource
from shardwise.core.engine.fragments import Stored
from shardwise.core.parallel.tensor import Part
from shardwise.core.parallel.tensor.order import read_part, whole_runs

__all__ = ["Match", "Wanted"]

Wanted = Literal["all", "model", "optimizer"]


class Match:
    """How a checkpoint's names fit a run's.

    Args:
        source: the checkpoint.
        held: the run's names.
        strict: whether missing and unexpected names are errors.
        wanted: compare (and then load) everything, or only the model, or only the optimizers.

    Raises:
        ValueError: names or shapes do not fit; all of them are listed.
    """

    def __init__(self, source: CheckpointSource, held: Holding, strict: bool, wanted: Wanted = "all") -> None:
        self.source, self.held, self.state = source, held, source.state()
        self.wanted = wanted
        self.facts = source.tensors()
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._wrong: list[str] = []
        self._aliases: dict[str, str] = self.state.get("aliases", {})
        shapes = held.model_shapes()
        self._shapes = {name: shape.shape for name, shape in shapes.items()}
        self._dtypes = {names[0]: shapes[names[0]].dtype for names in held.names}
        self._known = self._names_in_source()
        self.stored_name: dict[str, str | None] = {names[0]: self._stored(names) for names in held.names}
        """By the name of a parameter here, that in the checkpoint."""
        self.taken: dict[int, Taken] = {}
        """By index, what optimizers take over; the state of the others stays as it is."""
        self.notes: list[str] = []
        """What optimizers do not take over, or start anew with; and that no name fits."""
        others: list[str] = []
        if wanted != "optimizer":
            self._match_model()
        # Otherwise a model's weights: the optimizers stay. What is renamed or has other rows still has its format.
        saved = bool(self.state.get("optimizers")) or getattr(source, "format", "native") == "native"
        if wanted != "model" and held.optimizers and saved:
            found = OptimizerMatch(source, held, self.stored_name, strict, self._fitting)
            self.taken, others = found.taken, found.others
            self.notes += found.notes
            self.missing += found.missing
            self.unexpected += found.unexpected
        self._state_of = {name: entry for taken in self.taken.values() for name, entry in taken.state.items()}
        if self._wrong or (strict and (self.missing or self.unexpected or others)):
            self._refuse(others if strict else [], strict)

    def _refuse(self, others: list[str], strict: bool) -> None:
        ours = "optimizer" if self.wanted == "optimizer" else "model"
        lists = [("missing from the checkpoint", self.missing), (f"not in the {ours}", self.unexpected)]
        lines = [f"{what}: {', '.join(names)}" for what, names in lists if names and strict]
        listed = "\n  ".join([*lines, *others, *self._wrong])
        advice = "" if self._wrong else "\npass strict=False to load what fits"
        raise ValueError(printable(f"the checkpoint does not fit, nothing was loaded:\n  {listed}{advice}"))

    @property
    def optimizers(self) -> list[int]:
        """Indices of the optimizers whose state is replaced."""
        return sorted(self.taken)

    @property
    def gives_parameters(self) -> bool:
        """Whether a load replaces any."""
        return any(self.tensor_of(name) is not None for name in self.stored_name)

    @property
    def staying_parameters(self) -> list[str]:
        """Those that a load leaves as they are, as a whole or in part."""
        kept = (None, *getattr(self.source, "kept", ()))
        return [name for name in self.stored_name if self.tensor_of(name) in kept]

    @property
    def staying(self) -> list[str]:
        """These and optimizers."""
        optimizers = [f"optimizer {each.index}" for each in self.held.optimizers if each.index not in self.taken]
        return self.staying_parameters + optimizers

    def tell(self, where: str) -> None:
        """Warn of what was left out of the optimizers' state, of what starts anew, and of weights that fit nowhere."""
        if self.notes:
            listed = "\n  ".join(self.notes)
            warn_user(printable(f"{where} was loaded as far as it fits:\n  {listed}"))

    def _names_in_source(self) -> set[str]:
        """Of parameters: of the model, or of the optimizers where only those are wanted."""
        if self.wanted != "optimizer":
            return {name.removeprefix("model/") for name in self.facts if name.startswith("model/")}
        listed = {n for saved in self.state.get("optimizers", []) for g in saved["groups"] for n in g["params"]}
        return listed | {name.split("/", 2)[2].rpartition("/")[0] for name in self.facts if _is_state(name)}

    def _stored(self, names: Sequence[str]) -> str | None:
        known = (self._aliases.get(name, name) for name in names)
        return next((name for name in known if name in self._known), None)

    def _match_model(self) -> None:
        expected = set()
        for names in self.held.names:
            stored = self.stored_name[names[0]]
            shape = tuple(self._shapes[names[0]])
            if stored is None:
                self.missing.append(names[0])
            else:
                # Formats of others hold a tied parameter once, or under each of its names.
                for name in {stored, *(n for n in names if f"model/{n}" in self.facts)}:
                    expected.add(name)
                    self._check(f"model/{name}", shape)
                    self._check_kind(f"model/{name}", self._dtypes[names[0]])
        if self.held.names and not any(self.stored_name.values()):
            ours, theirs = (shortened(names) for names in ([*self.stored_name], sorted(self._known)))
            self.notes.append(f"no parameter of the model, {ours}, is in it, so all stay; it has {theirs or 'none'}")
        params, own = {names[0] for names in self.held.names}, set(self.held.extra_names())
        for name, shape in self._shapes.items():
            if name in params:
                continue
            if f"model/{name}" in self.facts:
                expected.add(name)
                self._check(f"model/{name}", tuple(shape))
            else:
                self.missing.append(name)
        extra = self.state.get("extra", {})
        self.missing += [name for name in self.held.extra_names() if name not in extra]
        self.unexpected += [name for name in extra if name not in own]
        there = (name.removeprefix("model/") for name in self.facts if name.startswith("model/"))
        self.unexpected += [name for name in there if name not in expected]

    def _check(self, name: str, shape: tuple[int, ...], owner: str = "model") -> None:
        if self.facts[name].shape != shape:
            advice = self._rows_advice(name, shape)
            self._wrong.append(f"{name}: {self.facts[name].shape} in the checkpoint, {shape} in the {owner}{advice}")

    def _check_kind(self, name: str, dtype: torch.dtype) -> None:
        there = self.facts[name].dtype
        if not is_one_kind(there, dtype):
            self._wrong.append(f"{name}: {there} in the checkpoint, {dtype} in the model: two kinds of numbers")

    def _rows_advice(self, name: str, shape: tuple[int, ...]) -> str:
        there = self.facts[name].shape
        known = name.startswith("model/") and name.removeprefix("model/") in self.stored_name.values()  # no buffer
        rows = known and bool(shape) and len(there) == len(shape) and there[1:] == shape[1:]
        given = f"rows={{{name.removeprefix('model/')!r}: 'keep'}}"
        return f" ({given} takes the rows that both have)" if rows else ""

    def _fitting(
        self, value: Stored, name: str, shape: tuple[int, ...], known: Callable[[tuple[int, ...]], bool]
    ) -> Any:
        """State that is element-wise; or, where whole parameters are trained, state of another shape (rows and columns
        of a factored one), which is read: of a parameter that is known to have had the same shape, or, where a file
        does not say (torch's own), of the shape that ``known`` says."""
        fact = self.facts[value.name]
        if fact.shape != shape and getattr(self.held, "other_shapes", False):
            then = self._shape_then(name)
            if then == shape or (then is None and known(fact.shape)):
                return self.source.read(value.name, 0, fact.numel).reshape(fact.shape)
        self._check(value.name, shape, "optimizer")
        return value

    def _shape_then(self, name: str) -> tuple[int, ...] | None:
        for saved in self.state.get("optimizers", []):
            for group in saved["groups"]:
                if name in group["params"] and "shapes" in group:
                    return tuple(group["shapes"][group["params"].index(name)])
        fact = self.facts.get(f"model/{name}")
        return None if fact is None else fact.shape

    def state_of(self, name: str) -> dict[str, Any] | None:
        """Optimizer state of a parameter here; ``None``: it starts anew, or was never stepped."""
        return self._state_of.get(name)

    def tensor_of(self, name: str) -> str | None:
        """The tensor that holds a parameter here; ``None`` leaves it as it is."""
        stored = self.stored_name[name]
        return None if stored is None or self.wanted == "optimizer" else f"model/{stored}"

    def fill(self, name: str, start: int, out: torch.Tensor, part: Part | None = None) -> None:
        """See :class:`shardwise.core.engine.fragments.Fill`."""
        dtype = self.facts[name].dtype
        kept: Mapping[str, int] = getattr(self.source, "kept", {})
        if name in kept and part is not None:
            for run in whole_runs(part, start, start + out.numel()):
                self.fill(name, run.stored, out[run.local - start : run.local - start + run.numel])
            return
        if name in kept:  # further elements stay as they are
            out = out[: max(0, kept[name] - start)]
        straight = out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous()
        if straight and isinstance(self.source, NativeSource):
            self._read(name, start, out, part)
            return
        row = 1 if part is None else part.shape[part.cut.dim :].numel()
        step, at = PIECE_BYTES // dtype.itemsize, 0
        step = step // row * row or step  # whole rows are read together
        while at < out.numel():
            stop = min(at + step - (start + at) % step, out.numel())
            block = torch.empty(stop - at, dtype=dtype, device="cpu")
            self._read(name, start + at, block, part)
            out[at:stop].copy_(block)
            at = stop

    def _read(self, name: str, start: int, out: torch.Tensor, part: Part | None) -> None:
        """Into ``out`` on the host, of the stored dtype."""
        source = self.source
        if isinstance(source, NativeSource):
            source.read_into(name, start, out) if part is None else source.read_part(name, part, start, out)
            return

        def read(start: int, out: torch.Tensor) -> None:
            out.copy_(source.read(name, start, out.numel()))

        read(start, out) if part is None else read_part(read, None, part, start, out)


def _is_state(name: str) -> bool:
    return name.startswith("optimizer/")
