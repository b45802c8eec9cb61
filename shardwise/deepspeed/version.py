"""The release of DeepSpeed whose names these are, for programs that ask whether it is new enough."""

from __future__ import annotations

import torch

from shardwise.worlds import read_world

__version__ = version = read_world("deepspeed").version
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in version.split("."))
git_hash = git_branch = ""
torch_info = {
    "version": torch.__version__,
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",  # programs ask torch then
    "hip_version": "0.0",
}
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
"""A file of variables that DeepSpeed's launcher reads."""
