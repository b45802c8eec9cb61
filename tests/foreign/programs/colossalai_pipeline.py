"""ColossalAI's HybridParallelPlugin: a Llama in two stages, or its layers cut over two ranks."""

import sys

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.cluster import DistCoordinator
from colossalai.nn.optimizer import HybridAdam
from task import build_llama, build_tokens

colossalai.launch_from_torch()
coordinator = DistCoordinator()
pp = int(sys.argv[1])
parts = {"tp_size": 2 // pp, "pp_size": pp, "num_microbatches": 2 if pp > 1 else None}
booster = Booster(plugin=HybridParallelPlugin(**parts, zero_stage=0, precision="fp32", enable_flash_attention=False))
model, tokens = build_llama(), build_tokens()
optimizer = HybridAdam(model.parameters(), lr=1e-3)


def criterion(outputs, inputs):
    return outputs.loss


model, optimizer, *_ = booster.boost(model, optimizer, criterion=criterion)
batch = {"input_ids": tokens, "labels": tokens}
for _ in range(3):
    if pp > 1:
        loss = booster.execute_pipeline(iter([batch]), model, criterion, optimizer, return_loss=True)["loss"]
    else:
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
if loss is not None and coordinator.rank == coordinator.world_size - 1:
    print(f"loss={loss.item():.7f}")
