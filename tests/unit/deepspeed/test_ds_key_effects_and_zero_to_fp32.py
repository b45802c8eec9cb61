"""Tests of ``zero_to_fp32`` and of the keys of a DeepSpeed configuration that change a run.

- ``zero_to_fp32`` as functions and as a script, on checkpoints of DeepSpeed 0.19.8 and on ours.
- Each used key changes what a run does, compared with the run without it.
- Getters of the engine, and names that it does not have.
- ``ds_status`` of a sharded parameter that an autograd function saves for its backward pass.
"""

import contextlib
import runpy
import sys
import tarfile
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from shardwise.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from test_ds_config import USED, Tree, merged
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from shardwise.core.checkpoint.source import CheckpointError
from shardwise.deepspeed import zero_to_fp32
from shardwise.deepspeed.config import batch_of, read_config
from shardwise.deepspeed.plan import to_plan
from shardwise.deepspeed.schema import ABSENT, KEYS
from shardwise.deepspeed.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from shardwise.testing import assert_close
from tests.support.ds_setup import Recorded, close, ds_config, optimizer_block, start
from tests.support.on_ranks import raises


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """Return directories of checkpoints, each with the parameters of the model in fp32."""
    folder = tmp_path_factory.mktemp("zero_to_fp32")
    with tarfile.open(Path(__file__).parents[2] / "data" / "deepspeed.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    found = {}
    for case in ("zero2-2ranks-bf16", "zero3-2ranks-bf16", "zero1-1ranks-fp32"):
        truth = load_file(folder / "ds" / case / "truth.safetensors")
        model = {n.removeprefix("model/"): v for n, v in truth.items() if n.startswith("model/")}
        found[case] = (folder / "ds" / case, model)
    engine = start(Recorded(), ds_config(3, bf16={"enabled": True}, optimizer=optimizer_block("AdamW", lr=0.1)))
    for step in range(2):
        engine.backward(engine(torch.tensor([step, 2])))
        engine.step()
        engine.save_checkpoint(str(folder / "ours"), client_state={"tensor": torch.ones(2)})
    found["ours"] = (folder / "ours", {n: v for n, v in close(engine).items() if n != "head.weight"})
    return found


CASES = ("zero2-2ranks-bf16", "zero3-2ranks-bf16", "zero1-1ranks-fp32", "ours")


@pytest.mark.parametrize("case", CASES)
def test_conversion_to_fp32(case: str, places: Any, tmp_path: Path) -> None:
    place, truth = places[case]
    wanted = {n: v.float() if v.is_floating_point() else v for n, v in truth.items()}
    wanted["head.weight"] = wanted["embed.weight"]
    found = get_fp32_state_dict_from_zero_checkpoint(place)
    assert_close(found, wanted, 0.0, case)
    assert found["head.weight"] is found["embed.weight"] and found["count"].dtype == torch.int64
    lazy = get_fp32_state_dict_from_zero_checkpoint(str(place), lazy_mode=True)
    assert_close({name: each.contiguous() for name, each in lazy.items()}, wanted, 0.0, case)
    trained = get_fp32_state_dict_from_zero_checkpoint(place, exclude_frozen_parameters=True)
    assert set(wanted) - set(trained) == {"frozen"}
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Recorded(), place)
    assert_close(dict(model.state_dict()), wanted, 0.0, case)
    with pytest.warns(UserWarning, match=r"not in it nothing; not in the model .*embed.weight.* and \d more"):
        zero_to_fp32.load_state_dict_from_zero_checkpoint(nn.ReLU(), place)
    # Write one file, and several with an index; both names of the tied weight are in the same file.
    for size, safe in ((None, False), ("100B", False), (100, True)):
        out = tmp_path / f"{size}{safe}"
        out.mkdir()
        (out / "tokenizer.json").write_text("{}")
        zero_to_fp32.convert_zero_checkpoint_to_state_dict(place, out, "bf16", size, safe)
        files = sorted(path.name for path in out.iterdir())
        assert "tokenizer.json" in files and (files == ["pytorch_model.bin", "tokenizer.json"]) == (size is None)
        parts = [p for p in out.iterdir() if p.suffix in (".bin", ".safetensors")]
        assert (len(parts) > 1) == (size is not None)
        read = load_file if safe else (lambda path: torch.load(path, weights_only=True))
        together = {name: value for path in parts for name, value in read(path).items()}
        half = {n: v.bfloat16() if v.is_floating_point() else v for n, v in wanted.items()}
        assert_close(together, half, 0.0, case)


