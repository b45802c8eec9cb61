"""What every process of DeepSpeed's tests has before it imports one of them; ranks are forked from one that has it."""

from __future__ import annotations

import numpy  # noqa: F401
import pytest  # noqa: F401
import torch  # noqa: F401

import shardwise.deepspeed.as_deepspeed  # noqa: F401  before anything imports DeepSpeed

from unit import util  # theirs  # isort: skip

# It asks for CUDA's and NCCL's versions where it means a device that computes in bf16, as every CPU here does.
util.bf16_required_version_check = lambda accelerator_check=True: True

# Most tests import these, and what they import is most of the time that a small test takes.
import unit.common  # noqa: E402
import unit.simple_model  # noqa: E402, F401
