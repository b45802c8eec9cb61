"""``zero_quantized_nontrainable_weights``: adapters on a frozen base train as on a plain base that was rounded in
blocks, and every file has the base as it was loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from shardwise.core.comm import INT8
from shardwise.testing import assert_close
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

RANKS, STEPS, WIDTH = 2, 3, 24
RTOL = 2e-5  # all is fp32


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Adapter(), Adapter())


def config(**zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.0}},
        "gradient_clipping": 0.5,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": WIDTH,  # biases stay gathered
            "stage3_gather_16bit_weights_on_model_save": True,
            "zero_quantized_nontrainable_weights": True,
            **zero,
        },
    }


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(x) - x.flip(1)).square().mean()


def rounded(weight: Tensor) -> Tensor:
    """Of a parameter that has a chunk of its own: each half in blocks."""
    flat = weight.detach().flatten().clone()
    for half in flat.chunk(RANKS):
        INT8.round_(half)
    return flat.view_as(weight)


def train(engine: Any, rank: int) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of(engine, rank, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def plainly() -> dict[str, Any]:
    model = net()
    for layer in model:
        layer.base.weight.data = rounded(layer.base.weight)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-2, weight_decay=0)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        losses = [loss_of(model, rank, step) for rank in range(RANKS)]
        (sum(losses) / RANKS).backward()  # type: ignore[union-attr]
        found["losses"].append([loss.item() for loss in losses])
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found["evaluated"] = loss_of(model, 0, 9).item()
    return found | {"state": model.state_dict()}


MORE: dict[str, dict[str, Any]] = {
    "alone": {},
    "second copies": {"zero_hpz_partition_size": 1},
    "host": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    "disk": {"offload_param": {"device": "nvme"}},
}


@on_ranks(RANKS)
@pytest.mark.parametrize("name", ["alone", *full("second copies", "host", "disk")])
def test_adapters_train_as_on_a_rounded_base(name: str, tmp_path: Path) -> None:
    rank, folder, zero = torch.distributed.get_rank(), str(tmp_path / "saved"), MORE[name]
    if name == "disk":
        zero = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}}
    expected, exact = plainly(), net().state_dict()
    with deepspeed.zero.Init():
        model = net()
    engine = deepspeed.initialize(model=model, config=config(**zero))[0]
    with deepspeed.zero.GatheredParameters([model[1].base.weight]):
        assert torch.equal(model[1].base.weight.detach(), rounded(exact["1.base.weight"]))
    losses, norms = train(engine, rank)
    engine.optimizer.quantize_nontrainable_params()
    engine.save_checkpoint(folder, "three")
    engine.save_16bit_model(folder)
    state = engine.state_dict()
    with torch.no_grad():
        evaluated = loss_of(engine.eval(), 0, 9).item()
    again = deepspeed.initialize(model=net(), config=config(**zero))[0]
    again.load_checkpoint(folder, "three")
    assert_close(again.state_dict(), state, 0.0, "loaded")
    with torch.no_grad():
        assert loss_of(again.eval(), 0, 9).item() == evaluated
    again.destroy()
    engine.destroy()
    assert losses == pytest.approx([each[rank] for each in expected["losses"]], rel=RTOL)
    assert norms == pytest.approx(expected["norms"], rel=RTOL)
    assert evaluated == pytest.approx(expected["evaluated"], rel=RTOL)
    frozen = {key: value for key, value in exact.items() if ".base." in key}
    trained = {key: value for key, value in expected["state"].items() if key not in frozen}
    assert_close({key: state[key] for key in trained}, trained, RTOL, name)
    saved = torch.load(Path(folder, "pytorch_model.bin"))
    for values in (state, saved):
        assert_close({key: values[key] for key in frozen}, frozen, 0.0, "frozen weights are as they were loaded")


@on_ranks(RANKS)
def test_without_the_key_and_below_stage_3_nothing_is_rounded() -> None:
    engine = deepspeed.initialize(model=net(), config=config(zero_quantized_nontrainable_weights=False))[0]
    assert engine.session.plan.comm.compress_frozen is None and not engine.zero_quantized_nontrainable_weights()
    engine.destroy()
    at_2 = deepspeed.initialize(model=net(), config=config(stage=2))[0]
    assert at_2.session.plan.comm.compress_frozen is None
    at_2.destroy()
