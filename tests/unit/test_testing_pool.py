"""shardwise.testing without processes: finding functions, pickling, comparing, the oracle."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from shardwise.testing import PlainRecipe, RankPool, assert_close, train_plain
from shardwise.testing.worker import dump, load, make_task
from tests.support.models import MODELS, make_batches


def double(x: int) -> int:
    return 2 * x


def test_tasks_carry_functions_by_name_and_arguments_by_value() -> None:
    task = make_task(double, (4,))
    assert pickle.loads(task.function) is double
    assert load(task.arguments) == (4,)
    assert task.label.endswith(":double")


def test_functions_without_a_name_are_refused() -> None:
    def nested() -> None: ...

    for fn in (lambda: None, nested):
        with pytest.raises(ValueError, match="top level of a module"):
            make_task(fn, ())


def test_pool_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="world_size=0"):
        RankPool(0)
    with pytest.raises(ValueError, match="timeout=0"):
        RankPool(1).run(double, 1, timeout=0)


def test_tied_parameters_stay_tied_and_modules_travel() -> None:
    model = MODELS["tied"].factory()
    copy = load(dump(model))
    assert copy.head.weight is copy.embedding.weight
    assert torch.equal(copy.head.weight, model.head.weight)


def test_close_passes_and_returns_the_error() -> None:
    expected = {"a": torch.tensor([1.0, -4.0]), "empty": torch.empty(0, 3), "n": torch.tensor(3)}
    assert assert_close(expected, expected, 0.0, "same") == 0.0
    actual = expected | {"a": torch.tensor([1.0, -4.0 + 4e-3])}
    assert assert_close(actual, expected, 2e-3, "near") == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        ({}, "missing: a"),
        ({"a": torch.ones(2, 2), "b": torch.ones(1)}, "extra: b"),
        ({"a": torch.ones(4)}, r"a: shape \(4,\), expected \(2, 2\)"),
        ({"a": torch.ones(2, 2, dtype=torch.float64)}, "a: torch.float64, expected torch.float32"),
        ({"a": torch.tensor([[1.0, 1.0], [math.nan, 9.0]])}, r"a\[1\]\[0\]: got nan, expected 1.0"),
        ({"a": torch.tensor([[1.0, 1.0], [math.inf, 9.0]])}, r"a\[1\]\[0\]: got inf, expected 1.0"),
        ({"a": torch.tensor([[1.0, 1.1], [1.0, 1.3]])}, r"a\[1\]\[1\]: got 1.29\d*, expected 1.0, relative error 0.3"),
    ],
)
def test_every_kind_of_difference_fails(actual: dict[str, Tensor], message: str) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        assert_close(actual, {"a": torch.ones(2, 2)}, 0.05, "what")
    assert str(caught.value).startswith("what:")


def test_expected_nan_fails_and_equal_infinities_pass() -> None:
    nan = {"a": torch.tensor([math.nan, 1.0])}
    with pytest.raises(AssertionError):
        assert_close(nan, nan, 1.0, "nan")
    inf = {"a": torch.tensor([math.inf, -math.inf, 2.0])}
    assert assert_close(inf, inf, 0.0, "inf") == 0.0
    with pytest.raises(AssertionError):
        assert_close({"a": -inf["a"]}, inf, 1e9, "wrong sign")
    with pytest.raises(AssertionError):
        assert_close({"a": torch.ones(1)}, {"a": torch.zeros(1)}, 1.0, "nothing expected")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def test_oracle_rounds_half_gradients_once() -> None:
    """Gradients 1, 2**-8 and 2**-8 on three ranks: a sum in bf16 would lose the small ones, one in fp32 does not."""
    case_batches = [[[torch.tensor([value]) for value in (1.0, 2.0**-8, 2.0**-8)]]]

    def factory() -> nn.Module:
        layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(layer.weight, 1.0)
        return layer

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum()  # type: ignore[no-any-return]

    run = train_plain(factory, loss, sgd, case_batches, PlainRecipe(param_dtype=torch.bfloat16))
    once, lossy = (float(torch.tensor(total / 3).bfloat16()) for total in (1.0 + 2.0**-7, 1.0))
    assert run.gradients[0]["weight"].item() == once != lossy
    assert run.masters[0]["weight"].dtype is torch.float32
    assert run.parameters[0]["weight"].dtype is torch.bfloat16


def test_oracle_skips_an_overflow_under_a_loss_scale() -> None:
    case = MODELS["mlp"]
    batches = make_batches(case, 1, steps=1)
    recipe = PlainRecipe(param_dtype=torch.float16, loss_scale=2.0**30)
    run = train_plain(case.factory, case.loss, sgd, batches, recipe)
    assert run.skipped == [True]
    assert_close(run.masters[0], dict(case.factory().named_parameters()), 0.0, "unchanged")
