"""DeepSpeed's stage 3: a model that is born sharded, weights that are looked at and set, a client optimizer."""

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from task import BATCH, RATE, build_loader, build_model, print_mean

deepspeed.init_distributed("gloo")
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0},
}
with deepspeed.zero.Init(config_dict_or_path=config):
    model = build_model()
weight = model.head.weight
assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE and tuple(weight.ds_shape) == (4, 32)
with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
    if dist.get_rank() == 0:
        weight.data.mul_(1.0)
optimizer = DeepSpeedCPUAdam(model.parameters(), lr=RATE, weight_decay=0.0)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for x, y in build_loader(dist.get_rank(), dist.get_world_size()):
    loss = F.mse_loss(engine(x), y)
    engine.backward(loss)
    assert safe_get_full_grad(weight).shape == (4, 32)
    engine.step()
assert safe_get_full_fp32_param(weight).shape == (4, 32)
assert safe_get_full_optimizer_state(weight, "exp_avg").shape == (4, 32)
with torch.no_grad():
    loss = F.mse_loss(engine(x), y)
print_mean(loss)
