"""Adam and AdamW over lists of tensors: the plain formula, and an implementation with torch's fused kernels in tiles.

:func:`adam_reference` is the formula. :class:`AdamTiles` computes the same. It casts, unscales and clips the gradient,
updates, and casts the result tile by tile, while the data is in cache. Without tiles, each of these is a pass over main
memory, and the fp32 copy of a 16-bit gradient is an allocation of twice the gradient's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.core.base.torch_internals import copy_each, fused_adam
from shardwise.plan.precision import HALF_DTYPES

TILE_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements per tile by device type; on a CPU per thread. There, a thread's part of the fp32 gradient (1 MiB) stays in
cache, and the cost of a call is small compared to that of the data. On a GPU, it only bounds the scratch memory (64
MiB)."""


@dataclass(frozen=True)
class AdamRule:
    """Hyperparameters of the update that all parameters of a group share.

    Attributes:
        decoupled: AdamW (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2); otherwise weight decay is L2, added to
            the gradient (Kingma and Ba, arXiv:1412.6980).
        bias_correction: divide the moments by ``1 - beta**step``; without it they start biased towards zero.
        maximize: maximize the objective.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool = True
    bias_correction: bool = True
    maximize: bool = False


class AdamSlot(NamedTuple):
    """The tensors that one update reads and writes. Except ``step`` they have one shape and device.

    Attributes:
        param: fp32 or fp64; or 16-bit, which is updated in fp32 and rounded once.
        grad: any floating dtype; read-only.
        exp_avg: first moment in fp32 (fp64 for an fp64 parameter); or in 16 bits, to which it is rounded after the
            step.
        exp_avg_sq: second moment, with the dtype of the first.
        step: 0-dim fp32 tensor on the parameter's device (or on the host for a parameter there), counting this step.
        out: second output for the new values, rounded to its dtype: the 16-bit weights of an fp32 master parameter.
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    out: Tensor | None = None


def moment_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype in which a parameter is updated and its moments are stored: fp64 for fp64, otherwise fp32."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


@torch.no_grad()
def adam_reference(slot: AdamSlot, rule: AdamRule, scale: float = 1.0) -> None:
    """Run one step of Adam or AdamW, in readable form. It allocates five tensors of the parameter's size.

    With g the gradient times ``scale``, m and v the moments, t the step (Kingma and Ba, algorithm 1)::

        m = beta1 m + (1 - beta1) g         m^ = m / (1 - beta1^t)
        v = beta2 v + (1 - beta2) g^2       v^ = v / (1 - beta2^t)
        p = p - lr m^ / (sqrt(v^) + eps)

    Weight decay comes first: ``p = p - lr decay p`` if decoupled, otherwise ``g = g + decay p``.
    """
    dtype = slot.exp_avg.dtype
    param = slot.param.to(dtype)
    grad = slot.grad.to(dtype) * scale
    if rule.maximize:
        grad = -grad
    if rule.decoupled:
        param = param * (1 - rule.lr * rule.weight_decay)
    else:
        grad = grad + rule.weight_decay * param
    slot.exp_avg.copy_(rule.beta1 * slot.exp_avg + (1 - rule.beta1) * grad)
    slot.exp_avg_sq.copy_(rule.beta2 * slot.exp_avg_sq + (1 - rule.beta2) * grad * grad)
    step = slot.step.item() if rule.bias_correction else math.inf
    first = slot.exp_avg / (1 - rule.beta1**step)
    second = slot.exp_avg_sq / (1 - rule.beta2**step)
    param = param - rule.lr * first / (second.sqrt() + rule.eps)
    slot.param.copy_(param)
    if slot.out is not None:
        slot.out.copy_(param)


