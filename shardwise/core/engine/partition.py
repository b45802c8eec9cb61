"""This rank's part of the model under tensor, pipeline and sequence parallelism, and a table of all parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from shardwise.core.base.state_dict_names import StateNames
from shardwise.core.deferred.construction import is_deferred
from shardwise.core.engine.mixed_precision import dtype_of_buffer
from shardwise.core.mesh import Mesh
from shardwise.core.parallel.pipeline.shared import SharedGradients
from shardwise.core.parallel.pipeline.staging import Staging, stage_model
from shardwise.core.parallel.sequence import Sequences, share_sequences
from shardwise.core.parallel.tensor import Axis, RngAlignment, TPPlan, cut_model
from shardwise.core.shards.layout import ParamInfo
from shardwise.plan import Plan, PrecisionPlan
from shardwise.plan.precision import HALF_DTYPES


@dataclass(frozen=True)
class ParamTable:
    """The parameters of the whole model. Files, states and numbers of parameters refer to it.

    Attributes:
        facts: metadata of all parameters, in the model's order; equal on every rank except for the parts.
        place: position of each of this rank's parameters in the whole model, by index.
        index: index of this rank's parameters by place.
        groups: places by optimizer and param group.
        names: saved names of the whole model by place; ``None`` if this rank has the whole model.
    """

    facts: tuple[ParamInfo, ...]
    place: tuple[int, ...]
    groups: tuple[tuple[tuple[int, ...], ...], ...]
    names: StateNames | None

    @cached_property
    def index(self) -> dict[int, int]:
        return {place: index for index, place in enumerate(self.place)}


class Partition:
    """The partition of a model over the tensor-, pipeline- and sequence-parallel ranks of a mesh. The model does not
    change before :meth:`install`.

    Args:
        model: the unsharded model.
        optimizers: the optimizers of the model's parameters.
        plan: how layers and stages are divided.
        mesh: the ranks.

    Attributes:
        tp_plan: tensor parallelism of layers, or ``None``.
        rng_alignment: synchronizes random numbers of tensor-parallel ranks, or ``None``.
        staging: pipeline stages, or ``None``.
        sequences: sequence parallelism, or ``None``.
        every: all parameters of the model with their facts, until :meth:`install`.
        table: names, shapes and options of the parameters, without the parameters.
        params, facts: parameters of this rank, and their metadata.
        shared: gradients of parameters that several stages use, after :meth:`install`.

    Raises:
        ValueError: the model cannot be divided like this, or an optimizer has a tensor that is not a parameter of it.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], plan: Plan, mesh: Mesh) -> None:
        every = list(model.parameters())
        self.tp_plan: TPPlan | None = None
        self.staging: Staging | None = None
        self.sequences: Sequences | None = None
        self.shared: SharedGradients | None = None
        self.rng_alignment: RngAlignment | None = None
        self._wire = mesh.wire
        compress = plan.comm.compress is not None
        if mesh.tensor.size > 1:
            axis = Axis(mesh.tensor, compress)
            self.tp_plan = cut_model(model, axis, plan.tensor)
            self.rng_alignment = RngAlignment(model, axis, mesh.device)
        facts = parameter_facts(every, model, optimizers, plan, self.tp_plan)
        wide = [fact.names[0] for fact in facts if plan.comm.compressed and fact.dtype is torch.float64]
        if wide:
            raise ValueError(
                f"{plan.comm.compressed} (fp8_communication) with {len(wide)} parameters of torch.float64 (as "
                f"{wide[0]!r}): train them in fp32, bf16 or fp16, or leave the compression off"
            )
        packed = [fact.names[0] for fact in facts if fact.part is not None and not fact.dtype.is_floating_point]
        if packed:
            raise ValueError(
                f"{mesh.tensor.size} tensor-parallel ranks with {len(packed)} packed weights in divided layers (as "
                f"{packed[0]!r}): packed numbers cannot be divided by rows or columns; use tp=1"
            )
        self.every = list(zip(every, facts, strict=True))
        if mesh.pipeline.size > 1:
            pipe, rank, size = plan.pipeline, mesh.pipeline.rank, mesh.pipeline.size
            v_shaped = pipe.schedule == "zbv"
            self.staging = stage_model(model, rank, size, pipe.chunks, pipe.layers, pipe.body, v_shaped)
            if plan.grad.average != "sum":
                raise ValueError(
                    f"average={plan.grad.average!r} with {size} pipeline ranks: use 'sum'; the micro-batches of a step "
                    "are weighted by their rows"
                )
            if plan.precision.output_dtype is not None:
                raise NotImplementedError(
                    f"output_dtype={plan.precision.output_dtype} with {size} pipeline ranks is not available: leave it "
                    "None, and cast in the criterion"
                )
        if mesh.ring is not None:
            self.sequences = share_sequences(model, plan.sequence, mesh.sequence, mesh.ring, mesh.tensor.size, compress)
        own = [(p, f) for p, f in self.every if self.owns(p)]
        self.params: list[nn.Parameter] = [param for param, _ in own]
        self.facts: list[ParamInfo] = [replace(fact, earlier=self._on_earlier_stage(param)) for param, fact in own]
        place = {id(param): at for at, param in enumerate(every)}
        groups = [[[place[id(p)] for p in g["params"] if id(p) in place] for g in o.param_groups] for o in optimizers]
        self.table = ParamTable(
            tuple(facts),
            tuple(place[id(param)] for param in self.params),
            tuple(tuple(map(tuple, each)) for each in groups),
            _names(model, every, staged=self.staging is not None),
        )

    def owns(self, param: nn.Parameter) -> bool:
        """Whether this rank has any part of the parameter."""
        return self.staging is None or self.staging.owns(param)

    def _on_earlier_stage(self, param: nn.Parameter) -> bool:
        return self.staging is not None and self.staging.ranks_of(param)[0] != self.staging.rank

    def narrow(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove other stages' parameters from the optimizer's groups."""
        for group in optimizer.param_groups if self.staging is not None else ():
            group["params"] = [param for param in group["params"] if self.owns(param)]

    def install(self) -> None:
        """Reduce the model to this rank's part and free the other parts."""
        if self.sequences is not None:  # first, since the layers that it leaves are divided next
            self.sequences.install()
        if self.tp_plan is not None:
            self.tp_plan.install()
        if self.rng_alignment is not None:
            self.rng_alignment.align()
        if self.staging is not None:
            self.staging.install()
            self.staging.forget()
            assert self._wire is not None
            self.shared = SharedGradients(self.staging, self.params, self._wire)
        self.every = []

    def release(self) -> None:
        """Remove the hooks of this partition."""
        if self.shared is not None:
            self.shared.remove()
        if self.sequences is not None:
            self.sequences.remove()


def _names(model: nn.Module, every: Sequence[nn.Parameter], staged: bool) -> StateNames | None:
    """Return the saved names of the whole model if it has stages. State hooks run here, since their results may be
    refused; on a deferred model they run at the first state."""
    hooked = any(module._state_dict_hooks for module in model.modules()) and not is_deferred(model)
    names = StateNames.read(model, every) if staged or hooked else None
    if not staged or names is None:
        return None
    # Without values of buffers, which only other ranks may have.
    own = names.buffers_and_extra.items()
    outlines = {name: value.detach().to("meta") if isinstance(value, torch.Tensor) else None for name, value in own}
    return replace(names, buffers_and_extra=outlines)


def parameter_facts(
    params: Sequence[nn.Parameter],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    plan: Plan,
    tp_plan: TPPlan | None = None,
) -> list[ParamInfo]:
    """Return name, shape, dtype, optimizer, group and tensor-parallel part of each of ``params``.

    Raises:
        ValueError: an optimizer has a tensor that is not a parameter of the model, or two have the same one.
    """
    names, norm_dtypes = dict[int, list[str]](), _norm_dtypes(model, plan.precision)
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    owners: dict[int, tuple[int, int]] = {}
    for optimizer_index, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) not in names:
                    raise ValueError(
                        f"optimizer {optimizer_index}, group {group_index} holds a tensor of shape "
                        f"{tuple(param.shape)} that is not a parameter of the model; create it on "
                        "model.parameters()"
                    )
                if id(param) in owners:
                    raise ValueError(f"{names[id(param)][0]} is in two optimizers; give each parameter to one")
                owners[id(param)] = (optimizer_index, group_index)
    facts = []
    for param in params:
        optimizer_index, group_index = owners.get(id(param), (-1, -1))
        dtype = (plan.precision.param_dtype if param.is_floating_point() else None) or param.dtype
        dtype = norm_dtypes.get(id(param), dtype)
        part = tp_plan.part_of(param) if tp_plan is not None else None
        shape = param.shape if part is None else part.shape
        known = (tuple(names[id(param)]), shape, dtype, param.requires_grad, optimizer_index, group_index)
        facts.append(ParamInfo(*known, part=part))
    return facts


def _norm_dtypes(model: nn.Module, precision: PrecisionPlan) -> dict[int, torch.dtype]:
    """Return fp32, by ``id``, for parameters of BatchNorm with fp32 statistics in a 16-bit model.

    With 16-bit weights torch's CPU kernel requires 16-bit statistics.
    """
    if precision.param_dtype not in HALF_DTYPES:
        return {}
    return {
        id(param): torch.float32
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.running_mean is not None
        and dtype_of_buffer(module.running_mean, precision.buffer_dtype) == torch.float32
        for param in module.parameters(recurse=False)
    }
