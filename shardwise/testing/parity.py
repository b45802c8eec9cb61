"""Compare a sharded run with plain PyTorch: tensors by name, with a message that shows the worst difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Difference", "assert_close", "compare"]

_SHOWN = 5


@dataclass(frozen=True)
class Difference:
    """The difference of one tensor from the expected one.

    Attributes:
        name: name of the tensor.
        error: max|actual - expected| / max|expected| over the tensor; NaN if either has a NaN, inf if an
            infinity is missing or new.
        index: index of the largest difference.
        actual: the value there.
        expected: the expected value there.
    """

    name: str
    error: float
    index: tuple[int, ...]
    actual: float
    expected: float

    def within(self, rtol: float) -> bool:
        """Return True if the error is at most ``rtol``; False for NaN.

        Args:
            rtol: the largest error.
        """
        return self.error <= rtol

    def __str__(self) -> str:
        where = "".join(f"[{i}]" for i in self.index)
        return f"{self.name}{where}: got {self.actual!r}, expected {self.expected!r}, relative error {self.error:.3g}"


def _difference(name: str, actual: Tensor, expected: Tensor, floor: float) -> Difference:
    if not actual.numel():
        return Difference(name, 0.0, (), math.nan, math.nan)
    wide_actual, wide_expected = (t.detach().cpu().to(torch.float64) for t in (actual, expected))
    gap = (wide_actual - wide_expected).abs()
    same = wide_actual == wide_expected  # equal infinities would have a difference of NaN
    gap[same] = 0.0
    nan = wide_actual.isnan() | wide_expected.isnan()
    gap[nan] = math.nan
    # argmax and max() treat NaN as the largest value.
    flat = int(gap.flatten().argmax())
    finite = wide_expected[wide_expected.isfinite()].abs()
    dtype = expected.dtype if expected.dtype.is_floating_point else torch.float64
    scale = max(float(finite.max()) if finite.numel() else 0.0, floor, torch.finfo(dtype).tiny)
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), gap.shape))
    at = [float(t.flatten()[flat]) for t in (wide_actual, wide_expected)]
    return Difference(name, float(gap.flatten()[flat]) / scale, index, at[0], at[1])


def _mismatch(name: str, actual: Tensor, expected: Tensor, check_dtype: bool) -> str | None:
    if actual.shape != expected.shape:
        return f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if check_dtype and actual.dtype != expected.dtype:
        return f"{name}: {actual.dtype}, expected {expected.dtype}"
    return None


def compare(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float = 0.0) -> list[Difference]:
    """Return the differences of all tensors that both have in the same shape.

    Args:
        actual: tensors by name.
        expected: the expected tensors.
        floor: smaller magnitudes are replaced by it, for tensors that should be zero up to rounding.

    Returns:
        The differences, the largest first; NaN before all others.

    Examples:
        >>> from shardwise.testing import compare
        >>> [difference] = compare({"w": torch.ones(2)}, {"w": torch.ones(2)})
        >>> difference.within(1e-6)
        True
    """
    names = [name for name in expected if name in actual and actual[name].shape == expected[name].shape]
    differences = [_difference(name, actual[name], expected[name], floor) for name in names]
    return sorted(differences, key=lambda d: math.inf if math.isnan(d.error) else d.error, reverse=True)


def assert_close(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    rtol: float,
    what: str,
    *,
    floor: float = 0.0,
    check_dtype: bool = True,
) -> float:
    """Require the same names, shapes and dtypes, and values within ``rtol`` of the largest expected one per tensor.

    Args:
        actual: tensors by name.
        expected: the expected tensors.
        rtol: largest allowed max|actual - expected| / max|expected| of a tensor; ``0.0`` requires equality.
        what: name of the tensors for the message, such as ``"gradients of step 2"``.
        floor: smallest max|expected| to divide by, for tensors that are zero up to rounding.
        check_dtype: require equal dtypes; ``False`` compares values of different dtypes.

    Returns:
        The largest error.

    Raises:
        AssertionError: a tensor is missing, unexpected, of another shape or dtype, NaN, or too different.

    Examples:
        >>> from shardwise.testing import assert_close
        >>> state = session.module.state_dict()
        >>> assert_close(state, state, rtol=0.0, what="parameters")
        0.0
    """
    problems = [f"missing: {name}" for name in expected if name not in actual]
    problems += [f"extra: {name}" for name in actual if name not in expected]
    for name in expected:
        if name in actual:
            mismatch = _mismatch(name, actual[name], expected[name], check_dtype)
            problems += [mismatch] if mismatch else []
    differences = compare(actual, expected, floor)
    bad = [difference for difference in differences if not difference.within(rtol)]
    if bad:
        problems.append(f"{len(bad)} of {len(expected)} tensors are off by more than {rtol:g}, worst first:")
        problems += [f"  {difference}" for difference in bad[:_SHOWN]]
        problems += [f"  ... and {len(bad) - _SHOWN} more"] if len(bad) > _SHOWN else []
    if problems:
        raise AssertionError(f"{what}:\n" + "\n".join(problems))
    return differences[0].error if differences else 0.0
