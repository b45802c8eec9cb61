"""shardwise.deepspeed on two ranks against plain torch, its checkpoints, zero.*, and the tutorial as printed."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import runpy
import sys
import tarfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sets import full
from shardwise.deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from shardwise.core.checkpoint.formats.detect import open_checkpoint
from shardwise.testing import PlainRecipe, PlainRun, assert_close, run_ranks, train_plain

RANKS = 2
TUTORIAL = Path(__file__).parents[3] / "examples" / "deepspeed_tutorial.py"
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 128.0
STEPS, CLIP = 3, 0.05


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))


def batches(accumulation: int, ranks: int = RANKS) -> list[list[list[tuple[Tensor, Tensor]]]]:
    """``[step][micro-batch][rank]``."""
    generator = torch.Generator().manual_seed(9)

    def one() -> tuple[Tensor, Tensor]:
        return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)

    return [[[one() for _ in range(ranks)] for _ in range(accumulation)] for _ in range(STEPS)]


def config(stage: int, accumulation: int = 1, precision: str = "fp32", **changes: Any) -> dict[str, Any]:
    half = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "loss_scale": SCALE, "auto_cast": True}},
    }[precision]
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.99], "eps": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 60,
            "stage3_param_persistence_threshold": 8,
            "stage3_max_live_parameters": 50,
        },
        **half,
        **changes,
    }


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], accumulation: int = 1) -> Tensor:
    dtype = next(iter(model.parameters())).dtype
    loss = nn.functional.mse_loss(model(batch[0].to(dtype)).float(), batch[1])
    return loss / accumulation


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-2, weight_decay=0.0)


@functools.cache
def plain(accumulation: int, precision: str) -> tuple[dict[str, Tensor], list[float]]:
    recipe = PlainRecipe(max_norm=CLIP, param_dtype=DTYPES[precision], loss_scale=SCALE if precision == "fp16" else 1.0)
    loss = functools.partial(loss_of, accumulation=accumulation)
    run = train_plain(net, loss, _adamw, batches(accumulation), recipe)
    return run.masters[-1], run.norms


def start(ds_config: dict[str, Any], **arguments: Any) -> deepspeed.DeepSpeedEngine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return deepspeed.initialize(model=net(), config=ds_config, **arguments)[0]


def train(engine: deepspeed.DeepSpeedEngine, steps: Any, rank: int) -> list[float]:
    norms = []
    for step in steps:
        for index, micro in enumerate(step):
            assert engine.is_gradient_accumulation_boundary() == (index == len(step) - 1)
            loss = loss_of(engine, micro[rank])
            returned = engine.backward(loss)
            assert torch.equal(returned, loss.detach() / len(step))
            engine.step()
            assert engine.was_step_applied() == (index == len(step) - 1)
        norms.append(engine.get_global_grad_norm() or math.nan)
    return norms


def close(engine: deepspeed.DeepSpeedEngine) -> None:
    engine.destroy()
    engine.session.mesh.close()


Result = dict[tuple[int, int, str], tuple[dict[str, Tensor], list[float]]]


def _every_stage(rank: int, cases: list[tuple[int, int, str]]) -> Result:
    results = {}
    for stage, accumulation, precision in cases:
        engine = start(config(stage, accumulation, precision))
        norms = train(engine, batches(accumulation), rank)
        assert (engine.global_steps, engine.micro_steps) == (STEPS, STEPS * accumulation)
        assert engine.get_batch_info() == (4 * accumulation * RANKS, 4, accumulation)
        results[stage, accumulation, precision] = (engine.state_dict(), norms)
        close(engine)
    return results


def every_stage(cases: list[tuple[int, int, str]]) -> Result:
    return _every_stage(torch.distributed.get_rank(), cases)


@pytest.mark.parametrize("turn", [0, *full(1, 2)])
def test_every_stage_equals_plain_torch(turn: int) -> None:
    # Every stage with every precision, a third of the pairs a turn; one pass and three of them take turns.
    places = [(stage, (stage + turn) % len(DTYPES)) for stage in range(4)]
    cases = [(stage, 1 if (stage + place) % 2 else 3, list(DTYPES)[place]) for stage, place in places]
    for results in run_ranks(RANKS, every_stage, cases, timeout=120.0):
        for (stage, accumulation, precision), (state, norms) in results.items():
            expected, expected_norms = plain(accumulation, precision)
            # Stages 0 and 1 add the passes up before they reduce, which 16 bits round differently.
            tolerance = 2e-6 if precision == "fp32" else 5e-3
            where = f"stage {stage}, {accumulation} passes, {precision}"
            assert_close(state, expected, tolerance, where)
            for norm, expected_norm in zip(norms, expected_norms, strict=True):
                assert norm == pytest.approx(expected_norm, rel=2e-2 if precision != "fp32" else 1e-5), where
                assert expected_norm > CLIP


# ---- gradient_allreduce_op="sum": gradients summed over ranks equal plain torch's of the summed loss

CLIP_SUMS = 2.5
"""Of three ranks' sums some are clipped and some are not; of their means none would be."""
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}}
SumCase = tuple[int, int, str, float]


