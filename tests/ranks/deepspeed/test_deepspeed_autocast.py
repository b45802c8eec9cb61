"""``torch_autocast``: the same losses and weights as plain torch under ``torch.autocast``.

Under fp16, the reference scales its loss with torch's ``GradScaler``, which skips the steps that overflow.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import deepspeed
from shardwise.testing import assert_close
from tests.support.ds_setup import close, ds_config, optimizer_block, start
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

RANKS, STEPS, PASSES, CLIP = 2, 5, 3, 0.05
LIMIT = 1e-6
LOUD = 10.0  # makes the first loss scale too large for fp16


class Net(nn.Module):
    """A layer norm and a softmax, which autocast leaves in fp32, between matrix products, which it casts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inside = self.first(x)
        self.seen = [inside.dtype, self.last(self.norm(torch.tanh(inside))).dtype, self.first.weight.dtype]
        loss: Tensor = nn.functional.cross_entropy(self.last(self.norm(torch.tanh(inside))), y)
        return LOUD * loss


def batches() -> list[list[list[tuple[Tensor, Tensor]]]]:
    """Return ``[step][pass][rank]``."""
    generator = torch.Generator().manual_seed(1)

    def one() -> tuple[Tensor, Tensor]:
        return torch.randn(5, 6, generator=generator), torch.randint(4, (5,), generator=generator)

    return [[[one() for _ in range(RANKS)] for _ in range(PASSES)] for _ in range(STEPS)]


def plain(dtype: torch.dtype, scale: float) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Train with plain torch; return weights, the loss of each pass on each rank, and the scales after each step."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=dtype is torch.float16)
    losses, scales = [], []
    for step in batches():
        model.zero_grad()
        for micro in step:
            for batch in micro:
                with torch.autocast("cpu", dtype):
                    loss = model(*batch)
                scaler.scale(loss / PASSES).backward()
                losses.append(loss.item())
        for param in model.parameters():
            param.grad /= RANKS  # type: ignore[operator, union-attr]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale() if dtype is torch.float16 else 1.0)
    return model.state_dict(), losses, scales


def engine_at(stage: int, block: dict[str, Any], **more: Any) -> deepspeed.DeepSpeedEngine:
    adamw = optimizer_block("AdamW", lr=1e-2, eps=1e-2, weight_decay=1e-2)
    passes = {"gradient_accumulation_steps": PASSES, "gradient_clipping": CLIP}
    return start(Net(), ds_config(stage, 5, optimizer=adamw, torch_autocast=block, **passes, **more))


@on_ranks(RANKS)
@pytest.mark.parametrize(
    ("dtype", "stage"),
    [("bfloat16", 0), ("torch.float16", 3), *full(("torch.float16", 1), ("bfloat16", 2), ("bfloat16", 3))],
)
def test_torch_autocast_equals_plain_torch(dtype: str, stage: int) -> None:
    kind, rank = getattr(torch, dtype.removeprefix("torch.")), dist.get_rank()
    expected, losses, scales = plain(kind, 2.0**16)
    engine = engine_at(stage, {"enabled": True, "dtype": dtype})
    assert engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == kind
    own, own_scales = [], []
    for step in batches():
        for micro in step:
            loss = engine(*micro[rank])
            with torch.autocast("cpu", torch.float16 if "b" in dtype else torch.bfloat16):  # has no effect
                assert torch.equal(loss, engine(*micro[rank]))
            assert engine.module.seen == [kind] * 2 + [torch.float32]
            engine.backward(loss)
            engine.step()
            own.append(loss.item())
        own_scales.append(engine.optimizer.loss_scale)
    assert own == pytest.approx(losses[rank::RANKS], rel=LIMIT) and own_scales == scales
    skipped = sum(a != b for a, b in zip([2.0**16, *scales], scales, strict=False) if dtype != "bfloat16")
    assert engine.skipped_steps == skipped
    assert dtype == "bfloat16" or (scales[0] < 2.0**16 and scales[-1] == scales[-2]), "some steps overflow, some do not"
    assert_close(close(engine), expected, LIMIT, f"stage {stage}, {dtype}")
    first = Net().state_dict()
    assert max(float((expected[name] - first[name]).abs().max()) for name in expected) > 100 * LIMIT, "it has trained"


@on_ranks(1)
def test_conflicting_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch_autocast\.dtype=None with torch_autocast\.enabled: give 'bfloat16'"):
        engine_at(1, {"enabled": True})
    with pytest.raises(ValueError, match=r"torch_autocast\.dtype=torch\.float16 with bf16\.enabled: give the same"):
        engine_at(1, {"enabled": True, "dtype": "fp16"}, bf16={"enabled": True})
    engine = engine_at(2, {"enabled": True, "dtype": "bf16"}, bf16={"enabled": True})
    assert engine(*batches()[0][0][0]).isfinite() and engine.module.seen[-1] is torch.bfloat16
    engine.destroy()
