"""8-bit communication of torch's DDP and ``fully_shard`` by their hooks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise.core.comm import GRADIENTS, VALUES
from shardwise.core.comm.control import all_gather_single


def check_dtypes(model: nn.Module) -> None:
    """Check the dtypes of parameters.

    Raises:
        ValueError: a parameter has a dtype that cannot be converted to 8 bits.
    """
    for name, param in model.named_parameters():
        if param.is_floating_point() and not VALUES.takes(param.dtype):
            raise ValueError(
                f"fp8_communication=True, but {name!r} has {param.dtype}, which is not sent in 8 bits; train it in "
                "fp32, bf16 or fp16, or leave fp8_communication False"
            )


def reduce_bucket(
    _state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch looks at the annotation
) -> torch.futures.Future[Tensor]:
    """Return the mean of a bucket over the ranks, with the same bits on all of them; a hook for DDP.

    The result is complete when this returns, and collectives of buckets run one after another.
    """
    full = bucket.buffer()
    size = dist.get_world_size()
    padded = nn.functional.pad(full, (0, -full.numel() % size)).view(size, -1)
    mean = torch.empty_like(padded[0])
    _sum_of_slices(mean, padded, None, 1.0 / size)
    _gather(padded.view(-1), mean, None, GRADIENTS)
    full.copy_(padded.view(-1)[: full.numel()])
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[full.device] if full.is_cuda else None)
    future.set_result(full)
    return future


def compress_unit(unit: FSDPModule) -> None:
    """Compress all further gathers and reductions of a unit."""
    unit.set_custom_all_gather(_AllGather())  # type: ignore[arg-type]  # only called
    unit.set_custom_reduce_scatter(_ReduceScatter())  # type: ignore[arg-type]


class _Memory:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the memory that torch requests."""
        return torch.empty(size, dtype=dtype, device=device)


class _AllGather(_Memory):
    """All-gather rounded values on all ranks, including the owner of a shard; the shard itself is unchanged."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if VALUES.takes(input_tensor.dtype):
            _gather(output_tensor, input_tensor, group, VALUES)
            return None
        # A unit with parameters of several dtypes is gathered as bytes, which are not compressed.
        work: dist.Work | None = all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class _ReduceScatter(_Memory):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"fp8_communication=True with the reduction {op}: leave gradient_divide_factor as it is, or give False"
            )
        scale = 1.0 / group.size() if op == dist.ReduceOp.AVG else 1.0
        _sum_of_slices(output_tensor, input_tensor.view(group.size(), -1), group, scale)
        return None


def _gather(out: Tensor, own: Tensor, group: dist.ProcessGroup | None, format_: Any) -> None:
    """Fill ``out`` with every rank's rounded ``own``; the result is the same on all ranks."""
    if own.numel():
        sent = format_.write(own.reshape(1, -1))
        received = sent.new_empty(out.numel() // own.numel(), sent.numel())
        all_gather_single(received.view(-1), sent.view(-1), group=group)
        format_.read(received, out.view(received.shape[0], -1))


def _sum_of_slices(out: Tensor, rows: Tensor, group: dist.ProcessGroup | None, scale: float) -> None:
    """Fill ``out`` with the scaled sum over the ranks of this rank's row, computed in fp32."""
    if rows.numel():
        sent = GRADIENTS.write(rows)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(-1), sent.view(-1), group=group)
        wide = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        GRADIENTS.read(received, wide)
        out.copy_((wide.sum(0) * scale).view(out.shape))
