"""A byte-level GPT: pre-norm blocks, causal attention, output head tied to the embedding.

Source: the GPT-2 layout (pre-norm, GELU with 4x width, residual projections scaled down at the start by the square
root of twice the depth) over the 256 byte values, with rotary positions (RoFormer, arXiv 2104.09864). Weights start
at a variance of one over their inputs: at these widths GPT-2's fixed 0.02 makes attention uniform for long.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise import Architecture, Attention, Body, Embedding, Head, Mlp, register_architecture, register_body

__all__ = ["ByteGPT", "ModelSize", "generate"]

BYTES = 256
BLANKS, MOST_BLANKS = b" \t\r\n\0", 8
"""What shows nothing, and how much of it :func:`generate` writes in a row."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Width in features, depth in blocks, attention heads, and the context in bytes."""

    width: int
    depth: int
    heads: int
    context: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name}={value}: give a size >= 1")
        if self.width % (2 * self.heads):
            raise ValueError(f"width={self.width} is not a multiple of 2 x heads={self.heads}; change one of them")


def _angles(features: int, context: int) -> Tensor:
    # (2, context, features): cosine and sine of position x frequency, the two halves of the features alike.
    frequency = 10000.0 ** (-torch.arange(0, features, 2) / features)
    angle = torch.outer(torch.arange(context), frequency).repeat(1, 2)
    return torch.stack((angle.cos(), angle.sin()))


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = x * turns[0] + torch.cat((-second, first), dim=-1) * turns[1]
    return turned.type_as(x)  # some precisions cast parameters and not buffers


class Block(nn.Module):
    """One pre-norm transformer block: ``(batch, time, width) -> (batch, time, width)``."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads, self.features = size.heads, size.width // size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.join = nn.Linear(size.width, size.width)
        self.norm_mlp = nn.LayerNorm(size.width)
        self.widen = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Attention, then the MLP, each added to its input. ``turns``: cosines and sines, ``(2, time, features)``."""
        batch, time, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, self.features)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(_turn(q, turns), _turn(k, turns), v, is_causal=True)
        x = x + self.join(attended.transpose(1, 2).reshape(batch, time, -1))
        hidden: Tensor = x + self.narrow(F.gelu(self.widen(self.norm_mlp(x)), approximate="tanh"))
        return hidden


class ByteGPT(nn.Module):
    """``forward(bytes)``: int64 ``(batch, time <= context)`` to logits ``(batch, time, 256)``."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(BYTES, size.width)
        self.register_buffer("turns", _angles(size.width // size.heads, size.context), persistent=False)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, BYTES, bias=False)
        self.head.weight = self.embed.weight
        self._initialize()

    def _initialize(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # norms start at one and biases at zero
            std = 0.02 if parameter is self.embed.weight else 1 / math.sqrt(parameter.shape[1])
            residual = name.endswith(("join.weight", "narrow.weight"))
            nn.init.normal_(parameter, std=std / math.sqrt(2 * self.size.depth) if residual else std)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, text: Tensor, following: Tensor | None = None) -> Tensor:
        """Logits of the next byte at every position. ``following`` is for whoever computes a loss of them: what goes
        through stages is divided with what the loss needs."""
        x = self.embed(text)
        turns = self.get_buffer("turns")[:, : text.shape[1]]
        for block in self.blocks:
            x = block(x, turns)
        logits: Tensor = self.head(self.norm(x))
        return logits


register_architecture(
    Architecture(
        "bytegpt",
        {
            "ByteGPT": (Embedding("embed"), Head("head")),
            "Block": (
                Attention(fused="qkv", out="join", heads=("heads",), head_dim="features"),
                Mlp(columns=("widen",), rows=("narrow",)),
            ),
        },
    )
)


register_body("ByteGPT", Body(layers="blocks", tokens="embed"))


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, count: int, context: int, temperature: float, seed: int) -> bytes:
    """``count`` further bytes after ``prompt``, drawn at ``temperature`` (0: the most likely byte each time).

    Every rank that calls it with the same arguments draws the same bytes, so ranks stay together while parameters
    are gathered by all of them. After :data:`MOST_BLANKS` blanks in a row none is drawn: a model that was trained for
    minutes has learnt of indented text that a blank follows a blank, and would write little else.
    """
    device = next(model.parameters()).device
    random = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        window = torch.tensor([text[-context:]], device=device)
        logits = model(window)[0, -1].float().cpu()
        if len(text) >= MOST_BLANKS and all(byte in BLANKS for byte in text[-MOST_BLANKS:]):
            logits = logits.index_fill(0, torch.tensor(list(BLANKS)), -torch.inf)
        if temperature <= 0:
            text.append(int(logits.argmax()))
        else:
            chances = torch.softmax(logits / temperature, dim=-1)
            text.append(int(torch.multinomial(chances, 1, generator=random)))
    return bytes(text[len(prompt) :])
