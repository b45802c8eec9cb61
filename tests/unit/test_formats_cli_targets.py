"""``convert`` to what needs more than tensors: a configuration, an adapter's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.cli.main import main
from shardwise.core.checkpoint import Checkpointer, TorchRun
from shardwise.core.checkpoint.formats.lazy import LazySource, entry_of_tensor
from shardwise.core.checkpoint.formats.native import write_native


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
        out: torch.Tensor = self.head(self.q(hidden))
        return out


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
