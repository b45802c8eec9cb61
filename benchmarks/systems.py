"""Every measured system behind one shape: ``build(model, job) -> step``, ``step(tokens, targets) -> loss``.

All use AdamW(fused=True) with the same settings. ``bf16`` means 16-bit parameters and gradients on the wire with
fp32 master weights in every system: DDP and the reference keep the masters by hand, FSDP2 through
MixedPrecisionPolicy, DeepSpeed through its bf16 section, shardwise through ``param_dtype``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.job import SIZES, Job
from benchmarks.model import GPT

__all__ = ["PEERS", "SHARDWISE", "SYSTEMS", "Step", "prepare"]

Step = Callable[[Tensor, Tensor], Tensor]


def adamw(parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """The optimizer of every system."""
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def _grad(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError(f"a parameter of shape {tuple(parameter.shape)} got no gradient; every one here should")
    return parameter.grad


class MasterAdamW:
    """fp32 masters, gradients and states for a 16-bit module, all kept between steps; 20 bytes a parameter."""

    def __init__(self, parameters: list[nn.Parameter], masters: list[Tensor]) -> None:
        self.parameters: list[Tensor] = list(parameters)
        self.masters = masters
        self.wide_grads = [torch.zeros_like(master) for master in masters]
        for master, grad in zip(masters, self.wide_grads, strict=True):
            master.grad = grad
        self.inner = adamw(masters)

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_copy_(self.wide_grads, [_grad(p) for p in self.parameters])
        self.inner.step()
        torch._foreach_copy_(self.parameters, self.masters)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _replica_optimizer(model: nn.Module, dtype: str) -> Any:
    """AdamW over ``model``; with ``bf16`` the model is cast in place and the masters are its fp32 weights."""
    if dtype == "fp32":
        return adamw(model.parameters())
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model.to(torch.bfloat16)
    return MasterAdamW(list(model.parameters()), masters)


def _plain_step(module: nn.Module, optimizer: Any) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = module(tokens, targets)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def build_local(model: GPT, job: Job) -> Step:
    """No communication at all: each rank trains alone on its own batches."""
    return _plain_step(model, _replica_optimizer(model, job.dtype))


def build_ddp(model: GPT, job: Job) -> Step:
    """torch DistributedDataParallel with gradients as views of its buckets."""
    optimizer = _replica_optimizer(model, job.dtype)
    return _plain_step(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer)


def build_fsdp2(model: GPT, job: Job) -> Step:
    """torch fully_shard, one group a block and one for the rest, resharded after forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    half = torch.bfloat16 if job.dtype == "bf16" else None
    options: dict[str, Any] = {
        "mesh": init_device_mesh(job.device, (job.ranks,)),
        "reshard_after_forward": True,
        "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half),
    }
    if job.offload:  # its parameters go with their state
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=job.device == "cuda")
        model.cpu()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return _plain_step(model, adamw(model.parameters()))


DEEPSPEED_STAGE: dict[int, dict[str, Any]] = {1: {"compute_grad_norm": False}, 2: {"compute_grad_norm": False}, 3: {}}
"""Settings of each ZeRO stage besides DeepSpeed's defaults: no norm, since no other system here computes one
(stage 3 does not accept that setting), as gradient clipping, which is on by default, is off for all."""


def deepspeed_builder(stage: int, **zero_options: Any) -> Callable[[GPT, Job], Step]:
    """DeepSpeed ZeRO at ``stage`` with torch's fused AdamW as client optimizer."""

    def build(model: GPT, job: Job) -> Step:
        import deepspeed

        on_host = {"device": "cpu", "pin_memory": job.device == "cuda"}
        offload = {"offload_optimizer": on_host} if job.offload else {}
        config = {
            "train_micro_batch_size_per_gpu": SIZES[job.size].micro_batch,
            "gradient_accumulation_steps": 1,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage} | zero_options | offload,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": job.dtype == "bf16"},
            "steps_per_print": 10**9,
        }
        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return build


def shardwise_builder(stage: int) -> Callable[[GPT, Job], Step]:
    """This library: ZeRO at ``stage``, or replication for stage 0."""

    def build(model: GPT, job: Job) -> Step:
        from shardwise.plan import plan
        from shardwise.session import build as build_session

        half = torch.bfloat16 if job.dtype == "bf16" else None
        chosen = plan.zero(stage, half) if stage else plan.replicated(half)  # type: ignore[arg-type]
        if job.offload:
            chosen = chosen.but(state_host_fraction=1.0, pin_memory=job.device == "cuda")
        device = torch.device("cuda", torch.cuda.current_device()) if job.device == "cuda" else torch.device("cpu")
        session = build_session(model, adamw(model.parameters()), chosen, device=device)
        return _own_step(session.module, session.backward, session.optimizer)

    return build


def build_gemini(model: GPT, job: Job) -> Step:
    """This library through the Booster: GeminiPlugin with chunks of its own choice, nothing kept gathered."""
    from shardwise.booster import Booster
    from shardwise.booster.plugin import GeminiPlugin

    offload: dict[str, Any] = {"offload_optim_frac": 1.0, "pin_memory": job.device == "cuda"} if job.offload else {}
    booster = Booster(plugin=GeminiPlugin(precision=job.dtype, max_prefetch=1, **offload))
    module, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    return _own_step(module, lambda loss: booster.backward(loss, optimizer), optimizer)


def _own_step(module: nn.Module, backward: Callable[[Tensor], object], optimizer: Any) -> Step:
    if optimizer is None:
        raise RuntimeError(f"the model came back with optimizer {optimizer} although there was one")

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = module(tokens, targets)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


PEERS: dict[str, Callable[[GPT, Job], Step]] = {
    "local": build_local,
    "ddp": build_ddp,
    "fsdp2": build_fsdp2,
    "ds1": deepspeed_builder(1, **DEEPSPEED_STAGE[1]),
    "ds2": deepspeed_builder(2, **DEEPSPEED_STAGE[2]),
    "ds3": deepspeed_builder(3, **DEEPSPEED_STAGE[3]),
    "ds3_release": deepspeed_builder(3, stage3_max_live_parameters=0, stage3_max_reuse_distance=0),
}
SHARDWISE: dict[str, Callable[[GPT, Job], Step]] = {
    "sw_ddp": shardwise_builder(0),
    "sw_zero1": shardwise_builder(1),
    "sw_zero2": shardwise_builder(2),
    "sw_zero3": shardwise_builder(3),
    "sw_gemini": build_gemini,
}
SYSTEMS: dict[str, Callable[[GPT, Job], Step]] = PEERS | SHARDWISE | {"reference": build_local}
"""``reference`` is one process that trains on the batches of all ranks: what the losses are compared with."""


def prepare(system: str) -> dict[str, str]:
    """Import what ``system`` needs, before memory is measured; returns versions to report."""
    versions = {"torch": str(torch.__version__)}
    if system.startswith("ds"):
        versions["deepspeed"] = importlib.import_module("deepspeed").__version__
    elif system.startswith("sw_"):
        importlib.import_module("shardwise.session")
    elif system == "fsdp2":
        importlib.import_module("torch.distributed.fsdp")
    return versions
