"""Tests of the Booster's checkpoint files in one process: contents, damage, atomic writes, and errors that list
misfits.
"""

import copy
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import lr_scheduler as schedules

from shardwise.booster import Booster, FP16TorchMixedPrecision
from shardwise.core import checkpoint
from shardwise.core.base import tree
from shardwise.nn.lr_scheduler import MultiStepWarmupLR
from shardwise.testing import assert_close
from tests.support.on_ranks import raises


def parts() -> tuple[Booster, nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 2)
    return Booster(), model, torch.optim.SGD(model.parameters(), lr=0.1)


def same_state(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether two optimizer states have the same tensors."""
    return all(
        torch.equal(torch.as_tensor(found["state"][number][key]), torch.as_tensor(value))
        for number, entry in expected["state"].items()
        for key, value in entry.items()
    )


def test_tree_round_trip() -> None:
    value = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3, dtype=torch.bfloat16)}, 1: {}},
        "param_groups": [{"betas": (0.9, 0.999), "lr": 1e-3, "fused": None, "params": [0, 1]}],
        "best": math.inf,
        "milestones": Counter({3: 1, 5: 2}),
        "$odd": [True, "x", -math.inf, ((1,), [])],
        "$tensor": {"$tuple": 1},
    }
    tensors: dict[str, torch.Tensor] = {}
    data = json.loads(json.dumps(tree.encode(value, tensors), allow_nan=False))
    back = tree.decode(data, tensors)
    assert torch.equal(back["state"][0].pop("exp_avg"), value["state"][0].pop("exp_avg"))  # type: ignore[index, union-attr]
    assert back == value
    assert type(back["milestones"]) is Counter and type(back["param_groups"][0]["betas"]) is tuple
    raises(TypeError, r"a/0 is a object.*which a checkpoint cannot hold", lambda: tree.encode({"a": [object()]}, {}))


class Tied(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("seen", torch.tensor(7))

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}


def test_model_file(tmp_path: Path) -> None:
    model, other, booster = Tied(), Tied(), Booster()
    file = tmp_path / "new" / "model.safetensors"
    booster.save_model(model, file, use_safetensors=True)
    assert [item.name for item in file.parent.iterdir()] == ["model.safetensors"]
    assert file.stat().st_size < 1500  # the tied weight is stored once
    assert booster.load_model(other, file) is other
    assert torch.equal(other.head.weight, model.embed.weight) and other.head.weight is other.embed.weight
    booster.save_model(model, tmp_path / "prefixed", prefix="net.")
    assert "net.embed.weight" in load_file(tmp_path / "prefixed")
    holder = nn.Module()
    holder.add_module("net", Tied())
    booster.load_model(holder, tmp_path / "prefixed")
    assert torch.equal(holder.net.head.weight, model.embed.weight)
    state, other = model.state_dict(), Tied()
    del state["head.weight"]  # the file has only one of the two tied names
    torch.save(state, tmp_path / "model.bin")
    booster.load_model(other, tmp_path / "model.bin")
    assert torch.equal(other.head.weight, model.head.weight)
    booster.load_model(other, file.parent)


def test_defect_5_shape_mismatch_is_an_error_that_lists_everything(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file({"weight": torch.zeros(3, 4), "more": torch.zeros(1)}, file)
    booster, model, _ = parts()
    before = copy.deepcopy(model.state_dict())
    error = raises(ValueError, None, booster.load_model, model, file)
    misfit = "weight: (3, 4) in the checkpoint, (2, 4)"
    for line in (misfit, "missing from the checkpoint: bias", "not in the model: more"):
        assert line in error
    raises(ValueError, r"weight: \(3, 4\)", booster.load_model, model, file, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    save_file({"weight": torch.ones(2, 4), "more": torch.zeros(1)}, file)
    booster.load_model(model, file, strict=False)
    assert torch.equal(model.weight, torch.ones(2, 4)) and torch.equal(model.bias, before["bias"])


def stepped(seed: int, steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return model, optimizer and scheduler; the optimizer of a trained model has named parameters."""
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.Adafactor(model.named_parameters() if steps else model.parameters())
    scheduler = MultiStepWarmupLR(torch.optim.SGD(model.parameters(), lr=0.1), 20, 2, [4, 9])
    for _ in range(steps):
        model.head(model.embed(torch.arange(5))).square().mean().backward()
        optimizer.step()
        scheduler.optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_torch_files_are_read_by_torch_without_code(tmp_path: Path, suffix: str) -> None:
    booster, (model, optimizer, scheduler) = Booster(), stepped(0, steps=3)
    booster.save_model(model, tmp_path / f"m{suffix}")
    booster.save_optimizer(optimizer, tmp_path / f"o{suffix}", use_async=True)
    booster.save_lr_scheduler(scheduler, tmp_path / f"s{suffix}")
    booster.wait()
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"m{suffix}", f"o{suffix}", f"s{suffix}"]
    weights, state, rates = (torch.load(tmp_path / f"{kind}{suffix}", weights_only=True) for kind in "mos")
    assert weights["embed.weight"].data_ptr() == weights["head.weight"].data_ptr()  # one storage, stored once
    assert weights["_extra_state"] == {"version": 3} and rates == scheduler.state_dict()
    plain, theirs, _ = stepped(1)
    plain.load_state_dict(weights)
    theirs.load_state_dict(state)
    again, own, resumed = stepped(2)
    booster.load_model(again, tmp_path / f"m{suffix}")
    booster.load_optimizer(own, tmp_path / f"o{suffix}")
    booster.load_lr_scheduler(resumed, tmp_path / f"s{suffix}")
    assert resumed.state_dict() == scheduler.state_dict() and again.head.weight is again.embed.weight
    assert_close(dict(again.named_parameters()), dict(model.named_parameters()), 0.0, "model")
    for found in (theirs, own):
        assert same_state(found.state_dict(), optimizer.state_dict())
    (tmp_path / f"m{suffix}").write_bytes((tmp_path / f"m{suffix}").read_bytes()[:-40])
    raises(checkpoint.CheckpointError, None, lambda: booster.load_model(again, tmp_path / f"m{suffix}"))


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    booster, model, optimizer = parts()
    file = tmp_path / "m.safetensors"
    raises(FileNotFoundError, r"m\.safetensors", lambda: booster.load_model(model, file))
    booster.save_model(model, file)
    raises(checkpoint.CheckpointError, "holds no optimizer", lambda: booster.load_optimizer(optimizer, file))
    booster.save_optimizer(optimizer, tmp_path / "o")
    raises(checkpoint.CheckpointError, "holds no model", lambda: booster.load_model(model, tmp_path / "o"))
    (tmp_path / "o").unlink()
    file.write_bytes(file.read_bytes()[:-3])
    raises(checkpoint.CheckpointDamage, "where its header says", lambda: booster.load_model(model, file))
    raises(checkpoint.CheckpointError, "is a directory", lambda: booster.save_model(model, tmp_path))
    raises(checkpoint.CheckpointError, "is a file", lambda: booster.save_model(model, file, shard=True))
    raises(FileNotFoundError, "holds no checkpoint", lambda: booster.load_model(model, tmp_path / ".."))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    raises(checkpoint.CheckpointError, "not an index", lambda: booster.load_model(model, tmp_path))


