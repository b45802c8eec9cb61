"""How layers and batches are divided, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

from shardwise.core.parallel.pipeline import Body, layers_of_stages, merged, split_batch, stage_model
from shardwise.core.parallel.pipeline.batch import check_mergeable, detached
from shardwise.plan import PipelinePlan


def test_layers_are_even_with_more_in_the_middle() -> None:
    assert layers_of_stages(8, 4) == [2, 2, 2, 2]
    assert layers_of_stages(5, 4) == [1, 2, 1, 1]
    assert layers_of_stages(6, 4) == [1, 2, 2, 1]
    assert layers_of_stages(7, 4) == [2, 2, 2, 1]
    assert layers_of_stages(5, 2, [1, 4]) == [1, 4]
    for layers, stages, given in ((3, 4, None), (5, 2, [2, 2]), (5, 2, [5, 0]), (5, 2, [1, 2, 2])):
        with pytest.raises(ValueError, match=rf"{layers} layers"):
            layers_of_stages(layers, stages, given)


def test_batches_of_any_form_are_divided_by_rows() -> None:
    x, y = torch.arange(10).view(5, 2), torch.arange(5)
    parts = split_batch({"x": x, "y": y, "scale": 3.0, "table": torch.ones(7)}, 2, None)
    assert [part.share for part in parts] == [0.6, 0.4]
    assert torch.equal(torch.cat([part.kwargs["x"] for part in parts]), x) and parts[0].args == ()
    assert all(part.kwargs["scale"] == 3.0 for part in parts)
    assert torch.equal(torch.cat([part.args[1] for part in split_batch((x, y), 3, None)]), y)
    assert [part.inputs.shape[0] for part in split_batch(x, None, 2)] == [2, 2, 1]
    assert len(split_batch(x, 8, None)) == 5 and len(split_batch(x, None, None)) == 1
    assert parts[0].key != parts[1].key
    for batch in ({"scale": 1.0}, [], {"x": torch.ones(0, 2)}):
        with pytest.raises(ValueError, match=r"nothing to divide|0 rows"):
            split_batch(batch, 2, None)


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


def test_containers_inside_of_a_batch_are_divided_and_lists_of_rows_refused() -> None:
    x, y = torch.arange(10).view(5, 2), torch.arange(5)
    batch = {"x": x, "d": {"y": y, "more": [y, 1]}, "pair": Pair(y, "y"), "table": (1, 2, 3, 4, 5), "short": [1, 2]}
    parts = split_batch(batch, 2, None)
    for part, rows in zip(parts, (slice(3), slice(3, 5)), strict=True):
        found = part.kwargs
        assert torch.equal(found["x"], x[rows]) and torch.equal(found["d"]["y"], y[rows])
        assert torch.equal(found["d"]["more"][0], y[rows]) and found["d"]["more"][1] == 1
        assert torch.equal(found["pair"].x, y[rows]) and found["pair"].name == "y"
        assert found["table"] == batch["table"] and found["short"] == [1, 2]
    assert ("d.y", (3,)) in parts[0].key
    assert [part.args[0]["y"].tolist() for part in split_batch([{"y": y}], 2, None)] == [[0, 1, 2], [3, 4]]
    words = ["a", "b", "c", "d", "e"]
    for wrong, told in (
        ({"x": x, "words": words}, "words of a batch is a list of 5 items"),
        ({"x": x, "d": {"words": words}}, r"d\.words of a batch"),
        ((x, [torch.ones(7)] * 5), r"\[1\] of a batch"),
    ):
        with pytest.raises(ValueError, match=told):
            split_batch(wrong, 2, None)
    assert split_batch({"x": x, "words": words}, 1, None)[0].kwargs["words"] == words


@dataclass
class Made:
    logits: torch.Tensor
    pair: Pair
    count: int
    kept: str = "kept"


def test_outputs_keep_their_classes_and_numbers_that_differ_are_a_tensor() -> None:
    def made(rows: int, **own: Any) -> Made:
        x = torch.ones(rows, 2, requires_grad=True)
        return Made(x * rows, Pair(x, "x"), own.pop("count", 5), **own)

    one = detached(made(2))
    assert type(one) is Made and not one.logits.requires_grad and not one.pair.x.requires_grad
    found = merged([made(2), made(1)])
    assert type(found) is Made and found.logits.tolist() == [[2.0, 2.0]] * 2 + [[1.0, 1.0]]
    assert type(found.pair) is Pair and found.pair.x.shape == (3, 2) and found.pair.name == "x"
    assert found.count == 5 and found.kept == "kept"
    counts = merged([made(2, count=7), made(1, count=9)]).count
    assert counts.tolist() == [7, 9] and counts.dtype == torch.int64
    assert merged([0.1, 3]).tolist() == [0.1, 3.0] and merged([3, 3]) == 3 and merged([(1, [2])] * 2) == (1, [2])
    causal = transformers.modeling_outputs.CausalLMOutputWithPast(logits=torch.ones(2, 3))
    both = merged([causal, causal])
    assert type(both) is type(causal) and both.logits.shape == both["logits"].shape == (4, 3) and both.loss is None
    assert causal.logits.shape == (2, 3)
    for other, told in (
        (made(1, kept="other"), r"outputs.kept is 'kept' in one micro-batch and 'other' in another"),
        (made(1, count=None), r"outputs.count is 5 in one .* and None in another"),
        (replace(made(1), pair=Pair(torch.ones(2, 3), "x")), r"outputs.pair\[0\] is a tensor of .*\(2, 2\) .*\(2, 3\)"),
        (made(1).pair, r"outputs is a Made in one micro-batch and a Pair in another"),
    ):
        with pytest.raises(TypeError, match=told):
            check_mergeable(made(2), other)
        with pytest.raises(TypeError, match=told):
            merged([made(2), other])


class Tower(nn.Module):
    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.first, self.turn, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.blocks = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.turn(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


BODY = Body(layers="blocks", tokens="first", everywhere=("turn",))


def test_a_model_of_the_users_own() -> None:
    torch.manual_seed(0)
    model = Tower(nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))
    model.turn.requires_grad_(False)
    x = torch.randn(5, 3)
    expected = model(x)
    first, last = (stage_model(model, rank, 2, body=BODY) for rank in range(2))
    assert [first.owns(p) for p in (model.first.weight, model.turn.weight, model.last.weight)] == [True, True, False]
    assert [last.owns(p) for p in (model.first.weight, model.turn.weight, model.last.weight)] == [False, True, True]
    assert first.ranks_of(model.turn.weight) == (0, 1) and first.stages_of(model.blocks[2].weight) == (1,)
    first.install()
    hidden = first.run(0, None, (x,), {})
    assert "a Linear of stage 1" in repr(model)
    first.remove()
    last.install()
    with pytest.raises(RuntimeError, match="given nothing"):
        last.run(1, None, (x,), {})
    turn, model.turn = model.turn, nn.Identity()  # it is in what has arrived
    assert torch.equal(last.run(1, hidden, (x,), {}), expected)
    model.turn = turn
    last.remove()
    assert torch.equal(model(x), expected)


def test_what_cannot_be_divided_is_named() -> None:
    tower = Tower(nn.ModuleList([nn.Linear(4, 4)]))
    with pytest.raises(ValueError, match=r"Tower cannot be divided into stages.*register_body"):
        stage_model(tower, 0, 2)
    with pytest.raises(ValueError, match="1 layers are too few for 2 stages"):
        stage_model(tower, 0, 2, body=Body(layers="blocks", tokens="first"))
    tower.blocks.append(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"Tower\.turn is in Body.everywhere"):
        stage_model(tower, 0, 2, body=BODY)
    with pytest.raises(ValueError, match=r"Tower\.blocks is a Sequential"):
        stage_model(Tower(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), 0, 2, body=BODY)
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9
    )
    both = nn.ModuleList([transformers.LlamaModel(config), transformers.LlamaModel(config)])
    with pytest.raises(ValueError, match=r"several bodies \(0, 1\)"):
        stage_model(both, 0, 2)
    model = transformers.LlamaForCausalLM(config)
    staging = stage_model(model, 1, 2)
    staging.install()
    with pytest.raises(ValueError, match="output_hidden_states=True for a LlamaForCausalLM in pipeline stages"):
        staging.run(1, torch.ones(1, 2, 8), (), {"input_ids": torch.ones(1, 2).long(), "output_hidden_states": True})
    staging.remove()
    config._attn_implementation = "eager"
    config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions=True"):
        stage_model(model, 0, 2)


def test_plans_are_checked() -> None:
    for wrong, told in (
        ({"schedule": "zigzag"}, "schedule='zigzag'"),
        ({"chunks": 2}, "chunks=2"),
        ({"schedule": "zbv"}, "chunks=1: give 2"),
        ({"orders": (("0F0",),)}, "orders=.* with schedule='1f1b'"),
        ({"chunks": 0}, "chunks=0"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"microbatch_rows": -1}, "microbatch_rows=-1"),
    ):
        with pytest.raises(ValueError, match=told):
            PipelinePlan(**wrong)
