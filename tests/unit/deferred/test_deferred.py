"""Tests of ``deferred_init`` and ``materialise``.

- The model equals a normally constructed one bit for bit, and the state of the random generators is the same.
- At most one layer is in memory at a time.
- ``adopt`` replaces the data of a parameter and keeps the object. Unsupported uses raise an error.
"""

import copy
import math
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.deferred.construction import adopt, deferred_init, initial_values, is_deferred, paused, set_buffer
from shardwise.core.deferred.record import is_recording
from shardwise.plan import replicated
from shardwise.session import build
from shardwise.testing import assert_close
from tests.support.counters import live_tensor_bytes
from tests.support.on_ranks import raises

CPU = torch.device("cpu")


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return {**named, **dict(model.named_buffers(remove_duplicate=False))}


def materialise(model: nn.Module) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for names, tensor, value, is_parameter in initial_values(model, CPU):
        assert not value.requires_grad and value.device == CPU
        assert is_parameter == isinstance(tensor, nn.Parameter)
        values.update(dict.fromkeys(names, value))
        if is_parameter:
            adopt(tensor, value)
        else:
            set_buffer(model, names, value)
    return values


def assert_same(expected: nn.Module, model: nn.Module) -> None:
    """Check that both models have the same tensors, types, flags and ties."""
    left, right = tensors_of(expected), tensors_of(model)
    assert list(left) == list(right)
    for name, want in left.items():
        have = right[name]
        assert type(have) is type(want) and have.requires_grad == want.requires_grad, name
        assert have.dtype == want.dtype and torch.equal(have, want), name
    ties = [(a, b) for a in left for b in left if left[a] is left[b]]
    assert ties == [(a, b) for a in right for b in right if right[a] is right[b]]


def both(build: Callable[[], nn.Module], seed: int = 3) -> tuple[nn.Module, nn.Module]:
    """Build normally and deferred, materialise the second, and check the random generator at each step."""
    torch.manual_seed(seed)
    expected = build()
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    with deferred_init():
        model = build()
    assert torch.equal(torch.get_rng_state(), after)
    assert is_deferred(model)
    for name, tensor in tensors_of(model).items():
        want = tensors_of(expected)[name]
        assert tensor.is_meta and tensor.shape == want.shape and tensor.dtype == want.dtype, name
        assert isinstance(tensor, nn.Parameter) == isinstance(want, nn.Parameter), name
    materialise(model)
    assert torch.equal(torch.get_rng_state(), after)
    assert not is_deferred(model)
    assert_same(expected, model)
    return expected, model


class Positions(nn.Module):
    """Buffers made by arithmetic, slices and masks; a plain attribute; an integer buffer; a non-persistent one."""

    def __init__(self, dim: int = 6, length: int = 9) -> None:
        super().__init__()
        position = torch.arange(length).unsqueeze(1)
        frequency = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        table = torch.zeros(length, dim)
        table[:, 0::2] = torch.sin(position * frequency)
        table[:, 1::2] = torch.cos(position * frequency)
        table[0] = 2.0
        self.register_buffer("table", table.unsqueeze(0))
        mask = torch.tril(torch.ones(length, length)).view(1, length, length)
        self.register_buffer("mask", mask == 0, persistent=False)
        self.register_buffer("where", torch.nonzero(mask[0]))
        self.register_buffer("steps", torch.tensor([1, 2, 3]))
        self.register_buffer("rotary", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("nothing", None)
        self.slopes = torch.arange(1, 5) / 2
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.turned = nn.Parameter(torch.randn(5, 7).t())
        self.part = nn.Parameter(torch.randn(20)[3:9])
        self.index = nn.Parameter(torch.randperm(8), requires_grad=False)


class Modules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6, padding_idx=1)
        self.attention = nn.MultiheadAttention(6, 2, add_bias_kv=True)
        self.stack = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.LayerNorm(5), nn.Conv1d(5, 5, 2))
        self.lstm = nn.LSTM(5, 4)
        self.decode = nn.Linear(6, 9)
        self.decode.weight = self.embed.weight
        self.last = nn.Linear(2, 2).requires_grad_(False)
        self.again = self.stack


