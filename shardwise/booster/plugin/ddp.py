"""TorchDDPPlugin: wraps the model in ``torch.nn.parallel.DistributedDataParallel``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.booster.plugin.arguments import check_types
from shardwise.booster.plugin.base import Boosted, DPPluginBase, start_ranks
from shardwise.booster.plugin.fp8_communication import check_dtypes, reduce_bucket
from shardwise.booster.wrappers import ModelWrapper, OptimizerWrapper
from shardwise.core.base.validate import MOST_BYTES, integer, refuse


def ddp_arguments(arguments: TorchDDPPlugin) -> dict[str, Any]:
    """Return the keyword arguments of ``DistributedDataParallel`` for the published arguments.

    Raises:
        ValueError: ``bucket_cap_mb`` is not positive.
        NotImplementedError: ``check_reduction`` is set.
    """
    integer("bucket_cap_mb", arguments.bucket_cap_mb, 1, MOST_BYTES // 2**20, "a size in MiB")
    if arguments.check_reduction:
        refuse("check_reduction", True, "leave it False: torch's DDP always checks, and ignores this argument")
    # True is torch's default; passing it would make torch warn about the argument.
    buffers = {} if arguments.broadcast_buffers else {"broadcast_buffers": False}
    return {
        **buffers,
        "bucket_cap_mb": arguments.bucket_cap_mb,
        "find_unused_parameters": arguments.find_unused_parameters,
        "gradient_as_bucket_view": arguments.gradient_as_bucket_view,
        "static_graph": arguments.static_graph,
    }


class TorchDDPModel(ModelWrapper):
    """The user's module in DDP, or the module alone with a single process or without trainable parameters."""

    def __init__(self, module: nn.Module, arguments: dict[str, Any], compress: bool = False) -> None:
        parallel = dist.is_available() and dist.is_initialized() and any(p.requires_grad for p in module.parameters())
        if compress:
            check_dtypes(module)
        super().__init__(DistributedDataParallel(module, **arguments) if parallel else module)
        if compress and isinstance(self.module, DistributedDataParallel):
            self.module.register_comm_hook(None, reduce_bucket)

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:
        inner = self.module
        return inner.module if isinstance(inner, DistributedDataParallel) else inner

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are not reduced; see torch's ``DistributedDataParallel.no_sync``."""
        if isinstance(self.module, DistributedDataParallel):
            context: AbstractContextManager[None] = self.module.no_sync()
            return context
        return nullcontext()


@dataclass(frozen=True, eq=False)
class TorchDDPPlugin(DPPluginBase):
    """Data parallelism with torch's ``DistributedDataParallel``.

    The Booster defines the precision. On CUDA BatchNorm becomes SyncBatchNorm (torch has none for the CPU).

    Args:
        broadcast_buffers: copy rank 0's buffers to all ranks before every forward pass.
        bucket_cap_mb: size of gradients that are reduced together, in MiB.
        find_unused_parameters: search for parameters without a gradient after every forward pass.
        check_reduction: must be False: torch ignores it (a deprecated argument of DDP).
        gradient_as_bucket_view: gradients are views of the buckets.
        static_graph: whether the same parameters are used in every step.
        fp8_communication: communicate gradients in 8 bits.

    Examples:
        >>> from shardwise.booster import Booster
        >>> from shardwise.booster.plugin import TorchDDPPlugin
        >>> plugin = TorchDDPPlugin()
        >>> booster = Booster(mixed_precision="bf16", plugin=plugin)
    """

    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    fp8_communication: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        ddp_arguments(self)

    def control_precision(self) -> bool:
        return False

    def configure(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Boosted:
        device = start_ranks()
        model = model.to(device)
        if device.type == "cuda" and dist.is_initialized():
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        boosted = TorchDDPModel(model, ddp_arguments(self), self.fp8_communication)
        if optimizer is not None:
            optimizer = OptimizerWrapper(optimizer)
        return boosted, optimizer
