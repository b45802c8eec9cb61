"""Tests of saved state in one process.

- Optimizer state with shapes other than the parameter's: offloaded, reloaded, and read by parameter.
- State that modules add to their ``state_dict``.
- Lists, tuples and dicts in optimizer state: ``flat`` and ``nested`` are inverses, ``misfits`` names other values.
- Which optimizer and scheduler classes may load each other's state.
- ``AbsentTensor``: every read raises an error that says why this rank does not have the value.
- ``AsyncSaver``: a failed save is reported when the program ends.
"""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.utils.dlpack
from torch import nn
from torch.optim import lr_scheduler as schedules

import shardwise
from shardwise.booster import Booster
from shardwise.core.checkpoint import Checkpointer, SavedScheduler, TorchRun
from shardwise.core.checkpoint.formats import open_checkpoint, write_dcp
from shardwise.core.checks.state_dict_guard import AbsentTensor
from shardwise.core.optim import CPUAdam, FusedAdam, HybridAdam
from shardwise.core.optim.nested_state import flat, mapped, misfits, nested, outline, tensors_of
from shardwise.nn.lr_scheduler import CosineAnnealingWarmupLR
from shardwise.nn.optimizer import Lamb
from shardwise.plan import zero
from shardwise.session import build
from shardwise.testing import assert_close
from tests.support.engine_setup import OwnOptimizer
from tests.support.on_ranks import raises
from tests.support.program_setup import forked_python, python
from tests.support.sets import campaign, full


