"""Tensor-parallel transformers models, compared with the unsplit models: how they are built, run and compared."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.core.parallel.tensor import Axis, TPPlan, cut_model, parts_of
from shardwise.plan import TensorPlan
from shardwise.testing import assert_close

VOCABULARY, PAD, LENGTH, ROWS = 29, 27, 6, 3


class Exact(TorchFunctionMode):
    """Keeps in fp64 what models always compute in fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float and args[0].dtype in (torch.float64, torch.int64):  # positions times frequencies
            return args[0].double()
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in kwargs.items()}
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Case:
    """A model with inputs.

    Attributes:
        kind: its class.
        config: of the model.
        inputs: in addition to ids and mask, for a loss.
        padded: whether some tokens are padding.
    """

    kind: str
    config: Any
    inputs: Callable[[torch.Generator], dict[str, Tensor]] = field(default=lambda _: {})
    padded: bool = False

    def made(self) -> nn.Module:
        """Return the model in fp64 and in training mode; no parameter has its usual initial value."""
        torch.manual_seed(3)
        model: nn.Module = getattr(transformers, self.kind)(copy.deepcopy(self.config))
        model = model.double().train()
        for name, param in model.named_parameters():
            nn.init.normal_(param, mean=float("norm" in name.lower() or "ln_" in name), std=0.25)
        return model

    def batch(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(5)
        given = self.inputs(generator)
        if "input_ids" not in given and "pixel_values" not in given and "input_features" not in given:
            given["input_ids"] = torch.randint(0, PAD, (ROWS, LENGTH), generator=generator)
        if self.padded:
            ids = given["input_ids"]
            mask = torch.ones_like(ids)
            mask[1, ..., -2:] = 0
            given["input_ids"] = ids.masked_fill(mask == 0, PAD)
            given["attention_mask"] = mask
        return given


def loss_of(outputs: Any) -> Tensor:
    """Return the model's own loss, or one of all its outputs."""
    losses = [outputs[name] for name in ("loss", "mc_loss") if outputs.get(name) is not None]
    if not losses:
        found = outputs.to_tuple() if hasattr(outputs, "to_tuple") else tuple(outputs)
        tensors = [each for each in found if isinstance(each, Tensor) and each.is_floating_point()]
        losses = [each.square().mean() + each.flatten()[::3].sum() for each in tensors]
    return sum(losses[1:], losses[0])


def run(case: Case, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and every gradient."""
    model.zero_grad()
    with Exact():
        loss = loss_of(model(**batch))
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def whole(model: nn.Module, axis: Axis, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the unsharded tensors of all ranks' parts by name, without padding.

    Raises:
        AssertionError: a replicated value differs between ranks, or padding is not 0.
    """
    found, parts = {}, parts_of(model)
    shapes = [
        [parts[name].shape_on(rank) if name in parts else value.shape for name, value in tensors.items()]
        for rank in range(axis.size)
    ]
    sizes = [sum(shape.numel() for shape in each) for each in shapes]  # one exchange for all of them
    together = axis.gathered(torch.cat([value.flatten() for value in tensors.values()]), 0, sizes).split(sizes)
    by_rank = [
        [part.view(shape) for part, shape in zip(flat.split([s.numel() for s in own]), own, strict=True)]
        for flat, own in zip(together, shapes, strict=True)
    ]
    for name, *held in zip(tensors, *by_rank, strict=True):
        part = parts.get(name)
        if part is None:
            assert all(torch.equal(each, held[0]) for each in held), f"{name} differs between ranks"
            found[name] = held[0]
            continue
        cut = part.cut
        padded = cut.unshard(held)
        assert not padded.narrow(cut.dim, part.full_shape[cut.dim], cut.size - part.full_shape[cut.dim]).any(), name
        for rank, each in enumerate(held):  # replicated parts are equal on all their ranks
            assert torch.equal(cut.part(padded, rank), each), f"{name} differs between its holders"
        found[name] = part.together(held)
    return found


def cut(model: nn.Module, axis: Axis, plan: TensorPlan) -> TPPlan:
    tp_plan = cut_model(model, axis, plan)
    tp_plan.cut_values()
    tp_plan.install()
    return tp_plan


def compare(case: Case, axis: Axis, *plans: TensorPlan) -> dict[str, torch.Size]:
    """Compare values, the loss and every gradient under each plan; with full sequences, of two passes.

    Returns:
        The shapes of this rank's parts, by name.
    """
    plain, batch = case.made(), case.batch()
    names = {name for name, _ in plain.named_parameters(remove_duplicate=False)}
    expected_loss, expected = run(case, plain, batch)
    for plan in plans:
        model, what = case.made(), f"{case.kind}, {plan.sequence}"
        ties = dict(model.named_parameters(remove_duplicate=False))
        cut(model, axis, plan)
        assert dict(model.named_parameters(remove_duplicate=False)).keys() == names
        assert all(dict(model.named_parameters(remove_duplicate=False))[name] is param for name, param in ties.items())
        values = {name: param.detach() for name, param in model.named_parameters()}
        assert_close(whole(model, axis, values), {n: p.detach() for n, p in plain.named_parameters()}, 0.0, "values")
        for _ in range(2 if plan.sequence is None else 1):
            loss, grads = run(case, model, batch)
            assert_close({"loss": loss}, {"loss": expected_loss}, 1e-12, what)
            # The gradient of a key's bias is 0 except for rounding.
            assert_close(whole(model, axis, grads), expected, 1e-11, f"{what}: gradients", floor=1e-2)
    return {name: part.shape for name, part in parts_of(model).items()}
