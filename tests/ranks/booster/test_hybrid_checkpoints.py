"""What the Booster saves of a model whose layers are cut: whole tensors, and runs that go on under any other plugin."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, Plugin
from shardwise.testing import assert_close, run_ranks
from tests.support.hybrid_setup import MAX_NORM, STEPS, VOCABULARY, Texts, made, optimizer_of, plain_steps

BATCH = 2
FP32: dict[str, Any] = {"precision": "fp32", "max_norm": MAX_NORM}
SMALL: dict[str, Any] = {"min_chunk_size_m": 1e-4, "hidden_dim": 8, "search_range_m": 0.01}
hybrid = functools.partial(HybridParallelPlugin, pp_size=1, **FP32)


def _run(kind: str, make: Callable[[], Plugin], steps: range, folder: str, resume: bool) -> None:
    """Steps of the run that :func:`plain` is, on two data-parallel ranks; then what it is is saved."""
    plugin = make()
    booster = Booster(plugin=plugin)
    model = made(kind)
    if resume:
        for param in model.parameters():
            torch.nn.init.zeros_(param)
    loader = plugin.prepare_dataloader(Texts(STEPS * 2 * BATCH), BATCH)
    model, optimizer, *_ = booster.boost(model, optimizer_of(model))
    if resume:
        restored = booster.load_checkpoint(f"{folder}/runs", model, optimizer)
        assert restored is not None
    for step, inputs in enumerate(loader):
        if step in steps:
            booster.backward(model(**inputs).loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    booster.save_checkpoint(f"{folder}/runs", model, optimizer)
    booster.save_model(model, f"{folder}/model", shard=True)
    booster.save_model(model, f"{folder}/one.safetensors", use_safetensors=True)
    booster.save_optimizer(optimizer, f"{folder}/optimizer.safetensors")
    state = model.state_dict()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, {name: tuple(value.shape) for name, value in state.items()})
    assert all(shapes == told[0] for shapes in told)
    booster.close()


def expected(kind: str, steps: int, of_parts: bool = True) -> dict[str, torch.Tensor]:
    return [values for _, _, values in plain_steps(kind, 2, BATCH, of_parts)][steps - 1]


def assert_saved(kind: str, folder: Path, steps: int, rtol: float = 1e-9) -> None:
    values = expected(kind, steps)
    one = load_file(folder / "one.safetensors")
    assert_close({name: one[name] for name in values}, values, rtol, f"{kind} after {steps} steps")
    kinds: dict[str, Any] = {"llama": LlamaForCausalLM, "gpt2": GPT2LMHeadModel}
    whole = kinds[kind].from_pretrained(folder / "model", dtype=torch.float64)
    assert whole.get_input_embeddings().weight.shape[0] == VOCABULARY  # without padding
    loaded = dict(whole.named_parameters())
    assert_close({name: loaded[name].detach() for name in values}, values, rtol, "from_pretrained")


def test_files_have_whole_tensors(tmp_path: Path) -> None:
    run_ranks(4, _run, "gpt2", functools.partial(hybrid, tp_size=2, zero_stage=1), range(STEPS), str(tmp_path), False)
    assert_saved("gpt2", tmp_path, STEPS)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a run of two steps, which several runs go on from."""
    folder: Path = tmp_path_factory.mktemp("begun")
    run_ranks(4, _run, "llama", functools.partial(hybrid, tp_size=2, zero_stage=2), range(2), str(folder), False)
    assert_saved("llama", folder, 2)
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "make"),
    [
        (2, functools.partial(LowLevelZeroPlugin, stage=2, **FP32)),
        (
            4,
            functools.partial(
                GeminiPlugin, tp_size=2, min_chunk_size_m=1e-4, hidden_dim=8, search_range_m=0.01, **FP32
            ),
        ),
        (4, functools.partial(hybrid, tp_size=2, zero_stage=0, parallel_output=False)),
    ],
    ids=["zero2", "gemini", "hybrid"],
)
def test_a_run_goes_on_under_other_plugins(begun: Path, tmp_path: Path, ranks: int, make: Callable[[], Plugin]) -> None:
    shutil.copytree(begun, tmp_path, symlinks=True, dirs_exist_ok=True)
    run_ranks(ranks, _run, "llama", make, range(2, STEPS), str(tmp_path), True)
    rtol = 1e-9 if "Gemini" in repr(make) else 1e-5  # transformers' loss of whole logits is computed in fp32
    assert_saved("llama", tmp_path, STEPS, rtol)
    run_ranks(4, _run, "llama", functools.partial(hybrid, tp_size=4), range(0), str(tmp_path), True)
    assert_saved("llama", tmp_path, STEPS, rtol)
