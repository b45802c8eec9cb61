"""Odd uses of a model in training: each a program that runs the same on a plain model and on a sharded one.

A program is called for every rank and step, with what it may use: :class:`Around`. In plain PyTorch it runs for one
rank after the other, and gradients are the mean over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

WIDTH = 6


def data(rank: int, step: int, index: int = 0) -> Tensor:
    """A batch of one rank: ``[4, 6]`` in fp64."""
    generator = torch.Generator().manual_seed(10000 * rank + 100 * step + index)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())


class Net(nn.Module):
    """A first layer, four blocks with a normalisation, attention, a head; ``way`` says how the blocks are called."""

    def __init__(self, way: str = "plain") -> None:
        super().__init__()
        self.way = way
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(block() for _ in range(4)))
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.way.startswith("sequential"):
            x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=self.way.endswith("reentrant"))
        elif self.way == "two blocks":
            x = checkpoint(self.blocks[:2], x, use_reentrant=True)
            x = checkpoint(self.blocks[2:], x, use_reentrant=False)
        elif self.way == "on cpu":
            with save_on_cpu():
                x = self.blocks(x)
        else:
            x = self.blocks(x)
        if self.way != "no attention":  # whose kernel can be differentiated once
            x = x + self.attention(x[None], x[None], x[None], need_weights=False)[0][0]
        return self.head(x)


@dataclass
class Around:
    """What a program sees.

    Attributes:
        module: to be called: the user's own module, or the sharded one.
        model: the user's own module.
        optimizer: the user's own optimizer, or what stands in for it.
        backward: takes a loss of this rank and keywords of ``Tensor.backward``.
        rank: of this program.
        step: from 0.

    """

    module: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    backward: Callable[..., None]
    rank: int
    step: int


Program = Callable[[Around], None]


def square(value: Tensor) -> Tensor:
    return value.square().mean()


def usual(a: Around) -> None:
    a.backward(square(a.module(data(a.rank, a.step))))


def nothing(a: Around) -> None:
    """Before the step."""


@dataclass(frozen=True)
class Use:
    """One odd use.

    Attributes:
        program: the passes of a rank's step.
        build: makes the module.
        prepare: once, after sharding (in plain PyTorch, before training).
        refused: words of which each has to be in the error that this may raise instead of training as plain PyTorch;
            empty: it has to train.
    """

    program: Program = usual
    build: Callable[[], nn.Module] = Net
    prepare: Program = nothing
    refused: tuple[str, ...] = ()


def around_the_model(reentrant: bool) -> Program:
    def program(a: Around) -> None:
        x = data(a.rank, a.step).requires_grad_()
        a.backward(square(checkpoint(a.module, x, use_reentrant=reentrant)))

    return program


def on_cpu(a: Around) -> None:
    with save_on_cpu():
        loss = square(a.module(data(a.rank, a.step)))
    a.backward(loss)


def grad_inside_no_grad(a: Around) -> None:
    with torch.no_grad(), torch.enable_grad():
        loss = square(a.module(data(a.rank, a.step)))
    a.backward(loss)


def by_function(a: Around) -> None:
    out = torch.func.functional_call(a.module, {}, (data(a.rank, a.step),))
    a.backward(square(out))


def same_rows(a: Around) -> None:
    """On all ranks, since each writes into the rows that it reads."""
    a.backward(square(a.module(data(0, a.step))))


def mapped(a: Around) -> None:
    a.backward(square(torch.func.vmap(lambda x: a.model.blocks(x))(data(a.rank, a.step)[:, None])))  # type: ignore[operator]


def forward_mode(a: Around) -> None:
    x = data(a.rank, a.step)
    out, slope = torch.func.jvp(a.module, (x,), (torch.ones_like(x),))
    a.backward(square(out) + square(slope))


def grad_function(a: Around) -> None:
    slope = torch.func.grad(lambda x: a.module(x).sum())(data(a.rank, a.step))
    a.backward(square(a.module(slope)))


def hooks_on_parameters(a: Around) -> None:
    a.model.first.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[union-attr]


def hooks_after_accumulation(a: Around) -> None:
    def half(p: Tensor) -> None:
        p.grad = None if p.grad is None else p.grad * 0.5

    a.model.first.weight.register_post_accumulate_grad_hook(half)  # type: ignore[union-attr]


def hooks_on_modules(a: Around) -> None:
    a.model.blocks.register_forward_hook(lambda _, args, out: out * 2 + args[0])  # type: ignore[union-attr]
    a.model.blocks.register_full_backward_hook(lambda _, into, out: (into[0] * 3,))  # type: ignore[union-attr]
    a.model.head.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))  # type: ignore[union-attr]


def net_of(change: Callable[[Net], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        net = Net().double()
        change(net)
        return net

    return build


def normalise_weights(net: Net) -> None:
    parametrizations.weight_norm(net.first)
    parametrizations.orthogonal(net.head)


class Rows(nn.Module):
    """An embedding that writes into its weight in forward, where ``max_norm`` is given."""

    def __init__(self, max_norm: float | None) -> None:
        super().__init__()
        self.first = nn.Embedding(11, WIDTH, max_norm=max_norm)
        self.bag = nn.EmbeddingBag(11, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 4).long() % 11
        return self.head(self.first(tokens).mean(1) + self.bag(tokens))


class Recurrent(nn.Module):
    """GRU, convolution, group and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.conv = nn.Conv1d(2, 4, 3, padding=1, bias=False)
        self.norm, self.group = nn.BatchNorm1d(4, track_running_stats=False), nn.GroupNorm(2, 4)
        self.prelu = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.gru(x[:, None])[0].view(-1, 2, WIDTH)
        return self.prelu(self.group(self.norm(self.conv(x))))


USES: dict[str, Use] = {
    "usual": Use(),
    "sequential": Use(build=lambda: Net("sequential")),
    "sequential reentrant": Use(build=lambda: Net("sequential reentrant")),
    "two blocks": Use(build=lambda: Net("two blocks")),
    "reentrant around": Use(around_the_model(True)),
    "non-reentrant around": Use(around_the_model(False)),
    "saved on cpu": Use(on_cpu),
    "blocks saved on cpu": Use(build=lambda: Net("on cpu")),
    "recurrent saved on cpu": Use(on_cpu, build=Recurrent),
    "recurrent": Use(build=Recurrent),
    "grad inside no_grad": Use(grad_inside_no_grad),
    "functional_call": Use(by_function, refused=("functional_call",)),
    "vmap": Use(mapped, refused=("torch.func",)),
    "jvp": Use(forward_mode, build=lambda: Net("no attention"), refused=("torch.func",)),
    "func.grad": Use(grad_function, build=lambda: Net("no attention"), refused=("torch.func",)),
    "hook on a parameter": Use(prepare=hooks_on_parameters, refused=("first.weight",)),
    "hook after accumulation": Use(prepare=hooks_after_accumulation, refused=("grad",)),
    "hooks on modules": Use(prepare=hooks_on_modules),
    "parametrized": Use(build=net_of(normalise_weights)),
    "max_norm": Use(same_rows, build=lambda: Rows(0.5), refused=("first.weight",)),
    "embeddings": Use(build=lambda: Rows(None)),
}
