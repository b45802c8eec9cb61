"""A small checkpoint of every format that can be read, and the runs that can load them."""

import contextlib
import io
import json
import random
import shutil
import tarfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from shardwise.core.checkpoint import formats
from shardwise.core.checkpoint.checkpointer import Checkpointer
from shardwise.core.checkpoint.formats.native import write_native
from shardwise.core.checkpoint.load import Restored
from shardwise.core.checkpoint.native_format import encode_manifest, read_manifest
from shardwise.core.checkpoint.portable_files import PortableFiles
from shardwise.core.checkpoint.schedulers import fitting_state, write_lr_scheduler
from shardwise.core.checkpoint.torch_training_run import TorchRun
from shardwise.core.checkpoint.training_run import as_run
from shardwise.core.parallel.tensor import ShardSpec
from shardwise.core.parallel.tensor.stored_order import StoredCut
from shardwise.plan import zero
from shardwise.session import build
from tests.faults.small import Small

DATA = Path(__file__).parent.parent.parent / "data"


class WithExtra(Small):
    """A model with extra state, and a loss that fp16 can represent."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float() / 1000

    def get_extra_state(self) -> Any:
        return {"seen": 3, "more": torch.arange(2)}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return Adam with two groups."""
    plain = [p for name, p in model.named_parameters() if "bias" in name]
    others = [p for name, p in model.named_parameters() if "bias" not in name]
    return torch.optim.AdamW([{"params": others}, {"params": plain, "weight_decay": 0.0}], lr=0.1)


State = dict[str, Any]


class _Run:
    """A run that loads checkpoints, of the model and optimizer that :meth:`_begin` gets."""

    module: nn.Module
    optimizer: Any

    def _begin(self, module: nn.Module, optimizer: Any, scheduled: torch.optim.Optimizer, run: Any) -> None:
        self.module, self.optimizer, self.run = module, optimizer, run
        self.scheduler = torch.optim.lr_scheduler.StepLR(scheduled, 3)
        self.saver, self.files = Checkpointer(run), PortableFiles()

    def load(self, path: Path, way: str) -> Restored | None:
        """Load everything; or one part, as a Booster does it."""
        if way == "model":
            self.files.load_model(self.run, str(path), False)
        elif way == "optimizer":
            self.files.load_optimizer(self.run, str(path))
        elif way == "scheduler":
            self.scheduler.load_state_dict(fitting_state(self.scheduler, path))
        else:
            tag, schedulers = "auto" if way == "auto" else None, self._schedulers(path)
            return self.saver.load(str(path), tag, strict=way != "some", lr_schedulers=schedulers)
        return None

    def _schedulers(self, path: Path) -> list[Any]:
        return []

    def state(self) -> State:
        """Return what a load may change."""
        found: State = dict(self.module.state_dict())
        for number, entry in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}/{key}": value for key, value in entry.items()}
        found |= {"groups": _options(self.optimizer.param_groups), "scheduler": _text(self.scheduler.state_dict())}
        copied = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in found.items()}
        return copied | {"rng": torch.get_rng_state()}


class EngineSubject(_Run):
    """A run of the library's engine in fp16, on one rank."""

    def __init__(self) -> None:
        model = WithExtra()
        plain = adam(model)
        self.session = build(model, plain, zero(1, torch.float16))
        self._begin(self.session.module, self.session.optimizer, plain, as_run(self.session))

    def step(self) -> None:
        """Do what training does after a load."""
        self.session.backward(self.module(torch.ones(2, 7)))
        self.optimizer.step()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of .lr_scheduler", UserWarning)  # overflows skip steps
            self.scheduler.step()
        self.optimizer.zero_grad()

    def save(self, root: Path, tag: str) -> None:
        """Save everything that a checkpoint can contain."""
        position = {"next": 3, "order": torch.arange(8)}
        given: dict[str, Any] = {"data_position": position, "user_state": ("mine", torch.eye(2), {1: float("inf")})}
        self.saver.save(str(root), tag, lr_schedulers=[self.scheduler], **given)

    def _schedulers(self, path: Path) -> list[Any]:
        return [self.scheduler] if (path / "manifest.json").exists() or (path / "new").exists() else []

    def state(self) -> State:
        """Return the state with the loss scale."""
        scaler = self.optimizer.scaler
        return super().state() | {"scaler": None if scaler is None else scaler.state_dict()}


