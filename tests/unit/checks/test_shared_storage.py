"""Tests of ``check_no_shared_storage``: it refuses distinct parameters that share memory, and accepts adjacent views of
one buffer.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardwise.core.checks.shared_storage import check_no_shared_storage
from shardwise.core.deferred import deferred_init
from shardwise.plan import replicated
from shardwise.session import build
from tests.support.models import MODELS
from tests.support.on_ranks import raises


class Two(nn.Module):
    """A module with a parameter ``a`` and ``b = make_b(a)``."""

    def __init__(self, make_b: Callable[[nn.Parameter], torch.Tensor], trainable: bool = True) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 6), requires_grad=trainable)
        self.b = nn.Parameter(make_b(self.a), requires_grad=trainable)


class Attribute(nn.Module):
    """A module with a parameter ``a`` whose submodule has the plain attribute ``attribute(a)``, and a buffer."""

    def __init__(self, attribute: Callable[[nn.Parameter], object], trainable: bool = True) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 6), requires_grad=trainable)
        self.inner = nn.Linear(6, 6)
        self.inner.register_buffer("own", torch.zeros(3))
        self.inner.plain = attribute(self.a)  # type: ignore[assignment]


def buffered(trainable: bool) -> nn.Module:
    model = Two(lambda a: torch.ones(1), trainable)
    model.register_buffer("view", model.a.data[1:])
    return model


def by_data() -> nn.Module:
    model = nn.ModuleDict({"e": nn.Embedding(5, 3), "d": nn.Linear(3, 5)})
    model["d"].weight.data = model["e"].weight.data
    return model


def columns(first: slice, second: slice) -> nn.Module:
    whole, model = torch.randn(4, 6), nn.Module()
    model.a, model.b = nn.Parameter(whole[:, first]), nn.Parameter(whole[:, second])
    return model


def flattened() -> nn.Module:
    """Return an LSTM with all parameters in one flat buffer, as torch and users make it."""
    model = nn.LSTM(3, 4, num_layers=2)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    start = 0
    for param in model.parameters():
        param.data = flat[start : start + param.numel()].view(param.shape)
        start += param.numel()
    return model


SHARED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "data": (by_data, "e.weight (5, 3)", "d.weight (5, 3)"),
    "part": (lambda: Two(lambda a: a.detach()[1:3]), "a (4, 6)", "b (2, 6)"),
    "columns_that_meet": (lambda: columns(slice(0, 4), slice(3, 6)), "a (4, 4)", "b (4, 3)"),
    "foreign_storage": (lambda: Two(lambda a: torch.from_numpy(a.detach().numpy())), "a (4, 6)", "b (4, 6)"),
    "other_dtype": (lambda: Two(lambda a: a.detach().view(torch.float64)), "a (4, 6)", "b (4, 3)"),
    "buffer": (lambda: buffered(trainable=True), "buffer view (3, 6)", "parameter a"),
    "attribute": (lambda: Attribute(lambda a: a.detach()), "attribute inner.plain (4, 6)", "parameter a"),
    "in_a_list": (lambda: Attribute(lambda a: [1, a.data[0]]), "attribute inner.plain[1] (6,)", "parameter a"),
    "in_a_dict": (lambda: Attribute(lambda a: {"b": a.data}), "attribute inner.plain['b'] (4, 6)", "parameter a"),
}
APART: dict[str, Callable[[], nn.Module]] = {
    "flattened": flattened,
    "even_and_odd": lambda: columns(slice(0, 6, 2), slice(1, 6, 2)),
    "empty": lambda: Two(lambda a: a.detach()[:0]),
    "buffer_of_a_frozen_one": lambda: buffered(trainable=False),
    "attribute_of_a_frozen_one": lambda: Attribute(lambda a: a.detach(), trainable=False),
    "own_memory": lambda: Attribute(lambda a: {"a": a.detach().clone(), "n": a.numel()}),
    "left_by_a_pass": lambda: Attribute(lambda a: a.view(-1)),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_memory_error_has_both_names(name: str) -> None:
    make, *words = SHARED[name]
    raised = raises(ValueError, "before sharding", lambda: check_no_shared_storage(make()))
    assert all(word in raised for word in words), raised


@pytest.mark.parametrize("name", sorted(SHARED.keys() - {"foreign_storage", "other_dtype"}))
def test_shared_memory_of_deferred_models_is_refused(name: str) -> None:
    """In a deferred model, plain attributes that alias a parameter are refused, too."""
    of_attribute = name in ("attribute", "in_a_list", "in_a_dict")
    for early in (torch.device("meta"), *([] if of_attribute else [deferred_init()])):
        with early:
            model = SHARED[name][0]()
        raises(ValueError, "before sharding", check_no_shared_storage, model)


ACCEPTED = {**APART, **{name: case.factory for name, case in MODELS.items()}}
"""Adjacent views of one buffer, and models that share a parameter object."""


@pytest.mark.parametrize("name", ACCEPTED)
def test_parameters_without_shared_memory_are_accepted(name: str) -> None:
    with deferred_init():
        later = ACCEPTED[name]()
    for model in (ACCEPTED[name](), later):
        assert check_no_shared_storage(model) is None  # type: ignore[func-returns-value]


def test_build_leaves_a_refused_model_unchanged() -> None:
    model = by_data()
    before = model["e"].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raises(ValueError, r"e\.weight .* and d\.weight", build, model, optimizer, replicated())
    with torch.no_grad():
        model["d"].weight.add_(1.0)
    torch.testing.assert_close(model["e"].weight, before + 1.0)
