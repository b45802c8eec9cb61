"""Translate a DeepSpeed configuration to a plan. The plan depends only on configuration, ranks and parameter sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from shardwise.core.base.validate import MOST_NUMEL, MOST_SCALE
from shardwise.deepspeed.config import Report, Settings, Source, batch_of, read_config
from shardwise.deepspeed.schema import KEYS
from shardwise.plan import (
    ByNumel,
    ByTensor,
    CommPlan,
    DiskPlan,
    GradPlan,
    MeshPlan,
    Plan,
    PrecisionPlan,
    ScalerPlan,
    ShardPlan,
    TierPlan,
)
from shardwise.plan.precision import HALF_DTYPES
from shardwise.plan.scaler_arguments import TORCH_SCALER

ZERO, PARAM, OPTIM = "zero_optimization", "zero_optimization.offload_param", "zero_optimization.offload_optimizer"
LEAVES = tuple(f"{ZERO}.leaf_module.{name}" for name in ("classes", "names", "name_suffixes"))
QUANTIZED = f"{ZERO}.zero_quantized_weights", f"{ZERO}.zero_quantized_gradients"
FROZEN = f"{ZERO}.zero_quantized_nontrainable_weights"
TENSOR_SIZES = "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"
HPZ, MICS = f"{ZERO}.zero_hpz_partition_size", f"{ZERO}.mics_shard_size"
BUCKETS = (f"{ZERO}.reduce_bucket_size", f"{ZERO}.allgather_bucket_size")
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", None: "fp32"}
AUTOCAST_SCALER = replace(TORCH_SCALER, min_scale=2.0**-60, max_scale=MOST_SCALE)
"""The loss scale of fp16 under ``torch_autocast``: that of ``torch.amp.GradScaler``, which has no bounds."""
MOST_AHEAD = 8
"""Largest number of param groups that are prefetched; as many idle arrays of the largest group's size are kept."""
PAGE = 4096


def to_plan(config: Source, world_size: int, *, numels: Sequence[int] | None = None) -> tuple[Plan, Report]:
    """Return the plan that a DeepSpeed configuration describes, and a report of each of its keys.

    Args:
        config: a dict, which is not changed, or the path of a JSON or Hjson file.
        world_size: number of all ranks.
        numels: elements of each parameter in the model's order. They turn limits of stage 3 in elements into numbers of
            units and shares; without them one unit is prefetched and ``max_in_cpu`` is all or nothing.

    Returns:
        The plan, and the report.

    Raises:
        ValueError: a value is out of range, or batch sizes or shard sizes do not fit ``world_size``. ``initialize``
            creates and checks the optimizer and the scheduler.
        NotImplementedError: a setting is not supported; the message names it.
        TypeError: a value, or the configuration itself, has the wrong type.
        FileNotFoundError: the file of the configuration does not exist.

    Examples:
        >>> from shardwise.deepspeed import to_plan
        >>> plan, report = to_plan({"train_batch_size": 8, "zero_optimization": {"stage": 2}}, world_size=4)
        >>> plan.shard.reduce
        'every'
    """
    settings = read_config(config)
    batch_of(settings, data_ranks(settings, world_size))
    return plan_of(settings, world_size, numels), settings.findings


