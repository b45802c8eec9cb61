"""Setup for tests of packed weights (QLoRA): a Llama with 4-bit or 8-bit linear layers and an adapter."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LENGTH, VOCABULARY, HIDDEN, INNER, LAYERS = 16, 64, 64, 96, 2
TARGETS = ["q_proj", "v_proj", "down_proj"]


def base(folder: str) -> str:
    """Return the directory of a Llama with random weights, written once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    where = Path(folder, "base")
    if not where.exists():
        heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
        sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER}
        torch.manual_seed(0)
        sizes |= {"num_hidden_layers": LAYERS, "max_position_embeddings": LENGTH}
        LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(where)
    return str(where)


def packed(where: str, bits: int, device: torch.device | None = None) -> Any:
    """Return the model as ``from_pretrained`` packs it; a directory of packed weights is read as it is."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if bits == 4:
        kinds = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **kinds)
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    how = {"quantization_config": config, "device_map": {"": str(device or "cpu")}, "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(where, **how)


def adapted(where: str, bits: int, checkpointing: bool = True, device: torch.device | None = None) -> Any:
    """Return the model with a trainable adapter that is not zero at the start."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    kwargs = {"use_reentrant": False}
    model = prepare_model_for_kbit_training(packed(where, bits, device), checkpointing, kwargs)
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(model, config).train()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with a fixed kernel, so that every bit can be equal."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


def train(model: nn.Module, backward: Callable[[Tensor], object], update: Callable[[], object]) -> list[float]:
    """Train three steps on the same rows on every rank, so the mean gradient is that of one rank."""
    device, losses = next(model.parameters()).device, []
    for seed in range(3):
        rows = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed)).to(device)
        loss = model(input_ids=rows, labels=rows).loss
        backward(loss)
        update()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Suppress notices of the libraries: cast inputs, written files, a device without a fast kernel."""
    from transformers import logging as theirs
    from transformers.utils.logging import disable_progress_bar

    theirs.set_verbosity_error()
    disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(None):
        yield
