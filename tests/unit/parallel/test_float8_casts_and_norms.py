"""Tests of FP8 linear layers, of casts of nested containers, and of fused norms.

- ``product`` and ``linear`` match the same products of the rounded numbers in fp32; gradients are within their bounds.
- ``convert_to_float8_training`` converts the supported layers, and parameters, hooks and classes are unchanged.
- ``cast_floats`` casts floating-point tensors only, and containers keep their class.
- Fused norms of Hugging Face models: which are replaced, and that they compute the same.
"""

import copy
import pickle
import warnings
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import T5Config
from transformers.pytorch_utils import Conv1D

from shardwise.core.engine.mixed_precision import cast_floats, map_tensors
from shardwise.core.parallel import float8
from shardwise.core.parallel.float8 import (
    GRADIENTS,
    VALUES,
    Scaled,
    convert_to_float8_training,
    linear,
    product,
    scaled,
)
from shardwise.shardformer import ShardConfig, model_optimizations
from shardwise.shardformer.model_optimizations import Kernels, changed_model, kernels_of
from tests.support.tensor_cases import decoder

SIZES = ((7, 5, 3), (1, 1, 1), (16, 32, 48), (33, 17, 40))
RELATIVE = {VALUES: (2.0**-4, 2.0**-17), GRADIENTS: (2.0**-3, 2.0**-31)}


def back(x: Scaled) -> Tensor:
    return x.codes.float() * x.scale


