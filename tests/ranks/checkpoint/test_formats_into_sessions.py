"""Checkpoints of other formats load into sharded sessions of any kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise.plan import zero
from shardwise.session import build
from shardwise.testing import assert_close, run_ranks
from tests.support.sets import full


class Tied(nn.Module):
    """Embedding and head share a weight; a buffer and an odd size beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(self.embed(x)))) * self.scale[0]


def reference(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = Tied()
    model.scale.fill_(float(seed))
    return {name: value.clone() for name, value in model.state_dict().items()}


def load(path: str, stage: int) -> dict[str, Tensor]:
    torch.manual_seed(99)
    model = Tied()
    session = build(model, torch.optim.AdamW(model.parameters(), lr=0.1), zero(stage))  # type: ignore[arg-type]
    restored = session.checkpoints.load(path)
    assert restored is not None and restored.missing == () and restored.unexpected == ()
    state = session.module.state_dict()
    session.backward(session.module(torch.tensor([1, 2, 3])).sum())
    assert session.optimizer is not None
    session.optimizer.step()  # and it can be trained
    session.close()
    return state


RUNS = [(1, 2), (2, 3), (3, 1)]
QUICK = [(kind, *RUNS[number]) for number, kind in enumerate(("once", "twice", "torch"))]
CASES = [(kind, *run) for kind in ("once", "twice", "torch") for run in RUNS]


@pytest.mark.parametrize(("kind", "ranks", "stage"), [*QUICK, *full(*(case for case in CASES if case not in QUICK))])
def test_weights_of_others(tmp_path: Path, kind: str, ranks: int, stage: int) -> None:
    expected = reference(7)
    if kind == "torch":
        path = tmp_path / "model.pt"
        torch.save(expected, path)
    else:
        path = tmp_path / "model.safetensors"
        stored = {name: value.contiguous().clone() for name, value in expected.items()}
        if kind == "once":
            del stored["head.weight"]
        save_file(stored, str(path))
    for state in run_ranks(ranks, load, str(path), stage):
        assert_close(state, expected, 0.0, f"{kind} into stage {stage}")


def test_a_foreign_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    wrong = reference(7)
    wrong["body.weight"] = torch.zeros(5, 6)
    del wrong["head.weight"]
    save_file(wrong, str(tmp_path / "model.safetensors"))
    with pytest.raises(ValueError, match=r"body\.weight.*\(5, 6\).*\(6, 6\)"):
        build_and_load(str(tmp_path))


def build_and_load(path: str) -> None:
    session = build(Tied(), None, zero(3))
    try:
        session.checkpoints.load(path)
    finally:
        session.close()
