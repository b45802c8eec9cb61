"""Readers and writers of other libraries' checkpoints; each reader returns a :class:`CheckpointSource`.

``registry`` lists the formats; a new one is a row there. See docs/checkpoints.md.
"""

from __future__ import annotations

from shardwise.core.checkpoint.formats.colossalai import (
    open_colossalai,
    write_colossalai_model,
    write_colossalai_optimizer,
)
from shardwise.core.checkpoint.formats.dcp import open_dcp, write_dcp
from shardwise.core.checkpoint.formats.deepspeed import open_deepspeed
from shardwise.core.checkpoint.formats.huggingface import open_huggingface, write_huggingface
from shardwise.core.checkpoint.formats.peft import open_peft, write_peft
from shardwise.core.checkpoint.formats.registry import (
    Format,
    OpenOptions,
    detect_format,
    known_formats,
    open_checkpoint,
    register_format,
    write_checkpoint,
)
from shardwise.core.checkpoint.formats.single_file import open_single, write_single, write_single_optimizer
from shardwise.core.checkpoint.formats.torch_file import RefusedPickle

__all__ = [
    "Format",
    "OpenOptions",
    "RefusedPickle",
    "detect_format",
    "known_formats",
    "open_checkpoint",
    "open_colossalai",
    "open_dcp",
    "open_deepspeed",
    "open_huggingface",
    "open_peft",
    "open_single",
    "register_format",
    "write_checkpoint",
    "write_colossalai_model",
    "write_colossalai_optimizer",
    "write_dcp",
    "write_huggingface",
    "write_peft",
    "write_single",
    "write_single_optimizer",
]
