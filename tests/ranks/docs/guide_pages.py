"""What becomes of the blocks of the pages that a new reader begins with."""

from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
from huggingface_hub import HfApi, constants
from page_blocks import Block, Names, shown
from safetensors.torch import load_file
from torch import nn

import shardwise
from shardwise.core.deferred import is_deferred

STATE_BYTES = 16  # a parameter, under Adam in mixed precision


def described(names: Names) -> None:
    assert is_deferred(names["model"])


def too_large(names: Names) -> None:
    """What the page says of sizes is so: two devices do not hold it, and nothing is on them."""
    session = names["session"]
    numel = sum(fact.numel for fact in session._engine.shards.layout.facts)
    capacity = session.memory().device_capacity_bytes
    assert round(numel / 1000) == 362 and numel * STATE_BYTES > 2 * capacity == 2**22


def loaded(names: Names) -> None:
    """Every value is the file's, to the bit."""
    state, stored = names["session"].module.state_dict(), load_file("large/model.safetensors")
    assert state.keys() == stored.keys() and all(torch.equal(state[name], stored[name]) for name in stored)


def listening(names: Names) -> None:
    names["shown"] = []
    names["print"] = lambda text: names["shown"].append(text)


def learnt(names: Names) -> None:
    """Rank 0 has printed three losses, which fall as the page says."""
    losses = [float(text.split()[-1]) for text in names["shown"]]
    assert names["rank"] != 0 or (len(losses) == 3 and losses[0] > losses[-1] + 1.0), losses


def on_the_host(names: Names) -> None:
    held = names["held"]
    assert held.tier_bytes("host") > 8 * held.tier_bytes("device")
    assert names["rank"] != 0 or "host" in names["shown"][-1]


def exported(names: Names) -> None:
    if names["rank"] == 0:
        state = names["tuned"].state_dict()
        stored = load_file("large/model.safetensors")
        assert state.keys() == stored.keys() and not torch.equal(state["lm_head.weight"], stored["lm_head.weight"])
        uploaded = names["AutoModelForCausalLM"].from_pretrained(pushed(names["tuned"])).state_dict()
        assert state.keys() == uploaded.keys() and all(torch.equal(state[name], uploaded[name]) for name in state)


def pushed(model: Any) -> Path:
    """Push to a stand-in for the Hub; return the folder of the uploaded files."""
    hub = Path("hub")
    hub.mkdir()

    def create_commit(*_: Any, operations: list[Any], **__: Any) -> None:
        for each in operations:
            (hub / each.path_in_repo).write_bytes(Path(each.path_or_fileobj).read_bytes())

    methods = {"create_repo": Mock(return_value=Mock(repo_id="me/tuned")), "create_commit": create_commit}
    with patch.multiple(HfApi, **methods), patch.object(constants, "HF_HUB_OFFLINE", True):
        model.push_to_hub("me/tuned")
    names = {path.name for path in hub.iterdir()}
    assert names == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    return hub


def computed(names: Names) -> None:
    """What it prints is what the page says."""
    assert [text.split()[-2] for text in names["shown"]] == ["112.0", "38.5", "26.2", "14.0"]


AN_ERROR = "what an error looks like; tests/ranks/memory/test_auto.py asks for its parts"
CLUSTER = "it needs a cluster; test_choosing_page.py runs it, with stand-ins for what only a cluster has"
MANIFEST = "it needs a cluster; tests/unit/project/test_site.py reads what can be read of it"
FINETUNE = "test_examples.py runs the program, and compares the page with it"
STARTS = "shardwise run --nproc 2 examples/finetune.py"
EXCERPTS = ("sampler =", "model.activation", "session.backward", "@torch.no_grad()", "restored =", "state =")


