"""Each private part of torch that is used does what it is used for; a new torch that breaks one shows it here."""

from __future__ import annotations

import datetime
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwise.core.base import torch_internals as inside
from shardwise.testing import run_ranks


def test_a_storage_has_one_identity_also_on_meta() -> None:
    for device in ("cpu", "meta"):
        one, other = torch.empty(4, device=device), torch.empty(4, device=device)
        assert inside.storage_id(one.untyped_storage()) == inside.storage_id(one[2:].untyped_storage())
        assert inside.storage_id(one.untyped_storage()) != inside.storage_id(other.untyped_storage())


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


def test_versions() -> None:
    x = torch.zeros(2)
    before = inside.version_of(x)
    x.add_(1)
    assert inside.version_of(x) == before + 1
    with torch.inference_mode():
        assert inside.version_of(torch.zeros(2)) == 0


def test_a_parameter_is_pointed_elsewhere() -> None:
    param, values = nn.Parameter(torch.zeros(2)), torch.ones(2)
    before = inside.version_of(param)
    inside.point(param, values)
    assert param.data_ptr() == values.data_ptr() and inside.version_of(param) == before and param.requires_grad


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


def test_negative_bit_and_arguments_of_to() -> None:
    x = torch.tensor([1.0, -2.0])
    assert inside.with_negative_bit(x).is_neg() and torch.equal(inside.with_negative_bit(x), -x)
    device, dtype, non_blocking, layout = inside.parse_to("cpu", torch.float64, non_blocking=True)
    assert (device, dtype, non_blocking, layout) == (torch.device("cpu"), torch.float64, True, None)


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


class Wrapper(torch.Tensor):
    """Without memory; every operation gives 7."""

    __torch_function__ = inside.no_own_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Any:
        return inside.wrapper_subclass(cls, like, like.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.full((1,), 7.0)


def test_wrappers_have_no_memory() -> None:
    wrapper: Any = Wrapper(torch.ones(2, 3).t())
    assert (tuple(wrapper.shape), wrapper.stride(), wrapper.untyped_storage().nbytes()) == ((3, 2), (1, 3), 0)
    assert float(wrapper.abs()) == 7.0 and not inside.is_wrapper(wrapper)


class Names(inside.DispatchMode):  # type: ignore[misc]
    """Keeps the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_modes_are_seen_and_suspended() -> None:
    with Names() as mode:
        assert list(inside.dispatch_modes()) == [mode]
        torch.zeros(1)
        with inside.without_modes():
            torch.ones(1)
    assert mode.names == ["zeros"] and not inside.dispatch_modes()


def test_leaves() -> None:
    tree = {"a": [1, (2, None)], "b": torch.Size([3])}
    assert [leaf for leaf in inside.each_leaf(tree) if leaf is not None] == [1, 2, 3]
    assert inside.map_leaves(str, [1, {"x": 2}]) == ["1", {"x": "2"}]
    assert inside.map_leaves_of(int, str, [1, "x"]) == ["1", "x"]


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


def test_saved_tensor_hooks_begin_and_end() -> None:
    x = torch.ones(2, requires_grad=True)
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert inside.top_saved_hooks() is None and inside.saved_hooks_enabled()
    inside.push_saved_hooks(pack, unpack)
    try:
        assert inside.top_saved_hooks() == (pack, unpack)
        y = x.exp()
    finally:
        inside.pop_saved_hooks()
    x.sin()
    assert len(packed) == 1 and inside.top_saved_hooks() is None
    y.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(x.grad, y.detach())
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        assert not inside.saved_hooks_enabled()


def test_transforms_are_known_and_left() -> None:
    found: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        found.extend((inside.in_transform(), inside.is_transformed(x)))
        with inside.without_transforms():
            found.extend((inside.in_transform(), inside.is_transformed(torch.ones(1))))
        return x * 2

    torch.func.vmap(f)(torch.ones(3))
    assert found == [True, True, False, False]
    assert not inside.in_transform() and not inside.is_transformed(torch.ones(1))


def test_a_transform_of_one_thread_is_not_another_s() -> None:
    found: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: found.append(inside.in_transform()))
        thread.start()
        thread.join()
        return x

    torch.func.vmap(f)(torch.ones(3))
    assert found == [False]


def test_kernels_over_lists() -> None:
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16)]
    inside.copy_each(targets, [torch.ones(2, dtype=torch.float64), torch.full((3,), 2.0)])
    assert targets[0].tolist() == [1, 1] and targets[1].tolist() == [2, 2, 2]
    counts = [torch.zeros(()), torch.ones(())]
    inside.add_each(counts, torch.ones(()))
    assert [float(count) for count in counts] == [1, 2]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_fused_kernel_of_adam(kind: type[torch.optim.Adam]) -> None:
    param = nn.Parameter(torch.arange(4.0))
    param.grad = torch.tensor([1.0, -2.0, 3.0, 0.5])
    mine, mean, square, step = param.detach().clone(), torch.zeros(4), torch.zeros(4), torch.ones(())
    optimizer = kind([param], lr=0.1, weight_decay=0.3)
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.3, "eps": 1e-8, "amsgrad": False}
    kernel = inside.fused_adam(decoupled=kind is torch.optim.AdamW)
    kernel([mine], [param.grad.clone()], [mean], [square], [], [step], maximize=False, **options)
    optimizer.step()
    torch.testing.assert_close(mine, param.detach(), rtol=1e-6, atol=0)


def test_global_step_hooks_are_left_out() -> None:
    seen: list[object] = []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        with inside.without_global_step_hooks():
            optimizer.step()
        assert not seen
        optimizer.step()
        assert seen == [1]
    finally:
        handle.remove()
    optimizer.step()
    assert seen == [1]


def test_what_load_state_dict_returns() -> None:
    plain = nn.Linear(1, 1).load_state_dict({"x": torch.ones(1)}, strict=False)
    made = inside.incompatible_keys(["weight", "bias"], ["x"])
    assert made == plain and made.missing_keys == plain.missing_keys and repr(made) == repr(plain)


def test_entries_of_a_distributed_checkpoint() -> None:
    entry = inside.stored_at("file", 8, 16)
    assert (entry.relative_path, entry.offset, entry.length) == ("file", 8, 16)
    assert type(entry).__module__ == "torch.distributed.checkpoint.filesystem"


def groups() -> list[Any]:
    """On each of two ranks: what a group of the members alone can do, and where parts of a DTensor begin."""
    timeout = datetime.timedelta(seconds=60)
    store = inside.default_store()
    store.set(f"seen by rank {1 - dist.get_rank()}", "yes")
    assert store.get(f"seen by rank {dist.get_rank()}") == b"yes"
    alone = inside.new_group([dist.get_rank()], "gloo", f"alone {dist.get_rank()}", "one rank", timeout)
    both = inside.new_group([1, 0], "gloo", "turned", "two ranks", timeout)
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value, group=both)
    found: list[Any] = [float(value), dist.get_rank(both), dist.get_group_rank(both, 0), inside.group_is_known(alone)]
    mesh = dist.init_device_mesh("cpu", (2,))
    sharded = DTensor.from_local(torch.ones(3), mesh, [Shard(0)])
    found.append(inside.offset_of_part(sharded))
    dist.destroy_process_group(both)
    found.append(inside.group_is_known(both))
    dist.destroy_process_group(alone)
    return found


def test_groups_of_members_alone(tmp_path: Path) -> None:
    assert run_ranks(2, groups) == [[3.0, 1, 1, True, (0,), False], [3.0, 0, 1, True, (3,), False]]
