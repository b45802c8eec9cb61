"""ColossalAI's HybridParallelPlugin: a Llama in two stages, or its layers cut over two ranks."""

import sys

import colossalai
import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.cluster import DistCoordinator
from colossalai.nn.optimizer import HybridAdam
from transformers import LlamaConfig, LlamaForCausalLM

colossalai.launch_from_torch()
coordinator = DistCoordinator()
pp = int(sys.argv[1])
plugin = HybridParallelPlugin(
    tp_size=2 // pp,
    pp_size=pp,
    num_microbatches=2 if pp > 1 else None,
    zero_stage=0,
    precision="fp32",
    enable_flash_attention=False,
)
booster = Booster(plugin=plugin)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config)
optimizer = HybridAdam(model.parameters(), lr=1e-3)
model, optimizer, *_ = booster.boost(model, optimizer, criterion=lambda outputs, inputs: outputs.loss)
tokens = torch.randint(0, 128, (4, 16), generator=torch.Generator().manual_seed(1))
batch = {"input_ids": tokens, "labels": tokens}
for _ in range(3):
    if pp > 1:
        result = booster.execute_pipeline(
            iter([batch]), model, lambda outputs, inputs: outputs.loss, optimizer, return_loss=True
        )
        loss = result["loss"]
    else:
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
if loss is not None and coordinator.rank == coordinator.world_size - 1:
    print(f"loss={loss.item():.7f}")
