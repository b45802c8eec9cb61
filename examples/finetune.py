"""Fine-tune a Hugging Face causal language model at ZeRO-3: ``shardwise run --nproc 2 examples/finetune.py``.

Without ``--model`` it trains a small Llama with random weights, so it runs anywhere and downloads nothing. The text is
the Python language reference that Python itself contains, or that of ``--text``. Start it again to resume.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

import shardwise

HELD_OUT = 64
"""Sequences at the end of the text that are not trained on."""


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder of a model and its tokenizer; default: a small random Llama")
    parser.add_argument("--text", help="file of training text; default: Python's language reference")
    parser.add_argument("--runs", default="runs", help="folder of checkpoints")
    parser.add_argument("--export", default="tuned", help="folder of the trained model")
    parser.add_argument("--lora", action="store_true", help="train LoRA adapters only")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="sequences on each rank in a pass")
    parser.add_argument("--accumulate", type=int, default=2, help="passes in a step")
    parser.add_argument("--length", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--sequences", type=int, default=256, help="number of training sequences")
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args(argv)


def load(args: argparse.Namespace, text: str) -> tuple[torch.nn.Module, PreTrainedTokenizerFast]:
    """Return the model and its tokenizer."""
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=["<unk>", "<eos>"], show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)  # the same values on every rank
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=512, bos_token_id=1, eos_token_id=1, **sizes))
    return model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")


class Sequences(Dataset[torch.Tensor]):
    """Rows of ``length`` tokens, one after the other."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self.rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def split(data: Sequences, count: int) -> tuple[Subset[torch.Tensor], Subset[torch.Tensor]]:
    """Return the first ``count`` sequences to train on, and the last ones to test on."""
    if len(data) < count + HELD_OUT:
        raise SystemExit(f"the text has {len(data)} sequences: fewer than --sequences and {HELD_OUT} to test on")
    return Subset(data, range(count)), Subset(data, range(len(data) - HELD_OUT, len(data)))


@torch.no_grad()
def evaluate(session: shardwise.Session, loader: DataLoader[torch.Tensor], device: torch.device) -> float:
    """Return the mean loss over the ranks' batches."""
    session.module.eval()
    losses = [session.module(input_ids=batch.to(device), labels=batch.to(device)).loss.float() for batch in loader]
    session.module.train()
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main(argv: list[str] | None = None) -> list[float]:
    """Train, save, export; return the loss on held-out text before training and after each epoch."""
    args = options(argv)
    device = shardwise.init_distributed()
    first = dist.get_rank() == 0

    # 1. Data: tokenize, and hold the last sequences out.
    reference = "\n".join(topics[name] for name in sorted(topics))[:400_000]
    text = Path(args.text).read_text("utf-8") if args.text else reference
    model, tokenizer = load(args, text)
    data = Sequences(tokenizer(text, return_tensors="pt")["input_ids"][0], args.length)
    train_data, held_out = split(data, args.sequences)

    # 2. Model: adapters and activation checkpointing come before sharding.
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        model.enable_input_require_grads()
    model.config.use_cache = False  # not used in training
    model.activation_checkpointing_enable()  # gradient_checkpointing_enable() in older transformers
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    session = shardwise.shard(model, optimizer, stage=3, precision="bf16", max_norm=1.0, average="mean")

    # 3. Loaders: each rank reads its own part.
    sampler = DistributedSampler(train_data, session.data_ranks, session.data_rank, shuffle=True, drop_last=True)
    loader = DataLoader(train_data, batch_size=args.batch, sampler=sampler, drop_last=True)
    test_sampler = DistributedSampler(held_out, session.data_ranks, session.data_rank, shuffle=False)
    test_loader = DataLoader(held_out, batch_size=args.batch, sampler=test_sampler)
    steps = args.epochs * (len(loader) // args.accumulate)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=steps // 10, num_training_steps=steps)

    # 4. Resume from the newest complete checkpoint, if there is one.
    restored = session.checkpoints.load(args.runs, "auto", lr_schedulers=[scheduler])
    start = restored.data_position["epoch"] if restored else 0
    if first and start >= args.epochs:
        print(f"{args.runs} has {start} trained epochs of {args.epochs}: nothing to train")
    losses = [evaluate(session, test_loader, device)]

    # 5. Train.
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for index, batch in enumerate(loader, start=1):
            batch = batch.to(device)
            session.backward(session.module(input_ids=batch, labels=batch).loss)
            if index % args.accumulate == 0:
                session.optimizer.step()
                scheduler.step()
                session.optimizer.zero_grad()
        losses.append(evaluate(session, test_loader, device))
        if first:
            print(f"epoch {epoch + 1}: held-out loss {losses[-1]:.3f}, norm {session.optimizer.get_grad_norm():.2f}")
        session.checkpoints.save(args.runs, lr_schedulers=[scheduler], data_position={"epoch": epoch + 1}, keep=2)

    # 6. Export: transformers (and for LoRA peft) reads the folder. Every rank takes part in state_dict().
    state = session.module.state_dict(only_rank_0=True)
    if first:
        session.model.save_pretrained(args.export, state_dict=state)
        tokenizer.save_pretrained(args.export)
    dist.barrier()
    return losses


if __name__ == "__main__":
    main()
