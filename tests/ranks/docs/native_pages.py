"""What the blocks of docs/native.md need, and what they must have done."""

from pathlib import Path
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


def recorded(names: Names) -> None:
    """Rank 0 has written a row, with a number for each column."""
    if names["session"].mesh.is_rank0:
        columns, row = Path("metrics.csv").read_text("utf-8").splitlines()
        assert columns.endswith("tokens_per_second,mfu") and all(float(each) >= 0 for each in row.split(","))


def filed(names: Names) -> None:
    language(names)


def read(names: Names) -> None:
    """The session has what the file says."""
    session = names["session"]
    assert session.plan == names["plan"] and session.plan.precision.param_dtype is names["torch"].bfloat16
    session.close()