def test_the_script_in_the_checkpoint_directory(places: Any, tmp_path: Path, monkeypatch: Any) -> None:
    place, truth = places["ours"]
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["zero_to_fp32.py", ".", str(tmp_path / "out"), "--safe_serialization"])
    runpy.run_path("zero_to_fp32.py", run_name="__main__")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["middle.weight"], truth["middle.weight"])
    zero_to_fp32.main([".", str(tmp_path / "first"), "-t", "global_step1", "--exclude_frozen_parameters"])
    first = torch.load(tmp_path / "first" / "pytorch_model.bin", weights_only=True)
    assert not torch.equal(first["middle.weight"], truth["middle.weight"]) and "frozen" not in first
    # The checkpoint that `latest` names is converted, not the newest one.
    (place / "latest").write_text("global_step1")
    again = get_fp32_state_dict_from_zero_checkpoint(".")
    assert torch.equal(again["middle.weight"], first["middle.weight"])
    (place / "latest").write_text("global_step2")


def test_conversion_errors(places: Any, tmp_path: Path, capsys: Any) -> None:
    place, _ = places["ours"]
    with pytest.raises(SystemExit) as ended:
        zero_to_fp32.main([str(tmp_path), str(tmp_path / "out")])
    assert ended.value.code == 1 and "zero_to_fp32.py: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    read, convert = get_fp32_state_dict_from_zero_checkpoint, zero_to_fp32.convert_zero_checkpoint_to_state_dict
    raises(FileNotFoundError, None, read, place, "global_step7")
    raises(ValueError, "dtype='int8': give one of fp32", convert, place, tmp_path / "out", "int8")
    raises(ValueError, "'many' is not a size", convert, place, tmp_path / "out", max_shard_size="many")
    torch.save(Recorded().state_dict(), tmp_path / "model.bin")
    frozen = "does not say which parameters were frozen"
    raises(CheckpointError, frozen, read, tmp_path / "model.bin", exclude_frozen_parameters=True)


SGD = optimizer_block("SGD", lr=0.5)
BASE: Tree = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "optimizer": SGD}
Probe = Callable[[Tree, Path, Callable[[], str]], Any]
"""Takes a configuration, an empty directory, and a function that returns the output since its last call; returns the
observed effect."""


def tree_at(path: str, value: Any) -> Tree:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


@contextlib.contextmanager
def started(tree: Tree) -> Iterator[deepspeed.DeepSpeedEngine]:
    torch.manual_seed(0)
    engine = deepspeed.initialize(model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Tanh()), config=tree)[0]
    yield engine
    close(engine)


def steps(tree: Tree, passes: int) -> None:
    with started(tree) as engine:
        for _ in range(passes):
            step(engine)


def step(engine: deepspeed.DeepSpeedEngine, factor: float = 1.0) -> torch.Tensor:
    found: torch.Tensor = engine(torch.ones(2, 4, dtype=next(engine.parameters()).dtype))
    engine.backward(found.float().square().mean() * factor)
    engine.step()
    return found


def sizes(tree: Tree, *_: Any) -> Any:
    batch = batch_of(read_config(tree), 1)
    assert batch is not None
    return batch.train, batch.micro, batch.accumulation


def updates(tree: Tree, *_: Any) -> int:
    with started(tree) as engine:
        step(engine)
        return engine.global_steps


def progress(tree: Tree, _: Path, printed: Callable[[], str]) -> int:
    steps(tree, 2)
    return printed().count("step=")


def batches(tree: Tree, *_: Any) -> int:
    with started(tree) as engine:
        return len(engine.deepspeed_io([1, 2, 3]))  # type: ignore[arg-type]