def test_published_arguments_without_effect(tmp_path: Path) -> None:
    booster, model, optimizer = parts()
    of_model, of_optimizer = (model, tmp_path / "m"), (optimizer, tmp_path / "o")
    raises(NotImplementedError, "gather_dtensor=False", booster.save_model, *of_model, gather_dtensor=False)
    sizes = {"shard": True, "size_per_shard": 0}
    raises(ValueError, "size_per_shard=0", booster.save_optimizer, *of_optimizer, **sizes)
    raises(ValueError, "prefix='x'", booster.save_optimizer, *of_optimizer, prefix="x")
    raises(ValueError, r"ending in \.safetensors", booster.save_model, *of_model, use_safetensors=True)
    assert not list(tmp_path.iterdir())
    with pytest.warns(UserWarning, match="size_per_shard=5 has no effect"):
        booster.save_model(model, tmp_path / "m", size_per_shard=5)
    with pytest.warns(UserWarning, match="num_threads=4"):
        booster.load_model(model, tmp_path / "m", num_threads=4)
    with pytest.warns(UserWarning, match="low_cpu_mem_mode=False"):
        booster.save_optimizer(optimizer, tmp_path / "o")
        booster.load_optimizer(optimizer, tmp_path / "o", low_cpu_mem_mode=False)


@pytest.mark.parametrize("shard", [False, True])
def test_model_and_optimizer_in_one_directory(tmp_path: Path, shard: bool) -> None:
    """Both are loaded from one directory, also by the path of an index and with prefixes."""
    torch.manual_seed(0)
    model, booster = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), Booster()
    model, optimizer, *_ = booster.boost(model, torch.optim.Adam(model.parameters(), lr=0.1))
    booster.backward(model(torch.ones(1, 4)).square().sum(), optimizer)
    optimizer.step()
    name = tmp_path if shard else tmp_path / "model.safetensors"
    booster.save_model(model, name, shard=shard)
    booster.save_optimizer(optimizer, tmp_path, shard=True, size_per_shard=1e-4)  # type: ignore[arg-type]
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    places: list[tuple[Path, Path]] = [(tmp_path, tmp_path), (tmp_path, tmp_path / "pytorch_optim.bin.index.json")]
    if shard:
        booster.save_model(model, tmp_path / "two", shard=True, prefix="a")
        booster.save_model(model, tmp_path / "two", shard=True, prefix="b")
        booster.save_optimizer(optimizer, tmp_path / "two", shard=True, prefix="a")
        index = "pytorch_optim.bin.index.a.json"
        places.append((tmp_path / "two" / "model.safetensors.index.b.json", tmp_path / "two" / index))
        raises(checkpoint.CheckpointError, "several checkpoints", lambda: booster.load_model(model, tmp_path / "two"))
    for where_model, where_optimizer in places:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer.optim.state.clear()
        booster.load_model(model, where_model)
        booster.load_optimizer(optimizer, where_optimizer)
        assert all(torch.equal(value, kept[0][name]) for name, value in model.state_dict().items())
        assert same_state(optimizer.state_dict(), kept[1])


