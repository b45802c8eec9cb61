"""In every Python that a DeepSpeed test starts, ``import deepspeed`` imports ``shardwise.deepspeed``, on first use."""

import sys
from importlib.machinery import ModuleSpec


class _First:
    """Finds nothing itself: installs the real finder when it is first needed, since that imports torch."""

    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] == "deepspeed" and cls in sys.meta_path:
            sys.meta_path.remove(cls)
            import shardwise.deepspeed.as_deepspeed  # noqa: F401
        return None


sys.meta_path.insert(0, _First)