def _layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def _given(names: Names) -> None:
    model, inputs, targets = _layer(), torch.ones(2, 8), torch.zeros(2, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    names.update(shardwise=shardwise, model=model, optimizer=optimizer, inputs=inputs, targets=targets)
    names.update(loader=[(inputs, targets)], criterion=nn.MSELoss(), tokens=8)


def _named_layers(names: Names) -> None:
    model = nn.Sequential(OrderedDict(embed=_layer(), layers=nn.Sequential(_layer(), _layer())))
    names.update(shardwise=shardwise, model=model, optimizer=torch.optim.AdamW(model.parameters()))


def _stays(names: Names) -> None:
    names["session"].module(torch.ones(2, 8))
    shown = [name for name, param in names["model"].named_parameters() if not param.isnan().any()]
    assert {"embed.weight", "layers.0.weight"} <= set(shown), shown


def _trained(names: Names) -> None:
    """The session's model is another one than before."""
    assert not torch.equal(names["session"].module.state_dict()["weight"], _layer().weight)


def _stepped(names: Names) -> None:
    """The loss of the block trains the model."""
    names["session"].backward(names["loss"])
    names["session"].optimizer.step()
    _trained(names)


def _overflown(names: Names) -> None:
    """A step in fp16 whose loss is infinite."""
    model = _layer()
    session = shardwise.shard(model, torch.optim.AdamW(model.parameters()), stage=2, precision="fp16")
    session.backward(session.module(torch.ones(2, 8)).sum() * float("inf"))
    session.optimizer.step()
    names.update(session=session, print=lambda said: names.update(said=said))


def _named(names: Names) -> None:
    assert names["said"].startswith("the gradient of weight is not finite"), names["said"]


GUIDE: dict[str, list[Block]] = {
    "docs/choosing.md": [
        Block("def device_gb", before=listening, after=computed),
        *shown("test_engine_memory.py compares its numbers", "$ shardwise estimate"),
    ],
    "docs/hybrid-sharding.md": [
        Block("session = shardwise.shard(", before=_named_layers),
        Block("import torch", before=_named_layers),
        Block("session = shardwise.shard(", before=_named_layers, after=_stays),
        Block("from shardwise.plan import ParamGroupPlan", before=_named_layers, after=_stays),
    ],
    "docs/installation.md": [
        *shown("it installs; make venv does the same into .venv", "pip install .", "pip install torch"),
        Block("shardwise env", how="shell"),
        *shown(FINETUNE, STARTS),
        *shown("it needs Docker", "docker build"),
    ],
    "docs/mixed-precision.md": [
        Block("session = shardwise.shard(", before=_given, after=_stepped),
        Block("session = shardwise.shard(", before=_given, after=_trained),
    ],
    "docs/finetune.md": [*shown(FINETUNE, STARTS, STARTS.replace("2", "8"), *EXCERPTS, f"{STARTS} --lora")],
    "docs/multi-node.md": [
        *shown(CLUSTER, "shardwise run --nproc 8", "torchrun --nnodes 2", "shardwise run --nnodes 2"),
        *shown("tests/unit/project/test_site.py compares it", "ValueError: rank 0 on node-0"),
        *shown("tests/ranks/mesh/test_mesh.py sets it", "export GLOO_SOCKET_IFNAME"),
        *shown(CLUSTER, "#!/bin/bash", "#!/bin/bash"),
        *shown(MANIFEST, "apiVersion: v1"),
        *shown(CLUSTER, "mpirun -np 16"),
    ],
    "docs/index.md": [
        Block("import shardwise", before=_given, after=_trained),
        *shown("it installs; make venv does the same into .venv", "pip install ."),
    ],
    "docs/differences.md": [Block("session = shardwise.shard(", before=_given, after=_trained)],
    "docs/troubleshooting.md": [Block("if session.optimizer.last_step_skipped", before=_overflown, after=_named)],
    "docs/quickstart.md": [
        *shown("the blocks below are that program, run as one here", "shardwise run --nproc 2"),
        Block("import torch"),
        Block("from pathlib import Path"),
        Block("from shardwise import", after=described),
        Block("import shardwise", after=too_large),
        Block("session.checkpoints.load(", after=loaded),
        Block("from torch.utils.data import", before=listening, after=learnt),
        *shown(AN_ERROR, "DeviceMemoryError:"),
        Block("from shardwise import tiers_text", after=on_the_host),
        *shown("bars of one run, whose bytes on_the_host compares", "device "),
        *shown("test_examples.py starts the joined program twice", "epoch 3: loss"),
        Block("from shardwise import", instead=(("shardwise.shutdown()", ""),), after=exported),
    ],
}
"""By page, its blocks in their order."""