class AdamTiles:
    """Runs the update with torch's fused kernels. It owns the scratch memory, which is reused in later steps.

    Parameters that need no cast and no scaling are passed to the kernel unsplit, in one call for each device and dtype.
    Others are split into tiles. Small parameters share a tile, so that on a GPU its casts are one kernel each.

    Args:
        tile_numel: elements per tile; defaults to :data:`TILE_NUMEL` of the device.
    """

    def __init__(self, tile_numel: int | None = None) -> None:
        if tile_numel is not None and tile_numel < 1:
            raise ValueError(f"tile_numel={tile_numel} leaves no element in a tile; use 1 or more, or None")
        self._tile_numel = tile_numel
        self._scratch: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}
        self._no_correction: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def update(self, slots: Sequence[AdamSlot], rule: AdamRule, scale: float = 1.0) -> None:
        """Step all ``slots`` with ``scale`` times their gradients.

        The scale is applied after the cast of the gradient, so that a 16-bit gradient is not rounded again.
        """
        unsplit: dict[tuple[torch.device, torch.dtype], list[AdamSlot]] = {}
        tiled: dict[tuple[torch.device, torch.dtype], list[AdamSlot]] = {}
        for slot in slots:
            if slot.exp_avg.dtype in HALF_DTYPES:  # which steps are not made in
                self._update_narrow(slot, rule, scale)
                continue
            plain = scale == 1.0 and slot.out is None and _fits_kernel(slot)
            (unsplit if plain else tiled).setdefault((slot.param.device, slot.exp_avg.dtype), []).append(slot)
        for batch in unsplit.values():
            self._kernel(batch, [slot.param for slot in batch], [slot.grad for slot in batch], rule)
        for (device, _), several in tiled.items():
            limit = self._tile_numel or _tile_numel(device)
            copies: list[tuple[Tensor, Tensor]] = []
            flat = [_flattened(slot, copies) for slot in several if slot.param.numel()]
            for tile in _tiles(flat, limit):
                self._step_tile(tile, rule, scale)
            for target, source in copies:
                target.copy_(source)

    def _update_narrow(self, slot: AdamSlot, rule: AdamRule, scale: float) -> None:
        """Step 16-bit moments: update fp32 copies of them and round the result, one slice at a time."""
        copies: list[tuple[Tensor, Tensor]] = []
        param, grad, *moments, step, out = _flattened(slot, copies)
        limit = self._tile_numel or _tile_numel(param.device)
        for start in range(0, param.numel(), limit):
            part = slice(start, start + limit)
            first, second = wide = [moment[part].to(moment_dtype(param)) for moment in moments]
            rounded = None if out is None else out[part]
            self.update([AdamSlot(param[part], grad[part], first, second, step, rounded)], rule, scale)
            copy_each([moment[part] for moment in moments], wide)
        for target, source in copies:
            target.copy_(source)

    def _step_tile(self, tile: list[AdamSlot], rule: AdamRule, scale: float) -> None:
        params = [slot.param for slot in tile]
        grads = [slot.grad for slot in tile]
        dtype = tile[0].exp_avg.dtype
        numels = [param.numel() for param in params]
        if scale != 1.0 or any(grad.dtype != dtype for grad in grads):
            scratch = self._scratch_for(params[0].device, dtype, 0, sum(numels))
            parts = list(torch.split(scratch, numels))
            copy_each(parts, grads)
            if scale != 1.0:
                scratch.mul_(scale)
            grads = parts
        narrow = [index for index, param in enumerate(params) if param.dtype != dtype]
        if narrow:
            wide = torch.split(self._scratch_for(params[0].device, dtype, 1, sum(numels)), numels)
            copy_each([wide[i] for i in narrow], [params[i] for i in narrow])
            params = [wide[i] if param.dtype != dtype else param for i, param in enumerate(params)]
        self._kernel(tile, params, grads, rule)
        if narrow:
            copy_each([tile[i].param for i in narrow], [params[i] for i in narrow])
        outs = [(slot.out, param) for slot, param in zip(tile, params, strict=True) if slot.out is not None]
        if outs:
            copy_each([out for out, _ in outs], [param for _, param in outs])

    def _kernel(self, slots: Sequence[AdamSlot], params: list[Tensor], grads: list[Tensor], rule: AdamRule) -> None:
        if rule.bias_correction:
            steps = [slot.step for slot in slots]
        else:
            # The kernel always applies bias correction; beta**inf is 0, so with infinitely many steps it divides by 1.
            steps = [self._infinity(params[0].device)] * len(slots)
        fused_adam(rule.decoupled)(
            params,
            grads,
            [slot.exp_avg for slot in slots],
            [slot.exp_avg_sq for slot in slots],
            [],
            steps,
            lr=rule.lr,
            beta1=rule.beta1,
            beta2=rule.beta2,
            weight_decay=rule.weight_decay,
            eps=rule.eps,
            amsgrad=False,
            maximize=rule.maximize,
        )

    def _infinity(self, device: torch.device) -> Tensor:
        if device not in self._no_correction:
            self._no_correction[device] = torch.tensor(math.inf, device=device)
        return self._no_correction[device]

    def _scratch_for(self, device: torch.device, dtype: torch.dtype, which: int, numel: int) -> Tensor:
        key = (device, dtype, which)
        have = self._scratch.get(key)
        if have is None or have.numel() < numel:
            have = self._scratch[key] = torch.empty(numel, dtype=dtype, device=device)
        return have[:numel]


