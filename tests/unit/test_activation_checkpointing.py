"""deepspeed.checkpointing: the same bits as without it, however arguments are kept, and where their bytes are."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.deepspeed import activations, checkpointing
from shardwise.trace.tracker import TensorTracker

Options = dict[str, Any]
WAYS: dict[str, Options] = {
    "as they are": {},
    "host": {"checkpoint_in_cpu": True},
    "contiguous": {"contiguous_checkpointing": True, "num_checkpoints": 2},
    "contiguous, growing": {"contiguous_checkpointing": True},
    "contiguous on the host": {"contiguous_checkpointing": True, "checkpoint_in_cpu": True, "synchronize": True},
}


pytestmark = pytest.mark.usefixtures("frozen")


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    yield
    checkpointing._PRESENT.__init__()  # type: ignore[misc]


class Block(nn.Module):
    """Dropout, keyword and non-tensor arguments, a container, and a checkpoint inside."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.nested = nested

    def inner(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(self.up(x)), 0.3, self.training)

    def forward(self, x: Tensor, power: int, pair: tuple[Tensor, str], *, scale: Tensor, mask: Tensor) -> Any:
        hidden = call(self.inner, x) if self.nested else self.inner(x)
        out = x + scale * self.down(hidden) ** power + pair[0]
        return out.masked_fill(mask, 0.0), {"norm": hidden.square().mean()}, pair[1]


USED: dict[str, Callable[..., Any]] = {"checkpoint": checkpointing.checkpoint}


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return USED["checkpoint"](function, *args, **kwargs)


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class Net(nn.Module):
    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(nested) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, extra, total = self.first(x), x.detach()[:, :1].expand(-1, 6), torch.zeros(())
        scale = torch.linspace(0.5, 1.0, 6, requires_grad=True)
        for block in self.blocks:
            x, more, name = call(block, x, 2, (extra, "n"), scale=scale, mask=x > 2.0)
            total = total + more["norm"]
            assert name == "n"
        return x.square().mean() + total


def gradients(model: nn.Module, steps: int, checkpoint: Callable[..., Any]) -> tuple[list[Tensor], Tensor]:
    """Of several forward passes before several backward passes, with their random numbers; and what comes next."""
    USED["checkpoint"] = checkpoint
    model = copy.deepcopy(model)
    torch.manual_seed(3)
    found = []
    for _ in range(steps):
        x = torch.randn(4, 6, requires_grad=True)
        losses = [model(x), model(x.t().contiguous().t())]
        for loss in losses:
            loss.backward()
        found += [x.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]
    return found, torch.rand(3)  # type: ignore[return-value]


@pytest.mark.parametrize(("way", "nested"), list(itertools.product(WAYS, (False, True))))
def test_gradients_and_random_numbers_equal_those_without_checkpointing(way: str, nested: bool) -> None:
    torch.manual_seed(1)
    model = Net(nested)
    expected, after = gradients(model, 2, plainly)
    if WAYS[way]:
        checkpointing.configure(None, **WAYS[way])
    assert checkpointing.is_configured() == bool(WAYS[way])
    found, found_after = gradients(model, 2, checkpointing.checkpoint)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected)), way
    assert torch.equal(found_after, after)
    gc.collect()
    held = checkpointing.held_bytes()
    assert (held["device"], held["host"]) == (0, 0), "everything is given back when the graphs are gone"


