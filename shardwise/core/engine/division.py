"""Which parameters of a model, and which parts of them, are this rank's, where ranks hold one model together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from shardwise.core.base.names import StateNames
from shardwise.core.deferred.construction import is_deferred
from shardwise.core.engine.facts import all_names, parameter_facts
from shardwise.core.engine.load_hooks import check_load_hooks
from shardwise.core.mesh import Mesh
from shardwise.core.parallel.pipeline import SharedGradients, Staging, stage_model
from shardwise.core.parallel.sequence import Sequences, share_sequences
from shardwise.core.parallel.tensor import Axis, RngAlignment, TPPlan, cut_model
from shardwise.core.shards.layout import ParamFact
from shardwise.plan import Plan

__all__ = ["Census", "Division"]


@dataclass(frozen=True)
class Census:
    """The whole model's parameters, of which a rank may have some: what files, states and numbers of parameters go by.

    Attributes:
        facts: of all of them, in the model's order; the same on every rank but for the parts.
        place: of each of this rank's, by index, its place among all.
        index: the other way round.
        groups: by optimizer and param group, the places of its parameters.
        names: under which the whole model saves what, by place; ``None``: this rank's model is the whole one.
    """

    facts: tuple[ParamFact, ...]
    place: tuple[int, ...]
    groups: tuple[tuple[tuple[int, ...], ...], ...]
    names: StateNames | None

    @cached_property
    def index(self) -> dict[int, int]:
        return {place: index for index, place in enumerate(self.place)}


class Division:
    """Of one model over the tensor-, pipeline- and sequence-parallel ranks of a mesh; all of it where there are none.
    Nothing is changed before :meth:`install`.

    Args:
        model: whole.
        optimizers: with its parameters.
        plan: how layers are cut and stages made.
        mesh: the ranks.

    Attributes:
        cutting: of layers; ``None`` where none are cut.
        draws: that ranks which hold parts of the same layers draw alike; ``None`` where there are none.
        staging: of the model; ``None`` where it is in one piece.
        sequences: that ranks share; ``None`` where each has its own.
        every: all parameters of the model, and what is known of each, until it is installed.
        census: what is known of them for ever.
        params, facts: those of this rank.
        shared: gradients of what other stages use, too, once installed.

    Raises:
        ValueError: the model cannot be divided so; an optimizer holds something else than its parameters.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], plan: Plan, mesh: Mesh) -> None:
        every = list(model.parameters())
        self.cutting: TPPlan | None = None
        self.staging: Staging | None = None
        self.sequences: Sequences | None = None
        self.shared: SharedGradients | None = None
        self.draws: RngAlignment | None = None
        self._wire = mesh.wire
        compress = plan.comm.compress is not None
        if mesh.tensor.size > 1:
            axis = Axis(mesh.tensor, compress)
            self.cutting = cut_model(model, axis, plan.tensor)
            self.draws = RngAlignment(model, axis, mesh.device)
        facts = parameter_facts(every, all_names(model), optimizers, plan, self.cutting)
        wide = [fact.names[0] for fact in facts if plan.comm.compressed and fact.dtype is torch.float64]
        if wide:
            raise ValueError(
                f"{plan.comm.compressed} (fp8_communication) with {len(wide)} parameters of torch.float64 (as "
                f"{wide[0]!r}): train them in fp32, bf16 or fp16, or leave it off"
            )
        packed = [fact.names[0] for fact in facts if fact.part is not None and not fact.dtype.is_floating_point]
        if packed:
            raise ValueError(
                f"{mesh.tensor.size} tensor-parallel ranks with {len(packed)} packed weights in layers that are cut "
                f"(as {packed[0]!r}): their numbers cannot be divided by rows or columns; give tp=1"
            )
        self.every = list(zip(every, facts, strict=True))
        if mesh.pipeline.size > 1:
            pipe, rank, size = plan.pipeline, mesh.pipeline.rank, mesh.pipeline.size
            v_shaped = pipe.schedule == "zbv"
            self.staging = stage_model(model, rank, size, pipe.chunks, pipe.layers, pipe.body, v_shaped)
            if plan.grad.average != "sum":
                raise ValueError(
                    f"average={plan.grad.average!r} with {size} pipeline ranks: give 'sum'; a step's micro-batches are "
                    "weighed by their rows"
                )
            if plan.precision.output_dtype is not None:
                raise NotImplementedError(
                    f"output_dtype={plan.precision.output_dtype} with {size} pipeline ranks is not available: leave it "
                    "None, and cast in the criterion"
                )
        self._check_hooks(model, plan, mesh)
        if mesh.ring is not None:
            self.sequences = share_sequences(model, plan.sequence, mesh.sequence, mesh.ring, mesh.tensor.size, compress)
        own = [(p, f) for p, f in self.every if self.owns(p)]
        self.params: list[nn.Parameter] = [param for param, _ in own]
        self.facts: list[ParamFact] = [self._counted(param, fact) for param, fact in own]
        place = {id(param): at for at, param in enumerate(every)}
        groups = [[[place[id(p)] for p in g["params"] if id(p) in place] for g in o.param_groups] for o in optimizers]
        self.census = Census(
            tuple(facts),
            tuple(place[id(param)] for param in self.params),
            tuple(tuple(map(tuple, each)) for each in groups),
            _names(model, every, staged=self.staging is not None),
        )

    def _check_hooks(self, model: nn.Module, plan: Plan, mesh: Mesh) -> None:
        """See :func:`check_load_hooks`."""
        size, stages = mesh.tensor.size, mesh.pipeline.size
        if self.cutting is not None:
            cut, why = self.cutting.part_of, f"{size} tensor-parallel ranks hold its layers together"
            check_load_hooks(model, lambda params: any(cut(param) is not None for param in params), why)
        if self.staging is not None:
            ranks_of, why = self.staging.ranks_of, f"its layers go to several of {stages} pipeline ranks"
            check_load_hooks(model, lambda params: len({ranks_of(param) for param in params}) > 1, why)
            if plan.tiers.param_disk_fraction or plan.tiers.state_disk_fraction:
                check_load_hooks(model, bool, f"{stages} pipeline ranks write to their disks together")

    def owns(self, param: nn.Parameter) -> bool:
        """Whether this rank has any of it."""
        return self.staging is None or self.staging.owns(param)

    def _counted(self, param: nn.Parameter, fact: ParamFact) -> ParamFact:
        """With whether a rank of an earlier stage has it too."""
        earlier = self.staging is not None and self.staging.ranks_of(param)[0] != self.staging.rank
        return replace(fact, earlier=True) if earlier else fact

    def narrow(self, optimizer: torch.optim.Optimizer) -> None:
        """It holds this rank's parameters alone."""
        for group in optimizer.param_groups if self.staging is not None else ():
            group["params"] = [param for param in group["params"] if self.owns(param)]

    def install(self) -> None:
        """The model becomes this rank's part of it; what others have is let go of."""
        if self.sequences is not None:  # first: what is cut is cut of the layers that it leaves
            self.sequences.install()
        if self.cutting is not None:
            self.cutting.install()
        if self.draws is not None:
            self.draws.align()
        if self.staging is not None:
            self.staging.install()
            self.staging.forget()
            assert self._wire is not None
            self.shared = SharedGradients(self.staging, self.params, self._wire)
        self.every = []

    def release(self) -> None:
        """What it has others call is called no more."""
        if self.shared is not None:
            self.shared.remove()
        if self.sequences is not None:
            self.sequences.remove()


def _names(model: nn.Module, every: Sequence[nn.Parameter], staged: bool) -> StateNames | None:
    """Of the whole model, where it is in stages. Hooks are tried here, since what they give may be refused; without
    values of their own they are tried at the first state."""
    hooked = any(module._state_dict_hooks for module in model.modules()) and not is_deferred(model)
    found = StateNames.read(model, every) if staged or hooked else None
    return _outlined(found) if staged and found is not None else None


def _outlined(names: StateNames) -> StateNames:
    """Without the values of buffers, which may be on another rank alone."""
    others = {n: v.detach().to("meta") if isinstance(v, torch.Tensor) else None for n, v in names.others.items()}
    return replace(names, others=others)
