"""The Booster's checkpoints on two ranks: every plugin reads what another wrote, whole or in shards, in any format."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from shardwise.core.checkpoint import CheckpointDamage, portable
from shardwise.plan import zero
from shardwise.session import build
from shardwise.testing import run_ranks
from tests.support.booster_setup import PLUGINS, TINY, Net, Run, assert_same, batch, load, plain, save, start
from tests.support.counters import forget_peak, resident_bytes
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full

RANKS = 2

# -- shards


def _shards(writer: str, reader: str, folder: str) -> None:
    run = Run(PLUGINS[writer]())
    run.steps(0, 2)
    with torch.no_grad():
        run.model(torch.ones(1, 5))  # whole parameters may be left in place
    save(run, Path(folder))
    again = Run(PLUGINS[reader](), seed=99)
    with torch.no_grad():
        again.model(torch.ones(1, 5))
    load(again, Path(folder))
    assert again.net.extra["calls"] == 3 and torch.equal(again.net.extra["mark"], torch.ones(2))
    again.steps(2, 4)
    assert_same(again.model.state_dict(), plain(4))


def _torch_files(writer: str, reader: str, folder: str) -> None:
    """As ColossalAI's scripts name them; plain torch goes on with them, too."""
    run, path = Run(PLUGINS[writer]()), Path(folder)
    run.steps(0, 2)
    run.booster.save_model(run.model, path / "model.pt", use_async=True)
    run.booster.save_model(run.model, path / "shards", shard=True, use_safetensors=False, size_per_shard=TINY)  # type: ignore[arg-type]
    run.booster.save_optimizer(run.optimizer, path / "optimizer.pt")
    run.booster.save_lr_scheduler(run.scheduler, path / "scheduler.pt")
    run.booster.wait()
    for name in ("model.pt", "shards"):
        again = Run(PLUGINS[reader](), seed=99)
        again.booster.load_model(again.model, path / name)
        again.booster.load_optimizer(again.optimizer, path / "optimizer.pt")
        again.booster.load_lr_scheduler(again.scheduler, path / "scheduler.pt")
        assert again.net.extra["calls"] == 2 and torch.equal(again.net.extra["mark"], torch.ones(2))
        again.steps(2, 4)
        assert_same(again.model.state_dict(), plain(4))
    if dist.get_rank() == 0:
        parts = start(seed=99)
        for part, name in zip(parts, ("model", "optimizer", "scheduler"), strict=True):
            part.load_state_dict(torch.load(path / f"{name}.pt", weights_only=True))
        model, optimizer, scheduler = parts
        for step in range(2, 4):
            inputs, targets = batch(step)
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        assert_same(model.state_dict(), plain(4))


def test_torch_files_go_from_one_plugin_to_another_and_to_torch(tmp_path: Path) -> None:
    run_ranks(RANKS, _torch_files, "gemini", "zero2", str(tmp_path))
    names = {file.name for file in (tmp_path / "shards").iterdir()}
    assert "pytorch_model.bin.index.json" in names and "pytorch_model-00002.bin" in names


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        *full(("ddp", "gemini")),
        ("gemini", "fsdp"),
        ("fsdp-grad-op", "zero2"),
        pytest.param("zero2", "zero1", marks=pytest.mark.campaign),
        *full(("zero1", "fsdp-hybrid"), ("fsdp-hybrid", "gemini-replicas")),
        pytest.param("gemini-replicas", "ddp", marks=pytest.mark.campaign),
    ],
)
def test_shards_of_any_plugin_are_read_by_any_other(writer: str, reader: str, tmp_path: Path) -> None:
    run_ranks(RANKS, _shards, writer, reader, str(tmp_path))
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text("utf-8"))
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(os.listdir(tmp_path / "model")) == sorted([*files, "model.safetensors.index.json"])
    expected = plain(2)
    stored: dict[str, torch.Tensor] = {}
    for file in files:
        stored |= load_file(tmp_path / "model" / file)
    assert "again.weight" not in stored, "a tied weight is stored once"
    for name, value in stored.items():
        if not name.startswith("$"):
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)
    _as_colossalai_loads_an_optimizer(tmp_path / "optimizer")


def _as_colossalai_loads_an_optimizer(folder: Path) -> None:
    """One index, its groups file, numbers through the groups: what upstream's loader does; then a step as torch's."""
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


def _tied_language_model(folder: str, name: str) -> dict[str, torch.Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=6))
    booster = Booster(plugin=PLUGINS[name]())
    boosted, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.save_model(boosted, folder, shard=True, size_per_shard=1e-3)
    booster.save_model(boosted, folder, shard=True, prefix="ema", use_safetensors=True)
    return dict(boosted.state_dict())


