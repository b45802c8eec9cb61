"""A tokenizer, a small Llama and data for TRL's trainers."""

from typing import Any

import torch

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(29))]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0, eos_token_id=1, bos_token_id=1))


def rows(fields: tuple[str, ...]) -> Any:
    import datasets

    datasets.disable_progress_bars()
    generator = torch.Generator().manual_seed(1)

    def text() -> str:
        count = int(torch.randint(4, 9, (1,), generator=generator))
        return " " + " ".join(f"w{int(word)}" for word in torch.randint(29, (count,), generator=generator))

    return datasets.Dataset.from_list([{field: text() for field in fields} for _ in range(16)])
