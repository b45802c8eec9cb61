"""A backward pass in two is the same one: what is made later, what is made at once, and what is computed again.

What stands for the result of a pass that failed is no result, and a session whose ranks lost each other is over.
"""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.core.parallel.pipeline import Passes, StageRun, WeightGradients, make_schedule, split_batch, stage_model
from shardwise.core.parallel.pipeline.run import is_sentinel, sentinel
from shardwise.core.parallel.pipeline.split import WeightsApart
from shardwise.testing import assert_close
from tests.support.hybrid_setup import made
from tests.support.on_ranks import raises

IDS = torch.arange(12).view(2, 6)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("again", [None, False, True], ids=["kept", "again", "reentrant"])
def test_both_halves_are_the_whole(kind: str, again: bool | None) -> None:
    model: Any = made(kind)
    expected = copy.deepcopy(model)
    expected(input_ids=IDS, labels=IDS).loss.backward()
    products = [m for m in model.modules() if isinstance(m, nn.Linear) or hasattr(m, "nf")]
    model.get_input_embeddings().weight.register_hook(lambda grad: 2 * grad)
    expected.get_input_embeddings().weight.grad *= 2
    for layer in model.modules():
        if again is not None and hasattr(layer, "gradient_checkpointing"):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=again)
    apart, later, passes = WeightsApart(), WeightGradients(), Passes()
    with apart:
        loss = model(input_ids=IDS, labels=IDS).loss
    with apart.into(later):
        passes.inputs(loss, None, later)
    parts = {id(param) for module in products for param in module.parameters(recurse=False)}
    early = {id(param) for param in model.parameters() if param.grad is not None}
    assert early and early & parts <= {id(model.get_input_embeddings().weight)}  # a tied head, used as one, too
    assert len(later._left) == len(parts) > 10
    passes.weights(later)
    assert not later._left
    assert_close(gradients(model), gradients(expected), 1e-12, kind)


def test_what_cannot_be_made_later_is_made_at_once() -> None:
    """Frozen weights, inputs without a gradient, products with what is no parameter itself, autocast."""
    frozen, first, last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    frozen.weight.requires_grad_(False)
    x = torch.randn(4, 3)
    apart, later = WeightsApart(), WeightGradients()
    with apart:
        hidden = frozen(first(x)) @ torch.eye(3)
        hidden = nn.functional.linear(hidden, 2 * last.weight)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = last(hidden)
    with apart.into(later):
        Passes().inputs(hidden.float().sum(), None, later)
    assert not later._left
    assert all(p.grad is not None for m in (first, last) for p in m.parameters())
    assert frozen.bias.grad is not None and frozen.weight.grad is None


def test_a_gradient_inside_of_a_forward_pass_is_refused() -> None:
    layer, x = nn.Linear(3, 1), torch.randn(2, 3, requires_grad=True)
    with WeightsApart(), pytest.raises(RuntimeError, match=r"a stage's \(1, 3\) weight outside of the schedule's"):
        torch.autograd.grad(layer(x).sum(), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_void_is_known_and_no_result_is_taken_for_one(dtype: torch.dtype) -> None:
    for shape in ((2, 3), (1,), (5,)):
        x = sentinel(torch.Size(shape), dtype, torch.device("cpu"))
        assert x.dtype == dtype and x.shape == shape and is_sentinel(x) and x.isnan().all()
        nans = torch.full(shape, float("nan"), dtype=dtype)
        infinite = torch.full(shape, float("inf"), dtype=dtype)
        for other in (nans, -nans, infinite - infinite, 0 * infinite, torch.zeros(shape, dtype=dtype)):
            assert not is_sentinel(other)
    assert not is_sentinel(sentinel(torch.Size((2,)), torch.int64, torch.device("cpu")))
    assert not is_sentinel(torch.zeros(0))


def test_an_interrupt_ends_the_session_and_an_error_does_not() -> None:
    model: Any = made("llama")
    ids = torch.arange(6).view(2, 3)
    staging = stage_model(model, 0, 1, 2)
    staging.install()
    run, parts = StageRun(staging, None), split_batch({"input_ids": ids, "labels": ids}, 2, None)
    schedule, raised = make_schedule("interleaved", 1, 2, 2), list[BaseException]()

    def criterion(outputs: Any, _inputs: Any) -> torch.Tensor:
        if raised:
            raise raised.pop()
        return outputs.loss

    raised.append(ZeroDivisionError("no"))
    with pytest.raises(ZeroDivisionError) as error:
        run.step(schedule, parts, criterion, Passes())
    assert "call zero_grad() on every rank" in error.value.__notes__[0]
    assert run.step(schedule, parts, criterion, Passes()).loss is not None
    raised.append(KeyboardInterrupt())
    raises(KeyboardInterrupt, None, lambda: run.step(schedule, parts, criterion, Passes()))
    told = r"ended in KeyboardInterrupt: .*the session is over"
    raises(RuntimeError, told, run.step, schedule, parts, criterion, Passes())
