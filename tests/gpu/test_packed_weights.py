"""Tests of adapters over sharded 4-bit and 8-bit weights of bitsandbytes on a GPU, against training in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpu.on_device import device_of_rank, session_of
from shardwise.plan import zero
from shardwise.testing import RankPool


def trained(device_type: str, bits: int, stage: int | None, where: str) -> tuple[list[float], dict[str, Any], int]:
    """Return losses, state and bytes of parameters on the device; with ``stage=None`` in plain PyTorch."""
    from tests.support.packed_setup import adamw, adapted, base, silent, train

    device = device_of_rank(device_type)
    with silent():
        if dist.get_rank() == 0:
            base(where)
        dist.barrier()
        model = adapted(base(where), bits, device=device)
    optimizer = adamw(model)

    def update() -> None:
        step.step()
        step.zero_grad()

    if stage is None:
        step = optimizer
        losses = train(model, lambda loss: loss.backward(), update)
        return losses, {name: value.cpu() for name, value in model.state_dict().items()}, 0
    with session_of(zero(stage), device, model, lambda _: optimizer) as session:  # type: ignore[arg-type]
        step = session.optimizer  # type: ignore[assignment]
        losses = train(session.module, session.backward, update)
        return losses, session.module.state_dict(), session.memory().parameters_bytes


@pytest.mark.packages("bitsandbytes", "peft", "transformers")
@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_over_packed_weights(pool: RankPool, device_type: str, bits: int, tmp_path: Path) -> None:
    where = str(tmp_path)
    wanted, state, _ = pool.run(trained, device_type, bits, None, where)[0]
    whole = pool.run(trained, device_type, bits, 1, where)[0][2]
    for losses, found, held in pool.run(trained, device_type, bits, 3, where):
        # Kernels of 16-bit products may sum in another order.
        assert losses == pytest.approx(wanted, rel=1e-3)
        assert all(torch.equal(found[n], v) for n, v in state.items() if not v.is_floating_point())
        assert held <= whole // pool.world_size + 64
