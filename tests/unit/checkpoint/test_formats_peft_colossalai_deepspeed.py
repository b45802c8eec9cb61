"""Tests of reading and writing PEFT adapters, ColossalAI's layout, and DeepSpeed's checkpoints.

- PEFT: names as peft 0.21 writes them, and peft itself where it is installed.
- ColossalAI: its own loading steps, prefixes, and names for numbered optimizer state.
- DeepSpeed 0.19.8: checkpoints and universal checkpoints against the values that it gathered.
  tests/data/make_deepspeed.py and make_deepspeed_universal.py wrote them.
"""

import itertools
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardwise.core.checkpoint import formats
from shardwise.core.checkpoint.formats import RefusedPickle, open_checkpoint, write_peft
from shardwise.core.checkpoint.formats.deepspeed import STAND_INS, Flat
from shardwise.core.checkpoint.formats.lazy_tensors import LazySource, entry_of_tensor
from shardwise.core.checkpoint.formats.peft import name_in_file, name_in_model
from shardwise.core.checkpoint.formats.torch_file import load_torch
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError
from tests.support.formats_setup import TRAINED, differing, odd_source, optimizer_facts, same_bits, tensor
from tests.support.on_ranks import raises
from tests.support.sets import full

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "bias": "none", "modules_to_save": ["norm", "classifier"]}
START = "base_model.model.model"
# (in the file, in the model)
NAMES = [
    (f"{START}.q_proj.lora_A.weight", f"{START}.q_proj.lora_A.default.weight"),
    (f"{START}.q_proj.lora_B.bias", f"{START}.q_proj.lora_B.default.bias"),
    (f"{START}.embed.lora_embedding_A", f"{START}.embed.lora_embedding_A.default"),
    (f"{START}.q_proj.lora_magnitude_vector", f"{START}.q_proj.lora_magnitude_vector.default.weight"),
    (f"{START}.layernorm.weight", f"{START}.layernorm.modules_to_save.default.weight"),
    (f"{START}.e.token_adapter.trainable_tokens_delta", f"{START}.e.token_adapter.trainable_tokens_delta.default"),
    (f"{START}.classifier.dense.bias", f"{START}.classifier.modules_to_save.default.dense.bias"),
]
NOT_PART = ["q_proj.base_layer.weight", "layernorm.original_module.weight", "q_proj.lora_A.other.weight"]
NOT_PART += ["layernorm.modules_to_save.other.weight", "q_proj.base_layer.bias"]


def test_parameter_names() -> None:
    for in_file, in_model in NAMES:
        assert name_in_model(in_file, CONFIG) == in_model
        assert name_in_file(in_model, CONFIG) == in_file
        assert name_in_file(in_model, CONFIG, "other") is None
        assert name_in_model(in_file, CONFIG, "other") == in_model.replace("default", "other")
    assert [name_in_file(f"{START}.{name}", CONFIG) for name in NOT_PART] == [None] * len(NOT_PART)


def test_errors_of_write_peft(tmp_path: Path) -> None:
    entries = {f"model/{name}": entry_of_tensor(torch.randn(2, 3)) for _, name in NAMES}
    source, out = LazySource("m", entries), tmp_path / "out"
    raises(CheckpointError, "needs its configuration", write_peft, source, out)
    raises(CheckpointError, "'PREFIX_TUNING'", write_peft, source, out, {"peft_type": "PREFIX_TUNING"})
    strange, refusal = f"{START}.q_proj.strange.default", r"q_proj\.strange\.default: trained parameters of the adapter"
    raises(CheckpointError, refusal, write_peft, source, out, CONFIG, trained=[strange, NAMES[0][1]])
    raises(CheckpointError, "no parameters of an adapter 'mine'", write_peft, source, out, CONFIG, adapter="mine")
    assert not out.exists()
    (tmp_path / "adapter_config.json").write_text("{}")
    raises(FileNotFoundError, "neither adapter_model", lambda: open_checkpoint(tmp_path))


