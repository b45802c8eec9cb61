"""Deferred initialisation: one tensor in memory at a time, how values are put in, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.core.deferred.construction import adopt, deferred_init, initial_values, is_deferred, set_buffer

CPU = torch.device("cpu")


def values_of(model: nn.Module) -> list[Tensor]:
    return [value for _, _, value, _ in initial_values(model, CPU)]


# ---- memory ---------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of real storages that are alive, of those that operations have touched."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, output)):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._known:
                    self._known[key] = weakref.ref(storage, lambda _, key=key, size=size: self._forget(key, size))
                    self.now += size
        self.peak = max(self.peak, self.now)
        return output


@contextmanager
def live_bytes() -> Iterator[LiveBytes]:
    gc.collect()
    with LiveBytes() as counter:
        yield counter


@pytest.mark.parametrize("bare", [False, True])
def test_peak_memory_is_one_layer(bare: bool) -> None:
    width, layers = 512, 15  # wide enough that two generator states of 5 KB a layer count for little
    layer_bytes = 4 * (width * width + width)

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    with live_bytes() as building, torch.device("meta") if bare else deferred_init():
        model = build()
    assert building.peak <= 1.5 * layer_bytes
    with live_bytes() as making:
        for _, _, value, _ in initial_values(model, CPU):
            value.add_(0)
            del value
    assert layer_bytes // 2 <= making.peak <= 1.5 * layer_bytes
    assert making.now == 0


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


def test_a_changed_source_is_named() -> None:
    source = torch.ones(3)
    with deferred_init():
        layer = nn.Linear(3, 1)
        layer.bias = nn.Parameter(source * 2)
    source.add_(1)
    with pytest.raises(RuntimeError, match=r"aten.mul.*\(3,\).*changed in place.*outside"):
        values_of(layer)
    with deferred_init():
        layer = nn.Linear(3, 1)
        product = layer.weight * source
        source.add_(1)
        with pytest.raises(RuntimeError, match=r"_local_scalar_dense.*needs the values.*outside"):
            product.sum().item()


def test_bare_meta_errors_name_the_module_and_the_way_out() -> None:
    class Bare(nn.Module):
        def __init__(self, reset: bool) -> None:
            super().__init__()
            self.weight, self.other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
            if reset:
                self.reset_parameters = lambda: nn.init.ones_(self.weight)

    with torch.device("meta"):
        without, partly = nn.Sequential(nn.Linear(1, 1), Bare(False)), nn.Sequential(Bare(True))
        transformer = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    with pytest.raises(RuntimeError, match=r"1 \(Bare\).*weight, other.*no reset_parameters.*deferred_init"):
        values_of(without)
    with pytest.raises(RuntimeError, match=r"0 \(Bare\).*\[other\].*did not write.*deferred_init"):
        values_of(partly)
    assert partly.get_parameter("0.weight").is_meta
    with pytest.raises(RuntimeError, match=r"Transformer.*second time.*deferred_init"):
        values_of(transformer)


def test_misuse() -> None:
    with deferred_init():
        model = nn.Linear(2, 2)
        with pytest.raises(RuntimeError, match="Linear was called inside deferred_init"):
            next(initial_values(model, CPU))
        with deferred_init():
            inner = nn.Linear(2, 2)
        assert inner.weight.device == CPU  # what a normal construction would say
    assert is_deferred(inner)
    with pytest.raises(KeyError, match=r"'weight' is not a buffer of Linear"):
        set_buffer(model, ["weight"], torch.ones(2, 2))
    assert "meta" in repr(model.weight)