@pytest.mark.parametrize("name", ["fsdp", pytest.param("gemini", marks=pytest.mark.campaign)])
def test_from_pretrained_loads_the_shards(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel

    expected = run_ranks(RANKS, _tied_language_model, str(tmp_path), name)[0]
    assert len(list(tmp_path.glob("model-0*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight and type(loaded) is GPT2LMHeadModel
    assert_same(loaded.state_dict(), expected, tolerance=0)
    assert json.loads((tmp_path / "config.json").read_text("utf-8"))["architectures"] == ["GPT2LMHeadModel"]
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path, variant="ema").state_dict(), expected, tolerance=0)


WIDTH, LAYERS = 1536, 10


def _peak(folder: str) -> tuple[int, list[int]]:
    """By how many bytes the host memory of this rank rose while saving, and what rank 0 asked for at a time."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    plugin = GeminiPlugin(precision="fp32", min_chunk_size_m=1, search_range_m=1)
    booster = Booster(plugin=plugin)
    boosted, *_ = booster.boost(model)
    asked: list[int] = []

    class Counting(portable._Gathered):
        def read(self, name: str, start: int, numel: int) -> torch.Tensor:
            asked.append(numel * 4)
            return super().read(name, start, numel)

    before_class, portable._Gathered = portable._Gathered, Counting  # type: ignore[misc]
    before_block, portable.BLOCK_BYTES = portable.BLOCK_BYTES, 1 << 22
    try:
        is_new = forget_peak()
        before = resident_bytes("VmRSS")
        booster.save_model(boosted, folder, shard=True, size_per_shard=32)
        rise = resident_bytes("VmHWM") - before if is_new else 0
    finally:
        portable._Gathered, portable.BLOCK_BYTES = before_class, before_block  # type: ignore[misc]
    return rise, asked


def test_no_rank_holds_the_model(tmp_path: Path) -> None:
    (first, asked), (second, _) = run_ranks(RANKS, _peak, str(tmp_path))
    tensor = 4 * WIDTH * WIDTH
    assert asked == [tensor] * LAYERS, "rank 0 reads each tensor once"
    # A block of the stream (64 MiB, here one tensor of 9), perhaps the one before it, a fragment on its way, and slack.
    assert first < 2 * tensor + 2 * (1 << 22) + (8 << 20) < LAYERS * tensor // 2, (first, tensor)
    assert second < 2 * (1 << 22) + (8 << 20), second


# -- strictness


def _misfits(name: str, folder: str) -> str:
    run = Run(PLUGINS[name]())
    before = run.model.state_dict()
    path = Path(folder) / "other"
    Booster().save_model(Net(hidden=6), path, shard=True, size_per_shard=TINY)
    for strict in (True, False):
        with pytest.raises(ValueError) as error:
            run.booster.load_model(run.model, path, strict=strict)
    torch.manual_seed(5)
    half = nn.Module()
    half.first, half.surplus = nn.Linear(5, 7), nn.Linear(1, 1)
    Booster().save_model(half, Path(folder) / "half", shard=True)
    with pytest.raises(ValueError) as strictly:
        run.booster.load_model(run.model, Path(folder) / "half")
    assert_same(run.model.state_dict(), before, tolerance=0)
    run.booster.load_model(run.model, Path(folder) / "half", strict=False)
    after = run.model.state_dict()
    assert torch.equal(after["first.weight"], half.first.weight)
    assert torch.equal(after["last.bias"], before["last.bias"])
    return f"{error.value}\n{strictly.value}"


@pytest.mark.parametrize("name", [pytest.param("ddp", marks=pytest.mark.campaign), *full("fsdp"), "zero1"])
def test_defect_5_sharded_misfits_are_listed(name: str, tmp_path: Path) -> None:
    for message in run_ranks(RANKS, _misfits, name, str(tmp_path)):
        for line in ("first.weight: (6, 5) in the checkpoint, (7, 5)", "tied.weight", "again.bias", "last.weight"):
            assert line in message
        assert "missing from the checkpoint: tied.weight, again.bias" in message.replace("frozen, ", "")
        assert "not in the model: surplus.bias, surplus.weight" in message


# -- tiers


# -- everything


@on_ranks(RANKS)
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("ddp", "ddp"),
        *full(("gemini", "gemini")),
        ("zero2", "fsdp"),
        pytest.param("fsdp", "fsdp", marks=pytest.mark.campaign),
        pytest.param("ddp", "gemini", marks=pytest.mark.campaign),
    ],
)
def test_everything_is_saved_and_restored(writer: str, reader: str, tmp_path: Path) -> None:
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
        piece = next(Path(tmp_path, "step-3").glob("pieces-*.safetensors"))
        content = bytearray(piece.read_bytes())
        content[-1] ^= 1
        piece.write_bytes(content)
    dist.barrier()
    again = Run(PLUGINS[reader](), seed=99, noise=writer == reader)
    raises(
        CheckpointDamage, None, again.booster.load_checkpoint, tmp_path, again.model, again.optimizer, again.scheduler
    )
    restored = again.booster.load_checkpoint(tmp_path, again.model, again.optimizer, again.scheduler, resume="auto")
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


def _loss_scale(folder: str) -> list[tuple[float, float]]:
    """fp16: our scale, and torch's under DDP, through every kind of file and into each other."""
    runs = {}
    for name, booster in (
        ("zero", Booster(plugin=LowLevelZeroPlugin(stage=2, initial_scale=512.0, growth_interval=100))),
        ("ddp", Booster(mixed_precision="fp16", plugin=PLUGINS["ddp"]())),
    ):
        model = nn.Linear(4, 2)
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        booster.backward(boosted(torch.ones(1, 4)).float().mean(), optimizer)
        optimizer.step()
        runs[name] = (booster, boosted, optimizer)

    def scale(name: str) -> float:
        scaler = runs[name][2].scaler
        return float(scaler.get_scale() if name == "ddp" else scaler.scale)

    found = []
    for writer, reader, shard in (("zero", "ddp", True), ("ddp", "zero", False), ("zero", "ddp", False)):
        path = Path(folder) / f"{writer}-{shard}"
        wanted = scale(writer)
        runs[writer][0].save_optimizer(runs[writer][2], path, shard=shard)
        runs[reader][0].load_optimizer(runs[reader][2], path)
        found.append((scale(reader), wanted))
        if reader == "ddp":
            runs["ddp"][2].scaler.update(64.0 * len(found))
    return found


def test_defect_10_loss_scales_travel_between_plugins(tmp_path: Path) -> None:
    for found in run_ranks(RANKS, _loss_scale, str(tmp_path)):
        assert found[0] == (512.0, 512.0) and found[1] == (64.0, 64.0) and found[2] == (64.0, 64.0)


@on_ranks(RANKS)
def test_wrong_calls_of_the_checkpoint_methods() -> None:
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
