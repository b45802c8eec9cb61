"""Tests of pipeline parallelism without ranks.

- How layers are divided into stages and batches into micro-batches, and what raises an error.
- Message tags: unique, and limited in number.
- ``schedule_text`` and ``shardwise schedule`` show the schedules.
- Schedules are complete, free of deadlocks, and equal to torch's.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

from shardwise.cli.main import main
from shardwise.core.parallel.pipeline.batch import check_mergeable, detached, merged, split_batch
from shardwise.core.parallel.pipeline.picture import draw_schedule, schedule_text
from shardwise.core.parallel.pipeline.run import STEPS, StageRun
from shardwise.core.parallel.pipeline.schedule import Action, Kind, Schedule, custom_schedule, make_schedule, simulate
from shardwise.core.parallel.pipeline.staging import Body, layers_of_stages, stage_model
from shardwise.plan import PipelinePlan
from shardwise.plan.parallel import MOST_MICROBATCHES, MOST_STAGES
from tests.support.on_ranks import raises
from tests.support.tensor_cases import decoder


def test_layers_are_divided_evenly() -> None:
    expected = {8: [2, 2, 2, 2], 5: [1, 2, 1, 1], 6: [1, 2, 2, 1], 7: [2, 2, 2, 1]}
    assert {layers: layers_of_stages(layers, 4) for layers in expected} == expected
    assert layers_of_stages(5, 2, [1, 4]) == [1, 4]
    for layers, stages, given in ((3, 4, None), (5, 2, [2, 2]), (5, 2, [5, 0]), (5, 2, [1, 2, 2])):
        raises(ValueError, rf"{layers} layers", layers_of_stages, layers, stages, given)


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
        raises(ValueError, r"nothing to divide|0 rows", split_batch, batch, 2, None)


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


def test_nested_containers_are_divided_and_lists_of_rows_refused() -> None:
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
        raises(ValueError, told, split_batch, wrong, 2, None)
    assert split_batch({"x": x, "words": words}, 1, None)[0].kwargs["words"] == words


@dataclass
class Made:
    logits: torch.Tensor
    pair: Pair
    count: int
    kept: str = "kept"


def test_merged_outputs_keep_their_classes() -> None:
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
        raises(TypeError, told, check_mergeable, made(2), other)
        raises(TypeError, told, merged, [made(2), other])


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


def test_custom_models() -> None:
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
    raises(RuntimeError, "given nothing", lambda: last.run(1, None, (x,), {}))
    turn, model.turn = model.turn, nn.Identity()  # raised while handling the error of the model
    assert torch.equal(last.run(1, hidden, (x,), {}), expected)
    model.turn = turn
    last.remove()
    assert torch.equal(model(x), expected)


def test_models_that_cannot_be_divided() -> None:
    tower = Tower(nn.ModuleList([nn.Linear(4, 4)]))
    raises(ValueError, r"Tower cannot be divided into stages.*register_body", stage_model, tower, 0, 2)
    plain = Body(layers="blocks", tokens="first")
    raises(ValueError, "1 layers are too few for 2 stages", stage_model, tower, 0, 2, body=plain)
    tower.blocks.append(nn.Linear(4, 4))
    raises(ValueError, r"Tower\.turn is in Body.everywhere", stage_model, tower, 0, 2, body=BODY)
    tower = Tower(nn.Sequential(*tower.blocks))
    raises(ValueError, r"Tower\.blocks is a Sequential", stage_model, tower, 0, 2, body=BODY)
    config = decoder("Llama", num_hidden_layers=2)
    both = nn.ModuleList([transformers.LlamaModel(config), transformers.LlamaModel(config)])
    raises(ValueError, r"several bodies \(0, 1\)", stage_model, both, 0, 2)
    model = transformers.LlamaForCausalLM(config)
    config._attn_implementation = "eager"
    config.output_attentions = True
    raises(ValueError, "output_attentions=True", stage_model, model, 0, 2)


def test_invalid_pipeline_plans() -> None:
    for wrong, told in (
        ({"schedule": "zigzag"}, "schedule='zigzag'"),
        ({"chunks": 2}, "chunks=2"),
        ({"schedule": "zbv"}, "chunks=1: give 2"),
        ({"orders": (("0F0",),)}, "orders=.* with schedule='1f1b'"),
        ({"chunks": 0}, "chunks=0"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"microbatch_rows": -1}, "microbatch_rows=-1"),
        ({"microbatches": MOST_MICROBATCHES + 1}, r"microbatches=16385.*16384"),
        ({"schedule": "interleaved", "chunks": MOST_STAGES + 1}, r"chunks=257.*256"),
    ):
        raises(ValueError, told, PipelinePlan, **wrong)


def test_message_tags_are_unique() -> None:
    """Gloo matches messages by tag; the highest bit is reserved for the messages that describe tensors."""
    staging: Any = SimpleNamespace(stages=MOST_STAGES)
    run, found = StageRun(staging, None), list[int]()
    for step in (0, 1, STEPS - 1):
        run._step = step
        for stage in (1, 2, MOST_STAGES - 1):
            found += [run._tag(Action(Kind.BACKWARD, stage, each)) for each in (0, 1, MOST_MICROBATCHES - 1)]
        found += [run.tag_of_shared(position) for position in (0, 1, MOST_MICROBATCHES - 1)]
    assert len(set(found)) == len(found) and min(found) >= 0 and max(found) < 1 << 30


def test_too_many_stages_or_microbatches_are_refused() -> None:
    many: Any = SimpleNamespace(stages=MOST_STAGES + 1)
    raises(ValueError, r"a model of 257 stages .* at most 256", StageRun, many, None)
    most: Any = SimpleNamespace(stages=MOST_STAGES)
    run = StageRun(most, None)
    told = "a step of 16385 micro-batches: a pipeline takes at most 16384"
    raises(ValueError, told, run.step, None, [None] * (MOST_MICROBATCHES + 1), None, None)
    run.check_number(MOST_MICROBATCHES)
    assert PipelinePlan(microbatches=MOST_MICROBATCHES).microbatches == 16384
    assert PipelinePlan(schedule="interleaved", chunks=MOST_STAGES).chunks == 256


SMALL = """\
zbv: 2 ranks with 2 stages each, 3 micro-batches
bubble: ranks are idle for 5.3% of the time (by formula 5.3%)
largest number of forward passes whose activations are stored, by rank: 4 4
largest number of passes whose weight gradients are postponed, by rank: 1 3
F forward, B backward, W gradients of weights, . idle; lower case: every second stage of a rank
rank 0 F0 F1 F2 f0 b0 w0 f1 b1 w1 B0 W0 f2 b2 w2 B1 W1 B2 W2 .
rank 1 .  F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2 W2
"""


def test_schedule_text() -> None:
    assert schedule_text(make_schedule("zbv", 2, 2, 3)) + "\n" == SMALL
    plain = schedule_text(make_schedule("1f1b", 2, 1, 2), (1.0, 1.0, 1.0)).splitlines()
    assert plain[1] == "bubble: ranks are idle for 33.3% of the time (by formula 33.3%)"
    assert plain[-3] == "F forward, B backward, - continues, . idle"
    assert plain[-2:] == ["rank 0 F0 F1 .  .  B0 -- .  B1 --", "rank 1 .  F0 B0 -- F1 B1 -- .  ."]
    assert "by formula" not in schedule_text(make_schedule("zbv", 4, 2, 8), (1.0, 2.0, 0.5))
    narrow = schedule_text(make_schedule("zbv", 4, 2, 40)).splitlines()
    assert narrow[-5].startswith("rank 3 ...FfFfFfFfbwFBWfbw") and len(narrow[-5] + narrow[-1]) == 2 * 7 + 243


def test_schedule_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["schedule", "--pp", "2", "--microbatches", "3", "--style", "zbv"]
    assert main([*arguments, "--svg", str(tmp_path / "zbv.svg")]) == 0
    assert capsys.readouterr().out == f"{SMALL}picture: {tmp_path / 'zbv.svg'}\n"
    assert (tmp_path / "zbv.svg").read_text() == draw_schedule(make_schedule("zbv", 2, 2, 3))
    for times in ("1e308", "1e-320"):
        assert main([*arguments, "--times", times, times, times]) == 0
        assert capsys.readouterr().out == SMALL
    for more, told in (
        (["--pp", "0"], "--pp 0: give a whole number >= 1"),
        (["--chunks", "3"], "--chunks 3: --style 'zbv' with 3 stages a rank: give 2"),
        (["--microbatches", "4000"], "at most 4096 passes"),
        (["--width", "-3"], "--width -3: give a whole number >= 1"),
        (["--times", "1", "0", "1"], "--times 1.0 0.0 1.0: give three numbers above 0"),
        (["--times", "1e-320", "1", "1"], "1.0 1.0: give numbers of which none is more than 1000 times another"),
        (["--times", "1", "1e-9", "1"], "--times 1.0 1e-09 1.0: give numbers of which none is more than 1000 times"),
        (["--svg", str(tmp_path)], "cannot be written: give a file"),
        (["--svg", "/proc/x.svg"], "error: /proc/x.svg: cannot be written: No such file"),
        (["--svg", "/dev/full"], "error: /dev/full: cannot be written: No space left"),
        (["--svg", "x" * 300], f"error: {'x' * 300}: cannot be written: File name too long"),
    ):
        assert main([*arguments, *more]) == 2
        captured = capsys.readouterr()
        assert told in captured.err and not captured.out


SIZES = [(ranks, microbatches) for ranks in (1, 2, 3, 4) for microbatches in (1, 2, 3, 4, 5, 8, 12)]


def made() -> list[Schedule]:
    plain = [make_schedule("1f1b", ranks, 1, microbatches) for ranks, microbatches in SIZES]
    plain += [make_schedule("zbv", ranks, 2, microbatches) for ranks, microbatches in SIZES]
    return plain + [make_schedule("interleaved", r, chunks, m) for r, m in SIZES for chunks in (1, 2, 3)]


def test_schedules_have_each_action_once_and_end() -> None:
    for schedule in made():
        expected = [(stage, each) for stage in range(schedule.stages) for each in range(schedule.microbatches)]
        for kind in Kind if schedule.splits else (Kind.FORWARD, Kind.BACKWARD):
            found = [(a.stage, a.microbatch) for order in schedule.orders for a in order if a.kind is kind]
            assert sorted(found) == expected
        for rank, order in enumerate(schedule.orders):
            assert {schedule.rank_of(action.stage) for action in order} == {rank}
        spans = simulate(schedule, lambda action: 1.0 if action.kind is Kind.FORWARD else 2.0)
        assert all(len(each) == len(order) for each, order in zip(spans, schedule.orders, strict=True))
        forward = schedule.forward_only()
        assert sum(map(len, simulate(forward, lambda _: 1.0))) == len(expected)


def test_messages_are_received_in_the_order_of_sending() -> None:
    """Communicators without tags, such as NCCL, rely on this order."""
    for schedule in made():
        ways: dict[tuple[int, int, Kind], list[Action]] = {}
        for action, sender, receiver in schedule.messages():
            assert schedule.rank_of(action.stage) == sender != receiver
            ways.setdefault((sender, receiver, action.kind), []).append(action)
        for (sender, _, _), taken in ways.items():
            assert [each for each in schedule.orders[sender] if each in set(taken)] == taken


def torchs(ranks: int, chunks: int, microbatches: int, rank: int) -> list[Action]:
    from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops

    total = microbatches * chunks
    warm = min((ranks - rank - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * ranks, total)

    def forward_stage(step: int) -> int:
        return (step // ranks) % chunks * ranks + rank

    def backward_stage(step: int) -> int:
        return (chunks - 1 - (step - warm) // ranks % chunks) * ranks + rank

    rest = total - warm
    shape = (chunks, ranks, warm, rest, warm, rank)
    found = _get_1f1b_rank_ops(*shape, forward_stage, backward_stage, num_1f1b_microbatches=rest)
    return actions(found, {"FORWARD": Kind.FORWARD, "FULL_BACKWARD": Kind.BACKWARD})


def actions(found: list[Any], kinds: dict[str, Kind]) -> list[Action]:
    """Return our actions for torch's."""
    shown = [each for each in found if each is not None]
    return [Action(kinds[each.computation_type.name], each.stage_index, each.microbatch_index or 0) for each in shown]


