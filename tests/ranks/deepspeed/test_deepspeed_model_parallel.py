"""Tensor and sequence parallelism by DeepSpeed's keys, checkpoints of an ``mpu`` model, and ``zero_to_fp32``.

* Training with ``autotp_size`` or ``sequence_parallel_size`` equals plain PyTorch in fp64.
* A model in two tensor-parallel parts on four ranks: both parts load the same checkpoint, and a failed save fails in
  both. Data-parallel ranks are 0, 2 and 1, 3; model-parallel ranks are 0, 1 and 2, 3.
* ``load_state_dict_from_zero_checkpoint`` loads into a sharded model. The library writes no universal checkpoints.
"""

import contextlib
import errno
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardwise import deepspeed
from shardwise.compat import UnsupportedName
from shardwise.core.checkpoint.atomic import FileSystem
from shardwise.core.checkpoint.directory import CheckpointRoot
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError
from shardwise.deepspeed import groups
from shardwise.deepspeed.zero_to_fp32 import load_state_dict_from_zero_checkpoint
from shardwise.testing import assert_close
from tests.support.ds_setup import close, ds_config, optimizer_block, start
from tests.support.groups_setup import GROUPS, Part, join, part_loss, part_steps
from tests.support.hybrid_setup import MAX_NORM, STEPS, Texts, made, optimizer_of, plain
from tests.support.on_ranks import everywhere, on_ranks, raises
from tests.support.sets import full
from tests.support.sharded_setup import adam

RANKS = 2


def engine_at(stage: int) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    model.register_buffer("offset", torch.arange(3.0))
    return start(model, ds_config(stage, 4, optimizer=optimizer_block("AdamW", lr=1e-2)))


def train(engine: deepspeed.DeepSpeedEngine, seed: int) -> None:
    torch.manual_seed(seed * RANKS + dist.get_rank())
    engine.backward(engine(torch.randn(4, 5)).square().mean())
    engine.step()


@on_ranks(RANKS)
def test_zero_checkpoint_loads_into_a_sharded_model(tmp_path: Path) -> None:
    folder = str(tmp_path)
    engine = engine_at(3)
    train(engine, 0)
    engine.save_checkpoint(folder, "first")
    saved = engine.state_dict()
    train(engine, 1)
    trained = engine.state_dict()
    assert not torch.equal(saved["0.weight"], trained["0.weight"])
    load_state_dict_from_zero_checkpoint(engine.module, folder, "first")
    assert_close(engine.state_dict(), saved, 0.0, "an engine's model takes it over")
    with deepspeed.zero.GatheredParameters(engine.module), pytest.raises(RuntimeError, match="would bypass shards"):
        load_state_dict_from_zero_checkpoint(engine.module, folder, "first")
    engine.destroy()


@pytest.mark.parametrize("name", ["main", "parse_arguments"])
def test_ds_to_universal_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedName, match=rf"{name}: checkpoints load at any stage"):
        getattr(deepspeed.checkpoint.ds_to_universal, name)()
    deepspeed.checkpoint.enable_universal_checkpoint([])