LORA: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "bias": {"target_modules": ["q_proj"], "bias": "all"},
    "own bias": {"target_modules": ["q_proj"], "bias": "lora_only"},
    "head": {"target_modules": r".*(q_proj|lm_head)"},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 3]}},
    "resized": {"target_modules": ["q_proj"]},
    "resized tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 33]},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("use_safetensors", [True, *full(False)])
@pytest.mark.parametrize("kind", LORA)
def test_peft_reads_and_writes_the_same(kind: str, use_safetensors: bool, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    seeds = itertools.count()

    def base() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, attention_bias=True, **sizes))
        if "resized" in kind:
            made.config.save_pretrained(tmp_path / "base")
            made.name_or_path = str(tmp_path / "base")
            torch.manual_seed(next(seeds))  # the new rows differ each time
            made.resize_token_embeddings(35, mean_resizing=False)
        return made

    model = peft.get_peft_model(base(), peft.LoraConfig(r=2, task_type="CAUSAL_LM", **LORA[kind]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    state = model.state_dict()
    model.save_pretrained(tmp_path / "theirs", safe_serialization=use_safetensors)
    theirs = open_checkpoint(tmp_path / "theirs")
    trained = {f"model/{name}" for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained <= set(theirs.tensors())
    assert all(same_bits(tensor(theirs, name), state[name.removeprefix("model/")]) for name in theirs.tensors())
    source = LazySource("m", {f"model/{name}": entry_of_tensor(value) for name, value in state.items()})
    write_peft(source, tmp_path / "ours", model.peft_config["default"], use_safetensors=use_safetensors)
    assert differing(theirs, open_checkpoint(tmp_path / "ours")) == []
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "ours").state_dict()
    assert set(loaded) == set(state) and all(same_bits(loaded[name], state[name]) for name in state)


def _both(source: Any, folder: Path, size: float = 1e-4, **options: Any) -> Path:
    formats.write_colossalai_model(source, folder / "model", size, **options)
    formats.write_colossalai_optimizer(source, folder / "optimizer", size, options.get("prefix"))
    return folder


@pytest.mark.parametrize("use_safetensors", [False, True])
@pytest.mark.parametrize("prefix", [None, "first"])
@pytest.mark.parametrize("size", [1e-4, 1024])
def test_colossalai_file_names(use_safetensors: bool, prefix: str | None, size: float, tmp_path: Path) -> None:
    source = odd_source()
    _both(source, tmp_path, size, use_safetensors=use_safetensors, prefix=prefix)
    own = f".{prefix}" if prefix else ""
    stem, ending = ("model", "safetensors") if use_safetensors else ("pytorch_model", "bin")
    index_name = f"{stem}.{ending}.index{own}.json"
    shards = sorted({path.name for path in (tmp_path / "model").iterdir()} - {index_name})
    assert shards == [f"{stem}{own}-{n:05d}.{ending}" for n in range(1, len(shards) + 1)]
    assert (len(shards) > 3) == (size < 1)
    index = json.loads((tmp_path / "model" / index_name).read_text())
    assert set(index["weight_map"].values()) == set(shards) and "head.weight" in index["weight_map"]
    optimizer = {path.name for path in (tmp_path / "optimizer").iterdir()}
    assert {f"pytorch_optim.bin.index{own}.json", f"pytorch_optim_group{own}.bin"} <= optimizer
    assert f"pytorch_optim{own}-00001.bin" in optimizer
    again = open_checkpoint(tmp_path, parameter_names=list(TRAINED))
    tied = {"model/head.weight"} & set(again.tensors())
    assert differing(source, again) == sorted(tied)
    assert tied or again.state()["aliases"] == {"head.weight": "embed.weight"}
    assert optimizer_facts(again) == optimizer_facts(source)


def test_colossalai_style_loading(tmp_path: Path) -> None:
    """Load as its GeneralCheckpointIO does: one index, torch.load of each shard, parameter numbers from the groups."""

    def read(folder: Path) -> tuple[dict[str, Any], dict[Any, Any]]:
        (file,) = folder.glob("*.index.*json")
        index, values = json.loads(file.read_text()), dict[Any, Any]()
        for name in set(index["weight_map"].values()):
            values |= torch.load(folder / name, weights_only=True)
        assert set(index["weight_map"]) == {*map(str, values)}
        return index, values

    source = odd_source()
    _both(source, tmp_path)
    index, state = read(tmp_path / "optimizer")
    groups = torch.load(tmp_path / "optimizer" / index["metadata"]["param_groups"], weights_only=True)
    assert [group["params"] for group in groups] == [[0, 1, 2], [3, 4]]
    assert groups[0]["betas"] == (0.9, 0.999) and groups[1]["lr"] == 1e-300
    assert sorted(state) == [0, 1, 2, 3, 4]
    for number, name in enumerate(TRAINED):
        assert same_bits(state[number]["exp_avg"], tensor(source, f"optimizer/0/{name}/exp_avg"))
        assert same_bits(state[number]["step"], torch.tensor(float(number)))
    index, loaded = read(tmp_path / "model")
    assert same_bits(loaded["head.weight"], loaded["embed.weight"])
    assert index["metadata"]["total_size"] == pytest.approx(sum(value.nbytes for value in loaded.values()) / 1024**2)


def _upstream(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write what save_model and save_optimizer of ColossalAI 0.4.4 write, in two shards each."""
    saved = optimizer.state_dict()
    groups = {"param_groups": "pytorch_optim_group.bin"}
    for part, stem, state, metadata in (
        ("modeling", "pytorch_model", model.state_dict(), {}),
        ("optimizer", "pytorch_optim", saved["state"], groups),
    ):
        (folder / part).mkdir(parents=True)
        items, weight_map = list(state.items()), {}
        for number, shard in enumerate((items[:2], items[2:]), 1):
            file = f"{stem}-{number:05d}.bin"
            torch.save(dict(shard), folder / part / file)
            weight_map.update({name: file for name, _ in shard})
        index = {"metadata": {"total_size": 0.1} | metadata, "weight_map": weight_map}
        (folder / part / f"{stem}.bin.index.json").write_text(json.dumps(index))
    torch.save(saved["param_groups"], folder / "optimizer" / groups["param_groups"])


def test_colossalai_directories_get_names_from_shapes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    _upstream(model, optimizer, tmp_path / "run")
    for source in (
        open_checkpoint(tmp_path / "run"),
        open_checkpoint(tmp_path / "run" / "modeling", optimizer=tmp_path / "run" / "optimizer"),
    ):
        assert source.format == "colossalai" and not source.notes  # type: ignore[attr-defined]
        for name, parameter in model.named_parameters():
            assert same_bits(tensor(source, f"model/{name}"), parameter.detach())
            assert same_bits(tensor(source, f"optimizer/0/{name}/exp_avg_sq"), optimizer.state[parameter]["exp_avg_sq"])
    alone = formats.open_colossalai(tmp_path / "run" / "optimizer")
    assert "optimizer/0/#3/exp_avg" in alone.tensors()


def test_stale_shards_are_removed(tmp_path: Path) -> None:
    source = odd_source()
    _both(source, tmp_path)
    many = len(list(tmp_path.rglob("*")))
    _both(source, tmp_path, 1024)
    assert len(list(tmp_path.rglob("*"))) < many
    names = {path.name for path in (tmp_path / "optimizer").iterdir()}
    assert names == {"pytorch_optim-00001.bin", "pytorch_optim.bin.index.json", "pytorch_optim_group.bin"}
    formats.write_colossalai_model(source, tmp_path / "model", use_safetensors=True)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"model-00001.safetensors", "model.safetensors.index.json"}
    assert "head.weight" in load_file(tmp_path / "model" / "model-00001.safetensors")
    (tmp_path / "file").write_text("")
    raises(NotADirectoryError, "is a file", lambda: formats.write_colossalai_model(source, tmp_path / "file"))


def test_damaged_colossalai_directories(tmp_path: Path) -> None:
    _both(odd_source(), tmp_path)
    group = tmp_path / "optimizer" / "pytorch_optim_group.bin"
    content = group.read_bytes()
    group.unlink()
    raises(FileNotFoundError, "pytorch_optim_group", lambda: open_checkpoint(tmp_path))
    group.write_bytes(content)
    (tmp_path / "optimizer" / "pytorch_optim-00002.bin").unlink()
    raises(CheckpointDamage, r"pytorch_optim-00002.bin is missing", open_checkpoint, tmp_path)
    write_optimizer, write_model = formats.write_colossalai_optimizer, formats.write_colossalai_model
    raises(CheckpointError, "no optimizer 1", write_optimizer, odd_source(), tmp_path / "x", index=1)
    raises(CheckpointError, "no model", write_model, LazySource("memory", {}), tmp_path / "x")


CASES = [f"zero{stage}-{kind}" for stage in (1, 2, 3) for kind in ("1ranks-fp32", "2ranks-fp32", "2ranks-bf16")]
UNIVERSAL = ("zero1-2ranks-bf16", "zero2-2ranks-fp16", "zero3-2ranks-fp16")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack ``ds``, which ``save_checkpoint`` wrote, and ``universal``, which DeepSpeed converted."""
    folder = tmp_path_factory.mktemp("deepspeed")
    for name in ("deepspeed", "deepspeed_universal"):
        with tarfile.open(Path(__file__).parents[2] / "data" / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("inside", ["", "global_step3"])
def test_deepspeed_checkpoints(case: str, inside: str, written: Path) -> None:
    truth = load_file(written / "ds" / case / "truth.safetensors")
    source = open_checkpoint(written / "ds" / case / inside)
    assert set(source.tensors()) == set(truth) and len(truth) == 18
    for name, expected in truth.items():
        got = tensor(source, name)
        assert got.shape == expected.shape and torch.equal(got.float(), expected.float()), name
        flat = got.reshape(-1)
        for cut in range(got.numel() + 1):
            assert same_bits(source.read(name, cut, got.numel() - cut), flat[cut:]), (name, cut)
    state = source.state()
    assert state["aliases"] == {"head.weight": "embed.weight"} and state["step"] == 3
    (optimizer,) = state["optimizers"]
    groups = [(each["params"], each["options"]["weight_decay"], each["options"]["lr"]) for each in optimizer["groups"]]
    weights, biases = ["embed.weight", "middle.weight", "back.weight"], ["middle.bias", "back.bias"]
    assert groups == [(weights, 0.1, 0.001), (biases, 0.0, 0.001)]
    assert optimizer["groups"][0]["options"]["betas"] == {"$tuple": [0.9, 0.999]}
    assert all(small == {"step": {"dtype": "float32", "value": 3.0}} for small in optimizer["small"].values())
    assert len(optimizer["small"]) == 5
    half = state.get("compute_dtype", {})
    assert set(half.values()) == ({"bfloat16"} if "bf16" in case else set()) and len(half) in (0, 5)
    assert state["other"]["client_state.epoch"] == 4 and state["other"]["lr_scheduler"]["last_epoch"] == 3
    assert source.notes == ()  # type: ignore[attr-defined]


def same_state(got: Any, expected: Any) -> None:
    """Check that both checkpoints have the same tensors and state."""
    assert got.tensors() == expected.tensors()
    for name in expected.tensors():
        assert torch.equal(tensor(got, name), tensor(expected, name)), name
    ours, theirs = got.state(), expected.state()
    (optimizer,), (other,) = ours.pop("optimizers"), theirs.pop("optimizers")
    assert optimizer["groups"] == other["groups"] and optimizer["small"] == other["small"]
    assert sorted(optimizer["keys"]) == sorted(other["keys"])
    for state in (ours, theirs):
        state["other"]["loss_scaler"].pop("dynamic", None)
    assert ours == theirs


@pytest.mark.parametrize("case", UNIVERSAL)
def test_universal_checkpoints(case: str, written: Path) -> None:
    truth = load_file(written / "universal" / case / "truth.safetensors")
    for inside in ("", "global_step3_universal"):
        source = open_checkpoint(written / "universal" / case / inside)
        assert set(source.tensors()) == set(truth) and len(truth) == 18
        for name, expected in truth.items():
            assert torch.equal(tensor(source, name).float(), expected.float()), name
    same_state(source, open_checkpoint(written / "ds" / case / "global_step3"))
    assert open_checkpoint(written / "universal" / case).state()["other"]["skipped_steps"] == 0


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


MODEL, BIAS = "mp_rank_00_model_states.pt", "zero/back.bias/fp32.pt"


def with_another_class(step: Path) -> None:
    torch.save({**torch.load(step / MODEL, weights_only=True), "path": Path("x")}, step / MODEL)


def second_model(step: Path) -> None:
    shutil.copy(step / MODEL, step / "mp_rank_01_model_states.pt")


def copied(written: Path, case: str, place: Path) -> Path:
    shutil.copytree(written / case, place / "run")
    return place / "run" / ("global_step3_universal" if case.startswith("universal") else "global_step3")


UNIVERSAL_1, OF_RANK_1 = "universal/zero1-2ranks-bf16", "zero_pp_rank_1_mp_rank_00_model_states.pt"
EXPERT = {"param": torch.zeros(3), "is_expert_param": True}


@pytest.mark.parametrize(
    ("case", "damage", "error", "words"),
    [
        ("ds/zero3-2ranks-fp32", lambda step: (step / OF_RANK_1).unlink(), CheckpointDamage, r"of the ranks \[0\]"),
        ("ds/zero1-2ranks-fp32", second_model, CheckpointError, "tensor parallelism"),
        ("ds/zero1-2ranks-fp32", lambda step: halved(step / MODEL), CheckpointDamage, "not a whole"),
        ("ds/zero1-1ranks-fp32", with_another_class, RefusedPickle, "pathlib"),
        (UNIVERSAL_1, lambda step: (step / BIAS).unlink(), CheckpointDamage, r"back\.bias is trained, and has no"),
        (UNIVERSAL_1, lambda step: torch.save(EXPERT, step / BIAS), CheckpointError, "expert parallelism"),
        (UNIVERSAL_1, lambda step: (step / "zero" / "odd").mkdir(), CheckpointError, "odd belong to pipeline or exp"),
    ],
)  # fmt: skip
def test_damaged_and_unsupported_deepspeed_checkpoints(
    case: str, damage: Callable[[Path], object], error: type[Exception], words: str, written: Path, tmp_path: Path
) -> None:
    damage(copied(written, case, tmp_path))
    raises(error, words, formats.open_deepspeed, tmp_path / "run")


def test_parameter_names_cannot_leave_the_directory(written: Path, tmp_path: Path) -> None:
    step = copied(written, "universal/zero1-2ranks-bf16", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    torch.save({"param": torch.zeros(3)}, tmp_path / "elsewhere" / "fp32.pt")
    content = load_torch(step / MODEL, STAND_INS)
    content["param_shapes"][1]["../../../elsewhere"] = torch.Size([3])
    torch.save(content, step / MODEL)
    raises(CheckpointDamage, r"elsewhere is trained, and has no fp32\.pt", lambda: open_checkpoint(step))


@pytest.mark.parametrize(("starts", "words"), [([0], "weights ends before element 5"), ([0, 4], "ends before")])
def test_too_short_flat_array(starts: list[int], words: str) -> None:
    raises(CheckpointDamage, words, lambda: Flat([torch.arange(3)] * len(starts), starts, "weights").read(2, 3))
