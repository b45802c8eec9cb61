"""What DeepSpeed's smaller names do."""

from __future__ import annotations

import importlib
import logging
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.compat import UnsupportedName
from shardwise.deepspeed import entry as entry_module
from shardwise.deepspeed.config import read_config
from tests.support.on_ranks import assert_refused

comm: Any = importlib.import_module("shardwise.deepspeed.comm")
utils: Any = importlib.import_module("shardwise.deepspeed.utils")


def found(path: str, name: str) -> Any:
    return getattr(importlib.import_module(f"shardwise.deepspeed.{path}".rstrip(".")), name)


def test_the_files_that_win_have_the_rest_from_the_table() -> None:
    from shardwise.deepspeed import checkpointing, zero

    for module, name in ((zero, "free_param"), (checkpointing, "get_cuda_rng_tracker")):
        with pytest.raises(UnsupportedName, match=name):
            getattr(module, name)()
    with pytest.raises(AttributeError, match="Inti"):
        getattr(zero, "Inti")  # noqa: B009


def test_the_release() -> None:
    from shardwise.deepspeed import version

    assert deepspeed.__version__ == version.version == "0.19.8"
    assert (version.__version_major__, version.__version_minor__) == (0, 19)
    parts = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)  # type: ignore[attr-defined]
    assert ".".join(map(str, parts)) == deepspeed.__version__
    assert version.DEEPSPEED_ENVIRONMENT_NAME.startswith(".")
    assert not found("runtime.compiler", "is_compiling")()


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
    groups = importlib.import_module("shardwise.deepspeed.utils.groups")
    assert (groups._get_data_parallel_world_size(), groups.get_model_parallel_world_size()) == (1, 1)
    assert groups._get_sequence_parallel_world_size() == 1 and groups.get_model_parallel_group() is None


def test_the_accelerator_is_asked() -> None:
    device = deepspeed.get_accelerator()
    kind = "cuda" if torch.cuda.is_available() and device.device_name() == "cuda" else "cpu"
    assert device is found("accelerator", "get_accelerator")() and device.device_name() == kind
    assert device.communication_backend_name() == ("gloo" if kind == "cpu" else "nccl")
    assert device.device_count() >= 1 and device.is_available()
    assert device.is_bf16_supported() and device.is_fp16_supported()
    assert 0 <= device.memory_allocated() <= device.max_memory_allocated()
    first = torch.rand(3, device=device.current_device_name())
    device.manual_seed(5)
    assert torch.initial_seed() == 5
    device.synchronize()
    device.empty_cache()
    assert device.on_accelerator(first) and device.current_device() == ("cpu" if kind == "cpu" else 0)
    with pytest.raises(AttributeError, match="call torch's function for"):
        _ = device.is_triton_supported


def test_memory_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    see = found("runtime.utils", "see_memory_usage")
    see("before")
    assert capsys.readouterr().out == ""
    see("before", force=True)
    assert "before: " in capsys.readouterr().out


def test_messages(capsys: pytest.CaptureFixture[str]) -> None:
    before = utils.logger.level
    try:
        utils.logger.setLevel(logging.INFO)
        utils.log_dist("hello", ranks=[0])
        utils.log_dist("elsewhere", ranks=[1])
        for _ in range(2):
            utils.logger.warning_once("warned in a test")
        utils.logger.setLevel(logging.WARNING)
        utils.log_dist("quiet")
        out = capsys.readouterr().out
        assert out.count("[Rank 0] hello") == out.count("warned in a test") == 1
        assert "quiet" not in out and "elsewhere" not in out
    finally:
        utils.logger.setLevel(before)


def test_loaders_and_values() -> None:
    loader = utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1] and len(loader) == 2 and iter(loader) is loader
    value = torch.ones(4)
    item = {"a": [value[:2], (value, 3)], "b": None}
    cloned = found("checkpoint.utils", "clone_tensors_for_torch_save")(item)
    assert cloned["a"][0].untyped_storage().nbytes() == 8 and cloned["a"][1][1] == 3 and cloned["b"] is None
    moved = found("runtime.utils", "move_to_device")(item, "meta", lambda tensor: tensor.numel() == 2)
    assert moved["a"][0].is_meta and not moved["a"][1][0].is_meta


def test_no_parameter_is_marked_outside_of_zero() -> None:
    assert not found("runtime.zero.utils", "is_zero_param")(nn.Parameter(torch.ones(1)))


def test_ranks_of_a_model_with_leaf_modules_agree_before_gathers() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    settings = read_config({"train_batch_size": 2, "zero_optimization": {"stage": 3}})
    assert entry_module._plan(settings, 2, model).comm.same_order is None
    utils.set_z3_leaf_modules(model, [nn.Linear])
    assert entry_module._plan(settings, 2, model).comm.same_order is False


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


def test_initialize_compares_with_what_was_said_of_the_cuts() -> None:
    config: dict[str, Any] = {"train_batch_size": 1, "tensor_parallel": {"autotp_size": 2}}
    model = nn.Linear(2, 2)
    assert deepspeed.tp_model_init(model, 4, torch.float32, config=config) is model
    with pytest.raises(ValueError, match=r"tp_size of tp_model_init and tensor_parallel\.autotp_size .* are \[2, 4\]"):
        deepspeed.initialize(model=model, config=config)
    # Its size counts where the configuration has none: there is one rank here.
    wrapped = nn.Sequential(nn.Sequential(model), nn.ReLU())
    without: dict[str, Any] = {"train_batch_size": 1, "tensor_parallel": {"tp_overlap_comm": False}}
    for each, given in ((model, {"train_batch_size": 1}), (model, without), (wrapped, {"train_batch_size": 1})):
        with pytest.raises(ValueError, match="autotp_size=4 x sequence_parallel_size=1 does not divide"):
            deepspeed.initialize(model=each, config=given)
    deepspeed.tp_model_init(model, 1, torch.float16)  # the last one counts
    deepspeed.initialize(model=wrapped, config={"train_batch_size": 1, "gradient_clipping": 0.0})[0].destroy()
    assert_refused(
        (lambda: deepspeed.tp_model_init(model, 0, torch.float32), "tp_size=0: give a number of ranks"),
        (lambda: deepspeed.tp_model_init(model, 2, torch.float32, tp_group="mine"), "tp_group='mine' "),
    )
