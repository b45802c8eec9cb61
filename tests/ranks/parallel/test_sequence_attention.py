"""Sequence-parallel attention, compared with attention over full sequences: outputs and all gradients, with many
masks."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core.parallel.sequence.attention import attend_by_heads
from shardwise.core.parallel.sequence.mask import SequenceMask
from shardwise.core.parallel.sequence.parts import Parts
from shardwise.core.parallel.sequence.ring import Rotation, ring_attention
from shardwise.testing import assert_close
from tests.support.on_ranks import on_ranks
from tests.support.sequence_setup import Ring, ring_of_all
from tests.support.sets import full

LENGTH, ROWS, HEADS, SIZE = 29, 2, 4, 8


def window(width: int, q: int, q_end: int, k: int, k_end: int) -> Tensor:
    queries, keys = torch.arange(q, q_end)[:, None], torch.arange(k, k_end)
    return ((keys <= queries) & (keys > queries - width))[None, None]


def chunked(width: int, q: int, q_end: int, k: int, k_end: int) -> Tensor:
    queries, keys = torch.arange(q, q_end)[:, None], torch.arange(k, k_end)
    return ((keys <= queries) & (keys // width == queries // width))[None, None]


def masks() -> Iterator[tuple[str, SequenceMask]]:
    padding = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    padding[0, -9:] = padding[1, :7] = False
    packed = (torch.arange(LENGTH) >= torch.tensor([[5], [17]])).long() + (torch.arange(LENGTH) >= 20).long()
    yield "causal", SequenceMask(LENGTH, True)
    yield "full", SequenceMask(LENGTH, False)
    yield "causal, padded", SequenceMask(LENGTH, True, padding=padding)
    yield "full, padded", SequenceMask(LENGTH, False, padding=padding)
    yield "packed", SequenceMask(LENGTH, True, packed=packed)
    yield "packed, padded", SequenceMask(LENGTH, True, padding=padding, packed=packed)
    yield "window", SequenceMask(LENGTH, True, lambda *at: window(6, *at), 6)
    yield "chunks", SequenceMask(LENGTH, True, lambda *at: chunked(4, *at), 4)
    yield "window, no bound", SequenceMask(LENGTH, False, lambda *at: window(6, *at))


def plain(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None, bias: Tensor | None
) -> Tensor:
    """Return plain attention; it is 0 for a query that attends to nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if bias is not None:
        scores = scores + bias
    shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return shares.masked_fill(~seen, 0.0) @ v


def values(kv_heads: int, v_size: int, dtype: torch.dtype) -> list[Tensor]:
    """Return queries, keys, values, and the factors that the attention output is multiplied by."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(HEADS, SIZE), (kv_heads, SIZE), (kv_heads, v_size), (HEADS, v_size)]
    made = [torch.randn(ROWS, heads, LENGTH, size, generator=generator, dtype=torch.float64) for heads, size in shapes]
    return [x.to(dtype) for x in made]


def check(
    ring: Ring, parts: Parts, mask: SequenceMask, attend: Callable[..., Tensor], what: str, **options: Any
) -> None:
    """Compare ``attend`` on this rank's part with :func:`plain`."""
    dtype = options.get("dtype", torch.float64)
    whole = values(options.get("kv_heads", 2), options.get("v_size", SIZE), dtype)
    leaves = [x.double().requires_grad_() for x in whole[:3]]
    seen = mask.tile(0, LENGTH, 0, LENGTH, torch.device("cpu"))
    out = plain(*leaves, seen, 0.4, options.get("softcap"), options.get("bias"))
    expected = torch.autograd.grad((out * whole[3].double()).sum(), leaves)
    own = [parts.take(x, 2, ring.group.rank).requires_grad_() for x in whole[:3]]
    found = attend(*own)
    grads = torch.autograd.grad((found * parts.take(whole[3], 2, ring.group.rank)).sum(), own)
    together = [parts.gather(x.detach(), 2, ring.axis).double() for x in (found, *grads)]
    names = ("out", "q", "k", "v")
    rtol = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    by_name = dict(zip(names, (out.detach(), *expected), strict=True))
    assert_close(dict(zip(names, together, strict=True)), by_name, rtol, what)


