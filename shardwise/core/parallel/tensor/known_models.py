"""Tensor-parallel rules of each architecture by class name; no model is imported."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.core.parallel.tensor.module_rules import (
    Attention,
    Either,
    Embedding,
    Experts,
    Head,
    LatentAttention,
    Mlp,
    Requires,
    Router,
    Unused,
)
from shardwise.core.parallel.tensor.tp_plan import Rule

Table = Mapping[str, tuple[Rule, ...]]

_PROJECTIONS = Attention(
    query="q_proj", key="k_proj", value="v_proj", out="o_proj", grad_allreduce=("q_norm", "k_norm")
)
_GATED = Mlp(columns=("gate_proj", "up_proj"), rows=("down_proj",))
_CAUSAL_HEAD = Head("lm_head", parallel=True)


def _llama_like(name: str) -> Table:
    """Return rules for four projections, a gated MLP, and a head that may be tied."""
    return {
        f"{name}Model": (Embedding("embed_tokens"),),
        f"{name}Attention": (_PROJECTIONS,),
        f"{name}MLP": (_GATED,),
        f"{name}ForCausalLM": (_CAUSAL_HEAD,),
    }


GPT2: Table = {
    "GPT2Model": (Embedding("wte"),),
    # In cross-attention, c_attn projects to keys and values, and q_attn to queries.
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

PHI3: Table = {
    **_llama_like("Phi3"),
    "Phi3Attention": (Attention(fused="qkv_proj", out="o_proj", config=("num_attention_heads",)),),
    "Phi3MLP": (Mlp(columns=("gate_up_proj",), rows=("down_proj",), blocks=2),),
}

GEMMA3: Table = {
    **_llama_like("Gemma3"),
    "Gemma3TextModel": (Embedding("embed_tokens"),),
    "Gemma3Model": (),  # the multimodal model; its sharded submodule is a Gemma3TextModel
    "Gemma3ForConditionalGeneration": (Head("lm_head"),),
}

_FOUR = Attention(query="q_proj", key="k_proj", value="v_proj", out="out_proj")
_TWO = Mlp(columns=("fc1",), rows=("fc2",))

OPT: Table = {
    "OPTDecoder": (Embedding("embed_tokens"),),
    "OPTAttention": (_FOUR,),
    "OPTDecoderLayer": (_TWO,),
    "OPTForCausalLM": (_CAUSAL_HEAD,),
}

_NO_SLOW_BUT_EXACT = Requires("slow_but_exact", False)
_TO_4H = Mlp(columns=("dense_h_to_4h",), rows=("dense_4h_to_h",))
# Query, key and value of a head are adjacent; with several queries per key, those of a group are.
_BY_GROUP = Attention(fused="query_key_value", layout="groups", out="dense", arguments=("alibi", "attention_mask"))

BLOOM: Table = {
    "BloomModel": (Embedding("word_embeddings"),),
    "BloomAttention": (_NO_SLOW_BUT_EXACT, _BY_GROUP),
    "BloomMLP": (_NO_SLOW_BUT_EXACT, _TO_4H),
    "BloomForCausalLM": (_CAUSAL_HEAD,),
}

FALCON: Table = {
    "FalconModel": (Embedding("word_embeddings"),),
    "FalconAttention": (_BY_GROUP,),
    "FalconMLP": (_TO_4H,),
    "FalconForCausalLM": (_CAUSAL_HEAD,),
}

GPTJ: Table = {
    "GPTJModel": (Embedding("wte"),),
    "GPTJAttention": (_FOUR,),
    "GPTJMLP": (Mlp(columns=("fc_in",), rows=("fc_out",)),),
    "GPTJForCausalLM": (_CAUSAL_HEAD,),
}

GPT_NEOX: Table = {
    "GPTNeoXModel": (Embedding("embed_in"),),
    "GPTNeoXAttention": (
        Attention(fused="query_key_value", layout="groups", out="dense", head_dim="head_size", widths=("hidden_size",)),
    ),
    "GPTNeoXMLP": (_TO_4H,),
    "GPTNeoXForCausalLM": (Either((("lm_head", (_CAUSAL_HEAD,)), ("embed_out", (Head("embed_out", parallel=True),)))),),
}

_SHARED = (Embedding("shared"),)
T5: Table = {
    "T5Model": _SHARED,
    "T5EncoderModel": _SHARED,
    "T5ForQuestionAnswering": _SHARED,
    "T5ForConditionalGeneration": (*_SHARED, Head("lm_head")),
    "T5Stack": (Embedding("embed_tokens"),),
    "T5Attention": (
        Attention(
            query="q",
            key="k",
            value="v",
            out="o",
            head_dim="key_value_proj_dim",
            heads=("n_heads",),
            widths=("inner_dim",),
            biases=("relative_attention_bias",),
        ),
    ),
    "T5DenseActDense": (Mlp(columns=("wi",), rows=("wo",)),),
    "T5DenseGatedActDense": (Mlp(columns=("wi_0", "wi_1"), rows=("wo",)),),
}

WHISPER: Table = {
    "WhisperDecoder": (Embedding("embed_tokens"),),
    "WhisperAttention": (_FOUR,),
    "WhisperEncoderLayer": (_TWO,),
    "WhisperDecoderLayer": (_TWO,),
    "WhisperForConditionalGeneration": (Head("proj_out"),),
    "WhisperForCausalLM": (Head("proj_out"),),
}

_VIT_BEFORE = Attention(
    query="attention.query",
    key="attention.key",
    value="attention.value",
    out="output.dense",
    core="attention",
    head_dim="attention_head_size",
    widths=("all_head_size",),
)
_MLP_BEFORE = Mlp(columns=("intermediate.dense",), rows=("output.dense",))
VIT: Table = {
    "ViTAttention": (Either((("q_proj", (_PROJECTIONS,)), ("attention.query", (_VIT_BEFORE,)))),),
    "ViTMLP": (_TWO,),
    "ViTLayer": (Either((("mlp", ()), ("intermediate.dense", (_MLP_BEFORE,)))),),
}

MIXTRAL: Table = {**_llama_like("Mixtral"), "MixtralExperts": (Experts(),), "MixtralTopKRouter": (Router(),)}
QWEN3_MOE: Table = {**_llama_like("Qwen3Moe"), "Qwen3MoeExperts": (Experts(),), "Qwen3MoeTopKRouter": (Router(),)}


def _deepseek(name: str) -> Table:
    return {
        **_llama_like(name),
        f"{name}Attention": (LatentAttention(),),
        f"{name}Experts": (Experts(),),
        f"{name}TopkRouter": (Router(),),
    }


TABLES: Mapping[str, Table] = {
    "bert": BERT,
    "bloom": BLOOM,
    "cohere": _llama_like("Cohere"),
    "deepseek_v2": _deepseek("DeepseekV2"),
    "deepseek_v3": _deepseek("DeepseekV3"),
    "falcon": FALCON,
    "gemma2": _llama_like("Gemma2"),
    "gemma3": GEMMA3,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "gptj": GPTJ,
    "llama": _llama_like("Llama"),
    "mistral": _llama_like("Mistral"),
    "mixtral": MIXTRAL,
    "opt": OPT,
    "phi3": PHI3,
    "qwen2": _llama_like("Qwen2"),
    "qwen3": _llama_like("Qwen3"),
    "qwen3_moe": QWEN3_MOE,
    "t5": T5,
    "vit": VIT,
    "whisper": WHISPER,
}
"""By the name of the architecture."""
