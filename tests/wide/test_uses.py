"""Odd uses under every plan, on two ranks in fp64: as in plain PyTorch, or an error that names the thing.

Compared are the losses, and after every step all parameters and buffers. NaN is never equal.

Quick: every use once, under two plans by turns. Full: every use under both. Campaign: under every plan.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from shardwise.core.mesh import Mesh
from shardwise.plan import Plan
from shardwise.session import Session, build
from shardwise.testing import RankError, assert_close, run_ranks
from tests.support.sets import campaign, full
from tests.wide.architectures import PLANS, plan_of

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


RTOL, STEPS, RANKS = 1e-10, 3, 2
SHOWN = 600


@dataclass
class Trained:
    """Losses of one rank, its state after every step, and how it ended where it did not train."""

    losses: list[float] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    error: str = ""


def _made(use: Use) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The use's module in fp64, and an optimizer with an epsilon of its learning rate where it has one."""
    torch.manual_seed(0)
    model = use.build().double()
    return model, torch.optim.Adam(model.parameters(), lr=0.02, eps=0.02)


def _parameters(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: state[name].detach().clone() for name, _ in model.named_parameters()}


@functools.cache
def plainly(name: str) -> list[Trained]:
    """By rank, one rank after the other in one process; the states are the same."""
    use = USES[name]
    model, optimizer = _made(use)
    found = [Trained() for _ in range(RANKS)]

    def around(rank: int, step: int) -> Around:
        def backward(loss: Tensor, **options: bool) -> None:
            found[rank].losses.append(float(loss.detach()))
            (loss / RANKS).backward(**options)  # type: ignore[no-untyped-call]

        return Around(model, model, optimizer, backward, rank, step)

    use.prepare(around(0, 0))
    for step in range(STEPS):
        for rank in range(RANKS):
            use.program(around(rank, step))
        optimizer.step()
        optimizer.zero_grad()
        for each in found:
            each.states.append(_parameters(model, model.state_dict()))
    return found


def _train(use: Use, plan: Plan, mesh: Mesh, found: Trained, sessions: list[Session]) -> None:
    model, own = _made(use)
    session = build(model, own, plan, mesh)
    sessions.append(session)
    optimizer = session.optimizer

    def around(step: int) -> Around:
        def backward(loss: Tensor, **options: bool) -> None:
            found.losses.append(float(loss.detach()))
            optimizer.backward(loss, **options)

        return Around(session.module, model, optimizer, backward, session.mesh.rank, step)

    use.prepare(around(0))
    for step in range(STEPS):
        use.program(around(step))
        optimizer.step()
        optimizer.zero_grad()
        found.states.append(_parameters(model, session.module.state_dict()))


def train_uses(names: Sequence[str], plan_name: str, directory: str) -> list[Trained]:
    """On each rank, a use after the other. Those that may be refused have a mesh of their own: an error may leave one
    unusable."""
    with warnings.catch_warnings(action="ignore"):
        return _train_uses(names, plan_name, directory)


def _train_uses(names: Sequence[str], plan_name: str, directory: str) -> list[Trained]:
    torch.set_num_threads(1)
    plan = plan_of(plan_name, directory)
    shared = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm)
    found = []
    for name in names:
        found.append(Trained())
        sessions: list[Session] = []
        own = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm) if USES[name].refused else None
        try:
            _train(USES[name], plan, own or shared, found[-1], sessions)
        except Exception as error:  # which it may be is the caller's to say
            found[-1].error = f"{type(error).__name__}: {error}"
        for session in sessions:
            session.close()
        if own is not None:
            own.close()
    shared.close()
    return found


def _wrong(name: str, by_rank: Sequence[Trained]) -> str:
    """What is neither as in plain PyTorch nor an error that may be; empty where all is well."""
    use = USES[name]
    errors = [trained.error for trained in by_rank]
    if any(errors):
        if not all(errors):
            return f"an error on some ranks only: {errors}"
        named = use.refused and all(word in error for error in errors for word in use.refused)
        return "" if named else f"an error that does not name {use.refused}: {errors[0][:SHOWN]}"

    try:
        for rank, (trained, plain) in enumerate(zip(by_rank, plainly(name), strict=True)):
            assert trained.losses == pytest.approx(plain.losses, rel=RTOL), f"losses of rank {rank}"
            for step, (state, expected) in enumerate(zip(trained.states, plain.states, strict=True)):
                assert_close(state, expected, RTOL, f"rank {rank} after step {step}")
    except AssertionError as error:
        return str(error)[:SHOWN]
    return ""


def wrong(names: Sequence[str], plan: str, folder: Path) -> dict[str, str]:
    """By use; where a rank dies or hangs, each use is tried alone."""
    try:
        results = run_ranks(RANKS, train_uses, list(names), plan, str(folder), timeout=60.0 + 4.0 * len(names))
    except RankError as error:
        if len(names) == 1:
            return {names[0]: str(error)[:SHOWN]}
        return {name: text for one in names for name, text in wrong([one], plan, folder).items()}
    found = {name: _wrong(name, [result[index] for result in results]) for index, name in enumerate(names)}
    return {name: text for name, text in found.items() if text}


FIRST, OTHERS = list(USES)[::2], list(USES)[1::2]


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        pytest.param("zero2", FIRST, id="zero2-first"),
        pytest.param("zero3", OTHERS, id="zero3-others"),
        *full(pytest.param("zero2", OTHERS, id="zero2-others"), pytest.param("zero3", FIRST, id="zero3-first")),
        *campaign(*(pytest.param(p, list(USES), id=p) for p in PLANS if p not in ("zero2", "zero3"))),
    ],
)
def test_odd_uses_train_as_plain_or_are_refused(plan: str, names: list[str], tmp_path: Path) -> None:
    found = wrong(names, plan, tmp_path)
    assert not found, "\n".join(f"{name}: {text}" for name, text in found.items())
