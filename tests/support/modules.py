"""The module classes behind :data:`tests.support.models.MODELS`; each says in one line what is odd about it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Having(nn.Module):
    """Registers the modules and parameters that it gets, by name."""

    def __init__(self, **members: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def square() -> nn.Linear:
    """Return the layer that most of them use."""
    return nn.Linear(6, 6)


class Mlp(nn.Module):
    """Linear, tanh, linear."""

    def __init__(self, width: int = 6, hidden: int = 10) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class OddSizes(nn.Module):
    """Weights of 7x13, 13x1, 1x3 and 3x7; single-element biases."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 1), nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 7, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Frozen(Having):
    """The first layer, one bias, and a norm are frozen."""

    def __init__(self) -> None:
        super().__init__(first=square(), second=square(), norm=nn.LayerNorm(6), last=square())
        for parameter in (*self.first.parameters(), self.second.bias, *self.norm.parameters()):
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(self.first(x)))
        return self.last(self.norm(x))


class FrozenChild(Having):
    """A frozen block between trainable ones: gradients must flow through it."""

    def __init__(self) -> None:
        super().__init__(before=square(), frozen=Mlp(), after=square())
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.frozen(torch.tanh(self.before(x))))


class Unused(Having):
    """``spare`` and all of ``idle`` take no part in the forward pass."""

    def __init__(self) -> None:
        super().__init__(first=square(), idle=Mlp(5, 3), spare=nn.Parameter(torch.zeros(3, 2)), last=square())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class UsedTwice(Having):
    """One layer, called twice."""

    def __init__(self) -> None:
        super().__init__(shared=square(), between=square())

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.between(torch.tanh(self.shared(x))))


class Alias(Having):
    """``first`` and ``second`` are the same module."""

    def __init__(self) -> None:
        super().__init__(first=square(), middle=square())
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.middle(self.first(x))))


class AroundChildren(Having):
    """Its own parameters are read before, between and after the calls of its children."""

    def __init__(self) -> None:
        scale, shift = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))
        super().__init__(scale=scale, shift=shift, inner=nn.Sequential(Mlp(), Mlp()))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        x = self.inner[0](x) * self.scale + self.shift
        return self.inner[1](x) * self.scale + self.shift


class LateParameter(Having):
    """The parent reads a child's weight after other children have run (a release after forward is too early)."""

    def __init__(self) -> None:
        super().__init__(first=square(), middle=Mlp(), last=square())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.middle(self.first(x))))
        return out + functional.linear(x, self.first.weight, self.middle.down.bias)


class ZeroSized(Having):
    """Parameters with no elements, one of them used."""

    def __init__(self) -> None:
        nothing, never = nn.Parameter(torch.empty(0, 6)), nn.Parameter(torch.empty(0))
        super().__init__(nothing=nothing, linear=square(), never=never)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.cat([x, self.nothing.to(x.dtype)]))


class NonContiguous(Having):
    """The weight is a transposed view of its storage."""

    def __init__(self) -> None:
        super().__init__(weight=nn.Parameter(torch.zeros(5, 7).t()), back=nn.Linear(5, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.tanh(x @ self.weight))


class MixedDtypes(Having):
    """One inner layer has its own dtype, with casts around it."""

    def __init__(self, other: torch.dtype) -> None:
        super().__init__(first=square(), inner=square().to(other), last=square())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        inner: Tensor = self.inner(x.to(self.inner.weight.dtype))
        return self.last(inner.to(x.dtype))


class Buffers(Having):
    """BatchNorm that stays in evaluation, so that no statistic depends on how the batch is split."""

    mean: Tensor
    count: Tensor
    cache: Tensor

    def __init__(self) -> None:
        super().__init__(linear=square(), norm=nn.BatchNorm1d(6))
        self.register_buffer("mean", torch.linspace(-1, 1, 6))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("cache", torch.full((6,), 0.5), persistent=False)
        self.norm.running_mean.copy_(torch.linspace(0, 0.5, 6))
        self.norm.running_var.copy_(torch.linspace(0.5, 2, 6))
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x - self.mean)) * self.cache + 1 / self.count


