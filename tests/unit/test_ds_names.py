"""DeepSpeed's names: all of the table can be imported, what is here works, and what is not says what to do instead."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.deepspeed import entry as entry_module
from shardwise.deepspeed.absent_names import ABSENT
from shardwise.deepspeed.config import read_config
from shardwise.deepspeed.names import WORLD
from shardwise.worlds import Absent, NotHere

comm: Any = importlib.import_module("shardwise.deepspeed.comm")
utils: Any = importlib.import_module("shardwise.deepspeed.utils")


def found(path: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{WORLD.home}.{path}".rstrip(".")), name)


def test_every_name_is_here_or_says_what_to_do_when_it_is_used() -> None:
    for path, name, entry in WORLD.entries():
        value = found(path, "Anything" if name == "*" else name)
        if not isinstance(entry, Absent):
            assert not isinstance(value, type) or type(value).__name__ != "_Refusing", (path, name)
            continue
        assert not isinstance(nn.Linear(1, 1), value)
        with pytest.raises(NotHere) as error:
            value(1)
        assert entry.instead in str(error.value)


def test_the_files_that_win_have_the_rest_from_the_table() -> None:
    from shardwise.deepspeed import checkpointing, zero

    for module, name in ((zero, "free_param"), (checkpointing, "get_cuda_rng_tracker")):
        with pytest.raises(NotHere, match=name):
            getattr(module, name)()
    with pytest.raises(AttributeError, match="Inti"):
        getattr(zero, "Inti")  # noqa: B009


def test_releases_are_compared() -> None:
    from shardwise.deepspeed import version

    assert deepspeed.__version__ == version.version == WORLD.version
    assert (version.__version_major__, version.__version_minor__) == (0, 19) and version.git_hash == ""
    assert version.DEEPSPEED_ENVIRONMENT_NAME.startswith(".")
    required = found("utils.torch", "required_torch_version")
    assert required(min_version=1.13) and not required(min_version=9.0) and not required(max_version=1.13)
    with pytest.raises(ValueError, match="give one of them"):
        required()
    assert found("", "is_compile_supported")() and not found("runtime.compiler", "is_compiling")()
    assert found("utils.nvtx", "instrument_w_nvtx")(len) is len


def test_one_process_is_rank_0_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    assert comm.is_available() and not comm.is_initialized()
    assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank()) == (0, 1, 0)
    comm.init_distributed("gloo", dist_init_required=False)
    comm.init_distributed(timeout=timedelta(seconds=1))  # nobody launched it
    comm.init_distributed(timeout=timedelta(seconds=1), rank=0, world_size=1)  # what there is without a launcher
    # What is not the launcher's is torch's, which says what it lacks.
    for given, said in (
        ({"init_method": "tcp://127.0.0.1:1"}, "rank parameter missing"),
        ({"rank": 1, "world_size": 2}, "MASTER_ADDR expected"),
    ):
        with pytest.raises(ValueError, match=said):
            comm.init_distributed("gloo", timeout=timedelta(seconds=1), **given)
    assert not comm.is_initialized()
    assert comm.has_all_gather_into_tensor() and comm.has_coalescing_manager()
    comm.configure(enabled=True)
    assert comm.log_summary() is None and comm.log_summary(return_dict=True) == {}
    groups = importlib.import_module("shardwise.deepspeed.utils.groups")
    assert (groups._get_data_parallel_world_size(), groups.get_model_parallel_world_size()) == (1, 1)
    assert groups._get_sequence_parallel_world_size() == 1 and groups.get_model_parallel_group() is None
    with pytest.raises(NotImplementedError, match="ep_size=2"):
        groups.initialize(ep_size=2)


def test_the_accelerator_is_asked() -> None:
    device = deepspeed.get_accelerator()
    kind = "cuda" if torch.cuda.is_available() and device.device_name() == "cuda" else "cpu"
    assert device is found("accelerator", "get_accelerator")() and device.device_name() == kind
    assert device.communication_backend_name() == ("gloo" if kind == "cpu" else "nccl")
    assert device.device_count() >= 1 and device.is_available() and torch.float32 in device.supported_dtypes()
    assert device.is_bf16_supported() and device.is_fp16_supported() and not device.is_triton_supported()
    assert device.total_memory() > 0 and device.memory_allocated() <= device.total_memory()
    assert device.max_memory_allocated() >= 0
    state = device.get_rng_state()
    first = torch.rand(3, device=device.current_device_name())
    device.set_rng_state(state)
    assert torch.equal(first, torch.rand(3, device=device.current_device_name()))
    device.manual_seed(5)
    assert device.initial_seed() == 5
    with device.device(0 if kind == "cuda" else None):
        device.synchronize()
    assert device.on_accelerator(first) and device.pin_memory(first).shape == first.shape
    found("accelerator", "set_accelerator")(device)
    other = copy.copy(device)
    other._name = "xpu"
    with pytest.raises(NotImplementedError, match="xpu"):
        found("accelerator", "set_accelerator")(other)
    assert found("accelerator", "is_current_accelerator_supported")()


def test_memory_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    see = found("runtime.utils", "see_memory_usage")
    see("before")
    assert capsys.readouterr().out == ""
    see("before", force=True)
    assert "before: " in capsys.readouterr().out


def test_messages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = utils.logger.level
    try:
        utils.set_log_level_from_string("info")
        utils.log_dist("hello", ranks=[0])
        for _ in range(2):
            utils.log_dist_once("once in a test", ranks=[-1])
            utils.logger.warning_once("warned in a test")
        utils.logger.setLevel(logging.WARNING)
        utils.log_dist("quiet")
        utils.logging.print_dist("said", ranks=[0])
        out = capsys.readouterr().out
        assert out.count("hello") == out.count("once in a test") == out.count("warned in a test") == 1
        assert "quiet" not in out and "[Rank -1] said" in out
        assert utils.logging.should_log_le("warning") and not utils.logging.should_log_le("info")
        utils.logging.print_json_dist({"a": 1}, path=tmp_path / "told.json")
        assert '"a": 1' in (tmp_path / "told.json").read_text()
        with pytest.raises(ValueError, match="loud"):
            utils.set_log_level_from_string("loud")
    finally:
        utils.logger.setLevel(before)
        for each in utils.logger.handlers:
            each.setLevel(logging.NOTSET)


def test_loaders_and_values() -> None:
    loader = utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1] and len(loader) == 2 and iter(loader) is loader
    value = torch.ones(4)
    item = {"a": [value[:2], (value, 3)], "b": None}
    cloned = found("checkpoint.utils", "clone_tensors_for_torch_save")(item)
    assert cloned["a"][0].untyped_storage().nbytes() == 8 and cloned["a"][1][1] == 3 and cloned["b"] is None
    moved = found("runtime.utils", "move_to_device")(item, "meta", lambda tensor: tensor.numel() == 2)
    assert moved["a"][0].is_meta and not moved["a"][1][0].is_meta
    names = importlib.import_module("shardwise.deepspeed.checkpoint")
    assert names.get_model_ckpt_name_for_rank("d", "00") == "d/mp_rank_00_model_states.pt"
    assert names.get_zero_ckpt_name_for_rank("d", 1, 2) == "d/zero_pp_rank_1_mp_rank_02_optim_states.pt"
    assert names.get_layer_ckpt_name_for_rank("d", "layer_03", 1) == "d/layer_03-model_01_model_states.pt"


def test_modules_are_made_with_a_dtype_on_a_device() -> None:
    with deepspeed.OnDevice(torch.float16, "meta"):
        layer = nn.Linear(2, 2)
    assert layer.weight.is_meta and layer.weight.dtype == torch.float16
    with deepspeed.OnDevice(torch.float16, enabled=False):
        layer = nn.Linear(2, 2)
    assert not layer.weight.is_meta and layer.weight.dtype == torch.float32 == torch.get_default_dtype()


def test_leaf_modules_are_flagged() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    assert utils.set_z3_leaf_modules(model, ["Sequential"]) == [model, model[1]]
    assert utils.z3_leaf_parameter(model[0].weight) and utils.get_z3_leaf_modules(model) == [model, model[1]]
    assert utils.unset_z3_leaf_modules(model, [nn.Sequential]) == [model, model[1]]
    assert not utils.z3_leaf_parameter(model[0].weight) and not utils.z3_leaf_module(model)
    assert utils.set_z3_leaf_modules_by_name(model, ["1.1", "2"]) == ([model[1][1]], ["2"])
    assert utils.set_z3_leaf_modules_by_suffix(model, ["0", "x"]) == ([model[0], model[1][0]], ["x"])
    with pytest.raises(ValueError, match="Conv2d"):
        utils.set_z3_leaf_modules(model, [nn.Conv2d])
    assert utils.set_z3_leaf_modules(model, [nn.Conv2d], raise_if_not_found=False) == []


def test_ranks_of_a_model_with_leaf_modules_agree_before_gathers() -> None:
    model, settings = nn.Linear(2, 2), read_config({"train_batch_size": 2, "zero_optimization": {"stage": 3}})
    assert entry_module._plan(settings, 2, model).comm.same_order is None
    utils.set_z3_leaf_module(model, True)
    assert entry_module._plan(settings, 2, model).comm.same_order is False


def test_no_model_has_experts_of_a_rank() -> None:
    experts = importlib.import_module("shardwise.deepspeed.moe.utils")
    param = nn.Parameter(torch.ones(1))
    assert experts.has_moe_layers(nn.Linear(1, 1)) == (False, 0)
    assert not experts.is_moe_param(param) and not experts.is_moe_param_group({"params": [param]})
    split, group = experts.split_params_into_different_moe_groups_for_optimizer, {"params": iter([param]), "lr": 1.0}
    assert split(group) == [{"params": [param], "lr": 1.0}]
    assert split(({"params": [param]}, {"params": []})) == [{"params": [param]}, {"params": []}]
    param.allreduce = False  # type: ignore[attr-defined]
    with pytest.raises(NotHere, match=r"shape \(1,\)"):
        split({"params": [param]})
    assert experts.is_moe_param(param) and experts.is_moe_param_group({"moe": True})
    assert not found("runtime.zero.utils", "is_zero_param")(param)


def steps(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> torch.Tensor:
    for number in range(3):
        param.grad = torch.linspace(-1.0, 1.0, 6) * (number + 1)
        optimizer.step()
    return param.detach()


def test_optimizers_are_what_their_names_say() -> None:
    adam, lion = importlib.import_module("shardwise.deepspeed.ops.adam"), found("ops.lion", "DeepSpeedCPULion")
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01}
    torch_ones = {True: torch.optim.AdamW, False: torch.optim.Adam}

    def one() -> nn.Parameter:
        return nn.Parameter(torch.linspace(1.0, 2.0, 6))

    for decoupled, reference in torch_ones.items():
        want = steps(reference([param := one()], **options), param)
        cpu = adam.DeepSpeedCPUAdam([param := one()], adamw_mode=decoupled, **options)
        torch.testing.assert_close(steps(cpu, param), want)
        fused = adam.FusedAdam([param := one()], adam_w_mode=decoupled, **options)
        torch.testing.assert_close(steps(fused, param), want)
    want = steps(torch.optim.Adagrad([param := one()], **options), param)
    adagrad = found("ops.adagrad", "DeepSpeedCPUAdagrad")
    torch.testing.assert_close(steps(adagrad([param := one()], **options), param), want)
    for cls in (lion, found("ops.lion", "FusedLion")):
        mine = steps(cls([param := one()], betas=(0.9, 0.99), **options), param)
        torch.testing.assert_close(mine, by_hand(one().detach()))
    for cls in (adam.DeepSpeedCPUAdam, adam.FusedAdam, adagrad):
        with pytest.raises(NotImplementedError, match="amsgrad=True"):
            cls([one()], amsgrad=True)
    with pytest.raises(ValueError, match="betas"):
        lion([one()], betas=(0.9, 1.0))


@pytest.mark.parametrize(("inside", "corrected", "bounds"), [(False, True, (0.01, 10.0)), (True, False, (0.7, 0.9))])
def test_lamb_is_its_formula(inside: bool, corrected: bool, bounds: tuple[float, float]) -> None:
    lamb = importlib.import_module("shardwise.deepspeed.ops.lamb").FusedLamb
    assert lamb is found("ops.lamb.fused_lamb", "FusedLamb")
    weight, average, squares, ratio = torch.linspace(1.0, 2.0, 6), torch.zeros(6), torch.zeros(6), torch.tensor(0.0)
    for number in range(1, 4):
        grad = torch.linspace(-1.0, 1.0, 6) * number
        average, squares = 0.9 * average + 0.1 * grad, 0.999 * squares + 0.001 * grad**2
        update = average / ((squares + 1e-8).sqrt() if inside else squares.sqrt() + 1e-8) + 0.01 * weight
        ratio = (weight.norm() / update.norm()).clamp(*bounds)
        rate = 0.1 * (1 - 0.999**number) ** 0.5 / (1 - 0.9**number) if corrected else 0.1
        weight = weight - rate * ratio * update
    options = {"min_coeff": bounds[0], "max_coeff": bounds[1], "bias_correction": corrected, "eps_inside_sqrt": inside}
    optimizer = lamb([param := nn.Parameter(torch.linspace(1.0, 2.0, 6))], lr=0.1, weight_decay=0.01, **options)
    torch.testing.assert_close(steps(optimizer, param), weight)
    assert optimizer.get_lamb_coeffs() == pytest.approx([float(ratio)])
    zero = nn.Parameter(torch.zeros(2))
    zero.grad = torch.ones(2)
    unbounded = lamb([zero], lr=0.1, bias_correction=False, min_coeff=2.0)
    unbounded.step()
    assert unbounded.get_lamb_coeffs() == [1.0]  # where a norm is 0, whatever the bounds
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0: give gradient_clipping"):
        lamb([zero], max_grad_norm=1.0)
    with pytest.raises(RuntimeError, match="amsgrad=True"):
        lamb([zero], amsgrad=True)


def by_hand(value: torch.Tensor) -> torch.Tensor:
    """Three steps of Lion."""
    average = torch.zeros(6)
    for number in range(3):
        grad = torch.linspace(-1.0, 1.0, 6) * (number + 1)
        value = value * (1 - 0.1 * 0.01) - 0.1 * torch.sign(0.9 * average + 0.1 * grad)
        average = 0.99 * average + 0.01 * grad
    return value


def test_lion_by_its_name_in_a_configuration() -> None:
    model = nn.Linear(3, 2)
    config = {"train_batch_size": 1, "optimizer": {"type": "Lion", "params": {"lr": 0.1, "betas": [0.9, 0.99]}}}
    engine = deepspeed.initialize(model=model, config={**config, "gradient_clipping": 0.0})[0]
    before = model.weight.detach().clone()
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    torch.testing.assert_close(engine.state_dict()["weight"], before - 0.1)
    engine.destroy()


@pytest.mark.parametrize(("kind", "decoupled"), [("AdamW", True), ("Adam", False)])
def test_adam_without_the_correction_of_its_bias(kind: str, decoupled: bool) -> None:
    model, options = nn.Linear(3, 2), {"lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.5, "bias_correction": False}
    params = options if decoupled else {**options, "adam_w_mode": False}
    config = {"train_batch_size": 1, "gradient_clipping": 0.0, "optimizer": {"type": kind, "params": params}}
    weight, average, squares = model.weight.detach().clone(), torch.zeros(2, 3), torch.zeros(2, 3)
    engine = deepspeed.initialize(model=model, config=config)[0]
    inputs = torch.tensor([[1.0, -2.0, 3.0]])
    for _ in range(3):
        grad = inputs.expand(2, 3) if decoupled else inputs.expand(2, 3) + 0.5 * weight
        average, squares = 0.9 * average + 0.1 * grad, 0.99 * squares + 0.01 * grad**2
        weight = (weight * (1 - 0.1 * 0.5) if decoupled else weight) - 0.1 * average / (squares.sqrt() + 1e-8)
        engine.backward(engine(inputs).sum())
        engine.step()
    torch.testing.assert_close(engine.state_dict()["weight"], weight)
    engine.destroy()


def test_layers_are_cut_by_initialize() -> None:
    model, config = nn.Linear(2, 2), {"train_batch_size": 1, "tensor_parallel": {"autotp_size": 2}}
    assert deepspeed.tp_model_init(model, 2, torch.float32, config=config) is model
    with pytest.raises(ValueError, match=r"tp_size=4 of tp_model_init and tensor_parallel\.autotp_size=2"):
        deepspeed.tp_model_init(model, 4, torch.float32, config=config)


def test_initialize_compares_with_what_was_said_of_the_cuts() -> None:
    config: dict[str, Any] = {"train_batch_size": 1, "tensor_parallel": {"autotp_size": 2}}
    model = deepspeed.tp_model_init(nn.Linear(2, 2), 4, torch.float32)
    with pytest.raises(ValueError, match=r"tp_size=4 of tp_model_init and tensor_parallel\.autotp_size=2"):
        deepspeed.initialize(model=model, config=config)
    # Its size counts where the configuration has none: there is one rank here.
    with pytest.raises(ValueError, match="autotp_size=4 x sequence_parallel_size=1 does not divide"):
        deepspeed.initialize(model=model, config={"train_batch_size": 1})
    with pytest.raises(ValueError, match="autotp_size=4 x"):
        deepspeed.initialize(model=model, config={"train_batch_size": 1, "tensor_parallel": {"tp_overlap_comm": False}})
    deepspeed.tp_model_init(model, 1, torch.float16)  # the last one counts
    with pytest.raises(ValueError, match=r"dtype=torch.float16 of tp_model_init and torch.bfloat16"):
        deepspeed.initialize(model=model, config={"train_batch_size": 1, "bf16": {"enabled": True}})
    with pytest.warns(UserWarning, match=r"dtype=torch.float16 of tp_model_init without effect.*stay torch.float32"):
        engine = deepspeed.initialize(model=model, config={"train_batch_size": 1, "gradient_clipping": 0.0})[0]
    engine.destroy()


def test_what_was_said_of_the_cuts_counts_for_a_model_that_was_wrapped_since() -> None:
    inner = deepspeed.tp_model_init(nn.Linear(2, 2), 4, torch.float32)
    model = nn.Sequential(nn.Sequential(inner), nn.ReLU())
    with pytest.raises(ValueError, match="autotp_size=4 x sequence_parallel_size=1 does not divide"):
        deepspeed.initialize(model=model, config={"train_batch_size": 1})
    deepspeed.tp_model_init(model, 1, torch.float32)
    with pytest.raises(ValueError, match=r"tp_size=1, .* for Sequential, and tp_size=4, .* for Linear"):
        deepspeed.initialize(model=model, config={"train_batch_size": 1})
    deepspeed.tp_model_init(inner, 1, torch.float32)
    deepspeed.initialize(model=model, config={"train_batch_size": 1, "gradient_clipping": 0.0})[0].destroy()


def test_what_is_wrong_with_cuts_is_said_at_once() -> None:
    model = nn.Linear(2, 2)
    for given, error, said in (
        ({"tp_size": 0}, ValueError, "tp_size=0: give a number of ranks"),
        ({"dtype": "fp16"}, TypeError, "dtype='fp16': give a torch.dtype"),
        ({"mpu": None, "rank": 1}, TypeError, r"tp_model_init\(mpu=None, rank=1\): there are tp_size"),
        ({"tp_group": "mine"}, ValueError, "tp_group='mine' without torch.distributed"),
    ):
        with pytest.raises(error, match=said):
            deepspeed.tp_model_init(model, **{"tp_size": 2, "dtype": torch.float32, **given})


def test_nothing_is_both_here_and_absent() -> None:
    for path, names in ABSENT.items():
        listed = WORLD.names[path]
        assert isinstance(listed, Mapping)
        # A later entry would win in silence: what works is told by the lines of the table, what does not by ABSENT.
        assert {name for name in names if not isinstance(listed[name], Absent)} == set(), path
    assert deepspeed.DeepSpeedConfig({"train_batch_size": 1}).train_batch_size == 1