def trained(make: Any, away_before: int | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    session = shardwise.shard(model, make(model.parameters()), plan=zero(2, torch.bfloat16))
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        if step == away_before:
            session.offload_states()
            session.reload_states()
        session.backward(session.module(x).float().square().mean())
        session.optimizer.step()
    found = dict(session.module.state_dict())
    session.close()
    return found


@pytest.mark.parametrize("make", [Lamb, torch.optim.Adafactor])
def test_offloaded_state_has_its_shape_after_reload(make: Any) -> None:
    straight = trained(make, None)
    for step in (0, 1):
        assert_close(trained(make, step), straight, 0.0, f"moved before step {step}")


@pytest.mark.parametrize(("make", "matrix"), [(Lamb, True), (torch.optim.Adafactor, False)])
def test_optimizer_state_of_one_parameter(make: Any, matrix: bool) -> None:
    model = nn.Linear(6, 8)
    session = shardwise.shard(model, make(model.parameters()), plan=zero(2))
    session.backward(session.module(torch.randn(4, 6)).square().mean())
    session.optimizer.step()
    one = session.one(session.params[0])
    assert one is not None and one.state("step") == 1
    if matrix:
        one.set_state("exp_avg", torch.ones(8, 6))
        assert torch.equal(one.state("exp_avg"), torch.ones(8, 6))  # type: ignore[arg-type]
    else:
        raises(ValueError, r"'row_var' .* another shape than the parameter", lambda: one.state("row_var"))
    session.close()


class Metric(nn.Module):
    """A metric whose ``state_dict`` has copies of a tensor, a list, a number, and two values that belong together."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.seen, self.count = torch.tensor(0.0), list[torch.Tensor](), 0
        self.low, self.high = torch.zeros(2), torch.zeros(2)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        found = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name in ("total", "seen", "count", "low", "high"):
            found[prefix + name] = copy.deepcopy(getattr(self, name))
        return found

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "total" in state:
            self.total, self.seen = state.pop(prefix + "total"), state.pop(prefix + "seen")
            self.count, self.low, self.high = (state.pop(prefix + name) for name in ("count", "low", "high"))
        super()._load_from_state_dict(state, prefix, *rest)


class Measured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.metric = nn.Linear(3, 2), Metric()
        self.scale = torch.zeros(2)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = self.scale  # not a buffer, and not loaded by the module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum()


def test_extra_state_of_modules_is_loaded(tmp_path: Path) -> None:
    """The same state is loaded by ``load_state_dict``, from a checkpoint, and in plain torch."""
    model = Measured()
    session = shardwise.shard(model, torch.optim.SGD(model.layer.parameters(), lr=0.1), stage=2)
    given = {"total": torch.tensor(7.0), "seen": [torch.ones(2), torch.ones(3)], "count": 5}
    vars(model.metric).update(given, low=torch.ones(2), high=torch.full((2,), 2.0))
    model.scale.fill_(3.0)
    state = copy.deepcopy(dict(session.module.state_dict()))
    session.checkpoints.save(str(tmp_path))
    session.close()
    ways: dict[str, Callable[[Any, Any], object]] = {
        "state": lambda *it: shardwise.shard(*it, stage=2).module.load_state_dict(state),
        "checkpoint": lambda *it: shardwise.shard(*it, stage=2).checkpoints.load(str(tmp_path)),
        "torch": lambda *it: Checkpointer(TorchRun(*it)).load(str(tmp_path)),
    }
    for way, load in ways.items():
        model = Measured()
        load(model, torch.optim.SGD(model.layer.parameters(), lr=0.1))
        found = model.metric
        assert model.scale.tolist() == [3, 3], way
        assert (found.total.item(), found.count, [each.tolist() for each in found.seen]) == (7, 5, [[1, 1], [1, 1, 1]])
        assert (found.low.tolist(), found.high.tolist()) == ([1, 1], [2, 2])


ONE, TWO, THREE = torch.ones(2, 2), torch.zeros(3), torch.tensor(4.0)
ENTRIES: list[dict[str, Any]] = [
    {},
    {"step": 3, "exp_avg": ONE, "none": None, "name": "x"},
    {"GG": [ONE, [], TWO], "Q": (THREE, 1), "step": 2},
    {"deep": {"a/b": [{3: (ONE, None)}, True, 1.5], "a.b": TWO}, "GG.0": 7},
    {"empty": {}, "also": [], "no tensors": [1, (2, "x")]},
]


def plain(value: Any) -> Any:
    return mapped(value, lambda each: ("tensor", each.tolist()) if isinstance(each, torch.Tensor) else each)


@pytest.mark.parametrize("entry", ENTRIES)
def test_flat_and_nested_are_inverses(entry: dict[str, Any]) -> None:
    made = flat(entry)
    for value in made.values():
        # Values other than tensors are JSON: no tuples, and keys are strings.
        assert isinstance(value, torch.Tensor) or not list(tensors_of(value))
    assert [id(each) for each in tensors_of(made)] == [id(each) for each in tensors_of(entry)]
    again = nested(made)
    assert plain(again) == plain(entry) and list(again) == list(entry)
    assert flat(made) == made  # idempotent
    assert list(outline(made)) == list(outline(entry)) == list(entry)


def test_misfits_have_their_path() -> None:
    assert list(misfits({"a": [ONE, (1, {"b": {1, 2}})]}, "Q")) == ["Q['a'][1][1]['b'] is a set ({1, 2})"]
    assert not list(misfits(ENTRIES, "every"))


Make = Callable[[Any], torch.optim.Optimizer]
O = torch.optim  # noqa: E741


class MyAdamW(O.AdamW):
    """A subclass without changes."""


class SGD(OwnOptimizer):
    """A user's class with the name and the momentum key of torch's SGD."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        held = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        p.sub_(held.mul_(group["momentum"]).add_(p.grad), alpha=group["lr"])


class Int8(OwnOptimizer):
    """8-bit moments under Adam's names."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        kept = {key: torch.zeros_like(p, dtype=torch.uint8) for key in ("exp_avg", "exp_avg_sq")}
        self.state[p].update(kept, step=torch.tensor(1.0))


MAKERS: dict[str, Make] = {
    "adam": lambda p: O.Adam(p, lr=0.01),
    "adamw": lambda p: O.AdamW(p, lr=0.01),
    "amsgrad": lambda p: O.AdamW(p, lr=0.01, amsgrad=True),
    "derived": lambda p: MyAdamW(p, lr=0.01),
    "hybrid": lambda p: HybridAdam(p, lr=0.01),
    "cpu": lambda p: CPUAdam(p, lr=0.01),
    "fused": lambda p: FusedAdam(p, lr=0.01),
    "radam": lambda p: O.RAdam(p, lr=0.01),
    "rmsprop": lambda p: O.RMSprop(p, lr=0.01),
    "centered": lambda p: O.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: O.Adagrad(p, lr=0.01),
    "adadelta": lambda p: O.Adadelta(p, lr=0.01),
    "sgd": lambda p: O.SGD(p, lr=0.01),
    "momentum": lambda p: O.SGD(p, lr=0.01, momentum=0.9),
    "own sgd": lambda p: SGD(p, momentum=0.9),
    "int8": Int8,
}

TAKEN = [
    *(("adam", other) for other in ("adamw", "hybrid", "cpu", "fused", "derived", "amsgrad")),
    *((other, "adamw") for other in ("adam", "amsgrad", "hybrid", "derived")),
    *(("sgd", "momentum"), ("momentum", "sgd"), ("rmsprop", "centered"), ("centered", "rmsprop")),
    *(("momentum", "own sgd"), ("own sgd", "momentum")),
    ("adamw", "radam"),
]
"""(saved optimizer, optimizer that loads its state)"""
REFUSED = [
    *(("adamw", other) for other in ("rmsprop", "adagrad", "momentum", "adadelta", "sgd")),
    *(("rmsprop", "adadelta"), ("adagrad", "adam"), ("momentum", "adam"), ("amsgrad", "hybrid")),
    *(("centered", "momentum"), ("int8", "adamw")),
]
WITH_A_WORD = {("adamw", "radam"), ("derived", "adamw")}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    optimizer.backward(model(torch.ones(2, 3)).square().mean())
    optimizer.step()


def trained_by(kind: str, engine: bool, steps: int = 2) -> tuple[Any, Any, Any]:
    """Return saver, model and optimizer after some steps, with the engine or with the Booster without a plugin."""
    model = net()
    optimizer = MAKERS[kind](model.parameters())
    if engine:
        session = build(model, optimizer, zero(2))
        made = session.checkpoints, session.module, session.optimizer
    else:
        booster = Booster()
        boosted, wrapped, *_ = booster.boost(model, optimizer)
        made = booster._runs.saver(boosted, wrapped), boosted, wrapped
    for _ in range(steps):
        step(made[1], made[2])
    return made


def _both(pairs: Iterable[tuple[str, str]]) -> Iterator[Any]:
    """Yield each pair with the engine and with torch alone; the quick set has them in turn."""
    for number, (saved, here) in enumerate(dict.fromkeys(pairs)):
        for engine, name in ((True, "engine"), (False, "torch")):
            case = pytest.param(saved, here, engine, id=f"{saved}-{here}-{name}".replace(" ", "_"))
            yield case if engine == (number % 2 == 0) else full(case)[0]


@pytest.mark.parametrize(("saved", "here", "engine"), _both(TAKEN))
def test_compatible_optimizer_classes_load_the_state(saved: str, here: str, engine: bool, tmp_path: Path) -> None:
    saver, _, first = trained_by(saved, engine)
    saver.save(tmp_path, "one")
    loader, model, second = trained_by(here, engine, steps=0)
    with warnings.catch_warnings(record=True, action="always") as caught:
        loader.load(tmp_path)
    told = [each for each in caught if "continues with the state of" in str(each.message)]
    assert len(told) == ((saved, here) in WITH_A_WORD)
    expected, found = first.state_dict()["state"], second.state_dict()["state"]
    assert found.keys() == expected.keys()
    for number, entry in expected.items():
        assert all(torch.equal(found[number][key], value) for key, value in entry.items())
    decoupled = [group.get("decoupled_weight_decay") for group in second.param_groups]
    assert decoupled == [group.get("decoupled_weight_decay") for group in MAKERS[here](net().parameters()).param_groups]
    step(model, second)


@pytest.mark.parametrize(("saved", "here", "engine"), _both(REFUSED))
def test_incompatible_optimizer_classes_are_refused(saved: str, here: str, engine: bool, tmp_path: Path) -> None:
    """Native checkpoints, DCP (which records no class) and ``load_state_dict`` refuse it; nothing changes."""
    saver, _, first = trained_by(saved, engine)
    saver.save(tmp_path, "one")
    source = open_checkpoint(tmp_path / "one")
    write_dcp(source, tmp_path / "dcp")
    source.close()
    loader, model, second = trained_by(here, engine)
    before = copy.deepcopy((dict(model.state_dict()), second.state_dict()["state"]))
    theirs, own = (type(MAKERS[kind](net().parameters())).__name__ for kind in (saved, here))
    told = f"optimizer 0 is {own}, but the checkpoint has the state of"
    raises(ValueError, f"{told} {theirs}", loader.load, tmp_path / "one")
    raises(ValueError, f"{told} a class that", loader.load, tmp_path / "dcp")
    raises(ValueError, f"not a state of {own}", second.load_state_dict, first.state_dict())
    assert str((dict(model.state_dict()), second.state_dict()["state"])) == str(before)
    with pytest.warns(UserWarning, match=f"{told} {theirs}.*start without state"):
        loader.load(tmp_path / "one", strict=False)
    step(model, second)
    assert all(float(entry["step"]) == 1 for entry in second.state_dict()["state"].values() if "step" in entry)


@pytest.mark.parametrize("shard", [False, True])
def test_optimizer_files_without_a_model(shard: bool, tmp_path: Path) -> None:
    """Load one optimizer file, and ColossalAI's sharded layout, whose index records the class."""
    booster, model, other, longer = Booster(), net(), net(), nn.Sequential(*net(), nn.Linear(2, 2))
    model, optimizer, *_ = booster.boost(model, O.AdamW(model.parameters(), lr=0.01))
    step(model, optimizer)
    booster.save_optimizer(optimizer, tmp_path / "o", shard=shard)
    other, wrong, *_ = booster.boost(other, O.RMSprop(other.parameters()))
    told = "optimizer 0 is RMSprop, but the checkpoint has the state of AdamW"
    raises(ValueError, told, booster.load_optimizer, wrong, tmp_path / "o")
    longer, fresh, *_ = booster.boost(longer, O.AdamW(longer.parameters(), lr=0.5))
    told = "4 parameters in the checkpoint, 6 in the optimizer"
    raises(ValueError, told, booster.load_optimizer, fresh, tmp_path / "o")
    with pytest.warns(UserWarning, match=r"these parameters start without state: 3\.weight, 3\.bias"):
        booster.load_optimizer(fresh, tmp_path / "o", strict=False)
    assert sorted(fresh.state_dict()["state"]) == [0, 1, 2, 3] and fresh.param_groups[0]["lr"] == 0.01


# ---- schedulers


class MyCosine(schedules.CosineAnnealingLR):
    """A subclass without changes."""


class Own:
    """A scheduler without a base class."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.turns = optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        return {"turns": self.turns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turns = state["turns"]


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 10),
    "derived": lambda o: MyCosine(o, 10),
    "step": lambda o: schedules.StepLR(o, 2),
    "lambda": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "times": lambda o: schedules.MultiplicativeLR(o, lambda epoch: 0.9),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    "plateau": schedules.ReduceLROnPlateau,
    "warm": lambda o: CosineAnnealingWarmupLR(o, 10, 2),
    "own": Own,
}
GO_ON = {("cosine", "derived"), ("derived", "cosine"), *((kind, kind) for kind in SCHEDULES)}


def optimizer_of() -> torch.optim.Optimizer:
    return O.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


@pytest.mark.parametrize("saved", SCHEDULES)
@pytest.mark.parametrize("here", SCHEDULES)
def test_scheduler_state_needs_the_same_class(saved: str, here: str, tmp_path: Path) -> None:
    model, booster = net(), Booster()
    model, optimizer, *_ = booster.boost(model, O.SGD(model.parameters(), lr=0.1))
    one, other = SCHEDULES[saved](optimizer), SCHEDULES[here](optimizer)
    booster.save_lr_scheduler(one, tmp_path / "s.json")
    booster.save_checkpoint(tmp_path / "runs", model, optimizer, one)
    if (saved, here) in GO_ON:
        booster.load_lr_scheduler(other, tmp_path / "s.json")
        booster.load_checkpoint(tmp_path / "runs", model, optimizer, other)
        return
    before = str(other.state_dict())
    words = f"the state is of {type(one).__name__}, the scheduler a {type(other).__name__}"
    raises(ValueError, words, lambda: booster.load_lr_scheduler(other, tmp_path / "s.json"))
    raises(ValueError, words, lambda: booster.load_checkpoint(tmp_path / "runs", model, optimizer, other))
    with pytest.warns(UserWarning, match=f"{words}; it stays as it is"):
        booster.load_checkpoint(tmp_path / "runs", model, optimizer, other, strict=False)
    assert str(other.state_dict()) == before


def test_scheduler_state_without_a_class_is_matched_by_keys() -> None:
    for saved, here in (("cosine", "step"), ("step", "exponential"), ("exponential", "step"), ("own", "cosine")):
        one, other = SCHEDULES[saved](optimizer_of()), SCHEDULES[here](optimizer_of())
        assert SavedScheduler(one.state_dict()).misfit(one) is None
        assert "the state is one with" in str(SavedScheduler(one.state_dict()).misfit(other))
        older = {key: value for key, value in one.state_dict().items() if not key.startswith("_")} | {"verbose": False}
        assert SavedScheduler(older).misfit(one) is None


def test_schedules_follow_reordered_groups(tmp_path: Path) -> None:
    """Groups change their order and one is added: each schedule continues with the rate of its group."""

    def start(order: tuple[int, ...], rates: dict[int, float]) -> tuple[Any, Any, Any]:
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3 if 2 in order else 2)))
        groups = [{"params": list(model[place].parameters()), "lr": rates[place]} for place in order]
        session = build(model, O.SGD(groups, momentum=0.5), zero(2))
        highest = [float(place + 1) for place in order]
        cycle = schedules.CyclicLR(session.optimizer, [0.01 * rate for rate in highest], highest, 4)
        return session, session.optimizer, cycle

    session, optimizer, cycle = start((0, 1), {0: 0.1, 1: 0.2})
    for _ in range(2):
        step(session.module, optimizer)
        cycle.step()
    expected = [group["lr"] for group in optimizer.param_groups]
    session.checkpoints.save(tmp_path, lr_schedulers=[cycle])
    cycle.step()
    later = [group["lr"] for group in optimizer.param_groups]

    session, optimizer, cycle = start((2, 1, 0), {0: 0.7, 1: 0.8, 2: 0.9})
    with pytest.warns(UserWarning, match="these parameters start without state"):
        session.checkpoints.load(tmp_path, strict=False, lr_schedulers=[cycle])
    assert [group["lr"] for group in optimizer.param_groups][:0:-1] == expected
    step(session.module, optimizer)
    cycle.step()
    assert [group["lr"] for group in optimizer.param_groups][:0:-1] == pytest.approx(later)
    assert cycle.max_lrs == [3.0, 2.0, 1.0]


READS: dict[str, Callable[[AbsentTensor], object]] = {
    "an operation": lambda value: value + 1,
    "a copy": copy.deepcopy,
    "pickle": pickle.dumps,
    "numpy": lambda value: value.numpy(),
    "a list": lambda value: value.tolist(),
    "safetensors": lambda value: safetensors.torch.save({"weight": value}),
    "asarray": np.asarray,
    "its storage": lambda value: value.untyped_storage(),
    "from_dlpack": torch.from_dlpack,
    "numpy's from_dlpack": np.from_dlpack,  # type: ignore[dict-item]
}


@pytest.mark.parametrize("read", READS)
def test_reads_of_an_absent_tensor_say_why(read: str) -> None:
    absent = AbsentTensor.of(torch.zeros(3, 4), "another rank has it")
    raises(RuntimeError, "another rank has it", READS[read], absent)
    raises(RuntimeError, "Cannot access data pointer", torch.utils.dlpack.to_dlpack, absent)  # raised in C++


PROGRAM = """
import multiprocessing, sys, time
from shardwise.core.checkpoint.async_save import AsyncSaver

def save(late, lane):
    def write(ranks, copied):
        time.sleep(0.3 * late)
        raise OSError("no space left")
    lane.start(False, lambda image: None, write)

def main(how):
    print(f"-- {how}", file=sys.stderr, flush=True)
    lane = AsyncSaver()
    save(how == "late", lane)
    if how in ("waited for", "twice"):
        try:
            lane.wait_for_saves()
        except Exception:
            print("heard", file=sys.stderr)
    if how == "twice":
        save(True, lane)

for how in ("let go of", "late", "waited for", "twice"):  # by multiprocessing, where atexit does nothing
    child = multiprocessing.get_context("fork").Process(target=main, args=(how,))
    child.start()
    child.join()
main("by itself")
"""
SAID = "shardwise: an asynchronous save failed, and the program ended without waiting for it: no space left. Call wait"


@pytest.mark.parametrize("whole", [False, *campaign(True)], ids=["forks", "whole"])
def test_failed_async_save_is_reported_at_exit(whole: bool) -> None:
    ended = (python if whole else forked_python)("-c", PROGRAM)
    assert ended.returncode == 0, ended.stderr
    parts = dict(part.split("\n", 1) for part in ended.stderr.split("-- ")[1:])
    assert {how: (text.count(SAID), text.count("heard")) for how, text in parts.items()} == {
        "let go of": (1, 0),
        "late": (1, 0),
        "waited for": (0, 1),
        "twice": (1, 1),
        "by itself": (1, 0),
    }, ended.stderr
