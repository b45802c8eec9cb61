"""Train a small model with DeepSpeed on two ranks, and write the losses and final weights of each case.

The cases are all stages, with one and two passes per step, with and without clipping, and with a schedule. The script
needs DeepSpeed (0.19.8 was used) and no GPU:

    python make_deepspeed_training.py deepspeed_training.safetensors

Tests that compare with these numbers import the model and the cases from here; they do not need DeepSpeed.
"""

import os
import socket
import sys
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

RANKS, STEPS, MICRO = 2, 5, 4
LOW, HIGH, WARM = 0.002, 0.02, 3
# With an eps near the size of the gradients the update depends on it, so that a wrong mean or norm shows.
ADAMW = {"lr": HIGH, "betas": [0.9, 0.99], "eps": 1e-2, "weight_decay": 0.1}


class Case(NamedTuple):
    stage: int
    accumulation: int
    clip: float
    precision: str

    @property
    def name(self) -> str:
        clipped = f"clip{self.clip:g}" if self.clip else "unclipped"
        return f"stage{self.stage}-{self.accumulation}passes-{clipped}-{self.precision}"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


CASES = [
    Case(stage, accumulation, clip, precision)
    for precision in ("fp32", "bf16")
    for stage in (1, 2, 3)
    for accumulation in (1, 2)
    for clip in (0.0, 0.05)
    if precision == "fp32" or (accumulation == 1) == (clip == 0.0)
]


def net() -> nn.Module:
    """Return a model whose values have few bits: in bf16 DeepSpeed's masters start with rounded values, ours do not."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def batches(accumulation: int) -> list[list[list[tuple[Tensor, Tensor]]]]:
    """Return the inputs by ``[step][pass][rank]``."""
    generator = torch.Generator().manual_seed(9)

    def one() -> tuple[Tensor, Tensor]:
        inputs = torch.randn(MICRO, 5, generator=generator)
        return inputs, torch.sin(inputs[:, :3]) + 0.1 * torch.randn(MICRO, 3, generator=generator)

    return [[[one() for _ in range(RANKS)] for _ in range(accumulation)] for _ in range(STEPS)]


def config(case: Case) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a case."""
    warm = {"warmup_min_lr": LOW, "warmup_max_lr": HIGH, "warmup_num_steps": WARM, "warmup_type": "linear"}
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": warm},
        "bf16": {"enabled": case.precision == "bf16"},
        "zero_optimization": {
            "stage": case.stage,
            "reduce_bucket_size": 60,
            "allgather_bucket_size": 60,
            "stage3_param_persistence_threshold": 8,
            "stage3_max_live_parameters": 100,
            "stage3_max_reuse_distance": 100,
        },
        "steps_per_print": 10**9,
    }


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    return nn.functional.mse_loss(model(batch[0].to(dtype)).float(), batch[1])


def train(deepspeed: Any, case: Case, rank: int) -> tuple[Any, Tensor]:
    """Return the engine after the last step and the mean loss of each step; ``deepspeed`` is any module with its
    API.
    """
    model, losses = net(), []
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config(case))
    for step in batches(case.accumulation):
        found = []
        for micro in step:
            loss = loss_of(engine, micro[rank], case.dtype)
            engine.backward(loss)
            engine.step()
            found.append(loss.detach())
        losses.append(torch.stack(found).mean())
    return engine, mean_over_ranks(torch.stack(losses))


def mean_over_ranks(losses: Tensor) -> Tensor:
    torch.distributed.all_reduce(losses)
    return losses / RANKS


def rank_main(rank: int, out: str, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    found: dict[str, Tensor] = {}
    for case in CASES:
        engine, losses = train(deepspeed, case, rank)
        found[f"{case.name}/losses"] = losses
        for name, parameter in engine.module.named_parameters():
            found[f"{case.name}/weights/{name}"] = safe_get_full_fp32_param(parameter).detach().cpu().clone()
        engine.destroy()
    if rank == 0:
        save_file(found, out, {"deepspeed": deepspeed.__version__, "torch": torch.__version__})
    torch.distributed.destroy_process_group()


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_main, (sys.argv[1], port), nprocs=RANKS)


if __name__ == "__main__":
    main()
