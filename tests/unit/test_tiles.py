"""Which optimizers need whole tensors, and which kernel steps a tile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.core.optim.lamb import FusedLAMB, Lamb
from shardwise.core.update import tiles as update_tiles
from shardwise.core.update.tiles import TileStepper, needs_whole_tensors


def test_which_optimizers_need_whole_tensors() -> None:
    params = [nn.Parameter(torch.ones(2, 2))]
    assert needs_whole_tensors(torch.optim.Adafactor(params)) and needs_whole_tensors(torch.optim.Muon(params))
    assert needs_whole_tensors(Lamb(params)) and not needs_whole_tensors(torch.optim.AdamW(params))
    assert needs_whole_tensors(FusedLAMB(params, max_grad_norm=0))
    with pytest.raises(ValueError, match=r"FusedLAMB cannot be sharded: max_grad_norm=1\.0 needs all gradients"):
        needs_whole_tensors(FusedLAMB(params))


@pytest.mark.parametrize("there", [False, True])
def test_a_fused_kernel_is_chosen_for_the_device_of_a_tile(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.12 Adagrad has none on GPUs, for which the meta device stands; tiles on the host keep theirs."""
    monkeypatch.setattr(update_tiles, "ADAGRAD_ON_GPUS", there)
    host, gpu = torch.zeros(2), torch.zeros(2, device="meta")
    for asked, of_host, of_gpu in ((None, True, True if there else None), (False, False, False), (True, True, True)):
        stepper = TileStepper(torch.optim.Adagrad([nn.Parameter(torch.zeros(2))], fused=asked), [])
        with stepper.groups() as groups:
            found = [stepper._group_for(groups, 0, value) for value in (host, gpu, host)]
        assert [group["fused"] for group in found] == [of_host, of_gpu, of_host]
        assert found[1]["foreach"] is (False if of_gpu and asked is None else None)
