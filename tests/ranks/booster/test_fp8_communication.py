"""fp8_communication behind each plugin: losses beside those of the same run without, bytes of cut layers and of torch's
own wrappers against formulas, the same bits on every way, and ranks that agree."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from shardwise.booster import Booster
from shardwise.booster.plugin import (
    HybridParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from shardwise.shardformer import ShardConfig, ShardFormer
from shardwise.testing import run_ranks
from tests.support.hybrid_setup import LENGTH, VOCABULARY, made
from tests.support.on_ranks import everywhere, on_ranks
from tests.support.sets import full

STEPS, ROWS = 8, 4
PLUGINS: dict[str, Callable[[bool], Any]] = {
    "fsdp": lambda on: TorchFSDPPlugin(
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), fp8_communication=on
    ),
    "hybrid_tp": lambda on: HybridParallelPlugin(
        tp_size=2, pp_size=1, precision="bf16", zero_stage=1, fp8_communication=on
    ),
    "hybrid_pp": lambda on: HybridParallelPlugin(
        tp_size=1, pp_size=2, precision="fp32", num_microbatches=2, fp8_communication=on
    ),
}
"""What the other plugins send is their plan's: tests/ranks/engine compares it, to the bit."""


def texts(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def curve(name: str, on: bool) -> tuple[list[float], list[float]]:
    """The mean losses of a few steps on one batch, and the last step's parameters."""
    plugin = PLUGINS[name](on)
    model = made("llama", torch.float32, num_hidden_layers=2, tie_word_embeddings=True)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.3)
    booster = Booster(plugin=plugin)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.03)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    index = plugin.data_parallel()[0]
    for _ in range(STEPS):
        inputs = texts(index)
        if name == "hybrid_pp":
            found = booster.execute_pipeline(
                iter([inputs]), model, lambda out, _: out.loss, optimizer, return_loss=True, return_outputs=False
            )["loss"]
            rows = everywhere(None if found is None else float(found))
            loss = torch.tensor(next(row for row in rows if row is not None))
        else:
            loss = model(**inputs).loss
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        told = everywhere(loss.item())
        losses.append(sum(told) / len(told))
    state = booster_state(model)
    booster.close()
    return losses, state


def booster_state(model: Any) -> list[float]:
    """Sums of each parameter, which all ranks see alike."""
    values = [value.double().sum().item() for value in model.state_dict().values() if isinstance(value, Tensor)]
    told = everywhere(values)
    assert all(each == told[0] for each in told)
    return values


def curves(name: str) -> tuple[list[float], list[float]]:
    plain, compressed = curve(name, False), curve(name, True)
    assert plain[1] != compressed[1]
    return plain[0], compressed[0]


@pytest.mark.parametrize(("name", "ranks"), [("hybrid_pp", 2), *full(("fsdp", 4), ("hybrid_tp", 4))])
def test_losses_fall_as_without(name: str, ranks: int) -> None:
    plain, compressed = run_ranks(ranks, curves, name, timeout=240.0)[0]
    assert plain[-1] < 0.9 * plain[0]
    for one, other in zip(plain, compressed, strict=True):
        assert abs(one - other) < 0.1 * one


@on_ranks(2)
def test_gradients_of_torchs_ddp() -> None:
    """DDP's mean is within the bound, the same on all ranks, and an overflow of one rank reaches all."""
    torch.manual_seed(0)
    model = nn.Linear(50, 7)
    booster = Booster(plugin=TorchDDPPlugin(fp8_communication=True))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = [torch.randn(4, 50, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    rank = dist.get_rank()
    booster.backward(boosted(x[rank]).square().mean(), optimizer)
    terms = []
    for each in x:
        own = nn.Linear(50, 7)
        own.load_state_dict(model.state_dict())
        own(each).square().mean().backward()
        terms.append(own.weight.grad.clone())
    found = model.weight.grad
    bound = 0.27 * torch.stack(terms).abs().mean(0) + 2**-28 * torch.stack(terms).abs().max()
    assert ((found - torch.stack(terms).mean(0)).abs() <= bound).all()
    told = everywhere(found)
    assert torch.equal(told[0], told[1])
    optimizer.zero_grad()
    booster.backward(boosted(x[rank] * (1e30 if rank else 1.0)).square().mean(), optimizer)
    assert not model.weight.grad.isfinite().all()
    booster.close()
    with pytest.raises(ValueError, match=r"fp8_communication=True with 'weight' of torch.float64"):
        Booster(plugin=TorchDDPPlugin(fp8_communication=True)).boost(nn.Linear(2, 2).double())


def test_what_has_no_8_bits() -> None:
    with pytest.raises(NotImplementedError, match=r"fp8_communication=True.*HYBRID_SHARD"):
        TorchFSDPPlugin(fp8_communication=True, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def without_a_booster() -> tuple[list[float], list[float]]:
    found = []
    for on in (False, True):
        model = made("llama", torch.float32)
        model, _ = ShardFormer(ShardConfig(fp8_communication=on)).optimize(model)
        losses = []
        for step in range(2):
            loss = model(**texts(step)).loss
            loss.backward()
            losses.append(loss.item())
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        found.append(losses)
    return found[0], found[1]


def test_a_configuration_without_a_booster() -> None:
    plain, compressed = run_ranks(2, without_a_booster)[0]
    assert plain != compressed
    for one, other in zip(plain, compressed, strict=True):
        assert abs(one - other) < 0.05 * one