def plan_of(settings: Settings, world_size: int, numels: Sequence[int] | None = None) -> Plan:
    """Return the plan of settings that were read. Keys that only some stages use are added to the report."""
    s = settings
    _report_ignored(s)
    mesh = _mesh(s, data_ranks(s, world_size) * s["sequence_parallel_size"])
    shard_ranks = mesh.resolve(data_ranks(s, world_size) * s["sequence_parallel_size"]).dp_shard
    precision = _precision(s)
    if not s.has("gradient_clipping"):
        s.findings.note(
            f"gradient_clipping is not given: gradients are clipped to norm {s['gradient_clipping']:g}, DeepSpeed's "
            "documented default (what releases before 0.19.8 did not do); 0.0 is off"
        )
    if str(s["optimizer.type"]).lower() == "muon" and s["gradient_clipping"] > 0.0:
        s.findings.note(
            f"gradient_clipping={s['gradient_clipping']:g} with Muon: gradients are clipped before Muon computes its "
            "steps. DeepSpeed clips the steps, which makes them smaller. Adjust the learning rate"
        )
    tiers = _tiers(s, shard_ranks, numels)
    if mesh.secondary is not None and tiers.param_disk_fraction > 0.0:
        raise ValueError(
            f"{HPZ}={mesh.secondary} with {PARAM}.device='nvme': secondary shards need parameters in memory; "
            "give device 'cpu' or 'none', or leave zero_hpz_partition_size out"
        )
    overlap = s[f"{ZERO}.overlap_comm"]
    tensor, sequence = parallel_sizes(s)
    over_ranks = s["gradient_allreduce_op"]
    if over_ranks == "sum" and sequence > 1:
        raise ValueError(
            f"gradient_allreduce_op={over_ranks!r} with sequence_parallel_size={sequence}: gradients of the parts "
            "of a sequence are averaged; give 'mean', and multiply the loss by the factor between sum and mean"
        )
    return Plan(
        mesh=replace(mesh, tp=tensor, sp=sequence),
        shard=_shard(s, precision, numels),
        precision=precision,
        grad=GradPlan(max_norm=s["gradient_clipping"], over_ranks=over_ranks),
        comm=_comm(s, True if overlap is None else overlap, tiers),
        tiers=tiers,
    )


def _comm(s: Settings, overlap: bool, tiers: TierPlan) -> CommPlan:
    quantized = [path for path in QUANTIZED if s.stage == 3 and s[path]]
    if quantized and tiers.disk is not None:
        raise ValueError(
            f"{quantized[0]}=True with offloading to 'nvme': compressed parameters are rounded after their update, and "
            "parameters on a disk are not; give device 'cpu' or 'none', or leave it False"
        )
    weights, gradients = QUANTIZED  # qwZ and qgZ of ZeRO++, in the number formats of its paper
    return CommPlan(
        overlap=overlap,
        compress_weights="int8" if weights in quantized else None,
        compress_gradients="int4" if gradients in quantized else None,
        compress_frozen="int8" if s.stage == 3 and s[FROZEN] else None,  # MixZ++
        same_order=False if s.stage == 3 and any(s[path] for path in LEAVES) else None,  # see leaf_modules
    )


def _report_ignored(s: Settings) -> None:
    """Report keys that have no effect at this stage or with these values of other keys."""

    def ignore(paths: Sequence[str], reason: str) -> None:
        for path in paths:
            if s.has(path):
                s.findings.ignore(path, reason)

    stage = s.stage
    if stage < 3:
        ignore([p for p in s.values if KEYS[p].stage > stage], f"it is for stage 3, and this is stage {stage}")
        ignore(
            [p for p in s.values if p.startswith(PARAM)], f"parameters leave the device at stage 3 only, not {stage}"
        )
        ignore([f"{ZERO}.stage3_gather_16bit_weights_on_model_save"], f"at stage {stage} parameters are whole anyway")
    else:
        ignore(BUCKETS, "at stage 3 each parameter is reduced and gathered by itself")
        if s[f"{ZERO}.overlap_comm"] is False:
            ignore([f"{ZERO}.stage3_prefetch_bucket_size"], "nothing is gathered ahead with overlap_comm false")
    if stage == 0:
        ignore([p for p in s.values if p.startswith(OPTIM)], "offloading is for stages 1 to 3, and this is stage 0")
        ignore(
            ["fp16.hysteresis", "fp16.consecutive_hysteresis"],
            "at stage 0 every overflow lowers the loss scale, as under DeepSpeed",
        )
    for name in ("fp16", "bf16"):
        if not s[f"{name}.enabled"]:
            inner = [p for p in s.values if p.startswith(f"{name}.") and p != f"{name}.enabled"]
            ignore(inner, f"{name} is not enabled")
    if not s["torch_autocast.enabled"]:
        ignore(["torch_autocast.dtype"], "torch_autocast is not enabled")
    if s["fp16.loss_scale"] > 0:
        dynamic = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
        ignore([f"fp16.{name}" for name in dynamic], f"the loss scale is constant ({s['fp16.loss_scale']:g})")
    if "nvme" not in (_device(s, PARAM), _device(s, OPTIM)):
        ignore([p for p in s.values if p.startswith("aio.")], "nothing is offloaded to nvme")
    for block in (PARAM, OPTIM):
        where = _device(s, block)
        if where != "nvme":
            names = ("nvme_path", "buffer_count", "max_in_cpu")
            ignore([p for p in (f"{block}.{n}" for n in names) if p in s.values], f"{block}.device is {where!r}")
        if where == "none":
            ignore([p for p in (f"{block}.pin_memory", f"{block}.ratio") if p in s.values], "nothing is offloaded")


