"""Private parts of torch that are used do what they are used for; a new torch that breaks one shows it here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.core.base import torch_internals as inside


def test_holders_are_counted() -> None:
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


def test_content_is_exchanged_under_the_same_object() -> None:
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
    """Counts what is called on it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Marked.calls += 1
        with inside.no_subclass_dispatch():
            return func(*args, **(kwargs or {}))


def test_subclasses_can_be_bypassed() -> None:
    x = torch.ones(2)
    marked = inside.give_subclass(Marked, x)
    assert type(marked) is Marked and marked.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    Marked.calls = 0
    assert float(torch.sum(marked)) == 2.0 and Marked.calls == 1
    with inside.no_torch_function():
        torch.sum(marked)
    assert Marked.calls == 1


def test_a_backward_pass_is_known_and_its_end() -> None:
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
