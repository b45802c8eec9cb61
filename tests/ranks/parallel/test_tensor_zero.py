"""Models of every architecture under an engine that shards what is left of them: a step is that of the whole model."""

from __future__ import annotations

import pytest
import torch

from shardwise.core.mesh import Mesh
from shardwise.plan import TensorPlan, zero
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import one_mesh, sharded
from tests.support.sets import campaign, full
from tests.support.tensor_cases import CASES
from tests.support.tensor_setup import Exact, loss_of


def stepped(stage: int, tp: int, architectures: list[str], heads: slice) -> int:
    with one_mesh(zero(stage).but(tp=tp)) as mesh:  # type: ignore[arg-type]
        return _stepped(stage, tp, architectures, heads, mesh)


def _stepped(stage: int, tp: int, architectures: list[str], heads: slice, mesh: Mesh) -> int:
    count = 0
    for architecture in architectures:
        for case in CASES[architecture]()[heads]:
            plain, model, batch = case.made(), case.made(), case.batch()
            with Exact():
                expected = loss_of(plain(**batch))
            expected.backward()
            torch.optim.SGD(plain.parameters(), lr=0.5).step()
            plan = zero(stage).but(tp=tp, tensor=TensorPlan(vocabulary_multiple=4, parallel_output=count % 2 == 0))
            with sharded(model, torch.optim.SGD(model.parameters(), lr=0.5), plan, mesh) as session:
                with Exact():
                    loss = loss_of(session.module(**batch))
                session.backward(loss)
                session.optimizers[0].step()
                found = session.module.state_dict()
            assert_close({"loss": loss.detach()}, {"loss": expected.detach()}, 1e-12, case.kind)
            params = {name: param.detach() for name, param in plain.named_parameters()}
            assert_close({name: found[name] for name in params}, params, 1e-11, case.kind, floor=1e-2)
            count += 1
    return count


@pytest.mark.parametrize(("stage", "tp"), [(1, 4), (3, 2)])
@pytest.mark.parametrize("half", [*full(0), *campaign(1)])
def test_a_step_of_zero_over_parts_is_the_whole_models(stage: int, tp: int, half: int) -> None:
    """The first head of every other architecture under either plan; the others of each in the campaign."""
    architectures = sorted(CASES)[(half + stage // 3) % 2 :: 2]
    assert set(run_ranks(4, stepped, stage, tp, architectures, slice(1), timeout=300.0)) == {len(architectures)}


def test_a_step_of_a_decoder_an_encoder_and_experts_is_the_whole_models() -> None:
    architectures = ["bert", "llama", "mixtral"]
    assert set(run_ranks(4, stepped, 3, 2, architectures, slice(1), timeout=300.0)) == {len(architectures)}
