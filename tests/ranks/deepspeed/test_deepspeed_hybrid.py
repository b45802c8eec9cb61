"""Tensor and sequence parallelism by DeepSpeed's keys: fp64 against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

import shardwise.deepspeed as deepspeed
from shardwise.deepspeed import groups
from shardwise.testing import assert_close
from tests.support.hybrid_setup import MAX_NORM, STEPS, Texts, made, optimizer_of, plain
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

RANKS, BATCH, TP = 4, 2, 2
CONFIG: dict[str, Any] = {"train_batch_size": BATCH * RANKS // TP, "gradient_clipping": MAX_NORM}
CUT: dict[str, Any] = {"tensor_parallel": {"autotp_size": TP}}


def held(session: Any, values: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What this rank has of each parameter, and what it should have."""
    facts = session.engine.shards.layout.facts
    with session.module.gathered():
        own = {fact.names[0]: p.detach().clone() for fact, p in zip(facts, session.params, strict=True)}
    return own, {f.names[0]: values[f.names[0]] if f.part is None else f.part.of(values[f.names[0]]) for f in facts}


SHARED = [(1, {"sequence_parallel_size": TP}, None), (3, {}, (RANKS // TP, TP))]


@on_ranks(RANKS, timeout=120.0)
@pytest.mark.parametrize(
    ("stage", "keys", "mesh_param"),
    [*full(*((stage, CUT, None) for stage in range(3))), (3, CUT, None), *full(*SHARED)],
)
def test_stages_with_tensor_or_sequence_parallelism(
    stage: int, keys: dict[str, Any], mesh_param: tuple[int, int] | None, tmp_path: Path
) -> None:
    model = made("llama")
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer_of(model),
        training_data=Texts(STEPS * BATCH * RANKS // TP),
        config=CONFIG | keys | {"zero_optimization": {"stage": stage}},
        mesh_param=mesh_param,
    )
    assert loader is not None
    mesh = engine.session.mesh
    assert (engine.dp_world_size, mesh.data_rank) == (RANKS // TP, dist.get_rank() // TP)
    # Over parts of sequences transformers' loss, which is in fp32, adds up in another order.
    most = 1e-9 if mesh.tensor.size == TP else 1e-6
    assert mesh.tensor.size * mesh.sequence.size == TP
    shares, rank = mesh.sequence.size == TP, dist.get_rank()
    assert groups.get_sequence_parallel_rank() == (rank % TP if shares else 0)
    assert groups.get_tensor_model_parallel_src_rank() == (rank if shares else rank - rank % TP)
    loader = DataLoader(loader.dataset, BATCH, sampler=engine.deepspeed_io(loader.dataset, route="test").sampler)
    for (loss, norm, values), inputs in zip(
        plain("llama", RANKS // TP, BATCH, mesh.tensor.size == TP), loader, strict=True
    ):
        out = engine(**inputs)
        engine.backward(out.loss)
        engine.step()
        losses: list[Any] = [None] * RANKS
        dist.all_gather_object(losses, out.loss.item())
        assert abs(sum(losses) / RANKS - loss) < most * loss
        assert abs(engine.get_global_grad_norm() - norm) < most * norm
        assert_close(*held(engine.session, values), most, "parameters")
    assert engine.global_samples == STEPS * BATCH * 2
    engine.save_checkpoint(str(tmp_path), "last")
    assert not list(tmp_path.glob("**/mp_rank_*")), "one checkpoint, of whole tensors"
    engine.destroy()
