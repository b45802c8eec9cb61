"""Small models of each architecture, with every head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
import transformers
from torch import Generator, Tensor, nn

from tests.support.tensor_setup import LENGTH, PAD, ROWS, VOCABULARY, Case

Inputs = dict[str, Tensor]


def language(generator: Generator) -> Inputs:
    labels = torch.randint(0, PAD, (ROWS, LENGTH), generator=generator)
    labels[0, :2] = -100
    return {"labels": labels}


def sequences(generator: Generator) -> Inputs:
    return {"labels": torch.randint(0, 3, (ROWS,), generator=generator)}


def tokens(generator: Generator) -> Inputs:
    return {"labels": torch.randint(0, 3, (ROWS, LENGTH), generator=generator)}


def answers(_: Generator) -> Inputs:
    return {"start_positions": torch.tensor([0, 2, 1]), "end_positions": torch.tensor([1, 3, 2])}


def pairs(generator: Generator) -> Inputs:
    return language(generator) | {"next_sentence_label": torch.tensor([0, 1, 1])}


def choices(generator: Generator) -> Inputs:
    ids = torch.randint(0, PAD, (ROWS, 3, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": torch.tensor([0, 2, 1])}


def double(generator: Generator) -> Inputs:
    ids = torch.randint(0, PAD, (ROWS, 2, LENGTH), generator=generator)
    labels = torch.randint(0, PAD, (ROWS, 2, LENGTH), generator=generator)
    of_choice = {"mc_token_ids": torch.tensor([[5, 3]] * 3), "mc_labels": torch.tensor([0, 1, 1])}
    return {"input_ids": ids, "labels": labels, **of_choice}


def beside_encoder(generator: Generator) -> Inputs:
    return language(generator) | {
        "encoder_hidden_states": torch.randn(ROWS, 4, 24, generator=generator, dtype=torch.float64),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]]),
    }


TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}


def decoder(name: str, **changes: Any) -> Any:
    """Return a configuration with the names that most decoders use; six heads, of two key/value heads."""
    common: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 22, "num_hidden_layers": 2, "num_labels": 3}
    common |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 16, **TOKENS}
    return getattr(transformers, f"{name}Config")(**(common | changes))


def llama() -> list[Case]:
    many = decoder("Llama", num_key_value_heads=6, attention_bias=True, mlp_bias=True)
    return [
        Case("LlamaForCausalLM", decoder("Llama"), language, padded=True),
        Case("LlamaForCausalLM", decoder("Llama", tie_word_embeddings=True, attention_bias=True), language),
        Case("LlamaForCausalLM", decoder("Llama", num_key_value_heads=3, attn_implementation="eager"), language),
        Case("LlamaModel", many),
        Case("LlamaForSequenceClassification", many, sequences, padded=True),
        Case("LlamaForTokenClassification", decoder("Llama", classifier_dropout=0.0), tokens),
        Case("LlamaForQuestionAnswering", decoder("Llama", num_key_value_heads=1), answers, padded=True),
    ]


def gpt2() -> list[Case]:
    rates = ("summary_first_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "classifier_dropout")
    config: dict[str, Any] = {
        "n_positions": 16,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 6,
        "n_inner": 22,
        "num_labels": 3,
    }
    config |= {**TOKENS, **dict.fromkeys(rates, 0.0)}
    plain = transformers.GPT2Config(**config)
    crossed = transformers.GPT2Config(**config, add_cross_attention=True, scale_attn_by_inverse_layer_idx=True)
    untied = transformers.GPT2Config(**config, tie_word_embeddings=False)
    return [
        Case("GPT2LMHeadModel", plain, language, padded=True),
        Case("GPT2LMHeadModel", untied, language),
        Case("GPT2LMHeadModel", crossed, beside_encoder),
        Case("GPT2Model", plain, padded=True),
        Case("GPT2DoubleHeadsModel", plain, double),
        Case("GPT2ForSequenceClassification", plain, sequences, padded=True),
        Case("GPT2ForTokenClassification", plain, tokens),
        Case("GPT2ForQuestionAnswering", plain, answers, padded=True),
    ]


def bert() -> list[Case]:
    config: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    plain = decoder("Bert", **config)
    untied = decoder("Bert", tie_word_embeddings=False, attn_implementation="eager", **config)
    crossed = decoder("Bert", is_decoder=True, add_cross_attention=True, **config)
    return [
        Case("BertForMaskedLM", plain, language, padded=True),
        Case("BertForMaskedLM", untied, language),
        Case("BertForPreTraining", plain, pairs),
        Case("BertLMHeadModel", decoder("Bert", is_decoder=True, **config), language, padded=True),
        Case("BertLMHeadModel", crossed, beside_encoder),
        Case("BertModel", plain, padded=True),
        Case("BertForSequenceClassification", plain, sequences),
        Case("BertForTokenClassification", plain, tokens, padded=True),
        Case("BertForNextSentencePrediction", plain, lambda _: {"labels": torch.tensor([0, 1, 1])}),
        Case("BertForMultipleChoice", plain, choices),
        Case("BertForQuestionAnswering", decoder("Bert", num_labels=2, **config), answers, padded=True),
    ]


def heads_of(name: str, *heads: str, **changes: Any) -> list[Case]:
    """Return a language model with padding, one with tied weights, and all other heads with 3 labels."""
    plain = decoder(name, tie_word_embeddings=False, **changes)
    kinds = {"ForSequenceClassification": sequences, "ForTokenClassification": tokens}
    others = [Case(name + head, plain, kinds[head], padded=True) for head in heads if head in kinds]
    if "ForQuestionAnswering" in heads:
        others.append(Case(f"{name}ForQuestionAnswering", decoder(name, num_labels=2, **changes), answers))
    return [
        Case(f"{name}ForCausalLM", plain, language, padded=True),
        Case(f"{name}ForCausalLM", decoder(name, tie_word_embeddings=True, **changes), language),
        *others,
    ]


SEQUENCE, TOKEN, ANSWER = "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"


def gemma3() -> list[Case]:
    text = decoder("Gemma3Text", head_dim=4, sliding_window=3, layer_types=["sliding_attention", "full_attention"])
    soft = decoder("Gemma3Text", head_dim=8, final_logit_softcapping=2.0, num_key_value_heads=1)
    return [Case("Gemma3ForCausalLM", text, language, padded=True), Case("Gemma3ForCausalLM", soft, language)]


def bloom() -> list[Case]:
    rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "n_head": 6, "n_layer": 2}
    plain = decoder("Bloom", **rates)
    return [
        Case("BloomForCausalLM", plain, language, padded=True),
        Case("BloomModel", plain),
        Case("BloomForSequenceClassification", plain, sequences, padded=True),
        Case("BloomForTokenClassification", plain, tokens),
        Case("BloomForQuestionAnswering", decoder("Bloom", num_labels=2, **rates), answers, padded=True),
    ]


def falcon() -> list[Case]:
    rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    queries = decoder("Falcon", multi_query=True, bias=True, **rates)
    new = decoder("Falcon", new_decoder_architecture=True, num_kv_heads=2, **rates)
    alibi = decoder("Falcon", multi_query=False, alibi=True, parallel_attn=False, **rates)
    eager = decoder("Falcon", new_decoder_architecture=True, num_kv_heads=3, attn_implementation="eager", **rates)
    slow = decoder("Falcon", multi_query=False, alibi=True, attn_implementation="eager", num_labels=2, **rates)
    return [
        Case("FalconForCausalLM", queries, language, padded=True),
        Case("FalconForCausalLM", new, language),
        Case("FalconModel", alibi, padded=True),
        Case("FalconForSequenceClassification", eager, sequences, padded=True),
        Case("FalconForTokenClassification", queries, tokens),
        Case("FalconForQuestionAnswering", slow, answers, padded=True),
    ]


def gptj() -> list[Case]:
    names = {"n_embd": 24, "n_layer": 2, "n_head": 6, "n_inner": 22, "n_positions": 16, "rotary_dim": 2}
    rates = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    plain = decoder("GPTJ", **names, **rates)
    return [
        Case("GPTJForCausalLM", plain, language, padded=True),
        Case("GPTJModel", plain),
        Case("GPTJForSequenceClassification", plain, sequences, padded=True),
        Case("GPTJForQuestionAnswering", decoder("GPTJ", **(names | rates | {"num_labels": 2})), answers),
    ]


def gpt_neox() -> list[Case]:
    rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "classifier_dropout": 0.0}
    return heads_of("GPTNeoX", SEQUENCE, TOKEN, ANSWER, **rates)


def opt() -> list[Case]:
    rates = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "ffn_dim": 22}
    plain = decoder("OPT", word_embed_proj_dim=12, **rates)
    untied = decoder("OPT", do_layer_norm_before=False, tie_word_embeddings=False, **rates)
    return [
        Case("OPTForCausalLM", plain, language, padded=True),
        Case("OPTForCausalLM", untied, language),
        Case("OPTModel", plain),
        Case("OPTForSequenceClassification", decoder("OPT", **rates), sequences, padded=True),
        Case("OPTForQuestionAnswering", decoder("OPT", num_labels=2, **rates), answers),
    ]


def both_sides(generator: Generator) -> Inputs:
    return language(generator) | {"decoder_input_ids": torch.randint(0, PAD, (ROWS, LENGTH), generator=generator)}


def ended(generator: Generator) -> Inputs:
    ids = torch.randint(3, PAD, (ROWS, LENGTH), generator=generator)
    ids[:, -1] = 2  # a sequence classifier looks for the end token
    return {"input_ids": ids} | sequences(generator)


def t5() -> list[Case]:
    config: dict[str, Any] = {"d_model": 24, "d_kv": 4, "d_ff": 22, "num_layers": 2, "num_heads": 6, "num_labels": 3}
    config |= {"vocab_size": VOCABULARY, "dropout_rate": 0.0, "pad_token_id": PAD, "decoder_start_token_id": 0}
    config |= {"relative_attention_num_buckets": 8, "eos_token_id": 2, "use_cache": False, "classifier_dropout": 0.0}
    plain = transformers.T5Config(**config)
    gated = transformers.T5Config(**(config | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}))
    return [
        Case("T5ForConditionalGeneration", plain, language, padded=True),
        Case("T5ForConditionalGeneration", gated, language),
        Case("T5Model", plain, lambda generator: {k: v for k, v in both_sides(generator).items() if k != "labels"}),
        Case("T5EncoderModel", gated, padded=True),
        Case("T5ForTokenClassification", plain, tokens),
        Case("T5ForSequenceClassification", plain, ended),
        Case("T5ForQuestionAnswering", transformers.T5Config(**(config | {"num_labels": 2})), answers, padded=True),
    ]


def sounds(generator: Generator) -> Inputs:
    return {"input_features": torch.randn(ROWS, 4, 12, generator=generator, dtype=torch.float64)}


def whisper() -> list[Case]:
    config: dict[str, Any] = {"num_mel_bins": 4, "d_model": 24, "max_source_positions": 6, "max_target_positions": 16}
    config |= {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 6, "decoder_attention_heads": 6}
    config |= {"encoder_ffn_dim": 22, "decoder_ffn_dim": 22, "dropout": 0.0, "classifier_proj_size": 8}
    config |= {**TOKENS, "decoder_start_token_id": 0, "num_labels": 3}
    plain = transformers.WhisperConfig(**config)
    return [
        Case("WhisperForConditionalGeneration", plain, lambda g: sounds(g) | language(g)),
        Case("WhisperForAudioClassification", plain, lambda g: sounds(g) | sequences(g)),
        Case("WhisperForCausalLM", transformers.WhisperConfig(**(config | {"tie_word_embeddings": False})), language),
    ]


def pictures(generator: Generator) -> Inputs:
    return {"pixel_values": torch.randn(ROWS, 3, 8, 8, generator=generator, dtype=torch.float64)}


def hidden(generator: Generator) -> Inputs:
    return pictures(generator) | {"bool_masked_pos": torch.tensor([[True, False, True, False]] * ROWS)}


def vit() -> list[Case]:
    config: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_labels": 3}
    config |= {"intermediate_size": 22, "image_size": 8, "patch_size": 4, "encoder_stride": 4}
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    plain = transformers.ViTConfig(**config)
    return [
        Case("ViTForImageClassification", plain, lambda g: pictures(g) | sequences(g)),
        Case("ViTModel", plain, pictures),
        Case("ViTForMaskedImageModeling", plain, hidden),
    ]


def mixtral() -> list[Case]:
    few = heads_of("Mixtral", SEQUENCE, num_local_experts=4, output_router_logits=True, experts_implementation="eager")
    many = decoder("Mixtral", classifier_dropout=0.0, experts_implementation="eager")
    return [*few, Case("MixtralForTokenClassification", many, tokens)]


def qwen3_moe() -> list[Case]:
    sizes: dict[str, Any] = {"moe_intermediate_size": 10, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}
    return heads_of("Qwen3Moe", SEQUENCE, mlp_only_layers=[0], experts_implementation="eager", **sizes)


DEEPSEEK: dict[str, Any] = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
DEEPSEEK |= {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "num_key_value_heads": 6}
DEEPSEEK |= {"moe_intermediate_size": 10, "first_k_dense_replace": 1, "experts_implementation": "eager"}


def deepseek_v3() -> list[Case]:
    sizes = {**DEEPSEEK, "num_mtp_layers": 0, "attention_bias": True}
    whole = decoder("DeepseekV3", q_lora_rank=None, classifier_dropout=0.0, **sizes)
    return [
        Case("DeepseekV3ForCausalLM", decoder("DeepseekV3", q_lora_rank=12, **sizes), language, padded=True),
        Case("DeepseekV3ForSequenceClassification", whole, sequences, padded=True),
        Case("DeepseekV3ForTokenClassification", whole, tokens),
    ]


def deepseek_v2() -> list[Case]:
    sizes = {**DEEPSEEK, "head_dim": 4, "tie_word_embeddings": False}
    return [
        Case("DeepseekV2ForCausalLM", decoder("DeepseekV2", q_lora_rank=12, **sizes), language, padded=True),
        Case("DeepseekV2ForSequenceClassification", decoder("DeepseekV2", q_lora_rank=None, **sizes), sequences),
    ]


def cohere() -> list[Case]:
    normed = decoder("Cohere", use_qk_norm=True)
    return [
        Case("CohereForCausalLM", normed, language, padded=True),
        Case("CohereForCausalLM", decoder("Cohere", tie_word_embeddings=False), language),
        Case("CohereModel", normed),
    ]


@dataclass(frozen=True)
class Adapted(Case):
    """A case with LoRA around every linear layer and the head; the layers themselves are frozen."""

    rate: float = 0.0

    def made(self) -> nn.Module:
        layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
        layers += ["c_attn", "c_fc", "c_proj"]
        config = peft.LoraConfig(r=3, target_modules=layers, lora_dropout=self.rate, task_type="CAUSAL_LM")
        model: nn.Module = peft.get_peft_model(super().made(), config)  # type: ignore[arg-type]
        for name, param in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(param, std=0.25)
        return model.double().train()


def adapted(rate: float = 0.0) -> list[Case]:
    config: dict[str, Any] = {"pad_token_id": PAD, "n_embd": 24, "n_layer": 2, "n_head": 6, "vocab_size": VOCABULARY}
    still: dict[str, Any] = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "use_cache": False}
    return [
        Adapted("LlamaForCausalLM", decoder("Llama", tie_word_embeddings=False), language, True, rate),
        Adapted("GPT2LMHeadModel", transformers.GPT2Config(**config, **still), language, False, rate),
    ]


CASES: dict[str, Callable[[], list[Case]]] = {
    "bert": bert,
    "bloom": bloom,
    "cohere": cohere,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "falcon": falcon,
    "gemma2": lambda: heads_of("Gemma2", SEQUENCE, head_dim=4, sliding_window=3, query_pre_attn_scalar=4),
    "gemma3": gemma3,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "gptj": gptj,
    "llama": llama,
    "mistral": lambda: heads_of("Mistral", SEQUENCE, sliding_window=3),
    "mixtral": mixtral,
    "opt": opt,
    "phi3": lambda: heads_of("Phi3", SEQUENCE, resid_pdrop=0.0, embd_pdrop=0.0),
    "qwen2": lambda: heads_of("Qwen2", SEQUENCE, ANSWER),
    "qwen3": lambda: heads_of("Qwen3", SEQUENCE, head_dim=4, attention_bias=True),
    "qwen3_moe": qwen3_moe,
    "t5": t5,
    "vit": vit,
    "whisper": whisper,
}
