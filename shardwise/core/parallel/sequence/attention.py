"""What transformers' models call for masks and attention while ranks share their sequences."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.core.parallel.sequence.axis import SequenceAxis
from shardwise.core.parallel.sequence.heads import OfSomeHeads, attend_by_heads
from shardwise.core.parallel.sequence.mask import SequenceMask
from shardwise.core.parallel.sequence.parts import Parts
from shardwise.core.parallel.sequence.ring import Rotation, ring_attention

__all__ = ["ORIGINALS", "Pass", "PassMask", "attend", "called", "original_of", "running"]

ORIGINALS = ("sdpa", "eager")
"""Attention implementations that a model may have; all_to_all goes on with them."""


PREFIX = "shardwise_sequence_"


@dataclass(frozen=True)
class Pass:
    """A forward pass of a body with this rank's part of the sequences.

    Attributes:
        axis: the ranks.
        parts: of the sequences.
        rotation: of keys and values (ring attention); ``None``: heads are exchanged.
        padding: ``[rows, length]``, which tokens are none; ``None``: all are.
        positions: ``[rows, length]``, where several sequences are packed into one: of each token in its own.
        packed: with ``positions``, the number of each token's sequence.
    """

    axis: SequenceAxis
    parts: Parts
    rotation: Rotation | None
    padding: Tensor | None = None
    positions: Tensor | None = None
    packed: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PassMask:
    """What the layers of a body are given for a mask. A layer that is computed again in backward finds everything here.

    Attributes:
        of: the pass.
        mask: over whole sequences.
        ndim: 0, for models that ask a mask for its dimensions before they look into it.
    """

    of: Pass
    mask: SequenceMask
    ndim: int = 0


_RUNNING: ContextVar[Pass | None] = ContextVar("the pass that runs", default=None)


@contextmanager
def running(now: Pass) -> Iterator[None]:
    """Inside, masks are those of ``now``."""
    token = _RUNNING.set(now)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def called(original: str) -> str:
    """The name of the attention implementation that shares what ``original`` would do, registered with transformers.

    Where it is met outside of a pass (another model with the same configuration) it is ``original``.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    name = PREFIX + original
    AttentionInterface.register(name, partial(_attention, original))
    AttentionMaskInterface.register(name, partial(_mask, original))
    return name


def original_of(name: str) -> str:
    """The implementation that ``name`` is, or that it shares."""
    return name.removeprefix(PREFIX)


def _mask(original: str, *args: Any, **kwargs: Any) -> Any:
    """A mask function of transformers: its ``mask_function`` speaks of positions in whole sequences."""
    from transformers import masking_utils

    now = _RUNNING.get()
    if now is None:
        return masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[original](*args, **kwargs)
    function = kwargs["mask_function"]
    causal = function is masking_utils.causal_mask_function
    expand = window = None
    if not causal and function is not masking_utils.bidirectional_mask_function:
        if now.positions is not None:
            function = masking_utils.remap_positions_for_packed_sequence(function, now.positions)
        expand = partial(_expanded, kwargs["batch_size"], function, kwargs.get("use_vmap", False), kwargs["device"])
        # Nothing was laid over a mask that may be skipped, so it is causal and has at most a window.
        causal = bool(kwargs.get("allow_is_causal_skip", False))
        window = kwargs.get("local_size") if causal else None
    return PassMask(now, SequenceMask(now.parts.length, causal, expand, window, now.padding, now.packed))


def _expanded(
    rows: int, function: Callable[..., Tensor], vmap: bool, device: Any, q: int, q_end: int, k: int, k_end: int
) -> Tensor:
    from transformers.masking_utils import sdpa_mask

    found: Tensor | None = sdpa_mask(
        batch_size=rows,
        q_length=q_end - q,
        kv_length=k_end - k,
        q_offset=q,
        kv_offset=k,
        mask_function=function,
        allow_is_causal_skip=False,
        use_vmap=vmap,
        device=device,
    )
    assert found is not None  # nothing may be skipped
    return found