def loaded(tree: Tree, root: Path, _: Any) -> str:
    with started(tree) as engine:
        for tag in ("first", "second"):
            engine.save_checkpoint(str(root), tag=tag)
        (root / "latest_universal").write_text("first")
        found = engine.load_checkpoint(str(root))[0]
        return Path(str(found)).name


def differing_tags(tree: Tree, root: Path, _: Any) -> str:
    with started(tree) as engine, warnings.catch_warnings(record=True, action="always") as caught:
        engine._saving._run.everybody = lambda tag: [tag, "other"]  # type: ignore[method-assign]
        try:
            engine.save_checkpoint(str(root), tag="mine")
        except ValueError as error:
            return f"error: {str(error)[:10]}"
        told = [str(each.message) for each in caught]
        return f"warning: {told[0][:10]}" if told else "nothing"


def last_scale(tree: Tree, *_: Any) -> float:
    with started(tree) as engine:
        for factor in (float("inf"), 1e-3, float("inf")):
            step(engine, factor)
        return float(engine.optimizer.cur_scale)


def dtype_of_outputs(tree: Tree, *_: Any) -> torch.dtype:
    with started(tree) as engine:
        return step(engine).dtype


def optimizer(tree: Tree, *_: Any) -> Any:
    with started(tree) as engine:
        return None if engine.optimizer is None else ("betas" in engine.optimizer.param_groups[0], engine.get_lr())


def schedule(tree: Tree, *_: Any) -> Any:
    with started(tree) as engine:
        step(engine)
        step(engine)
        return type(engine.lr_scheduler).__name__, engine.get_lr()


def written(tree: Tree, root: Path, _: Any) -> list[str]:
    """Return the files, and the calls of the monitors' packages."""
    package = mock.MagicMock()
    package.__spec__ = ModuleSpec("package", None)
    packages = dict.fromkeys(("tensorboard", "torch.utils.tensorboard", "wandb"), package)
    with contextlib.chdir(root), mock.patch.dict(sys.modules, packages):
        steps(tree, 2)
    files = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir() or path.suffix == ".csv")
    begun = [f"{name} {kw or args}" for name, args, kw in package.mock_calls if name in ("SummaryWriter", "init")]
    return [*files, *begun]


def refusal(tree: Tree, *_: Any) -> str:
    try:
        to_plan(tree, 4)
    except ValueError as error:
        return str(error).partition(":")[0]
    return "none"


def on_disk(tree: Tree, *_: Any) -> float:
    return to_plan(tree, 1, numels=[100, 100])[0].tiers.param_disk_fraction


def moments(tree: Tree, *_: Any) -> torch.dtype:
    """Return the dtype of Adam's moments."""
    with started(tree) as engine:
        step(engine)
        (found,) = {state["exp_avg_sq"].dtype for state in engine.optimizer.state.values()}
        return found


def saved_16bit(tree: Tree, root: Path, _: Any) -> bool:
    with started(tree) as engine:
        return engine.save_16bit_model(str(root)) and (root / "pytorch_model.bin").is_file()


TB, CSV, WANDB = ({name: {"enabled": True}} for name in ("tensorboard", "csv_monitor", "wandb"))


TB_WRITER = "SummaryWriter {'log_dir': 'DeepSpeedJobName'}"
WANDB_RUN = {"project": "deepspeed", "group": None, "entity": None}
AUTOCAST: Tree = {"torch_autocast": {"enabled": True, "dtype": "bf16"}}
SCALED: Tree = {"fp16": {"enabled": True, "initial_scale_power": 4}, "zero_optimization": {"stage": 1}}
ON_NVME: Tree = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/fast"}}}
MASTERS: Tree = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "optimizer": {"type": "Adam"}}
WARMING = ("WarmupLR", [pytest.approx(0.05017, rel=1e-3)])


def of_file(name: str) -> list[str]:
    """Return a directory and its files of two steps."""
    return [name, *(f"{name}/Train_Samples_{each}.csv" for each in ("lr", "train_loss"))]


