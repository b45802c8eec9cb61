"""A user's own modules in a pipeline of two ranks, against plain PyTorch; unsupported modules raise on both ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shardwise.booster import Booster
from shardwise.booster.plugin import HybridParallelPlugin
from shardwise.core.comm import PeerError
from shardwise.core.parallel.pipeline.batch import split_batch
from shardwise.core.parallel.pipeline.staging import Body, register_body
from shardwise.testing import assert_close
from tests.support.on_ranks import on_ranks, raises

VOCABULARY, WIDTH, ROWS, STEPS, PARTS = 17, 8, 4, 2, 2


class Layer(nn.Module):
    """A layer that first changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu_(x) + torch.tanh(self.f(x))


class OwnNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(4))
        self.double()

    def hidden(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return self.head(self.hidden(self.embed(ids)))


class OwnScaled(OwnNet):
    def hidden(self, x: Any) -> Any:
        for layer, scale in zip(self.layers, self.scale, strict=True):
            x = layer(x) * scale
        return x


class OwnDict(OwnNet):
    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return self.layers[0]({"x": self.embed(ids)})


class OwnShared(OwnNet):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2], self.layers[3] = self.layers[0], self.layers[1]


def criterion(logits: Any, inputs: Any) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


def batch_of(step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (ROWS, 5), generator=torch.Generator().manual_seed(step))
    return {"ids": ids, "labels": ids.roll(1, 1)}


def boosted(booster: Booster, kind: type[OwnNet]) -> tuple[Any, Any]:
    register_body(kind.__name__, Body(tokens="embed"))
    own = kind()
    model, optimizer, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.5))
    return model, optimizer


def booster_of(**given: Any) -> Booster:
    plugin = HybridParallelPlugin(tp_size=1, pp_size=2, precision="fp32", num_microbatches=PARTS, max_norm=0.0, **given)
    return Booster(plugin=plugin)


ZBV = {"pp_style": "zbv", "num_model_chunks": 2}


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "given"), [(OwnNet, ZBV), (OwnShared, {}), (OwnScaled, {})], ids=["zbv", "shared", "scaled"]
)
def test_layers_that_change_their_input_are_exact(kind: type[OwnNet], given: dict[str, Any]) -> None:
    plain = kind()
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.5), []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = split_batch(batch_of(step), PARTS, None)
        found = [criterion(plain(**part.kwargs), part.inputs) * part.share for part in parts]
        for loss in found:
            loss.backward()
        optimizer.step()
        losses.append(torch.stack(found).sum().detach())
    booster = booster_of(**given)
    model, ours = boosted(booster, kind)
    for step in range(STEPS):
        result = booster.execute_pipeline(iter([batch_of(step)]), model, criterion, ours, broadcast_loss=True)
        assert_close({"loss": result["loss"]}, {"loss": losses[step]}, 1e-12, f"step {step}")
        ours.step()
        ours.zero_grad()
    state = model.state_dict()
    assert_close({n: state[n] for n, _ in plain.named_parameters()}, dict(plain.named_parameters()), 1e-11, "after")
    booster.close()


@on_ranks(2)
def test_dict_inputs_and_shared_layers_raise_on_both_ranks() -> None:
    booster = booster_of()
    model, optimizer = boosted(booster, OwnDict)
    told = "calls layers.0 with a dict for its hidden state: have each layer take and return one"
    error = PeerError if dist.get_rank() else TypeError
    raises(error, told, booster.execute_pipeline, iter([batch_of(0)]), model, criterion, optimizer)
    booster.close()
    booster = booster_of(pp_style="interleaved", num_model_chunks=2)
    words = r"layers\.0 and layers\.2 of the OwnShared are one module, in stages 0 and 2"
    raises(ValueError, words, boosted, booster, OwnShared)
    booster.close()