def parallel_sizes(settings: Settings) -> tuple[int, int]:
    """Return the sizes of tensor and sequence parallelism.

    Raises:
        ValueError: two sizes of tensor parallelism that differ.
    """
    sizes = {path: settings[path] for path in TENSOR_SIZES}
    chosen = {path: size for path, size in sizes.items() if size > 1}
    if len(set(chosen.values())) > 1:
        raise ValueError(f"{chosen}: both give the number of ranks that hold one layer; give one of them")
    return max(1, *sizes.values()), settings["sequence_parallel_size"]


def data_ranks(settings: Settings, world_size: int) -> int:
    """Return the number of data-parallel ranks among ``world_size`` ranks.

    Raises:
        ValueError: the other sizes do not divide ``world_size``, or ``data_parallel_size`` is another number.
    """
    (tensor, sequence), named = parallel_sizes(settings), settings["data_parallel_size"]
    if world_size % (tensor * sequence):
        raise ValueError(
            f"tensor_parallel.autotp_size={tensor} x sequence_parallel_size={sequence} does not divide the "
            f"{world_size} ranks: give sizes whose product divides it"
        )
    ranks = world_size // (tensor * sequence)
    if named not in (None, ranks):
        raise ValueError(
            f"data_parallel_size={named}: {world_size} ranks with tensor_parallel.autotp_size={tensor} and "
            f"sequence_parallel_size={sequence} are {ranks} x {tensor} x {sequence}; give {ranks}, or leave it out"
        )
    return ranks


def data_parallel(settings: Settings, rank: int, world_size: int) -> tuple[int, int]:
    """Return a rank's index among the data-parallel ranks and their number; see :meth:`MeshPlan.data_parallel`.

    Raises:
        ValueError: see :func:`data_ranks`.
    """
    data_ranks(settings, world_size)
    tensor, sequence = parallel_sizes(settings)
    return MeshPlan(dp_shard=-1, dp_replicate=1, tp=tensor, sp=sequence).data_parallel(rank, world_size)


def _mesh(s: Settings, world_size: int) -> MeshPlan:
    """Return the mesh of ``world_size`` data-parallel ranks."""
    if s.stage == 0:
        return MeshPlan(dp_shard=1, dp_replicate=-1)
    hpz, mics = (s[path] if s.stage == 3 else 0 for path in (HPZ, MICS))
    if hpz > 1 and mics > 0:
        raise ValueError(f"{HPZ}={hpz} with {MICS}={mics}: both set the group in which gathers stay; give one")
    hpz = min(hpz, world_size)
    for path, size in ((HPZ, hpz), (MICS, mics)):
        if size > 0 and world_size % size:
            raise ValueError(f"{path}={size}: give a number that divides the {world_size} ranks")
    if mics > 0:
        return MeshPlan(dp_shard=mics, dp_replicate=-1)
    return MeshPlan(dp_shard=-1, dp_replicate=1, secondary=hpz if hpz > 1 else None)


def number_format(settings: Settings) -> torch.dtype | None:
    """Return the dtype of 16-bit parameters, or ``None`` if parameters keep their dtypes."""
    half = torch.bfloat16 if settings["bf16.enabled"] else None
    return torch.float16 if settings["fp16.enabled"] else half


def _autocast(s: Settings) -> torch.dtype | None:
    """Return the dtype of ``torch_autocast``.

    Raises:
        ValueError: the dtype is missing, is not a 16-bit dtype, or differs from that of the parameters.
    """
    if not s["torch_autocast.enabled"]:
        return None
    dtype, own = s["torch_autocast.dtype"], number_format(s)
    if dtype not in HALF_DTYPES:
        raise ValueError(f"torch_autocast.dtype={dtype} with torch_autocast.enabled: give 'bfloat16' or 'float16'")
    if own not in (None, dtype):
        raise ValueError(f"torch_autocast.dtype={dtype} with {NAMES[own]}.enabled: give the same, or one of the blocks")
    return dtype  # type: ignore[no-any-return]