def second_pass() -> nn.Module:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)
            module.weight.data.div_(module.weight.data.norm())
            nn.init.zeros_(module.bias)

    model = Modules()
    with torch.no_grad():
        model.last.weight.mul_(2).add_(model.last.weight.t().clone())
    return model.apply(init)


def truncated_and_orthogonal() -> nn.Module:
    """Initializers with a loop until all values are within bounds, and with a decomposition."""
    truncated, orthogonal = nn.Linear(40, 30), nn.Linear(12, 20)
    nn.init.trunc_normal_(truncated.weight, std=1.0)
    nn.init.orthogonal_(orthogonal.weight)
    return nn.ModuleList([truncated, orthogonal])


def own_generator() -> nn.Module:
    generator = torch.Generator().manual_seed(11)
    layer = nn.Linear(5, 5)
    with torch.no_grad():
        layer.weight.normal_(generator=generator)
        layer.bias.copy_(torch.rand(5, generator=generator))
    return layer


def other_dtypes() -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Sequential(nn.Linear(3, 3), Positions())
    finally:
        torch.set_default_dtype(before)
    return nn.Sequential(model, nn.Linear(3, 3).half(), nn.Linear(2, 2, dtype=torch.bfloat16).to(CPU, torch.float32))


def branches() -> nn.Module:
    """Python code that branches on values."""
    layer = nn.Linear(4, 4)
    while layer.weight.abs().max() > 0.1:
        layer.weight.data.mul_(0.9)
    nn.init.constant_(layer.bias, layer.weight.sum().item())
    if layer.weight[0, 0] > 0:
        nn.init.zeros_(layer.bias)
    layer.register_buffer("spread", torch.tensor(layer.weight.detach().flatten().tolist()))
    layer.register_buffer("numbers", torch.from_numpy(layer.weight.detach().numpy().copy()) * 1)
    return layer


def spread_out() -> nn.Module:
    """Several parameters from one draw, in-place writes through views, and copies of tensors."""
    model = nn.Module()
    draw = torch.randn(3, 4, 4)
    for index, name in enumerate("qkv"):
        model.register_parameter(name, nn.Parameter(draw[index]))
    basis, upper = torch.linalg.qr(torch.randn(4, 4))
    model.basis, model.upper = nn.Parameter(basis), nn.Parameter(upper)
    draw[1].zero_()
    model.register_buffer("late", draw.clone())
    model.register_buffer("dropped", nn.functional.dropout(torch.ones(9), 0.5))
    model.register_buffer("chosen", torch.multinomial(torch.rand(6), 3))
    model.copied = copy.deepcopy(model.q)
    return model


