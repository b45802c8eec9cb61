"""Setup for every process of DeepSpeed's tests before it imports one of them; ranks are forked from such a process."""

import functools
from typing import Any

import numpy  # noqa: F401
import pytest  # noqa: F401
import torch

import shardwise.deepspeed.as_deepspeed  # noqa: F401  before anything imports DeepSpeed

from unit import util  # theirs  # isort: skip

# DeepSpeed asks for CUDA's and NCCL's versions to learn whether the device computes in bf16, as every CPU does.
util.bf16_required_version_check = lambda accelerator_check=True: True

import deepspeed.runtime.swap_tensor  # noqa: E402

# A limit of its own disk code (2**20), which one file uses as the size of a model.
deepspeed.runtime.swap_tensor.MIN_SWAPPABLE_BYTES = 1024

_wrap = torch.nn.parallel.DistributedDataParallel.__init__


@functools.wraps(_wrap)
def _wrap_anywhere(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **others: Any) -> None:
    """Let torch's DDP, which is compared, accept device numbers for models on a CPU."""
    on_cpu = all(param.device.type == "cpu" for param in module.parameters())
    _wrap(self, module, None if on_cpu else device_ids, None if on_cpu else output_device, **others)


torch.nn.parallel.DistributedDataParallel.__init__ = _wrap_anywhere  # type: ignore[method-assign]

_scale = torch.amp.GradScaler.__init__


@functools.wraps(_scale)
def _scale_here(self: Any, device: str = "cpu", *args: Any, **others: Any) -> None:
    """Let torch's scaler, which is compared, work on a CPU; it is for CUDA by default, and does nothing without it."""
    _scale(self, device, *args, **others)


torch.amp.GradScaler.__init__ = _scale_here  # type: ignore[method-assign]

# Most tests import these, and their imports take most of the time of a small test.
import unit.common  # noqa: E402
import unit.simple_model  # noqa: E402, F401