class PlainSubject(_Run):
    """A run of plain torch in one process, as under ``TorchDDPPlugin``."""

    def __init__(self) -> None:
        model = WithExtra()
        optimizer = adam(model)
        self._begin(model, optimizer, optimizer, TorchRun(model, optimizer))

    def step(self) -> None:
        """Do what training does after a load."""
        self.module(torch.ones(2, 7)).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


def _options(groups: list[dict[str, Any]]) -> list[Any]:
    return [(len(group["params"]), _text({k: v for k, v in group.items() if k != "params"})) for group in groups]


def _text(state: Any) -> str:
    return repr(sorted(state.items(), key=str))


# ---- contents of files


def _put(path: Path, content: Any) -> None:
    """Write a file of torch's, or one of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(content))
    else:
        torch.save(content, path)


def _trained() -> tuple[PlainSubject, dict[str, torch.Tensor]]:
    """Return a run after a step, and the tensors of its model."""
    subject = PlainSubject()
    subject.step()
    state = subject.module.state_dict()
    return subject, {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _torch_files(place: Path) -> None:
    subject, model = _trained()
    optimizer = subject.optimizer.state_dict()
    _put(place / "model/m.bin", model)
    whole = {"state_dict": model, "optimizer_states": [optimizer], "epoch": 3, "lr_schedulers": [{}]}
    _put(place / "whole/m.ckpt", whole)
    _put(place / "optimizer/o.pt", optimizer)
    _put(place / "scheduler/s.pt", subject.scheduler.state_dict())
    for folder in ("older", "json"):
        (place / folder).mkdir()
    torch.save({"model": model, "optimizer": optimizer}, place / "older/m.pth", _use_new_zipfile_serialization=False)
    write_lr_scheduler(subject.scheduler, place / "json/s.json")
    _put(place / "hf-bin/pytorch_model.bin", model)
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    for number, name in enumerate(names):
        _put(place / "hf-bins" / name, dict(list(model.items())[number::2]))
    weights = {key: names[number % 2] for number, key in enumerate(model)}
    _put(place / "hf-bins/pytorch_model.bin.index.json", {"weight_map": weights})
    lora = {f"base_model.model.layer.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    _put(place / "peft-bin/adapter_model.bin", lora)
    config = {"peft_type": "LORA", "r": 2, "modules_to_save": ["head"], "bias": "none"}
    _put(place / "peft-bin/adapter_config.json", config)


def _directories_of_others(place: Path) -> None:
    """Write directories as Hugging Face's Trainer and accelerate do."""
    subject, model = _trained()
    for folder, ending in {"trainer": "pt", "accelerate": "bin"}.items():
        _put(place / folder / f"optimizer.{ending}", subject.optimizer.state_dict())
        _put(place / folder / f"scheduler.{ending}", subject.scheduler.state_dict())
        save_file({name: value.clone() for name, value in model.items()}, str(place / folder / "model.safetensors"))
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    _put(place / "trainer/rng_state.pth", states)
    _put(place / "trainer/trainer_state.json", {"global_step": 1, "log_history": []})


def _native_files(place: Path) -> None:
    subject = EngineSubject()
    subject.step()
    subject.save(place / "native", "old")
    subject.step()
    subject.save(place / "native", "new")
    subject.session.close()


def _parts_files(place: Path) -> None:
    """Write a checkpoint whose manifest says that the matrices are split by columns: other values, and equally
    valid."""
    shutil.copytree(place / "native/new", place / "parts/t")
    manifest = read_manifest(str(place / "parts/t"))
    shapes = {name: fact.shape for name, fact in manifest.tensors.items() if len(fact.shape) == 2}
    found = {name: StoredCut.of(shape, ShardSpec.even(1, shape[1], 2)) for name, shape in shapes.items()}
    cuts = {name: cut for name, cut in found.items() if cut is not None}
    (place / "parts/t/manifest.json").write_bytes(encode_manifest(replace(manifest, cuts=cuts)))


