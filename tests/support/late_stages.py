"""A model in pipeline stages on late devices, which send each other activations and gradients."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.parallel.pipeline.batch import split_batch
from shardwise.plan import PipelinePlan, zero
from tests.support import tensor_cases
from tests.support.late_setup import adamw, off, on_host, on_late_device, session_on_device, there
from tests.support.tensor_setup import loss_of

PIPELINES: dict[str, PipelinePlan] = {
    "1f1b": PipelinePlan(microbatches=3),
    "zbv": PipelinePlan(schedule="zbv", chunks=2, microbatches=4),
    "described": PipelinePlan(microbatches=3, cache_shapes=False),
    "odd_described": PipelinePlan(schedule="interleaved", chunks=2, microbatches=4, cache_shapes=False),
}


@on_late_device
def stages(name: str) -> Iterator[str]:
    """Train two steps of a model in stages, two of which share a weight.

    The second batch is on the device, and its memory is overwritten after the step.
    """
    pipeline, ranks = PIPELINES[name], dist.get_world_size()
    case = tensor_cases.gpt2()[0]
    case.config.n_layer = max(4, ranks * pipeline.chunks)
    generator = torch.Generator().manual_seed(1)
    both = [torch.randint(0, 20, (2, 4, 5), generator=generator) for _ in range(2)]
    batches = [dict(zip(("input_ids", "labels"), pair, strict=True)) for pair in both]
    module, plain, losses, expected = case.made().float(), case.made().float(), list[Tensor](), list[float]()
    names = {id(param): key for key, param in module.named_parameters()}
    with session_on_device(zero(1).but(pp=ranks, pipeline=pipeline), module) as session:
        for index, batch in enumerate(batches):
            given = there(batch) if index else batch
            outcome = session.pipeline.step(given, lambda outputs, _: loss_of(outputs), train=True)
            for value in given.values() if index else ():
                value.zero_()
            session.optimizer.step()
            session.optimizer.zero_grad()
            losses += [] if outcome.loss is None else [outcome.loss]
        with session.module.gathered():
            held = on_host((names[id(param)], param) for param in session.params)
        optimizer = adamw(plain)
        for batch in batches:
            expected.append(0.0)
            for part in split_batch(batch, pipeline.microbatches, None):
                loss = loss_of(plain(**part.kwargs)) * part.share
                loss.backward()
                expected[-1] += loss.item()
            optimizer.step()
            optimizer.zero_grad()
        for found, wanted in zip(losses, expected if losses else (), strict=True):
            yield from off(f"{name}: loss", found, torch.tensor(wanted))
        values = dict(plain.named_parameters())
        for key, value in held.items():
            yield from off(f"{name} {key}", value, values[key])
