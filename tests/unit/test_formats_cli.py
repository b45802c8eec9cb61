"""`shardwise checkpoint` and the detection of formats.

``convert`` to what needs more than tensors: a configuration, an adapter's settings.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from formats_setup import differing, odd_source, optimizer_facts, tensor
from torch import nn

from shardwise.cli.main import main
from shardwise.core.checkpoint import CheckpointDamage, Checkpointer, CheckpointError, TorchRun
from shardwise.core.checkpoint.formats import (
    detect_format,
    open_checkpoint,
    write_colossalai_model,
    write_colossalai_optimizer,
    write_dcp,
    write_huggingface,
    write_peft,
    write_single,
)
from shardwise.core.checkpoint.formats.lazy import LazySource, entry_of_tensor
from shardwise.core.checkpoint.formats.native import write_native
from shardwise.core.checkpoint.formats.torch_file import check_zip
from tests.support.on_ranks import raises


def _run(*arguments: object) -> int:
    try:
        return main(["checkpoint", *map(str, arguments)])
    except SystemExit as stopped:
        return int(stopped.code or 0)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    source = odd_source()
    found = {name: tmp_path / name for name in ("native", "huggingface", "dcp", "colossalai", "peft")}
    write_native(source, found["native"])
    write_huggingface(source, found["huggingface"], 1e-4)
    write_dcp(source, found["dcp"])
    write_colossalai_model(source, found["colossalai"] / "model")
    write_colossalai_optimizer(source, found["colossalai"] / "optimizer")
    lora = LazySource("m", {"model/a.lora_A.default.weight": entry_of_tensor(torch.ones(2))})
    write_peft(lora, found["peft"], {"peft_type": "LORA"})
    found["single"] = write_single(source, tmp_path / "single" / "m.safetensors")
    return found


def test_every_format_is_recognised(places: dict[str, Path]) -> None:
    for name, path in places.items():
        assert detect_format(path) == name
        assert len(open_checkpoint(path).tensors()) > 0
    assert detect_format(places["single"].parent) == "single"
    assert detect_format(places["colossalai"] / "model") == "colossalai"
    assert detect_format(places["huggingface"] / "model.safetensors.index.json") == "huggingface"
    assert detect_format(places["native"].parent) == "native", "the newest in a directory of checkpoints"
    assert differing(odd_source(), open_checkpoint(places["native"].parent)) == []


def test_nothing_and_several_are_errors(places: dict[str, Path], tmp_path: Path) -> None:
    raises(FileNotFoundError, "no such file", lambda: open_checkpoint(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    raises(FileNotFoundError, "holds no checkpoint", lambda: open_checkpoint(tmp_path / "empty"))
    write_single(odd_source(), places["single"].parent / "second.safetensors")
    raises(CheckpointError, "2 files and no index", lambda: open_checkpoint(places["single"].parent))
    (places["dcp"] / "adapter_config.json").write_text("{}")
    raises(CheckpointError, "dcp, peft", lambda: open_checkpoint(places["dcp"]))
    assert open_checkpoint(places["dcp"], format="dcp")
    raises(ValueError, "format='zip'", lambda: open_checkpoint(places["dcp"], format="zip"))
    raises(ValueError, "keeps it with the model", lambda: open_checkpoint(places["huggingface"], optimizer=tmp_path))
    raises(ValueError, "which has names", lambda: open_checkpoint(places["huggingface"], parameter_names=["a"]))


def test_native_holds_everything(places: dict[str, Path], tmp_path: Path) -> None:
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
def test_convert_to_everything_and_back(
    to: str, places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / ("x.safetensors" if to == "single" else "x")
    cut = ["--max-shard-size", "100B"] if to in ("huggingface", "colossalai") else []
    assert _run("convert", places["native"], target, "--to", to, *cut) == 0
    shown = capsys.readouterr()
    lossy = to in ("huggingface", "single")
    assert ("optimizer state" in shown.err) == lossy and "\r" not in shown.err
    names = tmp_path / "names.txt"
    names.write_text("\n".join(["embed.weight", "scale", "layers.0.weight", "layers.0.bias", "strided"]))
    extra = ["--parameter-names-b", names] if to == "colossalai" else []
    # Formats without ties list the other name as a tensor; a Hugging Face directory drops it.
    expected = 1 if to == "huggingface" else 0
    options = ["--model-only"] if lossy else []
    assert _run("diff", places["native"], target, *options, *extra) == expected
    shown = capsys.readouterr()
    assert ("model/head.weight: only in" in shown.out) == (expected == 1)
    assert _run("verify", target) == 0


def test_convert_refuses(places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        (["convert", places["dcp"], tmp_path / "x", "--to", "zip"], "invalid choice"),
        (["convert", places["dcp"], places["dcp"], "--to", "dcp"], "the same"),
        (["convert", tmp_path / "nowhere", tmp_path / "x", "--to", "dcp"], "no such file"),
        (["convert", places["dcp"], tmp_path / "x", "--to", "huggingface", "--max-shard-size", "big"], "'big'"),
        (
            ["convert", places["dcp"], tmp_path / "x", "--to", "dcp", "--max-shard-size", "5GB"],
            "--max-shard-size: --to huggingface and colossalai alone take it; leave it out",
        ),
        (["convert", places["dcp"], tmp_path / "x.npz", "--to", "single"], "written as .safetensors"),
        (["convert", places["dcp"], places["single"], "--to", "huggingface"], "is a file"),
        (["convert", places["dcp"], tmp_path / "x", "--to", "peft"], "no parameters of a LoRA adapter"),
        (["diff", places["dcp"], places["dcp"], "--rtol", "-1"], "--rtol -1"),
        (["diff", places["dcp"], places["dcp"], "--rtol", "nan"], "--rtol nan: give a finite number >= 0"),
        (["diff", places["dcp"], places["dcp"], "--atol", "inf"], "--atol inf: give a finite number >= 0"),
        (["verify", tmp_path / "nowhere"], "no such file"),
        (["inspect", tmp_path / "several"], "holds"),
        (["inspect", tmp_path], "manifest.json is missing"),
    ]
    (tmp_path / "several").mkdir()
    for name in ("second", "third"):
        (tmp_path / "several" / f"{name}.safetensors").touch()
    (tmp_path / "native" / "manifest.json").unlink()
    for arguments, expected in cases:
        assert _run(*arguments) == 2, arguments
        shown = capsys.readouterr().err
        assert expected in shown and shown.count("\n") == 1 and "Traceback" not in shown, (arguments, shown)


def test_dtype_and_tolerance(places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("convert", places["huggingface"], tmp_path / "x", "--to", "huggingface", "--dtype", "bfloat16") == 0
    assert _run("diff", places["huggingface"], tmp_path / "x") == 1
    assert "dtype float32 and bfloat16" in capsys.readouterr().out
    close = ["--ignore-dtype", "--rtol", "1e-2", "--atol", "1e-40"]
    assert _run("diff", places["huggingface"], tmp_path / "x", *close) == 0
    assert _run("diff", places["huggingface"], tmp_path / "x", "--ignore-dtype") == 1
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
    content = bytearray(pieces.read_bytes())
    content[-1] ^= 1
    pieces.write_bytes(content)
    assert _run("verify", places["native"]) == 1
    assert pieces.name in capsys.readouterr().out
    shard = next(places["colossalai"].rglob("pytorch_model-*.bin"))
    content = bytearray(shard.read_bytes())
    position = content.find(tensor(odd_source(), "model/embed.weight").numpy().tobytes())
    content[position + 4] ^= 1
    shard.write_bytes(content)
    assert _run("verify", places["colossalai"]) == 1
    assert shard.name in capsys.readouterr().out
    raises(CheckpointDamage, None, lambda: check_zip(shard))


def convert(*arguments: object) -> int:
    try:
        return main(["checkpoint", "convert", *map(str, arguments)])
    except SystemExit as stopped:
        return int(stopped.code or 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(6, 6), "k": nn.Linear(6, 6)}) for _ in range(2))
        self.q = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + block["k"](torch.tanh(block["q"](hidden)))  # type: ignore[index]
        return self.head(self.q(hidden))


def adapted(seed: int = 0, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """The base model, and a model with an adapter whose every parameter is random."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    base, other = Net(), Net()
    other.load_state_dict(base.state_dict())
    model = peft.get_peft_model(other, peft.LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return base, model.eval()


ADAPTERS: dict[str, dict[str, Any]] = {
    "some modules of a name": {"r": 3, "lora_alpha": 12, "target_modules": ["blocks.0.q", "blocks.1.q", "embed"]},
    "all modules of a name": {"r": 2, "lora_alpha": 3, "target_modules": ["q", "k"], "modules_to_save": ["head"]},
    "several ranks": {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["q", "k"],
        "rank_pattern": {"^q$": 2, "blocks.1.k": 1},
    },
    "dora": {"r": 2, "lora_alpha": 5, "target_modules": ["k"], "use_dora": True},
    "biases": {"r": 2, "lora_alpha": 5, "target_modules": ["k"], "lora_bias": True},
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapters_configuration_is_deduced_from_its_parameters(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, model = adapted(**ADAPTERS[kind])
    entries = {f"model/{name}": entry_of_tensor(value) for name, value in model.state_dict().items()}
    write_native(LazySource("memory", entries), tmp_path / "run")
    alpha = ADAPTERS[kind]["lora_alpha"]
    assert convert(tmp_path / "run", tmp_path / "out", "--to", "peft", "--lora-alpha", alpha, "--base", "a/b") == 0
    again = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    batch = torch.arange(11).reshape(1, 11)
    assert torch.equal(again(batch), model(batch)), kind
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == "a/b"


def test_an_adapters_configuration_comes_from_the_run_or_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    base, model = adapted(r=2, lora_alpha=7, target_modules=["k"], use_rslora=True)
    run = Checkpointer(TorchRun(model)).save(tmp_path / "runs", "one")
    assert convert(run, tmp_path / "out", "--to", "peft") == 0
    batch = torch.arange(11).reshape(1, 11)
    assert torch.equal(peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()(batch), model(batch))
    entries = {f"model/{name}": entry_of_tensor(value) for name, value in model.state_dict().items()}
    write_native(LazySource("memory", entries), tmp_path / "bare")
    assert convert(tmp_path / "bare", tmp_path / "x", "--to", "peft") == 2
    assert "--adapter-config" in capsys.readouterr().err
    assert convert(tmp_path / "bare", tmp_path / "x", "--to", "peft", "--adapter-config", tmp_path / "out") == 0
    assert json.loads((tmp_path / "x" / "adapter_config.json").read_text())["use_rslora"] is True
    for wrong, said in [
        (["--lora-alpha", "nan"], "nan"),
        (["--lora-alpha", "2", "--adapter-config", tmp_path / "out"], "one of the two"),
        (["--lora-alpha", "2", "--adapter", "other"], "adapter 'other'"),
    ]:
        assert convert(tmp_path / "bare", tmp_path / "y", "--to", "peft", *wrong) == 2
        shown = capsys.readouterr().err
        assert said in shown and shown.count("\n") == 1, shown
    assert not (tmp_path / "y").exists()


def test_a_models_configuration_comes_from_the_run_that_saved_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    run = Checkpointer(TorchRun(model)).save(tmp_path / "runs", "one")
    assert convert(run, tmp_path / "out", "--to", "huggingface") == 0
    assert "config.json" not in capsys.readouterr().err
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again) is type(model) and again.config.n_embd == 8
    batch = torch.arange(8).reshape(1, 8)
    assert torch.equal(again(batch).logits, model(batch).logits)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())


def test_a_missing_configuration_is_said_and_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_native(LazySource("memory", {"model/weight": entry_of_tensor(torch.ones(3))}), tmp_path / "run")
    assert convert(tmp_path / "run", tmp_path / "out", "--to", "huggingface") == 0
    said = capsys.readouterr().err
    assert "has no config.json" in said and "--config" in said
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert convert(tmp_path / "run", tmp_path / "out", "--to", "huggingface", "--config", tmp_path / "config.json") == 0
    assert "config.json" not in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "gpt2"}
    (tmp_path / "config.json").write_text("[1]")
    assert convert(tmp_path / "run", tmp_path / "out", "--to", "huggingface", "--config", tmp_path / "config.json") == 2
    assert "not a configuration" in capsys.readouterr().err


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saved; it has no place in any data."""
    model = Net()
    return Path(Checkpointer(TorchRun(model)).save(tmp_path_factory.mktemp("run")))


@pytest.mark.parametrize(
    ("to", "option", "taker"),
    [
        ("single", ["--lora-alpha", "8"], "peft"),
        ("huggingface", ["--adapter", "x"], "peft"),
        ("dcp", ["--base", "x"], "peft"),
        ("native", ["--adapter-config", "x"], "peft"),
        ("native", ["--config", "/nowhere"], "huggingface"),
        ("single", ["--safetensors"], "colossalai"),
    ],
)
def test_an_option_of_another_format_is_refused(
    run: Path, to: str, option: list[str], taker: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(run, tmp_path / "out", "--to", to, *option) == 2
    assert f"{option[0]}: --to {taker} alone takes it; leave it out" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
