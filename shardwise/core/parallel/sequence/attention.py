"""Sequence-parallel attention of transformers models: masks, all-to-all of heads, ring attention."""

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
from shardwise.core.parallel.sequence.mask import SequenceMask
from shardwise.core.parallel.sequence.parts import Parts
from shardwise.core.parallel.sequence.ring import Rotation, ring_attention
from shardwise.core.parallel.tensor.shard_spec import Heads

Attend = Callable[[Tensor, Tensor, Tensor, slice], Tensor]


class OfSomeHeads:
    """A view of an attention module, for attention functions, with a subset of its heads.

    Args:
        module: the model's attention module.
        groups: number of query heads per key/value head.
    """

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def own_heads(heads: int, kv_heads: int, ranks: int) -> Heads:
    """Return which heads each rank has.

    Raises:
        ValueError: there are fewer heads than ranks.
    """
    if heads < ranks:
        raise ValueError(
            f"{heads} attention heads for {ranks} ranks that share sequences with mode='all_to_all': give at most "
            f"{heads} ranks, or mode='ring_attn'"
        )
    return Heads.over(heads, kv_heads, ranks)


def attend_by_heads(qkv: tuple[Tensor, Tensor, Tensor], attend: Attend, parts: Parts, axis: SequenceAxis) -> Tensor:
    """Compute the attention of this rank's part of the sequence.

    Two all-to-alls: the first sends queries, keys and values to the ranks that have their heads, and the second returns
    the outputs.

    Args:
        qkv: queries ``[rows, heads, part, size]``, and keys and values with their own number of heads.
        attend: computes attention of full sequences without padding. It takes queries, keys and values of this rank's
            heads and the range of these query heads, and returns ``[rows, length, heads, size]``.
        parts: how the sequence is sharded; one piece per rank.
        axis: the ranks.

    Returns:
        ``[rows, part, heads, size]``.
    """
    q, k, v = qkv
    heads = own_heads(q.shape[1], k.shape[1], axis.size)
    ranges = [heads.query, heads.kv, heads.kv]
    sent = [[x[:, slice(*by_rank[r])] for x, by_rank in zip(qkv, ranges, strict=True)] for r in range(axis.size)]
    counts = [heads.counts(axis.rank)[0], *[heads.counts(axis.rank)[1]] * 2]
    shapes = [(x.shape[0], count, parts.local, x.shape[-1]) for x, count in zip(qkv, counts, strict=True)]
    numels = [torch.Size(shape).numel() for shape in shapes]
    came = axis.exchanged(sent, [sum(numels)] * axis.size, "queries, keys and values", True)
    by_kind = zip(*[torch.split(flat, numels) for flat in came], strict=True)
    q, k, v = (
        parts.together([each.view(shape) for each in by_rank], 2)
        for by_rank, shape in zip(by_kind, shapes, strict=True)
    )
    out = parts.pad(attend(q, k, v, slice(*heads.query[axis.rank])), 1)
    rows, width = out.shape[0], out.shape[-1]
    sizes = [rows * parts.local * heads.counts(rank)[0] * width for rank in range(axis.size)]
    back = axis.exchanged(
        [[parts.take(out, 1, rank)] for rank in range(axis.size)], sizes, "the output of attention", True
    )
    views = [flat.view(rows, parts.local, heads.counts(rank)[0], width) for rank, flat in enumerate(back)]
    return torch.cat(views, 2)


ORIGINALS = ("sdpa", "eager")
"""Supported attention implementations of a model; all_to_all uses them for its local computation."""


PREFIX = "shardwise_sequence_"


@dataclass(frozen=True)
class Pass:
    """A forward pass of a model body with this rank's part of the sequences.

    Attributes:
        axis: the ranks.
        parts: how the sequences are sharded.
        rotation: the rotation of keys and values (ring attention); ``None``: heads are exchanged by all-to-all.
        padding: ``[rows, length]``, False for padding tokens; ``None``: there is no padding.
        positions: ``[rows, length]``, if several sequences are packed into one: the position of each token in its own
            sequence.
        packed: the index of each token's sequence, together with ``positions``.
    """

    axis: SequenceAxis
    parts: Parts
    rotation: Rotation | None
    padding: Tensor | None = None
    positions: Tensor | None = None
    packed: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PassMask:
    """The object that the layers of a body get as their mask. A layer that is recomputed in the backward pass finds
    everything that it needs here.

    Attributes:
        of: the pass.
        mask: the mask of full sequences.
        ndim: 0, for models that read the number of dimensions of a mask before they use it.
    """

    of: Pass
    mask: SequenceMask
    ndim: int = 0


_RUNNING: ContextVar[Pass | None] = ContextVar("the pass that runs", default=None)


