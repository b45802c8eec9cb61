"""A small model with tensor-parallel layers of every kind: fused and separate, uneven heads, padded and tied
vocabulary."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from shardwise.core.parallel.tensor import ShardSpec, TPPlan

VOCABULARY, WIDTH, HEADS, INNER = 29, 24, 6, 20


class Block(nn.Module):
    """Attention with a fused projection, and an MLP."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv: nn.Module = Conv1D(3 * WIDTH, WIDTH) if fused else nn.Linear(WIDTH, 3 * WIDTH)
        self.out: nn.Module = Conv1D(WIDTH, WIDTH) if fused else nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=not fused), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in self.qkv(y).chunk(3, -1))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v  # the number of heads on this rank
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=VOCABULARY - 2)
        self.blocks = nn.ModuleList([Block(False), Block(True)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(tied: bool) -> Model:
    torch.manual_seed(3)
    model = Model(tied).double()
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    return model


def rows_of(ranks: int) -> ShardSpec:
    """Return the rows of the padded vocabulary."""
    return ShardSpec.even(0, VOCABULARY + -VOCABULARY % (4 * ranks), ranks)


class Parts:
    """The split of the model: a head stays on one rank; six heads over four ranks are uneven.

    Args:
        gathers: whether the logits are gathered.
    """

    def __init__(self, gathers: bool) -> None:
        self.gathers = gathers

    def collect(self, model: Model, tp_plan: TPPlan) -> None:
        ranks, head = tp_plan.axis.size, WIDTH // HEADS
        for block in model.blocks:
            fused = isinstance(block.qkv, Conv1D)
            tp_plan.columns(block.qkv, ShardSpec.even(int(fused), 3 * WIDTH, ranks, blocks=3, unit=head))
            tp_plan.rows(block.out, ShardSpec.even(int(not fused), WIDTH, ranks, unit=head))
            tp_plan.columns(block.up, ShardSpec.even(0, INNER, ranks))
            tp_plan.rows(block.down, ShardSpec.even(1, INNER, ranks))
        tp_plan.vocabulary(model.embedding, rows_of(ranks))
        tp_plan.columns(model.head, rows_of(ranks), self.gathers)
