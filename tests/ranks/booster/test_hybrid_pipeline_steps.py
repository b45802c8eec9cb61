"""Between the passes of a pipeline and its step: gradients that are read and changed, steps that one rank refuses,
losses that are NaN; against plain PyTorch in one process, fp64."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_hybrid_pipeline import exact
from torch import Tensor, nn

from shardwise.booster import Booster
from shardwise.booster.plugin import HybridParallelPlugin
from shardwise.core.parallel.pipeline import split_batch
from shardwise.testing import assert_close, run_ranks
from tests.support.hybrid_setup import Texts, made
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

ROWS, PARTS, RATE, REPLICAS = 4, 4, 0.5, 2
Named = list[tuple[str, nn.Parameter]]


def model_of() -> Any:
    return made("llama", torch.float64, num_hidden_layers=2)


def batch_of(call: int, replica: int) -> dict[str, Tensor]:
    first = ROWS * (call * 2 + replica)
    return {name: values[first : first + ROWS] for name, values in Texts(ROWS * 4).items.items()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def boosted(model: Any, **given: Any) -> tuple[Booster, HybridParallelPlugin, Any, Any]:
    defaults = {"tp_size": 1, "pp_size": 2, "precision": "fp32", "num_microbatches": PARTS}
    plugin = HybridParallelPlugin(**defaults | given)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, sgd(model))
    return booster, plugin, model, optimizer


def halve(params: Named) -> None:
    for _, param in params:
        assert param.grad is not None
        param.grad.mul_(0.5)


def limit(params: Named) -> None:
    torch.nn.utils.clip_grad_value_([param for _, param in params], 0.003)


def norms(params: Named) -> None:
    for _, param in params:
        assert param.grad is not None and bool(param.grad.norm() > 0)


def assign(params: Named) -> None:
    for _, param in params:
        param.grad = torch.full_like(param, 0.1)


def drop(params: Named) -> None:
    for name, param in params:
        if "mlp" in name:
            param.grad = None


EDITS: list[tuple[Callable[[Named], None], int]] = [
    *((halve, 1), (halve, 2), (limit, 1), (norms, 2), (assign, 1), (drop, 1), (drop, 2))
]
"""Each with the number of calls before the step; the edit is after the first."""


@functools.cache
def plain() -> list[dict[str, Tensor]]:
    """The parameters after each of the edits and its step."""
    whole, found = model_of(), []
    optimizer = sgd(whole)
    for edit, calls in EDITS:
        for call in range(calls):
            for each in range(REPLICAS):
                for part in split_batch(batch_of(call, each), PARTS, None):
                    (exact(whole(**part.kwargs), part.kwargs) * part.share / REPLICAS).backward()
            if call == 0:
                edit(list(whole.named_parameters()))
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: param.detach().clone() for name, param in whole.named_parameters()})
    return found


def _edited(stage: int, after: list[dict[str, Tensor]]) -> None:
    booster, plugin, model, optimizer = boosted(model_of(), zero_stage=stage)
    replica, replicas = plugin.data_parallel()
    assert replicas == REPLICAS
    for (edit, calls), values in zip(EDITS, after, strict=True):
        for call in range(calls):
            booster.execute_pipeline(iter([batch_of(call, replica)]), model, exact, optimizer)
            if call == 0:
                edit(list(model.named_parameters()))
        optimizer.step()
        optimizer.zero_grad()
        own = {name.removeprefix("module."): param.detach() for name, param in model.named_parameters()}
        assert_close(own, {name: values[name] for name in own}, 1e-9, f"{edit.__name__}, {calls} calls")
    if stage < 2:
        with booster.no_sync(model, optimizer):
            booster.execute_pipeline(iter([batch_of(0, replica)]), model, exact, optimizer)
        with pytest.raises(RuntimeError, match=r"after a pass under no_sync\(\)"):
            norms(list(model.named_parameters()))
    booster.close()


@pytest.mark.parametrize("stage", [*full(0), 1, *full(2)])
def test_gradients_can_be_used_before_the_step(stage: int) -> None:
    run_ranks(2 * REPLICAS, _edited, stage, plain())


def _of_unequal_rows(stage: int) -> str:
    booster, plugin, model, optimizer = boosted(model_of(), zero_stage=stage)
    replica, _ = plugin.data_parallel()
    batch = {name: values[: ROWS - 2 * replica] for name, values in batch_of(0, replica).items()}
    try:
        booster.execute_pipeline(iter([batch]), model, exact, optimizer)
        optimizer.step()
    except ValueError as error:
        return str(error)
    finally:
        booster.close()
    return ""


def test_other_numbers_of_micro_batches_are_refused_where_each_is_reduced() -> None:
    for told in run_ranks(4, _of_unequal_rows, 2):
        assert "different numbers of micro-batches (rank 0 4, rank 1 2)" in told and "drop_last=True" in told
    assert run_ranks(4, _of_unequal_rows, 1) == [""] * 4


@on_ranks(2)
def test_a_micro_batch_without_labels_and_a_number_of_labels() -> None:
    booster, _, model, optimizer = boosted(model_of())
    batch = batch_of(0, 0)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][2] = -100
    counted = {**batch, "num_items_in_batch": (batch["labels"][:, 1:] != -100).sum()}
    found = booster.execute_pipeline(iter([counted]), model, lambda out, _: out.loss, optimizer, broadcast_loss=True)
    whole = exact(model_of()(**batch), batch)
    assert_close({"loss": found["loss"].double()}, {"loss": whole.detach()}, 1e-5, "num_items_in_batch")
    booster.close()
