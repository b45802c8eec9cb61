"""Tests of ``is_read`` and of ``torch_internals``.

``is_read`` detects references to a parameter from Python and from autograd graphs, exactly as long as they exist. The
tests of torch's private functions fail where a new release changes one.
"""

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.core.base import torch_internals as inside
from shardwise.core.shards.chunk import is_read, python_holders

WARM = 3000
"""Number of calls after which the interpreter has specialized the code."""


def _suspended(held: object) -> Iterator[object]:
    yield None
    yield held


def _begun(held: object) -> Iterator[object]:
    generator = _suspended(held)
    next(generator)
    return generator


def _closed_over(held: object) -> Callable[[], object]:
    return lambda: held


HOLD: dict[str, Callable[[nn.Parameter], Any]] = {
    "list": lambda param: [param],
    "dict": lambda param: {"a": param},
    "attribute": lambda param: SimpleNamespace(kept=param),
    "closure": _closed_over,
    "partial": lambda param: functools.partial(print, param),
    "generator": _begun,
    "itself": lambda param: param,
    "graph": lambda param: (param * param).sum(),
    "graph of a view": lambda param: (param.view(2) ** 3).sum(),
}


@pytest.mark.parametrize("way", HOLD)
@pytest.mark.parametrize("warm", [False, True])
def test_references_to_a_parameter_are_detected(way: str, warm: bool) -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    holders = python_holders(params)
    for _ in range(WARM if warm else 1):
        assert not is_read(params, holders, False)
    held = HOLD[way](params[1])
    assert is_read(params, holders, False)
    del held
    assert not is_read(params, holders, False)


def test_references_of_running_functions_are_detected() -> None:
    params = [nn.Parameter(torch.ones(2))]
    holders = python_holders(params)

    def keeps(param: nn.Parameter) -> bool:
        return is_read(params, holders, False)

    def passes() -> bool:
        mine = params[0]
        return keeps(mine)

    # An assert statement would keep a reference to what it shows.
    found = {(keeps(params[0]), passes(), is_read(params, holders, False)) for _ in range(WARM)}
    assert found == {(True, True, False)}


def test_reference_counts() -> None:
    array = torch.empty(4)
    alone = inside.storage_holders(array)
    view = array[1:]
    assert inside.storage_holders(array) == alone + 1
    del view
    assert inside.storage_holders(array) == alone
    param = nn.Parameter(torch.ones(2))
    before = inside.tensor_holders(param)
    graph = (param * param).sum()
    assert inside.tensor_holders(param) > before
    del graph
    assert inside.tensor_holders(param) == before


def test_exchange_content_keeps_the_object() -> None:
    meta = nn.Parameter(torch.empty(2, device="meta"))
    real = torch.ones(3)
    assert not inside.can_share_object(meta, real) and inside.can_share_object(real, torch.zeros(1))
    seen: list[object] = []
    meta.register_post_accumulate_grad_hook(seen.append)  # type: ignore[no-untyped-call]
    made = inside.give_subclass(nn.Parameter, real, True)
    inside.move_hooks(meta, made)
    inside.exchange_content(meta, made)
    assert meta.device.type == "cpu" and meta.data_ptr() == real.data_ptr() and isinstance(meta, nn.Parameter)
    (meta * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [meta] and list(inside.accumulate_hooks(meta)) and not inside.accumulate_hooks(torch.zeros(1))


class Marked(torch.Tensor):
    """A subclass that counts the calls of its ``__torch_function__``."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Marked.calls += 1
        with inside.no_subclass_dispatch():
            return func(*args, **(kwargs or {}))


def test_subclass_dispatch_can_be_disabled() -> None:
    x = torch.ones(2)
    marked = inside.give_subclass(Marked, x)
    assert type(marked) is Marked and marked.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    Marked.calls = 0
    assert float(torch.sum(marked)) == 2.0 and Marked.calls == 1
    with inside.no_torch_function():
        torch.sum(marked)
    assert Marked.calls == 1


def test_current_backward_pass_and_its_end() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    seen: list[Any] = []

    def note(_: object) -> None:
        seen.extend((inside.current_graph_task() != -1, inside.current_node() is not None))
        inside.at_end_of_backward(lambda: seen.append(f"end {inside.current_node()}"))

    y.register_hook(note)  # type: ignore[no-untyped-call]
    assert inside.current_graph_task() == -1 and inside.current_node() is None
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [True, True, "end None"] and inside.current_graph_task() == -1