def _attention(
    original: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers: ``[rows, heads, part, size]`` to ``[rows, part, heads, size]``."""
    if not isinstance(attention_mask, PassMask):
        if _RUNNING.get() is not None:
            shown = f"of {tuple(attention_mask.shape)}" if isinstance(attention_mask, Tensor) else repr(attention_mask)
            raise ValueError(
                f"{type(module).__name__} was given attention_mask={shown:.60} where ranks share sequences, which is "
                "not the mask that transformers makes for its body; without that each rank would attend to its own "
                "part alone: hand it on, or use sp=1"
            )
        return _original(original, module)(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    for name in ("position_bias", "s_aux"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} gives its attention {name}={kwargs[name]!r:.60}, which ranks that share "
                "sequences do not divide: use sp=1"
            )
    now, mask = attention_mask.of, attention_mask.mask
    scaling = kwargs.get("scaling")
    if now.rotation is not None:
        _refuse_dropout(module, kwargs.get("dropout", 0.0))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = ring_attention(now.rotation, (query, key, value), mask, scale, kwargs.get("softcap"))
        return out.transpose(1, 2).contiguous(), None
    function = _original(original, module)
    kwargs.pop("is_causal", None)

    def of_heads(q: Tensor, k: Tensor, v: Tensor, _: slice) -> Tensor:
        inner = OfSomeHeads(module, q.shape[1] // k.shape[1])
        if original == "sdpa":
            seen = None if mask.plain else mask.whole(q.device)
            out = function(inner, q, k, v, seen, is_causal=mask.causal and mask.plain, **kwargs)[0]
        else:
            added = None if mask.plain and not mask.causal else _added(mask, q)
            out = function(inner, q, k, v, added, **kwargs)[0]
        return out  # type: ignore[no-any-return]

    return attend_by_heads((query, key, value), of_heads, now.parts, now.axis), None


def attend(
    module: nn.Module,
    qkv: tuple[Tensor, Tensor, Tensor],
    given: PassMask,
    scale: float,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """For models that compute attention by themselves: of this rank's part of the sequence.

    Args:
        module: the model's, for errors.
        qkv: queries ``[rows, heads, part, size]``, keys and values with the heads that they have.
        given: in the place of a mask.
        scale: of scores.
        bias: ``[rows, heads, 1, padded length]``, added to the scores of whole sequences (alibi); it has no gradient.
        dropout: of probabilities; the rate, 0 outside of training.

    Returns:
        ``[rows, part, heads, size]``.
    """
    now, mask = given.of, given.mask
    if now.rotation is not None:
        _refuse_dropout(module, dropout)
        return ring_attention(now.rotation, qkv, mask, scale, None, bias).transpose(1, 2)

    def of_heads(q: Tensor, k: Tensor, v: Tensor, heads: slice) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        added = _added(mask, q)
        if bias is not None:
            added = added + bias[:, heads, :, : now.parts.length].to(q.dtype)
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        shares = ((q @ k.mT) * scale + added).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
        return (functional.dropout(shares, dropout).to(v.dtype) @ v).transpose(1, 2)

    return attend_by_heads(qkv, of_heads, now.parts, now.axis)


def _added(mask: SequenceMask, q: Tensor) -> Tensor:
    """As models that add masks to scores do it: fully masked rows see everything."""
    seen = mask.whole(q.device)
    return torch.zeros((), dtype=q.dtype, device=q.device).where(seen, torch.finfo(q.dtype).min)


def _refuse_dropout(module: nn.Module, rate: float) -> None:
    if rate:
        raise ValueError(
            f"{type(module).__name__} drops attention probabilities with a rate of {rate}, which mode='ring_attn' does "
            "not do: set it to 0 in the model's configuration, or use mode='all_to_all'"
        )


def _original(name: str, module: nn.Module) -> Callable[..., Any]:
    """What the model would call."""
    if name == "eager":
        found: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
        return found
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found = ALL_ATTENTION_FUNCTIONS[name]
    return found
