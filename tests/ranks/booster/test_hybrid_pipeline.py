"""HybridParallelPlugin with a pipeline: pp x tp x dp on four ranks against plain PyTorch in one process (fp64)."""

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shardwise.booster import Booster
from shardwise.booster.plugin import HybridParallelPlugin
from shardwise.core.comm import PeerError
from shardwise.core.parallel.pipeline.batch import split_batch
from shardwise.shardformer import GradientCheckpointConfig, PipelineGradientCheckpointConfig
from shardwise.testing import PlainRecipe, PlainRun, assert_close, run_ranks, train_plain
from tests.support.hybrid_setup import MAX_NORM, STEPS, Texts, loss_of, made, optimizer_of
from tests.support.launching import printed
from tests.support.on_ranks import everywhere, on_ranks, raises
from tests.support.sets import full

RANKS, ROWS = 4, 3
EXAMPLE = Path(__file__).parents[3] / "examples" / "booster_plugins" / "hybrid_parallel.py"
LAYERS = {"llama": "num_hidden_layers", "gpt2": "n_layer", "bert": "num_hidden_layers"}
"""Arguments that set the number of layers. Five layers make stages of unequal length."""
OF_PARTS = ("llama", "gpt2")
"""Models that compute the loss in fp64 from sharded logits, and in fp32 from full logits."""


def deep(kind: str, dtype: torch.dtype = torch.float64, layers: int = 5, **changes: Any) -> Any:
    tied = {"tie_word_embeddings": True} if kind == "llama" else {}
    return made(kind, dtype, **{LAYERS[kind]: layers}, **tied, **changes)


def exact(outputs: Any, inputs: dict[str, Tensor]) -> Tensor:
    """A causal model's own loss, without transformers' cast of logits to fp32."""
    logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def own(outputs: Any, _inputs: Any) -> Tensor:
    return outputs.loss


@functools.cache
def plain(kind: str, replicas: int, number: int | None, rows: int | None) -> PlainRun:
    texts = Texts(STEPS * replicas * ROWS)
    every = {name: values.view(STEPS, ROWS, replicas, -1) for name, values in texts.items.items()}

    def batch(step: int, rank: int) -> dict[str, Tensor]:
        return {name: values[step, :, rank].contiguous() for name, values in every.items()}

    batches = [[[batch(step, rank) for rank in range(replicas)]] for step in range(STEPS)]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        parts = split_batch(batch, number, rows)
        return torch.stack([loss_of(model, part.kwargs, kind in OF_PARTS) * part.share for part in parts]).sum()

    return train_plain(lambda: deep(kind), loss, optimizer_of, batches, PlainRecipe(max_norm=MAX_NORM))


Expected = tuple[list[list[list[float]]], list[float], list[dict[str, Tensor]]]


def wide(**numbers: float) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}


def criterion_of(kind: str, plugin: HybridParallelPlugin) -> Any:
    """Return the criterion of :func:`plain`: with full logits, without transformers' cast to fp32."""
    return exact if kind in OF_PARTS and plugin.tp_size == 1 else own


def _trained(kind: str, given: dict[str, Any], expected: Expected, division: tuple[int | None, int | None]) -> None:
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
    assert division == (number, plugin.microbatch_size)
    for step, (losses, norm, values) in enumerate(zip(*expected, strict=True)):
        broadcast = step == 1
        found = booster.execute_pipeline(
            batches, model, criterion_of(kind, plugin), optimizer, return_outputs=step == 2, broadcast_loss=broadcast
        )
        optimizer.step()
        optimizer.zero_grad()
        assert (found["loss"] is not None) == (last or broadcast)
        assert (found["outputs"] is not None) == (last and step == 2)
        if found["loss"] is not None:
            assert not found["loss"].requires_grad
            assert_close(wide(loss=found["loss"].item()), wide(loss=losses[0][replica]), 1e-10, f"step {step}")
        if found["outputs"] is not None:
            assert found["outputs"].logits.shape[0] == found["outputs"]["logits"].shape[0] == ROWS
        assert_close(wide(norm=optimizer.get_grad_norm()), wide(norm=norm), 1e-10, f"step {step}")
        state = model.state_dict()
        assert_close({name: state[name] for name in values}, values, 1e-9, f"parameters after step {step}")
    tied = {"llama": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}
    assert kind == "bert" or torch.equal(state["lm_head.weight"], state[tied[kind]])
    booster.close()


