"""Setup for tests of the Hugging Face front-end: a small GPT-2, its rows and arguments, and trainers."""

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.plan import Plan
from tests.support.engine_setup import away_from_zero

RANKS, LENGTH, ROWS = 2, 9, 40


@contextlib.contextmanager
def accelerate_reset() -> Iterator[None]:
    """Reset accelerate's state after the block."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        yield
    finally:
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """Set the environment of a launcher for this process, and reset accelerate afterwards."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    for name in names:
        os.environ.pop(name, None)
    if several:
        os.environ.update(dict(zip(names, map(str, (rank, rank, ranks, ranks, "localhost", 1, 1)), strict=True)))
    threads = torch.get_num_threads()
    try:
        with accelerate_reset():
            yield
    finally:
        torch.set_num_threads(threads)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, logging
    from transformers.utils.logging import disable_progress_bar

    logging.set_verbosity_error()
    disable_progress_bar()
    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "n_positions": LENGTH, "n_embd": 8, "n_layer": 2, "n_head": 2}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return away_from_zero(GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0)))


@functools.cache
def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(17, (ROWS, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[torch.rand(tokens.shape, generator=generator) < 0.3] = -100  # ranks have different numbers of tokens
    return [{"input_ids": one, "labels": two} for one, two in zip(tokens, labels, strict=True)]


def arguments(folder: str, batch: int, **changes: Any) -> Any:
    from transformers import TrainingArguments

    options: dict[str, Any] = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), batch)
    options |= {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "warmup_steps": 2, "logging_steps": 1}
    options |= {"learning_rate": 1e-2, "adam_epsilon": 1e-2, "max_grad_norm": 0.1, "disable_tqdm": True}
    options |= {"eval_strategy": "epoch", "save_strategy": "epoch", "use_cpu": True, "report_to": "none"}
    return TrainingArguments(folder, **(options | changes))


def weights(folder: str) -> dict[str, Tensor]:
    return dict(type(gpt2()).from_pretrained(folder).state_dict())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(None), warnings.catch_warnings(action="ignore"):
        yield


def make(folder: str, plan: Plan, **changes: Any) -> Any:
    from shardwise.huggingface import ShardwiseTrainer

    args = arguments(folder, 4, **changes)
    return ShardwiseTrainer(gpt2(), args, plan=plan, train_dataset=rows()[:24], eval_dataset=rows()[24:])
