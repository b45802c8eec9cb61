"""``deepspeed.zero.TiledLinear``: one layer's values, a tile's memory."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sets import full
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from shardwise.testing import assert_close, run_ranks

RANKS, STEPS, IN, OUT = 2, 3, 10, 12
TiledLinear = deepspeed.zero.TiledLinear
TiledLinearReturnBias = deepspeed.runtime.zero.tiling.TiledLinearReturnBias


class Returning(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return nn.functional.linear(input, self.weight), self.bias


def layer(kind: type[nn.Module] = nn.Linear, **more: Any) -> nn.Module:
    torch.manual_seed(2)
    return kind(IN, OUT, **more)


@pytest.mark.parametrize("splits", [(1, 1), (3, 4), (10, 12)])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_the_layers(splits: tuple[int, int], bias: bool) -> None:
    whole = layer(bias=bias).double()
    options: dict[str, Any] = {"bias": bias, "in_splits": splits[0], "out_splits": splits[1], "dtype": torch.float64}
    tiled = TiledLinear(IN, OUT, init_linear=whole, **options)
    megatron = TiledLinearReturnBias(IN, OUT, linear_cls=Returning, init_linear=whole, **options)
    apart = TiledLinear(IN, OUT, init_linear=whole, combine_out_splits=False, input_is_already_split=True, **options)
    x = torch.randn(3, IN, dtype=torch.float64)
    expected = whole(x)
    torch.testing.assert_close(tiled(x), expected)
    output, own = megatron(x)
    torch.testing.assert_close(output if own is None else output + own, expected)
    assert (own is None) is (not bias)
    sizes = [last - first for first, last in pairwise(tiled.in_parts)]
    parts = deepspeed.runtime.zero.tiling.split_tensor_along_last_dim(x, sizes, True)
    outputs = apart(parts if splits[0] > 1 else x)
    assert len(outputs) == splits[1]
    torch.testing.assert_close(torch.cat(outputs, -1), expected)
    expected.square().sum().backward()
    tiled(x).square().sum().backward()
    for row, tiles in enumerate(tiled.linears):
        for column, tile in enumerate(tiles):
            rows, columns = slice(*tiled.out_parts[row : row + 2]), slice(*tiled.in_parts[column : column + 2])
            mine = whole.weight.grad[rows, columns]
            torch.testing.assert_close(tile.weight.grad, mine)
            if tile.bias is not None:
                assert column == splits[0] - 1
                torch.testing.assert_close(tile.bias.grad, whole.bias.grad[rows])


def test_wrong_tiles() -> None:
    for name, splits in (("in", 0), ("in", IN + 1), ("out", OUT + 1)):
        with pytest.raises(RuntimeError, match=f"{name}_splits={splits} of {name}_features=.*: give 1 to"):
            TiledLinear(IN, OUT, **{f"{name}_splits": splits})
    with pytest.raises(ValueError, match="give one of the same"):
        TiledLinear(IN, OUT, bias=False, init_linear=layer())
    with pytest.raises(ValueError, match="an input of 2 parts with in_splits=3"):
        TiledLinear(IN, OUT, in_splits=3, input_is_already_split=True)((torch.ones(1, 5), torch.ones(1, 5)))


class Net(nn.Module):
    def __init__(self, tiles: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(IN, OUT), nn.Linear(OUT, IN)
        if tiles:
            self.first = TiledLinear(IN, OUT, in_splits=2, out_splits=3, init_linear=self.first)
            self.last = TiledLinear(OUT, IN, in_splits=3, out_splits=2, init_linear=self.last)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.last(torch.tanh(self.first(x))).square().mean()
        return value


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, IN, generator=torch.Generator().manual_seed(10 * step + rank))


def whole_state(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tiles of ``state`` put together."""
    found = {}
    for name in ("first", "last"):
        tiled = getattr(model, name)
        across, rows = tiled.in_splits, range(tiled.out_splits)
        weights = [state[f"{name}.linears.{row}.{column}.weight"] for row in rows for column in range(across)]
        found[f"{name}.weight"] = torch.cat(
            [torch.cat(weights[at : at + across], 1) for at in range(0, len(weights), across)]
        )
        last = tiled.in_splits - 1
        found[f"{name}.bias"] = torch.cat([state[f"{name}.linears.{r}.{last}.bias"] for r in range(tiled.out_splits)])
    return found


def trained(stage: int, tiles: bool) -> tuple[dict[str, Tensor], int]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_prefetch_bucket_size": 0,
        },
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = deepspeed.initialize(model=Net(tiles), config=config)[0]
    for step in range(STEPS):
        engine.backward(engine(batch(step, dist.get_rank())))
        engine.step()
    state, peak = engine.state_dict(), engine.session.memory().peak_gathered_bytes
    if tiles:
        source = layer().requires_grad_(False)
        engine.module.first.copy_params_from(source)  # sharded, too
        found = whole_state(engine.module, engine.state_dict())
        assert torch.equal(found["first.weight"], source.weight) and torch.equal(found["first.bias"], source.bias)
        state = whole_state(engine.module, state)
    engine.destroy()
    return state, peak


@pytest.mark.parametrize("stage", [*full(1, 2), 3])
def test_trained_as_layers_in_a_tiles_memory(stage: int) -> None:
    model = Net(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        for rank in range(RANKS):
            (model(batch(step, rank)) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    tiled, plain = run_ranks(RANKS, trained, stage, True), run_ranks(RANKS, trained, stage, False)
    for (found, peak), (other, whole_peak) in zip(tiled, plain, strict=True):
        assert_close(found, model.state_dict(), 1e-5, f"tiles at stage {stage}")
        assert_close(other, model.state_dict(), 1e-5, f"layers at stage {stage}")
        if stage == 3:  # one layer with its bias, or one of its tiles, each padded
            assert 4 * IN * OUT <= whole_peak < 4 * (IN * OUT + OUT) + 128
            assert peak < 4 * (IN * OUT / 6 + OUT) + 256 < whole_peak
