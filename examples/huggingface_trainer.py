"""transformers.Trainer with a shardwise plan: ``shardwise run --nproc 2 examples/huggingface_trainer.py``.

A small GPT-2 with random weights learns bytes of Python's standard library. Start it again with more ``--steps`` to
continue.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from shardwise.huggingface import ShardwiseTrainer
from shardwise.plan import zero

LENGTH = 64


def blocks(count: int) -> list[dict[str, torch.Tensor]]:
    """The first ``count`` pieces of ``LENGTH`` bytes of a module of the standard library."""
    text = torch.tensor(list(Path(json.decoder.__file__).read_bytes()))
    pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)[:count]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main(argv: list[str] | None = None) -> ShardwiseTrainer:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--output", default="trainer_output", help="directory that all ranks share")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    Path(args.output).mkdir(parents=True, exist_ok=True)
    data = blocks(144)
    trainer = ShardwiseTrainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            args.output,
            max_steps=args.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            warmup_steps=4,
            bf16=True,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=20,
            save_steps=20,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            disable_tqdm=True,
        ),
        plan=zero(args.stage),
        train_dataset=data[:128],
        eval_dataset=data[128:],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output))
    trainer.save_model()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        saved = GPT2LMHeadModel.from_pretrained(args.output)  # a plain model
        prompt = torch.tensor([list(b"    def ")])
        with torch.no_grad():
            text = bytes(saved.generate(prompt, max_new_tokens=40, do_sample=True, pad_token_id=0)[0].tolist())
        print(f"held-out loss {loss:.3f}; the saved model writes {text!r}")
    return trainer


if __name__ == "__main__":
    main().end()