def _tile_numel(device: torch.device) -> int:
    return TILE_NUMEL["cpu"] * torch.get_num_threads() if device.type == "cpu" else TILE_NUMEL["cuda"]


def _fits_kernel(slot: AdamSlot) -> bool:
    # The CPU kernel iterates over memory from each tensor's start and ignores strides.
    # Unrolled: a loop over the four tensors costs more than the rest of a small parameter's step.
    param, grad, exp_avg, exp_avg_sq, *_ = slot
    return (
        param.dtype == grad.dtype == exp_avg.dtype == exp_avg_sq.dtype
        and param.is_contiguous()
        and grad.is_contiguous()
        and exp_avg.is_contiguous()
        and exp_avg_sq.is_contiguous()
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return True if the elements fill one contiguous range of memory, each once, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _flattened(slot: AdamSlot, copies: list[tuple[Tensor, Tensor]]) -> AdamSlot:
    """Return the slot as 1-D views; add ``(target, copy)`` to ``copies`` for tensors without such a view."""
    tensors = [slot.param, slot.grad, slot.exp_avg, slot.exp_avg_sq, *([] if slot.out is None else [slot.out])]
    if not all(t.is_contiguous() for t in tensors):
        strides = slot.param.stride()
        if all(t.stride() == strides for t in tensors) and _is_dense(slot.param):
            tensors = [t.as_strided((t.numel(),), (1,)) for t in tensors]
        else:
            compact = [t.contiguous() for t in tensors]
            changed = [i for i, t in enumerate(compact) if t is not tensors[i] and i != 1]
            copies += [(tensors[i], compact[i]) for i in changed]
            tensors = compact
    param, grad, exp_avg, exp_avg_sq, *out = (t.view(-1) for t in tensors)
    return AdamSlot(param, grad, exp_avg, exp_avg_sq, slot.step, out[0] if out else None)


def _tiles(slots: Sequence[AdamSlot], limit: int) -> Iterator[list[AdamSlot]]:
    """Yield lists of slices of flat slots with at most ``limit`` elements per list."""
    run: list[AdamSlot] = []
    room = limit
    for slot in slots:
        for piece in _pieces(slot, limit):
            numel = piece.param.numel()
            if run and numel > room:
                yield run
                run, room = [], limit
            run.append(piece)
            room -= numel
    if run:
        yield run


def _pieces(slot: AdamSlot, limit: int) -> Iterator[AdamSlot]:
    if slot.param.numel() <= limit:
        yield slot
        return
    columns = [torch.split(tensor, limit) for tensor in slot[:4]]
    outs: Sequence[Tensor | None] = [None] * len(columns[0]) if slot.out is None else torch.split(slot.out, limit)
    for param, grad, exp_avg, exp_avg_sq, out in zip(*columns, outs, strict=True):
        yield AdamSlot(param, grad, exp_avg, exp_avg_sq, slot.step, out)
