"""Tests of ColossalAI's utilities in one process: loggers, accelerators, seeds, wrappers, process group meshes, layers.

Arguments of the wrong type raise an error of our own, not one from inside.
"""

import inspect
import random
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shardwise.colossalai.accelerator import get_accelerator
from shardwise.colossalai.booster import Booster
from shardwise.colossalai.booster.mixed_precision import MixedPrecision, mixed_precision_factory
from shardwise.colossalai.booster.plugin import TorchDDPPlugin
from shardwise.colossalai.booster.plugin.torch_ddp_plugin import TorchDDPModel
from shardwise.colossalai.checkpoint_io import CheckpointIO
from shardwise.colossalai.cluster import DistCoordinator, ProcessGroupMesh
from shardwise.colossalai.interface import ModelWrapper, OptimizerWrapper
from shardwise.colossalai.lazy import LazyInitContext
from shardwise.colossalai.logging import DistributedLogger, get_dist_logger
from shardwise.colossalai.nn import CrossEntropyLoss
from shardwise.colossalai.pipeline.schedule.v_schedule import PipelineGraph
from shardwise.colossalai.shardformer.layer import FusedLinear1D_Row, FusedRMSNorm, PaddingLMHead, ParallelModule
from torch import nn

from shardwise import colossalai
from shardwise.colossalai import shardformer, utils
from shardwise.compat import UnsupportedName, alias_table
from shardwise.core.engine.module import ShardedModule
from tests.support.engine_setup import seeded
from tests.support.on_ranks import assert_refused, raises


def test_logger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = get_dist_logger("shardwise.test.loggers")
    assert logger is get_dist_logger("shardwise.test.loggers") and logger.rank == 0
    assert isinstance(logger, DistributedLogger) and DistributedLogger.get_instance("shardwise.test.loggers") is logger
    logger.log_to_file(tmp_path / "logs", suffix="run")
    logger.info("to rank 0", ranks=[0])
    logger.warning("to all")
    logger.info("to another", ranks=[1])
    logger.set_level("ERROR")
    logger.warning("below")
    logger.error("bad %s")
    logger.debug("far below")
    said = capsys.readouterr().err
    assert "test_colossalai_utilities.py" in said and "to rank 0" in said and "WARNING" in said and "bad %s" in said
    assert "to another" not in said and "below" not in said
    assert (tmp_path / "logs" / "rank_0_run.log").read_text().count("\n") == 3
    raises(ValueError, "LOUD", lambda: logger.set_level("LOUD"))
    raises(ValueError, "already", lambda: type(logger)("shardwise.test.loggers"))


