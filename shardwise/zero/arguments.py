"""Published arguments of ``ShardedModelV2`` and ``ShardedOptimizerV2``, and their translation into a plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.core.base.validate import MOST_BYTES, check_flags, fraction, number
from shardwise.plan import (
    AutoPlan,
    ByNumel,
    ByTensor,
    CommPlan,
    GradPlan,
    MeshPlan,
    Packing,
    ParamGroupPlan,
    Plan,
    PrecisionPlan,
    ShardPlan,
    TierPlan,
)
from shardwise.plan.plan import MOST_DIVISOR
from shardwise.plan.precision import HALF_DTYPES
from shardwise.plan.scaler_arguments import PublishedDefault, ScalerArguments, scaler_plan

MIB = 1024 * 1024
POLICIES = ("cuda", "cpu", "auto")
AUTO = {"warmup_non_model_ratio": 0.2, "steady_capacity_ratio": 0.9}
DEFAULT_BUCKET_MB = 25


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """The arguments of :class:`~shardwise.zero.sharded_model.ShardedModelV2`."""

    reduce_scatter_bucket_size_mb: float = DEFAULT_BUCKET_MB
    fp32_reduce_scatter: bool = False
    offload_config: dict[str, str] | None = None
    gradient_predivide_factor: float | None = 1.0
    use_memory_tracer: bool = False
    reuse_fp16_shard: bool = False
    tensor_placement_policy: str | None = None

    def __post_init__(self) -> None:
        factor, bound = self.gradient_predivide_factor, int(MOST_DIVISOR)
        if factor is not None:
            what = "a divisor > 0, at most 2**32, or None to choose it"
            number("gradient_predivide_factor", factor, f"[{1 / bound!r}, {bound}]", what)
        size, most = self.reduce_scatter_bucket_size_mb, MOST_BYTES // MIB
        number("reduce_scatter_bucket_size_mb", size, f"[{-most}, {most}]", "a size in MiB")
        check_flags(self)
        offload = self.offload_config
        if offload is not None and (
            set(offload) != {"device"} or offload["device"] not in ("cpu", "cuda", "none", None)
        ):
            raise ValueError(f"offload_config={offload!r}: give {{'device': 'cpu'}}, or None to offload nothing")
        policy = self.tensor_placement_policy
        if policy is None:
            return
        if policy not in POLICIES:
            raise ValueError(f"tensor_placement_policy={policy!r}: give one of {', '.join(map(repr, POLICIES))}")
        if offload is not None or self.use_memory_tracer:
            raise ValueError(
                f"tensor_placement_policy={policy!r} with offload_config={offload!r}, use_memory_tracer="
                f"{self.use_memory_tracer}: it took their place; give one of them"
            )

    @property
    def cpu_offload(self) -> bool:
        """Return True if gradients, masters and optimizer state may be in host memory."""
        return self.tensor_placement_policy in ("cpu", "auto") or (self.offload_config or {}).get("device") == "cpu"

    @property
    def traces(self) -> bool:
        """Return True if steps are traced."""
        return self.use_memory_tracer or self.tensor_placement_policy == "auto"

    def predivide(self, ranks: int) -> float:
        """Return the divisor before the sum. ``None`` means the smallest power of two above the root of the number of
        ranks.
        """
        if self.gradient_predivide_factor is not None:
            return float(self.gradient_predivide_factor)
        factor = 1
        while ranks % factor == 0 and ranks / factor > factor:
            factor *= 2
        return float(factor)


@dataclass(frozen=True, kw_only=True)
class OptimizerArguments(ScalerArguments):
    """The arguments of :class:`~shardwise.zero.sharded_optim.ShardedOptimizerV2`."""

    cpu_offload: bool = False
    gpu_margin_mem_ratio: float = 0.0
    initial_scale: float = PublishedDefault(2**32)
    verbose: bool = False

    def __post_init__(self) -> None:
        fraction("gpu_margin_mem_ratio", self.gpu_margin_mem_ratio)
        check_flags(self)
        scaler_plan(self)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of the run that the plan depends on.

    Attributes:
        ranks: number of ranks.
        dtype: compute dtype of the model; ``None``: that of its parameters.
        itemsize: bytes per element of communicated gradients.
        packing: packing of sharded parameters; ``None`` if nothing is sharded.
        replicated: names of the parameters that stay replicated while others are sharded.
        params_on_host: parameters are in host memory between uses, and the device is another one.
        capacity_bytes: memory of the device.
    """

    ranks: int
    dtype: torch.dtype | None
    itemsize: int
    packing: Packing | None
    replicated: tuple[str, ...]
    params_on_host: bool
    capacity_bytes: int