NARROW = "data_types.param_dtype=torch.bfloat16 with fp32 parameters"
F32, BF16 = torch.float32, torch.bfloat16
MB, ALL = "train_micro_batch_size_per_gpu", "train_batch_size"
GATHER_16BIT = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
BY_FOUR = {"warmup_num_steps": 4, "warmup_type": "linear"}
# By key: the probe, more configuration, the value, what the probe returns without the key and with it.
EFFECTS: dict[str, tuple[Probe, Tree, Any, Any, Any]] = {
    ALL: (sizes, {}, 8, (2, 2, 1), (8, 2, 4)),
    MB: (sizes, {ALL: 8, MB: None}, 4, (8, 8, 1), (8, 4, 2)),
    "gradient_accumulation_steps": (updates, {}, 2, 1, 0),
    "managed_gradient_accumulation": (updates, {"gradient_accumulation_steps": 2}, False, 0, 1),
    "steps_per_print": (progress, {}, 2, 0, 1),
    "dataloader_drop_last": (batches, {}, True, 2, 1),
    "checkpoint.load_universal": (loaded, {}, True, "second", "first"),
    "checkpoint.tag_validation": (differing_tags, {}, "fail", "warning: tag='mine'", "error: tag='mine'"),
    "fp16.consecutive_hysteresis": (last_scale, SCALED, True, 8.0, 16.0),
    "torch_autocast.enabled": (dtype_of_outputs, {"torch_autocast": {"dtype": "bf16"}}, True, F32, BF16),
    "torch_autocast.dtype": (dtype_of_outputs, AUTOCAST, "fp16", BF16, torch.float16),
    "optimizer.type": (optimizer, {"optimizer": {"type": None, "params": None}}, "AdamW", None, (True, [0.001])),
    "optimizer.params": (optimizer, {}, {"lr": 0.25}, (False, [0.5]), (False, [0.25])),
    "scheduler.type": (schedule, {}, "WarmupLR", ("NoneType", [0.5]), WARMING),
    "scheduler.params": (schedule, {"scheduler": {"type": "WarmupLR"}}, BY_FOUR, WARMING, ("WarmupLR", [0.125])),
    "tensorboard.enabled": (written, {}, True, [], [TB_WRITER]),
    "tensorboard.output_path": (written, TB, "x", [TB_WRITER], ["SummaryWriter {'log_dir': 'x/DeepSpeedJobName'}"]),
    "tensorboard.job_name": (written, TB, "x", [TB_WRITER], ["SummaryWriter {'log_dir': 'x'}"]),
    "csv_monitor.enabled": (written, {}, True, [], of_file("DeepSpeedJobName")),
    "csv_monitor.output_path": (written, CSV, "x", of_file("DeepSpeedJobName"), ["x", *of_file("x/DeepSpeedJobName")]),
    "csv_monitor.job_name": (written, CSV, "x", of_file("DeepSpeedJobName"), of_file("x")),
    "wandb.enabled": (written, {}, True, [], [f"init {WANDB_RUN}"]),
    **{
        f"wandb.{key}": (written, WANDB, "x", [f"init {WANDB_RUN}"], [f"init {WANDB_RUN | {name: 'x'}}"])
        for key, name in (("project", "project"), ("group", "group"), ("team", "entity"))
    },
    "bf16.bf16_optimizer_states": (moments, MASTERS, True, F32, BF16),
    "data_types.param_dtype": (refusal, {}, "bf16", "none", NARROW),
    "data_parallel_size": (refusal, {}, 3, "none", "data_parallel_size=3"),
    "zero_optimization.offload_param.max_in_cpu": (on_disk, ON_NVME, 50, 0.0, 0.75),
    GATHER_16BIT: (saved_16bit, {"zero_optimization": {"stage": 3}}, True, False, True),
}


