"""What the blocks of docs/fabric.md need, and what they must have done."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.lightning_setup import OUT, WIDTH, quiet

Names = dict[str, Any]


def _loader(names: Names) -> None:
    torch.manual_seed(0)
    names["loader"] = DataLoader(TensorDataset(torch.randn(16, WIDTH), torch.randn(16, OUT)), batch_size=4)


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, OUT))


def fabric(names: Names) -> None:
    quiet()
    _loader(names)
    names["MyModel"] = _model


def in_fabric(names: Names) -> None:
    """It trained in bf16 over fp32 masters, and saved."""
    moved = names["model"].state_dict()["0.weight"] - _model()[0].weight
    assert moved.dtype is torch.float32 and 0 < float(moved.detach().abs().max()) < 0.01
    assert Path("checkpoint").is_dir()
    names["fabric"].strategy.unshard()
