"""Layers cut over an axis against the same model whole, in fp64: loss, all gradients, gradients of gradients, bytes."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from shardwise.core.parallel.tensor import Axis, ShardSpec, TPPlan, parts_of, vocabulary_cross_entropy
from shardwise.testing import assert_close, run_ranks
from tests.support.cut_setup import VOCABULARY, Model, Parts, batch, made, rows_of
from tests.support.scope import Scope
from tests.support.sets import full


def cut_model(model: Model, axis: Axis, gathers: bool) -> ShardSpec:
    tp_plan = TPPlan(axis)
    Parts(gathers).collect(model, tp_plan)
    tp_plan.cut_values()
    tp_plan.install()
    return rows_of(axis.size)


def whole(model: Model, axis: Axis, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the ranks' parts are together, by name; unpadded."""
    found, parts = {}, parts_of(model)
    for name, value in tensors.items():
        part = parts.get(name)
        if part is None:
            assert all(torch.equal(each, value) for each in axis.collect(value)), f"{name} differs between ranks"
        else:
            cut = part.cut
            sizes = [cut.numel(rank) for rank in range(cut.ranks)]
            held = torch.split(axis.gathered(value, cut.dim, sizes), sizes, cut.dim)
            assert not cut.whole(held).narrow(cut.dim, part.whole[cut.dim], cut.size - part.whole[cut.dim]).any()
            value = part.together(held)
        found[name] = value
    return found


def loss_of(model: Model, logits: Tensor, labels: Tensor, axis: Axis, rows: ShardSpec, gathers: bool) -> Tensor:
    if gathers:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    losses = vocabulary_cross_entropy(logits, labels, axis, rows, VOCABULARY)
    return losses.sum() / (labels != -100).sum()


def trained(kind: str, tied: bool, gathers: bool) -> None:
    ids, labels = batch()
    plain = made(tied)
    expected = functional.cross_entropy(plain(ids).flatten(0, 1), labels.flatten())
    expected.backward()
    with Scope(kind) as group:
        axis, model = Axis(group), made(tied)
        rows = cut_model(model, axis, gathers)
        assert not tied or model.head.weight is model.embedding.weight
        assert isinstance(model.head, nn.Linear) and isinstance(model.blocks[1].qkv, Conv1D)
        assert parts_of(copy.deepcopy(model)) == parts_of(model)
        values = {name: param.detach() for name, param in model.named_parameters()}
        assert_close(whole(model, axis, values), {n: p.detach() for n, p in plain.named_parameters()}, 0.0, "values")
        for _ in range(2):
            model.zero_grad()
            loss = loss_of(model, model(ids), labels, axis, rows, gathers)
            loss.backward()
        assert_close({"loss": loss.detach()}, {"loss": expected.detach()}, 1e-12, "loss")
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        expected_grads = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
        assert_close(whole(model, axis, grads), expected_grads, 1e-11, "gradients")


def in_sets() -> list[object]:
    """Each number of ranks over each kind of group once in the quick set, with tied weights and gathered logits by
    turns."""
    rows: list[object] = []
    for at, (ranks, kind) in enumerate([(1, "gloo"), (2, "shared"), (3, "gloo"), (4, "shared"), (4, "gloo")]):
        for turn, (tied, gathers) in enumerate(product((False, True), (False, True))):
            name = f"{ranks}-{kind}-{'tied' if tied else 'untied'}-{'gathered logits' if gathers else 'parallel loss'}"
            row = pytest.param(ranks, kind, tied, gathers, id=name)
            rows += [row] if at % 4 == turn else full(row)
    return rows


@pytest.mark.parametrize(("ranks", "kind", "tied", "gathers"), in_sets())
def test_cut_layers_are_the_whole_ones(ranks: int, kind: str, tied: bool, gathers: bool) -> None:
    run_ranks(ranks, trained, kind, tied, gathers)


def penalised(_: None = None) -> None:
    """The gradient's own gradient."""
    ids, labels = batch()
    results: list[dict[str, Tensor]] = []
    with Scope("shared") as group:
        for axis in (None, Axis(group)):
            model = made(False)
            rows = cut_model(model, axis, True) if axis is not None else ShardSpec.even(0, VOCABULARY, 1)
            x = model.embedding(ids)
            y: Tensor = x
            for block in model.blocks:
                y = block(y)
            loss = functional.cross_entropy(model.head(y).flatten(0, 1), labels.flatten())
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + grad.square().sum()).backward()
            grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
            results.append(grads if axis is None else whole(model, axis, grads))
            assert rows.size >= VOCABULARY
    assert_close(results[1], results[0], 1e-10, "gradients of a penalty")


def test_gradients_of_gradients() -> None:
    run_ranks(2, penalised, None)


def refused() -> list[str]:
    with Scope("shared") as group:
        axis = Axis(group)
        tp_plan = TPPlan(axis)
        cuts: list[Any] = [
            lambda: tp_plan.columns(nn.LayerNorm(4), ShardSpec.even(0, 4, 2)),
            lambda: tp_plan.columns(nn.Linear(4, 6), ShardSpec.even(1, 6, 2)),
            lambda: tp_plan.rows(nn.Linear(4, 6), ShardSpec.even(1, 3, 2)),
            lambda: tp_plan.columns(nn.Linear(4, 6), ShardSpec.even(0, 6, 3)),
            lambda: tp_plan.vocabulary(nn.Embedding(8, 4, max_norm=1.0), ShardSpec.even(0, 8, 2)),
            lambda: tp_plan.vocabulary(nn.Embedding(8, 4), ShardSpec.even(0, 6, 2)),
            lambda: vocabulary_cross_entropy(torch.ones(3, 5), torch.ones(3).long(), axis, ShardSpec.even(0, 8, 2), 8),
        ]
        messages = []
        for each in cuts:
            with pytest.raises((TypeError, ValueError)) as error:
                each()
            messages.append(str(error.value))
        shared = nn.Linear(4, 6)
        tp_plan.columns(shared, ShardSpec.even(0, 6, 2))
        with pytest.raises(ValueError, match="is cut as") as error:
            tp_plan.rows(shared, ShardSpec.even(1, 4, 2))
        return [*messages, str(error.value)]


def test_what_cannot_be_cut_is_named() -> None:
    messages = run_ranks(2, refused)[0]
    parts = ["a LayerNorm cannot", "give dim 0 and 6", "give dim 1 and 4", "over an axis of 2", "max_norm=1.0"]
    parts += ["at least as many rows", "give logits [..., 4]", "is cut as"]
    for message, part in zip(messages, parts, strict=True):
        assert part in message, message
