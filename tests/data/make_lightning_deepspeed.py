"""Write lightning_deepspeed.tar.xz: what DeepSpeed saves under Lightning after the first epoch of a small run.

The script needs DeepSpeed (0.19.8 was used), no GPU, and a checkpoint of the same run with Lightning's own ddp.
Lightning passes the entries of that checkpoint, except for the weights, to DeepSpeed as client state. Model, data and
optimizer are those of ``tests/support/lightning_setup.py``:

    python make_lightning_deepspeed.py ddp.ckpt ds
    tar --sort=name --owner=0 --group=0 -cJf lightning_deepspeed.tar.xz ds
"""

import os
import socket
import sys
from pathlib import Path

import deepspeed
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DistributedSampler

RANKS = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)


def train(rank: int, stage: int, client: dict[str, object], out: str, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(32, 6, generator=generator)
    targets = torch.sin(inputs[:, :3]) + 0.1 * torch.randn(32, 3, generator=generator)
    mine = list(DistributedSampler(range(len(inputs)), num_replicas=RANKS, rank=rank))  # as Lightning shuffles
    for x, y in zip(inputs[mine].split(4), targets[mine].split(4), strict=True):
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
        scheduler.step()
    folder = Path(out) / f"stage{stage}.ckpt"
    engine.save_checkpoint(str(folder), tag="checkpoint", client_state=client)
    if rank == 0:
        for extra in folder.glob("*.py"):
            extra.unlink()
    torch.distributed.destroy_process_group()


def main() -> None:
    checkpoint = torch.load(sys.argv[1], weights_only=False)
    client = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    for stage in (1, 2, 3):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(train, (stage, client, sys.argv[2], port), nprocs=RANKS)


if __name__ == "__main__":
    main()
