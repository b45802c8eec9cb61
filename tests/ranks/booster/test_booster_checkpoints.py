"""The Booster's checkpoints on two ranks: every plugin reads, in any format, what another plugin wrote."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from shardwise.core.checkpoint import CheckpointDamage, portable_files
from shardwise.plan import zero
from shardwise.session import build
from tests.support.booster_setup import PLUGINS, TINY, Net, Run, assert_same, batch, load, plain, save, start
from tests.support.counters import forget_peak, resident_bytes
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import campaign, full

RANKS = 2

# -- shards


@on_ranks(RANKS)
def test_torch_files_load_under_another_plugin_and_in_torch(tmp_path: Path) -> None:
    """The file names are those of ColossalAI's scripts; plain torch continues the training from the files, too."""
    run = Run(PLUGINS["gemini"]())
    run.steps(0, 2)
    run.booster.save_model(run.model, tmp_path / "model.pt", use_async=True)
    shards: dict[str, Any] = {"shard": True, "use_safetensors": False, "size_per_shard": TINY}
    run.booster.save_model(run.model, tmp_path / "shards", **shards)
    run.booster.save_optimizer(run.optimizer, tmp_path / "optimizer.pt")
    run.booster.save_lr_scheduler(run.scheduler, tmp_path / "scheduler.pt")
    run.booster.wait()
    names = {file.name for file in (tmp_path / "shards").iterdir()}
    assert "pytorch_model.bin.index.json" in names and "pytorch_model-00002.bin" in names
    for name in ("model.pt", "shards"):
        again = Run(PLUGINS["zero2"](), seed=99)
        again.booster.load_model(again.model, tmp_path / name)
        again.booster.load_optimizer(again.optimizer, tmp_path / "optimizer.pt")
        again.booster.load_lr_scheduler(again.scheduler, tmp_path / "scheduler.pt")
        assert again.net.extra["calls"] == 2 and torch.equal(again.net.extra["mark"], torch.ones(2))
        again.steps(2, 4)
        assert_same(again.model.state_dict(), plain(4))
    model, optimizer, scheduler = parts = start(seed=99)
    for part, name in zip(parts, ("model", "optimizer", "scheduler"), strict=True):
        part.load_state_dict(torch.load(tmp_path / f"{name}.pt", weights_only=True))
    for step in range(2, 4):
        inputs, targets = batch(step)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert_same(model.state_dict(), plain(4))


@on_ranks(RANKS)
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        *(("gemini", "fsdp"), ("fsdp-grad-op", "zero2")),
        *full(("ddp", "gemini"), ("zero1", "fsdp-hybrid"), ("fsdp-hybrid", "gemini-replicas")),
        *campaign(("zero2", "zero1"), ("gemini-replicas", "ddp")),
    ],
)
def test_sharded_files_load_under_another_plugin(writer: str, reader: str, tmp_path: Path) -> None:
    run = Run(PLUGINS[writer]())
    run.steps(0, 2)
    with torch.no_grad():
        run.model(torch.ones(1, 5))  # evaluation may leave unsharded parameters in place
    save(run, tmp_path)
    again = Run(PLUGINS[reader](), seed=99)
    with torch.no_grad():
        again.model(torch.ones(1, 5))
    load(again, tmp_path)
    assert again.net.extra["calls"] == 3 and torch.equal(again.net.extra["mark"], torch.ones(2))
    again.steps(2, 4)
    assert_same(again.model.state_dict(), plain(4))
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text("utf-8"))
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(os.listdir(tmp_path / "model")) == sorted([*files, "model.safetensors.index.json"])
    expected = plain(2)
    stored = {name: value for file in files for name, value in load_file(tmp_path / "model" / file).items()}
    assert "again.weight" not in stored, "a tied weight is stored once"
    for name, value in stored.items():
        if not name.startswith("$"):
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)
    _as_colossalai_loads_an_optimizer(tmp_path / "optimizer")


def _as_colossalai_loads_an_optimizer(folder: Path) -> None:
    """Load a sharded optimizer as ColossalAI's loader does: one index, its groups file, parameters by number."""
    (index_file,) = folder.glob("*.index.json")
    index = json.loads(index_file.read_text("utf-8"))
    groups = torch.load(folder / index["metadata"]["param_groups"], weights_only=True)
    state: dict[int, Any] = {}
    for file in set(index["weight_map"].values()):
        state |= torch.load(folder / file, weights_only=True)
    assert len(set(index["weight_map"].values())) > 3
    _, optimizer, _ = start()
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    assert {float(entry["step"]) for entry in optimizer.state.values()} == {2.0}
    assert all(entry["exp_avg"].shape == p.shape for p, entry in optimizer.state.items())


