"""Weights alone under 16 bits with masters: every strategy, and Fabric's, saves the masters and loads them."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_cases import rows
from torch import Tensor, nn

from shardwise.core.checkpoint.formats import open_checkpoint
from shardwise.strategies.namespace import FABRIC, LIGHTNING, Namespace
from shardwise.testing import run_ranks
from tests.support.lightning_setup import close, data, fabric, toy, trainer, weights

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "colossalai": ("ColossalAIStrategy", {"chunk_size": 100}),
    "deepspeed": ("DeepSpeedStrategy", {"stage": 2}),
    "deepspeed, host": ("DeepSpeedStrategy", {"stage": 3, "offload_optimizer": True, "offload_parameters": True}),
    "deepspeed, trained": ("DeepSpeedStrategy", {"stage": 1, "exclude_frozen_parameters": True}),
    "fully_sharded": ("DDPFullyShardedStrategy", {}),
}
HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
CASES = [(kind, "bf16-mixed", 2) for kind in KINDS]
CASES += [("fully_sharded", "bf16-mixed", 1), ("colossalai", "16-mixed", 2), ("deepspeed, trained", "16-mixed", 1)]
State = dict[str, Tensor]


def strategy(kind: str, precision: str, ns: Namespace) -> Any:
    package = importlib.import_module(ns.home)
    name, arguments = KINDS[kind]
    given = "precision" if ns is FABRIC else "precision_plugin"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(package, name)(**arguments, **{given: package.ShardedPrecision(precision)})


def under_trainer(kind: str, precision: str, directory: str) -> State:
    saver = LIGHTNING.load("callbacks.ModelCheckpoint")(dirpath=directory, filename="kept", save_weights_only=True)
    made = trainer(strategy(kind, precision, LIGHTNING), callbacks=[saver], enable_checkpointing=True)
    made.fit(toy(), data())
    made.save_checkpoint(f"{directory}/called.ckpt", weights_only=True)
    found = weights(made)
    for name in ("kept", "called"):
        made.test(toy(seed=9), data(), ckpt_path=f"{directory}/{name}.ckpt", verbose=False)
        restored = weights(made)  # for a test there are no masters
        used = {each: value.to(HALF[precision]).float() for each, value in found.items()}
        assert all(torch.equal(restored[each], used[each]) for each in found), (kind, name)
    close(made)
    return found


def under_fabric(kind: str, precision: str, directory: str) -> State:
    own, model = fabric(strategy(kind, precision, FABRIC), FABRIC), toy().net
    assert isinstance(model, nn.Module)
    sharded, optimizer = own.setup(model, torch.optim.Adam(model.parameters(), lr=0.05))
    for inputs, targets in data():
        own.backward((sharded(inputs).float() - targets).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    own.save(f"{directory}/called.ckpt", {"model": sharded})
    found = {name: value.clone() for name, value in sharded.state_dict().items()}
    own.load(f"{directory}/called.ckpt", {"model": sharded})
    assert all(torch.equal(value, found[name]) for name, value in sharded.state_dict().items()), kind
    own.strategy.unshard()
    return found


def check(directory: Path, masters: State) -> None:
    """What every file has is the masters, bit for bit."""
    fine = [name for name, value in masters.items() if not torch.equal(value, value.bfloat16().float())]
    assert fine and all(value.dtype == torch.float32 for value in masters.values()), "there are masters"
    for path in directory.glob("*.ckpt"):
        with open_checkpoint(path) as source:
            names = {name for name in source.tensors() if name.startswith("model/")}
            assert names == {f"model/{name}" for name in masters}
            for name, value in masters.items():
                read = source.read(f"model/{name}", 0, value.numel())
                assert torch.equal(read.view(value.shape), value), (path, name)


ALL = [(program, *case) for program in (under_trainer, under_fabric) for case in CASES]
QUICK = [(under_trainer, "deepspeed, trained", "bf16-mixed", 2), (under_fabric, "fully_sharded", "bf16-mixed", 1)]

# Each strategy under the Trainer and under Fabric.
PAIRS = [(under_trainer, kind, "bf16-mixed", 2) for kind in ("deepspeed", "deepspeed, host", "fully_sharded")]
PAIRS += [(under_fabric, kind, "bf16-mixed", 2) for kind in ("deepspeed", "deepspeed, host")]
PAIRS += [(under_trainer, "colossalai", "16-mixed", 2)]
PAIRS += [(under_fabric, "colossalai", "16-mixed", 2), (under_fabric, "deepspeed, trained", "16-mixed", 1)]


@pytest.mark.parametrize(("program", "kind", "precision", "ranks"), rows(ALL, QUICK, PAIRS))
def test_weights_alone_are_the_masters(program: Any, kind: str, precision: str, ranks: int, tmp_path: Path) -> None:
    masters = run_ranks(ranks, program, kind, precision, str(tmp_path), timeout=120.0)[0]
    assert len(list(tmp_path.glob("*.ckpt"))) == (2 if program is under_trainer else 1)
    check(tmp_path, masters)