def _precision(s: Settings) -> PrecisionPlan:
    dtype = number_format(s)
    name, expected = NAMES[dtype], s["data_types.param_dtype"]
    if expected is not None and expected != (dtype or torch.float32):
        raise ValueError(f"data_types.param_dtype={expected} with {name} parameters: set fp16.enabled or bf16.enabled")
    half_masters = s["fp16.fp16_master_weights_and_grads"] if name == "fp16" else False
    if name == "bf16":
        half_masters = s["bf16.bf16_master_weights_and_grads"]
        if s["bf16.bf16_optimizer_states"] and not half_masters:
            raise ValueError(
                f"bf16.bf16_optimizer_states={s['bf16.bf16_optimizer_states']} without bf16_master_weights_and_grads: "
                "state has the dtype of the masters; enable both, or neither"
            )
        by_adam = str(s["optimizer.type"]).lower() in ("adam", "adamw")  # their moments are fp32 then
        if half_masters and not s["bf16.bf16_optimizer_states"] and not by_adam:
            s.findings.note("bf16.bf16_master_weights_and_grads: optimizer state has the masters' dtype, bf16, as well")
    return PrecisionPlan(
        param_dtype=dtype,
        buffer_dtype=s["data_types.buffer_dtype"],
        master_weights=not half_masters,
        reduce_dtype=s["communication_data_type"],
        accumulate_dtype=s["data_types.grad_accum_dtype"],
        cast_inputs=dtype is torch.float16 and s["fp16.auto_cast"],
        scaler=_scaler(s),
    )


def _scaler(s: Settings) -> ScalerPlan | None:
    constant, autocast = 0.0, _autocast(s)
    if autocast is torch.float16 and not s["fp16.enabled"]:
        return AUTOCAST_SCALER
    if s["fp16.enabled"]:
        constant = s["fp16.loss_scale"]
    elif s["bf16.enabled"] and s["bf16.check_grad_overflow"]:
        constant = 1.0  # no scaling; steps with non-finite gradients are skipped
    else:
        return None
    initial, lowest = 2.0 ** s["fp16.initial_scale_power"], s["fp16.min_loss_scale"]
    if constant == 0.0 and not 0.0 < lowest <= initial:
        raise ValueError(
            f"fp16.min_loss_scale={lowest:g} with initial_scale_power={s['fp16.initial_scale_power']} (a scale of "
            f"{initial:g}): give a floor above 0 and not above the first scale"
        )
    return ScalerPlan(
        initial_scale=constant or initial,
        min_scale=constant or lowest,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=s["fp16.loss_scale_window"] if not constant else 1000,
        hysteresis=s["fp16.hysteresis"] if not constant and s.stage > 0 else 1,
        max_scale=constant or MOST_SCALE,
        growth_delay=0 if constant else 1,  # the first doubling is in the step after a full window
    )


def _shard(s: Settings, precision: PrecisionPlan, numels: Sequence[int] | None) -> ShardPlan:
    if s.stage < 3:
        limits = [size for size in (s[path] for path in BUCKETS) if size > 0]
        return ShardPlan(
            packing=ByNumel(chunk_numel=min(limits), min_chunks=8),
            gathered_fraction=1.0,
            gathered_budget_bytes=None,
            prefetch=0,
            reduce="every" if s.stage == 2 else "last",
        )
    # A limit that exceeds every model means all of the model.
    persist = min(_persist(s, numels), MOST_NUMEL)
    live = min(MOST_NUMEL, s[f"{ZERO}.stage3_max_live_parameters"], s[f"{ZERO}.stage3_max_reuse_distance"])
    itemsize = (precision.param_dtype or torch.float32).itemsize
    return ShardPlan(
        packing=ByTensor(persist_numel=persist),
        gathered_fraction=0.0,
        gathered_budget_bytes=live * itemsize,
        prefetch=_ahead(s[f"{ZERO}.stage3_prefetch_bucket_size"], persist, numels),
        reduce="every",
    )


