"""ColossalAI's Booster, each plugin: train, save, load, go on."""

import argparse
import os
from functools import partial

import colossalai
import torch
import torch.distributed as dist
import torch.nn.functional as F
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.booster.plugin.dp_plugin_base import DPPluginBase
from colossalai.cluster import DistCoordinator
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import get_current_device, set_seed
from task import BATCH, RATE, STEPS, build_dataset, build_model

PLUGINS = {
    "torch_ddp": TorchDDPPlugin,
    "low_level_zero": partial(LowLevelZeroPlugin, stage=2, precision="fp32"),
    "gemini": partial(GeminiPlugin, placement_policy="static", precision="fp32", initial_scale=2**5),
    "hybrid": partial(HybridParallelPlugin, tp_size=1, pp_size=1, zero_stage=1, precision="fp32"),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugin", default="gemini", choices=list(PLUGINS))
    parser.add_argument("--checkpoints", default="checkpoints")
    args = parser.parse_args()

    disable_existing_loggers()
    colossalai.launch_from_torch(seed=42)
    coordinator = DistCoordinator()
    logger = get_dist_logger()
    set_seed(42)
    device = get_accelerator().get_current_device()
    assert device == get_current_device()

    plugin = PLUGINS[args.plugin]()
    booster = Booster(plugin=plugin)
    assert isinstance(plugin, DPPluginBase) or args.plugin == "hybrid"
    loader = plugin.prepare_dataloader(build_dataset(), batch_size=BATCH, shuffle=False, drop_last=True)
    model = build_model()
    optimizer = HybridAdam(model.parameters(), lr=RATE)
    scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=10**9)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
    assert isinstance(model, ModelWrapper) and isinstance(optimizer, OptimizerWrapper)

    for step, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        loss = F.mse_loss(model(x), y)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step == STEPS // 2:
            with coordinator.priority_execution():
                os.makedirs(args.checkpoints, exist_ok=True)
            booster.save_model(model, f"{args.checkpoints}/model", shard=True)
            booster.save_optimizer(optimizer, f"{args.checkpoints}/optimizer", shard=True)
            booster.save_lr_scheduler(scheduler, f"{args.checkpoints}/scheduler")
            coordinator.block_all()
            booster.load_model(model, f"{args.checkpoints}/model")
            booster.load_optimizer(optimizer, f"{args.checkpoints}/optimizer")
            booster.load_lr_scheduler(scheduler, f"{args.checkpoints}/scheduler")

    with torch.no_grad():
        loss = F.mse_loss(model(x), y)
    dist.all_reduce(loss)
    logger.info(f"trained with {args.plugin}", ranks=[0])
    coordinator.print_on_master(f"loss={loss.item() / coordinator.world_size:.7f}")


if __name__ == "__main__":
    main()
