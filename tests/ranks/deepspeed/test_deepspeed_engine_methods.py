"""Methods of DeepSpeed's engine beside training, on two ranks at every stage, against plain PyTorch."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from shardwise.testing import assert_close, run_ranks

RANKS, MICRO, STEPS = 2, 3, 3


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))


def samples(step: int, rank: int, micro: int = 0) -> Tensor:
    return torch.randn(MICRO, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = model(x.to(next(iter(model.parameters())).dtype)).float().square().mean()
    return value


def plain(accumulation: int) -> tuple[dict[str, Tensor], list[float]]:
    """The weights, and the first rank's losses by step."""
    model, losses = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        every = [loss_of(model, samples(step, rank, m)) for m in range(accumulation) for rank in range(RANKS)]
        losses.append(float(sum(loss.item() for loss in every[::RANKS]) / accumulation))
        optimizer.zero_grad()
        (sum(every) / len(every)).backward()  # type: ignore[union-attr]
        optimizer.step()
    return model.state_dict(), losses


def start(stage: int, **changes: Any) -> deepspeed.DeepSpeedEngine:
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **changes,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return deepspeed.initialize(model=net(), config=config)[0]


def close(engine: deepspeed.DeepSpeedEngine) -> dict[str, Tensor]:
    state = engine.module_state_dict()
    engine.destroy()
    engine.session.mesh.close()
    return state


HALVES: dict[str | None, dict[str, Any]] = {
    None: {},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64.0}},
    "bf16": {"bf16": {"enabled": True}},
}
FP16 = HALVES["fp16"]


def _own_backward(stage: int, rank: int, changes: dict[str, Any]) -> dict[str, Tensor]:
    """The program calls ``loss.backward()`` itself, in two passes a step."""
    engine = start(stage, gradient_accumulation_steps=2, **changes)
    with contextlib.suppress(ValueError):
        engine.scale(torch.ones(2))
    for step in range(STEPS):
        with engine.coalesce_grad_reduction() if step == 1 else contextlib.nullcontext():
            for micro in range(2):
                loss = loss_of(engine, samples(step, rank, micro))
                if micro == 0 and step == 2:
                    engine.backward(loss)  # both ways in one step
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
    return close(engine)


def _cache(rank: int) -> tuple[int, int]:
    engine = start(3)
    engine.eval()
    engine(samples(0, rank))
    before = engine.session.memory().gathered_bytes
    engine.empty_partition_cache()
    after = engine.session.memory().gathered_bytes
    assert torch.isfinite(engine(samples(0, rank))).all()
    close(engine)
    return before, after


def _watched(rank: int, root: str) -> str:
    """A run with a monitor; what the rank printed."""
    here = io.StringIO()
    engine = start(
        3,
        gradient_accumulation_steps=2,
        csv_monitor={"enabled": True, "output_path": root, "job_name": f"job{rank}"},
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
    return here.getvalue()


def _names(rank: int) -> None:
    engine = start(
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
    assert engine.zero_sub_group_size() is None
    assert engine.fp16_enabled() and engine.dynamic_loss_scale() and engine.loss_scale() == 0
    assert engine.optimizer.dynamic_loss_scale and engine.optimizer.cur_scale == 65536
    scaler = engine.optimizer.loss_scaler
    assert scaler.loss_scale == scaler.cur_scale == 65536 and scaler.dynamic
    assert engine.communication_data_type is torch.float32 and engine.get_data_types() == (torch.float16, torch.float16)
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("SGD", "WarmupLR")
    assert engine.optimizer_params() == {"lr": 0.1} and engine.get_mom() == [0]
    assert engine.train_batch_size() == 2 * MICRO
    assert (engine.get_data_parallel_rank(), engine.dp_world_size, engine.mp_world_size) == (rank, 2, 1)
    assert not engine.monitor.enabled and isinstance(engine.basic_optimizer, torch.optim.SGD)
    for name, advice in (("allreduce_bucket", "torch.distributed"), ("timers", "torch.profiler")):
        assert not hasattr(engine, name)
        with pytest.raises(AttributeError, match=f"'{name}' of DeepSpeed's engine is not available: .*{advice}"):
            getattr(engine, name)
    engine.module[0].bias.requires_grad_(False)
    state = engine.module_state_dict(prefix="m.", exclude_frozen_parameters=True)
    assert sorted(state) == ["m.0.weight", "m.2.bias", "m.2.weight"]
    whole = {name: torch.full_like(value, 2.0) for name, value in engine.module_state_dict().items()}
    engine.load_module_state_dict({"module": whole})
    assert all((value == 2).all() for value in engine.module_state_dict().values())
    # What torch.compile then does is tried in test_engine_compile.py.
    compiled: list[dict[str, Any]] = []
    engine.session.module.compile = lambda **options: compiled.append(options)  # type: ignore[assignment, method-assign]
    for _ in range(2):
        engine.compile(backend="eager", compile_kwargs={"dynamic": False, "backend": "x"})
    assert engine.is_compiled and compiled == [{"dynamic": False, "backend": "eager"}]
    with pytest.raises(NotImplementedError, match="schedule"):
        engine.compile(schedule=[1])
    for wrong in ({"keep_vars": True}, {"destination": {}}):
        with pytest.raises(NotImplementedError, match=next(iter(wrong))):
            engine.module_state_dict(**wrong)
    with pytest.raises(NotImplementedError, match="custom_load_fn"):
        engine.load_module_state_dict(whole, custom_load_fn=print)
    close(engine)


def _all(root: str) -> dict[str, Any]:
    rank = dist.get_rank()
    _names(rank)
    return {
        "own": {(stage, half): _own_backward(stage, rank, HALVES[half]) for stage, half in OWN},
        "cache": _cache(rank),
        "printed": _watched(rank, root),
    }


OWN = [(0, None), (1, "fp16"), (2, None), (3, "fp16"), (1, "bf16"), (3, "bf16")]


def test_methods_beside_training(tmp_path: Path) -> None:
    first, second = run_ranks(RANKS, _all, str(tmp_path))
    twice, losses = plain(2)
    for (stage, half), state in first["own"].items():
        tolerance = {None: 1e-6, "fp16": 4e-3, "bf16": 2e-2}[half]
        assert_close(state, twice, tolerance, f"stage {stage}, {half}", floor=0.05)
    assert first["cache"][0] > 0 and first["cache"][1] == second["cache"][1] == 0
    assert "step=2, skipped=0, lr=[0.1]" in first["printed"] and second["printed"] == ""
    assert not (tmp_path / "job1").exists()  # the first rank writes alone
    wanted = ("lr", "train_loss", "loss_scale")
    found = {}
    for name in wanted:
        lines = (tmp_path / "job0" / f"Train_Samples_{name}.csv").read_text("utf-8").splitlines()
        assert lines[0] == f"step,{name}"
        found[name] = [float(line.split(",")[1]) for line in lines[1:]]
        assert [int(line.split(",")[0]) for line in lines[1:]] == [RANKS * 2 * MICRO * n for n in (1, 2, 3)]
    assert found["lr"] == [0.1] * 3 and found["loss_scale"] == [64.0] * 3
    assert found["train_loss"] == pytest.approx(losses, rel=4e-3)
