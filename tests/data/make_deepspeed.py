"""Write the DeepSpeed checkpoints in deepspeed.tar.xz: all stages on one and two ranks, with the true values.

The script needs DeepSpeed (0.19.8 was used) and no GPU:

    python make_deepspeed.py ds
    tar --sort=name --owner=0 --group=0 -cJf deepspeed.tar.xz ds
"""

import argparse
import os
import socket
from pathlib import Path

import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file
from torch import nn

CASES = [
    (stage, ranks, precision)
    for stage in (1, 2, 3)
    for ranks in (1, 2)
    for precision in (("fp32",) if ranks == 1 else ("fp32", "bf16", "fp16"))
]


class Net(nn.Module):
    """A model with tied weights, a frozen parameter, a parameter in no group, buffers, and sizes that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.middle = nn.Linear(3, 5)
        self.back = nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("offset", torch.randn(3))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("hidden", torch.randn(2), persistent=False)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inside = torch.tanh(self.middle(self.embed(tokens)) + self.frozen)
        return self.head(self.back(inside) + self.offset.to(inside.dtype)).float().logsumexp(-1).mean()


def link_states(optimizer: object) -> None:
    """Link the fragments again: DeepSpeed 0.19.8 does so before torch's AdamW has its state, and safe_get_* need it."""
    inner = optimizer.optimizer
    flat = [group["params"][0] for group in inner.param_groups]
    for group, partition in zip(optimizer.bit16_groups, flat, strict=True):
        for parameter in group:
            if parameter._hp_mapping is not None:
                parameter._hp_mapping.set_optim_state_fragment(partition, inner.state[partition])


def train(rank: int, ranks: int, stage: int, precision: str, out: str, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    if precision == "fp16":  # torch supports bf16 on every CPU, but DeepSpeed checks the CPU's instructions
        get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Net()
    names = {id(p): n for n, p in model.named_parameters()}
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        # Doubled after the third step, so that the saved scale is neither the first nor a default.
        "fp16": {"enabled": precision == "fp16", "initial_scale_power": 8, "loss_scale_window": 2},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=scheduler)
    for step in range(3):
        torch.manual_seed(step * ranks + rank)
        engine.backward(engine(torch.randint(7, (2, 4))))
        engine.step()
    folder = Path(out) / f"zero{stage}-{ranks}ranks-{precision}"
    engine.save_checkpoint(str(folder), tag="global_step3", client_state={"epoch": 4})
    if stage < 3:
        link_states(engine.optimizer)
    truth: dict[str, torch.Tensor] = {}
    for parameter in engine.module.parameters():
        name = names[id(parameter)]
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                truth[f"model/{name}"] = parameter.detach().clone()
            continue
        truth[f"model/{name}"] = safe_get_full_fp32_param(parameter).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            truth[f"optimizer/0/{name}/{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    for name, buffer in engine.module.named_buffers():
        if name != "hidden":
            truth[f"model/{name}"] = buffer.clone()
    if rank == 0:
        save_file({k: v.cpu().contiguous() for k, v in truth.items()}, folder / "truth.safetensors")
        for extra in folder.glob("*.py"):
            extra.unlink()
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    out = parser.parse_args().out
    for stage, ranks, precision in CASES:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(train, (ranks, stage, precision, out, port), nprocs=ranks)


if __name__ == "__main__":
    main()
