"""ColossalAI's names that programs use in passing, each used as they use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shardwise.colossalai.amp import AMP_TYPE
from shardwise.colossalai.booster import Booster
from shardwise.colossalai.booster.mixed_precision import MixedPrecision, mixed_precision_factory
from shardwise.colossalai.booster.plugin import TorchDDPPlugin
from shardwise.colossalai.booster.plugin.torch_ddp_plugin import TorchDDPModel
from shardwise.colossalai.checkpoint_io import CheckpointIO, GeneralCheckpointIO
from shardwise.colossalai.fx import is_compatible_with_meta
from shardwise.colossalai.interface import AMPModelMixin, ModelWrapper
from shardwise.colossalai.legacy.context import Config, ParallelContext
from shardwise.colossalai.legacy.context.parallel_mode import ParallelMode
from shardwise.colossalai.legacy.registry import GRADIENT_HANDLER, LOSSES, Registry
from shardwise.colossalai.legacy.utils.memory import colo_get_cpu_memory_capacity
from shardwise.colossalai.logging import DistributedLogger, get_dist_logger
from shardwise.colossalai.nn import CrossEntropyLoss
from shardwise.colossalai.nn.lr_scheduler.delayed import TwoStageScheduler, WarmupScheduler
from shardwise.colossalai.pipeline.schedule.v_schedule import PipelineGraph
from shardwise.colossalai.shardformer.layer import FusedLinear1D_Row, FusedRMSNorm, PaddingLMHead, ParallelModule
from shardwise.colossalai.tensor.d_tensor.api import clear_layout_converter
from shardwise.colossalai.testing import assert_close_loose, rerun_if_address_is_in_use
from torch import nn
from torch.multiprocessing import ProcessRaisedException

from shardwise import colossalai


def test_wrappers_and_what_saves_them(tmp_path: Path) -> None:
    model, optimizer = nn.Linear(3, 2), None
    booster = Booster(plugin=TorchDDPPlugin())
    boosted, *_ = booster.boost(model, optimizer)
    assert isinstance(boosted, TorchDDPModel) and isinstance(boosted, ModelWrapper)
    assert isinstance(booster.checkpoint_io, CheckpointIO) and isinstance(GeneralCheckpointIO(), CheckpointIO)
    booster.checkpoint_io.save_model(boosted, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert sorted(found) == ["bias", "weight"] and torch.equal(found["weight"], model.weight)

    class WithMasters(AMPModelMixin):
        """A program's own."""

    WithMasters().update_master_params()
    targets = torch.tensor([0, 1])
    loss = CrossEntropyLoss()(boosted(torch.ones(2, 3)), targets)
    assert torch.equal(loss, nn.functional.cross_entropy(model(torch.ones(2, 3)), targets))


def test_precisions_by_name() -> None:
    for name in ("fp16", "bf16"):
        assert isinstance(mixed_precision_factory(mixed_precision_type=name), MixedPrecision)
    with pytest.raises(NotImplementedError, match="mixed_precision='fp8' is not available"):
        mixed_precision_factory("fp8")
    with pytest.raises(ValueError, match="mixed_precision='half'"):
        mixed_precision_factory("half")


def test_a_configuration_of_an_older_program() -> None:
    context = ParallelContext()
    context.load_config({"fp16": {"mode": AMP_TYPE.TORCH}, "parallel": {"pipeline": 1, "tensor": {"size": 1}}})
    assert isinstance(context.config, Config) and context.config.fp16.mode is AMP_TYPE.TORCH
    assert context.get_world_size(ParallelMode.DATA) == 1 and context.is_first_rank(ParallelMode.TENSOR)
    with pytest.raises(NotImplementedError, match=r"HybridParallelPlugin\(tp_size="):
        context.load_config({"parallel": {"tensor": {"size": 2, "mode": "1d"}}})
    assert context.config.fp16.mode is AMP_TYPE.TORCH  # as it was
    # Names of releases before 0.3 that nothing here stands for say so when they are called.
    with pytest.raises(NotImplementedError, match=r"amp\.convert_to_torch_amp: give mixed_precision='fp16'"):
        colossalai.amp.convert_to_torch_amp(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match=r"^colossalai\.context\.random\.moe_set_seed: "):
        colossalai.context.random.moe_set_seed(3)


def test_registries_are_by_name() -> None:
    own = Registry("own")
    for registry in (LOSSES, GRADIENT_HANDLER, own):

        @registry.register_module
        class Handler:
            pass

        assert registry.get_module("Handler") is Handler
    assert not own.has("Other")


def test_a_logger_is_one_of_its_class() -> None:
    logger = get_dist_logger("shardwise.test.small")
    assert isinstance(logger, DistributedLogger)
    assert DistributedLogger.get_instance("shardwise.test.small") is logger


def test_one_schedule_after_another() -> None:
    def rates(make: Any) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler, found = make(optimizer), []
        for _ in range(4):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    def after(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    found = rates(lambda optimizer: WarmupScheduler(optimizer, 2, after(optimizer)))
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.5])
    assert issubclass(WarmupScheduler, TwoStageScheduler)


def test_small_functions() -> None:
    assert is_compatible_with_meta() and torch.empty(2, device="meta").is_meta
    assert clear_layout_converter() is None
    assert colo_get_cpu_memory_capacity() > 2**26
    assert_close_loose(torch.ones(2), torch.ones(2) + 5e-4)
    with pytest.raises(AssertionError):
        assert_close_loose(torch.ones(2), torch.ones(2) + 5e-3)
    assert PipelineGraph(2, 2, 1, 1, 1, 1, 1, 1, -1).get_v_schedule() is None  # the plugin's own
    tries: list[int] = []

    @rerun_if_address_is_in_use()
    def meet() -> int:
        tries.append(1)
        if len(tries) < 3:
            raise ProcessRaisedException("EADDRINUSE: Address already in use", 0, 1)
        return len(tries)

    assert meet() == 3

    @rerun_if_address_is_in_use()
    def fail() -> None:
        tries.append(1)
        raise ProcessRaisedException("no data", 0, 1)

    with pytest.raises(ProcessRaisedException, match="no data"):
        fail()
    assert len(tries) == 4


@pytest.mark.parametrize("layer", [FusedLinear1D_Row, FusedRMSNorm, PaddingLMHead])
def test_layers_are_for_policies(layer: Any) -> None:
    assert issubclass(layer, ParallelModule)
    for make in (lambda: layer(4, 4), lambda: layer.from_native_module(nn.Linear(4, 4), process_group=None)):
        with pytest.raises(NotImplementedError, match=f"{layer.__name__}.* makes no layer by itself"):
            make()
