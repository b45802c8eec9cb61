"""Methods and attributes of DeepSpeed's engine besides the usual training loop, against plain PyTorch.

* ``loss.backward()`` of the program, getters, monitors, ``compile``, clipping norms set during training;
* ``zero_grad()`` between passes, offload and reload of states;
* a second ``initialize`` of a model, which continues from its weights with a new engine;
* counts of steps, samples and passes, also if a pass or a step fails.
"""

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import deepspeed
from shardwise.deepspeed import groups
from shardwise.testing import PlainRecipe, assert_close, train_plain
from tests.support.ds_setup import close, ds_config, optimizer_block, start
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full

RANKS, MICRO, STEPS = 2, 3, 3


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))


def samples(step: int, rank: int, micro: int = 0) -> Tensor:
    return torch.randn(MICRO, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.to(next(iter(model.parameters())).dtype)).float().square().mean()


def plain(accumulation: int) -> tuple[dict[str, Tensor], list[float]]:
    """Train with plain PyTorch; return the weights, and the mean loss of the first rank in each step."""
    micros = range(accumulation)
    batches = [[[samples(step, rank, m) for rank in range(RANKS)] for m in micros] for step in range(STEPS)]
    recipe = PlainRecipe(mean_over_micro_batches=True)
    run = train_plain(net, loss_of, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), batches, recipe)
    return run.masters[-1], [sum(micro[0] for micro in step) / accumulation for step in run.losses]


def start_at(stage: int, **changes: Any) -> deepspeed.DeepSpeedEngine:
    return start(net(), ds_config(stage, MICRO, **changes))


HALVES: dict[str | None, dict[str, Any]] = {
    None: {},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64.0}},
    "bf16": {"bf16": {"enabled": True}},
}
QUICK: list[tuple[int, str | None]] = [(0, None), (1, "fp16"), (2, None), (3, "fp16"), (1, "bf16"), (3, "bf16")]


@on_ranks(RANKS)
@pytest.mark.parametrize(("stage", "half"), QUICK)
def test_loss_backward_of_the_program(stage: int, half: str | None) -> None:
    """The program calls ``loss.backward()``, in two passes a step."""
    rank, engine = dist.get_rank(), start_at(stage, gradient_accumulation_steps=2, **HALVES[half])
    with contextlib.suppress(ValueError):
        engine.scale(torch.ones(2))
    for step in range(STEPS):
        with engine.coalesce_grad_reduction() if step == 1 else contextlib.nullcontext():
            for micro in range(2):
                loss = loss_of(engine, samples(step, rank, micro))
                if micro == 0 and step == 2:
                    engine.backward(loss)  # engine.backward() and loss.backward() in one step
                elif engine.fp16_enabled() or step == 0:
                    engine.scale(loss).backward()
                else:
                    loss.backward()
                if step != 1:
                    engine.step()
        if step == 1:
            engine.step()
            engine.step()
    assert engine.global_steps == STEPS
    tolerance = {None: 1e-6, "fp16": 4e-3, "bf16": 2e-2}[half]
    assert_close(close(engine), plain(2)[0], tolerance, f"stage {stage}, {half}", floor=0.05)


@on_ranks(RANKS)
def test_empty_partition_cache_frees_gathered_parameters() -> None:
    engine, rank = start_at(3), dist.get_rank()
    engine.eval()
    engine(samples(0, rank))
    assert engine.session.memory().gathered_bytes > 0
    engine.empty_partition_cache()
    assert engine.session.memory().gathered_bytes == 0
    assert torch.isfinite(engine(samples(0, rank))).all()
    close(engine)


@on_ranks(RANKS)
def test_rank_0_prints_and_writes_metrics(tmp_path: Path) -> None:
    rank, here, (_, losses) = dist.get_rank(), io.StringIO(), plain(2)
    logging.getLogger("shardwise.deepspeed").setLevel(logging.INFO)  # other tests change it
    engine = start_at(
        3,
        gradient_accumulation_steps=2,
        csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": f"job{rank}"},
        steps_per_print=2,
        fp16={"enabled": True, "loss_scale": 64.0},
    )
    assert engine.monitor.enabled
    with contextlib.redirect_stdout(here):
        for step in range(STEPS):
            for micro in range(2):
                engine.backward(loss_of(engine, samples(step, rank, micro)))
                engine.step()
    close(engine)
    assert "step=2, skipped=0, lr=[0.1]" in here.getvalue() if rank == 0 else here.getvalue() == ""
    assert not (tmp_path / "job1").exists()
    columns = {"lr": [0.1] * 3, "loss_scale": [64.0] * 3, "train_loss": losses}
    for name, values in columns.items() if rank == 0 else ():
        head, *lines = (tmp_path / "job0" / f"Train_Samples_{name}.csv").read_text("utf-8").splitlines()
        assert head == f"step,{name}"
        assert [int(line.split(",")[0]) for line in lines] == [RANKS * 2 * MICRO * n for n in (1, 2, 3)]
        assert [float(line.split(",")[1]) for line in lines] == pytest.approx(values, rel=4e-3)


