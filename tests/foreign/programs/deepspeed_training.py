"""DeepSpeed's initialize with a configuration file, a checkpoint in the middle, and full weights from it."""

import argparse
import json

import deepspeed
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.utils import logger
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from task import BATCH, RATE, STEPS, build_loader, build_model, print_mean

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stage", type=int, default=2)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed(dist_backend="gloo")
args.deepspeed_config = f"ds_config_{dist.get_rank()}.json"
zero = {"stage": args.stage, "allgather_bucket_size": 50000000, "reduce_bucket_size": 50000000, "cpu_offload": False}
zero |= dict.fromkeys(("allgather_partitions", "reduce_scatter", "overlap_comm", "contiguous_gradients"), True)
config = {
    "train_batch_size": 2 * BATCH,
    "steps_per_print": 2000,
    "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.0}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": RATE, "warmup_max_lr": RATE}},
    "gradient_clipping": 1e6,
    "zero_optimization": zero,
}
with open(args.deepspeed_config, "w") as file:
    json.dump(config, file)
model = build_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for step, (x, y) in enumerate(build_loader(dist.get_rank(), dist.get_world_size())):
    x, y = x.to(engine.device), y.to(engine.device)
    loss = F.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    if step == STEPS // 2:
        engine.save_checkpoint("checkpoints", tag="half", client_state={"step": step})
        path, client_state = engine.load_checkpoint("checkpoints", tag="half")
        assert client_state["step"] == step and path is not None
assert engine.zero_optimization_stage() == args.stage and engine.global_steps == STEPS
engine.save_checkpoint("checkpoints", tag="last")
logger.info("trained")
weights = get_fp32_state_dict_from_zero_checkpoint("checkpoints", tag="last")
model = build_model()
model.load_state_dict(weights)
loss = F.mse_loss(model(x.cpu()), y.cpu()).detach()
print_mean(loss)
