"""For every Python that a test of DeepSpeed's starts: its ``import deepspeed`` means ours, from the first use on."""

import sys
from importlib.machinery import ModuleSpec


class _First:
    """Finds nothing itself: puts the real finder in place when it is needed first, since that imports torch."""

    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] == "deepspeed" and cls in sys.meta_path:
            sys.meta_path.remove(cls)
            import shardwise.deepspeed.as_deepspeed  # noqa: F401
        return None


sys.meta_path.insert(0, _First)