@pytest.mark.parametrize("path", EFFECTS)
def test_each_key_changes_a_run(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probe, more, value, without, expected = EFFECTS[path]
    tree, key = merged(BASE, more), tree_at(path, value)
    assert without != expected
    for number, (given, seen) in enumerate(((tree, without), (merged(tree, key), expected))):
        root = tmp_path / str(number)
        root.mkdir()
        with warnings.catch_warnings(action="ignore"):
            assert probe(given, root, lambda: capsys.readouterr().out) == seen
    settings = read_config(merged(tree, key))
    assert path in settings.findings.used and path not in settings.findings.ignored


def without_key(tree: Tree, path: str) -> Tree:
    first, _, rest = path.partition(".")
    if not rest:
        return {name: value for name, value in tree.items() if name != first}
    return {name: without_key(value, rest) if name == first else value for name, value in tree.items()}


def test_every_used_key_has_an_effect() -> None:
    """Each used key has a row here, or a row in the table of plans whose plan differs without the key."""
    changed = set()
    for path, value, stage, more, _ in USED:
        around = {kind: {"enabled": True} for kind in ("fp16", "bf16") if path.startswith(kind)}
        tree = merged(BASE | {"zero_optimization": {"stage": stage}} | around, more)
        tree = merged(tree, tree_at(path, value))
        try:
            if to_plan(without_key(tree, path), 4)[0] == to_plan(tree, 4)[0]:
                continue
        except ValueError as error:
            assert path.endswith("nvme_path") and "nvme_path=None" in str(error)
        changed.add(path)
    of_use = {path for path, key in KEYS.items() if key.role == "used"}
    assert of_use == (changed & of_use) | set(EFFECTS), "give a key that is used a row"


GETTERS: dict[str, Any] = {
    "bfloat16_enabled": False,
    "fp16_enabled": False,
    "fp16_master_weights_and_gradients": False,
    "get_model_parallel_rank": 0,
    "get_sequence_parallel_group": None,
    "get_tensor_parallel_rank": 0,
    "mics_shard_size": -1,
    "scheduler_name": None,
    "steps_per_print": None,
    "torch_autocast_enabled": False,
    "zero_allow_untested_optimizer": True,
    "zero_hpz_partition_size": 1,
    "zero_max_live_parameters": 1_000_000_000,
    "zero_offload_optimizer": None,
    "zero_reduce_bucket_size": 70,
}


def test_engine_getters_and_missing_names() -> None:
    engine = start(nn.Linear(2, 2), ds_config(1, zero={"reduce_bucket_size": 70}))
    assert {name: getattr(engine, name)() for name in GETTERS} == GETTERS
    for name in ABSENT:
        assert not hasattr(engine, name)
        raises(AttributeError, f"{name!r} of DeepSpeed's engine is not available: ", getattr, engine, name)
    for name in ("zero_nothing", "fp16_nothing"):
        raises(AttributeError, "nor has the Linear in it", getattr, engine, name)
    close(engine)


SEEN: list[Any] = []


class Product(torch.autograd.Function):
    """An autograd function that gathers its weight in backward if necessary, as programs for DeepSpeed do."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        SEEN.append(weight.ds_status)  # type: ignore[attr-defined]
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        SEEN.append(weight.ds_status)
        with deepspeed.zero.GatheredParameters([weight], enabled=weight.ds_status != ZeroParamStatus.AVAILABLE):
            return grads[0] @ weight, grads[0].t() @ inputs


class Layer(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return Product.apply(inputs, self.weight)


def test_saved_parameter_is_gathered_and_has_its_status() -> None:
    model, inputs = Layer(3, 2, bias=False), torch.tensor([[1.0, -2.0, 3.0]])
    plain = model.weight.detach().clone().requires_grad_()
    engine = start(model, ds_config(3, zero={"stage3_max_live_parameters": 0}))
    SEEN.clear()
    engine.backward(engine(inputs).square().sum())
    assert SEEN == [ZeroParamStatus.AVAILABLE] * 2
    assert not hasattr(inputs, "ds_status")
    # torch.compile asks the class for each overridable name, once per process.
    torch.overrides._get_overridable_functions.cache_clear()
    assert torch.Tensor in torch.overrides.get_overridable_functions()
    assert torch.equal(torch.compile(lambda x: x + 1, backend="eager")(inputs), inputs + 1)
    engine.step()
    (inputs @ plain.t()).square().sum().backward()
    torch.testing.assert_close(close(engine)["weight"], plain.detach() - 0.1 * plain.grad)  # type: ignore[operator]
