"""Norms and activations in kernels of their own: which are taken, that they compute what they did, and what is left."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from shardwise.shardformer import ShardConfig
from shardwise.shardformer.shard import kernels
from shardwise.shardformer.shard.changes import changed_model
from shardwise.shardformer.shard.kernels import Kernels, compile_activations, fuse_norms, kernels_of

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 20,
    "head_dim": 8,
}
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), 5),
    "gemma": (lambda: GemmaForCausalLM(GemmaConfig(**SIZES)), 5),
    "gemma3": (lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES)), 13),
    "qwen3": (lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)), 9),
    "cohere": (lambda: CohereForCausalLM(CohereConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"})), 3),
    "t5": (
        lambda: T5ForConditionalGeneration(
            T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
        ),
        12,
    ),
}
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-6}
HALF = 2**-5
"""Of the largest, in bf16, for which the other is computed in fp32."""


def of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    with torch.no_grad():
        for param in model.parameters():
            param += 0.2 * torch.randn(param.shape)
    return model


def taken(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kernels._Fused)]


@pytest.mark.parametrize("name", MODELS)
def test_norms_are_found_and_compute_what_they_did(name: str) -> None:
    model = of(name)
    plain = copy.deepcopy(model)
    held = {key: id(value) for key, value in model.named_parameters()}
    before = torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse_norms(model, [])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {key: id(value) for key, value in model.named_parameters()} == held
    norms = taken(model)
    assert len(norms) == MODELS[name][1]
    own = dict(plain.named_modules())
    for path, module in model.named_modules():
        if module not in norms:
            continue
        assert isinstance(module, type(own[path])) and type(module).__name__ == type(own[path]).__name__
        for dtype, tolerance in TOLERANCE.items():
            module.to(dtype)
            own[path].to(dtype)
            found, expected = [step(each, dtype) for each in (module, own[path])]
            for one, other in zip(found, expected, strict=True):
                assert one.dtype == other.dtype
                assert ((one - other).abs() <= tolerance * (other.abs() + other.abs().max())).all(), (path, dtype)
        module.to(torch.bfloat16)
        own[path].to(torch.bfloat16).float()
        for one, other in zip(step(module, torch.bfloat16), step(own[path], torch.float32), strict=True):
            assert one.dtype == torch.bfloat16
            assert (one - other).abs().max() <= HALF * other.abs().max(), path
    ids = torch.tensor([[1, 2, 3, 4]])
    inputs = {"input_ids": ids, "labels": ids}
    torch.testing.assert_close(model.float()(**inputs).loss, plain.float()(**inputs).loss, rtol=1e-4, atol=1e-4)


def step(module: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Output and both gradients."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    x = torch.randn(3, 4, weight.shape[0], generator=torch.Generator().manual_seed(1)).bfloat16()
    x = x.to(dtype).requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, weight))]


def test_a_kernel_is_taken() -> None:
    model = of("llama")
    fuse_norms(model, [])
    with mock.patch.object(functional, "rms_norm", side_effect=functional.rms_norm) as kernel:
        for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            kernel.reset_mock()
            same(torch.tensor([[1, 2]]))
            assert kernel.call_count == 5
        model.model.norm(torch.randn(1, 16, dtype=torch.float64))  # type: ignore[union-attr,operator]
        assert kernel.call_count == 5  # of another dtype than its weight: its own


class Shifted(nn.Module):
    """Named as a norm, and none that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) + 1e-3


class ShiftedRMSNorm(Shifted):
    pass


class NeedsMoreRMSNorm(Shifted):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("more")


class OutsideRMSNorm(Shifted):
    """What is small shows where its ``eps`` is added."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps))


class WideRMSNorm(Shifted):
    """Of 16 bits it makes 32."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


NOT_KNOWN = [ShiftedRMSNorm, NeedsMoreRMSNorm, OutsideRMSNorm, WideRMSNorm, lambda: MambaRMSNormGated(8, 8)]


@pytest.mark.parametrize("norm", NOT_KNOWN, ids=lambda norm: str(norm).partition(" at 0x")[0])
def test_what_is_not_known_is_left(norm: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(norm())
    kind = type(model[0])
    with pytest.warns(UserWarning, match=rf"enable_fused_normalization=True without effect.*\({kind.__name__}\)"):
        fuse_norms(model, [])
    assert type(model[0]) is kind


def test_norms_that_are_kernels_already() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse_norms(model, [])
    assert [type(module) for module in model] == [nn.LayerNorm, nn.RMSNorm]


def test_an_error_puts_norms_back() -> None:
    model = of("llama")
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(KeyError), changed_model(model, Kernels(norms=True), None):
        assert len(taken(model)) == 5
        raise KeyError("boost")
    assert [type(module) for module in model.modules()] == kinds


def test_what_the_arguments_mean() -> None:
    assert kernels_of(ShardConfig()) == Kernels()
    assert kernels_of(ShardConfig(enable_all_optimization=True)) == Kernels(True, True, True)
    assert kernels_of(ShardConfig(enable_fused_normalization=True)) == Kernels(norms=True)
    assert kernels_of(ShardConfig(enable_flash_attention=True)) == Kernels(flash=True)
    assert kernels_of(ShardConfig(enable_jit_fused=True)) == Kernels(activations=True)


# -- activations


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20, n_positions=8)).eval()


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is none")
def test_without_a_gpu_nothing_is_compiled() -> None:
    model = gpt2()
    kinds = [type(module) for module in model.modules()]
    with mock.patch.object(torch, "compile", side_effect=AssertionError):
        with pytest.warns(UserWarning, match=r"enable_jit_fused=True without effect.*takes a GPU and Triton"):
            compile_activations(model, [])
        model(torch.tensor([[1, 2]]))
    assert [type(module) for module in model.modules()] == kinds
    with pytest.warns(UserWarning, match="one kernel each, or unknown"):
        compile_activations(of("llama"), [])


class OnGpu(Tensor):
    """Says that it is there."""

    is_cuda = True  # type: ignore[assignment]


def test_activations_are_compiled_or_computed_as_they_are() -> None:
    model = gpt2()
    act = model.transformer.h[0].mlp.act
    x = torch.randn(3, 8)
    expected = act(x)
    undo: list[Any] = []
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch("importlib.util.find_spec", return_value=object()),
        mock.patch.dict(kernels._OF_CLASS, clear=True),
        mock.patch.object(kernels, "_REFUSED", set()),
    ):
        compile_activations(model, undo)
        assert len(undo) == 2 and type(act).__name__ == "NewGELUActivation"
        seen: list[str] = []

        def compiled(function: Any, dynamic: bool) -> Any:
            assert dynamic
            return lambda module, value: seen.append("compiled") or function(module, value)

        with mock.patch.object(torch, "compile", compiled):
            assert torch.equal(act(x), expected) and not seen  # on a CPU as it is written
            assert torch.equal(act(x.as_subclass(OnGpu)).as_subclass(Tensor), expected) and seen == ["compiled"]
        kernels._OF_CLASS.clear()
        with mock.patch.object(torch, "compile", side_effect=RuntimeError("no Triton")):
            with pytest.warns(UserWarning, match="torch.compile of NewGELUActivation failed .no Triton"):
                assert torch.equal(act(x.as_subclass(OnGpu)).as_subclass(Tensor), expected)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                act(x.as_subclass(OnGpu))  # told once
    for owner, name, value in undo:
        setattr(owner, name, value)
    assert type(act) is type(gpt2().transformer.h[0].mlp.act)
