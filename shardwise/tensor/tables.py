"""What is cut in the models of each architecture: by class name, without importing one of them."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.tensor.rules import Attention, Embedding, Head, Mlp, Rule, Unused

__all__ = ["TABLES"]

Table = Mapping[str, tuple[Rule, ...]]

_PROJECTIONS = Attention(query="q_proj", key="k_proj", value="v_proj", out="o_proj", alike=("q_norm", "k_norm"))
_GATED = Mlp(columns=("gate_proj", "up_proj"), rows=("down_proj",))
_CAUSAL_HEAD = Head("lm_head", parallel=True)


def _llama_like(name: str) -> Table:
    """Four projections, a gated MLP, and a head that may be tied."""
    return {
        f"{name}Model": (Embedding("embed_tokens"),),
        f"{name}Attention": (_PROJECTIONS,),
        f"{name}MLP": (_GATED,),
        f"{name}ForCausalLM": (_CAUSAL_HEAD,),
    }


GPT2: Table = {
    "GPT2Model": (Embedding("wte"),),
    # In cross attention c_attn is for keys and values, and q_attn for queries.
    "GPT2Attention": (Attention(query="q_attn", fused="c_attn", out="c_proj", widths=("split_size", "embed_dim")),),
    "GPT2MLP": (Mlp(columns=("c_fc",), rows=("c_proj",)),),
    "GPT2LMHeadModel": (_CAUSAL_HEAD,),
    "GPT2DoubleHeadsModel": (Head("lm_head"),),
}

_BERT_HEAD = "cls.predictions.decoder"
BERT: Table = {
    "BertEmbeddings": (Embedding("word_embeddings"),),
    "BertAttention": (
        Attention(
            query="self.query",
            key="self.key",
            value="self.value",
            out="output.dense",
            core="self",
            head_dim="attention_head_size",
            widths=("all_head_size",),
        ),
    ),
    "BertLayer": (Mlp(columns=("intermediate.dense",), rows=("output.dense",)),),
    "BertLMPredictionHead": (Unused("bias"),),  # the decoder's
    "BertLMHeadModel": (Head(_BERT_HEAD, parallel=True),),
    "BertForPreTraining": (Head(_BERT_HEAD),),
    "BertForMaskedLM": (Head(_BERT_HEAD),),
}

TABLES: Mapping[str, Table] = {
    "bert": BERT,
    "gpt2": GPT2,
    "llama": _llama_like("Llama"),
}
"""By the architecture's name."""