@functools.cache
def plain_sums(ranks: int, accumulation: int, precision: str, clip: float) -> PlainRun:
    """The mean over ranks of losses that are ``ranks`` times as large."""
    recipe = PlainRecipe(max_norm=clip, param_dtype=DTYPES[precision], loss_scale=SCALE if precision == "fp16" else 1.0)
    return train_plain(
        net,
        lambda model, batch: loss_of(model, batch) * ranks / accumulation,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        batches(accumulation, ranks),
        recipe,
    )


Found = tuple[dict[str, Tensor], list[float], list[dict[str, Tensor]]]


def summed(cases: Sequence[SumCase]) -> list[Found]:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found: list[Found] = []
    for stage, accumulation, precision, clip in cases:
        changes = {"gradient_allreduce_op": "SUM", "gradient_clipping": clip, "optimizer": SGD}
        engine = start(config(stage, accumulation, precision, **changes))
        norms, gradients = [], []
        for step in batches(accumulation, ranks):
            for micro in step:
                engine.backward(loss_of(engine, micro[rank]))
                if engine.is_gradient_accumulation_boundary():
                    named = engine.module.named_parameters()
                    gradients.append({name: safe_get_full_grad(p).clone() for name, p in named})
                engine.step()
            norms.append(engine.get_global_grad_norm())
        found.append((engine.state_dict(), norms, gradients))
        close(engine)
    return found


@pytest.mark.parametrize(("ranks", "turn"), [(2, 0), *full((2, 1), (2, 2), (3, None))])
def test_sums_equal_plain_torch(ranks: int, turn: int | None) -> None:
    """On two ranks every stage has another precision each turn; on three, fp32 alone."""
    cases: list[SumCase] = [
        (stage, 1 + (stage + place) % 2, list(DTYPES)[place], CLIP_SUMS if clipped else 0.0)
        for stage in range(4)
        for place in ([0] if turn is None else [(stage + turn) % len(DTYPES)])
        for clipped in (False, True)
    ]
    for found in run_ranks(ranks, summed, cases, timeout=120.0):
        for (stage, accumulation, precision, clip), (state, norms, gradients) in zip(cases, found, strict=True):
            where = f"stage {stage}, {accumulation} passes, {precision}, clipped to {clip}"
            expected = plain_sums(ranks, accumulation, precision, clip)
            # 16 bits round a sum over passes before and after it is one over ranks.
            tolerance = 2e-6 if precision == "fp32" else 1e-2
            assert_close(state, expected.masters[-1], tolerance, where)
            assert norms == pytest.approx(expected.norms, rel=1e-5 if precision == "fp32" else 2e-2), where
            for got, want in zip(gradients, expected.gradients, strict=True):
                assert_close(got, want, 2e-6 if precision == "fp32" else 3e-2, where)


def test_some_sums_are_clipped_and_no_mean_would_be() -> None:
    norms = [norm for accumulation in (1, 2) for norm in plain_sums(3, accumulation, "fp32", CLIP_SUMS).norms]
    assert max(norms) > CLIP_SUMS > min(norms) and max(norms) / 3 < CLIP_SUMS