def test_1f1b_and_interleaved_match_torch() -> None:
    for ranks, chunks, microbatches in ((2, 2, 4), (4, 2, 8), (4, 1, 8), (2, 3, 6)):
        schedule = make_schedule("1f1b" if chunks == 1 else "interleaved", ranks, chunks, microbatches)
        for rank, order in enumerate(schedule.orders):
            assert list(order) == torchs(ranks, chunks, microbatches, rank)


def test_zbv_matches_torch() -> None:
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    kinds = {"FORWARD": Kind.FORWARD, "BACKWARD_INPUT": Kind.BACKWARD, "BACKWARD_WEIGHT": Kind.WEIGHT}
    for ranks in range(1, 7):
        for microbatches in range(1, 20):
            torchs_own = object.__new__(ScheduleZBVZeroBubble)  # the constructor needs stages and communicates
            vars(torchs_own).update(pp_group_size=ranks, num_stages=2 * ranks, _n_microbatches=microbatches)
            schedule = make_schedule("zbv", ranks, 2, microbatches)
            for rank, order in enumerate(schedule.orders):
                assert list(order) == actions(torchs_own._calculate_single_rank_operations(rank), kinds)
            assert custom_schedule(ranks, tuple(tuple(map(str, order)) for order in schedule.orders)) == schedule


def test_deadlock_is_reported() -> None:
    wrong = Schedule("wrong", 1, 1, ((Action(Kind.BACKWARD, 0, 0), Action(Kind.FORWARD, 0, 0)),))
    raises(ValueError, r"by rank at \{0: '0B0'\}", simulate, wrong, lambda _: 1.0)


def test_invalid_schedules() -> None:
    raises(ValueError, "schedule='zigzag'", lambda: make_schedule("zigzag", 2, 1, 2))
    raises(ValueError, "2 stages a rank", lambda: make_schedule("1f1b", 2, 2, 2))
    raises(ValueError, "schedule='zbv' with 1 stages a rank: give 2", lambda: make_schedule("zbv", 2, 1, 2))
    for text in ("F0", "0G0", 3):
        raises(ValueError, f"{text!r} is no action", custom_schedule, 1, ((text,),))