@on_ranks(RANKS)
def test_getters_and_other_methods() -> None:
    rank = dist.get_rank()
    engine = start_at(
        2,
        fp16={"enabled": True, "loss_scale_window": 5},
        zero_optimization={"stage": 2, "reduce_bucket_size": 70, "offload_optimizer": {"device": "cpu"}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        communication_data_type="fp32",
    )
    assert (engine.zero_optimization_stage(), engine.zero_reduce_bucket_size()) == (2, 70)
    assert engine.zero_optimization() and engine.zero_optimization_partition_gradients()
    assert not engine.zero_optimization_partition_weights() and not engine.is_first_weights_partition_group()
    assert engine.zero_offload_optimizer().device == "cpu" and engine.zero_offload_param() is None  # type: ignore[union-attr]
    assert engine.fp16_enabled() and engine.dynamic_loss_scale() and engine.loss_scale() == 0
    assert engine.optimizer.dynamic_loss_scale and engine.optimizer.cur_scale == 65536
    scaler = engine.optimizer.loss_scaler
    assert scaler.loss_scale == scaler.cur_scale == 65536 and scaler.dynamic
    assert engine.communication_data_type is torch.float32 and engine.get_data_types() == (torch.float16, torch.float16)
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("SGD", "WarmupLR")
    assert engine.optimizer_params() == {"lr": 0.1} and engine.get_mom() == [0]
    assert engine.train_batch_size() == 2 * MICRO
    assert (engine.get_data_parallel_rank(), engine.dp_world_size, engine.mp_world_size) == (rank, 2, 1)
    assert (groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()) == (rank, RANKS)
    assert (groups.get_tensor_model_parallel_src_rank(), groups.get_sequence_parallel_rank()) == (rank, 0)
    assert not engine.monitor.enabled and isinstance(engine.basic_optimizer, torch.optim.SGD)
    engine.module[0].bias.requires_grad_(False)
    state = engine.module_state_dict(prefix="m.", exclude_frozen_parameters=True)
    assert sorted(state) == ["m.0.weight", "m.2.bias", "m.2.weight"]
    whole = {name: torch.full_like(value, 2.0) for name, value in engine.module_state_dict().items()}
    engine.load_module_state_dict({"module": whole})
    assert all((value == 2).all() for value in engine.module_state_dict().values())
    # test_engine_compile.py tests training with torch.compile.
    compiled: list[dict[str, Any]] = []
    engine.session.module.compile = lambda **options: compiled.append(options)  # type: ignore[assignment, method-assign]
    for _ in range(2):
        engine.compile(backend="eager", compile_kwargs={"dynamic": False, "backend": "x"})
    assert engine.is_compiled and compiled == [{"dynamic": False, "backend": "eager"}]
    raises(NotImplementedError, "schedule", lambda: engine.compile(schedule=[1]))
    for wrong in ({"keep_vars": True}, {"destination": {}}):
        raises(NotImplementedError, next(iter(wrong)), engine.module_state_dict, **wrong)
    raises(NotImplementedError, "custom_load_fn", lambda: engine.load_module_state_dict(whole, custom_load_fn=print))
    close(engine)


PASSES, LIMITS = 2, [0.015, 0.003, 0.0, 0.006]


def plain_clipped(limits: list[float], turns: tuple[int, ...]) -> tuple[dict[str, Tensor], list[float]]:
    """Train on the passes ``turns`` of each step; return the weights, and the norms before clipping."""
    model, norms = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.5)
    for step, limit in enumerate(limits):
        optimizer.zero_grad()
        every = [loss_of(model, samples(step, rank, turn)) for turn in turns for rank in range(RANKS)]
        (sum(every) / (PASSES * RANKS)).backward()  # type: ignore[union-attr]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit or float("inf"))))
        optimizer.step()
    return model.state_dict(), norms


def with_passes(stage: int, clip: float = 0.0) -> deepspeed.DeepSpeedEngine:
    sgd = optimizer_block("SGD", lr=1.5)
    return start_at(stage, gradient_clipping=clip, optimizer=sgd, gradient_accumulation_steps=PASSES)


def passes(engine: deepspeed.DeepSpeedEngine, step: int, before: Any = lambda: None) -> None:
    for turn in range(PASSES):
        before()
        engine.backward(loss_of(engine, samples(step, dist.get_rank(), turn)))
        engine.step()