@contextmanager
def running(now: Pass) -> Iterator[None]:
    """Within this context, masks are computed for the pass ``now``."""
    token = _RUNNING.set(now)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def called(original: str) -> str:
    """Register the sequence-parallel version of the attention ``original`` with transformers and return its name.

    Outside of a pass (another model with the same configuration), this version behaves as ``original``.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    name = PREFIX + original
    AttentionInterface.register(name, partial(_attention, original))
    AttentionMaskInterface.register(name, partial(_mask, original))
    return name


def original_of(name: str) -> str:
    """Return the implementation that ``name`` is, or on which it is based."""
    return name.removeprefix(PREFIX)


def _mask(original: str, *args: Any, **kwargs: Any) -> Any:
    """A mask function of transformers. Its ``mask_function`` takes positions in full sequences."""
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
        # A mask that may be skipped has no other mask combined with it, so it is causal and has at most a window.
        causal = bool(kwargs.get("allow_is_causal_skip", False))
        window = kwargs.get("local_size") if causal else None
    return PassMask(now, SequenceMask(now.parts.length, causal, expand, window, now.padding, now.packed))


def _expanded(
    rows: int, function: Callable[..., Tensor], vmap: bool, device: Any, q: int, q_end: int, k: int, k_end: int
) -> Tensor:
    from transformers.masking_utils import sdpa_mask

    mask: Tensor | None = sdpa_mask(
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
    assert mask is not None  # nothing may be skipped
    return mask


def _attention(
    original: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers. It maps ``[rows, heads, part, size]`` to ``[rows, part, heads, size]``."""
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
            seen = None if mask.plain else mask.full(q.device)
            out = function(inner, q, k, v, seen, is_causal=mask.causal and mask.plain, **kwargs)[0]
        else:
            added = None if mask.plain and not mask.causal else _added(mask, q)
            out = function(inner, q, k, v, added, **kwargs)[0]
        return out  # type: ignore[no-any-return]

    return attend_by_heads((query, key, value), of_heads, now.parts, now.axis), None


def attend(
    module: nn.Module,
    qkv: tuple[Tensor, Tensor, Tensor],
    pass_mask: PassMask,
    scale: float,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute the attention of this rank's part of the sequence, for models that have their own attention code.

    Args:
        module: the model's attention module, for error messages.
        qkv: queries ``[rows, heads, part, size]``, and keys and values with their own number of heads.
        pass_mask: the object that the module got as its mask.
        scale: factor of the scores.
        bias: ``[rows, heads, 1, padded length]``, added to the scores of full sequences (alibi); it has no gradient.
        dropout: dropout rate of the attention probabilities; 0 outside of training.

    Returns:
        ``[rows, part, heads, size]``.
    """
    now, mask = pass_mask.of, pass_mask.mask
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
    """Return an additive mask. As in models that add masks to scores, fully masked rows attend to all keys."""
    seen = mask.full(q.device)
    return torch.zeros((), dtype=q.dtype, device=q.device).where(seen, torch.finfo(q.dtype).min)


def _refuse_dropout(module: nn.Module, rate: float) -> None:
    if rate:
        raise ValueError(
            f"{type(module).__name__} drops attention probabilities with a rate of {rate}, which mode='ring_attn' does "
            "not do: set it to 0 in the model's configuration, or use mode='all_to_all'"
        )


def _original(name: str, module: nn.Module) -> Callable[..., Any]:
    """Return the attention function that the model calls without sequence parallelism."""
    if name == "eager":
        function: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
        return function
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS[name]
    return function


class BloomShared(nn.Module):
    """A ``BloomAttention`` for a part of the sequence; scores have a bias that depends on the positions of the keys."""

    def forward(
        self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        own: Any = self
        if not isinstance(attention_mask, PassMask):
            return super().forward(hidden_states, residual, alibi, attention_mask, **kwargs)
        qkv = own._reshape(own.query_key_value(hidden_states))
        bias = alibi.view(hidden_states.shape[0], -1, 1, alibi.shape[-1]) * own.beta
        rate = own.attention_dropout.p if self.training else 0.0
        out = attend(self, qkv, attention_mask, own.inv_norm_factor, bias, rate)
        made = own.dense(out.flatten(2))
        return residual + functional.dropout(made, own.hidden_dropout, self.training), None


class FalconShared(nn.Module):
    """A ``FalconAttention`` for a part of the sequence."""

    def forward(self, hidden_states: Tensor, alibi: Tensor | None, attention_mask: Any, **kwargs: Any) -> Any:
        own: Any = self
        if not isinstance(attention_mask, PassMask):
            return super().forward(hidden_states, alibi, attention_mask, **kwargs)
        q, k, v = (x.transpose(1, 2) for x in own._split_heads(own.query_key_value(hidden_states)))
        bias, rate = None, 0.0
        if alibi is None:
            cos, sin = kwargs["position_embeddings"]
            q, k = sys.modules[type(self).__module__].apply_rotary_pos_emb(q, k, cos, sin)
        else:
            rate = own.attention_dropout.p if self.training else 0.0
            bias = alibi.view(hidden_states.shape[0], -1, 1, alibi.shape[-1]) * own.inv_norm_factor
            if own.config._attn_implementation.endswith("eager"):
                bias = bias * 2  # the model adds it to its mask, and a second time to the scores
        out = attend(self, (q, k, v), attention_mask, own.head_dim**-0.5, bias, rate)
        return own.dense(out.flatten(2)), None


class GPTJShared(nn.Module):
    """A ``GPTJAttention`` for a part of the sequence."""

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
        own: Any = self
        if not isinstance(attention_mask, PassMask):
            return super()._attn(query, key, value, attention_mask)  # type: ignore[misc]
        rate = own.attn_dropout.p if self.training else 0.0
        qkv = (query.to(value.dtype), key.to(value.dtype), value)
        return attend(self, qkv, attention_mask, 1 / float(own.scale_attn), None, rate).transpose(1, 2), None


OWN_ATTENTION: dict[str, type[nn.Module]] = {
    "BloomAttention": BloomShared,
    "FalconAttention": FalconShared,
    "GPTJAttention": GPTJShared,
}
"""Attention modules by the name of the class that each replaces."""