def test_what_is_no_sum_and_no_mean() -> None:
    with pytest.raises(ValueError, match="gradient_allreduce_op='max': give one of 'mean', 'sum'"):
        deepspeed.to_plan({"gradient_allreduce_op": "max"}, 2)
    with pytest.raises(ValueError, match="gradient_allreduce_op='sum' with sequence_parallel_size=2"):
        deepspeed.to_plan({"gradient_allreduce_op": "sum", "sequence_parallel_size": 2}, 2)
    mean, total = (deepspeed.to_plan({"gradient_allreduce_op": op}, 2)[0] for op in ("mean", "sum"))
    assert (mean.grad.over_ranks, total.grad.over_ranks) == ("mean", "sum")
    with pytest.raises(ValueError, match="over_ranks='sum' with average='tokens'"):
        total.but(average="tokens")


# ---- offload, checkpoints and zero.*


def offloaded(directory: str) -> dict[str, list[Tensor]]:
    """The parameters with parameters and state on the device, on the host, on a disk, and in shard groups of one."""
    rank = torch.distributed.get_rank()
    nvme = {"device": "nvme", "nvme_path": directory}
    cases = {
        "host": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "disk": {"offload_optimizer": nvme, "offload_param": {**nvme, "max_in_cpu": 0}},
        "part": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        "device": {},
    }
    results = {}
    for name, zero in cases.items():
        engine = start(config(3, zero_optimization={"stage": 3, "stage3_max_live_parameters": 50, **zero}))
        train(engine, batches(1), rank)
        state = dict(engine.session.memory().by_tier)
        assert name not in state or sum(state[name].values()) > 0
        results[name] = list(engine.state_dict().values())
        close(engine)
    return results


def test_offloading_changes_no_bit(tmp_path: Path) -> None:
    results = run_ranks(RANKS, offloaded, str(tmp_path))[0]
    for name, values in results.items():
        assert all(map(torch.equal, values, results["device"])), name
    assert_close(dict(zip(net().state_dict(), results["device"], strict=True)), plain(1, "fp32")[0], 2e-6, "offloaded")


def scheduled(**changes: Any) -> dict[str, Any]:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    return config(3, 1, scheduler=schedule, **changes)


