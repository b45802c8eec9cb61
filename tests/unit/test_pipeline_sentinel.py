"""What stands for the result of a pass that failed is no result, and a session whose ranks lost each other is over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.core.parallel.pipeline import Passes, StageRun, make_schedule, split_batch, stage_model
from shardwise.core.parallel.pipeline.run import is_sentinel, sentinel
from tests.support.hybrid_setup import made


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
    with pytest.raises(KeyboardInterrupt):
        run.step(schedule, parts, criterion, Passes())
    with pytest.raises(RuntimeError, match=r"ended in KeyboardInterrupt: .*the session is over"):
        run.step(schedule, parts, criterion, Passes())
