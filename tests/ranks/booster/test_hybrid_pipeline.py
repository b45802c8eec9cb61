"""HybridParallelPlugin with a pipeline behind the Booster, against plain PyTorch in one process: fp64, pp x tp x dp."""

from __future__ import annotations

import contextlib
import io
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hybrid_setup import MAX_NORM, STEPS, Texts, loss_of, made, optimizer_of
from torch import Tensor
from torch.nn import functional

from shardwise.booster import Booster
from shardwise.booster.plugin import HybridParallelPlugin
from shardwise.pipeline import split_batch
from shardwise.shardformer import GradientCheckpointConfig, PipelineGradientCheckpointConfig
from shardwise.testing import assert_close, run_ranks

RANKS, ROWS = 4, 3
EXAMPLE = Path(__file__).parents[3] / "examples" / "booster_plugins" / "hybrid_parallel.py"
LAYERS = {"llama": "num_hidden_layers", "gpt2": "n_layer", "bert": "num_hidden_layers"}
"""Five of them: stages are of unequal length."""
OF_PARTS = ("llama", "gpt2")
"""Their loss of parts of logits is computed in fp64, that of whole ones in fp32."""


def deep(kind: str, dtype: torch.dtype = torch.float64, layers: int = 5, **changes: Any) -> Any:
    tied = {"tie_word_embeddings": True} if kind == "llama" else {}
    return made(kind, dtype, **{LAYERS[kind]: layers}, **tied, **changes)


def exact(outputs: Any, inputs: dict[str, Tensor]) -> Tensor:
    """A causal model's own loss, without transformers' cast of logits to fp32."""
    logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def own(outputs: Any, _inputs: Any) -> Tensor:
    loss: Tensor = outputs.loss
    return loss


def plain(
    kind: str, replicas: int, number: int | None, rows: int | None = None
) -> Iterator[tuple[list[float], float, dict[str, Tensor]]]:
    """By step: the loss of each data-parallel rank, the norm before clipping, and the parameters."""
    model, texts = deep(kind), Texts(STEPS * replicas * ROWS)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for rank in range(replicas):
            places = [(step * ROWS + row) * replicas + rank for row in range(ROWS)]
            batch = {name: torch.stack([texts[place][name] for place in places]) for name in texts.items}
            total = 0.0
            for part in split_batch(batch, number, rows):
                loss = loss_of(model, part.kwargs, kind in OF_PARTS) * part.share
                (loss / replicas).backward()
                total += loss.item()
            losses.append(total)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        yield losses, norm.item(), {name: param.detach().clone() for name, param in model.named_parameters()}


def wide(**numbers: float) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def criterion_of(kind: str, plugin: HybridParallelPlugin) -> Any:
    """What :func:`plain` computes: of whole logits without transformers' cast to fp32."""
    return exact if kind in OF_PARTS and plugin.tp_size == 1 else own


