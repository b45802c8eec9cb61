"""Gradients of parameters that several stages use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

import torch
from torch import Tensor, nn

from shardwise.core.comm import P2PChannel
from shardwise.core.parallel.pipeline.staging import Staging


# [Note: Gradients of what several stages use]
# A weight that is tied across stages (embeddings and head) exists on each rank that uses it, with its own shards. Its
# gradient is the sum over these ranks, and has to be complete before it is reduced over replicas. At any time, the
# ranks are at different micro-batches, so nothing is exchanged within a backward pass: a hook accumulates the gradients
# and passes on zeros. At the end of the step, the ranks exchange these sums, add them in the same order, and pass the
# result to the engine as one more backward pass. Values and optimizer state therefore stay equal on all of these ranks.
class SharedGradients:
    """Gradients of the parameters that ranks of a pipeline share.

    Args:
        staging: the assignment of parameters to ranks.
        params: this rank's parameters.
        wire: the point-to-point channel between the ranks.
    """

    def __init__(self, staging: Staging, params: Sequence[nn.Parameter], wire: P2PChannel) -> None:
        self._wire, self._rank = wire, staging.rank
        shared = [(staging.position_of(p), p) for p in params if p.requires_grad and len(staging.ranks_of(p)) > 1]
        self._shared = [(place, p, staging.ranks_of(p)) for place, p in sorted(shared, key=lambda each: each[0])]
        """In the order of the full model, which is the same on all ranks."""
        self._sums: dict[int, Tensor] = {}
        self._keeps = False
        self._hooks = [param.register_hook(self._hook(place)) for place, param, _ in self._shared]  # type: ignore[no-untyped-call]

    def _hook(self, place: int) -> Callable[[Tensor], Tensor]:
        def keep(grad: Tensor) -> Tensor:
            if not self._keeps:
                return grad
            total = self._sums.get(place)
            if total is None:
                self._sums[place] = grad.detach().to(_wide(grad.dtype), copy=True)
            else:
                total += grad.detach()
            return torch.zeros_like(grad)

        return keep

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate the gradients of shared parameters within the context."""
        self._keeps = True
        self._sums.clear()
        try:
            yield
        finally:
            self._keeps = False

    def summed(self, tag: Callable[[int], int]) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the sums of the gradients over all ranks that have the parameters, if there are any. Collective."""
        sums, what = [], "the gradient of a weight that several stages use"
        # Each rank sends before it receives.
        self._wire.connect((*pair, 1) for _, _, ranks in self._shared for pair in permutations(ranks, 2))
        for place, param, ranks in self._shared:
            own = self._sums.pop(place, None)
            row = torch.zeros(param.numel() + 1, dtype=_wide(param.dtype), device=param.device)
            if own is not None:
                row[:-1].copy_(own.reshape(-1))
                row[-1] = 1.0
            for rank in ranks:
                if rank != self._rank:
                    self._wire.send(row, rank, 1, tag(place), what)
            rows = [
                row if rank == self._rank else self._wire.receive((row.shape, row.dtype), rank, 1, tag(place), what)
                for rank in ranks
            ]
            total = rows[0].clone()
            for each in rows[1:]:
                total += each
            if total[-1]:
                sums.append((param, total[:-1].view(param.shape).to(param.dtype)))
        self._wire.settle()
        return sums

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are computed."""
    return torch.promote_types(dtype, torch.float32)
