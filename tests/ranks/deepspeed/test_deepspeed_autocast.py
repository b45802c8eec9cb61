"""``torch_autocast``: against plain torch under ``torch.autocast``, whose losses and weights are the same, once
gradients of modules that are safe in 16 bits are rounded where ranks exchange them.

Under fp16 torch's own ``GradScaler`` scales the loss of the reference, and skips the steps that overflow.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sets import campaign, full
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from shardwise.testing import assert_close, run_ranks

RANKS, STEPS, PASSES, CLIP = 2, 5, 3, 0.05
LIMIT = 1e-6
LOUD = 10.0  # so that the first loss scale is too large for fp16
NAMES = deepspeed.runtime.torch_autocast


class Net(nn.Module):
    """A layer norm and a softmax, which autocast leaves in fp32, between products, which it does not."""

    def __init__(self, width: int = 9) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(6, width), nn.LayerNorm(width), nn.Linear(width, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inside = self.first(x)
        self.seen = [inside.dtype, self.last(self.norm(torch.tanh(inside))).dtype, self.first.weight.dtype]
        loss: Tensor = nn.functional.cross_entropy(self.last(self.norm(torch.tanh(inside))), y)
        return LOUD * loss


def batches() -> list[list[list[tuple[Tensor, Tensor]]]]:
    """``[step][pass][rank]``."""
    generator = torch.Generator().manual_seed(1)

    def one() -> tuple[Tensor, Tensor]:
        return torch.randn(5, 6, generator=generator), torch.randint(4, (5,), generator=generator)

    return [[[one() for _ in range(RANKS)] for _ in range(PASSES)] for _ in range(STEPS)]


def averaged(model: nn.Module, grads: list[list[dict[str, Tensor]]], rounded: tuple[str, ...], to: torch.dtype) -> None:
    """Into ``.grad``: the mean over ranks of what ``grads``, ``[exchange][rank]``, adds up to. What is ``rounded`` is
    so on each rank before it is exchanged, and, where whole gradients stay in their place, behind its mean."""
    for name, param in model.named_parameters():
        total = torch.zeros_like(param)
        for ranks in grads:
            if name not in rounded:
                total += sum(grad[name] for grad in ranks) / RANKS
                continue
            mean = sum(grad[name].to(to).float() for grad in ranks) / RANKS
            total += mean if len(grads) > 1 else mean.to(to).float()
        param.grad = total


def plain(
    dtype: torch.dtype, scale: float, rounded: tuple[str, ...] = (), each_pass: bool = False
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Weights, losses of each step's last pass by rank, and scales after steps, of plain torch. Gradients of
    ``rounded`` travel in ``dtype``, after each pass or once a step."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=dtype is torch.float16)
    losses, scales = [], []
    for step in batches():
        exchanges = [[{} for _ in range(RANKS)] for _ in range(PASSES if each_pass else 1)]
        for turn, micro in enumerate(step):
            for rank, batch in enumerate(micro):
                model.zero_grad()
                with torch.autocast("cpu", dtype):
                    loss = model(*batch)
                scaler.scale(loss / PASSES).backward()
                losses.append(loss.item())
                own: dict[str, Tensor] = exchanges[turn if each_pass else 0][rank]
                for name, param in model.named_parameters():
                    own[name] = own[name] + param.grad if name in own else param.grad  # type: ignore[assignment]
        averaged(model, exchanges, rounded, dtype)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale() if dtype is torch.float16 else 1.0)
    return model.state_dict(), losses, scales


def engine_at(stage: int, block: dict[str, Any], width: int = 9, **more: Any) -> deepspeed.DeepSpeedEngine:
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "gradient_accumulation_steps": PASSES,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2, "weight_decay": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "torch_autocast": block,
        **more,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine: deepspeed.DeepSpeedEngine = deepspeed.initialize(model=Net(width), config=config)[0]
    return engine


LINEAR = ("first.weight", "first.bias", "last.weight", "last.bias")
NORM = ("norm.weight", "norm.bias")
SAFE: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "unrounded": ({}, {"communication_data_type": "fp32"}, ()),
    "default": ({}, {}, LINEAR),
    "of the program": ({"lower_precision_safe_modules": ["torch.nn.LayerNorm"]}, {}, NORM),
    "none": ({"lower_precision_safe_modules": []}, {}, ()),
}
"""Of the block and beside it, and whose gradients travel in its dtype."""


def trained(stage: int, dtype: str, safe: str) -> tuple[dict[str, Tensor], list[float], list[float], int]:
    inside, beside, _ = SAFE[safe]
    engine = engine_at(stage, {"enabled": True, "dtype": dtype, **inside}, **beside)
    assert engine.torch_autocast_enabled() and NAMES.is_autocast_initialized()
    assert engine.torch_autocast_dtype() == NAMES.get_autocast_dtype() == getattr(torch, dtype.removeprefix("torch."))
    losses, scales = [], []
    for step in batches():
        for micro in step:
            loss = engine(*micro[dist.get_rank()])
            with torch.autocast("cpu", torch.float16 if "b" in dtype else torch.bfloat16):  # has no say
                assert torch.equal(loss, engine(*micro[dist.get_rank()]))
            assert engine.module.seen == [engine.torch_autocast_dtype()] * 2 + [torch.float32]
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        scales.append(engine.optimizer.loss_scale)
    state, skipped = engine.state_dict(), engine.skipped_steps
    engine.destroy()
    return state, losses, scales, skipped


KINDS = ["bfloat16", "torch.float16"]
EVERY = [(safe, KINDS[(stage + place) % 2], stage) for place, safe in enumerate(SAFE) for stage in range(4)]
"""Every pair of two of the three: each stage with each block, and dtypes take turns."""
QUICK = [
    ("unrounded", "bfloat16", 0),
    ("default", "bfloat16", 1),
    ("of the program", "torch.float16", 3),
    ("none", "torch.float16", 2),
]
OTHERS = [(safe, KINDS[kind == KINDS[0]], stage) for safe, kind, stage in EVERY]


@pytest.mark.parametrize(
    ("safe", "dtype", "stage"), [*QUICK, *full(*(row for row in EVERY if row not in QUICK)), *campaign(*OTHERS)]
)
def test_as_plain_torch_under_autocast(safe: str, dtype: str, stage: int) -> None:
    found = run_ranks(RANKS, trained, stage, dtype, safe)
    kind, rounded = getattr(torch, dtype.removeprefix("torch.")), SAFE[safe][2]
    expected, losses, scales = plain(kind, 2.0**16, rounded, stage > 1)
    for rank, (state, own, own_scales, skipped) in enumerate(found):
        assert own == pytest.approx(losses[rank::RANKS], rel=LIMIT)
        assert_close(state, expected, LIMIT, f"stage {stage}, {dtype}")
        assert own_scales == scales
        assert skipped == sum(a != b for a, b in zip([2.0**16, *scales], scales, strict=False) if dtype != "bfloat16")
    assert dtype == "bfloat16" or (scales[0] < 2.0**16 and scales[-1] == scales[-2]), "some steps overflow, some do not"
    apart, unrounded = Net().state_dict(), plain(kind, 2.0**16)[0]
    assert max(float((expected[name] - apart[name]).abs().max()) for name in expected) > 100 * LIMIT, "it has trained"
    moved = max(float((expected[name] - unrounded[name]).abs().max()) for name in expected)
    if stage < 2 and dtype == "bfloat16":  # those of one product are rounded by autocast already, those of two are not
        assert (moved > 5 * LIMIT) is bool(rounded)


def outside(stage: int) -> list[str]:
    """Without the block an autocast around a pass changes nothing, as under DeepSpeed; with one warning."""
    engine = engine_at(stage, {"enabled": False, "dtype": "bfloat16"})
    batch = batches()[0][0][dist.get_rank()]
    expected = engine(*batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(engine(*batch), expected)
            assert engine.module.seen == [torch.float32] * 3
        with torch.autocast("cpu", torch.bfloat16), NAMES.autocast_if_enabled(engine):
            assert not torch.is_autocast_enabled("cpu")
    engine.destroy()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("stage", [*full(1), 3])
def test_an_autocast_of_the_program_has_no_say(stage: int) -> None:
    first, second = run_ranks(RANKS, outside, stage)
    assert len(first) == 2 and all("around a forward pass of the engine has no effect" in each for each in first)
    assert second == [], "one rank warns"


def refused() -> None:
    with pytest.raises(ValueError, match=r"torch_autocast\.dtype=None with torch_autocast\.enabled: give 'bfloat16'"):
        engine_at(1, {"enabled": True})
    with pytest.raises(ValueError, match=r"torch_autocast\.dtype=torch\.float16 with bf16\.enabled: give the same"):
        engine_at(1, {"enabled": True, "dtype": "fp16"}, bf16={"enabled": True})
    assert NAMES.get_default_autocast_lower_precision_modules()[0] == "torch.nn.modules.linear.Linear"
    assert len(NAMES.LOWER_PRECISION_SAFE_MODULES) == 4
    for names, told in (
        (["torch.nn.Linera"], "'torch.nn.Linera' cannot be imported"),
        (["Linear"], "'Linear' cannot be imported"),
        (["torch.Tensor"], "give a class of modules"),
        ("torch.nn.Linear", "give a list of classes"),
    ):
        with pytest.raises(ValueError, match=f"lower_precision_safe_modules.*{told}"):
            engine_at(1, {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": names})
    engine = engine_at(2, {"enabled": True, "dtype": "bf16"}, bf16={"enabled": True})
    assert engine(*batches()[0][0][0]).isfinite() and engine.module.seen[-1] is torch.bfloat16
    engine.destroy()


def travelling(stage: int, safe: str) -> None:
    """What is marked as DeepSpeed marks it does travel in that dtype: bytes are those of a formula."""
    inside, beside, rounded = SAFE[safe]
    engine = engine_at(stage, {"enabled": True, "dtype": "bf16", **inside}, 1000, **beside)
    named = dict(engine.module.named_parameters())
    assert {name for name, param in named.items() if NAMES.has_comm_dtype(param)} == set(rounded)
    for name, param in named.items():
        assert NAMES.get_comm_dtype(param) is (torch.bfloat16 if name in rounded else torch.float32)
        assert getattr(param, NAMES.PARAM_COMM_DTYPE_ATTR_NAME, None) is (torch.bfloat16 if name in rounded else None)
    for _ in range(2):  # the first pass exchanges more, to know the order
        engine.session.reset_traffic()
        for micro in batches()[0]:
            engine.backward(engine(*micro[dist.get_rank()]))
            engine.step()
    traffic = engine.session.traffic()
    sent = traffic["reduce_scatter"] if stage else traffic["all_reduce"]
    times = (PASSES if stage > 1 else 1) * (1 if stage else 2) * (RANKS - 1) / RANKS
    least = times * sum(param.numel() * (2 if name in rounded else 4) for name, param in named.items())
    padding = len(named) * 64
    assert least <= sent <= least + times * padding
    assert padding < 2 * min(named[names[0]].numel() for names in (LINEAR, NORM)), "another dtype would show"
    engine.destroy()


@pytest.mark.parametrize(
    ("safe", "stage"),
    [
        *((safe, stage) for safe, _, stage in QUICK),
        *full(*((safe, stage) for safe, kind, stage in EVERY if (safe, kind, stage) not in QUICK)),
    ],
)
def test_what_is_said_to_travel_in_16_bits_does(safe: str, stage: int) -> None:
    run_ranks(RANKS, travelling, stage, safe)


def both_halves() -> None:
    """Parameters that are in that dtype anyway are marked, too; and one that a safe module shares with another."""
    linear = list(LINEAR)
    for more, expected in (({"bf16": {"enabled": True}}, linear), ({"communication_data_type": "bf16"}, linear)):
        engine = engine_at(1, {"enabled": True, "dtype": "bf16"}, **more)
        assert [n for n, p in engine.module.named_parameters() if NAMES.has_comm_dtype(p)] == expected
        engine.destroy()


def test_what_is_in_that_dtype_is_marked() -> None:
    run_ranks(1, both_halves)


def test_what_does_not_go_together_is_named() -> None:
    run_ranks(1, refused)
