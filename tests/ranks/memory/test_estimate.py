"""``shardwise estimate``: the bytes of a build, by tier and kind, without a build."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.cli.main import main
from shardwise.session import estimate_memory, shard
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

TRANSIENT = ("gathered parameters", "idle arrays", "update scratch")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


def make() -> nn.Module:
    """Sizes that two ranks do not divide, buffers of two dtypes, and a frozen layer."""
    model = nn.Sequential(nn.Linear(64, 47), nn.BatchNorm1d(47), nn.Linear(47, 65), nn.Linear(65, 3))
    model[2].requires_grad_(False)
    return model


def make_llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def check(kind: str, offload: str | None, llama: bool = False, **settings: object) -> None:
    build, batch = (make_llama, torch.ones(2, 5, dtype=torch.long)) if llama else (make, torch.randn(4, 64))
    model = build()
    session = shard(model, getattr(torch.optim, kind)(model.parameters()), offload=offload, device="cpu", **settings)
    for _ in range(2):
        made = session.module(batch)
        session.backward((made.logits if llama else made).float().sum())
        by_tier = session.memory().by_tier
        assert session.optimizer is not None
        session.optimizer.step()
        session.optimizer.zero_grad()
    session.close()
    with torch.device("meta"):
        model = build()
    optimizer, mesh = getattr(torch.optim, kind)(model.parameters()), session.mesh
    found = estimate_memory(model, optimizer, session.plan, dist.get_world_size(), mesh.shard.rank, "cpu")
    lasting = {tier: {k: v for k, v in own.items() if k not in TRANSIENT} for tier, own in by_tier.items()}
    assert found == lasting, (kind, offload, settings)


@pytest.mark.parametrize("stage", [1, 2, 3, *full(0)])
@on_ranks(2)
def test_estimate_is_what_a_build_accounts_for(stage: int, tmp_path: Path) -> None:
    for offload in (None, "host", str(tmp_path)):
        check("AdamW", offload, stage=stage, precision="bf16")
    check("Adagrad", None, stage=stage)


@on_ranks(2)
def test_estimate_of_tensor_parallel_layers() -> None:
    check("AdamW", None, llama=True, tp=2)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(architectures=["LlamaForCausalLM"], **SIZES).save_pretrained(tmp_path)
    numel = sum(each.numel() for each in make_llama().parameters())
    offload = ["--devices", "2", "--offload-optimizer", "cpu", "--offload-params", "nvme"]
    assert main(["estimate", str(tmp_path), *offload, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kinds = found["disk"]["parameters"], found["host"]["gradients"], found["host"]["masters"]
    assert numel <= kinds[0] < 1.01 * numel and kinds == (kinds[0], kinds[0], 2 * kinds[0])
    assert main(["estimate", str(tmp_path), *offload]) == 0
    rows = {line[:16].strip(): line[16:].split() for line in capsys.readouterr().out.splitlines()[:-1]}
    assert rows["on one rank"] == ["device", "host", "disk"] and rows["masters"][:2] == ["0", "B"]
    assert main(["estimate", str(tmp_path), "--stage", "2", "--offload-params", "cpu"]) == 2
    assert "use --stage 3" in capsys.readouterr().err
    assert main(["estimate", str(tmp_path / "no")]) == 2
    assert "a folder with config.json" in capsys.readouterr().err
