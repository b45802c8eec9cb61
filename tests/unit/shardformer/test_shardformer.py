"""Tests of Shardformer in one process: ``ShardConfig``, policies as plans, kernels and checkpointing."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertModel, BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from shardwise.booster.plugin import HybridParallelPlugin
from shardwise.core.parallel.tensor import Axis, TPPlan
from shardwise.plan import TensorPlan
from shardwise.shardformer import GradientCheckpointConfig, ModulePolicyDescription, Policy, ShardConfig, layer
from shardwise.shardformer import PipelineGradientCheckpointConfig as OfStages
from shardwise.shardformer import SubModuleReplacementDescription as Replacement
from shardwise.shardformer.model_optimizations import Kernels, StageDivision, changed_model
from shardwise.shardformer.policies import PolicyArchitecture
from tests.support.on_ranks import raises

GROUPS = ("sequence_parallel_process_group", "pipeline_stage_manager", "pg_mesh", "moe_dp_group", "ep_group")
SWITCHES = (
    *("enable_all_optimization", "enable_fused_normalization", "enable_flash_attention", "enable_jit_fused"),
    "enable_sequence_parallelism",
)
FIELDS = (
    *("tensor_parallel_process_group", *GROUPS[:2], "enable_tensor_parallelism", *SWITCHES),
    *("sequence_parallelism_mode", "parallel_output", "make_vocab_size_divisible_by", "gradient_checkpoint_config"),
    *("extra_kwargs", "sp_axis", "pg_mesh", "inner_ring_size", "moe_dp_group", "ep_group", "fp8_communication"),
)
SHARD_CONFIG: dict[str, Any] = dict.fromkeys(FIELDS) | dict.fromkeys((*SWITCHES, "fp8_communication"), False)
SHARD_CONFIG |= {"enable_tensor_parallelism": True, "parallel_output": True, "make_vocab_size_divisible_by": 64}
SHARD_CONFIG["extra_kwargs"] = {}
NOT_YET: dict[str, Any] = {"sequence_parallelism_mode": "ring", "sp_axis": 1, "inner_ring_size": 2}
NOT_YET |= dict.fromkeys(GROUPS, object())


def test_fields_of_a_shard_config() -> None:
    parameters = inspect.signature(ShardConfig).parameters
    assert list(parameters) == list(SHARD_CONFIG)
    config = ShardConfig()
    assert {name: getattr(config, name) for name in SHARD_CONFIG} == SHARD_CONFIG
    assert (config.tensor_parallel_size, config.sequence_parallel_size, config.expert_parallel_size) == (1, 1, 1)


def test_unsupported_options_of_a_shard_config() -> None:
    for name, value in NOT_YET.items():
        raises(NotImplementedError, f"^{name}=", ShardConfig, **{name: value})


def test_invalid_shard_configs() -> None:
    for name, value, error in (
        ("make_vocab_size_divisible_by", 0, ValueError),
        ("parallel_output", "yes", TypeError),
        ("enable_flash_attention", 1, TypeError),
        ("enable_sequence_parallelism", 1, TypeError),
        ("tensor_parallel_process_group", 3, ValueError),
    ):
        raises(error, f"^{name}=", ShardConfig, **{name: value})


# -- policies


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 8)])
        self.num_heads = 4


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Inner(), Inner()])
        self.fused = Conv1D(24, 8)
        self.back = Conv1D(8, 24)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight


def replaced(suffix: str, target: Any, ignore: bool = False, **kwargs: Any) -> Replacement:
    return Replacement(suffix, target, kwargs, ignore)


class ToyPolicy(Policy):
    """A policy with the given descriptions and ``preprocess``."""

    def __init__(self, descriptions: dict[Any, ModulePolicyDescription], before: Callable[[Any], Any] | None = None):
        super().__init__()
        self.descriptions, self.before = descriptions, before

    def config_sanity_check(self) -> None:
        assert self.shard_config is not None
        if self.shard_config.tensor_parallel_size > 2:
            raise ValueError("two ranks at most")

    def preprocess(self) -> Any:
        return self.model if self.before is None else self.before(self.model)

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        return self.descriptions

    def postprocess(self) -> Any:
        return self.model


def collected(model: nn.Module, policy: Policy, ranks: int = 2, rank: int = 1) -> TPPlan:
    tp_plan = TPPlan(Axis(SimpleNamespace(rank=rank, size=ranks)))  # type: ignore[arg-type]
    PolicyArchitecture(policy, TensorPlan(vocabulary_multiple=4)).collect(model, tp_plan)
    return tp_plan


def of_toy(*replacements: Replacement, **more: Any) -> ToyPolicy:
    return ToyPolicy({Toy: ModulePolicyDescription(sub_module_replacement=list(replacements), **more)})


def shape(tp_plan: TPPlan, param: Any) -> tuple[int, ...] | None:
    part = tp_plan.part_of(param)
    return None if part is None else tuple(part.shape)


def test_policy_makes_a_tensor_parallel_plan() -> None:
    model = Toy()
    inside = [
        replaced("layers[0]", layer.Linear1D_Col, seq_parallel_mode=None),
        replaced("layers[1]", layer.Linear1D_Row, fp8_communication=False),
        replaced("gone", layer.Linear1D_Row, ignore=True),
    ]
    attributes = {"num_heads": 2, "layers.training": "said"}
    policy = ToyPolicy({Inner: ModulePolicyDescription(attributes, sub_module_replacement=inside)})
    rows: dict[str, Any] = {"make_vocab_size_divisible_by": 4}
    for more in (
        [replaced("embedding", layer.VocabParallelEmbedding1D, **rows)],
        replaced("fused", layer.GPT2FusedLinearConv1D_Col, split_sizes=[8, 16]),
        [replaced("back", layer.GPT2FusedLinearConv1D_Row), replaced("norm", layer.LayerNorm)],
        replaced("head", layer.VocabParallelLMHead1D, **rows, gather_output=True),
    ):
        policy.append_or_create_submodule_replacement(more, policy.descriptions, "Toy")
    policy.append_or_create_method_replacement({"forward": lambda self: self.num_heads}, policy.descriptions, Inner)
    before = {name: param.shape for name, param in model.named_parameters()}
    tp_plan = collected(model, policy)
    assert {name: param.shape for name, param in model.named_parameters()} == before  # until install()
    inner = model.blocks[1]
    assert [shape(tp_plan, p) for p in inner.layers.parameters()] == [(6, 8), (6,), (8, 6), None]
    assert shape(tp_plan, model.head.weight) == (8, 8)  # 10 rows, padded to 16
    fused = tp_plan.part_of(model.fused.weight)
    assert fused is not None and fused.cut.ranges == (((0, 4), (8, 16)), ((4, 8), (16, 24)))
    assert shape(tp_plan, model.fused.bias) == (12,) and shape(tp_plan, model.back.weight) == (12, 8)
    assert shape(tp_plan, model.norm.weight) is None and shape(tp_plan, model.back.bias) is None
    assert policy.model is model and policy.shard_config is not None
    assert policy.shard_config.tensor_parallel_size == 2 and policy.shard_config.make_vocab_size_divisible_by == 4
    tp_plan.install()
    assert inner() == 2 and inner.layers.training == "said"
    tp_plan.remove()
    assert inner.num_heads == 4 and inner.layers.training is True and "forward" not in vars(inner)


class Foreign:
    pass


def other(model: nn.Module) -> nn.Module:
    return Toy()


def grown(model: nn.Module) -> nn.Module:
    model.embedding = nn.Embedding(16, 8)
    return model


def test_custom_policy_of_the_plugin() -> None:
    policy = of_toy()
    given: dict[str, Any] = {"tp_size": 2, "pp_size": 1, "make_vocab_size_divisible_by": 8, "parallel_output": False}
    plan = HybridParallelPlugin(**given, custom_policy=policy).plan(2)
    architecture = plan.tensor.architecture
    assert isinstance(architecture, PolicyArchitecture) and architecture.policy is policy
    assert architecture.plan == TensorPlan(parallel_output=False, vocabulary_multiple=8)
    assert replace(plan, tensor=architecture.plan) == HybridParallelPlugin(**given).plan(2)
    with pytest.warns(UserWarning, match="custom_policy=.*tp_size > 1 only"):
        assert HybridParallelPlugin(tp_size=1, pp_size=1, custom_policy=policy).plan(1).tensor == TensorPlan()


def test_unsupported_policies() -> None:
    for policy, error, words in (
        (of_toy(replaced("head", layer.Linear1D_Col, skip_bias_add=True)), NotImplementedError, "skip_bias_add=True"),
        (of_toy(replaced("head", layer.Linear1D_Row, parallel_input=False)), NotImplementedError, "parallel_input"),
        (of_toy(replaced("head", layer.Linear1D_Row, gathers=True)), TypeError, "gathers=True"),
        (of_toy(replaced("norm", layer.FusedLayerNorm)), NotImplementedError, "give LayerNorm"),
        (of_toy(replaced("embedding", layer.PaddingEmbedding)), NotImplementedError, "VocabParallelEmbedding1D"),
        (of_toy(replaced("head", Foreign)), NotImplementedError, "Foreign.*shardwise.shardformer.layer"),
        (of_toy(replaced("tail", layer.Linear1D_Col)), ValueError, "Toy.tail: a Toy has no 'tail'"),
        (of_toy(replaced("blocks[2].layers", layer.Linear1D_Col)), ValueError, r"has no 'blocks\[2\].layers'"),
        (of_toy(replaced("blocks[x]", layer.Linear1D_Col)), ValueError, "is no name"),
        (of_toy(replaced("norm", layer.Linear1D_Col)), TypeError, "Toy.norm as Linear1D_Col: a LayerNorm cannot"),
        (of_toy(replaced("norm", layer.VocabParallelEmbedding1D)), TypeError, "only an nn.Embedding can be cut"),
        (of_toy(replaced("fused", layer.FusedLinear1D_Col, split_sizes=[9, 15])), ValueError, "multiple of 2"),
        (of_toy(replaced("embedding", layer.VocabParallelEmbedding1D)), ValueError, "leaves head.weight whole, tied"),
        (of_toy(replaced("fused", layer.Linear1D_Row, n_fused=3)), TypeError, "unknown argument n_fused=3"),
        (of_toy(attribute_replacement={"neck.width": 3}), ValueError, "has no 'neck'"),
        (of_toy(param_replacement=[print]), NotImplementedError, "param_replacement of Toy"),
        (ToyPolicy({Inner: ModulePolicyDescription()}, before=other), ValueError, "preprocess.* returned Toy, not the"),
        (ToyPolicy({Inner: ModulePolicyDescription()}, before=grown), ValueError, "changed embedding.*padded where"),
        (ToyPolicy({BertModel: ModulePolicyDescription()}), ValueError, "names no class that a Toy has"),
    ):
        raises(error, words, collected, Toy(), policy)


def test_policy_sanity_check_and_uneven_shards() -> None:
    raises(ValueError, "two ranks at most", lambda: collected(Toy(), of_toy(), ranks=4))
    odd = of_toy(replaced("head", layer.Linear1D_Col))
    odd.config_sanity_check = lambda: None  # type: ignore[method-assign]
    told = r"Toy.head as Linear1D_Col: an output of 10 in parts of \[10\] over 3 ranks"
    raises(ValueError, told, collected, Toy(), odd, ranks=3)


# -- kernels and gradient checkpointing


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "vocab_size": 32}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=5, attn_implementation="eager", **sizes))


def checkpointing(model: nn.Module) -> list[bool]:
    flags = [module for module in model.modules() if type(module).__name__.endswith(("Layer", "Block"))]
    return [bool(module.gradient_checkpointing) for module in flags if hasattr(module, "gradient_checkpointing")]


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (GradientCheckpointConfig(), 0),
        (GradientCheckpointConfig(gradient_checkpointing_ratio=0.5), 2),
        (GradientCheckpointConfig(1.0), 5),
        (OfStages(gradient_checkpointing_ratio=0.4), 2),
        (OfStages(num_ckpt_layers_per_stage=[3]), 3),
        (OfStages(None, [1]), 1),  # type: ignore[arg-type]
    ],
)
def test_defect_7_the_first_layers_are_checkpointed(config: GradientCheckpointConfig, count: int) -> None:
    model, ids = llama(), torch.arange(6).view(1, 6)
    model(ids, labels=ids).loss.backward()
    expected = [param.grad.clone() for param in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    calls = []
    for at in (0, 4):
        model.model.layers[at].mlp.register_forward_pre_hook(lambda *_, at=at: calls.append(at))
    with changed_model(model, Kernels(), checkpointing=config):
        pass
    assert checkpointing(model) == [True] * count + [False] * (5 - count)
    model(ids, labels=ids).loss.backward()
    assert (calls.count(0), calls.count(4)) == (1 + (count > 0), 1 + (count > 4))
    for param, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad)


def test_checkpointed_layers_of_pipeline_stages() -> None:
    for config, layers, again in (
        (GradientCheckpointConfig(0.5), [3, 2], [1, 0, 0, 1, 0]),
        (GradientCheckpointConfig(0.5), [4, 1], [1, 1, 0, 0, 0]),
        (OfStages(0.7), [3, 2], [1, 1, 0, 1, 0]),
        (OfStages(num_ckpt_layers_per_stage=[0, 2]), [3, 2], [0, 0, 0, 1, 1]),
        (OfStages(num_ckpt_layers_per_stage=[2, 0]), [2, 3], [1, 1, 0, 0, 0]),
    ):
        model = llama()
        with changed_model(model, Kernels(), config, StageDivision(2, layers)):
            pass
        assert checkpointing(model) == list(map(bool, again))


def test_invalid_checkpointing_configurations() -> None:
    raises(ValueError, "gradient_checkpointing_ratio=1.5", OfStages, gradient_checkpointing_ratio=1.5)
    raises(ValueError, r"num_ckpt_layers_per_stage\[1\]=-1", OfStages, num_ckpt_layers_per_stage=[1, -1])
    raises(TypeError, "gradient_checkpointing_ratio=None", OfStages, gradient_checkpointing_ratio=None)


def test_flash_attention_selects_sdpa() -> None:
    model = llama()
    with warnings.catch_warnings(action="error"), changed_model(model, Kernels(flash=True), checkpointing=None):
        pass
    assert model.config._attn_implementation == "sdpa"


def test_flash_attention_without_effect_warns() -> None:
    for model in (BloomForCausalLM(BloomConfig(hidden_size=8, n_head=2, n_layer=1, vocab_size=16)), nn.Linear(1, 1)):
        told = f"enable_flash_attention=True without effect in a {type(model).__name__}"
        with pytest.warns(UserWarning, match=told) as warned, changed_model(model, Kernels(flash=True), None):
            pass
        assert len(warned) == 1
