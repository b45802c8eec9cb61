"""Checkpoints under DeepSpeedStrategy on two ranks: resuming, other numbers of ranks, single files, DeepSpeed's own."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.core.checkpoint.formats import open_checkpoint
from shardwise.strategies.namespace import LIGHTNING
from shardwise.testing import run_ranks
from tests.support.lightning_deepspeed_setup import RANKS, Options, noted, rank, strategy
from tests.support.lightning_setup import Toy, close, data, fit, stock, toy, trainer, weights, worst
from tests.support.sets import full


def _faults(variant: Callable[..., str], run: Callable[[str], Any]) -> None:
    """Of the entries of a file."""
    faults: list[tuple[Options, str]] = [
        ({"net.0.weight": None}, r"missing \['net.0.weight'\]"),
        ({"extra": torch.ones(1)}, r"unexpected \['extra'\]"),
        ({"net.0.bias": torch.ones(3)}, r"net.0.bias: \(3,\) instead of \(16,\)"),
    ]
    for number, (changes, message) in enumerate(faults):
        with pytest.raises(RuntimeError, match=message):
            run(variant(f"fault-{number}", **changes))


def full_weights(directory: str, restores: str) -> None:
    """``restores``: the weights alone, or optimizers as well."""
    source = trainer(stock())
    source.fit(toy(), data())
    expected = weights(source)
    path = Path(directory) / "whole.ckpt"
    source.save_checkpoint(path)
    whole = torch.load(path, weights_only=False)

    def variant(name: str, **changes: Any) -> str:
        """The file with other entries in its state dict (or without them: None); every rank reads rank 0's."""
        state = {**whole, "state_dict": {**whole["state_dict"], **changes}}
        state["state_dict"] = {key: value for key, value in state["state_dict"].items() if value is not None}
        place = Path(directory) / f"{name}.ckpt"
        if rank() == 0:
            torch.save(state["state_dict"] if name == "bare" else state, place)
        torch.distributed.barrier()
        return str(place)

    def run(path: str, stage: int = 3, **arguments: Any) -> Any:
        made = trainer(strategy(stage=stage, load_full_weights=True, **arguments), max_epochs=1)
        made.test(toy(seed=9), data(), ckpt_path=path, verbose=False)
        return made

    if restores == "weights":
        for place in (str(path), variant("bare")):
            made = run(place)
            assert all(map(torch.equal, weights(made).values(), expected.values()))
            close(made)
        _faults(variant, run)
        return
    # Optimizers go on where the file has their state, and start anew with a warning where it has none.
    straight = fit(stock(), toy(), max_epochs=2)
    again = trainer(strategy(stage=3, load_full_weights=True), max_epochs=2)
    again.fit(toy(seed=9), data(), ckpt_path=str(path))
    assert worst(weights(again), straight) <= 1e-6
    close(again)
    again = trainer(strategy(stage=3, load_full_weights=True), max_epochs=2)
    del whole["optimizer_states"]
    with noted() as texts:
        again.fit(toy(seed=9), data(), ckpt_path=variant("weights"))
    assert any("optimizer states cannot be restored" in text for text in texts) == (rank() == 0)
    assert again.global_step == 8 and worst(weights(again), straight) > 1e-6
    close(again)
    again = trainer(strategy(stage=3, load_full_weights=True), max_epochs=2)
    del whole["lr_schedulers"]  # as save_weights_only leaves it
    again.fit(toy(seed=9), data(), ckpt_path=variant("only"))
    assert again.global_step == 8
    close(again)


@pytest.mark.parametrize("restores", ["weights", *full("optimizers")])
def test_load_full_weights_raises_for_missing_unexpected_and_wrongly_shaped_entries(
    restores: str, tmp_path: Path
) -> None:
    """Lightning collected these errors and never raised them."""
    run_ranks(RANKS, full_weights, str(tmp_path), restores, timeout=120.0)


def deepspeed_directories(root: str, goes_on: list[tuple[str, int]]) -> None:
    straight = fit(stock(), toy(schedule=True), max_epochs=2)
    after_one = fit(stock(), toy(schedule=True), max_epochs=1)
    for saved, stage in goes_on:
        path = f"{root}/{saved}.ckpt"
        tested = trainer(strategy(stage=stage))
        tested.test(toy(seed=9), data(), ckpt_path=f"{path}/checkpoint", verbose=False)
        assert worst(weights(tested), after_one) <= 1e-6
        close(tested)
        made = trainer(strategy(stage=stage), max_epochs=2)
        model = toy(schedule=True, seed=9)
        made.fit(model, data(), ckpt_path=path)
        assert (made.current_epoch, made.global_step) == (2, 8)
        assert model.lr_schedulers().get_last_lr() == [pytest.approx(0.05 * 0.7**4)]
        assert worst(weights(made), straight) <= 1e-6, saved
        close(made)
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        trainer(strategy()).test(toy(), data(), ckpt_path=f"{root}/../empty", verbose=False)


@pytest.mark.parametrize("goes_on", [[("stage3", 1)], *full([("stage1", 3), ("stage2", 2)])], ids=["one", "others"])
def test_runs_that_deepspeed_saved_go_on(goes_on: list[tuple[str, int]], tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parents[2] / "data" / "lightning_deepspeed.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "empty").mkdir()
    run_ranks(RANKS, deepspeed_directories, str(tmp_path / "ds"), goes_on, timeout=120.0)


class Partly(Toy):
    """Its first layer is frozen."""

    def build(self) -> None:
        super().build()
        assert isinstance(self.net, nn.Sequential)
        self.net[0].requires_grad_(False)


def frozen(directory: str) -> None:
    straight = fit(stock(), toy(body=Partly), max_epochs=2)
    for stage in (1, 3):
        path = f"{directory}/{stage}.ckpt"
        made = trainer(strategy(stage=stage, exclude_frozen_parameters=True))
        made.fit(toy(body=Partly), data())
        made.save_checkpoint(path)
        made.save_checkpoint(f"{path}-weights", weights_only=True)
        close(made)
        held = {name.removeprefix("model/") for name in open_checkpoint(path).tensors() if name.startswith("model/")}
        assert held == {f"net.{layer}.{kind}" for layer in (2, 4) for kind in ("weight", "bias")}
        again = trainer(strategy(stage=stage), max_epochs=2)
        again.fit(toy(body=Partly), data(), ckpt_path=path)
        assert worst(weights(again), straight) <= 1e-6
        close(again)
        for place in (path, f"{path}-weights"):
            made = trainer(strategy(stage=stage))
            made.test(toy(body=Partly), data(), ckpt_path=place, verbose=False)
            close(made)
            with pytest.raises(ValueError, match=r"net\.0\.weight"):  # trained here: it may not be missing
                made.test(toy(), data(), ckpt_path=place, verbose=False)
    whole = type("Whole", (LIGHTNING.load("plugins.io.TorchCheckpointIO"),), {})()
    made = trainer(strategy(exclude_frozen_parameters=True), plugins=[whole])
    with pytest.raises(Exception, match="exclude_frozen_parameters=True with checkpoint_io=Whole"):
        made.fit(toy(body=Partly), data())


@pytest.mark.full
def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    run_ranks(RANKS, frozen, str(tmp_path), timeout=120.0)
