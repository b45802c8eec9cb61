"""Which parameters of a model, and which parts of them, are this rank's, where ranks hold one model together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from shardwise.chunk.layout import ParamFact
from shardwise.engine.facts import all_names, parameter_facts
from shardwise.mesh import Mesh
from shardwise.pipeline import SharedGradients, Staging, stage_model
from shardwise.plan import Plan
from shardwise.tensor import Axis, Cutting, cut_model

__all__ = ["Division"]


class Division:
    """Of one model over the tensor- and pipeline-parallel ranks of a mesh; all of it where there are none. Nothing is
    changed before :meth:`install`.

    Args:
        model: whole.
        optimizers: with its parameters.
        plan: how layers are cut and stages made.
        mesh: the ranks.

    Attributes:
        cutting: of layers; ``None`` where none are cut.
        staging: of the model; ``None`` where it is in one piece.
        every: all floating-point parameters of the model, and what is known of each; the same on every rank but for
            the parts.
        params, facts: those of this rank.
        shared: gradients of what other stages use, too, once installed.

    Raises:
        ValueError: the model cannot be divided so; an optimizer holds something else than its parameters.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], plan: Plan, mesh: Mesh) -> None:
        every = [p for p in model.parameters() if p.is_floating_point()]
        self.cutting: Cutting | None = None
        self.staging: Staging | None = None
        self.shared: SharedGradients | None = None
        self._wire = mesh.wire
        if mesh.tensor.size > 1:
            self.cutting = cut_model(model, Axis(mesh.tensor), plan.tensor)
        facts = parameter_facts(every, all_names(model), optimizers, plan, self.cutting)
        self.every = list(zip(every, facts, strict=True))
        if mesh.pipeline.size > 1:
            pipe, rank, size = plan.pipeline, mesh.pipeline.rank, mesh.pipeline.size
            self.staging = stage_model(model, rank, size, pipe.chunks, pipe.layers, pipe.body)
            if plan.grad.average != "sum":
                raise ValueError(
                    f"average={plan.grad.average!r} with {size} pipeline ranks: give 'sum'; a step's micro-batches are "
                    "weighed by their rows"
                )
        own = [(p, f) for p, f in self.every if self.owns(p)]
        self.params: list[nn.Parameter] = [param for param, _ in own]
        self.facts: list[ParamFact] = [self._counted(param, fact) for param, fact in own]

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
        if self.cutting is not None:
            self.cutting.install()
        if self.staging is not None:
            self.staging.install()
            self.staging.forget()
            assert self._wire is not None
            self.shared = SharedGradients(self.staging, self.params, self._wire)
        self.every = [(param, fact) for param, fact in self.every if self.owns(param)]