def _trained(kind: str, given: dict[str, Any]) -> None:
    plugin = HybridParallelPlugin(precision="fp32", max_norm=MAX_NORM, **{"tp_size": 1, "pp_size": 2} | given)
    replica, replicas = plugin.data_parallel()
    assert replicas == dist.get_world_size() // (plugin.tp_size * plugin.pp_size)
    booster, model = Booster(plugin=plugin), deep(kind)
    loader = plugin.prepare_dataloader(Texts(STEPS * replicas * ROWS), ROWS)
    model, optimizer, *_ = booster.boost(model, optimizer_of(model), None, loader)
    session = plugin.session(model)
    assert session.mesh.rank == replica
    batches, last = iter(loader), session.pipeline.last
    number = plugin.num_microbatches or (None if plugin.microbatch_size else plugin.pp_size * plugin.num_model_chunks)
    expected = plain(kind, replicas, number, plugin.microbatch_size)
    for step, (losses, norm, values) in enumerate(expected):
        broadcast = step == 1
        found = booster.execute_pipeline(
            batches,
            model,
            criterion_of(kind, plugin),
            optimizer,
            return_outputs=step == 2,
            broadcast_loss=broadcast,
        )
        optimizer.step()
        optimizer.zero_grad()
        assert (found["loss"] is not None) == (last or broadcast)
        assert (found["outputs"] is not None) == (last and step == 2)
        if found["loss"] is not None:
            assert not found["loss"].requires_grad
            assert_close(wide(loss=found["loss"].item()), wide(loss=losses[replica]), 1e-10, f"step {step}")
        if found["outputs"] is not None:
            assert found["outputs"]["logits"].shape[0] == ROWS
        assert_close(wide(norm=optimizer.get_grad_norm()), wide(norm=norm), 1e-10, f"step {step}")
        state = model.state_dict()
        assert_close({name: state[name] for name in values}, values, 1e-9, f"parameters after step {step}")
    tied = {"llama": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}
    assert kind == "bert" or torch.equal(state["lm_head.weight"], state[tied[kind]])
    booster.close()


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_training_equals_plain_pytorch(kind: str, zero_stage: int) -> None:
    run_ranks(RANKS, _trained, kind, {"zero_stage": zero_stage})


CHECKPOINTED: dict[str, Any] = {
    "gradient_checkpoint_config": PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1, 0, 2, 1]),
    "num_layers_per_stage": [1, 1, 2, 1],
}


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("llama", {"tp_size": 2}),
        ("gpt2", {"tp_size": 2, "num_microbatches": 3, "enable_metadata_cache": False}),
        ("bert", {"tp_size": 2, "zero_stage": 2, "microbatch_size": 2}),
        ("llama", {"pp_size": 4, "num_microbatches": 2}),
        ("gpt2", {"pp_size": 4, "zero_stage": 1, "num_layers_per_stage": [1, 2, 1, 1]}),
        ("llama", {"pp_style": "interleaved", "num_model_chunks": 2, "zero_stage": 1, "num_microbatches": 2}),
        ("gpt2", {"pp_style": "interleaved", "num_model_chunks": 2, **CHECKPOINTED}),
        ("bert", {"pp_style": "interleaved", "num_model_chunks": 2, "zero_stage": 2, "cpu_offload": True}),
        ("llama", {"dp_outside": False, "zero_stage": 2, "gradient_checkpoint_config": GradientCheckpointConfig(0.5)}),
        ("gpt2", {"overlap_communication": False, "overlap_allgather": True, "overlap_p2p": False, "zero_stage": 1}),
    ],
    ids=str,
)
def test_arguments_of_a_pipeline(kind: str, given: dict[str, Any]) -> None:
    run_ranks(RANKS, _trained, kind, given)


# -- the published example


def _printed() -> None:
    model, train_dataset = made("llama", torch.float32), Texts(24)
    optimizer, criterion = optimizer_of(model), None
    plugin = HybridParallelPlugin(tp_size=2, pp_size=2)

    train_dataloader = plugin.prepare_dataloader(train_dataset, batch_size=8)
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, train_dataloader, _ = booster.boost(model, optimizer, criterion, train_dataloader)

    losses = []
    for epoch in range(8):
        train_dataloader.sampler.set_epoch(epoch)
        batches = iter(train_dataloader)
        for _ in range(len(train_dataloader)):
            found = booster.execute_pipeline(batches, model, own, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(found["loss"] if found["loss"] is None else found["loss"].item())
        with pytest.raises(StopIteration):
            booster.execute_pipeline(batches, model, own, optimizer)
    told = everywhere(losses)
    assert told[0] == told[1] == [None] * 24 and told[2] == told[3]
    assert told[2][-1] < told[2][0] - 0.2
    booster.close()


def _example() -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return out.getvalue()


def test_the_fifth_example_runs_as_printed() -> None:
    run_ranks(RANKS, _printed)
    shown = {float(text.removeprefix("loss ")) for text in run_ranks(RANKS, _example)}
    assert len(shown) == 1 and max(shown) < 3.0  # of 97 words: log(97) = 4.6