def _persist(s: Settings, numels: Sequence[int] | None) -> int:
    """Return the threshold, lowered until the gathered parameters are within the model's limit (in elements)."""
    threshold: int = s[f"{ZERO}.stage3_param_persistence_threshold"]
    limit: int = s[f"{ZERO}.stage3_model_persistence_threshold"]
    if numels is None:
        return threshold if limit > 0 else 0
    sizes = sorted(n for n in numels if n <= threshold)
    total = sum(sizes)
    while sizes and total > limit:
        threshold = sizes[-1] - 1
        while sizes and sizes[-1] > threshold:
            total -= sizes.pop()
    return max(threshold, 0)


def _ahead(limit: int, persist: int, numels: Sequence[int] | None) -> int:
    """Return how many consecutive units always have at most ``limit`` elements; at least one unless the limit is 0."""
    if limit == 0 or numels is None:
        return min(limit, 1)
    sizes = [n for n in numels if n > persist]
    count = 1
    while count < min(len(sizes), MOST_AHEAD):
        width = count + 1
        if max(sum(sizes[i : i + width]) for i in range(len(sizes) - width + 1)) > limit:
            break
        count = width
    return count


def _device(s: Settings, block: str) -> str:
    """Return the device of an offload block at this stage."""
    return "none" if s.stage == 0 or (s.stage < 3 and block == PARAM) else str(s[f"{block}.device"])


def home_of_parameters(settings: Settings) -> tuple[str, bool]:
    """Return the device of ``offload_param`` at this stage, and whether host memory for parameters is pinned."""
    home = _device(settings, PARAM)
    return home, home != "none" and bool(settings[f"{PARAM}.pin_memory"])


def _tiers(s: Settings, shard_ranks: int, numels: Sequence[int] | None) -> TierPlan:
    params, state = _device(s, PARAM), _device(s, OPTIM)
    ratio = s[f"{OPTIM}.ratio"]
    param_disk = 0.0
    if params == "nvme":
        in_cpu, total = s[f"{PARAM}.max_in_cpu"] * shard_ranks, sum(numels or ())
        param_disk = 1.0 if not total else max(0.0, 1.0 - in_cpu / total)
        if not numels and s.has(f"{PARAM}.max_in_cpu"):
            s.findings.note(f"{PARAM}.max_in_cpu: the model's size is not known here, so every parameter goes to nvme")
    state_disk = ratio if state == "nvme" else 0.0
    disk = _disk(s, [block for block, device in ((PARAM, params), (OPTIM, state)) if device == "nvme"])
    pinned = [s[f"{block}.pin_memory"] for block, device in ((PARAM, params), (OPTIM, state)) if device != "none"]
    return TierPlan(
        param_host_fraction=0.0 if params == "none" else 1.0 - param_disk,
        param_disk_fraction=param_disk,
        state_host_fraction=ratio if state == "cpu" else 0.0,
        state_disk_fraction=state_disk,
        pin_memory=any(pinned),
        # ratio or max_in_cpu may leave nothing on the disk
        disk=disk if param_disk > 0.0 or state_disk > 0.0 else None,
    )


def _disk(s: Settings, blocks: Sequence[str]) -> DiskPlan | None:
    if not blocks:
        return None
    paths = {f"{block}.nvme_path": s[f"{block}.nvme_path"] for block in blocks}
    missing = [path for path, value in paths.items() if not value]
    if missing:
        raise ValueError(f"{missing[0]}={paths[missing[0]]!r} with device='nvme': name a directory on the disk to use")
    if len(set(paths.values())) > 1:
        raise ValueError(f"{paths}: parameters and state share one store; give the same directory")
    block_bytes = s["aio.block_size"]
    rounded = -(-block_bytes // PAGE) * PAGE
    if rounded != block_bytes:
        s.findings.note(f"aio.block_size={block_bytes} is rounded up to {rounded}, a multiple of {PAGE} bytes")
    return DiskPlan(
        directory=next(iter(paths.values())),
        block_bytes=rounded,
        queue_depth=s["aio.queue_depth"],
        threads=s["aio.intra_op_parallelism"],
        single_submit=s["aio.single_submit"],
        overlap_events=s["aio.overlap_events"],
        state_buffers=max(1, s[f"{OPTIM}.buffer_count"]),
        param_buffers=max(1, s[f"{PARAM}.buffer_count"]),
    )
