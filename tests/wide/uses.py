"""Odd uses of a model in training: each a program that runs the same on a plain model and on a sharded one.

A program is called for every rank and step, with what it may use: :class:`Around`. In plain PyTorch it runs for one
rank after the other, and gradients are the mean over ranks; what a program does between the last backward pass and the
step is done once there, by :attr:`Use.before_step`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

__all__ = ["USES", "Around", "Net", "Use", "data"]

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
        out: Tensor = self.head(x)
        return out


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
        kept: what a program keeps between steps.
    """

    module: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    backward: Callable[..., None]
    rank: int
    step: int
    kept: dict[str, object] = field(default_factory=dict)


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
        dropped: passes of every rank before those, whose gradients ``zero_grad`` drops; ``None``: there are none.
        prepare: once, after sharding (in plain PyTorch, before training).
        before_step: once a step, after the passes of all ranks.
        after_step: once a step, after the optimizer's.
        refused: words of which each has to be in the error that this may raise instead of training as plain PyTorch;
            empty: it has to train.
        must: it may not train: there is nothing that it could equal.
    """

    program: Program = usual
    build: Callable[[], nn.Module] = Net
    dropped: Program | None = None
    prepare: Program = nothing
    before_step: Program = nothing
    after_step: Program = nothing
    refused: tuple[str, ...] = ()
    must: bool = False


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


def evaluated_between(a: Around) -> None:
    a.module.eval()
    with torch.no_grad():
        before = a.module(data(a.rank, a.step, 1))
    with torch.inference_mode():
        a.module(data(a.rank, a.step, 2))
    a.module.train()
    a.backward(square(a.module(data(a.rank, a.step)) - before))


def forces(a: Around) -> None:
    """The gradient of the input is part of the loss, as in force fields."""
    x = data(a.rank, a.step).requires_grad_()
    energy = a.module(x).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    a.backward(square(force) + square(energy))


def one_graph_twice(a: Around) -> None:
    out = a.module(data(a.rank, a.step))
    a.backward(square(out), retain_graph=True)
    a.backward(out.abs().mean())


def two_forwards_one_backward(a: Around) -> None:
    one, two = a.module(data(a.rank, a.step)), a.module(data(a.rank, a.step, 1))
    a.backward(square(one - two))


def many_passes(a: Around) -> None:
    for index in range(3):
        a.backward(square(a.module(data(a.rank, a.step, index))) / 3)


def part_of_the_model(a: Around) -> None:
    a.backward(square(a.model.blocks[1](data(a.rank, a.step))))  # type: ignore[operator,index]


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


def another_pass(a: Around) -> None:
    a.backward(square(a.module(data(a.rank, a.step, 5))))


def clip_norm(a: Around) -> None:
    norm = torch.nn.utils.clip_grad_norm_(a.model.parameters(), 1e-2)
    assert float(norm) > 1e-2, f"clip_grad_norm_ returned {norm} for parameters of {type(a.model).__name__}"


def clip_value(a: Around) -> None:
    torch.nn.utils.clip_grad_value_(a.model.parameters(), 1e-3)


def halve_gradients(a: Around) -> None:
    for p in a.model.parameters():
        if p.grad is not None:
            p.grad *= 0.5


def assign_gradients(a: Around) -> None:
    for p in a.model.parameters():
        p.grad = torch.full_like(p, 0.125)


def read_norm(a: Around) -> None:
    total = sum(float(p.grad.norm()) for p in a.model.parameters() if p.grad is not None)
    assert total > 0, f"the gradients of all parameters have a norm of {total}"


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


def write_in_place(a: Around) -> None:
    with torch.no_grad():
        a.model.first.weight.mul_(0.5)  # type: ignore[union-attr,operator]


def give_data(a: Around) -> None:
    a.model.first.weight.data = torch.ones(WIDTH, WIDTH, dtype=torch.float64)  # type: ignore[union-attr]


def replace_a_module(a: Around) -> None:
    torch.manual_seed(5)
    a.model.head = nn.Linear(WIDTH, WIDTH).double()


def add_a_module(a: Around) -> None:
    torch.manual_seed(5)
    a.model.blocks.append(block().double())  # type: ignore[union-attr,operator]


def unfreeze(a: Around) -> None:
    a.model.first.requires_grad_(True)  # type: ignore[union-attr]


def freeze(a: Around) -> None:
    a.model.first.requires_grad_(False)  # type: ignore[union-attr]


def another_optimizer(a: Around) -> None:
    own = torch.optim.SGD(a.model.parameters(), lr=1.0)
    own.step()


def change_groups(a: Around) -> None:
    for group in a.optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] = 0.1


def reload(a: Around) -> None:
    a.module.load_state_dict({name: value * 0.5 for name, value in a.module.state_dict().items()})


def copy_of_the_model(a: Around) -> None:
    other = copy.deepcopy(a.model)
    a.backward(square(a.module(data(a.rank, a.step)) - other(data(a.rank, a.step)).detach()))


def net_of(change: Callable[[Net], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        net = Net().double()
        change(net)
        return net

    return build


def share_storage(net: Net) -> None:
    net.head.weight.data = net.first.weight.data


def tie(net: Net) -> None:
    net.head.weight = net.first.weight


def normalise_weights(net: Net) -> None:
    parametrizations.weight_norm(net.first)
    parametrizations.orthogonal(net.head)


def freeze_some(net: Net) -> None:
    net.first.requires_grad_(False)
    net.blocks[1][1].requires_grad_(False)
    net.spare = nn.Linear(3, 3)


class Rows(nn.Module):
    """An embedding that writes into its weight in forward, where ``max_norm`` is given."""

    def __init__(self, max_norm: float | None, sparse: bool = False) -> None:
        super().__init__()
        self.first = nn.Embedding(11, WIDTH, max_norm=max_norm, sparse=sparse)
        self.bag = nn.EmbeddingBag(11, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 4).long() % 11
        out: Tensor = self.head(self.first(tokens).mean(1) + self.bag(tokens))
        return out


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
        out: Tensor = self.prelu(self.group(self.norm(self.conv(x))))
        return out


HANDS = ("grad",)
"""An error about gradients that the user reads or writes says so."""

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
    "evaluated between": Use(evaluated_between),
    "forces": Use(forces, build=lambda: Net("no attention")),
    "one graph twice": Use(one_graph_twice),
    "two forwards": Use(two_forwards_one_backward),
    "many passes": Use(many_passes),
    "part of the model": Use(part_of_the_model),
    "functional_call": Use(by_function, refused=("functional_call",)),
    "vmap": Use(mapped, refused=("torch.func",)),
    "jvp": Use(forward_mode, build=lambda: Net("no attention"), refused=("torch.func",)),
    "func.grad": Use(grad_function, build=lambda: Net("no attention"), refused=("torch.func",)),
    "discarded": Use(dropped=another_pass),
    "clip norm": Use(before_step=clip_norm, refused=("update='backward'",)),
    "clip value": Use(before_step=clip_value, refused=HANDS),
    "halved gradients": Use(before_step=halve_gradients, refused=HANDS),
    "assigned gradients": Use(before_step=assign_gradients, refused=HANDS),
    "read norm": Use(before_step=read_norm, refused=HANDS),
    "hook on a parameter": Use(prepare=hooks_on_parameters, refused=("first.weight",)),
    "hook after accumulation": Use(prepare=hooks_after_accumulation, refused=HANDS),
    "hooks on modules": Use(prepare=hooks_on_modules),
    "written in place": Use(after_step=write_in_place, refused=("written",)),
    "data given": Use(after_step=give_data, refused=("first.weight",)),
    "replaced module": Use(after_step=replace_a_module, refused=("head.weight",), must=True),
    "added module": Use(after_step=add_a_module, refused=("blocks.4",), must=True),
    "unfrozen": Use(build=net_of(freeze_some), after_step=unfreeze, refused=("first.",), must=True),
    "frozen later": Use(after_step=freeze, refused=("first.",)),
    "another optimizer": Use(before_step=another_optimizer, refused=("optimizer",), must=True),
    "changed groups": Use(after_step=change_groups),
    "reloaded": Use(after_step=reload),
    "deep copy": Use(copy_of_the_model, refused=("copied",)),
    "shared storage": Use(build=net_of(share_storage), refused=("first.weight", "head.weight"), must=True),
    "tied": Use(build=net_of(tie)),
    "parametrized": Use(build=net_of(normalise_weights)),
    "frozen and unused": Use(build=net_of(freeze_some)),
    "max_norm": Use(same_rows, build=lambda: Rows(0.5), refused=("first.weight",)),
    "embeddings": Use(build=lambda: Rows(None)),
    "sparse": Use(build=lambda: Rows(None, sparse=True)),
}