HYBRID_RANKS, BATCH, TP = 4, 2, 2
CONFIG: dict[str, Any] = {"train_batch_size": BATCH * HYBRID_RANKS // TP, "gradient_clipping": MAX_NORM}
CUT: dict[str, Any] = {"tensor_parallel": {"autotp_size": TP}}


def held(session: Any, values: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return this rank's values of each parameter, and the expected ones."""
    facts = session._engine.shards.layout.facts
    with session.module.gathered():
        own = {fact.names[0]: p.detach().clone() for fact, p in zip(facts, session.params, strict=True)}
    return own, {f.names[0]: values[f.names[0]] if f.part is None else f.part.of(values[f.names[0]]) for f in facts}


SHARED = [(1, {"sequence_parallel_size": TP}, None), (3, {}, (HYBRID_RANKS // TP, TP))]


@on_ranks(HYBRID_RANKS, timeout=120.0)
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
        training_data=Texts(STEPS * BATCH * HYBRID_RANKS // TP),
        config=CONFIG | keys | {"zero_optimization": {"stage": stage}},
        mesh_param=mesh_param,
    )
    assert loader is not None
    mesh = engine.session.mesh
    assert (engine.dp_world_size, mesh.data_rank) == (HYBRID_RANKS // TP, dist.get_rank() // TP)
    # With split sequences, transformers' fp32 loss is summed in another order.
    most = 1e-9 if mesh.tensor.size == TP else 1e-6
    assert mesh.tensor.size * mesh.sequence.size == TP
    shares, rank = mesh.sequence.size == TP, dist.get_rank()
    assert groups.get_sequence_parallel_rank() == (rank % TP if shares else 0)
    assert groups.get_tensor_model_parallel_src_rank() == (rank if shares else rank - rank % TP)
    loader = DataLoader(loader.dataset, BATCH, sampler=engine.deepspeed_io(loader.dataset, route="test").sampler)
    for (loss, norm, values), inputs in zip(
        plain("llama", HYBRID_RANKS // TP, BATCH, mesh.tensor.size == TP), loader, strict=True
    ):
        out = engine(**inputs)
        engine.backward(out.loss)
        engine.step()
        losses = everywhere(out.loss.item())
        assert abs(sum(losses) / HYBRID_RANKS - loss) < most * loss
        assert abs(engine.get_global_grad_norm() - norm) < most * norm
        assert_close(*held(engine.session, values), most, "parameters")
    assert engine.global_samples == STEPS * BATCH * 2
    engine.save_checkpoint(str(tmp_path), "last")
    assert not list(tmp_path.glob("**/mp_rank_*")), "one checkpoint, of whole tensors"
    engine.destroy()


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def started(**changes: Any) -> deepspeed.DeepSpeedEngine:
    _, data = join(GROUPS["strided"], 600.0)  # the pool ends a rank that waits too long
    _, others = join(GROUPS["pairs"], 600.0)
    unit = SimpleNamespace(get_data_parallel_group=lambda: data, get_model_parallel_group=lambda: others)
    module = Part(dist.get_rank() % 2)
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        **changes,
    }
    return start(module, config, optimizer=adam(module), mpu=unit)


def step(engine: deepspeed.DeepSpeedEngine) -> dict[str, Tensor]:
    engine.backward(part_loss(engine, part_steps()[engine.global_steps][0][dist.get_rank() // 2]))
    engine.step()
    return engine.module_state_dict()


def on_rank(rank: int, action: Callable[[], object]) -> None:
    """Change files on one rank, between two barriers."""
    dist.barrier()
    if dist.get_rank() == rank:
        action()
    dist.barrier()


# ---- loading


@on_ranks(4)
def test_all_model_parts_load_the_same_checkpoint(tmp_path: Path) -> None:
    folder = str(tmp_path)
    own = f"{folder}/mp_rank_0{dist.get_rank() % 2}"
    engine = started()
    first = step(engine)
    with warnings.catch_warnings(record=True, action="always") as caught:
        engine.save_checkpoint(folder, "uno" if dist.get_rank() == 1 else "one", client_state={"saved": 1})
    assert any("the ranks have different tags" in str(each.message) for each in caught), "all use the first"
    step(engine)
    engine.save_checkpoint(folder, "two", client_state={"saved": 2})
    assert engine.load_checkpoint(folder) == (f"{own}/two", {"saved": 2})

    def as_before_the_kill() -> None:
        shutil.rmtree(f"{folder}/mp_rank_01/two")
        Path(folder, "mp_rank_01", "latest").write_text("one\n")

    on_rank(1, as_before_the_kill)
    raises(CheckpointError, re.escape("[['two', 2], ['one', 1]]"), engine.load_checkpoint, folder)
    raises(CheckpointError, re.escape("[['two', 2], None]"), engine.load_checkpoint, folder, "two")
    assert engine.load_checkpoint(folder, "one") == (f"{own}/one", {"saved": 1})
    assert engine.global_steps == 1
    assert_close(engine.module_state_dict(), first, 0.0, "the older one, on every rank")
    on_rank(2, lambda: os.truncate(f"{folder}/mp_rank_00/one/pieces-0.safetensors", 8))
    told = r"in mp_rank_00: [\s\S]*mp_rank_00/one/pieces-0\.safetensors has 8"
    raises(CheckpointDamage, told, engine.load_checkpoint, folder, "one")
    assert_close(engine.module_state_dict(), first, 0.0, "nothing was taken over")
    on_rank(3, lambda: shutil.rmtree(f"{folder}/mp_rank_00"))
    raises(CheckpointError, re.escape("[None, ['one', 1]]"), engine.load_checkpoint, folder)
    with pytest.warns(UserWarning, match="nothing was loaded") if dist.get_rank() == 0 else contextlib.nullcontext():
        assert engine.load_checkpoint(f"{folder}/nowhere") == (None, None)
    step(engine)
    close(engine)


# ---- saving


@on_ranks(4)
def test_failed_save_of_one_model_part_fails_in_all(tmp_path: Path) -> None:
    folder = str(tmp_path)
    me = dist.get_rank()
    engine = started(checkpoint={"tag_validation": "FAIL"})
    before = step(engine)
    engine.save_checkpoint(folder, "one")
    engine.save_16bit_model(folder)
    after = step(engine)
    raises(ValueError, "^tag=", engine.save_checkpoint, folder, "mine" if me == 3 else "two")
    told = r"^rank {} could not [\s\S]*in mp_rank_01: [\s\S]*ENOSPC"

    def failing(rank: int, owner: type, name: str) -> Any:
        return mock.patch.object(owner, name, side_effect=FULL) if me == rank else contextlib.nullcontext()

    for key, rank, of_part, owner, name in (
        ("write", 3, 1, FileSystem, "write"),
        ("commit", 1, 0, CheckpointRoot, "commit"),
        ("pointer", 1, 0, CheckpointRoot, "point_latest"),
    ):
        with failing(rank, owner, name):
            raises(CheckpointError, told.format(of_part), engine.save_checkpoint, folder, key)
        dist.barrier()
        there = [sorted(os.listdir(f"{folder}/mp_rank_0{part}")) for part in (0, 1)]
        latest = [Path(folder, f"mp_rank_0{part}", "latest").read_text() for part in (0, 1)]
        assert not any(each.startswith(".") for part in there for each in part), f"something is left over in {there}"
        assert [key in part for part in there] == [key != "write", key == "pointer"], there
        if key == "pointer":
            assert latest == ["pointer\n", "one\n"]
            path, _ = engine.load_checkpoint(folder, "pointer")
            assert path == f"{folder}/mp_rank_0{me % 2}/pointer" and engine.global_steps == 2
        else:
            assert latest == ["one\n"] * 2, "none moves before every part has committed"
            path, _ = engine.load_checkpoint(folder)
            assert path == f"{folder}/mp_rank_0{me % 2}/one" and engine.global_steps == 1
            assert_close(engine.module_state_dict(), before, 0.0, "the old one on every rank")
            assert_close(step(engine), after, 0.0, "training goes on")
        dist.barrier()
    with failing(1, FileSystem, "write"):
        raises(CheckpointError, told.format(0), engine.save_16bit_model, folder)
    close(engine)
