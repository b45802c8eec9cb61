"""Small models of each architecture, with every head."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tensor_setup import LENGTH, PAD, ROWS, VOCABULARY, Case
from torch import Generator, Tensor

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
    return {
        "input_ids": ids,
        "labels": labels,
        "mc_token_ids": torch.tensor([[5, 3]] * 3),
        "mc_labels": torch.tensor([0, 1, 1]),
    }


def beside_encoder(generator: Generator) -> Inputs:
    return language(generator) | {
        "encoder_hidden_states": torch.randn(ROWS, 4, 24, generator=generator, dtype=torch.float64),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]]),
    }


def decoder(name: str, **changes: Any) -> Any:
    """A configuration in the names that most decoders have; six heads, of two key/value heads."""
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 22,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "pad_token_id": PAD,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_labels": 3,
        "use_cache": False,
    }
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
    config: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 6}
    config |= {"n_inner": 22, "pad_token_id": PAD, "num_labels": 3, "use_cache": False, "summary_first_dropout": 0.0}
    config |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "classifier_dropout": 0.0}
    config |= {"bos_token_id": 1, "eos_token_id": 2}
    plain = transformers.GPT2Config(**config)
    crossed = transformers.GPT2Config(
        **(config | {"add_cross_attention": True, "scale_attn_by_inverse_layer_idx": True})
    )
    untied = transformers.GPT2Config(**(config | {"tie_word_embeddings": False}))
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


CASES = {"llama": llama, "gpt2": gpt2, "bert": bert}
