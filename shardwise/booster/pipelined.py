"""A step of a model in stages, as ``Booster.execute_pipeline`` publishes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardwise.core.parallel.pipeline import merged

__all__ = ["pipeline_step"]


def pipeline_step(
    steps: Any,
    data_iter: Iterator[Any],
    criterion: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    wanted: tuple[bool, bool, bool],
) -> dict[str, Any]:
    """See :meth:`shardwise.booster.Booster.execute_pipeline`.

    Args:
        steps: of the model's session.
        data_iter, criterion, optimizer: as there.
        wanted: the loss, the outputs, the loss on every rank.

    Raises:
        ValueError: gradients are enabled and there is no optimizer.
        TypeError: ``data_iter`` is no iterator.
        StopIteration: it is at its end.
        PeerError: another rank's is at its end, or failed.
    """
    wants_loss, wants_outputs, broadcast_loss = wanted
    train = torch.is_grad_enabled()
    if optimizer is None and train:
        raise ValueError(
            f"optimizer={optimizer}: Optimizer should be passed when doing backward. Give the one that boost returned, "
            "or call execute_pipeline under torch.no_grad(), for forward passes alone"
        )
    if not isinstance(data_iter, Iterator):
        raise TypeError(f"data_iter={data_iter!r:.80}: give an iterator, such as iter(dataloader)")
    try:
        batch = next(data_iter)
    except Exception as error:  # the others would wait for this rank
        steps.without_batch(error)
        raise
    outcome = steps.step(batch, criterion, train, wants_outputs)
    loss = outcome.loss if wants_loss else None
    if wants_loss and broadcast_loss:
        loss = steps.everywhere(loss)
    return {"loss": loss, "outputs": merged(outcome.outputs) if outcome.outputs else None}
