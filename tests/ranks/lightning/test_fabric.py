"""Fabric's strategies: programs from Fabric's documentation, compared with plain PyTorch in one process."""

import pickle
import re
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_cases import SMALL, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise.fabric
import shardwise.lightning
import shardwise.lightning_fabric
from shardwise.core.checkpoint.formats import open_checkpoint
from shardwise.strategies.lightning_packages import FABRIC, LIGHTNING, LIGHTNING_FABRIC, Namespace
from tests.support.lightning_setup import OUT, WIDTH, close, data, fabric, toy, trainer, weights, worst
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "colossalai": ("ColossalAIStrategy", {"chunk_size": 100}),
    "deepspeed_1": ("DeepSpeedStrategy", {"stage": 1, **SMALL}),
    "deepspeed_3_offload": ("DeepSpeedStrategy", {"stage": 3, "offload_optimizer": True, "offload_parameters": True}),
    "fully_sharded": ("DDPFullyShardedStrategy", {}),
}
NAMED = ("colossalai", "shardwise_deepspeed_stage_2", "ddp_fully_sharded")
EXACT = 1e-11


def strategy(kind: str, ns: Namespace = FABRIC, **changes: Any) -> Any:
    package = shardwise.fabric if ns == FABRIC else shardwise.lightning_fabric
    name, arguments = KINDS[kind]
    with warnings.catch_warnings(action="ignore"):
        return getattr(package, name)(**{**arguments, **changes})


def net(seed: int = 3, dtype: torch.dtype = torch.float64) -> nn.Module:
    return toy(seed=seed).net.to(dtype)  # type: ignore[no-any-return]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1, eps=1e-3)


