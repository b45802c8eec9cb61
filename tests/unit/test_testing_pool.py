"""shardwise.testing without processes: finding functions, pickling, comparing, counting, the models."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from shardwise.testing import PlainRecipe, RankPool, assert_close, compare, train_plain
from shardwise.testing.worker import dump, load, make_task
from tests.support.counters import live_tensor_bytes, live_tensors
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


def test_worst_comes_first_and_the_floor_counts() -> None:
    expected = {"small": torch.tensor([1e-12]), "big": torch.tensor([10.0]), "nan": torch.tensor([1.0])}
    actual = {"small": torch.tensor([2e-12]), "big": torch.tensor([11.0]), "nan": torch.tensor([math.nan])}
    assert [d.name for d in compare(actual, expected)] == ["nan", "small", "big"]
    assert [d.name for d in compare(actual, expected, floor=1.0)] == ["nan", "big", "small"]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_are_the_same_everywhere(name: str) -> None:
    case = MODELS[name]
    first = case.factory()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = case.factory()
    assert torch.equal(before, torch.get_rng_state()), "the caller's random numbers are left alone"
    assert torch.get_default_dtype() is torch.float32
    assert_close(dict(second.named_parameters()), dict(first.named_parameters()), 0.0, "parameters")
    wide = case.factory(torch.float64)
    assert_close(dict(first.named_parameters()), dict(wide.named_parameters()), 1e-2, "fp64", check_dtype=False)
    losses = [float(case.loss(model, case.batch(5)).detach()) for model in (first, second)]
    assert losses[0] == losses[1]
    other = float(case.loss(first, case.batch(6)).detach())
    assert other != losses[0]


def test_models_keep_their_promises() -> None:
    def named(name: str) -> dict[str, nn.Parameter]:
        return dict(MODELS[name].factory().named_parameters())

    assert not named("non_contiguous")["weight"].is_contiguous()
    assert named("scalar")["temperature"].shape == ()
    assert named("zero_sized")["nothing"].numel() == 0
    assert {p.dtype for p in named("mixed_bf16").values()} == {torch.float32, torch.bfloat16}
    assert {p.dtype for p in named("mixed_fp64").values()} == {torch.float32, torch.float64}
    assert any(not p.requires_grad for p in named("frozen").values())
    model = MODELS["buffers"].factory().train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    MODELS["buffers"].loss(model, MODELS["buffers"].batch(0)).backward()
    assert_close(dict(model.named_buffers()), before, 0.0, "statistics stay")
    steps = make_batches(MODELS["mixture"], 4, steps=3)
    choices = {batch["args"][1] for step in steps for micro in step for batch in micro}
    assert choices == {0, 1, 2}


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


def test_oracle_refuses_uneven_ranks() -> None:
    case = MODELS["mlp"]
    with pytest.raises(ValueError, match=r"\[1, 2\] ranks"):
        train_plain(case.factory, case.loss, sgd, [*make_batches(case, 1, steps=1), *make_batches(case, 2, steps=1)])


def count_storages() -> None:
    before = live_tensor_bytes()
    x = torch.zeros(1000, requires_grad=True)
    views = [x[:10], x.detach().view(10, 100), torch.zeros(1).expand(5000)]
    assert live_tensor_bytes() - before == 4000 + 4
    x.grad = torch.zeros(1000)
    assert live_tensor_bytes("cpu") - before == 8000 + 4
    assert live_tensor_bytes("meta") == 0
    assert sum(tensor is x for tensor in live_tensors()) == 1
    del x, views
    assert live_tensor_bytes() == before


def test_live_bytes_count_storages_once() -> None:
    # In a fresh process: what earlier tests left behind must not go while this one counts.
    with RankPool(1) as pool:
        pool.run(count_storages)
