"""``ShardedModelV2``: the published arguments and methods of the sharded model, on a ``Session``.

The session is created with the optimizer, because the optimizer's groups define the packing. A model that is used
before or without an optimizer is sharded at that point.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardwise.compat.arguments import picked
from shardwise.core.base.device import numbered, runtime
from shardwise.core.base.warnings import warn_user
from shardwise.core.comm import ranks_of
from shardwise.core.memory.trace.picture import dump_memory_stats
from shardwise.core.memory.trace.stats import NO_UNIT, MemStats, Moment
from shardwise.core.mesh import Mesh, default_device, init_distributed
from shardwise.session import Session, build
from shardwise.zero.arguments import ModelArguments, ModelFacts, OptimizerArguments, to_plan, without_effect
from shardwise.zero.fronts import NAMES, ModelFront
from shardwise.zero.init_ctx import ParameterMark, mark_of
from shardwise.zero.shard_utils import BaseShardStrategy


def require_same_ranks(argument: str, group: dist.ProcessGroup | None, ranks: Sequence[int], owner: str) -> None:
    """Check that ``group`` is ``None``, or has exactly the ``ranks`` that ``owner`` is sharded over.

    Raises:
        ValueError: other ranks, or this rank is not a member.
    """
    if group is None:
        return
    members = ranks_of(argument, group)
    if members != tuple(ranks):
        raise ValueError(
            f"{argument} has ranks {list(members)}, and {owner} those of {list(ranks)}: give the same group to both, "
            "or None here"
        )


class ShardedModelV2(ModelFront):
    """A model whose parameters, gradients and optimizer state are sharded over the ranks.

    For training create a :class:`~shardwise.zero.sharded_optim.ShardedOptimizerV2` before the first forward pass: then
    the masters have the initial values in fp32. If the model was used before, they have rounded values.

    Args:
        module: built inside :class:`~shardwise.zero.init_ctx.ZeroInitContext`.
        shard_strategy: defines which parameters are gathered together.
        process_group: the data-parallel ranks that the model is sharded over, a group that this rank belongs to;
            ``None``: all ranks. Other ranks may have other groups, which train separately.
        reduce_scatter_process_group: ``None``, or one of the same ranks.
        reduce_scatter_bucket_size_mb: bucket size in MiB; gradients of replicated parameters (``shard_param=False``)
            are reduced in buckets of that size, at 0 or below one by one. Those of sharded parameters are reduced as
            they are gathered.
        fp32_reduce_scatter: communicate 16-bit gradients in fp32.
        offload_config: ``{"device": "cpu"}``: keep gradients in host memory for an optimizer with ``cpu_offload=True``.
        gradient_predivide_factor: gradients are divided by it before the sum over the ranks, and by the number of ranks
            over this factor afterwards. ``None``: a power of two near the root of the number of ranks.
        use_memory_tracer: trace the memory of each step (on GPUs of the first); see :meth:`dump_memory_stats`. A step
            that needs more memory than the device has fails with a report.
        reuse_fp16_shard: reduced gradients are 16-bit and not larger than the parameters' shard, so each step is one
            backward pass. Otherwise they are fp32 and accumulate.
        tensor_placement_policy: an argument of later releases, instead of ``offload_config`` and ``use_memory_tracer``:
            ``"cuda"`` (nothing in host memory), ``"cpu"`` (parameters, gradients and state) or ``"auto"`` (by the
            trace).

    Raises:
        ValueError: a parameter was created outside of ``ZeroInitContext``, or parameters have different dtypes or
            devices; an argument out of range; a group that this rank does not belong to, or groups that differ.
        TypeError: the module is sharded already, or ``shard_strategy`` is not a strategy.

    Examples:
        >>> from shardwise.zero import ShardedModelV2, ShardedOptimizerV2, TensorShardStrategy, ZeroInitContext
        >>> strategy = TensorShardStrategy()
        >>> with ZeroInitContext("cpu", strategy, shard_param=True, convert_fp16=False):
        ...     model = torch.nn.Linear(8, 4)
        >>> model = ShardedModelV2(model, strategy)
        >>> optimizer = ShardedOptimizerV2(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    """

    def __init__(
        self,
        module: nn.Module,
        shard_strategy: BaseShardStrategy,
        process_group: dist.ProcessGroup | None = None,
        reduce_scatter_process_group: dist.ProcessGroup | None = None,
        reduce_scatter_bucket_size_mb: float = 25,
        fp32_reduce_scatter: bool = False,
        offload_config: dict[str, str] | None = None,
        gradient_predivide_factor: float | None = 1.0,
        use_memory_tracer: bool = False,
        reuse_fp16_shard: bool = False,
        *,
        tensor_placement_policy: str | None = None,
    ) -> None:
        arguments = dict(locals())
        super().__init__()
        if isinstance(module, ShardedModelV2):
            raise TypeError(f"module is a {type(module).__name__} already: give the plain module")
        if not isinstance(shard_strategy, BaseShardStrategy):
            raise TypeError(f"shard_strategy={shard_strategy!r:.80}: give a TensorShardStrategy() or another instance")
        self.arguments = picked(ModelArguments, arguments)
        marks = _marks(module)
        init_distributed()
        ranks = ranks_of("process_group", process_group)
        require_same_ranks("reduce_scatter_process_group", reduce_scatter_process_group, ranks, "process_group")
        _check_ranks(marks, ranks)
        self.shard_strategy, self.ranks, self._group = shard_strategy, ranks, process_group
        self._facts, self._device = _facts(module, marks, shard_strategy, fp32_reduce_scatter, len(ranks))
        self._mesh: Mesh | None = None
        self._warned: set[str] = set()
        self.module = module
        self._tell(None)

    # ---- the session

    def attach(
        self, optimizer: torch.optim.Optimizer, arguments: OptimizerArguments, mp_group: dist.ProcessGroup | None = None
    ) -> Session:
        """Shard the model with its optimizer. Collective over the model's ranks, and over the ranks of ``mp_group``.

        Args:
            optimizer: a plain torch optimizer.
            arguments: arguments of the sharded optimizer.
            mp_group: the model-parallel ranks with other parts of the model (``mp_process_group``).

        Raises:
            RuntimeError: the model has an optimizer already.
        """
        to_plan(self.arguments, arguments, self._facts)  # raises errors before anything is changed
        self._drop_session()
        self._tell(arguments)
        if mp_group is not None and ranks_of("mp_process_group", mp_group) != (dist.get_rank(),):
            self._own_mesh().join_model_parallel(mp_group)
        return self._build(optimizer, arguments)

    def _tell(self, optimizer: OptimizerArguments | None) -> None:
        for each in without_effect(self.arguments, optimizer, self._facts):
            if each not in self._warned:
                self._warned.add(each)
                warn_user(f"no effect of {each}")

    def _build(
        self, optimizer: torch.optim.Optimizer | None = None, arguments: OptimizerArguments | None = None
    ) -> Session:
        plan = to_plan(self.arguments, arguments, self._facts)
        session = self._session = build(self.module, optimizer, plan, self._own_mesh(), names=NAMES)
        if self.arguments.reuse_fp16_shard:
            session.events.backward_requested.listen(self._refuse_accumulation)
        return session

    def _own_mesh(self) -> Mesh:
        """Return the mesh, created once, because the optimizer cannot change this part of the plan. Collective."""
        if self._mesh is None:
            plan = to_plan(self.arguments, None, self._facts)
            self._mesh = Mesh.create(plan.mesh, self._device, plan.comm, self._group)
        return self._mesh

    def _refuse_accumulation(self) -> None:
        if self.session.has_gradients:
            raise RuntimeError(
                f"a second backward pass before step() with reuse_fp16_shard={self.arguments.reuse_fp16_shard}: each "
                "step is one pass; call step() or zero_grad() between them, or leave reuse_fp16_shard False"
            )

    def close(self) -> None:
        """Remove the hooks from the model and release the communicators. Call :meth:`state_dict` before."""
        if self._session is not None:
            self._session.close()
        if self._mesh is not None:
            self._mesh.close()
        self._session = self._mesh = None

    # ---- passes

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """Run the backward pass from ``tensor`` with its true gradient ``grad`` (same shape), scaled as in
        :meth:`backward`.
        """
        session = self.session
        if session.optimizers:
            session.optimizer.backward_by_grad(tensor, grad)
        else:
            with session.backward_pass():
                torch.autograd.backward(tensor, grad)

    # ---- memory

    @property
    def cpu_offload(self) -> bool:
        """Return True if an optimizer may have ``cpu_offload=True``."""
        return bool(self.arguments.cpu_offload)

    @property
    def use_memory_tracer(self) -> bool:
        """Return True if steps are traced."""
        return bool(self.arguments.traces)

    @property
    def cuda_margin_space(self) -> int:
        """Return the bytes of the device that the traced step never used; 0 before a traced step."""
        stats = _trace(self.session)
        return 0 if stats is None else max((stats.capacity_bytes or 0) - stats.peak_bytes, 0)

    def dump_memory_stats(self, filename: str | os.PathLike[str] = "dump_mem_stats.log") -> None:
        """Write rank 0's trace of the last step to a file: totals, the highest peaks, a row for each use of a unit.

        For a data-parallel group without rank 0, its first rank writes, and adds ``.rank`` with its number to the name.

        Replicated parameters (``shard_param=False``) are not gathered: there is one row, for the peak. After a step
        that failed (out of memory) the trace ends at that point. Not collective. Without ``use_memory_tracer``, or
        before a first pass, nothing is written, with a warning.
        """
        stats = _trace(self._session) if self._session is not None else None
        if stats is None:
            why = "nothing ran yet" if self.use_memory_tracer else "use_memory_tracer=False"
            warn_user(f"{os.fspath(filename)} is not written: {why}")
        elif self._own_mesh().rank == 0:
            first = self.ranks[0]
            dump_memory_stats(stats, Path(f"{os.fspath(filename)}.rank{first}" if first else filename))


def _trace(session: Session) -> MemStats | None:
    """Return the trace. If nothing is gathered, the trace has only the peak."""
    stats, ledger = session.memory_so_far(), session.ledger
    if stats is None and ledger.peak_bytes:
        kinds = ledger.model_bytes_by_kind()
        model_bytes = min(sum(kinds.values()), ledger.peak_bytes)
        peak = Moment(NO_UNIT, "the highest moment", "step", model_bytes, ledger.peak_bytes - model_bytes, kinds)
        stats = MemStats([peak], str(ledger.device), ledger.capacity_bytes, {})
    return stats


def _marks(module: nn.Module) -> dict[str, ParameterMark]:
    result: dict[str, ParameterMark] = {}
    for name, parameter in module.named_parameters():
        mark = mark_of(parameter)
        if mark is None:
            raise ValueError(f"parameter {name!r} was made outside of ZeroInitContext: build the whole module inside")
        result[name] = mark
    for attribute in ("dtype", "target_device"):
        values = {getattr(mark, attribute) for mark in result.values()}
        if len(values) > 1:
            raise ValueError(f"parameters of one model with {attribute} {sorted(map(str, values))}: give one")
    return result


def _check_ranks(marks: Mapping[str, ParameterMark], ranks: tuple[int, ...]) -> None:
    for name, mark in marks.items():
        if mark.ranks not in (None, ranks):
            raise ValueError(
                f"process_group has ranks {list(ranks)}, but parameter {name!r} was built for {list(mark.ranks or ())} "
                "(dp_process_group of ZeroInitContext): give the same group to both"
            )


def _facts(
    module: nn.Module, marks: Mapping[str, ParameterMark], strategy: BaseShardStrategy, fp32: bool, ranks: int
) -> tuple[ModelFacts, torch.device]:
    first = next(iter(marks.values()), ParameterMark(False, None, torch.device("cpu")))
    device = first.target_device if first.target_device.type == "cuda" else default_device()
    device = numbered(device)
    sharded = any(mark.param_is_sharded for mark in marks.values())
    facts = ModelFacts(
        ranks=ranks,
        dtype=first.dtype,
        itemsize=4 if fp32 or first.dtype is None else first.dtype.itemsize,
        packing=strategy.packing(module) if sharded else None,
        replicated=tuple(name for name, mark in marks.items() if not mark.param_is_sharded) if sharded else (),
        params_on_host=first.target_device.type == "cpu" and device.type != "cpu",
        capacity_bytes=_capacity_bytes(device),
    )
    return facts, device


def _capacity_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return runtime().total_bytes(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
