"""Tests of ``shardwise checkpoint`` (inspect, convert, diff, verify) and of the detection of formats."""

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from shardwise.core.checkpoint import CheckpointDamage, Checkpointer, CheckpointError, TorchRun, formats
from shardwise.core.checkpoint.formats import open_checkpoint, write_single
from shardwise.core.checkpoint.formats.lazy_tensors import LazySource, entry_of_tensor
from shardwise.core.checkpoint.formats.native import NativeSource, write_native
from shardwise.core.checkpoint.formats.torch_file import check_zip
from tests.support.formats_setup import differing, flip, odd_source, optimizer_facts, tensor
from tests.support.huggingface_setup import gpt2
from tests.support.on_ranks import raises
from tests.support.program_setup import status

_run = partial(status, "checkpoint")


def convert(place: Path, target: Path, to: str, *options: object) -> int:
    return _run("convert", place, target, "--to", to, *options)


def refused(capsys: pytest.CaptureFixture[str], expected: str, *arguments: object) -> None:
    """Check that the command ends with status 2 and one line that contains ``expected``."""
    assert _run(*arguments) == 2, arguments
    shown = capsys.readouterr().err
    assert expected in shown and shown.count("\n") == 1 and "Traceback" not in shown, (arguments, shown)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    source = odd_source()
    found = {name: tmp_path / name for name in ("native", "huggingface", "dcp", "colossalai", "peft")}
    write_native(source, found["native"])
    formats.write_huggingface(source, found["huggingface"], 1e-4)
    formats.write_dcp(source, found["dcp"])
    formats.write_colossalai_model(source, found["colossalai"] / "model")
    formats.write_colossalai_optimizer(source, found["colossalai"] / "optimizer")
    lora = LazySource("m", {"model/a.lora_A.default.weight": entry_of_tensor(torch.ones(2))})
    formats.write_peft(lora, found["peft"], {"peft_type": "LORA"})
    found["single"] = write_single(source, tmp_path / "single" / "m.safetensors")
    return found


def test_every_format_is_detected(places: dict[str, Path]) -> None:
    for name, path in places.items():
        assert formats.detect_format(path) == name
        assert len(open_checkpoint(path).tensors()) > 0
    assert formats.detect_format(places["single"].parent) == "single"
    assert formats.detect_format(places["colossalai"] / "model") == "colossalai"
    assert formats.detect_format(places["huggingface"] / "model.safetensors.index.json") == "huggingface"
    assert formats.detect_format(places["native"].parent) == "native", "the newest in a directory of checkpoints"
    assert differing(odd_source(), open_checkpoint(places["native"].parent)) == []


