"""Models that compute attention by themselves, without asking transformers for it."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from shardwise.core.parallel.sequence.attention import PassMask, attend

__all__ = ["OWN_ATTENTION"]


class BloomShared(nn.Module):
    """A ``BloomAttention`` whose queries are a part of the sequence; scores are biased by the keys' positions."""

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
    """A ``FalconAttention`` whose queries are a part of the sequence."""

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
                bias = bias * 2  # the model adds it to its mask, and once more to scores
        out = attend(self, (q, k, v), attention_mask, own.head_dim**-0.5, bias, rate)
        return own.dense(out.flatten(2)), None


class GPTJShared(nn.Module):
    """A ``GPTJAttention`` whose queries are a part of the sequence."""

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
"""By the name of the class that each takes the place of."""