def test_failed_save_keeps_the_earlier_file(tmp_path: Path) -> None:
    booster = Booster()
    file = tmp_path / "m.safetensors"
    booster.save_model(nn.Linear(2, 2), file)
    before = file.read_bytes()

    class Odd(nn.Linear):
        def get_extra_state(self) -> object:
            return object()

    raises(checkpoint.CheckpointError, "_extra_state", lambda: booster.save_model(Odd(2, 2), file))
    assert file.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "make"),
    [
        (None, lambda o: schedules.MultiStepLR(o, [2, 4])),
        ("fp16", lambda o: schedules.MultiStepLR(o, [2, 4])),
        (None, lambda o: schedules.ReduceLROnPlateau(o)),
        (None, lambda o: schedules.OneCycleLR(o, 0.1, 10)),
        (None, lambda o: schedules.LambdaLR(o, lambda step: 0.5**step)),
        (None, lambda o: schedules.CosineAnnealingWarmRestarts(o, 3)),
        (None, lambda o: schedules.SequentialLR(o, [schedules.ConstantLR(o), schedules.ExponentialLR(o, 0.9)], [2])),
    ],
    ids=["steps", "fp16", "plateau", "one-cycle", "lambda", "restarts", "sequential"],
)
def test_optimizer_and_scheduler_files(tmp_path: Path, name: str | None, make: Any) -> None:
    def start() -> tuple[Booster, nn.Module, Any, Any]:
        torch.manual_seed(1)
        model = nn.Linear(4, 2)
        groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "betas": (0.5, 0.9)}]
        optimizer = torch.optim.AdamW(groups)
        scheduler = make(optimizer)
        booster = Booster(mixed_precision=FP16TorchMixedPrecision(init_scale=64.0) if name else None)
        model, optimizer, *_ = booster.boost(model, optimizer)
        return booster, model, optimizer, scheduler

    def steps(booster: Booster, model: nn.Module, optimizer: Any, scheduler: Any) -> list[float]:
        rates = []
        for _ in range(3):
            booster.backward(model(torch.ones(1, 4)).square().sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*([1.0] if isinstance(scheduler, schedules.ReduceLROnPlateau) else []))
            rates += [group["lr"] for group in optimizer.param_groups]
        return rates

    booster, model, optimizer, scheduler = start()
    steps(booster, model, optimizer, scheduler)
    if name == "fp16":
        optimizer.scaler.update(128.0)
    booster.save_model(model, tmp_path / "m")
    booster.save_optimizer(optimizer, tmp_path / "o")
    booster.save_lr_scheduler(scheduler, tmp_path / "s.json")
    rates = steps(booster, model, optimizer, scheduler)
    expected = [p.detach().clone() for p in model.parameters()]

    booster, model, optimizer, scheduler = start()
    booster.load_model(model, tmp_path / "m")
    booster.load_optimizer(optimizer, tmp_path / "o")
    booster.load_lr_scheduler(scheduler, tmp_path / "s.json")
    if name == "fp16":
        assert optimizer.scaler.get_scale() == 128.0  # the state of the scaler is saved, too (defect 10)
        assert optimizer.param_groups[1]["betas"] == (0.5, 0.9)
    assert steps(booster, model, optimizer, scheduler) == pytest.approx(rates)
    assert all(torch.equal(a, b) for a, b in zip(expected, model.parameters(), strict=True))


def test_optimizer_file_of_another_model(tmp_path: Path) -> None:
    booster, model, optimizer = parts()
    booster.save_optimizer(optimizer, tmp_path / "o")
    other = nn.Linear(5, 2)
    for params, misfit in (
        (other.parameters(), r"group 0, parameter 0: shape \(2, 4\) in the checkpoint, \(2, 5\)"),
        ([other.weight], "group 0: 2 parameters in the checkpoint, 1"),
        ([{"params": [parameter]} for parameter in model.parameters()], "1 parameter groups and the optimizer 2"),
    ):
        raises(ValueError, misfit, booster.load_optimizer, torch.optim.SGD(params, lr=1.0), tmp_path / "o")