@pytest.mark.parametrize("dtype", [VALUES, GRADIENTS], ids=str)
def test_scaling(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    relative, absolute = RELATIVE[dtype]
    for magnitude in (1.0, 1e-9, 1e9, 0.0):
        x = torch.randn(50, 40) * torch.exp(2 * torch.randn(50, 40)) * magnitude
        error = (back(scaled(x, dtype)) - x).abs()
        assert (error <= torch.maximum(relative * x.abs(), absolute * x.abs().max())).all()
    for bad in (float("inf"), float("nan")):
        x[3, 3] = bad
        assert back(scaled(x, dtype)).isnan().all()


ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


@pytest.mark.parametrize(("m", "k", "n"), SIZES)
@pytest.mark.parametrize(("dtype", "rounding"), ROUNDING.items(), ids=str)
def test_products_match_the_rounded_numbers(m: int, k: int, n: int, dtype: torch.dtype, rounding: float) -> None:
    for left in (VALUES, GRADIENTS):
        a, b = scaled(torch.randn(m, k), left), scaled(torch.randn(n, k), VALUES)
        found = product(a, b, dtype)
        exact = back(a).double() @ back(b).double().t()
        assert found.shape == (m, n) and found.dtype == dtype
        terms = back(a).double().abs() @ back(b).double().abs().t()
        assert ((found.double() - exact).abs() <= rounding * terms + 1e-7).all()


@pytest.mark.parametrize("shape", [(7, 20), (2, 3, 20), (20,)], ids=str)
def test_linear_and_its_gradients(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(24, 20, requires_grad=True)
    bias = torch.randn(24, requires_grad=True)
    y = linear(x, weight, bias)
    grad = torch.randn_like(y)
    of_x, of_weight, of_bias = torch.autograd.grad(y, (x, weight, bias), grad)
    x8, w8, g8 = back(scaled(x.detach(), VALUES)), back(scaled(weight.detach(), VALUES)), back(scaled(grad, GRADIENTS))
    torch.testing.assert_close(y, functional.linear(x8, w8, bias.detach()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_x, g8 @ w8, rtol=1e-5, atol=1e-5)
    rows = g8.reshape(-1, 24), x8.reshape(-1, 20)
    torch.testing.assert_close(of_weight, rows[0].t() @ rows[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_bias, grad.reshape(-1, 24).sum(0))
    exact = torch.autograd.grad(functional.linear(x, weight, bias), (x, weight), grad)
    terms = grad.abs() @ weight.detach().abs(), grad.reshape(-1, 24).abs().t() @ x.detach().reshape(-1, 20).abs()
    for found, plain, term in zip((of_x, of_weight), exact, terms, strict=True):
        assert ((found - plain).abs() <= (2**-3 + 2**-4 + 2**-7) * term + 1e-4).all()
        assert not torch.equal(found, plain)


def test_quantization_compiles_into_one_graph() -> None:
    """It compiles without graph breaks, and backward reuses the scale of the forward pass."""
    traced: Any = torch.compile(float8._quantized, backend="aot_eager", fullgraph=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(33, 17).to(dtype)
        codes, scale = scaled(x, VALUES)
        for found in (traced(x, VALUES, None), scaled(x, VALUES, scale)):
            assert torch.equal(found[0].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(found[1], scale)
    for largest, power in ((1.75, -8), (1.75 + 2**-22, -7)):
        assert scaled(torch.tensor([[largest]]), VALUES).scale == 2.0**power


def test_overflow_makes_all_gradients_non_finite() -> None:
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    y = linear(x, weight)
    grad = torch.zeros_like(y)
    grad[1, 1] = float("inf")
    for found in torch.autograd.grad(y, (x, weight), grad):
        assert not found.isfinite().any()


def test_fp64_empty_inputs_and_autocast() -> None:
    wide = torch.randn(3, 20, dtype=torch.float64), torch.randn(16, 20, dtype=torch.float64)
    assert torch.equal(linear(*wide), functional.linear(*wide))
    assert linear(torch.randn(0, 20), torch.randn(16, 20)).shape == (0, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(3, 20), torch.randn(16, 20)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="once_differentiable"):
        x = torch.randn(3, 20, requires_grad=True)
        (grad,) = torch.autograd.grad(linear(x, torch.randn(16, 20)).square().sum(), x, create_graph=True)
        grad.sum().backward()


# -- models


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 24)
        self.conv = Conv1D(32, 24)
        self.inner = nn.Sequential(nn.Tanh(), nn.Linear(32, 24, bias=False))
        self.own = Own(24, 24)
        self.narrow = nn.Linear(24, 4)
        self.head = nn.Linear(24, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.inner(self.conv(x))
        x = x + self.own(x) * self.narrow(x).sum(-1, keepdim=True)
        return self.head(x)


def test_which_layers_are_converted() -> None:
    torch.manual_seed(0)
    model = Net()
    plain, names = copy.deepcopy(model), [name for name, _ in model.named_parameters(remove_duplicate=False)]
    held = {id(p) for p in model.parameters()}
    hooked: list[Any] = []
    model.conv.register_forward_hook(lambda *_: hooked.append(1))
    with pytest.warns(UserWarning, match=r"8 bits of a Net: 1 layers stay as they are \(narrow\)"):
        assert convert_to_float8_training(model) == ["conv", "inner.1", "head"]
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
    assert {id(p) for p in model.parameters()} == held
    assert model.head.weight is model.embedding.weight
    assert type(model.head).__name__ == "Linear" and isinstance(model.head, nn.Linear)
    assert type(model.own) is Own
    ids = torch.randint(0, 30, (3, 5))
    found, exact = model(ids), plain(ids)
    assert hooked == [1]
    assert not torch.equal(found, exact)
    assert (found - exact).norm() < 0.15 * exact.norm()
    again = checkpoint(model, ids, use_reentrant=False)
    assert torch.equal(again, found)
    for same in (pickle.loads(pickle.dumps(model.head)), copy.deepcopy(model.head)):
        x = torch.randn(3, model.head.in_features)
        assert type(same) is type(model.head) and torch.equal(same(x), model.head(x))
    with pytest.warns(UserWarning, match=r"1 layers stay as they are \(narrow\)"):
        assert convert_to_float8_training(model) == []  # the layers that are converted already
    assert torch.equal(model(ids), found)
    found.square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())


Point = namedtuple("Point", "x y")


@dataclass
class Inner:
    tensor: Tensor
    label: str = "kept"
    made: int = field(default=3, init=False)


@dataclass(frozen=True)
class Frozen:
    inner: Inner
    items: list[Tensor]


class Output(OrderedDict[str, Any]):
    """An output as Hugging Face's: a mapping with attributes."""

    def __init__(self, *args: Any, note: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.note = note


def test_only_floating_tensors_change() -> None:
    kept = [torch.ones(2, dtype=torch.long), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.complex64)]
    values = [*kept, None, 3, 2.5, "text", torch.float32, {1, 2}, torch.ones(2), torch.ones(2, dtype=torch.float64)]
    found = cast_floats(values, torch.bfloat16)
    assert all(found[i] is values[i] for i in range(len(values) - 2))
    assert [t.dtype for t in found[-2:]] == [torch.bfloat16] * 2
    same = torch.ones(2, dtype=torch.bfloat16)
    assert cast_floats(same, torch.bfloat16) is same


def test_containers_keep_their_class() -> None:
    x = torch.ones(2)
    output = Output(a=x, b=(x, [x]), note="here")
    value = {"list": [x], "tuple": (x, 1), "named": Point(x, None), "output": output, "data": Frozen(Inner(x), [x])}
    found = cast_floats(value, torch.float64)
    assert x.dtype == torch.float32 and value["list"][0] is x and output["a"] is x
    assert type(found["tuple"]) is tuple and type(found["named"]) is Point and type(found["list"]) is list
    assert type(found["output"]) is Output and found["output"].note == "here" and list(found["output"]) == ["a", "b"]
    assert type(found["data"]) is Frozen and found["data"].inner.label == "kept" and found["data"].inner.made == 3
    tensors: list[Tensor] = []
    map_tensors(found, lambda t: tensors.append(t) or t)  # type: ignore[func-returns-value]
    assert len(tensors) == 8 and all(t.dtype == torch.float64 for t in tensors)


def test_gradients_flow_through_a_cast() -> None:
    x = torch.ones(3, requires_grad=True)
    cast_floats({"x": x}, torch.float64)["x"].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0] * 3


T5 = T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)


def fused(model: nn.Module) -> list[str]:
    """Fuse the norms of the model and return the names of those that were replaced."""
    with changed_model(model, Kernels(norms=True), None):
        return [name for name, module in model.named_modules() if isinstance(module, model_optimizations.FusedRmsNorm)]


@pytest.mark.parametrize(
    ("name", "config", "count"),
    [
        ("LlamaForCausalLM", decoder("Llama"), 5),
        ("Qwen3ForCausalLM", decoder("Qwen3"), 9),
        ("T5ForConditionalGeneration", T5, 12),
    ],
    ids=["llama", "qwen3", "t5"],
)
def test_fused_norms_match_the_original_norms(name: str, config: Any, count: int) -> None:
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param += 0.2 * torch.randn(param.shape)
    plain = copy.deepcopy(model)
    with warnings.catch_warnings(action="error"):
        paths = fused(model)
    assert len(paths) == count
    own = dict(plain.named_modules())
    for path in paths:
        module = model.get_submodule(path)
        x = torch.randn(3, 4, module.weight.shape[0])
        for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2**-6)):
            module.to(dtype)
            own[path].to(dtype)
            results = []
            for each in (module, own[path]):
                given = x.to(dtype).requires_grad_()
                y = each(given)
                results.append([y, *torch.autograd.grad(y.float().square().sum(), (given, each.weight))])
            for one, other in zip(*results, strict=True):
                assert one.dtype == other.dtype == dtype
                assert (one - other).abs().max() <= 4 * tolerance * other.abs().max(), path
    ids = torch.tensor([[1, 2, 3, 4]])
    inputs = {"input_ids": ids, "labels": ids}
    torch.testing.assert_close(model.float()(**inputs).loss, plain.float()(**inputs).loss, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Gemma", "Cohere"])
def test_unsupported_norms_are_unchanged(name: str) -> None:
    """Norms that multiply by one plus the weight, and layer norms, stay unchanged."""
    with pytest.warns(UserWarning, match="enable_fused_normalization=True without effect"):
        assert not fused(getattr(transformers, f"{name}ForCausalLM")(decoder(name)))


def test_kernels_of_a_shard_config() -> None:
    assert kernels_of(ShardConfig()) == Kernels()
    assert kernels_of(ShardConfig(enable_all_optimization=True)) == Kernels(True, True)
    assert kernels_of(ShardConfig(enable_fused_normalization=True)) == Kernels(norms=True)
    assert kernels_of(ShardConfig(enable_flash_attention=True)) == Kernels(flash=True)
    with pytest.warns(UserWarning, match=r"enable_jit_fused=True has no effect: call torch\.compile"):
        assert kernels_of(ShardConfig(enable_jit_fused=True)) == Kernels()
