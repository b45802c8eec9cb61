"""The model and the data that all programs here train on."""

import torch
import torch.distributed as dist
from torch import nn

SAMPLES, BATCH, STEPS, RATE = 64, 4, 8, 0.01


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.layers(x))


def build_model():
    torch.manual_seed(0)
    return Net()


def build_dataset():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 16, generator=generator)
    return torch.utils.data.TensorDataset(x, x[:, :4].sin() + x[:, 4:8])


def build_loader(rank, world_size):
    sampler = torch.utils.data.DistributedSampler(build_dataset(), world_size, rank, shuffle=False)
    return torch.utils.data.DataLoader(build_dataset(), batch_size=BATCH, sampler=sampler)


def print_mean(loss):
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"loss={loss.item() / dist.get_world_size():.7f}")


def build_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def build_tokens():
    return torch.randint(0, 128, (4, 16), generator=torch.Generator().manual_seed(1))
