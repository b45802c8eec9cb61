"""``optimizer.type`` ``Muon`` trains as MuonWithAuxAdam does in one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import deepspeed
from shardwise.core.optim.muon import MuonWithAuxAdam
from shardwise.testing import PlainRecipe, assert_close, train_plain
from tests.support.ds_setup import close, ds_config, optimizer_block, start
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

RANKS, STEPS, PASSES = 2, 4, 2
RATES = {"muon_lr": 0.05, "adam_lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(11, 6)
        self.wide, self.tall, self.norm = nn.Linear(6, 15), nn.Linear(15, 4, bias=False), nn.LayerNorm(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.lm_head = nn.Linear(4, 11)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.tall(torch.tanh(self.wide(self.embed(x)))))
        return nn.functional.cross_entropy(self.lm_head(self.frozen(hidden)), (x + 1) % 11)


def batch(step: int, micro: int, rank: int) -> Tensor:
    return torch.randint(11, (7,), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens)


def plain(method: str, matrices: list[str]) -> dict[str, Tensor]:
    def optimizer_of(model: nn.Module) -> MuonWithAuxAdam:
        named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        held, others = ([p for name, p in named.items() if (name in matrices) == own] for own in (True, False))
        muon = {"params": held, "use_muon": True, "lr": 0.05, "momentum": 0.9, "ns_method": method, "weight_decay": 0.1}
        return MuonWithAuxAdam([muon, {"params": others, "use_muon": False, "lr": 0.02, "weight_decay": 0.1}])

    ranks, micros = range(RANKS), range(PASSES)
    batches = [[[batch(step, micro, rank) for rank in ranks] for micro in micros] for step in range(STEPS)]
    return train_plain(Net, loss_of, optimizer_of, batches, PlainRecipe(mean_over_micro_batches=True)).masters[-1]


METHODS = ("gram", "standard")
QUICK = [(1, "gram"), (2, "gram"), (3, "standard")]


@on_ranks(RANKS)
@pytest.mark.parametrize(
    ("stage", "method"),
    [*QUICK, *full(*((stage, how) for stage in range(4) for how in METHODS if (stage, how) not in QUICK))],
)
def test_muon_equals_one_process(stage: int, method: str, tmp_path: Path) -> None:
    mark = stage == 2
    matrices = ["wide.weight", *(["lm_head.weight"] if mark else ["tall.weight"])]
    muon = optimizer_block("Muon", ns_method=method, **RATES)
    config = ds_config(stage, 7, gradient_accumulation_steps=PASSES, optimizer=muon)

    def started() -> deepspeed.DeepSpeedEngine:
        model = Net()
        if mark:
            model.tall.weight.use_muon, model.lm_head.weight.use_muon = False, True  # type: ignore[assignment]
        return start(model, config)

    engine = started()
    for step in range(STEPS):
        if step == 2:  # resume the second half from a checkpoint
            engine.save_checkpoint(str(tmp_path))
            engine.destroy()
            engine = started()
            assert engine.load_checkpoint(str(tmp_path))[0]
        for micro in range(PASSES):
            engine.backward(engine(batch(step, micro, dist.get_rank())))
            engine.step()
    groups = [(group["name"], group["use_muon"]) for group in engine.optimizer.param_groups]
    assert groups == [("muon-params", True), ("adam-params", False)]
    marked = [name for name, param in engine.module.named_parameters() if param.use_muon and param.requires_grad]
    assert sorted(marked) == sorted(matrices)
    assert_close(close(engine), plain(method, matrices), 1e-5 if method == "gram" else 2e-2, f"stage {stage}, {method}")


def test_invalid_muon_parameters_are_refused() -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "muon", "params": {"lr": 0.1}}}
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="has a group with weight_decay, and Muon makes groups of its own"):
        groups = [{"params": model.parameters(), "weight_decay": 0.0}]
        deepspeed.initialize(model=model, model_parameters=groups, config=config)
    with pytest.raises(ValueError, match=r"parameters of shapes \[\(2,\)\] that have no mark"):
        deepspeed.initialize(model=model, model_parameters=[nn.Parameter(torch.zeros(2))], config=config)
    model.bias.use_muon = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"use_muon=True for parameters of shapes \[\(3,\)\]: give False"):
        deepspeed.initialize(model=model, config=config)


def test_note_says_that_gradients_are_clipped_before_muon() -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "Muon"}, "gradient_clipping": 0.5}
    assert any("gradients are clipped before Muon" in each for each in deepspeed.to_plan(config, 1)[1].notes)
    config["gradient_clipping"] = 0.0
    assert not any("Muon" in each for each in deepspeed.to_plan(config, 1)[1].notes)
