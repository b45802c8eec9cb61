"""Models with sequence parallelism, compared with the same models on one rank."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.core.comm import Group, GroupMaker, P2PChannel
from shardwise.core.parallel.sequence import SequenceAxis, share_sequences
from shardwise.plan import SequencePlan
from shardwise.testing import assert_close
from tests.support.tensor_setup import Case, Exact, loss_of

LENGTH, ROWS, PAD = 11, 3, 27


@dataclass(frozen=True)
class Ring:
    """A sequence-parallel group of all ranks."""

    group: Group
    wire: P2PChannel

    @property
    def axis(self) -> SequenceAxis:
        return SequenceAxis(self.group, self.wire)


@contextmanager
def ring_of_all() -> Iterator[Ring]:
    maker = GroupMaker(torch.device("cpu"), True, 60.0)
    ranks = [list(range(dist.get_world_size()))]
    group, wire = maker.make("sp", ranks), maker.make_wire("sp", ranks)
    yield Ring(group, wire)
    group.close()
    maker.close()


def batch_of(case: Case, length: int = LENGTH, padded: str = "", packed: bool = False) -> dict[str, Tensor]:
    """Return a batch in which all sequences have one length.

    Args:
        case: its inputs in addition to ids.
        length: in tokens.
        padded: ``"right"``, ``"left"`` or ``"both"``: all rows but the first have padding there, without labels.
        packed: each row has the positions of two sequences.
    """
    generator = torch.Generator().manual_seed(5)
    given = {name: value for name, value in case.inputs(generator).items() if name != "labels" or value.dim() == 1}
    labelled = "labels" in case.inputs(torch.Generator().manual_seed(5))
    ids = torch.randint(0, PAD, (ROWS, length), generator=generator)
    if labelled and "labels" not in given:
        high = 3 if "TokenClassification" in case.kind else PAD
        given["labels"] = torch.randint(0, high, (ROWS, length), generator=generator)
        given["labels"][0, :2] = -100
    if padded:
        mask = torch.ones_like(ids)
        if padded in ("right", "both"):
            mask[1, length - length // 3 :] = 0
        if padded in ("left", "both"):
            mask[2, : length // 3] = 0
        given["attention_mask"] = mask
        ids = ids.masked_fill(mask == 0, PAD)
        if "labels" in given and given["labels"].dim() == 2:
            # Implementations of attention differ in what a padding token predicts that attends to nothing.
            before = torch.nn.functional.pad(mask, (1, 0), value=1)[:, :-1]
            given["labels"] = given["labels"].masked_fill((mask == 0) | (before == 0), -100)
    if packed:
        first = length // 2 + 1
        given["position_ids"] = torch.cat([torch.arange(first), torch.arange(length - first)]).expand(ROWS, -1)
    return given | {"input_ids": ids}


def grads_of(model: nn.Module, batch: dict[str, Tensor], exact: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and every gradient; use ``exact=False`` where backward recomputes layers, outside of any mode."""
    model.zero_grad()
    with Exact() if exact else nullcontext():
        loss = loss_of(model(**batch))
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def averaged(grads: dict[str, Tensor], axis: SequenceAxis) -> dict[str, Tensor]:
    """Average over the ranks, as an engine does it."""
    flat = torch.cat([grad.flatten() for grad in grads.values()])
    mean = (torch.stack(axis.gathered(flat)).sum(0) / axis.size).split([g.numel() for g in grads.values()])
    return {name: part.view_as(grad) for (name, grad), part in zip(grads.items(), mean, strict=True)}


def compare(case: Case, batch: dict[str, Tensor], plan: SequencePlan, ring: Ring, passes: int = 1) -> None:
    """Compare the loss and every gradient of some passes, and check that the model can be restored."""
    plain, model = case.made(), case.made()
    expected_loss, expected = grads_of(plain, batch)
    sequences = share_sequences(model, plan, ring.group, ring.wire)
    sequences.install()
    what = f"{case.kind}, {plan.mode}, {sorted(batch)}"
    for _ in range(passes):
        loss, grads = grads_of(model, dict(batch))
        assert_close({"loss": loss}, {"loss": expected_loss}, 1e-11, what)
        # The gradient of a key's bias is 0 except for rounding.
        assert_close(averaged(grads, ring.axis), expected, 1e-11, f"{what}: gradients", floor=1e-2)
    sequences.remove()
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.config._attn_implementation == plain.config._attn_implementation