class Scalar(Having):
    """A temperature without dimensions."""

    def __init__(self) -> None:
        temperature, offset = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(0.0))
        super().__init__(temperature=temperature, inner=Mlp(), offset=offset)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.temperature) + self.offset


class Residual(Having):
    """Blocks in a ModuleList, each added to its input."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__(blocks=nn.ModuleList(Mlp() for _ in range(depth)), norm=nn.LayerNorm(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


class InPlace(Having):
    """Activations overwrite the outputs of the layers."""

    def __init__(self) -> None:
        super().__init__(layers=nn.ModuleList(square() for _ in range(2)), last=square())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.mul_(2)
            x = torch.relu_(x)
        return self.last(x)


class Mixture(Having):
    """``choice`` runs expert 0, expert 1, or both in reverse order."""

    def __init__(self) -> None:
        super().__init__(first=square(), experts=nn.ModuleList(Mlp() for _ in range(2)), last=square())

    def forward(self, x: Tensor, choice: int) -> Tensor:
        x = torch.tanh(self.first(x))
        for index in ((0,), (1,), (1, 0))[choice]:
            x = self.experts[index](x)
        return self.last(x)


class Attention(Having):
    """nn.MultiheadAttention reads ``out_proj.weight`` without calling ``out_proj``."""

    def __init__(self) -> None:
        super().__init__(attention=nn.MultiheadAttention(6, 2, batch_first=True), norm=nn.LayerNorm(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


class Recurrent(Having):
    """An LSTM: its weights are also in a list of its own."""

    def __init__(self) -> None:
        super().__init__(lstm=nn.LSTM(6, 5, batch_first=True), last=nn.Linear(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x)[0])


class NestedInputs(Having):
    """Takes ``{"x": tensor}`` and ``extra=[tensor, (mask, None)]``."""

    def __init__(self) -> None:
        super().__init__(first=square(), last=square())

    def forward(self, inputs: dict[str, Tensor], *, extra: list[Any], power: int) -> Tensor:
        half, (mask, nothing) = extra
        assert nothing is None
        x = torch.tanh(self.first(inputs["x"])).pow(power)
        return self.last(torch.where(mask, x, half))


@dataclass
class Answer:
    """An output of several parts."""

    first: Tensor
    rest: dict[str, Tensor]


class SeveralOutputs(Having):
    """Returns three tensors in a ``"dict"``, a nested ``"tuple"`` or a ``"dataclass"``."""

    def __init__(self, kind: str) -> None:
        super().__init__(trunk=square(), heads=nn.ModuleList(square() for _ in range(3)))
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.trunk(x))
        a, b, c = (head(x) for head in self.heads)
        if self.kind == "dict":
            return {"a": a, "b": b, "c": c}
        return (a, (b, [c])) if self.kind == "tuple" else Answer(a, {"b": b, "c": c})


class Checkpointed(Having):
    """Blocks that run again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(first=square(), blocks=nn.ModuleList(Mlp() for _ in range(2)), last=square())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class Tied(Having):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__(embedding=nn.Embedding(11, 6), inner=Mlp(), head=nn.Linear(6, 11))
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(tokens)))


class FunctionalHead(Having):
    """The embedding's weight is used again by a function, long after the embedding's own forward."""

    def __init__(self) -> None:
        super().__init__(embedding=nn.Embedding(11, 6), inner=Mlp())

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.linear(self.inner(self.embedding(tokens)), self.embedding.weight)


class Block(nn.Module):
    """Pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.norm2 = nn.Linear(width, width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))


class TinyGpt(nn.Module):
    """Tokens ``[rows, length]`` to logits ``[rows, length, 17]``."""

    def __init__(self, width: int = 8, depth: int = 2, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens, self.positions = nn.Embedding(17, width), nn.Parameter(torch.zeros(8, width))
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 17, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))
