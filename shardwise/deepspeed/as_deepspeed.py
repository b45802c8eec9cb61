"""Make ``import deepspeed`` mean ``shardwise.deepspeed`` in this process when this module is imported.

Import it at the top of a program, before other libraries import DeepSpeed or check whether it is installed
(transformers and accelerate check when they are imported). ``shardwise run --as deepspeed`` does the same without a
change of the program.
"""

from __future__ import annotations

from shardwise.compat import impersonate

__all__: list[str] = []

impersonate("deepspeed")