def _written_files(place: Path) -> None:
    with formats.open_checkpoint(place / "native/new") as source:  # type: ignore[attr-defined]
        formats.write_huggingface(source, place / "hf", config={"model_type": "small", "tie_word_embeddings": True})
        formats.write_huggingface(source, place / "hf-shards", 0.0003)
        (place / "single").mkdir()
        (place / "single-optimizer").mkdir()
        formats.write_single(source, place / "single/m.safetensors")
        formats.write_single_optimizer(source, place / "single-optimizer/o.safetensors")
        formats.write_dcp(source, place / "dcp")
        formats.write_dcp(source, place / "titan", "torchtitan")
        for name, safe in (("colossalai", False), ("colossalai-safe", True)):
            formats.write_colossalai_model(source, place / name / "model", 0.0005, use_safetensors=safe)
            formats.write_colossalai_optimizer(source, place / name / "optimizer", 0.001)
        write_native(source, place / "converted/t")
    with contextlib.closing(formats.open_checkpoint(place / "peft-bin")) as source:
        formats.write_peft(source, place / "peft")


def _deepspeed_files(place: Path) -> None:
    for name in ("deepspeed", "lightning_deepspeed"):
        with tarfile.open(DATA / f"{name}.tar.xz") as archive:
            archive.extractall(place / name, filter="data")
    for name in ("zero1-2ranks-fp16", "zero2-2ranks-bf16", "zero3-2ranks-fp32"):
        (place / "deepspeed/ds" / name / "truth.safetensors").unlink()


def make_subjects(place: Path) -> None:
    """Write all of them under ``place``."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        for make in (_torch_files, _directories_of_others, _native_files, _parts_files, _written_files):
            make(place)
        _deepspeed_files(place)


@dataclass(frozen=True)
class Subject:
    """A checkpoint's directory, the path in it that is opened, and the ways of loading it that work."""

    folder: str
    opened: str = ""
    loads: tuple[str, ...] = ()
    share: int = 2


ALL, PARTS = ("all", "auto", "some"), ("model", "optimizer")
SUBJECTS: dict[str, Subject] = {
    "native": Subject("native/new", loads=(*ALL, *PARTS), share=6),
    "native-root": Subject("native", loads=ALL),
    "converted": Subject("converted/t", loads=(*ALL, *PARTS)),
    "parts": Subject("parts/t", loads=(*ALL, *PARTS)),
    "hf": Subject("hf", loads=("all", "model")),
    "hf-shards": Subject("hf-shards", loads=("all", "model")),
    "hf-bin": Subject("hf-bin", loads=("some", "model")),
    "hf-bins": Subject("hf-bins", loads=("some", "model")),
    "single": Subject("single", "m.safetensors", loads=("model",)),
    "single-optimizer": Subject("single-optimizer", "o.safetensors", loads=("optimizer",)),
    "torch": Subject("model", "m.bin", loads=("model",)),
    "torch-whole": Subject("whole", loads=("some", *PARTS)),
    "torch-older": Subject("older", loads=("some", *PARTS)),
    "torch-optimizer": Subject("optimizer", "o.pt", loads=("optimizer",)),
    "dcp": Subject("dcp", loads=("some", *PARTS), share=4),
    "titan": Subject("titan", loads=("some", *PARTS)),
    "colossalai": Subject("colossalai", loads=("some", *PARTS), share=4),
    "colossalai-safe": Subject("colossalai-safe", loads=("some", *PARTS)),
    "zero1": Subject("deepspeed/ds/zero1-2ranks-fp16", share=3),
    "zero2": Subject("deepspeed/ds/zero2-2ranks-bf16", share=3),
    "zero3": Subject("deepspeed/ds/zero3-2ranks-fp32", share=3),
    "lightning": Subject("lightning_deepspeed/ds/stage2.ckpt"),
    "trainer": Subject("trainer", loads=("some", *PARTS)),
    "accelerate": Subject("accelerate", loads=("some", *PARTS)),
    "peft": Subject("peft"),
    "peft-bin": Subject("peft-bin"),
    "scheduler": Subject("json", "s.json", loads=("scheduler",)),
    "scheduler-torch": Subject("scheduler", "s.pt", loads=("scheduler",)),
}