def test_a_function_is_called_again_in_backward_and_not_without_gradients() -> None:
    calls = []

    def count(x: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return (x * x).exp()

    x = torch.ones(3, requires_grad=True)
    for options in WAYS.values():
        checkpointing.configure(None, **options)
        with torch.no_grad():
            assert not checkpointing.checkpoint(count, x).requires_grad
        with torch.inference_mode():
            checkpointing.checkpoint(count, x)
        assert calls == [False, False]
        value = checkpointing.checkpoint(count, x)
        value.sum().backward(retain_graph=True)
        value.sum().backward()
        assert calls[2:] in ([True, True], [True, True, True])
        calls.clear()


LAYOUTS = {
    "transposed": torch.randn(4, 6).t(),
    "channels last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "with gaps": torch.randn(4, 12)[:, ::2],
    "a slice": torch.randn(9, 4)[2:5],
    "expanded": torch.randn(4, 1).expand(4, 5),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "bf16": torch.randn(5).bfloat16(),
    "windows": torch.randn(9).unfold(0, 4, 1),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("way", ["host", "contiguous"])
def test_arguments_come_back_with_shape_strides_and_bits(name: str, way: str) -> None:
    value, seen = LAYOUTS[name], []
    checkpointing.configure(None, **WAYS[way])

    def look(x: Tensor, weight: Tensor) -> Tensor:
        seen.append((x.shape, x.stride(), x.dtype, x.requires_grad, x.detach().clone()))
        return x.float().sum() * weight * weight

    checkpointing.checkpoint(look, value, torch.ones((), requires_grad=True)).backward()
    first, again = seen
    assert first[:4] == again[:4] and torch.equal(first[4], again[4])


def test_a_change_after_the_call_is_no_part_of_the_recomputation() -> None:
    checkpointing.configure(None, checkpoint_in_cpu=True)
    x, weight = torch.full((3,), 2.0), torch.ones(3, requires_grad=True)
    value = checkpointing.checkpoint(lambda a, b: (a * b).square().sum(), x, weight)
    x.zero_()
    value.backward()
    assert torch.equal(weight.grad, torch.full((3,), 8.0))  # type: ignore[arg-type]


WIDTH, ROWS = 64, 32
ONE = WIDTH * ROWS * 4  # bytes of one activation


def deep(layers: int) -> tuple[Tensor, list[Tensor]]:
    weights = [torch.full((WIDTH,), 1.001, requires_grad=True) for _ in range(layers)]
    x = torch.ones(ROWS, WIDTH)
    for weight in weights:
        x = checkpointing.checkpoint(lambda a, b: torch.sin(a * b).exp(), x, weight)
    return x, weights


def test_memory_moves_to_the_host_and_is_counted() -> None:
    checkpointing.configure(None)
    with TensorTracker(torch.device("cpu")) as tracker:
        before = tracker.live_bytes
        x, weights = deep(6)
        kept = tracker.live_bytes - before
        del x, weights
    small = 7 * WIDTH * 4
    assert 7 * ONE <= kept <= 7 * ONE + small
    checkpointing.configure(None, checkpoint_in_cpu=True)
    with TensorTracker(torch.device("cpu")) as tracker:
        before = tracker.live_bytes
        x, _weights = deep(6)
        # On a CPU the device is what operations allocate: the last output is there, the six inputs are not.
        assert ONE <= tracker.live_bytes - before <= ONE + small
        held = checkpointing.held_bytes()
        # The weights are arguments too.
        assert held == {"device": 0, "host": 6 * ONE + 6 * WIDTH * 4, "to_host": 6 * ONE + 6 * WIDTH * 4}
        x.sum().backward()
    del x
    gc.collect()
    assert checkpointing.held_bytes()["host"] == 0 < checkpointing.held_bytes()["to_host"]
    checkpointing.reset()
    assert checkpointing.held_bytes() == {"device": 0, "host": 0, "to_host": 0}


def test_a_call_inside_another_keeps_nothing_of_its_own() -> None:
    checkpointing.configure(None, checkpoint_in_cpu=True)
    weight = torch.full((WIDTH,), 1.001, requires_grad=True)

    def inner(x: Tensor) -> Tensor:
        return torch.sin(x * weight)

    def outer(x: Tensor) -> Tensor:
        return checkpointing.checkpoint(inner, checkpointing.checkpoint(inner, x))

    y = checkpointing.checkpoint(outer, torch.ones(ROWS, WIDTH))
    assert checkpointing.held_bytes()["host"] == ONE
    y.sum().backward()
    assert checkpointing.held_bytes()["to_host"] == ONE


def test_contiguous_buffers_are_used_again_and_given_back() -> None:
    made: list[int] = []
    allocate = activations._allocate

    def counted(numel: int, *rest: Any) -> Tensor:
        made.append(numel)
        return allocate(numel, *rest)

    activations._allocate = counted  # type: ignore[assignment]
    try:
        for number, sizes in ((4, [4, 4]), (None, [1, 1, 2, 4])):
            checkpointing.configure(None, contiguous_checkpointing=True, num_checkpoints=number)
            for _ in range(3):
                x, _ = deep(5)
                x.sum().backward()
                del x
                gc.collect()
            assert [n // (WIDTH * ROWS) for n in made if n >= WIDTH * ROWS] == sizes, "made once, in the first step"
            made.clear()
            checkpointing.reset()
            deep(1)
            assert made, "reset gave the buffers back"
            made.clear()
    finally:
        activations._allocate = allocate


def test_tensors_of_a_buffer_lie_side_by_side() -> None:
    checkpointing.configure(None, contiguous_checkpointing=True, num_checkpoints=3)
    keeper = checkpointing._PRESENT.keeper
    assert keeper is not None
    kept = [keeper.keep(torch.full((8,), float(i))) for i in range(3)]
    starts = [each._kept.data_ptr() for each in kept]
    assert [start - starts[0] for start in starts] == [0, 32, 64]
    assert [each.restore()[0].item() for each in kept] == [0.0, 1.0, 2.0]


def test_without_a_group_activations_are_kept_whole_and_a_warning_says_so_once() -> None:
    with pytest.warns(UserWarning, match="without a model-parallel group") as caught:
        for _ in range(3):
            checkpointing.configure(None, partition_activations=True)
    assert len(caught) == 1
    assert checkpointing._PRESENT.keeper is not None and not checkpointing._PRESENT.keeper.changes_anything
    with pytest.warns(UserWarning, match="num_checkpoints=3 has no effect"):
        checkpointing.configure(None, num_checkpoints=3)


def test_a_configuration_and_arguments_before_it() -> None:
    block = {"cpu_checkpointing": True, "contiguous_memory_optimization": True, "number_checkpoints": 7}
    given = {"activation_checkpointing": block, "optimizer": {"type": "Adam", "params": {"lr": "auto"}}}
    before = copy.deepcopy(given)
    checkpointing.configure(None, given)
    keeper = checkpointing._PRESENT.keeper
    assert keeper is not None and keeper.host and keeper._buffers is not None and keeper._buffers._number == 7
    checkpointing.configure(None, given, checkpoint_in_cpu=False, num_checkpoints=2)
    keeper = checkpointing._PRESENT.keeper
    assert keeper is not None and not keeper.host and keeper._buffers is not None and keeper._buffers._number == 2
    assert given == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_checkpoints": 0, "contiguous_checkpointing": True}, "num_checkpoints=0"),
        ({"mpu_": 3, "partition_activations": True}, "mpu_=3: give a process group"),
        ({"deepspeed_config": {"activation_checkpointing": {"cpu_chekpointing": True}}}, "did you mean 'cpu_checkp"),
        ({"deepspeed_config": {"activation_checkpointing": {"number_checkpoints": 0}}}, "number_checkpoints=0"),
    ],
)
def test_wrong_options_change_nothing(arguments: Options, message: str) -> None:
    checkpointing.configure(None, checkpoint_in_cpu=True)
    keeper = checkpointing._PRESENT.keeper
    with pytest.raises(ValueError, match=message):
        checkpointing.configure(**arguments)
    assert checkpointing._PRESENT.keeper is keeper


def test_profile_logs_each_call_and_its_recomputation(capsys: pytest.CaptureFixture[str]) -> None:
    checkpointing.configure(None, profile=True)
    model = nn.Linear(3, 3)
    checkpointing.checkpoint(model, torch.ones(3)).sum().backward()
    checkpointing.checkpoint(nn.functional.silu, torch.ones(3, requires_grad=True)).sum().backward()
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit(":", 1)[0] for line in lines] == [
        "forward of Linear",
        "recomputation of Linear",
        "forward of silu",
        "recomputation of silu",
    ]
    assert all(float(line.rsplit(": ", 1)[1].removesuffix(" ms")) >= 0 for line in lines)


def test_an_error_inside_is_raised_and_leaves_nothing_behind() -> None:
    checkpointing.configure(None, checkpoint_in_cpu=True)

    def broken(x: Tensor) -> Tensor:
        raise ArithmeticError("inside")

    with pytest.raises(ArithmeticError, match="inside"):
        checkpointing.checkpoint(broken, torch.ones(5, requires_grad=True))
    gc.collect()
    assert checkpointing.held_bytes()["host"] == 0
    keeper = checkpointing._PRESENT.keeper
    assert keeper is not None and not keeper.inside
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpointing.configure(None)