def checkpoints(directory: str) -> None:
    rank = torch.distributed.get_rank()
    steps = batches(1) + batches(1)
    straight = start(scheduled())
    train(straight, steps[:2], rank)
    rates = [straight.get_lr()]
    assert straight.save_checkpoint(directory, client_state={"epoch": 4, "names": ["a"]})
    train(straight, steps[2:], rank)
    for stage in (3, 1):
        again = start(scheduled() | {"zero_optimization": {"stage": stage}})
        path, client = again.load_checkpoint(directory)
        assert path == f"{directory}/global_step2" and client == {"epoch": 4, "names": ["a"]}
        assert (again.global_steps, again.global_samples) == (2, 16)
        assert [again.get_lr()] == rates
        train(again, steps[2:], rank)
        assert again.get_lr() == straight.get_lr()
        for name, value in straight.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), (stage, name)
        close(again)
    alone = start(scheduled())
    before = alone.get_lr()
    _, client = alone.load_checkpoint(directory, "global_step2", load_module_only=True)
    assert client == {"epoch": 4, "names": ["a"]}
    assert alone.global_steps == 0 and alone.get_lr() == before != rates[0]
    assert not any("exp_avg" in each for each in alone.optimizer.state_dict()["state"].values())  # type: ignore
    # Another optimizer than the one that was saved: its states are not wanted, nor compared.
    model = net()
    other = [{"params": [p]} for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments: dict[str, Any] = {"optimizer": torch.optim.SGD(other, lr=0.5), "config": config(3)}
        second = deepspeed.initialize(model=model, **arguments)[0]
    for engine, kept in ((alone, rates[0]), (second, [0.5] * len(other))):
        path, client = engine.load_checkpoint(directory, "global_step2", load_optimizer_states=False)
        assert path == f"{directory}/global_step2" and client == {"epoch": 4, "names": ["a"]}
        assert (engine.global_steps, engine.global_samples, engine.get_lr()) == (2, 16, kept)
    assert alone.lr_scheduler.state_dict() == {"last_batch_iteration": 1}  # type: ignore[union-attr]
    assert not any("exp_avg" in each for each in alone.optimizer.state_dict()["state"].values())  # type: ignore
    close(second)
    with pytest.warns(UserWarning, match="nothing was loaded") if rank == 0 else contextlib.nullcontext():
        assert alone.load_checkpoint(directory, "missing") == (None, None)
    assert not alone.save_16bit_model(directory)
    close(alone)
    close(straight)
    engine = start(config(2, 1, "bf16"))
    assert engine.save_16bit_model(directory)
    torch.distributed.barrier()
    saved = torch.load(f"{directory}/pytorch_model.bin", weights_only=True)
    assert list(saved) == list(net().state_dict())
    assert all(torch.equal(saved[name], value.bfloat16()) for name, value in net().state_dict().items())
    close(engine)


def test_checkpoints_resume_exactly_and_change_stage(tmp_path: Path) -> None:
    run_ranks(RANKS, checkpoints, str(tmp_path))


class Recorded(nn.Module):
    """The model of tests/data/make_deepspeed.py."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.middle = nn.Linear(3, 5)
        self.back = nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("offset", torch.randn(3))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("hidden", torch.randn(2), persistent=False)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight


def foreign(
    directory: str, groups: list[list[str]], ds_config: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    model = Recorded()
    names = dict(model.named_parameters())
    held = [{"params": [names[name] for name in group]} for group in groups]
    optimizer = torch.optim.AdamW(held, lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        arguments: dict[str, Any] = {"optimizer": optimizer, "lr_scheduler": schedule, "config": ds_config}
        engine = deepspeed.initialize(model=model, **arguments)[0]
        path, client = engine.load_checkpoint(directory)
    assert path is not None
    counted = [engine.global_steps, engine.global_samples, schedule.last_epoch, client, engine.optimizer.loss_scale]
    result = engine.state_dict(), engine.optimizer.state_dict(), counted  # type: ignore[union-attr]
    close(engine)
    return result


HALF = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}}
THEIRS: dict[str, tuple[dict[str, Any], float]] = {
    "zero2-2ranks-fp32": (config(3), 1.0),
    "zero1-2ranks-fp16": (config(3, **HALF), 512.0),
    "zero3-2ranks-fp16": (config(2, **HALF), 512.0),
}


@pytest.mark.parametrize("case", ["zero3-2ranks-fp16", *full("zero2-2ranks-fp32", "zero1-2ranks-fp16")])
def test_checkpoints_of_deepspeed_are_read(case: str, tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parents[2] / "data" / "deepspeed.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    ds_config, scale = THEIRS[case]
    root = tmp_path / "ds" / case
    groups = [group["params"] for group in open_checkpoint(root).state()["optimizers"][0]["groups"]]
    state, optimizer, counted = run_ranks(RANKS, foreign, str(root), groups, ds_config)[0]
    assert counted == [3, 12, 3, {"epoch": 4}, scale], case
    truth = load_file(root / "truth.safetensors")
    expected = {k.removeprefix("model/"): v for k, v in truth.items() if k.startswith("model/")}
    assert expected
    assert all(torch.equal(state[name].float(), value.float()) for name, value in expected.items()), case
    assert len(optimizer["state"]) == sum(map(len, groups)) and optimizer["param_groups"][0]["lr"] != 0.5


def zero_contexts() -> None:
    rank = torch.distributed.get_rank()
    some = [torch.distributed.new_group([each]) for each in range(RANKS)][rank]
    with pytest.raises(NotImplementedError, match=r"no argument for zero_optimization\.zero_hpz_partition_size"):
        deepspeed.zero.Init(zero_param_parallel_group=some)
    everyone = torch.distributed.group.WORLD
    with deepspeed.zero.Init(data_parallel_group=everyone, config_dict_or_path=config(3)):
        model = net()
    assert all(p.is_meta for p in model.parameters())
    with deepspeed.zero.GatheredParameters(model[0].bias, modifier_rank=1):
        assert torch.equal(model[0].bias, net()[0].bias)  # type: ignore[index]
        if rank == 1:
            model[0].bias.data.fill_(7.0)
    engine = deepspeed.initialize(model=model, config=config(3))[0]
    expected = net().state_dict()
    expected["0.bias"].fill_(7.0)
    assert_close(engine.state_dict(), expected, 0.0, "gathered parameters")
    with deepspeed.zero.GatheredParameters([model[2].weight], modifier_rank=1):
        assert torch.equal(model[2].weight, expected["2.weight"])
        if rank == 1:
            model[2].weight.data.mul_(2.0)
    expected["2.weight"].mul_(2.0)
    with deepspeed.zero.GatheredParameters(model.parameters()):
        model[4].weight.data.zero_()
    assert_close(engine.state_dict(), expected, 0.0, "gathered parameters")
    train(engine, batches(1), rank)
    close(engine)


def test_zero_init_and_gathered_parameters() -> None:
    run_ranks(RANKS, zero_contexts)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(5, 9), nn.Linear(9, 3)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x)))


def frozen(directory: str) -> None:
    rank = torch.distributed.get_rank()

    def begin(seed: int, stage: int) -> deepspeed.DeepSpeedEngine:
        torch.manual_seed(seed)
        model = Frozen()
        if seed:
            model.base.load_state_dict(base)
        return deepspeed.initialize(model=model, config=config(stage))[0]

    torch.manual_seed(0)
    base = Frozen().base.state_dict()
    engine = begin(0, 3)
    train(engine, batches(1)[:2], rank)
    engine.save_checkpoint(directory, "whole")
    engine.save_checkpoint(directory, "part", exclude_frozen_parameters=True)
    assert (Path(directory) / "latest").read_text("utf-8").strip() == "part"
    train(engine, batches(1)[2:], rank)
    sizes = [sum(f.stat().st_size for f in (Path(directory) / tag).iterdir()) for tag in ("whole", "part")]
    assert sizes[0] - sizes[1] >= 4 * (5 * 9 + 9)
    again = begin(7, 1)
    assert again.load_checkpoint(directory)[0] == f"{directory}/part"
    train(again, batches(1)[2:], rank)
    for name, value in engine.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert engine.global_steps == again.global_steps == 3
    close(engine)
    again.module.base.requires_grad_(True)
    close(again)
    more = Frozen()
    more.extra = nn.Linear(2, 2)
    for model, name in ((Frozen().requires_grad_(True), r"base\.weight"), (more, r"extra\.weight")):
        other = deepspeed.initialize(model=model, config=config(1))[0]
        with pytest.raises(ValueError, match=name):
            other.load_checkpoint(directory)
        close(other)


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    run_ranks(RANKS, frozen, str(tmp_path))


def overflow() -> list[float]:
    scales = []
    changes = {"fp16": {"enabled": True, "initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 2}}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    engine = start(config(2, scheduler=schedule, **changes))
    before = engine.state_dict()
    for attempt in range(2):
        loss = engine(torch.randn(4, 5).half()).float().sum() * math.inf
        engine.backward(loss)
        if attempt == 1:
            with pytest.raises(RuntimeError, match="at its minimum"):
                engine.step()
        else:
            engine.step()
        scales.append(engine.optimizer.cur_scale)
    assert (engine.skipped_steps, engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (2, 2, -1)
    assert not engine.was_step_applied()
    assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
    close(engine)
    safe = start(config(3, precision="bf16"))
    safe.backward(safe(torch.randn(4, 5).bfloat16()).float().sum() * math.nan)
    safe.step()
    assert safe.skipped_steps == 1 and all(bool(v.isfinite().all()) for v in safe.state_dict().values())
    close(safe)
    return scales


def test_overflow_skips_the_schedule_too_and_stops_at_the_lowest_scale() -> None:
    assert run_ranks(RANKS, overflow) == [[2.0, 2.0]] * RANKS


def tutorial(stage: int, directory: str | None, epochs: int) -> str:
    saved = sys.argv
    sys.argv = [str(TUTORIAL), "--stage", str(stage), "--epochs", str(epochs)]
    sys.argv += [] if directory is None else ["--save", directory]
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names = runpy.run_path(str(TUTORIAL), run_name="__main__")
    finally:
        sys.argv = saved
    close(names["model_engine"])
    return output.getvalue()


def losses(text: str) -> list[float]:
    return [float(line.split()[-1]) for line in text.splitlines() if line.startswith("epoch")]


@pytest.mark.full
def test_the_tutorial_learns_and_resumes(tmp_path: Path) -> None:
    straight = losses(run_ranks(RANKS, tutorial, 3, None, 3)[0])
    assert len(straight) == 3 and straight[-1] < 0.6 * straight[0]
    first = run_ranks(RANKS, tutorial, 3, str(tmp_path), 1)[0]
    rest = run_ranks(RANKS, tutorial, 3, str(tmp_path), 3)[0]
    assert losses(first) + losses(rest) == straight
    assert json.dumps(straight).count("NaN") == 0
