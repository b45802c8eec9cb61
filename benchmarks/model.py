"""The model, its weights and its data: identical in every system, deterministic in (seed, rank, step)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.job import Size

__all__ = ["GPT", "Block", "batch", "make_model"]


class Block(nn.Module):
    """Pre-norm attention and feed-forward: (batch, sequence, width) -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], x.shape[1], self.heads, -1)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        grown: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return grown


class GPT(nn.Module):
    """Decoder with untied embedding and head. ``forward(tokens, targets)``: (batch, sequence) each -> scalar loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.sequence, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def make_model(size: Size, dtype: str) -> GPT:
    """The same weights on every rank, in fp32. In ``bf16`` runs they are rounded to bf16 first, because some systems
    take their fp32 master weights from the rounded ones and all must start equal."""
    torch.manual_seed(20)
    model = GPT(size)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.02)
            if dtype == "bf16":
                parameter.copy_(parameter.bfloat16())
    return model


def batch(size: Size, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens of one rank's micro-batch, each (micro_batch, sequence) int64.

    Tokens are skewed towards small numbers, so that the loss falls within ten steps and a system that averages
    gradients wrongly is seen to differ.
    """
    source = torch.Generator().manual_seed(1_000_003 * rank + step)
    uniform = torch.rand(size.micro_batch, size.sequence + 1, generator=source)
    tokens = (uniform.pow(4) * size.vocabulary).long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
