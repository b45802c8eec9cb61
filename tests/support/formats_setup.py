"""A checkpoint in memory with every odd case, exact comparison of two checkpoints, and a flipped bit."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from shardwise.core.checkpoint.formats.lazy_tensors import LazySource, entry_of_tensor
from shardwise.core.checkpoint.formats.optimizer_state import OptimizerRecord, group_record
from shardwise.core.checkpoint.source import CheckpointSource


def flip(file: Path, at: int) -> None:
    """Flip one bit of the byte at ``at``."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << (at % 8)
    file.write_bytes(content)


def odd_model() -> dict[str, torch.Tensor]:
    """A model with 0-dim, empty, bf16, bool, integer and non-contiguous tensors, and names with dots."""
    return {
        "embed.weight": torch.randn(7, 3),
        "scale": torch.tensor(1.5),
        "nothing": torch.empty(0, 4),
        "layers.0.weight": torch.randn(5, 3).to(torch.bfloat16),
        "layers.0.bias": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, 3.0]),
        "count": torch.tensor(3),
        "mask": torch.tensor([True, False, True]),
        "strided": torch.randn(4, 6).t()[::2],
    }


TRAINED = ("embed.weight", "scale", "layers.0.weight", "layers.0.bias", "strided")


def odd_source() -> LazySource:
    """Return the model with a tied name, and AdamW-like state in two groups."""
    torch.manual_seed(3)
    model = odd_model()
    entries = {f"model/{name}": entry_of_tensor(value) for name, value in model.items()}
    state: dict[str, Any] = {"aliases": {"head.weight": "embed.weight"}}
    record = OptimizerRecord()
    options = {"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "weight_decay": 0.1}
    record.groups = [group_record(TRAINED[:3], options), group_record(TRAINED[3:], {**options, "lr": 1e-300})]
    for place, name in enumerate(TRAINED):
        shape = model[name].shape
        values = {"step": torch.tensor(float(place)), "exp_avg": torch.randn(shape)}
        values["exp_avg_sq"] = torch.rand(shape)
        entries.update(record.add(0, name, values))
    state["optimizers"] = [record.to_json()]
    entries = record.lift_scalars(0, entries)
    return LazySource("memory", entries, state)


def tensor(source: CheckpointSource, name: str) -> torch.Tensor:
    """Return one full tensor."""
    fact = source.tensors()[name]
    return source.read(name, 0, fact.numel).reshape(fact.shape)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether shape, dtype and every bit are equal (so that NaN and -0.0 count)."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    flat = [value.reshape(-1).contiguous().view(torch.uint8) for value in (one, two)]
    return torch.equal(*flat)


def differing(one: CheckpointSource, two: CheckpointSource, prefix: str = "") -> list[str]:
    """Return the names under ``prefix`` that only one has, or whose tensors differ; read each tensor in three parts,
    too."""
    names = [{name for name in source.tensors() if name.startswith(prefix)} for source in (one, two)]
    found = sorted(names[0] ^ names[1])
    for name in sorted(names[0] & names[1]):
        expected, got = tensor(one, name), tensor(two, name)
        cuts = [0, got.numel() // 3, got.numel() // 2, got.numel()]
        parts = torch.cat([two.read(name, a, b - a) for a, b in pairwise(cuts)])
        if not same_bits(expected, got) or not same_bits(parts.reshape(got.shape), got):
            found.append(name)
    return found


def optimizer_facts(source: CheckpointSource) -> list[Any]:
    """Return the JSON part of the optimizers without the class and the order of keys."""
    return [(item["groups"], item["small"]) for item in source.state().get("optimizers", [])]
