"""The library's own interface: ``shardwise.shard(model, optimizer, stage=3)``."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from shardwise.build import Session, build
from shardwise.checked import require, shown, whole
from shardwise.mesh import init_distributed
from shardwise.plan import DiskPlan, Plan, SequencePlan, TensorPlan, TierPlan, on_device, replicated, zero
from shardwise.sizes import device_bytes

__all__ = ["Settings", "shard"]

DTYPES = {None: None, "fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
IN_LAYERS, EVERYWHERE = ("split_gather", "ring"), ("all_to_all", "ring_attn")
NO_DIRECTORY = re.compile(r"(host|cpu|cuda|gpu|device|ram|memory|disk|nvme|ssd|none|true|false)(:\d+)?", re.IGNORECASE)
"""Words of other libraries for a place, which nobody means as the name of a directory."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What most runs need of a plan.

    Attributes:
        stage: of ZeRO: 0 shards nothing, 1 masters and optimizer state, 2 gradients too, 3 parameters too.
        precision: ``"bf16"`` or ``"fp16"`` casts parameters and inputs, and keeps fp32 masters; ``"fp32"`` and
            ``None`` leave them as they are.
        max_norm: gradients are clipped to this norm; 0 is off.
        average: over the backward passes of a step (gradient accumulation): ``"sum"``, as autograd does, so that a loss
            is divided by the program; ``"mean"``; or ``"tokens"``, each pass by the ``tokens=`` of its ``backward``.
        offload: ``"host"``, or a directory on a disk: where masters and optimizer state are at home, and at stage 3
            parameters; ``None``: on the device.
        replicas: copies of the sharded model (hybrid sharding, stages 1 to 3).
        tp: ranks that hold parts of the same layers.
        pp: ranks that hold the stages of one model.
        sp: ranks that see parts of the same sequences.
        sequence: how: ``"all_to_all"`` or ``"ring_attn"`` over ``sp`` ranks, ``"split_gather"`` or ``"ring"`` between
            the layers that ``tp`` ranks hold. ``None``: ``"all_to_all"`` where ``sp`` is above 1.
        microbatches: of a batch in a pipeline; ``None``: one a stage.
        device_memory: what may be used of the device, in bytes or as a text such as ``"64MiB"``; ``None``: all of it,
            on a CPU without a limit.

    Raises:
        ValueError: a value out of range, or two that do not go together.
        TypeError: ``offload`` is neither a text nor a path.
    """

    stage: int = 3
    precision: str | None = None
    max_norm: float = 0.0
    average: str = "sum"
    offload: str | os.PathLike[str] | None = None
    replicas: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1
    sequence: str | None = None
    microbatches: int | None = None
    device_memory: int | str | None = None

    def __post_init__(self) -> None:
        stages = isinstance(self.stage, int) and not isinstance(self.stage, bool)
        require(stages and 0 <= self.stage <= 3, f"stage={shown(self.stage)}: give 0, 1, 2 or 3")
        spelled = self.precision is None or isinstance(self.precision, str)
        require(
            spelled and self.precision in DTYPES,
            f"precision={shown(self.precision)}: give 'bf16', 'fp16', 'fp32' or None",
        )
        whole("replicas", self.replicas, 1, what="a number of copies")
        require(self.stage > 0 or self.replicas == 1, f"replicas={self.replicas} at stage 0, which has one a rank")
        modes = (None, *IN_LAYERS, *EVERYWHERE)
        require(self.sequence in modes, f"sequence={shown(self.sequence)}: give one of {modes}")
        beside = f"sequence={self.sequence!r} with tp={self.tp}, sp={self.sp}"
        if self.sequence in IN_LAYERS:
            require(self.tp > 1 and self.sp == 1, f"{beside}: it is over the ranks of tp; give tp > 1 and sp=1")
        elif self.sequence is not None:
            require(self.sp > 1, f"{beside}: give sp > 1")
        require(
            self.microbatches is None or self.pp > 1,
            f"microbatches={self.microbatches} with pp={self.pp}: they are for a pipeline; give pp > 1",
        )
        self.plan()

    def plan(self) -> Plan:
        """The plan that they mean; change it with :meth:`~shardwise.plan.Plan.but`, and give it instead."""
        dtype = DTYPES[self.precision]
        # The types of literals: checked above.
        base = replicated(dtype) if self.stage == 0 else zero(self.stage, dtype, self.replicas)  # type: ignore[arg-type]
        in_layers = self.sequence if self.sequence in IN_LAYERS else None
        everywhere = self.sequence if self.sequence in EVERYWHERE else "all_to_all"
        return base.but(
            mesh=replace(base.mesh, tp=self.tp, pp=self.pp, sp=self.sp),
            max_norm=self.max_norm,
            average=self.average,
            tiers=self._tiers(),
            tensor=TensorPlan(sequence=in_layers),  # type: ignore[arg-type]
            sequence=SequencePlan(mode=everywhere),  # type: ignore[arg-type]
            microbatches=self.microbatches,
        )

    def _tiers(self) -> TierPlan:
        tiers, params = on_device(), 1.0 if self.stage == 3 else 0.0
        if self.offload == "host":
            tiers = replace(tiers, state_host_fraction=1.0, param_host_fraction=params, pin_memory=True)
        elif self.offload is not None:
            place = f"offload={shown(self.offload)}: give 'host' for host memory, or a directory on a disk"
            if not isinstance(self.offload, (str, os.PathLike)):
                raise TypeError(place)
            word = isinstance(self.offload, str) and os.path.basename(self.offload) == self.offload
            near = word and difflib.get_close_matches(str(self.offload), ["host"], cutoff=0.75)
            meant = near and not os.path.isdir(self.offload)
            if meant or (word and NO_DIRECTORY.fullmatch(str(self.offload))):
                raise ValueError(f"{place} (a path such as './{self.offload}' where one is called that)")
            disk = DiskPlan(directory=os.fspath(self.offload))
            tiers = replace(tiers, state_disk_fraction=1.0, param_disk_fraction=params, pin_memory=True, disk=disk)
        return replace(tiers, device_capacity_bytes=device_bytes(self.device_memory))


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    *,
    device: torch.device | str | None = None,
    **settings: Any,
) -> Session:
    """Shard ``model`` over all ranks, in place, with its optimizers. Collective.

    The ranks meet by the variables that torchrun and ``shardwise run`` set (``RANK``, ``WORLD_SIZE``); without them
    this is one process. Call ``session.module``, then ``session.backward(loss)`` and ``session.optimizer.step()``; a
    model in stages makes its passes in ``session.pipeline.step``. What a rank is to see of a data set
    ``session.data_rank`` and ``session.data_ranks`` say.

    Args:
        model: any module, real, on the meta device, or built under ``deferred_init()``.
        optimizer: one, several (each parameter in at most one), or none: any element-wise ones of torch.
        plan: everything that can be told, instead of ``settings``; or the TOML or JSON file that has it.
        device: where parameters live; by default this rank's GPU where there is one a rank.
        settings: those of :class:`Settings`: ``stage=3, precision="bf16", tp=2``.

    Raises:
        TypeError: a setting that there is not, or a model, an optimizer or a plan that is none.
        OSError: a plan's file cannot be read.
        ValueError: a plan and settings, or see :class:`Settings`, :meth:`shardwise.plan.Plan.load` and
            :func:`shardwise.build.build`.
    """
    names = [each.name for each in fields(Settings)]
    for name, value in settings.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}; a plan has all others"
            raise TypeError(f"{name}={value!r:.80} is no setting of shard(): {hint}")
    if plan is not None and settings:
        raise ValueError(
            f"plan={plan!r:.40}... and {', '.join(settings)}: give one of them; plan.but(...) changes a plan"
        )
    if plan is not None and not isinstance(plan, Plan):
        if not isinstance(plan, (str, os.PathLike)):
            raise TypeError(
                f"plan={shown(plan)}: give a Plan, or the .toml or .json file that has one; settings have names"
            )
        plan = Plan.load(plan)
    chosen = plan if plan is not None else Settings(**settings).plan()
    return build(model, optimizer, chosen, device=init_distributed(device))