def test_accelerator() -> None:
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
    assert torch.equal(first, torch.rand(2, device=accelerator.get_current_device()))
    accelerator.manual_seed_all(4)
    assert accelerator.initial_seed() == 4
    with accelerator.autocast(dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype in (torch.bfloat16, torch.float32)
    if accelerator.name == "cpu":
        assert accelerator.current_device() == 0 and accelerator.get_version() == ""
        raises(AttributeError, "get_device_capability", lambda: accelerator.get_device_capability())


def test_set_seed() -> None:
    drawn = []
    for _ in range(2):
        utils.set_seed(11)
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[1]


def test_lazy_init_context() -> None:
    ordinary, context = seeded(lambda: nn.Linear(4, 4)), LazyInitContext()
    for _ in range(2):
        with context:
            lazy = seeded(lambda: nn.Linear(4, 4))
        assert lazy.weight.is_meta
    torch.testing.assert_close(LazyInitContext.materialize(lazy).state_dict(), ordinary.state_dict(), rtol=0, atol=0)
    raises(NotImplementedError, "tensor_cls", LazyInitContext, tensor_cls=object())


def test_process_group_mesh_ranks() -> None:
    shape = (2, 3, 4)
    places = [ProcessGroupMesh.unravel(rank, shape) for rank in range(24)]
    assert places == [tuple(map(int, np.unravel_index(rank, shape))) for rank in range(24)]
    assert [ProcessGroupMesh.ravel(place, shape) for place in places] == list(range(24))
    for mode in ("wrap", "clip"):
        got = ProcessGroupMesh.ravel((-1, 3, 1), shape, mode)
        assert got == int(np.ravel_multi_index((-1, 3, 1), shape, mode=mode))
    coordinates = ProcessGroupMesh.get_coords_along_axis((0, 1, 2), [0, 2], [[0, 1], [1, 3]])
    assert coordinates == [(0, 1, 1), (0, 1, 3), (1, 1, 1), (1, 1, 3)]
    assert_refused(
        (lambda: ProcessGroupMesh.ravel((0, 3, 0), shape), "outside"),
        (lambda: ProcessGroupMesh.unravel(24, shape), "outside"),
        (DistCoordinator, "launch_from_torch"),
        (lambda: ProcessGroupMesh(1), "launch_from_torch"),
    )


def test_launching_needs_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    place, said = ("localhost", 29500), "no {}: start this program with {}"
    assert_refused(
        (colossalai.launch_from_torch, said.format("RANK", "torchrun")),
        (lambda: colossalai.launch_from_slurm(*place), said.format("SLURM_PROCID", "srun")),
        (lambda: colossalai.launch_from_openmpi(*place), said.format("OMPI_COMM_WORLD_RANK", "")),
        (lambda: colossalai.launch(3, 2, *place), "rank=3, world_size=2"),
    )


def test_model_and_optimizer_wrappers(tmp_path: Path) -> None:
    class Scaled(ModelWrapper):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().forward(*args, **kwargs)

    plain = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    wrapped = Scaled(plain)
    assert isinstance(wrapped, ModelWrapper) and wrapped.unwrap() is plain and not isinstance(plain, ModelWrapper)
    assert torch.equal(wrapped(torch.ones(1, 2)), 2 * plain(torch.ones(1, 2)))
    booster = Booster()
    model, boosted, *_ = booster.boost(plain, optimizer)
    assert isinstance(boosted, OptimizerWrapper) and not isinstance(boosted, Scaled)
    assert boosted.optim is optimizer and boosted.unwrap() is optimizer
    assert OptimizerWrapper(optimizer).unwrap() is optimizer
    other = nn.Linear(2, 2)
    booster.checkpoint_io.save_model(model, tmp_path / "m.safetensors", use_async=True)
    for wait in (booster.checkpoint_io._sync_d2h, booster.checkpoint_io._sync_io, booster.checkpoint_io.synchronize):
        wait()
    booster.load_model(other, tmp_path / "m.safetensors")
    torch.testing.assert_close(other.state_dict(), plain.state_dict(), rtol=0, atol=0)
    raises(AttributeError, "save_lora_as_pretrained", lambda: booster.checkpoint_io.boost(plain))


def test_ddp_models_are_saved_without_a_prefix(tmp_path: Path) -> None:
    model, optimizer = nn.Linear(3, 2), None
    booster = Booster(plugin=TorchDDPPlugin())
    boosted, *_ = booster.boost(model, optimizer)
    assert isinstance(boosted, TorchDDPModel) and isinstance(boosted, ModelWrapper)
    assert isinstance(booster.checkpoint_io, CheckpointIO)
    booster.checkpoint_io.save_model(boosted, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert sorted(found) == ["bias", "weight"] and torch.equal(found["weight"], model.weight)
    targets = torch.tensor([0, 1])
    loss = CrossEntropyLoss()(boosted(torch.ones(2, 3)), targets)
    assert torch.equal(loss, nn.functional.cross_entropy(model(torch.ones(2, 3)), targets))


def test_precisions_by_name() -> None:
    for name in ("fp16", "bf16"):
        assert isinstance(mixed_precision_factory(mixed_precision_type=name), MixedPrecision)
    raises(NotImplementedError, "mixed_precision='fp8' is not available", mixed_precision_factory, "fp8")
    raises(ValueError, "mixed_precision='half'", mixed_precision_factory, "half")


def test_unsupported_names_raise() -> None:
    from shardwise.colossalai.amp import AMP_TYPE
    from shardwise.colossalai.legacy.core import global_context
    from shardwise.colossalai.testing import parameterize

    convert = colossalai.amp.convert_to_torch_amp
    assert_refused(
        (lambda: convert(nn.Linear(2, 2)), "colossalai.amp.convert_to_torch_amp: use Booster(mixed_precision="),
        (lambda: colossalai.context.random.moe_set_seed(3), "colossalai.context.random.moe_set_seed: "),
        (lambda: AMP_TYPE.TORCH, "colossalai.amp.AMP_TYPE: use Booster(mixed_precision="),
        (lambda: global_context.get_global_rank(), "global_context: a plugin knows the ranks"),
        (lambda: utils.MultiTimer(), "perf_counter"),
        (lambda: parameterize("number", [1, 2]), "parameterize: shardwise.testing.run_ranks"),
        error=NotImplementedError,
    )


def test_a_computed_schedule_is_the_plugins_own() -> None:
    assert PipelineGraph(2, 2, 1, 1, 1, 1, 1, 1, -1).get_v_schedule() is None


@pytest.mark.parametrize("layer", [FusedLinear1D_Row, FusedRMSNorm, PaddingLMHead])
def test_layers_cannot_be_constructed(layer: Any) -> None:
    assert issubclass(layer, ParallelModule)
    raises(NotImplementedError, f"{layer.__name__}.* makes no layer by itself", layer, 4, 4)


NOT_OURS = {id(ShardedModule), id(nn.LayerNorm)}
"""Not called: plugins make the first, which programs use in ``isinstance``, and the second is torch's."""
BARE = "^'(NoneType|object)' object|has no attribute|argument must be|argument after|not supported between"
"""Messages of Python that show that a value of the wrong type was used without a check."""


def required(found: Any) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each for each in parameters if each.default is each.empty and each.kind not in several]


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    seen = set[int]()
    for module, entries in alias_table("colossalai").names.items():
        if module.startswith("legacy"):
            continue
        home = import_module(".".join(filter(None, ("shardwise.colossalai", module))))
        for name in entries:
            try:
                found = getattr(home, name)
            except (UnsupportedName, ImportError):
                continue
            if callable(found) and id(found) not in seen | NOT_OURS and required(found):
                seen.add(id(found))
                yield f"{module}.{name}", found


@pytest.mark.parametrize("value", [None, object()], ids=["none", "object"])
def test_wrong_types_raise_errors_of_our_own(value: object, capsys: pytest.CaptureFixture[str]) -> None:
    tried, bare = 0, {}
    for name, function in functions():
        tried += 1
        by_name = {each.name: each.kind is each.KEYWORD_ONLY for each in required(function)}
        args = [value for named in by_name.values() if not named]
        try:
            function(*args, **{name: value for name, named in by_name.items() if named})
        except Exception as error:
            if isinstance(error, TypeError | AttributeError) and re.search(BARE, str(error)):
                bare[name] = repr(error)
    assert tried > 40 and not bare, (tried, bare)


@pytest.mark.parametrize("name", sorted(name for name in shardformer.layer.__all__ if name[0].isupper()))
def test_from_native_module(name: str) -> None:
    kind = getattr(shardformer.layer, name)
    try:
        make = kind.from_native_module
    except UnsupportedName as error:
        assert name in str(error)
        return
    raises(TypeError, r"module=None: give the layer, an nn\.Module", lambda: make(None, process_group=None))
    layer = nn.LayerNorm(4)
    if name in ("LayerNorm", "RMSNorm", "DropoutForParallelInput", "DropoutForReplicatedInput"):
        assert make(layer, process_group=None) is layer
        raises(NotImplementedError, "skip_bias_add=True is not available yet", lambda: make(layer, skip_bias_add=True))
        return
    raises(NotImplementedError, rf"{name}\.from_native_module\(LayerNorm\) makes no layer by itself", make, layer, None)
    raises(NotImplementedError, rf"{name}\(\.\.\.\) makes no layer by itself: name the class in a", lambda: kind(4, 4))