@on_ranks(RANKS)
@pytest.mark.parametrize(("stage", "clip"), [(1, 1.0), (3, 0.3), *full((0, 0.0), (2, 0.0), (3, 0.0))])
def test_clip_grad_set_during_training_is_used(stage: int, clip: float) -> None:
    weights, norms = plain_clipped(LIMITS, (0, 1))
    assert min(norms) > max(LIMITS)
    engine = with_passes(stage, clip)
    for step, (limit, norm) in enumerate(zip(LIMITS, norms, strict=True)):
        engine.optimizer.clip_grad = limit
        passes(engine, step)
        assert limit == engine.gradient_clipping() == engine.optimizer.clip_grad
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
    assert_close(close(engine), weights, rtol=1e-6, what="set in training")


@on_ranks(RANKS)
def test_invalid_or_different_clip_grad_is_refused() -> None:
    engine = with_passes(2)
    with pytest.raises(TypeError, match="max_norm='a'"):
        engine.optimizer.clip_grad = "a"
    with pytest.raises(ValueError, match="max_norm=-1"):
        engine.optimizer.clip_grad = -1
    if dist.get_rank() == 0:
        engine.optimizer.clip_grad = 0.5
    raises(ValueError, r"different settings[\s\S]*max_norm|max_norm[\s\S]*different settings", passes, engine, 0)
    engine.destroy()


@on_ranks(RANKS)
@pytest.mark.parametrize(
    ("stage", "whose"),
    [(1, "engine"), (3, "engine"), (3, "optimizer"), *full((0, "engine"), (2, "engine"), (1, "optimizer"))],
)
def test_zero_grad_before_each_pass_of_an_update(stage: int, whose: str) -> None:
    """DeepSpeed's engine sets ``.grad`` to ``None``; at stages 2 and 3 the sums are stored elsewhere and stay."""
    engine = with_passes(stage)
    for step in range(STEPS):
        passes(engine, step, engine.zero_grad if whose == "engine" else engine.optimizer.zero_grad)
    assert engine.global_steps == STEPS
    keeps = stage >= 2 and whose == "engine"
    assert_close(close(engine), plain_clipped([0.0] * STEPS, (0, 1) if keeps else (1,))[0], rtol=1e-6, what=whose)


@on_ranks(1)
def test_optimizer_offloads_and_reloads_states() -> None:
    engine = with_passes(1)
    assert engine.optimizer.gradient_accumulation_steps == PASSES
    engine.tput_timer.update_epoch_count()
    with pytest.raises(AttributeError):
        engine.optimizer.loss_scaler.scale_window = 5  # it would have no effect
    passes(engine, 0)
    engine.optimizer.offload_states(include=["optim_states"], device="cpu", pin_memory=False, non_blocking=False)
    raises(RuntimeError, None, lambda: engine.backward(loss_of(engine, samples(1, 0))))
    engine.optimizer.reload_states(non_blocking=False)
    passes(engine, 1)
    assert engine.global_steps == 2
    engine.destroy()


