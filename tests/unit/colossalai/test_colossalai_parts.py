"""ColossalAI's small things in one process: loggers, timers, devices, seeds, configurations, grids of ranks."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shardwise.colossalai.accelerator import get_accelerator
from shardwise.colossalai.booster import Accelerator, Booster
from shardwise.colossalai.checkpoint_io import GeneralCheckpointIO
from shardwise.colossalai.cluster import DistCoordinator, ProcessGroupMesh
from shardwise.colossalai.interface import ModelWrapper, OptimizerWrapper
from shardwise.colossalai.interface.pretrained import get_pretrained_path, set_pretrained_path
from shardwise.colossalai.kernel.kernel_loader import CPUAdamLoader, FusedOptimizerLoader
from shardwise.colossalai.lazy import LazyInitContext
from shardwise.colossalai.legacy import registry
from shardwise.colossalai.legacy.context import Config, ParallelMode
from shardwise.colossalai.legacy.core import global_context
from shardwise.colossalai.logging import disable_existing_loggers, get_dist_logger
from shardwise.colossalai.shardformer.layer.utils import Randomizer
from shardwise.colossalai.testing import (
    DummyDataloader,
    assert_equal,
    assert_hf_output_close,
    assert_not_equal,
    check_state_dict_equal,
    clear_cache_before_run,
    free_port,
    parameterize,
    rerun_on_exception,
    run_on_environment_flag,
    skip_if_not_enough_gpus,
)
from shardwise.colossalai.testing.random import seed_all
from shardwise.colossalai.utils import multi_tensor_applier
from shardwise.colossalai.zero import ColoInitContext
from shardwise.colossalai.zero.gemini.chunk import search_chunk_configuration
from torch import nn

from shardwise import colossalai
from shardwise.booster.plugin import GeminiPlugin
from shardwise.chunk.search import waste_numel
from shardwise.colossalai import utils
from shardwise.plan import ByNumel


def test_a_logger_says_where_and_only_on_the_ranks_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = get_dist_logger("shardwise.test.loggers")
    assert logger is get_dist_logger("shardwise.test.loggers") and logger.rank == 0
    logger.log_to_file(tmp_path / "logs", suffix="run")
    logger.info("to rank 0", ranks=[0])
    logger.warning("to all")
    logger.info("to another", ranks=[1])
    logger.set_level("ERROR")
    logger.warning("below")
    logger.error("bad %s")
    logger.debug("far below")
    said = capsys.readouterr().err
    assert "test_colossalai_parts.py" in said and "to rank 0" in said and "WARNING" in said and "bad %s" in said
    assert "to another" not in said and "below" not in said
    assert (tmp_path / "logs" / "rank_0_run.log").read_text().count("\n") == 3
    with pytest.raises(ValueError, match="LOUD"):
        logger.set_level("LOUD")
    with pytest.raises(ValueError, match="already"):
        type(logger)("shardwise.test.loggers")


def test_other_loggers_can_be_quietened() -> None:
    names = ("shardwise.test.quiet", "shardwise.test.loud")
    for name in names:
        logging.getLogger(name).setLevel(logging.DEBUG)
    disable_existing_loggers(include=[names[0]])
    assert [logging.getLogger(name).level for name in names] == [logging.WARNING, logging.DEBUG]
    levels = {name: logging.getLogger(name).level for name in list(logging.Logger.manager.loggerDict)}
    disable_existing_loggers(exclude=[names[0]])
    assert logging.getLogger(names[1]).level == logging.WARNING
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_a_timer_adds_up() -> None:
    timer = utils.MultiTimer()
    for _ in range(3):
        timer.start("step")
        assert timer.get_timer("step").lap() >= 0.0
        assert (timer.stop("step", keep_in_history=True) or 0.0) >= 0.0
    one = timer.get_timer("step")
    assert one.has_history and one.get_history_sum() >= one.get_elapsed_time() >= 0.0
    assert one.get_history_mean() == pytest.approx(one.get_history_sum() / 3)
    assert [name for name, _ in timer] == ["step"] and timer.is_on()
    timer.reset()
    with pytest.raises(RuntimeError, match="mean of 0"):
        one.get_history_mean()
    with pytest.raises(RuntimeError, match="start"):
        one.stop()
    with pytest.raises(ValueError, match="'other'"):
        timer.get_timer("other")
    timer.set_status(False)
    assert timer.stop("step") is None


def test_the_device_is_asked_by_one_interface() -> None:
    accelerator = get_accelerator()
    assert accelerator.get_current_device() == utils.get_current_device()
    assert accelerator.is_available() and accelerator.device_count() >= 1
    accelerator.synchronize()
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()
    assert accelerator.memory_allocated() > 0 or accelerator.name == "cuda"
    assert accelerator.max_memory_reserved() >= 0 and accelerator.memory_reserved() >= 0
    state = accelerator.get_rng_state()
    first = torch.rand(2, device=accelerator.get_current_device())
    accelerator.set_rng_state(state)
    assert_equal(first, torch.rand(2, device=accelerator.get_current_device()))
    accelerator.manual_seed_all(4)
    assert accelerator.initial_seed() == 4
    with accelerator.autocast(dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype in (torch.bfloat16, torch.float32)
    assert utils.colo_device_memory_capacity(torch.device("cpu")) > 2**20
    with pytest.raises(TypeError, match="'cpu'"):
        utils.colo_device_memory_capacity("cpu")
    if accelerator.name == "cpu":
        assert accelerator.current_device() == 0 and accelerator.get_version() == ""
        with pytest.raises(NotImplementedError, match="device_memory"):
            utils.colo_set_process_memory_fraction(0.5)
        with pytest.raises(AttributeError, match="get_device_capability"):
            accelerator.get_device_capability()


def test_seeds_start_all_random_numbers() -> None:
    drawn = []
    for start in (utils.set_seed, seed_all, global_context.set_seed):
        start(11)
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[1] == drawn[2]


def test_small_functions_of_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    utils.ensure_path_exists(str(tmp_path / "a" / "b" / "file"))
    assert (tmp_path / "a" / "b").is_dir()
    once = utils.disposable(lambda: 5)
    assert (once(), once()) == (5, None)
    for enable in (True, False):
        with utils.conditional_context(torch.no_grad(), enable):
            assert torch.is_grad_enabled() is not enable
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].register_buffer("scratch", torch.zeros(1), persistent=False)
    assert utils.get_non_persistent_buffers_set(model) == {"1.scratch"}
    assert not utils.is_ddp_ignored(model[1].weight)
    utils.print_rank_0("said")
    assert capsys.readouterr().out == "said\n" and not utils.is_using_pp()
    batch = torch.randn(3, 2, requires_grad=True)
    utils.checkpoint(model[1], False, batch).sum().backward()
    again = batch.detach().clone().requires_grad_()
    model[1](again).sum().backward()
    assert_equal(batch.grad, again.grad)
    with pytest.raises(NotImplementedError, match="activation_offload"):
        utils.checkpoint(model[1], True, batch)
    loader = utils.get_dataloader(list(range(7)), shuffle=True, batch_size=2, drop_last=True)
    assert sum(len(each) for each in loader) == 6
    Randomizer.reset_index()
    with pytest.raises(NotImplementedError, match="set_seed"):
        Randomizer(3)
    accelerator = Accelerator("cpu")
    accelerator.bind()
    assert accelerator.configure_model(model) is model and model[1].weight.device.type == "cpu"
    with pytest.raises(ValueError, match="device='npu'"):
        Accelerator("npu")


def test_lazy_models_have_the_values_of_ordinary_ones() -> None:
    torch.manual_seed(1)
    ordinary = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    torch.manual_seed(1)
    context = LazyInitContext()
    with context:
        lazy = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert lazy[0].weight.is_meta
    check_state_dict_equal(ordinary.state_dict(), LazyInitContext.materialize(lazy).state_dict())
    with context:  # once more
        again = nn.Linear(2, 2)
    assert again.weight.is_meta
    with ColoInitContext(device="cpu", dtype=torch.bfloat16):
        half = nn.Linear(3, 3)
    assert half.weight.dtype is torch.bfloat16 and torch.get_default_dtype() is torch.float32
    with pytest.raises(NotImplementedError, match="default_dist_spec"):
        ColoInitContext(default_dist_spec=object())
    with pytest.raises(NotImplementedError, match="tensor_cls"):
        LazyInitContext(tensor_cls=object())


def test_grids_of_ranks_are_counted_with_the_last_axis_fastest() -> None:
    shape = (2, 3, 4)
    places = [ProcessGroupMesh.unravel(rank, shape) for rank in range(24)]
    assert places == [tuple(map(int, np.unravel_index(rank, shape))) for rank in range(24)]
    assert [ProcessGroupMesh.ravel(place, shape) for place in places] == list(range(24))
    for mode in ("wrap", "clip"):
        got = ProcessGroupMesh.ravel((-1, 3, 1), shape, mode)
        assert got == int(np.ravel_multi_index((-1, 3, 1), shape, mode=mode))
    assert ProcessGroupMesh.get_coords_along_axis((0, 1, 2), [0, 2], [[0, 1], [1, 3]]) == [
        (0, 1, 1),
        (0, 1, 3),
        (1, 1, 1),
        (1, 1, 3),
    ]
    for wrong in (lambda: ProcessGroupMesh.ravel((0, 3, 0), shape), lambda: ProcessGroupMesh.unravel(24, shape)):
        with pytest.raises(ValueError, match="outside"):
            wrong()
    for early in (DistCoordinator, lambda: ProcessGroupMesh(1)):
        with pytest.raises(RuntimeError, match="launch_from_torch"):
            early()


def test_launching_needs_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=r"no RANK.*torchrun"):
        colossalai.launch_from_torch()
    with pytest.raises(RuntimeError, match=r"no SLURM_PROCID.*srun"):
        colossalai.launch_from_slurm("localhost", 29500)
    with pytest.raises(RuntimeError, match=r"no OMPI_COMM_WORLD_RANK.*mpirun"):
        colossalai.launch_from_openmpi("localhost", 29500)
    with pytest.raises(ValueError, match="rank=3, world_size=2"):
        colossalai.launch(3, 2, "localhost", 29500)


def test_older_programs_find_their_context(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("BATCH = 4\nparallel = dict(pipeline=1, tensor=dict(size=1, mode='1d'))\n")
    before = global_context.config
    try:
        global_context.load_config(str(tmp_path / "config.py"))
        assert global_context.config.BATCH == 4 and global_context.config.parallel.tensor.mode == "1d"
        with pytest.raises(AttributeError, match="'EPOCHS'"):
            _ = global_context.config.EPOCHS
        with pytest.raises(NotImplementedError, match="HybridParallelPlugin"):
            global_context.load_config({"parallel": {"tensor": {"size": 2, "mode": "1d"}}})
        with pytest.raises(ValueError, match="Python file"):
            Config.from_file("config.yaml")
    finally:
        global_context.config = before
    for mode in ParallelMode:
        assert global_context.get_world_size(mode) == 1 and global_context.is_first_rank(mode)
        assert global_context.is_last_rank(mode) and not global_context.is_initialized(mode)
    assert global_context.is_pipeline_last_stage() and global_context.data_parallel_size == 1
    with pytest.raises(TypeError, match="'data'"):
        global_context.get_world_size("data")
    with pytest.raises(RuntimeError, match="launch"):
        global_context.get_group(ParallelMode.DATA)

    @registry.DATASETS.register_module
    class Numbers:
        pass

    assert registry.DATASETS.get_module("Numbers") is Numbers and registry.DATASETS.has("Numbers")
    with pytest.raises(ValueError, match="'Letters'"):
        registry.DATASETS.get_module("Letters")


def test_wrappers_are_what_boost_returns_and_can_be_derived_from(tmp_path: Path) -> None:
    class Scaled(ModelWrapper):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().forward(*args, **kwargs)

    plain = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    wrapped = Scaled(plain)
    assert isinstance(wrapped, ModelWrapper) and wrapped.unwrap() is plain and not isinstance(plain, ModelWrapper)
    assert_not_equal(wrapped(torch.ones(1, 2)), plain(torch.ones(1, 2)))
    booster = Booster()
    model, boosted, *_ = booster.boost(plain, optimizer)
    assert isinstance(boosted, OptimizerWrapper) and not isinstance(boosted, Scaled)
    assert boosted.optim is optimizer and boosted.unwrap() is optimizer
    own = OptimizerWrapper(optimizer)
    for refused in (lambda: own.scale_loss(torch.ones(())), own.unscale_grad):
        with pytest.raises(NotImplementedError, match=r"by itself|scale out"):
            refused()
    assert get_pretrained_path(plain) is None
    set_pretrained_path(plain, "somewhere")
    assert get_pretrained_path(plain) == "somewhere"
    other = nn.Linear(2, 2)
    booster.checkpoint_io.save_model(model, tmp_path / "m.safetensors", use_async=True)
    for wait in (booster.checkpoint_io._sync_d2h, booster.checkpoint_io._sync_io, booster.checkpoint_io.synchronize):
        wait()
    GeneralCheckpointIO().load_model(other, tmp_path / "m.safetensors")
    check_state_dict_equal(other.state_dict(), plain.state_dict())
    with pytest.raises(AttributeError, match="save_lora_as_pretrained"):
        booster.checkpoint_io.boost(plain)


def test_what_tests_are_written_with(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []

    @parameterize("number", [1, 2])
    @parameterize("text", ["a", "b"])
    @clear_cache_before_run()
    def note(number: int, text: str) -> None:
        seen.append((number, text))

    note()
    assert seen == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    tries: list[int] = []

    @rerun_on_exception(KeyError, pattern=".*again", max_try=3)
    def failing(message: str) -> None:
        tries.append(1)
        raise KeyError(message)

    for message, count in (("again", 3), ("no", 1)):
        tries.clear()
        with pytest.raises(KeyError):
            failing(message)
        assert len(tries) == count
    assert list(DummyDataloader(lambda: 7, length=2)) == [7, 7] and len(DummyDataloader(lambda: 7)) == 10
    assert 0 < free_port() < 2**16
    monkeypatch.setenv("A_FLAG", "1")
    assert run_on_environment_flag("a_flag").args == (False,) and run_on_environment_flag("B_FLAG").args == (True,)
    ran: list[int] = []
    skip_if_not_enough_gpus(min_gpus=2**16)(lambda: ran.append(1))()
    assert not ran
    assert_hf_output_close({"a": (torch.ones(2), 1), "b": 0}, {"a": (torch.ones(2), 1), "b": 1}, ignore_keys=["b"])
    for wrong in ({"a": torch.ones(2)}, {"a": torch.ones(3)}, {"b": torch.zeros(2)}):
        with pytest.raises(AssertionError):
            check_state_dict_equal({"a": torch.zeros(2)}, wrong)
    check_state_dict_equal(
        {"a": [torch.zeros(2), {"x": 1}]}, {"a": [torch.zeros(2).half(), {"x": 1}]}, ignore_dtype=True
    )


def test_the_size_of_chunks_is_searched_as_the_plugin_does() -> None:
    model = nn.Sequential(*(nn.Linear(24, width, bias=False) for width in (1000, 1001, 999, 1100, 900)))
    total = 24 * 5000
    config, numel, empty = search_chunk_configuration(model, 0.05, 8, min_chunk_size_m=0.01)
    assert numel == total and set(config) == {1} and not config[1]["keep_gathered"]
    sizes = range(24 * 1100, 24 * 1100 + int(0.05 * 2**20) + 1, 8)
    least = min((waste_numel([24 * w for w in (1000, 1001, 999, 1100, 900)], size), size) for size in sizes)
    assert (empty, config[1]["chunk_size"]) == least
    assert search_chunk_configuration(model, 0.05, 8) == ({1: {"chunk_size": total, "keep_gathered": True}}, total, 0)
    plan = GeminiPlugin(precision="fp32", chunk_config_dict=config).plan(1)
    assert plan.shard.packing == ByNumel(chunk_numel=least[1])
    with pytest.raises(ValueError, match="interval_numel=0"):
        search_chunk_configuration(model, 1, 0)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_optimizers_are_called_by_hand(decoupled: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start, grads = torch.rand(40), torch.rand(3, 40)
    plain = nn.Parameter(start.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = kind([plain], lr=1e-2, weight_decay=0.1)
    fused, host = FusedOptimizerLoader().load().multi_tensor_adam, CPUAdamLoader().load().CPUAdamOptimizer
    on_host = host(1e-2, 0.9, 0.999, 1e-8, 0.1, decoupled)
    tensors = [[start.clone().to(dtype), torch.zeros(40, dtype=dtype), torch.zeros(40, dtype=dtype)] for _ in range(2)]
    same = torch.zeros(1, dtype=torch.int)
    for step, grad in enumerate(grads, 1):
        plain.grad = grad
        reference.step()
        (p, m, v), (q, *moments) = tensors
        numbers = (1e-2, 0.9, 0.999, 1e-8, step, int(decoupled), 1, 0.1, 2.0)
        multi_tensor_applier(fused, same, [[2 * grad], [p], [m], [v]], *numbers)
        multi_tensor_applier(fused, same + 1, [[grad], [p], [m], [v]], *numbers)  # an overflow: nothing is updated
        on_host.step(step, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, q, grad, *moments, -1)
        tolerance = 1e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(p.float(), plain.data, rtol=tolerance, atol=tolerance)
        assert_equal(p, q)
        assert_equal(m, moments[0])