def check(kind: str, given: dict[str, Any]) -> None:
    """Train and compare; the plain run is computed once here, because it would double the time of each rank."""
    stages, rows = given.get("pp_size", 2), given.get("microbatch_size")
    number = None if rows else given.get("num_microbatches", stages * given.get("num_model_chunks", 1))
    expected = plain(kind, RANKS // (given.get("tp_size", 1) * stages), number, rows)
    results = expected.losses, expected.norms, expected.masters
    run_ranks(RANKS, _trained, kind, given, results, (number, rows))


CHECKPOINTED: dict[str, Any] = {
    "gradient_checkpoint_config": PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1, 0, 2, 1]),
    "num_layers_per_stage": [1, 1, 2, 1],
}
INTERLEAVED: dict[str, Any] = {"pp_style": "interleaved", "num_model_chunks": 2}
ZBV: dict[str, Any] = {"pp_style": "zbv", "num_model_chunks": 2}
ZERO1, HALF = {"zero_stage": 1}, GradientCheckpointConfig(0.5)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("gpt2", {"zero_stage": 0}),
        ("gpt2", {**INTERLEAVED, **CHECKPOINTED}),
        ("llama", {**ZBV, "tp_size": 2, "gradient_checkpoint_config": HALF}),
        ("bert", {**ZBV, "zero_stage": 2, "cpu_offload": True, "microbatch_size": 2}),
        *full(
            ("gpt2", {"tp_size": 2, "num_microbatches": 3, "enable_metadata_cache": False}),
            ("gpt2", {"pp_size": 4, "zero_stage": 1, "num_layers_per_stage": [1, 2, 1, 1]}),
            ("bert", {"tp_size": 2, "zero_stage": 2, "microbatch_size": 2}),
            ("llama", {"dp_outside": False, "zero_stage": 2, "gradient_checkpoint_config": HALF}),
            ("gpt2", {**ZBV, **CHECKPOINTED, "zero_stage": 1, "enable_metadata_cache": False}),
            ("gpt2", {"overlap_communication": False, "overlap_allgather": True, "overlap_p2p": False, **ZERO1}),
        ),
    ],
    ids=str,
)
def test_training_equals_plain_pytorch(kind: str, given: dict[str, Any]) -> None:
    """Tests of stages and schedules without the Booster: tests/ranks/parallel."""
    check(kind, given)


@on_ranks(RANKS)
@pytest.mark.full
def test_hybrid_parallel_example_runs_as_printed() -> None:
    shown = everywhere(float(printed(EXAMPLE)[0].removeprefix("loss ")))
    assert len(set(shown)) == 1 and shown[0] < 3.0  # 97 words: a random guess has log(97) = 4.6


# -- precision


@on_ranks(RANKS)
@pytest.mark.parametrize("style", [{}, *full(ZBV)], ids=["1f1b", "zbv"])
def test_overflow_in_one_stage_skips_the_step_in_all(style: dict[str, Any]) -> None:
    """Only the last stage has a non-finite gradient: all stages skip the step and lower the scale."""
    plugin = HybridParallelPlugin(
        tp_size=1, pp_size=2, precision="fp16", num_microbatches=2, initial_scale=2.0**8, hysteresis=1, **style
    )
    booster, model = Booster(plugin=plugin), deep("gpt2", torch.float32)
    model, optimizer, *_ = booster.boost(model, optimizer_of(model))
    states, scales = [model.state_dict()], []
    for factor in (1.0, float("inf"), 1.0):
        booster.execute_pipeline(iter([Texts(2).items]), model, lambda out, _: out.loss * factor, optimizer)  # noqa: B023
        optimizer.step()
        optimizer.zero_grad()
        states.append(model.state_dict())
        scales.append(optimizer.scaler.scale)
    assert scales == [2.0**8, 2.0**7, 2.0**7] and everywhere(scales) == [scales] * RANKS
    changed = [
        {name.split(".")[2] for name in after if ".h." in name and not torch.equal(after[name], before[name])}
        for before, after in itertools.pairwise(states)
    ]
    assert changed == [set("01234"), set(), set("01234")]
    booster.close()


# -- invalid calls


@on_ranks(2)
def test_errors_of_invalid_calls_name_the_right_call() -> None:
    plugin = HybridParallelPlugin(tp_size=1, pp_size=2, precision="fp32", num_microbatches=2)
    booster, model = Booster(plugin=plugin), deep("llama")
    model, optimizer, *_ = booster.boost(model, optimizer_of(model))
    items = Texts(2).items
    raises(RuntimeError, r"1 of the 2 stages of the LlamaForCausalLM.*execute_pipeline", lambda: model(**items))
    with pytest.raises(RuntimeError, match=r"backward\(\) of a model in 2 pipeline stages: execute_pipeline"):
        booster.backward(torch.ones((), requires_grad=True), optimizer)
    with pytest.raises(ValueError, match="Optimizer should be passed when doing backward"):
        booster.execute_pipeline(iter([items]), model, own)
    with pytest.raises(TypeError, match=r"give an iterator, such as iter\(dataloader\)"):
        booster.execute_pipeline([items], model, own, optimizer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="was not boosted with this model"):
        booster.execute_pipeline(iter([items]), model, own, optimizer_of(nn.Linear(1, 1)))
    rank = dist.get_rank()
    lost = (items["a file"] for _ in range(1))
    for mine, words in ((iter([]), "StopIteration: "), (lost, "KeyError: 'a file'")):
        with pytest.raises((StopIteration, KeyError) if rank else PeerError) as error:
            booster.execute_pipeline(mine if rank else iter([items]), model, own, optimizer)
        assert rank or f"of a step failed:\n  rank 1: {words}" in str(error.value)
    found = booster.execute_pipeline(iter([items]), model, own, optimizer, broadcast_loss=True)  # still usable
    assert found["loss"].isfinite() and found["outputs"] is None
    booster.close()