def to_plan(model: ModelArguments, optimizer: OptimizerArguments | None, facts: ModelFacts) -> Plan:
    """Translate the arguments into a plan.

    Args:
        model: arguments of the model.
        optimizer: arguments of the optimizer; ``None`` before it exists.
        facts: facts of the run.

    Raises:
        RuntimeError: ``cpu_offload`` of the optimizer, with a model that does not offload.
    """
    if optimizer is not None and optimizer.cpu_offload and not model.cpu_offload:
        raise RuntimeError(
            f"cpu_offload={optimizer.cpu_offload} of the optimizer, but the model has offload_config="
            f"{model.offload_config!r}: give offload_config={{'device': 'cpu'}} to ShardedModelV2, or drop both"
        )
    half = facts.dtype in HALF_DTYPES
    return Plan(
        mesh=MeshPlan(dp_shard=-1, dp_replicate=1),
        shard=_shard(model, facts),
        precision=PrecisionPlan(
            param_dtype=facts.dtype,
            buffer_dtype=facts.dtype,
            reduce_dtype=torch.float32 if model.fp32_reduce_scatter and half else None,
            # A reduced shard is fp32, unless it must not be larger than the parameters' shard.
            accumulate_dtype=None if model.reuse_fp16_shard or not half else torch.float32,
            cast_inputs=facts.dtype is not None,
            scaler=scaler_plan(optimizer) if optimizer is not None and facts.dtype is torch.float16 else None,
        ),
        grad=GradPlan(),
        comm=CommPlan(predivide=model.predivide(facts.ranks)),
        tiers=_tiers(model, optimizer, facts),
        verbose=optimizer is not None and optimizer.verbose,
    )


def _shard(model: ModelArguments, facts: ModelFacts) -> ShardPlan:
    if facts.packing is not None:
        return ShardPlan(
            packing=facts.packing,
            gathered_fraction=0.0,
            prefetch=1,
            reduce="every",
            groups=(ParamGroupPlan(names=facts.replicated, reshard_after_forward=False),) if facts.replicated else (),
        )
    bucket = int(model.reduce_scatter_bucket_size_mb * MIB) // facts.itemsize
    packing: Packing = ByNumel(chunk_numel=bucket, min_chunks=8) if bucket > 0 else ByTensor(persist_numel=0)
    return ShardPlan(packing=packing, gathered_fraction=1.0, reduce="every")


def _tiers(model: ModelArguments, optimizer: OptimizerArguments | None, facts: ModelFacts) -> TierPlan:
    offloads = optimizer is not None and (optimizer.cpu_offload or model.tensor_placement_policy in ("cpu", "auto"))
    margin = optimizer.gpu_margin_mem_ratio if optimizer is not None and offloads and model.traces else 0.0
    by_trace = model.tensor_placement_policy == "auto" or margin > 0.0
    on_host = facts.packing is not None and (facts.params_on_host or model.tensor_placement_policy == "cpu")
    return TierPlan(
        param_host_fraction=1.0 if on_host and not by_trace else 0.0,
        state_host_fraction=1.0 if offloads and not by_trace else 0.0,
        device_capacity_bytes=facts.capacity_bytes if model.traces else None,
        pin_memory=on_host or offloads or by_trace,
        auto=AutoPlan(margin_ratio=margin, **AUTO) if by_trace else None,
    )


def without_effect(model: ModelArguments, optimizer: OptimizerArguments | None, facts: ModelFacts) -> list[str]:
    """Return the arguments without effect, each with the reason."""
    result: list[str] = []
    bucket = model.reduce_scatter_bucket_size_mb
    if facts.packing is not None and bucket != DEFAULT_BUCKET_MB:
        result.append(f"reduce_scatter_bucket_size_mb={bucket}: sharded parameters are reduced as they are gathered")
    if model.fp32_reduce_scatter and facts.dtype not in HALF_DTYPES:
        result.append(f"fp32_reduce_scatter={model.fp32_reduce_scatter}: gradients are not 16-bit")
    if optimizer is not None:
        offloads = model.offload_config is not None and model.cpu_offload
        if offloads and not optimizer.cpu_offload:
            result.append(
                f"offload_config={model.offload_config!r} with cpu_offload=False of the optimizer: gradients are "
                "where their update reads them"
            )
        ratio = optimizer.gpu_margin_mem_ratio
        if ratio > 0.0 and not (model.traces and model.cpu_offload):
            result.append(
                f"gpu_margin_mem_ratio={ratio}: it needs use_memory_tracer=True and offload_config={{'device': 'cpu'}}"
            )
    return result