def used_while_building() -> nn.Module:
    """Forward, backward, an optimizer step, load_state_dict, lazy and shared parameters, all during construction."""
    norm = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LazyLinear(2))
    norm(torch.randn(5, 3)).sum().backward()
    optimizer = torch.optim.SGD(norm.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    loaded, shared = nn.Linear(3, 3), nn.Linear(3, 3)
    loaded.load_state_dict({"weight": torch.ones(3, 3), "bias": torch.arange(3.0)})
    shared.weight.data = norm[0].weight.data
    torch._foreach_mul_([shared.weight.data, loaded.bias.data], 2.0)
    vector = nn.utils.parameters_to_vector(loaded.parameters())
    nn.utils.vector_to_parameters(vector + 1, shared.parameters())
    return nn.ModuleList([norm, loaded, shared])


ZOO: dict[str, Callable[[], nn.Module]] = {
    "modules": Modules,
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "second-pass": second_pass,
    "truncated-and-orthogonal": truncated_and_orthogonal,
    "spectral-norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)),
    "own-generator": own_generator,
    "dtypes": other_dtypes,
    "branches": branches,
    "spread-out": spread_out,
    "used-while-building": used_while_building,
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", ZOO)
def test_deferred_model_equals_a_normal_one(name: str) -> None:
    both(ZOO[name])


@dataclass
class Options:
    scale: Tensor
    name: str = "scale"


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Plain(nn.Module):
    """A module with tensors that are neither parameters nor buffers, in all kinds of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("cache", torch.zeros(4))
        one = torch.randn(5)
        self.attribute, self.again, self.part = one, one, one[1:3]
        self.named = {"one": one, "deep": [{"two": torch.randn(2)}], 3: (torch.ones(1), "text")}
        self.options = Options(torch.full((2,), 0.5))
        self.pair = Pair(torch.randn(2), torch.zeros(2, dtype=torch.long))
        self.queue = deque([torch.randn(1), None])
        self.listed = [self.weight, self.cache]
        self.named["self"] = self.named
        self.children_in_a_list = [Bare()]
        self.grown = one.clone().requires_grad_()


class Bare(nn.Module):
    """A module that registers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = {"values": torch.randn(4)}


def plain_tensors(model: Plain) -> dict[str, Tensor]:
    named, options, listed = model.named, model.options, model.children_in_a_list[0]
    found = [model.attribute, model.part, named["one"], named["deep"][0]["two"], named[3][0], options.scale]
    found += [*model.pair, model.queue[0], model.listed[1], listed.table["values"], model.grown]
    return {str(number): tensor for number, tensor in enumerate(found)}


def test_tensors_in_containers_are_real_after_the_context() -> None:
    torch.manual_seed(3)
    expected = Plain()
    torch.manual_seed(3)
    with deferred_init():
        model = Plain()
    assert model.weight.is_meta
    materialise(model)
    assert_same(expected, model)
    assert_close(plain_tensors(model), plain_tensors(expected), 0.0, "plain tensors")
    assert model.attribute is model.again is model.named["one"] and model.grown.requires_grad
    assert model.part.data_ptr() == model.attribute[1:].data_ptr()
    assert isinstance(model.pair, Pair) and model.named["self"] is model.named
    assert model.listed[0] is model.weight
    model.listed[1].add_(1.0)
    assert torch.equal(model.cache, torch.ones(4))


def test_the_context_can_be_paused() -> None:
    with deferred_init():
        early = nn.Linear(2, 2)
        early.table = {"one": torch.ones(1)}
        with paused():
            assert not is_recording()
            assert torch.ones(2).sum().item() == 2.0 and not torch.ones(2).is_meta
            assert early.weight.is_meta and not early.table["one"].is_meta
            materialise(early)
            with pytest.raises(RuntimeError, match="inside deferred_init"), deferred_init():
                build(early, None, replicated())
        late = nn.Linear(2, 2)
        raises(RuntimeError, "inside deferred_init", lambda: build(late, None, replicated()))
    assert not is_deferred(early) and is_deferred(late)
    assert early(torch.ones(1, 2)).isfinite().all()


@pytest.mark.parametrize("family", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM"])
def test_hugging_face(family: str) -> None:
    kind = getattr(pytest.importorskip("transformers"), family)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}

    def build() -> nn.Module:
        return kind(kind.config_class(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0))

    expected, model = both(build)
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(expected.eval()(tokens).logits, model.eval()(tokens).logits)
    with torch.device("meta"):
        bare = build()
    values = materialise(bare)
    assert set(values) == set(tensors_of(expected))
    assert all(torch.isfinite(value).all() for value in values.values())
    for name, buffer in expected.named_buffers():
        assert torch.equal(values[name], buffer), name


def test_operations_after_the_context_are_recorded() -> None:
    def rest(model: nn.Module) -> nn.Module:
        model = copy.deepcopy(model)
        model.half()
        with torch.no_grad():
            next(model.parameters()).data.normal_()
            model.get_parameter("part").mul_(2)
        model.float()
        return model

    torch.manual_seed(0)
    expected = rest(Positions())
    torch.manual_seed(0)
    with deferred_init():
        model = Positions()
    model = rest(model)
    assert is_deferred(model) and model.get_parameter("turned").is_meta
    assert model.get_parameter("scale").item() == expected.get_parameter("scale").item()
    materialise(model)
    assert_same(expected, model)


# ---- the bare meta device -------------------------------------------------------------------------------------------


def test_meta_model_equals_a_normal_one() -> None:
    torch.manual_seed(1)
    expected = Modules()
    after = torch.get_rng_state()
    with torch.device("meta"):
        model = Modules()
    assert not is_deferred(model)
    torch.manual_seed(1)
    materialise(model)
    assert torch.equal(torch.get_rng_state(), after)
    assert_same(expected, model)


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bare", [False, True])
def test_peak_memory_is_one_layer(bare: bool) -> None:
    width, layers = 512, 15  # wide enough that the two recorded generator states of 5 KB for each layer do not matter
    layer_bytes, before = 4 * (width * width + width), live_tensor_bytes()
    with torch.device("meta") if bare else deferred_init():
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    assert live_tensor_bytes() - before <= layer_bytes // 2
    seen = []
    for _, _, value, _ in initial_values(model, CPU):
        seen.append(live_tensor_bytes() - before)
        del value
    assert layer_bytes // 2 <= max(seen) <= 1.5 * layer_bytes
    assert live_tensor_bytes() - before <= layer_bytes // 2


# ---- adopt ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["real", "meta", "deferred"])
def test_adopt_keeps_the_object(start: str) -> None:
    with deferred_init():
        deferred = nn.Linear(3, 3)
    layer = {"real": nn.Linear(3, 3), "meta": nn.Linear(3, 3, device="meta"), "deferred": deferred}[start]
    param = layer.weight
    optimizer = torch.optim.SGD([param], lr=1.0)
    param.label = "kept"
    reference = weakref.ref(param)
    calls: list[int] = []
    param.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    layer.bias.requires_grad_(False)
    data = torch.ones(3, 3)
    adopt(param, data)
    adopt(layer.bias, torch.zeros(3))
    assert layer.weight is param is reference() and type(param) is nn.Parameter and param.label == "kept"
    assert param.data_ptr() == data.data_ptr() and param.requires_grad and not layer.bias.requires_grad
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert calls == [1] and torch.equal(layer.weight, torch.zeros(3, 3))
    adopt(param, torch.empty(0))
    assert param.numel() == 0


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_in_place_change_of_a_source_raises() -> None:
    source = torch.ones(3)
    with deferred_init():
        layer = nn.Linear(3, 1)
        layer.bias = nn.Parameter(source * 2)
    source.add_(1)
    raises(RuntimeError, r"aten.mul.*\(3,\).*changed in place.*outside", materialise, layer)
    with deferred_init():
        layer = nn.Linear(3, 1)
        product = layer.weight * source
        source.add_(1)
        raises(RuntimeError, r"_local_scalar_dense.*needs the values.*outside", lambda: product.sum().item())


def test_meta_modules_that_cannot_be_initialized() -> None:
    class Bare(nn.Module):
        def __init__(self, reset: bool) -> None:
            super().__init__()
            self.weight, self.other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
            if reset:
                self.reset_parameters = lambda: nn.init.ones_(self.weight)

    with torch.device("meta"):
        without, partly = nn.Sequential(nn.Linear(1, 1), Bare(False)), nn.Sequential(Bare(True))
        transformer = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    raises(RuntimeError, r"1 \(Bare\).*weight, other.*no reset_parameters.*deferred_init", materialise, without)
    raises(RuntimeError, r"0 \(Bare\).*\[other\].*did not write.*deferred_init", materialise, partly)
    assert partly.get_parameter("0.weight").is_meta
    raises(RuntimeError, r"Transformer.*second time.*deferred_init", materialise, transformer)


def test_misuse() -> None:
    with deferred_init():
        model = nn.Linear(2, 2)
        raises(RuntimeError, "Linear was called inside deferred_init", lambda: next(initial_values(model, CPU)))
        with deferred_init():
            inner = nn.Linear(2, 2)
        assert inner.weight.device == CPU  # as in a normal construction
    assert is_deferred(inner)
    raises(KeyError, r"'weight' is not a buffer of Linear", lambda: set_buffer(model, ["weight"], torch.ones(2, 2)))
    assert "meta" in repr(model.weight)