def test_missing_and_ambiguous_checkpoints(places: dict[str, Path], tmp_path: Path) -> None:
    raises(FileNotFoundError, "no such file", lambda: open_checkpoint(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    raises(FileNotFoundError, "holds no checkpoint", lambda: open_checkpoint(tmp_path / "empty"))
    raises(CheckpointError, "0 files", lambda: open_checkpoint(tmp_path / "empty", format="single"))
    write_single(odd_source(), places["single"].parent / "second.safetensors")
    raises(CheckpointError, "2 files and no index", lambda: open_checkpoint(places["single"].parent))
    (places["dcp"] / "adapter_config.json").write_text("{}")
    raises(CheckpointError, "dcp, peft", lambda: open_checkpoint(places["dcp"]))
    assert open_checkpoint(places["dcp"], format="dcp")
    raises(ValueError, "format='zip'", lambda: open_checkpoint(places["dcp"], format="zip"))
    raises(ValueError, "keeps it with the model", lambda: open_checkpoint(places["native"], optimizer=tmp_path))
    raises(ValueError, "which has names", lambda: open_checkpoint(places["huggingface"], parameter_names=["a"]))


def test_native_keeps_everything(places: dict[str, Path], tmp_path: Path) -> None:
    source, again = odd_source(), open_checkpoint(places["native"])
    assert differing(source, again) == [] and optimizer_facts(again) == optimizer_facts(source)
    assert again.state()["aliases"] == {"head.weight": "embed.weight"}
    before = sorted(path.name for path in places["native"].iterdir())
    write_native(again, places["native"], torch.bfloat16)
    assert sorted(path.name for path in places["native"].iterdir()) == before
    facts = open_checkpoint(places["native"]).tensors()
    assert facts["model/scale"].dtype == torch.bfloat16 and facts["optimizer/0/scale/exp_avg"].dtype == torch.float32


def test_inspect(places: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("inspect", places["dcp"]) == 0
    shown = capsys.readouterr()
    assert "layers.0.weight" in shown.out and "bfloat16" in shown.out and "optimizer: 10 tensors" in shown.out
    assert "groups of 3, 2 parameters" in shown.out and "scalar" in shown.out and not shown.err
    assert _run("inspect", places["native"], "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["format"] == "native" and listed["tensors"]["model/nothing"] == {"shape": [0, 4], "dtype": "float32"}


@pytest.mark.parametrize("to", ["native", "huggingface", "single", "dcp", "torchtitan", "colossalai"])
def test_convert_and_back(to: str, places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / ("x.safetensors" if to == "single" else "x")
    cut = ["--max-shard-size", "100B"] if to in ("huggingface", "colossalai") else []
    assert convert(places["native"], target, to, *cut) == 0
    shown = capsys.readouterr()
    lossy = to in ("huggingface", "single")
    assert ("optimizer state" in shown.err) == lossy and "\r" not in shown.err
    names = tmp_path / "names.txt"
    names.write_text("\n".join(["embed.weight", "scale", "layers.0.weight", "layers.0.bias", "strided"]))
    extra = ["--parameter-names-b", names] if to == "colossalai" else []
    # Formats without ties list both names as tensors; a Hugging Face directory drops one.
    expected = 1 if to == "huggingface" else 0
    options = ["--model-only"] if lossy else []
    assert _run("diff", places["native"], target, *options, *extra) == expected
    shown = capsys.readouterr()
    assert ("model/head.weight: only in" in shown.out) == (expected == 1)
    assert _run("verify", target) == 0


def test_invalid_arguments(places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp, x = places["dcp"], tmp_path / "x"
    cases = [
        (["convert", dcp, x, "--to", "zip"], "invalid choice"),
        (["convert", dcp, dcp, "--to", "dcp"], "the same"),
        (["convert", tmp_path / "nowhere", x, "--to", "dcp"], "no such file"),
        (["convert", dcp, x, "--to", "huggingface", "--max-shard-size", "big"], "'big'"),
        (["convert", dcp, tmp_path / "x.npz", "--to", "single"], "written as .safetensors"),
        (["convert", dcp, places["single"], "--to", "huggingface"], "is a file"),
        (["convert", dcp, "/dev/null", "--to", "single", "--overwrite"], "no regular file"),
        (["convert", dcp, places["native"], "--to", "single", "--overwrite"], "holds a checkpoint of format native"),
        (["convert", dcp, x, "--to", "peft"], "no parameters of a LoRA adapter"),
        (["diff", dcp, dcp, "--rtol", "-1"], "--rtol -1"),
        (["diff", dcp, dcp, "--rtol", "nan"], "--rtol nan: give a finite number >= 0"),
        (["diff", dcp, dcp, "--atol", "inf"], "--atol inf: give a finite number >= 0"),
        (["verify", tmp_path / "nowhere"], "no such file"),
        (["inspect", ""], "the path is empty"),
        (["inspect", places["single"].parent], "holds 2 files"),
        (["inspect", places["native"] / "bad.json"], "bad.json ends in '.json'; known are"),
        (["inspect", tmp_path], "manifest.json is missing"),
    ]
    for to, options, takers in (
        ("dcp", ["--max-shard-size", "5GB"], "huggingface and colossalai alone take it"),
        ("single", ["--lora-alpha", "8"], "peft alone takes it"),
        ("huggingface", ["--adapter", "x"], "peft alone takes it"),
        ("dcp", ["--base", "x"], "peft alone takes it"),
        ("native", ["--adapter-config", "x"], "peft alone takes it"),
        ("native", ["--config", "/nowhere"], "huggingface alone takes it"),
        ("single", ["--safetensors"], "colossalai alone takes it"),
    ):
        cases.append((["convert", dcp, x, "--to", to, *options], f"{options[0]}: --to {takers}; leave it out"))
    (tmp_path / "single" / "second.safetensors").touch()
    (tmp_path / "native" / "manifest.json").rename(tmp_path / "native" / "bad.json")
    for arguments, expected in cases:
        refused(capsys, expected, *arguments)
    assert not x.exists()


def test_dtype_and_tolerance(places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = places["huggingface"], tmp_path / "x"
    assert convert(*both, "huggingface", "--dtype", "bf16") == 0
    assert _run("diff", *both) == 1
    assert "dtype float32 and bfloat16" in capsys.readouterr().out
    assert _run("diff", *both, "--ignore-dtype", "--rtol", "1e-2", "--atol", "1e-40") == 0
    assert _run("diff", *both, "--ignore-dtype") == 1
    assert "elements differ" in capsys.readouterr().out


def _file(path: Path, **tensors: list[float]) -> Path:
    content = {f"model/{name}": entry_of_tensor(torch.tensor(values)) for name, values in tensors.items()}
    return write_single(LazySource("m", content), path)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("one", "two", "options", "status"),
    [
        ([1.0, 2.0], [1.0, 2.0], [], 0),
        ([1.0, 2.0], [1.0, 2.5], [], 1),
        ([1.0, 2.0], [1.0, 2.5], ["--atol", "0.5"], 0),
        ([1.0, 2.0], [1.0, 2.5], ["--rtol", "0.19"], 1),
        ([1.0, NAN], [1.0, NAN], [], 0),
        ([1.0, NAN], [1.0, 1.0], ["--rtol", "1000"], 1),
        ([1.0, 1.0], [1.0, NAN], ["--atol", "1e30"], 1),
        ([INF, 1.0], [INF, 1.0], [], 0),
        ([INF, 1.0], [-INF, 1.0], ["--rtol", "10"], 1),
        ([INF, 1.0], [1.0, 1.0], ["--rtol", "10"], 1),
        ([0.0, 1.0], [-0.0, 1.0], [], 0),
        ([1.0], [1.0, 2.0], [], 1),
    ],
)
def test_diff_of_values(one: list[float], two: list[float], options: list[str], status: int, tmp_path: Path) -> None:
    paths = [_file(tmp_path / f"{i}.safetensors", w=values) for i, values in enumerate((one, two))]
    assert _run("diff", *paths, *options) == status


def test_diff_names_each_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = _file(tmp_path / "a.safetensors", a=[1.0], b=[1.0, 4.0])
    second = _file(tmp_path / "b.safetensors", c=[1.0], b=[1.0, 5.0])
    assert _run("diff", first, second) == 1
    shown = capsys.readouterr().out
    assert "model/a: only in" in shown and "model/c: only in" in shown
    assert "model/b: 1 of 2 elements differ, at most 1 (relative 0.2)" in shown and "3 differences" in shown


def test_verify_finds_damage(places: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for name, path in places.items():
        assert _run("verify", path) == 0, name
    assert "every byte is as written" in capsys.readouterr().out
    pieces = next(places["native"].glob("pieces-*.safetensors"))
    flip(pieces, -1)
    shard = next(places["colossalai"].rglob("pytorch_model-*.bin"))
    flip(shard, 4 + shard.read_bytes().find(tensor(odd_source(), "model/embed.weight").numpy().tobytes()))
    for name, file in (("native", pieces), ("colossalai", shard)):
        assert _run("verify", places[name]) == 1
        assert file.name in capsys.readouterr().out
    raises(CheckpointDamage, None, lambda: check_zip(shard))
    with patch.object(NativeSource, "problems", side_effect=CheckpointError("the file may not be read")):
        refused(capsys, "the file may not be read", "verify", places["native"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.blocks = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(6, 6), "k": nn.Linear(6, 6)}) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + block["k"](torch.tanh(block["q"](hidden)))  # type: ignore[index]
        return self.head(self.q(hidden))


def adapted(**settings: Any) -> tuple[nn.Module, nn.Module]:
    """Return the base model, and a model with an adapter whose parameters are random."""
    peft = pytest.importorskip("peft")
    base = Net()
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**settings))
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return base, model.eval()


ADAPTERS: dict[str, dict[str, Any]] = {
    "some modules of a name": {"r": 3, "lora_alpha": 12, "target_modules": ["blocks.0.q", "blocks.1.q", "embed"]},
    "all modules of a name": {"r": 2, "lora_alpha": 3, "target_modules": ["q", "k"], "modules_to_save": ["head"]},
    "several ranks": {"r": 4, "lora_alpha": 4, "target_modules": ["q", "k"],
                      "rank_pattern": {"^q$": 2, "blocks.1.k": 1}},
    "dora": {"r": 2, "lora_alpha": 5, "target_modules": ["k"], "use_dora": True},
    "biases": {"r": 2, "lora_alpha": 5, "target_modules": ["k"], "lora_bias": True},
}  # fmt: skip


def bare(model: nn.Module, place: Path) -> Path:
    """Write a checkpoint with parameters only."""
    write_native(LazySource("m", {f"model/{n}": entry_of_tensor(v) for n, v in model.state_dict().items()}), place)
    return place


def same_outputs(one: nn.Module, other: nn.Module) -> bool:
    batch = torch.arange(8).reshape(1, 8)
    found = [model.eval()(batch) for model in (one, other)]
    return torch.equal(*(each if isinstance(each, torch.Tensor) else each.logits for each in found))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapter_configuration_from_the_parameters(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, model = adapted(**ADAPTERS[kind])
    options = ["--lora-alpha", ADAPTERS[kind]["lora_alpha"], "--base", "a/b"]
    assert convert(bare(model, tmp_path / "run"), tmp_path / "out", "peft", *options) == 0
    assert same_outputs(peft.PeftModel.from_pretrained(base, tmp_path / "out"), model), kind
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == "a/b"


def test_adapter_configuration_from_a_run_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peft = pytest.importorskip("peft")
    base, model = adapted(r=2, lora_alpha=7, target_modules=["k"], use_rslora=True)
    Checkpointer(TorchRun(model)).save(tmp_path / "runs", "one")
    assert convert(tmp_path / "runs" / "latest", tmp_path / "out", "peft") == 0
    assert same_outputs(peft.PeftModel.from_pretrained(base, tmp_path / "out"), model)
    capsys.readouterr()
    place = bare(model, tmp_path / "bare")
    for wrong, said in [
        ([], "--adapter-config"),
        (["--lora-alpha", "nan"], "nan"),
        (["--lora-alpha", "2", "--adapter-config", tmp_path / "out"], "one of the two"),
        (["--lora-alpha", "2", "--adapter", "other"], "adapter 'other'"),
    ]:
        refused(capsys, said, "convert", place, tmp_path / "x", "--to", "peft", *wrong)
    assert not (tmp_path / "x").exists()
    assert convert(place, tmp_path / "x", "peft", "--adapter-config", tmp_path / "out") == 0
    assert json.loads((tmp_path / "x" / "adapter_config.json").read_text())["use_rslora"] is True


def test_model_configuration_from_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    model = gpt2()
    run = Checkpointer(TorchRun(model)).save(tmp_path / "runs", "one")
    assert convert(run, tmp_path / "out", "huggingface") == 0
    assert "config.json" not in capsys.readouterr().err
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(model) and again.config.n_embd == 8 and same_outputs(again, model)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())


def test_missing_model_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = bare(nn.Linear(3, 1), tmp_path / "run"), tmp_path / "out", "huggingface"
    assert convert(*command) == 0
    said = capsys.readouterr().err
    assert "has no config.json" in said and "--config" in said
    (file := tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "out" / "model.safetensors.index.json").write_text("{")  # damage
    refused(capsys, "out: is not empty; give another path, or --overwrite", "convert", *command[:2], "--to", "single")
    assert convert(*command, "--overwrite", "--config", file) == 0
    assert "config.json" not in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "gpt2"}
    file.write_text("[1]")
    refused(capsys, "not a configuration", "convert", *command[:2], "--to=huggingface", "--overwrite", "--config", file)
