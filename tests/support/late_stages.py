"""A model in stages on late devices, which send each other activations and gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.parallel.pipeline import split_batch
from shardwise.plan import PipelinePlan, Plan, zero
from shardwise.session import build
from tests.support import tensor_cases
from tests.support.late_axes import off
from tests.support.late_places import found_by, on_ranks
from tests.support.late_setup import GPU, TOLERANCE, Found, adamw, there
from tests.support.tensor_setup import loss_of

PIPELINES: dict[str, PipelinePlan] = {
    "1f1b": PipelinePlan(microbatches=3),
    "zbv": PipelinePlan(schedule="zbv", chunks=2, microbatches=4),
    "described": PipelinePlan(microbatches=3, cache_shapes=False),
    "odd_described": PipelinePlan(schedule="interleaved", chunks=2, microbatches=4, cache_shapes=False),
}


def stages(name: str, seed: int) -> Found:
    """A model in stages with a weight that two of them use, trained for two steps; the second batch is on the device,
    where it is written over behind the step."""
    plan: Plan = zero(1).but(pp=dist.get_world_size(), pipeline=PIPELINES[name])
    layers = max(4, dist.get_world_size() * PIPELINES[name].chunks)
    case = tensor_cases.gpt2()[0]
    case.config.n_layer = layers
    generator = torch.Generator().manual_seed(1)
    batches = [
        dict(zip(("input_ids", "labels"), torch.randint(0, 20, (2, 4, 5), generator=generator), strict=True))
        for _ in range(2)
    ]

    def criterion(outputs: Any, _: Any) -> Tensor:
        return loss_of(outputs)

    wrong, losses = list[str](), list[Tensor]()
    with on_ranks(seed) as device:
        module = case.made().float()
        names = {id(param): key for key, param in module.named_parameters()}
        session = build(module, adamw(module), plan, device=GPU)
        try:
            for index, batch in enumerate(batches):
                given = there(batch) if index else batch
                outcome = session.pipeline.step(given, criterion, train=True)
                for value in given.values() if index else ():
                    value.zero_()
                session.optimizer.step()
                session.optimizer.zero_grad()
                losses += [] if outcome.loss is None else [outcome.loss]
            with session.module.gathered():
                held = {names[id(param)]: param.detach().cpu() for param in session.params}
            plain = case.made().float()
            optimizer, expected = adamw(plain), list[float]()
            for batch in batches:
                expected.append(0.0)
                for part in split_batch(batch, PIPELINES[name].microbatches, None):
                    loss = loss_of(plain(**part.kwargs)) * part.share
                    loss.backward()
                    expected[-1] += loss.item()
                optimizer.step()
                optimizer.zero_grad()
            pairs = zip((loss.item() for loss in losses), expected if losses else (), strict=True)
            wrong += [f"{name}: loss {a} for {b}" for a, b in pairs if not abs(a - b) < TOLERANCE]
            values = dict(plain.named_parameters())
            wrong += [text for key, value in held.items() for text in off(f"{name} {key}", value, values[key])]
        finally:
            session.close()
            session.mesh.close()
    return found_by(device, wrong)