@on_ranks(timeout=300.0)
@pytest.mark.parametrize("ranks", [2, *full(4)])
def test_ring_attention(ranks: int) -> None:
    with ring_of_all() as ring:
        parts = Parts(LENGTH, ranks, zigzag=True)
        alibi = torch.linspace(0, 1, HEADS)[:, None] * torch.arange(parts.padded)
        bias = alibi.double().expand(ROWS, -1, -1).unsqueeze(2)

        def compared(mask: SequenceMask, rotation: Rotation, what: str, **options: Any) -> None:
            def attend(*qkv: Tensor) -> Tensor:
                return ring_attention(
                    rotation, qkv, mask, 0.4, options.get("softcap"), bias if "bias" in options else None
                )

            check(ring, parts, mask, attend, what, **options)

        inner = [size for size in (1, 2, ranks) if ranks % size == 0]
        for at, (name, mask) in enumerate(masks()):
            for kernel, tile in ((True, 512), (True, 3), (False, 4)):
                rotation = Rotation(ring.axis, parts, inner[at % len(inner)], kernel, tile)
                compared(mask, rotation, f"{name}, kernel={kernel}, tile={tile}, inner={rotation.inner}")
        for (name, mask), size, options in product(
            list(masks())[:3],
            inner,
            (
                {"softcap": 1.5},
                {"bias": bias[..., :LENGTH]},
                {"bias": bias[..., :LENGTH], "softcap": 1.5},
                {"v_size": 11, "kv_heads": 1},
                {"dtype": torch.float32, "kv_heads": HEADS},
                {"dtype": torch.bfloat16},
            ),
        ):
            compared(mask, Rotation(ring.axis, parts, size, tile=5), f"{name}, {options.keys()}", **options)


class Largest(TorchDispatchMode):
    """Records the most elements of any tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor):
                self.numel = max(self.numel, each.untyped_storage().nbytes() // each.element_size())
        return made


@on_ranks(2)
@pytest.mark.parametrize("length", [256, 512])
def test_memory_grows_linearly_with_the_part(length: int) -> None:
    """Forward and backward, with masks for which torch's own attention cannot be used."""
    with ring_of_all() as ring:
        parts = Parts(length, 2, zigzag=True)
        packed = (torch.arange(length) // 37).expand(1, -1)
        mask = SequenceMask(length, True, lambda *at: window(90, *at), packed=packed)
        rotation = Rotation(ring.axis, parts, 2, tile=32)
        qkv = tuple(torch.randn(1, 2, parts.local, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
        with Largest() as seen:
            ring_attention(rotation, qkv, mask, 0.5).sum().backward()  # type: ignore[arg-type]
    assert seen.numel <= 2 * 2 * (length // 2) * 4  # keys and values of two heads


@on_ranks()
@pytest.mark.parametrize("ranks", [3, *full(4)])
def test_all_to_all_exchanges_heads(ranks: int) -> None:
    with ring_of_all() as ring:
        parts = Parts(LENGTH, ranks, zigzag=False)
        for (name, mask), kv_heads in product(masks(), (1, 2, HEADS)):
            seen = mask.full(torch.device("cpu"))

            def attend(*qkv: Tensor, seen: Tensor = seen) -> Tensor:
                def whole(q: Tensor, k: Tensor, v: Tensor, _: slice) -> Tensor:
                    return plain(q, k, v, seen, 0.4, None, None).transpose(1, 2)

                return attend_by_heads(qkv, whole, parts, ring.axis).transpose(1, 2)  # type: ignore[arg-type]

            check(ring, parts, mask, attend, f"{name}, {kv_heads} key/value heads", kv_heads=kv_heads, v_size=5)


def test_causal_mask_gives_ranks_equal_work() -> None:
    for ranks, length in product((2, 3, 4, 8), (64, 61)):
        parts = Parts(length, ranks, zigzag=True)
        held = [[at for start, end in parts.ranges(rank) for at in range(start, end)] for rank in range(ranks)]
        assert sorted(at for each in held for at in each) == list(range(parts.padded))
        assert len({sum(at + 1 for at in each) for each in held}) == 1
        assert parts.padded - parts.length < 2 * ranks
