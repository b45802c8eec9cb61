"""Fabric's strategies: programs as Fabric's documentation writes them, against plain PyTorch in one process."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.strategies.namespace import FABRIC, LIGHTNING, LIGHTNING_FABRIC, Namespace
from shardwise.testing import run_ranks
from tests.support.lightning_setup import HIDDEN, OUT, WIDTH, close, data, fabric, toy, trainer
from tests.support.sets import full

SMALL = {"reduce_bucket_size": 100, "allgather_bucket_size": 100}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "colossalai": ("ColossalAIStrategy", {"chunk_size": 100}),
    "deepspeed_1": ("DeepSpeedStrategy", {"stage": 1, **SMALL}),
    "deepspeed_3_offload": ("DeepSpeedStrategy", {"stage": 3, "offload_optimizer": True, "offload_parameters": True}),
    "fully_sharded": ("DDPFullyShardedStrategy", {}),
}
NAMED = ("colossalai", "shardwise_deepspeed_stage_2", "ddp_fully_sharded")
EXACT = 1e-11


def strategy(kind: str, ns: Namespace = FABRIC, **changes: Any) -> Any:
    import shardwise.fabric
    import shardwise.lightning_fabric

    package = shardwise.fabric if ns == FABRIC else shardwise.lightning_fabric
    name, arguments = KINDS[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(package, name)(**{**arguments, **changes})


def net(seed: int = 3, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT)
    ).to(dtype)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1, eps=1e-3)


def batches(rank: int, count: int = 6, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    made = [torch.randn(4, WIDTH + OUT, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]
    return [(each[:, :WIDTH], each[:, WIDTH:]) for each in made]


def error(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def plain(steps: int = 3, clip: str | None = None, optimizers: Callable[[nn.Module], list[Any]] | None = None) -> Any:
    """Two batches a step from every rank, a schedule; the model, the optimizers and the last norm."""
    model = net()
    made = optimizers(model) if optimizers is not None else [adam(model.parameters())]
    schedule = torch.optim.lr_scheduler.StepLR(made[0], 2, gamma=0.5)
    ranks = dist.get_world_size()
    each = [batches(rank) for rank in range(ranks)]
    norm = torch.tensor(0.0)
    for step in range(steps):
        model.zero_grad()
        for rank in range(ranks):
            for micro in (0, 1):
                (error(model, each[rank][2 * step + micro]) / (2 * ranks)).backward()
        if clip == "norm":
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        elif clip == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        for optimizer in made:
            optimizer.step()
        schedule.step()
    return model, made, norm


def train(own: Any, model: Any, made: list[Any], schedule: Any, steps: range, clip: str | None = None) -> Any:
    """The same program under Fabric."""
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
    """``fabric.setup(model, optimizer)``, accumulation, clipping, a schedule; states as plain torch has them."""
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


def apart(kind: str) -> None:
    """``init_module``, ``setup_module`` (used for evaluation first), two optimizers by ``setup_optimizers``."""
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


def saved(directory: str) -> None:
    """A directory of one strategy goes on under the others, under a Trainer, and in shardwise.shard."""
    kinds = list(KINDS)
    expected, _, _ = plain(3)
    root = Path(directory)
    for kind, other in zip(kinds, (*kinds[1:], kinds[0]), strict=True):
        path = root / kind
        for name, steps in ((kind, range(2)), (other, range(2, 3))):
            own = fabric(strategy(name), FABRIC)
            model = net(seed=3 if name == kind else 4)
            optimizer = adam(model.parameters())
            model, optimizer = own.setup(model, optimizer)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            state = {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": 0}
            if name == other:
                with pytest.raises(ValueError, match="the state asks for missing, which"):
                    own.load(path, {**state, "missing": 1})
                rest = own.load(path, state)
                assert (rest, state["epoch"]) == ({"note": b"\x00\xff"}, 7)
            train(own, model, [optimizer], schedule, steps)
            if name == kind:
                own.save(path, {**state, "epoch": 7, "note": b"\x00\xff"})
                own.save(root / f"{kind}.alone", {"model": model})
            else:
                same(model.state_dict(), expected)
                own.load_raw(root / f"{kind}.alone", model)
                same(model.state_dict(), plain(2)[0])
            own.strategy.unshard()
    module = net(seed=5)
    session = shardwise.shard(module, adam(module.parameters()), stage=3)
    session.checkpoints.load(root / kinds[0])
    same(session.module.state_dict(), plain(2)[0])
    session.close()


def with_trainer(directory: str) -> None:
    """A Trainer goes on from what Fabric saved (weights and optimizer), and Fabric from what a Trainer saved."""
    import shardwise.lightning

    own = fabric(strategy("fully_sharded"), FABRIC)
    model = toy()
    model, optimizer = own.setup(model, model.make_optimizer())
    own.backward(model(torch.ones(2, WIDTH)).sum())
    optimizer.step()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    own.save(Path(directory) / "fabric", {"model": model, "optimizer": optimizer, "epoch": 3})
    own.strategy.unshard()
    made = trainer(shardwise.lightning.DeepSpeedStrategy(stage=3), max_epochs=1, limit_train_batches=0)
    other = toy(seed=8)
    made.test(other, data(2), ckpt_path=str(Path(directory) / "fabric"), verbose=False)
    found = made.strategy.lightning_module_state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    made.fit(other, data(2), ckpt_path=str(Path(directory) / "fabric"))
    made.save_checkpoint(str(Path(directory) / "trainer"))
    found = {name: value.clone() for name, value in made.strategy.lightning_module_state_dict().items()}
    close(made)
    own = fabric(strategy("colossalai"), FABRIC)
    model = toy(seed=9)
    model, optimizer = own.setup(model, model.make_optimizer())
    rest = own.load(Path(directory) / "trainer", {"model": model, "optimizer": optimizer})
    assert rest["epoch"] == 0 and rest["pytorch-lightning_version"] == LIGHTNING.version
    assert all(torch.equal(model.state_dict()[name], value) for name, value in found.items())
    own.strategy.unshard()


def formats() -> None:
    """Precisions: dtypes inside, outputs in the default dtype, fp32 masters, a loss scale; and what is refused."""
    rank = dist.get_rank()
    for kind, precision, dtype, masters in (
        ("fully_sharded", "bf16-mixed", torch.bfloat16, True),
        ("colossalai", "bf16-true", torch.bfloat16, False),
        ("deepspeed_1", "64-true", torch.float64, False),
        ("deepspeed_3_offload", "16-true", torch.float16, True),
    ):
        own = fabric(strategy(kind), FABRIC, precision=precision)
        with own.init_tensor():
            assert torch.ones(1).dtype is (dtype if precision.endswith("true") else torch.float32)
        model = net(dtype=torch.float32)
        model, optimizer = own.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        seen: list[torch.dtype] = []
        model.module[1].register_forward_hook(lambda _m, _i, output, seen=seen: seen.append(output.dtype))
        output = model(batches(rank, dtype=torch.float32)[0][0])
        assert (seen, output.dtype) == ([dtype], torch.float32)
        own.backward(output.square().mean())
        optimizer.step()
        state = model.state_dict()["0.weight"]
        assert state.dtype is (torch.float32 if masters else dtype)
        moved = state.float() - net(dtype=torch.float32)[0].weight.detach()
        assert 0 < float(moved.abs().max()) < 0.1
        own.strategy.unshard()
    given = strategy("fully_sharded").ns.load("plugins.precision.precision.Precision")
    own_class = type("Mine", (given,), {})
    with pytest.raises(TypeError, match="precision plugin Mine: sharded strategies cast and scale by themselves"):
        strategy("fully_sharded", precision=own_class())


def two_models() -> None:
    """A generator and a discriminator as Fabric's examples train them, each with its optimizer."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def generator() -> nn.Module:
        return net(11)

    def judge() -> nn.Module:
        torch.manual_seed(12)
        return nn.Sequential(nn.Linear(OUT, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def step(make: Any, judges: Any, opt_make: Any, opt_judge: Any, backward: Any, ranks: list[int], at: int) -> None:
        for which in range(2):
            opt_make.zero_grad()
            opt_judge.zero_grad()
            for each in ranks:
                fake = make(batches(each)[at][0])
                if which == 0:  # the judge learns
                    loss = judges(batches(each)[at][1]).sigmoid().mean() - judges(fake.detach()).sigmoid().mean()
                else:
                    loss = judges(fake).sigmoid().mean()
                backward(loss / len(ranks))
            (opt_judge if which == 0 else opt_make).step()

    first, second = generator(), judge()
    made = adam(first.parameters()), adam(second.parameters())
    for at in range(3):
        step(first, second, *made, lambda loss: loss.backward(), list(range(ranks)), at)
    own = fabric("shardwise_deepspeed_stage_3", FABRIC)
    make, judges = generator(), judge()
    make, opt_make = own.setup(make, adam(make.parameters()))
    judges, opt_judge = own.setup(judges, adam(judges.parameters()))
    for at in range(3):
        step(make, judges, opt_make, opt_judge, own.backward, [rank], at)
    same(make.state_dict(), first)
    same(judges.state_dict(), second)
    with pytest.raises(ValueError, match=r"save\('x'\) with 2 models that were set up \(a, b\)"):
        own.save("x", {"a": make, "b": judges})
    with pytest.raises(ValueError, match=r"state\['o'\] is an optimizer of another model"):
        own.save("x", {"a": make, "o": opt_judge})
    own.strategy.unshard()


def around(directory: str) -> None:
    """Loaders, collectives, single files, raw files, closures, methods by other names, and calls that cannot go."""
    import shardwise.fabric  # noqa: F401  registers the names of its strategies

    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name in NAMED:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert type(fabric(name, FABRIC).strategy).__module__ == "shardwise.fabric"
    own = fabric(strategy("fully_sharded"), FABRIC)
    assert (
        type(pickle.loads(pickle.dumps(strategy("colossalai")))).__module__ == "shardwise.fabric"
    )  # start_method="spawn"
    loader = own.setup_dataloaders(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))
    seen = own.all_gather(torch.cat([batch for (batch,) in loader]))
    assert sorted(seen.flatten().tolist()) == list(range(8))
    assert float(own.all_reduce(torch.tensor(float(rank)), reduce_op="sum")) == sum(range(ranks))
    assert own.broadcast(rank) == 0
    own.barrier()
    model = net()
    with pytest.raises(ValueError, match="LBFGS"):
        own.setup(model, torch.optim.LBFGS(model.parameters()))
    model, optimizer = own.setup(model, adam(model.parameters()))
    optimizer.max_norm = 3.0  # set on Fabric's wrapper, which shares attributes with the sharded optimizer
    assert optimizer.optimizer.max_norm == 3.0
    optimizer.max_norm = 0.0
    # A file of plain torch, of a model and of an optimizer.
    expected, made, _ = plain(2)
    path = Path(directory)
    if rank == 0:
        torch.save(expected.state_dict(), path / "model.pt")
        torch.save(made[0].state_dict(), path / "optimizer.pt")
    own.barrier()
    own.load_raw(path / "model.pt", model)
    own.load_raw(path / "optimizer.pt", optimizer)
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
        own.save(path / "x", {"model": model}, filter={"model": lambda name, _value: "bias" not in name})
    with pytest.raises(ValueError, match="with 0 models that were set up"):
        own.load(directory)
    with pytest.raises(ValueError, match="a directory has optimizers with their model"):
        own.load_raw(directory, optimizer)
    with pytest.raises(ValueError, match="SGD has parameters of 0 models that were set up"):
        own.setup_optimizers(torch.optim.SGD(net().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="A model should be passed only once"):
        own.setup(model)
    own.strategy.unshard()


def of_deepspeed(directory: str) -> None:
    """Whole, in one file, through a plugin; and what a configuration of DeepSpeed says that Fabric does not do."""
    path = Path(directory)
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
        with pytest.raises(Exception, match=message):
            strategy("deepspeed_1", config=config)
    of_config = strategy("deepspeed_1", config={"zero_optimization": {"stage": 1}, "gradient_clipping": 5.0})
    of_config.config["gradient_clipping"] = 0.1  # Fabric's own hands that object to DeepSpeed
    own = fabric(of_config, FABRIC)
    model = net()
    model, optimizer = own.setup(model, adam(model.parameters()))
    with pytest.raises(Exception, match=re.escape("clip_gradients(max_norm=1.0) and gradient_clipping=0.1")):
        own.clip_gradients(model, optimizer, max_norm=1.0)
    assert of_config.session.plan.grad.max_norm == 0.1
    of_config.config["gradient_accumulation_steps"] = 2
    model = net()
    with pytest.raises(Exception, match="under Fabric the program counts"):
        own.setup(model, adam(model.parameters()))
    own.strategy.unshard()


CLIPS = (None, "norm", "value")
ONCE = dict(zip(KINDS, (*CLIPS, "norm"), strict=True))
"""Each strategy with one way of clipping, each way at least once."""


def each_once() -> None:
    for kind, clip in ONCE.items():
        joint(kind, FABRIC, clip)
    two_models()


def the_rest() -> None:
    for kind in KINDS:
        for clip in CLIPS:
            if clip != ONCE[kind]:
                joint(kind, FABRIC, clip)
        apart(kind)
    joint("fully_sharded", LIGHTNING_FABRIC, None)


@pytest.mark.parametrize(("ranks", "part"), [(2, each_once), *full((2, the_rest), (1, each_once), (1, the_rest))])
def test_programs_equal_plain_pytorch(ranks: int, part: Callable[[], None]) -> None:
    """Weights, optimizer state and norms within 1e-11 of one process, on each engine plan, in both packages."""
    run_ranks(ranks, part)


@pytest.mark.full
def test_number_formats() -> None:
    """16 and 64 bits; a precision plugin that would be lost is refused."""
    run_ranks(2, formats)


@pytest.mark.parametrize("part", [*full(saved), with_trainer])
def test_checkpoints_go_between_strategies(part: Callable[[str], None], tmp_path: Path) -> None:
    """Fabric's to Fabric's others, to a Trainer, to ``shardwise.shard``, and a Trainer's to Fabric."""
    run_ranks(2, part, str(tmp_path))


def test_what_else_programs_do(tmp_path: Path) -> None:
    """Names, loaders, collectives, raw and single files, closures; what cannot go is refused with what to do."""
    run_ranks(2, around, str(tmp_path))


@pytest.mark.full
def test_configurations_of_deepspeed(tmp_path: Path) -> None:
    run_ranks(2, of_deepspeed, str(tmp_path))
