"""``import shardwise.deepspeed.as_deepspeed``: from here on ``import deepspeed`` means ``shardwise.deepspeed``.

One line at the top of a program, before anything imports DeepSpeed or asks whether it is there (transformers and
accelerate do when they are imported). ``shardwise run --as deepspeed`` does the same for a program without that line.
"""

from __future__ import annotations

from shardwise.compat import impersonate

__all__: list[str] = []

impersonate("deepspeed")
