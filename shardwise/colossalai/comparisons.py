"""What tests compare: tensors, state dicts, outputs of models, the ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.testing import assert_close

from shardwise.checked import as_kind, as_mapping

__all__ = [
    "assert_close",
    "assert_close_loose",
    "assert_equal",
    "assert_equal_in_group",
    "assert_hf_output_close",
    "assert_not_equal",
    "check_state_dict_equal",
]


def assert_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    """Every element is the same."""
    _as_tensors(a, b)
    assert bool(torch.all(a == b)), f"expected equal tensors, got {a} and {b}"


def assert_not_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    """Some element differs."""
    _as_tensors(a, b)
    assert not bool(torch.all(a == b)), f"expected tensors that differ, got {a} twice"


def assert_close_loose(a: torch.Tensor, b: torch.Tensor, rtol: float = 1e-3, atol: float = 1e-3) -> None:
    """torch's ``assert_close`` with tolerances for half precision."""
    assert_close(a, b, rtol=rtol, atol=atol)


def assert_equal_in_group(tensor: torch.Tensor, process_group: dist.ProcessGroup | None = None) -> None:
    """Every rank of the group has the same values. Collective over it."""
    as_kind("tensor", tensor, torch.Tensor, "a tensor")
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(every, tensor.contiguous(), group=process_group)
    for rank, other in enumerate(every):
        assert bool(torch.all(other == tensor)), f"rank {rank} of the group has {other}, this one {tensor}"


def _as_tensors(a: object, b: object) -> None:
    as_kind("a", a, torch.Tensor, "a tensor")
    as_kind("b", b, torch.Tensor, "a tensor")


def check_state_dict_equal(
    d1: Mapping[Any, Any], d2: Mapping[Any, Any], ignore_device: bool = True, ignore_dtype: bool = False
) -> None:
    """The same keys, and values that are close; mappings and lists inside alike.

    Args:
        d1: one.
        d2: the other.
        ignore_device: tensors may be on different devices.
        ignore_dtype: they may have different dtypes.
    """
    as_mapping("d1", d1, "a mapping, as state_dict() is")
    as_mapping("d2", d2, "a mapping, as state_dict() is")
    assert set(d1) == set(d2), f"only in one: {sorted(map(str, {*d1} ^ {*d2}))}"
    for key, value in d1.items():
        _check_equal(f"{key}", value, d2[key], ignore_device, ignore_dtype)


def _check_equal(name: str, a: Any, b: Any, ignore_device: bool, ignore_dtype: bool) -> None:
    if isinstance(a, Mapping):
        assert isinstance(b, Mapping), f"{name}: {type(a).__name__} and {type(b).__name__}"
        check_state_dict_equal(a, b, ignore_device, ignore_dtype)
    elif isinstance(a, list | tuple):
        assert isinstance(b, list | tuple) and len(a) == len(b), f"{name}: {a} and {b}"
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            _check_equal(f"{name}[{index}]", one, other, ignore_device, ignore_dtype)
    elif isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), f"{name}: a tensor and {b!r:.80}"
        a = a.to(b.dtype) if ignore_dtype else a
        b = b.to(a.device) if ignore_device else b
        assert_close(a, b, rtol=1e-3, atol=1e-3, msg=lambda text: f"{name}: {text}")
    else:
        assert a == b, f"{name}: {a!r} and {b!r}"


def assert_hf_output_close(
    out1: Any,
    out2: Any,
    ignore_keys: Sequence[str] | None = None,
    track_name: str = "",
    atol: float = 1e-5,
    rtol: float = 1e-5,
) -> None:
    """Outputs of transformers are close: mappings, sequences and tensors in each other; others are equal.

    Args:
        out1: one.
        out2: the other.
        ignore_keys: of mappings, not compared.
        track_name: where in the outputs it is, for messages.
        atol: absolute tolerance.
        rtol: relative tolerance.
    """
    if isinstance(out1, Mapping) and isinstance(out2, Mapping):
        assert set(out1) == set(out2), f"{track_name}: only in one {sorted({*out1} ^ {*out2})}"
        for key in out1:
            if key not in (ignore_keys or ()):
                assert_hf_output_close(out1[key], out2[key], ignore_keys, f"{track_name}.{key}", atol, rtol)
    elif isinstance(out1, list | tuple) and isinstance(out2, list | tuple):
        assert len(out1) == len(out2), f"{track_name}: {len(out1)} and {len(out2)} entries"
        for index, (one, other) in enumerate(zip(out1, out2, strict=True)):
            assert_hf_output_close(one, other, ignore_keys, f"{track_name}.{index}", atol, rtol)
    elif isinstance(out1, torch.Tensor) and isinstance(out2, torch.Tensor):
        assert_close(out1, out2, atol=atol, rtol=rtol, msg=lambda text: f"{track_name}: {text}")
    else:
        assert out1 == out2, f"{track_name}: {out1!r} and {out2!r}"