def batches(rank: int, count: int = 6, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    made = [torch.randn(4, WIDTH + OUT, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]
    return [(each[:, :WIDTH], each[:, WIDTH:]) for each in made]


def error(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def plain(steps: int = 3, clip: str | None = None, optimizers: Callable[[nn.Module], list[Any]] | None = None) -> Any:
    """Train two batches per step from every rank, with a schedule; return the model, the optimizers and the last
    norm."""
    model = net()
    made = optimizers(model) if optimizers is not None else [adam(model.parameters())]
    schedule = torch.optim.lr_scheduler.StepLR(made[0], 2, gamma=0.5)
    ranks = dist.get_world_size()
    norm = torch.tensor(0.0)
    for step in range(steps):
        model.zero_grad()
        for rank in range(ranks):
            for micro in (0, 1):
                (error(model, batches(rank)[2 * step + micro]) / (2 * ranks)).backward()
        if clip == "norm":
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        elif clip == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        for optimizer in made:
            optimizer.step()
        schedule.step()
    return model, made, norm


def train(own: Any, model: Any, made: list[Any], schedule: Any, steps: range, clip: str | None = None) -> Any:
    """Train the same program under Fabric."""
    norm, mine = torch.tensor(0.0), batches(dist.get_rank())
    for step in steps:
        for optimizer in made:
            optimizer.zero_grad()
        for micro in (0, 1):
            with own.no_backward_sync(model, enabled=micro == 0):
                own.backward(error(model, mine[2 * step + micro]) / 2)
        if clip == "norm":
            norm = own.clip_gradients(model, made[0], max_norm=0.05)
        elif clip == "value":
            own.clip_gradients(model, made[0], clip_val=0.01)
        for optimizer in made:
            optimizer.step()
        schedule.step()
    return norm


def same(state: dict[str, Tensor], model: nn.Module, most: float = EXACT) -> None:
    expected = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert float((value - expected[name]).abs().max()) <= most, name


def joint(kind: str, ns: Namespace, clip: str | None) -> None:
    """Use ``fabric.setup(model, optimizer)`` with accumulation, clipping and a schedule; states equal plain torch's."""
    expected, optimizers, norm = plain(3, clip)
    own = fabric(strategy(kind, ns), ns)
    model = net()
    optimizer = adam(model.parameters())
    model, optimizer = own.setup(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    found = train(own, model, [optimizer], schedule, range(3), clip)
    same(model.state_dict(), expected)
    assert float((found - norm).abs()) <= EXACT
    state, there = optimizer.state_dict(), optimizers[0].state_dict()
    assert state["param_groups"][0]["lr"] == there["param_groups"][0]["lr"] == 0.025
    for index, entries in there["state"].items():
        assert float((state["state"][index]["exp_avg"] - entries["exp_avg"]).abs().max()) <= EXACT
    own.strategy.unshard()


def split(model: nn.Module) -> list[Any]:
    first, second = list(model[0].parameters()), [p for m in list(model)[1:] for p in m.parameters()]  # type: ignore[index, call-overload]
    return [adam(first), torch.optim.SGD(second, lr=0.1, momentum=0.9)]


@on_ranks()
@pytest.mark.parametrize(("ranks", "kind"), full(*product((2, 1), KINDS)))
def test_modules_and_optimizers_set_up_separately(ranks: int, kind: str) -> None:
    """``init_module``, ``setup_module`` (used for evaluation first), and two optimizers by ``setup_optimizers``."""
    expected, _, _ = plain(3, None, split)
    own = fabric(strategy(kind), FABRIC)
    with own.init_module():
        model = net()
    given = model
    model = own.setup_module(model)
    with torch.no_grad():
        before = model(batches(0)[0][0])
    assert float((before.detach() - net()(batches(0)[0][0])).abs().max()) <= EXACT
    made = own.setup_optimizers(*split(given))
    schedule = torch.optim.lr_scheduler.StepLR(made[0], 2, gamma=0.5)
    train(own, model, list(made), schedule, range(3))
    same(model.state_dict(), expected)
    with pytest.raises(RuntimeError, match=r"SGD was added after the first use of the Sequential.*has 2 optimizers"):
        own.setup_optimizers(torch.optim.SGD(given.parameters(), lr=0.1))
    own.strategy.unshard()
    same(given.state_dict(), expected)


@on_ranks(2)
@pytest.mark.full
def test_checkpoints_load_under_other_strategies(tmp_path: Path) -> None:
    """A directory of one strategy is resumed under the others, and by ``shardwise.shard``."""
    kinds = list(KINDS)
    expected, _, _ = plain(3)
    for kind, other in zip(kinds, (*kinds[1:], kinds[0]), strict=True):
        path = tmp_path / kind
        for name, steps in ((kind, range(2)), (other, range(2, 3))):
            own = fabric(strategy(name), FABRIC)
            model = net(seed=3 if name == kind else 4)
            model, optimizer = own.setup(model, adam(model.parameters()))
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            state = {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": 0}
            if name == other:
                raises(ValueError, "the state asks for missing, which", own.load, path, {**state, "missing": 1})
                assert own.load(path, state) == {"note": b"\x00\xff"} and state["epoch"] == 7
            train(own, model, [optimizer], schedule, steps)
            if name == kind:
                own.save(path, {**state, "epoch": 7, "note": b"\x00\xff"})
                own.save(tmp_path / f"{kind}.alone", {"model": model})
            else:
                same(model.state_dict(), expected)
                own.load_raw(tmp_path / f"{kind}.alone", model)
                same(model.state_dict(), plain(2)[0])
            own.strategy.unshard()
    module = net(seed=5)
    session = shardwise.shard(module, adam(module.parameters()), stage=3)
    session.checkpoints.load(tmp_path / kinds[0])
    same(session.module.state_dict(), plain(2)[0])
    session.close()


@on_ranks(2)
def test_checkpoints_load_in_a_trainer_and_back(tmp_path: Path) -> None:
    """A Trainer resumes what Fabric saved (weights and optimizer), and Fabric resumes what a Trainer saved."""
    own = fabric(strategy("fully_sharded"), FABRIC)
    model = toy()
    model, optimizer = own.setup(model, model.make_optimizer())
    own.backward(model(torch.ones(2, WIDTH)).sum())
    optimizer.step()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    own.save(tmp_path / "fabric", {"model": model, "optimizer": optimizer, "epoch": 3})
    own.strategy.unshard()
    made = trainer(shardwise.lightning.DeepSpeedStrategy(stage=3), max_epochs=1, limit_train_batches=0)
    other = toy(seed=8)
    made.test(other, data(2), ckpt_path=tmp_path / "fabric", verbose=False)
    assert worst(weights(made), saved) == 0.0
    made.fit(other, data(2), ckpt_path=tmp_path / "fabric")
    made.save_checkpoint(tmp_path / "trainer")
    found = weights(made)
    close(made)
    own = fabric(strategy("colossalai"), FABRIC)
    model = toy(seed=9)
    model, optimizer = own.setup(model, model.make_optimizer())
    rest = own.load(tmp_path / "trainer", {"model": model, "optimizer": optimizer})
    assert rest["epoch"] == 0 and rest["pytorch-lightning_version"] == LIGHTNING.version
    assert worst(dict(model.state_dict()), found) == 0.0
    own.strategy.unshard()


@on_ranks(2)
@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "precision", "dtype", "masters"),
    [
        ("fully_sharded", "bf16-mixed", torch.bfloat16, True),
        ("colossalai", "bf16-true", torch.bfloat16, False),
        ("deepspeed_1", "64-true", torch.float64, False),
        ("deepspeed_3_offload", "16-true", torch.float16, True),
    ],
)
def test_precision(kind: str, precision: str, dtype: torch.dtype, masters: bool, tmp_path: Path) -> None:
    """Dtypes inside the model, outputs in the default dtype, fp32 masters, a loss scale."""
    own = fabric(strategy(kind), FABRIC, precision=precision)
    with own.init_tensor():
        assert torch.ones(1).dtype is (dtype if precision.endswith("true") else torch.float32)
    model = net(dtype=torch.float32)
    model, optimizer = own.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[torch.dtype] = []
    model.module[1].register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
    output = model(batches(dist.get_rank(), dtype=torch.float32)[0][0])
    assert (seen, output.dtype) == ([dtype], torch.float32)
    own.backward(output.square().mean())
    optimizer.step()
    state = model.state_dict()["0.weight"]
    own.save(tmp_path / "model", {"model": model})
    with open_checkpoint(tmp_path / "model") as source:
        assert torch.equal(source.read("model/0.weight", 0, state.numel()).view(state.shape), state), "unrounded"
    assert state.dtype is (torch.float32 if masters else dtype)
    moved = state.float() - net(dtype=torch.float32)[0].weight.detach()  # type: ignore[index]
    assert 0 < float(moved.abs().max()) < 0.1
    own.strategy.unshard()


def judge() -> nn.Module:
    torch.manual_seed(12)
    return nn.Sequential(nn.Linear(OUT, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def compete(make: Any, judges: Any, opt_make: Any, opt_judge: Any, backward: Any, ranks: list[int]) -> None:
    """Train each network for three steps: in each, the discriminator first."""
    for at in range(3):
        for learning in (opt_judge, opt_make):
            opt_make.zero_grad()
            opt_judge.zero_grad()
            for each in ranks:
                fake = make(batches(each)[at][0])
                if learning is opt_judge:
                    loss = judges(batches(each)[at][1]).sigmoid().mean() - judges(fake.detach()).sigmoid().mean()
                else:
                    loss = judges(fake).sigmoid().mean()
                backward(loss / len(ranks))
            learning.step()


@on_ranks()
@pytest.mark.parametrize("ranks", [2, *full(1)])
def test_two_models(ranks: int) -> None:
    """A generator and a discriminator, each with its optimizer, trained as in Fabric's examples."""
    first, second = net(11), judge()
    optimizers = adam(first.parameters()), adam(second.parameters())
    compete(first, second, *optimizers, torch.Tensor.backward, list(range(dist.get_world_size())))
    own = fabric("shardwise_deepspeed_stage_3", FABRIC)
    make, judges = net(11), judge()
    make, opt_make = own.setup(make, adam(make.parameters()))
    judges, opt_judge = own.setup(judges, adam(judges.parameters()))
    compete(make, judges, opt_make, opt_judge, own.backward, [dist.get_rank()])
    same(make.state_dict(), first)
    same(judges.state_dict(), second)
    raises(ValueError, r"save\('x'\) with 2 models that were set up \(a, b\)", own.save, "x", {"a": make, "b": judges})
    raises(ValueError, r"state\['o'\] is an optimizer of another model", own.save, "x", {"a": make, "o": opt_judge})
    own.strategy.unshard()


@on_ranks(2)
def test_other_uses_of_fabric(tmp_path: Path) -> None:
    """Names, loaders, collectives, raw and single files, closures; unsupported calls raise and name the remedy."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name in NAMED:
        with warnings.catch_warnings(action="ignore"):
            assert type(fabric(name, FABRIC).strategy).__module__ == "shardwise.fabric"
    own = fabric(strategy("fully_sharded"), FABRIC)
    spawned = pickle.loads(pickle.dumps(strategy("colossalai")))  # start_method="spawn"
    assert type(spawned).__module__ == "shardwise.fabric"
    loader = own.setup_dataloaders(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))
    seen = own.all_gather(torch.cat([batch for (batch,) in loader]))
    assert sorted(seen.flatten().tolist()) == list(range(8))
    assert float(own.all_reduce(torch.tensor(float(rank)), reduce_op="sum")) == sum(range(ranks))
    assert own.broadcast(rank) == 0
    own.barrier()
    model = net()
    raises(ValueError, "LBFGS", lambda: own.setup(model, torch.optim.LBFGS(model.parameters())))
    model, optimizer = own.setup(model, adam(model.parameters()))
    optimizer.max_norm = 3.0  # set on Fabric's wrapper, which shares attributes with the sharded optimizer
    assert optimizer.optimizer.max_norm == 3.0
    optimizer.max_norm = 0.0
    # Files of plain torch, of a model and of an optimizer.
    expected, made, _ = plain(2)
    if rank == 0:
        torch.save(expected.state_dict(), tmp_path / "model.pt")
        torch.save(made[0].state_dict(), tmp_path / "optimizer.pt")
    own.barrier()
    own.load_raw(tmp_path / "model.pt", model)
    own.load_raw(tmp_path / "optimizer.pt", optimizer)
    same(model.state_dict(), expected)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = error(model, batches(rank)[4])
        own.backward(loss)
        return loss

    off = optimizer.step(closure).detach() - error(expected, batches(rank)[4]).detach()
    assert abs(float(off)) <= EXACT
    expected.zero_grad()
    for each in range(ranks):
        (error(expected, batches(each)[4]) / ranks).backward()
    made[0].step()
    same(model.state_dict(), expected)
    with pytest.raises(TypeError, match=r"save\(filter=.*give the strategy a checkpoint_io"):
        own.save(tmp_path / "x", {"model": model}, filter={"model": lambda name, _value: "bias" not in name})
    raises(ValueError, "with 0 models that were set up", lambda: own.load(tmp_path))
    raises(ValueError, "a directory has optimizers with their model", lambda: own.load_raw(tmp_path, optimizer))
    with pytest.raises(ValueError, match="SGD has parameters of 0 models that were set up"):
        own.setup_optimizers(torch.optim.SGD(net().parameters(), lr=0.1))
    raises(ValueError, "A model should be passed only once", lambda: own.setup(model))
    own.strategy.unshard()


JOINT = list(product((2, 1), (FABRIC,), KINDS, (None, "norm", "value")))
QUICK = [JOINT[at] for at in (0, 4, 8, 10)]
"""Each strategy with one way of clipping, each way at least once."""


@on_ranks()
@pytest.mark.parametrize(
    ("ranks", "ns", "kind", "clip"), [*rows(JOINT, QUICK, JOINT), *full((2, LIGHTNING_FABRIC, "fully_sharded", None))]
)
def test_programs_equal_plain_pytorch(ranks: int, ns: Namespace, kind: str, clip: str | None) -> None:
    """Weights, optimizer state and norms are within 1e-11 of one process, on each engine plan, in both packages."""
    joint(kind, ns, clip)


@on_ranks(2)
@pytest.mark.full
def test_deepspeed_strategy_options(tmp_path: Path) -> None:
    """A full checkpoint in one file by a ``checkpoint_io``; configurations of DeepSpeed that Fabric refuses."""
    path = tmp_path
    io = FABRIC.load("plugins.io.torch_io.TorchCheckpointIO")
    own = fabric(strategy("deepspeed_1", checkpoint_io=type("Mine", (io,), {})()), FABRIC)
    model = net()
    model, optimizer = own.setup(model, adam(model.parameters()))
    own.save(path / "one.ckpt", {"model": model, "optimizer": optimizer, "epoch": 2})
    found = torch.load(path / "one.ckpt", weights_only=True)
    same(found["model"], net())
    assert found["epoch"] == 2 and own.load(path / "one.ckpt", {"model": model})["epoch"] == 2
    own.strategy.unshard()
    for config, message in (
        ({"gradient_accumulation_steps": 2}, "under Fabric the program counts"),
        ({"optimizer": {"type": "Adam"}}, "under Fabric the program makes it"),
    ):
        raises(Exception, message, strategy, "deepspeed_1", config=config)
    of_config = strategy("deepspeed_1", config={"zero_optimization": {"stage": 1}, "gradient_clipping": 5.0})
    of_config.config["gradient_clipping"] = 0.1  # Fabric's own strategy passes that object to DeepSpeed
    own = fabric(of_config, FABRIC)
    model = net()
    model, optimizer = own.setup(model, adam(model.parameters()))
    with pytest.raises(Exception, match=re.escape("clip_gradients(max_norm=1.0) and gradient_clipping=0.1")):
        own.clip_gradients(model, optimizer, max_norm=1.0)
    assert of_config.session.plan.grad.max_norm == 0.1
    of_config.config["gradient_accumulation_steps"] = 2
    model = net()
    raises(Exception, "under Fabric the program counts", lambda: own.setup(model, adam(model.parameters())))
    own.strategy.unshard()