@on_ranks(RANKS)
@pytest.mark.parametrize("name", ["fsdp", *campaign("gemini")])
def test_from_pretrained_loads_the_shards(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=6))
    booster = Booster(plugin=PLUGINS[name]())
    boosted, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.save_model(boosted, tmp_path, shard=True, size_per_shard=1e-3)  # type: ignore[arg-type]
    booster.save_model(boosted, tmp_path, shard=True, prefix="ema", use_safetensors=True)
    expected = dict(boosted.state_dict())
    dist.barrier()
    assert len(list(tmp_path.glob("model-0*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight and type(loaded) is GPT2LMHeadModel
    assert json.loads((tmp_path / "config.json").read_text("utf-8"))["architectures"] == ["GPT2LMHeadModel"]
    for each in (loaded, AutoModelForCausalLM.from_pretrained(tmp_path, variant="ema")):
        assert_same(each.state_dict(), expected, tolerance=0)


WIDTH, LAYERS = 1536, 10


@on_ranks(RANKS)
def test_saving_never_gathers_the_full_model_on_a_rank(tmp_path: Path) -> None:
    """The rise of a rank's host memory while saving, and the sizes of rank 0's reads, stay far below the model's."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    booster = Booster(plugin=GeminiPlugin(precision="fp32", min_chunk_size_m=1, search_range_m=1))
    boosted, *_ = booster.boost(model)
    asked: list[int] = []

    class Counting(portable_files._Gathered):
        def read(self, name: str, start: int, numel: int) -> torch.Tensor:
            asked.append(numel * 4)
            return super().read(name, start, numel)

    with mock.patch.multiple(portable_files, _Gathered=Counting, BLOCK_BYTES=1 << 22):
        is_new = forget_peak()
        before = resident_bytes("VmRSS")
        booster.save_model(boosted, tmp_path, shard=True, size_per_shard=32)
        rise = resident_bytes("VmHWM") - before if is_new else 0
    tensor, slack = 4 * WIDTH * WIDTH, 2 * (1 << 22) + (14 << 20)
    if dist.get_rank() == 0:
        assert asked == [tensor] * LAYERS, "rank 0 reads each tensor once"
        # One block of the stream (64 MiB; here one tensor of 9 MiB), perhaps the block before it, a fragment in
        # transit, and slack.
        assert rise < 2 * tensor + slack < LAYERS * tensor // 2, (rise, tensor)
    else:
        assert rise < slack, rise


# -- strictness


@on_ranks(RANKS)
@pytest.mark.parametrize("name", ["zero1", *full("fsdp"), *campaign("ddp")])
def test_errors_of_sharded_loads_list_all_mismatches(name: str, tmp_path: Path) -> None:
    run = Run(PLUGINS[name]())
    before = run.model.state_dict()
    Booster().save_model(Net(hidden=6), tmp_path / "other", shard=True, size_per_shard=TINY)
    for strict in (True, False):
        said = raises(ValueError, None, run.booster.load_model, run.model, tmp_path / "other", strict=strict)
        for line in ("first.weight: (6, 5) in the checkpoint, (7, 5)", "tied.weight", "again.bias", "last.weight"):
            assert line in said
    torch.manual_seed(5)
    half = nn.Module()
    half.first, half.surplus = nn.Linear(5, 7), nn.Linear(1, 1)
    Booster().save_model(half, tmp_path / "half", shard=True)
    said = raises(ValueError, None, run.booster.load_model, run.model, tmp_path / "half")
    assert "missing from the checkpoint: tied.weight, again.bias" in said.replace("frozen, ", "")
    assert "not in the model: surplus.bias, surplus.weight" in said
    assert_same(run.model.state_dict(), before, tolerance=0)
    run.booster.load_model(run.model, tmp_path / "half", strict=False)
    after = run.model.state_dict()
    assert torch.equal(after["first.weight"], half.first.weight)
    assert torch.equal(after["last.bias"], before["last.bias"])


# -- save_checkpoint and load_checkpoint


@on_ranks(RANKS)
@pytest.mark.parametrize(
    ("writer", "reader"),
    [*(("ddp", "ddp"), ("zero2", "fsdp")), *full(("gemini", "gemini")), *campaign(("fsdp", "fsdp"), ("ddp", "gemini"))],
)
def test_checkpoint_restores_the_full_training_state(writer: str, reader: str, tmp_path: Path) -> None:
    rank = dist.get_rank()
    run = Run(PLUGINS[writer](), noise=writer == reader)
    torch.manual_seed(10 + rank)
    position = {"batch": 2, "rank": rank}
    run.steps(0, 2)
    path = run.booster.save_checkpoint(
        tmp_path, run.model, run.optimizer, run.scheduler, data_position=position, user_state={"best": 0.5}, keep=2
    )
    assert os.path.basename(path) == "step-2"
    run.steps(2, 3)
    run.booster.save_checkpoint(tmp_path, run.model, run.optimizer, [run.scheduler], use_async=True)
    expected = run.steps(3, 5)
    run.booster.wait()
    dist.barrier()
    if rank == 0:
        os.truncate(next(Path(tmp_path, "step-3").glob("pieces-*.safetensors")), 100)
    dist.barrier()
    again = Run(PLUGINS[reader](), seed=99, noise=writer == reader)
    into = tmp_path, again.model, again.optimizer, again.scheduler
    raises(CheckpointDamage, None, again.booster.load_checkpoint, *into)
    restored = again.booster.load_checkpoint(*into, resume="auto")
    assert restored is not None and restored.tag == "step-2" and restored.step == 2
    assert restored.user_state == {"best": 0.5} and restored.data_position == position
    assert [os.path.basename(each) for each in restored.skipped] == ["step-3"]
    if writer == reader:
        assert again.steps(2, 5)[1:] == expected, "as if it had never stopped, random numbers included"
        assert_same(again.model.state_dict(), run.model.state_dict(), tolerance=0)
    else:
        again.steps(2, 5)
        assert_same(again.model.state_dict(), plain(5))
    again.booster.save_checkpoint(tmp_path, again.model)
    assert os.path.isdir(os.path.join(tmp_path, "step-5")), "updates are counted on"


@on_ranks(RANKS)
def test_loss_scales_are_loaded_by_other_plugins(tmp_path: Path) -> None:
    """fp16: each file format carries the scale of LowLevelZero to torch's GradScaler under DDP, and back."""
    runs = {}
    for name, booster in (
        ("zero", Booster(plugin=LowLevelZeroPlugin(stage=2, initial_scale=512.0, growth_interval=100))),
        ("ddp", Booster(mixed_precision="fp16", plugin=PLUGINS["ddp"]())),
    ):
        model = nn.Linear(4, 2)
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        booster.backward(boosted(torch.ones(1, 4)).float().mean(), optimizer)
        optimizer.step()
        runs[name] = booster, optimizer
    ours, theirs = runs["zero"][1].scaler, runs["ddp"][1].scaler
    for writer, reader, shard, scale in (
        ("zero", "ddp", True, 512.0),
        ("ddp", "zero", False, 64.0),
        ("zero", "ddp", False, 64.0),
    ):
        path = tmp_path / f"{writer}-{shard}"
        runs[writer][0].save_optimizer(runs[writer][1], path, shard=shard)
        runs[reader][0].load_optimizer(runs[reader][1], path)
        assert (ours.scale, theirs.get_scale()) == (scale, scale)
        theirs.update(64.0)


@on_ranks(RANKS)
def test_invalid_calls_of_the_checkpoint_methods_raise() -> None:
    run, other = Run(PLUGINS["zero1"]()), Run(PLUGINS["ddp"]())
    for model, optimizer in ((run.model, other.optimizer), (other.model, run.optimizer), (Net(), None)):
        booster = run.booster if model is run.model else other.booster
        raises(ValueError, "boost", booster.save_checkpoint, "nowhere", model, optimizer)
    model = nn.Linear(2, 2)
    session = build(model, torch.optim.SGD(model.parameters(), lr=0.1), zero(1))
    for saving, given in ((run.booster.save_model, session.module), (run.booster.save_optimizer, session.optimizer)):
        raises(ValueError, "not made by a Booster", saving, given, "nowhere")
    session.close()
    raises(ValueError, "resume='later'", lambda: run.booster.load_checkpoint("nowhere", run.model, resume="later"))
    raises(ValueError, "tag='a'", lambda: run.booster.load_checkpoint("nowhere", run.model, tag="a", resume="auto"))
    assert run.booster.load_checkpoint("nowhere", run.model, resume="auto") is None
    raises(FileNotFoundError, None, lambda: run.booster.load_checkpoint("nowhere", run.model))
