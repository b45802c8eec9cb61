"""What is of a wrong kind altogether (``None`` of a function without a return, a number) is named with its value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from shardwise import deepspeed
from shardwise.booster import Booster
from shardwise.deepspeed.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from shardwise.plan import Plan, zero
from shardwise.session import Session, build

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}


class Doors:
    """Everything that takes something from a program."""

    def __init__(self) -> None:
        model = nn.Linear(3, 3)
        self.session: Session = build(model, torch.optim.Adam(model.parameters()), zero(2))
        model = nn.Linear(3, 3)
        optimizer = torch.optim.Adam(model.parameters())
        self.engine = self.initialize(model=model, optimizer=optimizer)[0]
        self.booster, model = Booster(), nn.Linear(3, 3)
        optimizer = torch.optim.Adam(model.parameters())
        self.boosted = self.booster.boost(model, optimizer)

    def initialize(self, **given: Any) -> Any:
        return deepspeed.initialize(**{"config": CONFIG, "dist_init_required": False, **given})

    def close(self) -> None:
        self.session.close()
        self.engine.destroy()


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    made = Doors()
    yield made
    made.close()


Call = Callable[[Doors, Any], object]
CALLS: dict[str, tuple[Call, str]] = {
    "session.backward": (lambda d, x: d.session.backward(x), "loss={}"),
    "optimizer.backward_by_grad": (lambda d, x: d.session.optimizers[0].backward_by_grad(x, x), "tensor={}"),
    "checkpoints.save": (lambda d, x: d.session.checkpoints.save(x), "root={}"),
    "checkpoints.load": (lambda d, x: d.session.checkpoints.load(x), "root={}"),
    "module.load_state_dict": (lambda d, x: d.session.module.load_state_dict(x), "state_dict={}"),
    "optimizer.load_state_dict": (lambda d, x: d.session.optimizers[0].load_state_dict(x), "state_dict={}"),
    "build": (lambda d, x: build(nn.Linear(3, 3), None, x), "plan={}"),
    "Plan.load": (lambda d, x: Plan.load(x), "path={}"),
    "Plan.from_dict": (lambda d, x: Plan.from_dict(x), "plan={}"),
    "Plan.save": (lambda d, x: zero(2).save(x), "path={}"),
    "Plan.differences": (lambda d, x: zero(2).differences(x), "other={}"),
    "initialize(model)": (lambda d, x: d.initialize(model=x), "model={}"),
    "engine.backward": (lambda d, x: d.engine.backward(x), r"backward(loss)={}"),
    "engine.scale": (lambda d, x: d.engine.scale(x), r"scale(loss)={}"),
    "engine.save_checkpoint": (lambda d, x: d.engine.save_checkpoint(x), "save_dir={}"),
    "engine.load_checkpoint": (lambda d, x: d.engine.load_checkpoint(x), "load_dir={}"),
    "engine.save_16bit_model": (lambda d, x: d.engine.save_16bit_model(x), "save_dir={}"),
    "engine.load_module_state_dict": (lambda d, x: d.engine.load_module_state_dict(x), "checkpoint={}"),
    "zero_to_fp32": (lambda d, x: get_fp32_state_dict_from_zero_checkpoint(x), "checkpoint_dir={}"),
    "booster.backward": (lambda d, x: d.booster.backward(x, d.boosted[1]), "loss={}"),
    "booster.save_model": (lambda d, x: d.booster.save_model(d.boosted[0], x), "checkpoint={}"),
    "booster.load_model": (lambda d, x: d.booster.load_model(d.boosted[0], x), "checkpoint={}"),
    "booster.save_optimizer": (lambda d, x: d.booster.save_optimizer(d.boosted[1], x), "checkpoint={}"),
    "booster.load_optimizer": (lambda d, x: d.booster.load_optimizer(d.boosted[1], x), "checkpoint={}"),
    "booster.save_model(model)": (lambda d, x: d.booster.save_model(x, "nowhere"), "{} is neither a model nor an"),
}


@pytest.mark.parametrize("given", [None, 3], ids=["None", "number"])
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_kind_is_named_with_its_value(doors: Doors, name: str, given: Any) -> None:
    call, words = CALLS[name]
    with pytest.raises((TypeError, ValueError)) as raised:
        call(doors, given)
    text = str(raised.value)
    assert words.format(given) in text and "give" in text, text


def test_what_is_refused_changes_nothing_and_a_tag_may_be_a_number(doors: Doors, tmp_path: Path) -> None:
    for call, _ in CALLS.values():
        with pytest.raises((TypeError, ValueError)):
            call(doors, 3)
    doors.engine.backward(doors.engine(torch.ones(2, 3)).sum())
    doors.engine.step()
    doors.engine.save_checkpoint(str(tmp_path), tag=7)
    assert doors.engine.load_checkpoint(str(tmp_path), tag=7)[0] == str(tmp_path / "7")


def test_ranks_with_fewer_batches_are_told_what_to_do(doors: Doors) -> None:
    with pytest.raises(AttributeError, match=r"'join_hook'.*all ranks have to run the same number of passes"):
        Join([doors.session.module])
    assert not hasattr(doors.session.module, "join")


def test_other_entries_of_initialize_and_save(doors: Doors, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"optimizer=3: give a torch\.optim\.Optimizer"):
        doors.initialize(model=nn.Linear(3, 3), optimizer=3)
    with pytest.raises(TypeError, match="model is already a DeepSpeedEngine of a Linear: "):
        doors.initialize(model=doors.engine)
    with pytest.raises(TypeError, match="client_state=3: give a dict"):
        doors.engine.save_checkpoint(str(tmp_path), client_state=3)
    with pytest.raises(
        ValueError, match=r"state_dict has \['step'\]: an optimizer's state needs 'state' and 'param_groups'"
    ):
        doors.session.optimizers[0].load_state_dict({"step": 1})
