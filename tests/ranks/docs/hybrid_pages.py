"""What the blocks of hybrid-parallel.md, shardformer.md, native.md and fabric.md need, and what they must have done."""

from pathlib import Path

import torch
import torch.distributed as dist
from page_blocks import Names
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise
from tests.support import lightning_setup

WIDTH, VOCABULARY = 8, 32


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
    session = names["plugin"].session(names["model"]) if "plugin" in names else names["session"]
    return {fact.names[0]: tuple(fact.shape) for fact in session._engine.shards.layout.facts}


def llama_cut(names: Names) -> None:
    """Both ranks have half of the layers; the vocabulary of 32 is padded to 128, for 64 rows on each."""
    sizes = sizes_of(names)
    assert sizes["model.layers.0.mlp.up_proj.weight"] == (WIDTH, WIDTH)
    assert sizes["model.embed_tokens.weight"] == (64, WIDTH)
    assert names["loss"].isfinite()


def llama_shared(names: Names) -> None:
    """Both ranks see the same sequences, and train on them."""
    session = names["session"]
    assert (session.data_ranks, session.mesh.sequence.size) == (1, dist.get_world_size())
    loss = session.module(**next(iter(DataLoader(names["dataset"], 8)))).loss
    session.backward(loss)
    assert loss.isfinite()


def deeper(names: Names) -> None:
    llama(names, 2)


def llama_staged(names: Names) -> None:
    """Each rank has one of the two layers, and the loss is where the second one is."""
    held = {name.split(".")[2] for name in sizes_of(names) if ".layers." in name}
    assert held == {str(dist.get_rank())}
    loss = names["result"]["loss"] if "result" in names else names["outcome"].loss
    assert loss.isfinite() if dist.get_rank() else loss is None


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(inputs)))


class FeedForward(Mlp):
    """A class that no table knows."""


def mlp(names: Names, kind: type[Mlp] = Mlp) -> None:
    names["model"] = kind()
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=1e-2)
    inputs = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    names["train_dataset"], names["criterion"] = TensorDataset(inputs, torch.tanh(inputs)), nn.MSELoss()


def unknown(names: Names) -> None:
    mlp(names, FeedForward)


def divided(names: Names) -> None:
    assert sizes_of(names)["up.weight"] == (WIDTH, WIDTH)


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


def language(names: Names) -> None:
    llama(names)
    names["dataset"] = names["train_dataset"]


def accumulating(names: Names) -> None:
    planned(names)
    names["loader"] = DataLoader(names["dataset"], 8)


def evaluating(names: Names) -> None:
    """The page's loop has made one step over four batches."""
    assert names["number"] == 4
    names["prompt"] = torch.ones(2, 3, dtype=torch.long)


def generated(names: Names) -> None:
    assert names["tokens"].shape[1] > 3 and all(loss.isfinite() for loss in names["losses"])


def planned(names: Names) -> None:
    ended(names)
    language(names)


def ended(names: Names) -> None:
    """A step was made, or at least a session that has the plan."""
    session = names["session"]
    assert session.data_ranks * session.mesh.pipeline.size == session.mesh.mesh_group.size
    if "plan" in names:
        assert session.plan == names["plan"].but(overlap=False, reduce_dtype=names["torch"].float32)
    session.close()


def trained(names: Names) -> None:
    """A session, and a loader."""
    language(names)
    names["session"] = shardwise.shard(names["model"], names["optimizer"], stage=3)
    names.update(loader=DataLoader(names["dataset"], 8), device="cpu")


def profiled(names: Names) -> None:
    trained(names)
    names["batch"] = next(iter(names["loader"]))


def recorded(names: Names) -> None:
    """Rank 0 has written a row for each batch, with a number for each column."""
    if names["session"].mesh.is_rank0:
        columns, *rows = Path("metrics.csv").read_text("utf-8").splitlines()
        assert columns.endswith("tokens_per_second,mfu") and len(rows) == len(names["loader"])
        assert all(float(each) >= 0 for row in rows for each in row.split(","))


def read(names: Names) -> None:
    """The session has what the file says."""
    session = names["session"]
    assert session.plan == names["plan"] and session.plan.precision.param_dtype is names["torch"].bfloat16
    session.close()


def _loader(names: Names) -> None:
    torch.manual_seed(0)
    names["loader"] = DataLoader(
        TensorDataset(torch.randn(16, lightning_setup.WIDTH), torch.randn(16, lightning_setup.OUT)), batch_size=4
    )


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(lightning_setup.WIDTH, 8), nn.Tanh(), nn.Linear(8, lightning_setup.OUT))


def fabric(names: Names) -> None:
    lightning_setup.quiet()
    _loader(names)
    names["MyModel"] = _model


def in_fabric(names: Names) -> None:
    """It trained in bf16 over fp32 masters, and saved."""
    moved = names["model"].state_dict()["0.weight"] - _model()[0].weight
    assert moved.dtype is torch.float32 and 0 < float(moved.detach().abs().max()) < 0.01
    assert Path("checkpoint").is_dir()
    names["fabric"].strategy.unshard()
