"""``DistributedDataParallel``'s published arguments as a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.base.checked import MOST_BYTES, refuse, whole
from shardwise.core.base.remarks import warn_user
from shardwise.plan import ByNumel, MeshPlan, Plan, replicated
from shardwise.pytorch.precision import with_formats
from shardwise.pytorch.ranks import check_all_ranks, mesh_of, name_device

__all__ = ["plan_of_ddp"]

MIB = 2**20
FLOAT_BYTES = 4  # of the gradients that buckets were meant for


def plan_of_ddp(
    device_ids: Sequence[int | torch.device] | None = None,
    output_device: int | torch.device | None = None,
    dim: int = 0,
    broadcast_buffers: bool | None = None,
    init_sync: bool = True,
    process_group: dist.ProcessGroup | None = None,
    bucket_cap_mb: int | None = None,
    find_unused_parameters: bool = False,
    check_reduction: bool = False,
    gradient_as_bucket_view: bool = False,
    static_graph: bool = False,
    delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
    param_to_hook_all_reduce: torch.nn.Parameter | None = None,
    mixed_precision: Any = None,
    device_mesh: DeviceMesh | None = None,
    skip_all_reduce_unused_params: bool = False,
    bucket_cap_mb_list: Sequence[float] | None = None,
    batched_grad_copy: bool = False,
    forward_sync_buffers: bool | None = None,
) -> Plan:
    """Every rank holds everything, and gradients are averaged over all ranks.

    Args:
        device_ids, output_device: one device, which is this rank's; a warning if not.
        dim: 0.
        broadcast_buffers, forward_sync_buffers: True warns: buffers are sent at the beginning, and not in each pass.
        init_sync: ranks start from rank 0's values.
        process_group, device_mesh: all ranks.
        bucket_cap_mb: MiB of fp32 gradients that are reduced together; ``None``: 25.
        find_unused_parameters, static_graph, gradient_as_bucket_view, skip_all_reduce_unused_params, batched_grad_copy:
            need not be said: unused parameters are found without a walk over the graph, and neither reduced nor
            updated; gradients lie in the array that is reduced.
        check_reduction, delay_all_reduce_named_params, param_to_hook_all_reduce, bucket_cap_mb_list: refused.
        mixed_precision: dtypes, as :func:`~shardwise.pytorch.plan_of_fsdp` has them.

    Raises:
        NotImplementedError: what is refused.
    """
    name_device("device_ids", device_ids)
    name_device("output_device", output_device)
    refused = {
        "dim": (dim, dim == 0, "batches are divided by the sampler; leave it 0"),
        "check_reduction": (check_reduction, not check_reduction, "leave it False: torch ignores it as well"),
        "delay_all_reduce_named_params": (
            delay_all_reduce_named_params,
            delay_all_reduce_named_params is None,
            "gradients are reduced in the order in which they come",
        ),
        "param_to_hook_all_reduce": (
            param_to_hook_all_reduce,
            param_to_hook_all_reduce is None,
            "gradients are reduced in the order in which they come",
        ),
        "bucket_cap_mb_list": (bucket_cap_mb_list, bucket_cap_mb_list is None, "give one size, bucket_cap_mb"),
    }
    for name, (value, fits, instead) in refused.items():
        if not fits:
            refuse(name, value, instead)
    for name, flag in (("broadcast_buffers", broadcast_buffers), ("forward_sync_buffers", forward_sync_buffers)):
        if flag:
            warn_user(
                f"{name}={flag}: buffers are rank 0's at the beginning, and each rank's own from then on; make running "
                "statistics alike with nn.SyncBatchNorm, or before an evaluation"
            )
    check_all_ranks("process_group", process_group)
    plan = replicated()
    if device_mesh is not None:
        sizes = mesh_of(device_mesh)
        plan = plan.but(mesh=MeshPlan(dp_shard=1, dp_replicate=sizes.dp_replicate * sizes.dp_shard))
    size = 25 if bucket_cap_mb is None else whole("bucket_cap_mb", bucket_cap_mb, 1, MOST_BYTES // MIB, "a size in MiB")
    plan = plan.but(packing=ByNumel(chunk_numel=size * MIB // FLOAT_BYTES), sync_init=bool(init_sync))
    return plan if mixed_precision is None else with_formats(plan, mixed_precision)