class Net(nn.Module):
    """A model with tied weights, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.inner, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.inner.bias.requires_grad_(False)
        self.register_buffer("offset", torch.arange(6.0))

    def forward(self, tokens: Tensor) -> Tensor:
        inside = torch.tanh(self.inner(self.embed(tokens)) + self.offset.to(self.inner.weight.dtype))
        return self.head(inside).float().logsumexp(-1).mean()  # type: ignore[no-any-return]


def config(stage: int, half: bool) -> dict[str, Any]:
    return ds_config(stage, 2, optimizer=optimizer_block("AdamW", lr=1e-2), bf16={"enabled": half})


def train(engine: deepspeed.DeepSpeedEngine, first: int) -> dict[str, Tensor]:
    for step in range(first, first + 2):
        generator = torch.Generator().manual_seed(step * 2 + dist.get_rank())
        engine.backward(engine(torch.randint(7, (2, 3), generator=generator)))
        engine.step()
    return engine.state_dict()


def texts(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if "already has an engine" in str(each.message)]


@on_ranks(2)
@pytest.mark.parametrize(
    ("stages", "half"), [*full(((1, 1), True)), ((2, 3), False), *full(((3, 3), True)), ((3, 0), False)]
)
def test_second_initialize_of_a_model(stages: tuple[int, int], half: bool) -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        model = Net()
        first = deepspeed.initialize(model=model, config=config(stages[0], half))[0]
        weights = train(first, 0)
        engine = deepspeed.initialize(model=model, config=config(stages[1], half))[0]
        assert engine.module is model and first.session.closed
        assert_close(engine.state_dict(), weights, 0.0, "the first one's weights, unrounded")
        assert model.head.weight is model.embed.weight and not model.inner.bias.requires_grad
        trained = train(engine, 2)
        engine.destroy()
        other = Net()
        other.load_state_dict(weights)
        expected = deepspeed.initialize(model=other, config=config(stages[1], half))[0]
        assert_close(trained, train(expected, 2), 0.0, "as an engine that is made of these weights")
        expected.destroy()
        if stages[1] < 3:  # parameters stay readable; no warning, because the first engine was destroyed
            deepspeed.initialize(model=other, config=config(stages[0], half))[0].destroy()
    assert len(texts(caught)) == (dist.get_rank() == 0)
    begin = "initialize() of a Net that already has an engine: that engine and its"
    assert all(text.startswith(begin) for text in texts(caught))


# -- counts if a pass fails or a step raises


def started(stage: int, passes: int = 4, **more: Any) -> deepspeed.DeepSpeedEngine:
    """Start an engine with weights of 0 and SGD; its learning rate halves with each step."""
    model = nn.Linear(4, 2, bias=False)
    nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    config = ds_config(stage, gradient_accumulation_steps=passes, **more)
    return start(model, config, optimizer=sgd, lr_scheduler=schedule)


def loss(engine: deepspeed.DeepSpeedEngine, number: float) -> Tensor:
    return engine(torch.full((1, 4), float(number), dtype=engine.module.weight.dtype)).float().sum()


def make(engine: deepspeed.DeepSpeedEngine, *numbers: float) -> None:
    for number in numbers:
        engine.backward(loss(engine, number))
        engine.step()


def seen(engine: deepspeed.DeepSpeedEngine) -> list[float]:
    """Return a weight, the learning rate, and the counts."""
    counted = [engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps]
    return [float(engine.state_dict()["weight"][0, 0]), engine.get_lr()[0], *map(float, counted)]


def failing(engine: deepspeed.DeepSpeedEngine) -> None:
    value = loss(engine, 3.0)
    value.register_hook(lambda grad: grad.item() + "")
    with pytest.raises(TypeError):
        engine.backward(value)


@on_ranks(2)
@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("stage", [0, 2])
def test_failed_pass_restarts_the_count_of_passes(stage: int, clears: bool) -> None:
    engine = started(stage)
    make(engine, 1, 2)
    failing(engine)
    if clears:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no warning: zero_grad() is meant to drop the failed step
            engine.zero_grad()
        assert not engine.session.passes.accumulated_passes()
    with warnings.catch_warnings(record=True, action="always") as told:
        make(engine, 1, 2, 3)  # the warning asks for all passes of the step again
        assert clears or any("Make all passes of the step again" in str(each.message) for each in told)
    assert engine.global_steps == 0 and seen(engine)[0] == 0.0
    make(engine, 4)
    samples = 4 * engine.dp_world_size
    assert seen(engine) == [-1.25, 0.25, 1.0, 6.0, samples, 0.0]  # the mean of 1, 2, 3 and 4
    close(engine)


@on_ranks(2)
def test_update_counts_if_an_exception_follows_it() -> None:
    """The exception follows the update, as a Ctrl-C that is raised at its end."""
    engine = started(2)
    make(engine, 1, 2, 3)
    engine.backward(loss(engine, 4))
    made = engine.optimizer.step

    def step() -> None:
        made()
        raise KeyboardInterrupt

    with mock.patch.object(engine.optimizer, "step", step), pytest.raises(KeyboardInterrupt):
        engine.step()
    assert seen(engine) == [-1.25, 0.25, 1.0, 4.0, 4 * engine.dp_world_size, 0.0]
    make(engine, 1, 2, 3, 4)
    assert engine.global_steps == 2
    close(engine)


@on_ranks(2)
def test_global_samples_count_the_passes_of_each_step() -> None:
    engine = started(2, 1, managed_gradient_accumulation=False)
    for passes, counted in ((3, (1, 3)), (1, (2, 4)), (2, (3, 6))):
        for _ in range(passes):
            engine.backward(loss(engine, 1))
        engine.step()
        assert (engine.global_steps, engine.global_samples / engine.dp_world_size) == counted
    engine.backward(loss(engine, 1))
    engine.zero_grad()  # at stage 2 it keeps the pass
    engine.optimizer.zero_grad()  # this drops the pass, so that no step counts it
    engine.backward(loss(engine, 1))
    with contextlib.suppress(ValueError):
        engine.backward(torch.ones(2))
    value = loss(engine, 1)
    engine.backward(value, retain_graph=True)
    engine.backward(value)
    engine.step()
    assert (engine.global_steps, engine.global_samples / engine.dp_world_size) == (4, 8)
    close(engine)
