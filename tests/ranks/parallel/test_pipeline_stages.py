"""Models of transformers in stages against the same models whole: fp64, every schedule, tied weights, odd sizes."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from shardwise.core.comm import GroupMaker
from shardwise.core.parallel.pipeline import Passes, StageRun, make_schedule, split_batch, stage_model
from shardwise.testing import assert_close, run_ranks
from tests.support import tensor_cases
from tests.support.on_ranks import everywhere, on_ranks
from tests.support.sets import campaign, full
from tests.support.tensor_setup import Case, Exact, loss_of

CPU = torch.device("cpu")
ARCHITECTURES = ["llama", "gpt2", "bert"]
LAYERS = 5
SCHEDULES = [(2, "1f1b", 1), (4, "1f1b", 1), (2, "interleaved", 2), (1, "interleaved", 2), (2, "zbv", 2)]


def with_layers(case: Case, layers: int) -> Case:
    config = copy.deepcopy(case.config)
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if name in vars(config):
            setattr(config, name, layers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = (config.layer_types * layers)[:layers]
    return Case(case.kind, config, case.inputs, case.padded)


def criterion(outputs: Any, _inputs: Any) -> Tensor:
    with Exact():
        return loss_of(outputs)


Plain = tuple[Tensor, dict[str, Tensor]]


@functools.cache
def plain(name: str, heads: int | None, microbatches: int) -> list[Plain]:
    """Of each case, its loss and gradients; computed by the test, for its ranks."""
    return [_plain(with_layers(case, LAYERS), microbatches) for case in tensor_cases.CASES[name]()[:heads]]


def _plain(case: Case, microbatches: int) -> Plain:
    model = case.made()
    loss = torch.zeros((), dtype=torch.float64)
    for part in split_batch(case.batch(), microbatches, None):
        with Exact():
            own = loss_of(model(**part.kwargs)) * part.share
        own.backward()
        loss += own.detach()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return loss, grads


def stage(ranks: int, name: str, schedule: str, chunks: int, heads: int | None = None) -> None:
    """Three rows in three micro-batches, fewer than there are stages in some; of all cases, or the first ``heads``."""
    run_ranks(ranks, staged, name, schedule, chunks, 3, plain(name, heads, 3))


def staged(name: str, schedule_name: str, chunks: int, microbatches: int, whole: list[Plain]) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    maker = GroupMaker(CPU, None, 60.0)
    wire = maker.make_wire("pp", [list(range(ranks))]) if ranks > 1 else None
    for case, (expected_loss, expected) in zip(tensor_cases.CASES[name](), whole, strict=False):
        case = with_layers(case, LAYERS)
        model = case.made()
        if getattr(case.config, "output_router_logits", False):
            with pytest.raises(ValueError, match=r"output_router_logits=True for a .* in pipeline stages"):
                stage_model(model, rank, ranks, chunks)
            continue
        names = {id(param): name for name, param in model.named_parameters()}
        shapes = {name: param.shape for name, param in model.named_parameters()}
        staging = stage_model(model, rank, ranks, chunks, v_shaped=schedule_name == "zbv")
        held = {names[id(param)] for param in model.parameters() if staging.owns(param)}
        shared = {names[id(param)] for param in model.parameters() if len(staging.ranks_of(param)) > 1}
        staging.install()
        assert {names[id(param)] for param in model.parameters()} == held
        run = StageRun(staging, wire)
        parts = split_batch(case.batch(), microbatches, None)
        schedule = make_schedule(schedule_name, ranks, chunks, len(parts))
        for turn in range(2):
            model.zero_grad()
            with Exact():
                outcome = run.step(schedule, parts, criterion, Passes(), turn == 1)
            assert (outcome.loss is None) == (staging.stages - 1 not in staging.own)
            if outcome.loss is not None:
                assert_close({"loss": outcome.loss}, {"loss": expected_loss}, 1e-12, case.kind)
                assert len(outcome.outputs) == (len(parts) if turn else 0)
            found = {names[id(p)]: p.grad for p in model.parameters() if p.grad is not None}
            for weight in sorted(shared):  # what several stages use is summed by whoever holds it
                total = found.get(weight, torch.zeros(shapes[weight], dtype=torch.float64)).clone()
                dist.all_reduce(total)
                if weight in held and weight in expected:
                    found[weight] = total
            own = {name: grad for name, grad in expected.items() if name in held}
            assert_close(found, own, 1e-11, f"{case.kind}: gradients", floor=1e-2)
            with torch.no_grad(), Exact():
                again = run.step(schedule, parts, criterion, None)
            if again.loss is not None:
                assert_close({"loss": again.loss}, {"loss": expected_loss}, 1e-12, f"{case.kind}: forward alone")
        staging.remove()
        assert {names[id(param)] for param in model.parameters()} == set(names.values())
    maker.close()


def by_turns() -> list[object]:
    """Each schedule with two architectures; the third in the campaign."""
    rows: list[object] = []
    for at, schedule in enumerate(SCHEDULES):
        for kind, name in enumerate(ARCHITECTURES):
            rows += (campaign if (at + kind) % 3 == 2 else full)((*schedule, name))
    return rows


@pytest.mark.parametrize(("ranks", "schedule", "chunks", "name"), by_turns())
def test_stages_are_the_whole_model(name: str, ranks: int, schedule: str, chunks: int) -> None:
    """Every head."""
    stage(ranks, name, schedule, chunks)


@pytest.mark.parametrize(
    ("ranks", "schedule", "chunks", "name"), [(*each, ARCHITECTURES[at % 3]) for at, each in enumerate(SCHEDULES)]
)
def test_stages_of_the_first_heads_are_the_whole_model(ranks: int, schedule: str, chunks: int, name: str) -> None:
    """The first two of an architecture: with tied embeddings and without."""
    stage(ranks, name, schedule, chunks, 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *((name, "zbv") for name in ("bloom", "gemma2", "gpt_neox", "mixtral", "qwen3_moe")),
        *((name, "1f1b") for name in ("falcon", "gemma3", "gptj", "opt")),
    ],
)
def test_other_architectures(name: str, schedule: str) -> None:
    """Their first heads."""
    stage(2, name, schedule, 1 if schedule == "1f1b" else 2, 2)


@on_ranks(2)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_of_different_stages_draw_different_numbers(checkpointing: bool) -> None:
    """Which elements of a layer's output dropout hits; all ranks' generators are equal afterwards."""
    torch.manual_seed(7)
    config = transformers.GPT2Config(n_embd=24, n_layer=2, n_head=2, vocab_size=29, n_positions=16, resid_pdrop=0.5)
    model = transformers.GPT2LMHeadModel(config).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    maker = GroupMaker(CPU, None, 60.0)
    staging = stage_model(model, dist.get_rank(), 2)
    staging.install()
    run = StageRun(staging, maker.make_wire("pp", [[0, 1]]))
    hits: list[list[bool]] = []
    model.transformer.h[dist.get_rank()].attn.resid_dropout.register_forward_hook(
        lambda _module, _inputs, output: hits.append((output == 0).flatten().tolist())
    )
    ids = torch.arange(12).view(2, 6)
    parts = split_batch({"input_ids": ids, "labels": ids}, 2, None)
    run.step(make_schedule("1f1b", 2, 1, 2), parts, criterion, Passes())
    assert len({tuple(each) for each in hits}) == 2, "two micro-batches dropped the same, or recomputation another"
    assert len(hits) == (4 if checkpointing else 2) and all(hits.count(each) == len(hits) // 2 for each in hits)
    first, second = everywhere(hits[0])
    assert first != second and 0.3 < sum(first) / len(first) < 0.7
    one, other = everywhere(torch.get_rng_state().tolist())
    assert one == other
    maker.close()
