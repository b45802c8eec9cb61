"""What the blocks of docs/hybrid-parallel.md need, and what they must have done."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, VOCABULARY = 8, 32
Names = dict[str, Any]


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.ids = torch.randint(VOCABULARY, (32, 6), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def llama(names: Names, layers: int = 1) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, **sizes)
    names["model"] = LlamaForCausalLM(config)
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=1e-2)
    names["train_dataset"], names["criterion"] = Texts(), None


def sizes_of(names: Names) -> dict[str, tuple[int, ...]]:
    session = names["plugin"].session(names["model"])
    return {fact.names[0]: tuple(fact.shape) for fact in session.engine.shards.layout.facts}


def llama_cut(names: Names) -> None:
    """Both ranks have half of the layers; the vocabulary of 32 is padded to 128, for 64 rows on each."""
    sizes = sizes_of(names)
    assert sizes["model.layers.0.mlp.up_proj.weight"] == (WIDTH, WIDTH)
    assert sizes["model.embed_tokens.weight"] == (64, WIDTH)
    assert names["loss"].isfinite()


def deeper(names: Names) -> None:
    llama(names, 2)


def llama_staged(names: Names) -> None:
    """Each rank has one of the two layers, and the loss is where the second one is."""
    held = {name.split(".")[2] for name in sizes_of(names) if ".layers." in name}
    assert held == {str(dist.get_rank())}
    loss = names["result"]["loss"]
    assert loss.isfinite() if dist.get_rank() else loss is None


def llama_shared(names: Names) -> None:
    """Both ranks see the same sequences, and a shard of all parameters is on each."""
    session = names["plugin"].session(names["model"])
    assert (session.data_ranks, session.mesh.sequence.size) == (1, dist.get_world_size())
    assert names["loss"].isfinite()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(inputs)))


def mlp(names: Names) -> None:
    names["model"] = Mlp()
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=1e-2)
    inputs = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    names["train_dataset"], names["criterion"] = TensorDataset(inputs, torch.tanh(inputs)), nn.MSELoss()


def mlp_cut(names: Names) -> None:
    """Both ranks have half of the layers, and trained it."""
    sizes = sizes_of(names)
    assert sizes["up.weight"] == (WIDTH, WIDTH) and sizes["down.bias"] == (WIDTH,)
    bias = names["plugin"].session(names["model"]).params[-1].detach()  # whole on both
    assert not torch.equal(bias, Mlp().down.bias.detach())


def alone(names: Names) -> None:
    names["model"], names["group"], names["policy"] = Mlp(), dist.group.WORLD, names["MlpPolicy"]()


def alone_cut(names: Names) -> None:
    inputs = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2))
    model = names["model"]
    assert model.up.weight.shape == (WIDTH, WIDTH) and names["shared_params"] == []
    torch.testing.assert_close(model(inputs), Mlp()(inputs))
