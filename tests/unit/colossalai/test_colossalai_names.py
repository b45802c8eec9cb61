"""Tests of names of ColossalAI: version, base classes of plugins, schedules, and the verdicts of ``shardwise port``."""

import pytest
from packaging.version import Version

import shardwise.colossalai
from shardwise.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from shardwise.compat import alias_table
from shardwise.compat.port import findings


def test_version() -> None:
    assert Version(shardwise.colossalai.__version__) >= Version("0.2.0")


def test_plugin_base_classes() -> None:
    from shardwise.colossalai.booster.plugin import MoeHybridParallelPlugin, Plugin
    from shardwise.colossalai.booster.plugin.dp_plugin_base import DPPluginBase
    from shardwise.colossalai.booster.plugin.pp_plugin_base import PipelinePluginBase

    hybrid = HybridParallelPlugin(tp_size=1, pp_size=1)
    for plugin in (LowLevelZeroPlugin(), GeminiPlugin(), TorchDDPPlugin(), TorchFSDPPlugin(), hybrid):
        has_stages = plugin is hybrid
        assert isinstance(plugin, PipelinePluginBase) is has_stages is not isinstance(plugin, DPPluginBase)
        assert isinstance(plugin, Plugin) and not isinstance(plugin, MoeHybridParallelPlugin)


def test_plugin_without_process_group() -> None:
    plugin = HybridParallelPlugin(tp_size=1, pp_size=1, precision="fp32")
    assert plugin.stage_manager is None  # programs call execute_pipeline only if this is not None
    assert plugin.dp_size == 1
    with pytest.raises(RuntimeError, match="launch_from_torch"):
        _ = plugin.dp_group


def test_v_schedule_makes_the_zbv_plan() -> None:
    from shardwise.colossalai.pipeline.schedule.v_schedule import PipelineGraph

    graph = PipelineGraph(n_stage=2, n_micro=4, f_cost=6, b_cost=6, w_cost=6, c_cost=1, f_mem=2, b_mem=-1, w_mem=-1)
    arguments = {"tp_size": 1, "pp_size": 2, "precision": "fp32", "pp_style": "zbv", "num_model_chunks": 2}
    own = HybridParallelPlugin(**arguments, scheduler_nodes=graph.get_v_schedule())
    assert own.plan(2) == HybridParallelPlugin(**arguments).plan(2)
    with pytest.raises(ValueError, match="n_stage=0"):
        PipelineGraph(0, 4, 1, 1, 1, 1, 1, 1, 1)


def test_schedulers_with_other_rates_are_reported() -> None:
    """The verdict is the same for names from the package and from each scheduler's own module."""
    names = ["CosineAnnealingWarmupLR", "FlatAnnealingLR", "LinearWarmupLR", "MultiStepLR", "PolynomialWarmupLR"]
    for modules in (
        ["nn.lr_scheduler"] * 5,
        [f"nn.lr_scheduler.{name}" for name in ["cosine", "cosine", "linear", "multistep", "poly"]],
    ):
        text = "".join(f"from colossalai.{module} import {name}\n" for module, name in zip(modules, names, strict=True))
        *differing, same = findings(text, [alias_table("colossalai")])
        assert [each.verdict for each in differing] == ["differs"] * 4 and same.verdict == "same"
        for word, each in zip(("jumps", "begins", "negative", "never"), differing, strict=True):
            assert word in each.text
