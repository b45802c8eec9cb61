"""What the blocks of docs/native.md need, and what they must have done."""

from typing import Any

from hybrid_pages import llama
from torch.utils.data import DataLoader

Names = dict[str, Any]


def language(names: Names, layers: int = 1) -> None:
    llama(names, layers)
    names["dataset"] = names["train_dataset"]


def staged(names: Names) -> None:
    ended(names)
    language(names, 2)
    names["loader"] = DataLoader(names["dataset"], 8)


def planned(names: Names) -> None:
    ended(names)
    language(names)


def ended(names: Names) -> None:
    """A step was made, or at least a session that has the plan."""
    session = names["session"]
    assert session.data_ranks * session.mesh.pipeline.size == session.mesh.mesh_group.size
    if "plan" in names:
        assert session.plan == names["plan"].but(overlap=False, reduce_dtype=names["torch"].float32)
    session.close()


def filed(names: Names) -> None:
    language(names)


def read(names: Names) -> None:
    """The session has what the file says."""
    session = names["session"]
    assert session.plan == names["plan"] and session.plan.precision.param_dtype is names["torch"].bfloat16
    session.close()
