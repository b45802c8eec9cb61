"""LoRA adapters of peft under every plugin: training and saved files equal those of plain peft in one process."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwise.cli.main import main
from shardwise.core.checkpoint.formats import open_checkpoint
from tests.support.booster_setup import SMALL, assert_same
from tests.support.on_ranks import assert_refused, on_ranks
from tests.support.sets import campaign, full

RANKS = 2
PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": TorchDDPPlugin,
    "fsdp": functools.partial(TorchFSDPPlugin, auto_wrap_policy=ModuleWrapPolicy({nn.Linear, nn.Embedding})),
    "zero1": functools.partial(LowLevelZeroPlugin, stage=1, precision="fp32"),
    "zero2": functools.partial(LowLevelZeroPlugin, stage=2, precision="fp32"),
    "gemini": functools.partial(GeminiPlugin, precision="fp32", **SMALL),
}
FAST = ("embed", "up")  # the group with its own learning rate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(65, 32)
        self.up = nn.Linear(32, 127)
        self.down = nn.Linear(127, 32, bias=False)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 65)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(self.norm(hidden + self.down(torch.tanh(self.up(hidden)))))


def config(**more: Any) -> LoraConfig:
    settings = {"target_modules": ["embed", "up", "down"], "modules_to_save": ["head"], **more}
    return LoraConfig(r=2, lora_alpha=4, **settings)


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    fast = [p for name, p in named if any(f".{part}." in f".{name}" for part in FAST)]
    rest = [p for _, p in named if all(p is not f for f in fast)]
    return [{"params": fast, "lr": 3e-2}, {"params": rest, "weight_decay": 0.1}]


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 65, (4, 5), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def plain(steps: int, model: nn.Module | None = None) -> PeftModel:
    """Train with plain peft in one process on the full batches."""
    if model is None:
        model = net()
        torch.manual_seed(4)
        model = get_peft_model(model, config())
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2, eps=1e-2)
    for step in range(steps):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model  # type: ignore[return-value]


class Run:
    """A boosted model with an adapter; ``early`` builds the optimizer before the adapter, as some scripts do."""

    def __init__(self, plugin: Plugin, early: bool, pretrained: str | None = None) -> None:
        self.booster = Booster(plugin=plugin)
        model = net()
        optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2, eps=1e-2) if early else None
        torch.manual_seed(4)
        given = {"lora_config": config()} if pretrained is None else {"pretrained_dir": pretrained}
        self.peft = self.booster.enable_lora(model, **given)
        if optimizer is None:
            optimizer = torch.optim.AdamW(groups_of(self.peft), lr=1e-2, eps=1e-2)
        self.model, self.optimizer, *_ = self.booster.boost(self.peft, optimizer)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            tokens = batch(step)[dist.get_rank() :: dist.get_world_size()]
            self.booster.backward(loss_of(self.model, tokens), self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()


def trained(names: Any) -> set[str]:
    return {name for name in names if ".lora_" in name or ".modules_to_save." in name}


@on_ranks(RANKS, timeout=240)  # the first one imports peft
@pytest.mark.parametrize(
    ("name", "early"),
    [
        ("zero2", False),
        *full(("fsdp", False), ("gemini", True)),
        *campaign(("ddp", True), ("fsdp", True), ("zero1", True), ("gemini", False)),
    ],
)
def test_training_and_files_equal_plain_peft(name: str, early: bool, tmp_path: Path) -> None:
    run = Run(PLUGINS[name](), early)
    run.steps(0, 3)
    state = {key: value.detach().clone() for key, value in run.model.state_dict().items()}
    run.booster.save_lora_as_pretrained(run.model, tmp_path / "bin")
    run.booster.save_lora_as_pretrained(run.model, tmp_path / "safe", use_safetensors=True)
    run.booster.save_model(run.model, tmp_path / "model.safetensors")
    run.booster.save_optimizer(run.optimizer, tmp_path / "optimizer.safetensors")
    assert all(p.grad is None for p in run.peft.parameters() if not p.requires_grad)
    again = Run(PLUGINS[name](), not early, pretrained=str(tmp_path / "safe"))
    again.booster.load_optimizer(again.optimizer, tmp_path / "optimizer.safetensors")
    again.steps(3, 5)
    run.steps(3, 5)
    assert_same(again.model.state_dict(), run.model.state_dict(), 1e-6)
    reference = plain(3)
    assert_same(state, reference.state_dict(), 1e-6)
    base = dict(net().named_parameters())
    assert torch.equal(state["base_model.model.up.base_layer.weight"], base["up.weight"]), "base weights are frozen"
    _same_adapter(tmp_path, reference, state)


def _same_adapter(folder: Path, reference: PeftModel, state: dict[str, torch.Tensor]) -> None:
    theirs = folder / f"peft-{dist.get_rank()}"
    reference.save_pretrained(theirs)
    settings, expected = settings_of(theirs), load_file(theirs / "adapter_model.safetensors")
    saved = {
        "safe": load_file(folder / "safe" / "adapter_model.safetensors"),
        "bin": torch.load(folder / "bin" / "adapter_model.bin", weights_only=True),
    }
    for kind, tensors in saved.items():
        assert_same({key: tensors[key] for key in expected}, expected, 1e-6)
        assert set(tensors) == set(expected) and settings_of(folder / kind) == settings
        loaded = PeftModel.from_pretrained(net(), folder / kind).state_dict()
        assert_same(loaded, {key: state[key] for key in loaded}, 0.0)


def settings_of(folder: Path) -> dict[str, Any]:
    settings = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    return {key: sorted(value) if isinstance(value, list) else value for key, value in settings.items()}


@on_ranks(RANKS, timeout=240)
@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero2", *full("zero1", "gemini")])
def test_base_weights_have_no_optimizer_state_and_no_communication(name: str, tmp_path: Path) -> None:
    run = Run(PLUGINS[name](), True)
    run.steps(0, 1)
    run.booster.save_optimizer(run.optimizer, tmp_path / "optimizer.safetensors")
    with open_checkpoint(tmp_path / "optimizer.safetensors") as source:
        names = {full.split("/", 2)[2].rpartition("/")[0] for full in source.tensors()}
    own = {n for n, p in run.peft.named_parameters() if p.requires_grad}
    assert names == trained(own) == own and names
    if name in ("ddp", "fsdp"):
        return
    session = vars(run.model)["_shardwise_session"]
    session.reset_traffic()
    run.steps(1, 2)
    shards = session._engine.shards
    padded = sum(fact.shape.numel() * 4 + 64 for fact in shards.layout.facts if fact.trainable)
    sent = session.traffic().items()
    reduced = sum(value for kind, value in sent if kind.startswith(("reduce", "all_reduce")))
    assert 0 < reduced <= padded + 64 * len(shards.chunks)


def llama(folder: str, seed: int) -> Any:
    """Load the model in ``folder`` and add four tokens; ``seed`` determines their embeddings."""
    model = LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(seed)
    model.resize_token_embeddings(24, mean_resizing=False)
    return model


@on_ranks(RANKS, timeout=240)
@pytest.mark.parametrize(("name", "tied"), [("zero2", False), *full(("gemini", True))])
def test_trainable_tokens_and_a_resized_vocabulary(name: str, tied: bool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        base = LlamaForCausalLM(LlamaConfig(vocab_size=20, tie_word_embeddings=tied, **sizes))
        base.save_pretrained(f"{folder}/base")
    dist.barrier()
    booster = Booster(plugin=PLUGINS[name]())
    tokens = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 22], task_type="CAUSAL_LM")
    peft: Any = booster.enable_lora(llama(f"{folder}/base", 2), lora_config=tokens)
    if dist.get_rank() == 0:
        peft.save_pretrained(f"{folder}/theirs")
    optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=0.1)
    model, optimizer, *_ = booster.boost(peft, optimizer)
    booster.save_lora_as_pretrained(model, f"{folder}/first", use_safetensors=True)
    theirs, first = (load_file(f"{folder}/{each}/adapter_model.safetensors") for each in ("theirs", "first"))
    # With a tied head and a resized vocabulary, peft writes the tokens a second time, and does not read them.
    assert set(theirs) - set(first) <= {"base_model.model.lm_head.token_adapter.trainable_tokens_delta"}
    assert set(first) <= set(theirs) and all(torch.equal(first[key], theirs[key]) for key in first)
    assert sum("embed_tokens" in key for key in first) == 2 and any("lm_head" in key for key in first)
    ids = torch.tensor([[1, 3, 22, 23, 5]])
    for _ in range(2):
        booster.backward(model(input_ids=ids, labels=ids).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    booster.save_lora_as_pretrained(model, f"{folder}/after")
    session = vars(model)["_shardwise_session"]
    session.checkpoints.save(f"{folder}/runs", "native")
    if dist.get_rank() == 0:
        assert main(["checkpoint", "convert", f"{folder}/runs/native", f"{folder}/converted", "--to", "peft"]) == 0
        for each in ("after", "converted"):
            again = PeftModel.from_pretrained(llama(f"{folder}/base", 99), f"{folder}/{each}")
            with torch.no_grad():
                torch.testing.assert_close(again(input_ids=ids).logits, expected, rtol=1e-6, atol=1e-6)


@on_ranks(RANKS, timeout=240)
def test_invalid_lora_calls_are_refused() -> None:
    booster = Booster(plugin=PLUGINS["zero2"]())
    model, *_ = booster.boost(net())
    lora, add = booster.enable_lora, booster.plugin.add_lora_params_to_optimizer  # type: ignore[union-attr]
    quantized: dict[str, Any] = {"quantize": True, "bnb_quantization_config": {"load_in_4bit": True}}
    assert_refused(
        (lambda: lora(net(), lora_config=config(), **quantized), "give accelerate's"),
        (lambda: lora(net()), "give one of the two"),
        (lambda: lora(net(), lora_config={"r": 2}), "peft.LoraConfig"),
        (lambda: lora(model, lora_config=config()), "before boost"),
        (lambda: booster.save_lora_as_pretrained(model, "nowhere"), "has no adapter"),
        (lambda: add(net(), torch.optim.SGD(net().parameters())), "has no adapter"),
    )


def test_add_lora_params_to_optimizer() -> None:
    model = net()
    optimizer = torch.optim.SGD([{"params": [model.up.weight], "lr": 0.5}, {"params": [model.head.weight]}], lr=0.1)
    adapted = Booster().enable_lora(model, lora_config=config())
    with pytest.warns(UserWarning, match="does not train .*down.*lora_A"):
        LowLevelZeroPlugin().add_lora_params_to_optimizer(adapted, optimizer)
    named = {id(p): name.removeprefix("base_model.model.") for name, p in adapted.named_parameters()}
    groups = [[named[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    assert groups[0] == ["up.base_layer.weight", "up.lora_A.default.weight", "up.lora_B.default.weight"]
    assert groups[1] == ["head.original_module.weight", "head.modules_to_save.default.weight"]
    with pytest.warns(UserWarning):
        LowLevelZeroPlugin().add_lora_params_to_optimizer(adapted, optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 2], "a second call changes nothing"


def test_second_adapter_and_unused_lora_config(tmp_path: Path) -> None:
    booster = Booster()
    adapted: Any = booster.enable_lora(net(), lora_config=config())
    adapted.add_adapter("other", config(target_modules=["up"], modules_to_save=None))
    booster.save_lora_as_pretrained(adapted, tmp_path / "a", use_safetensors=True)
    assert (tmp_path / "a" / "other" / "adapter_model.safetensors").is_file()
    other = PeftModel.from_pretrained(net(), tmp_path / "a" / "other")
    loaded, own = other.base_model.model.up.lora_A["default"], adapted.base_model.model.up.lora_A["other"]
    assert torch.equal(loaded.weight, own.weight)
    with pytest.warns(UserWarning, match="lora_config has no effect"):
        booster.enable_lora(net(), pretrained_dir=str(tmp_path / "a"), lora_config=config())
