"""What becomes of each block of README.md and docs/**/*.md: run, with what around it, or shown, for what reason.

The blocks are described in page_blocks.py.
"""

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import hybrid_pages
import torch
import torch.distributed as dist
from guide_pages import GUIDE
from page_blocks import ROOT, Block, Names, fences, shown
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise
import shardwise.deepspeed
from shardwise.nn.optimizer import HybridAdam
from shardwise.plan import replicated, zero
from shardwise.session import build
from tests.support.packed_setup import LAYERS, base, train


def _deep(names: Names) -> None:
    """A model of equal layers, so that a share of it can be seen."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    names.update(shardwise=shardwise, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    names.update(criterion=nn.functional.mse_loss, inputs=torch.randn(4, 16), targets=torch.zeros(4, 16))
    names["print"] = lambda said, read=0: names.update(said=said, read=read)


def _all_on_the_host(names: Names) -> None:
    session = names["session"]
    session.backward(names["criterion"](session.module(names["inputs"]), names["targets"]))
    session.optimizer.step()
    tiers = session.memory().by_tier
    assert tiers["host"]["optimizer state"] > 0 < tiers["host"]["parameters"] and "parameters" not in tiers["device"]
    session.close()


def _half_on_the_host(names: Names) -> None:
    tiers = names["session"].memory().by_tier
    assert 2 * tiers["host"]["masters"] == tiers["device"]["parameters"] and "parameters" not in tiers["host"], tiers


def _on_the_disk(names: Names) -> None:
    assert names["said"]["optimizer state"] > 0 < names["read"] and Path("scratch").is_dir()
    names["session"].close()


WIDTH = 8


# ---- what fragments find


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, WIDTH, generator=generator)
    return TensorDataset(inputs, torch.tanh(inputs))


class _Words(nn.Module):
    """``rows`` tokens in an embedding, a layer, and a head that is tied to the embedding, called as given."""

    def __init__(self, rows: int, embedding: str, layers: str) -> None:
        super().__init__()
        torch.manual_seed(rows)
        self.head = nn.Linear(WIDTH, rows)
        outer, _, inner = layers.rpartition(".")
        holder = nn.Module() if outer else self
        if outer:
            self.add_module(outer, holder)
        holder.add_module(inner, nn.ModuleList([nn.Linear(WIDTH, WIDTH)]))
        self.add_module(embedding, nn.Embedding(rows, WIDTH))
        self.head.weight = self.get_submodule(embedding).weight


def _unseen(names: Names) -> None:
    """A session, and samples for 105 batches on each rank, of which the page's loop saves the position after 100."""
    samples = torch.arange(105 * 8 * dist.get_world_size())
    names.update(session=build(_net(), None, zero(2)), dataset=TensorDataset(samples, samples), batches=[])
    names["train_step"] = lambda inputs, targets: names["batches"].append(inputs.tolist())


def _continues(names: Names) -> None:
    """A second run of the block sees the last five batches, in the first run's order."""
    first, names["batches"] = names["batches"], []
    [text] = [fence.text for fence in fences("docs/checkpoints.md") if fence.first.startswith("from torchdata")]
    exec(text.replace(*DATA_RUNS[0]), names)
    assert len(first) == 105 and names["batches"] == first[100:] and first[0] != sorted(first[0])
    names["session"].close()


def _other_names(names: Names) -> None:
    old, model = _Words(8, "wte", "transformer.h"), _Words(10, "embed", "layers")
    names["rows then"] = old.head.weight.detach().clone()
    saved = build(old, torch.optim.AdamW(old.parameters()), zero(2))
    if saved.mesh.rank == 0:
        shutil.rmtree("runs")
    saved.mesh.world.barrier()
    saved.checkpoints.save("runs")
    names["session"] = build(model, torch.optim.AdamW(model.parameters()), zero(2))


def _renamed(names: Names) -> None:
    state, then = names["session"].module.state_dict(), names["rows then"]
    torch.testing.assert_close(state["embed.weight"][:8], then)
    torch.testing.assert_close(state["embed.weight"][8:], then.mean(0).expand(2, -1))
    assert not state["head.bias"][8:].any() and state["head.bias"][:8].all()


def _two_models(names: Names) -> None:
    names.update(generator=build(_net(), None, zero(2)), discriminator=build(_net(), None, zero(2)), step=3)


def _criterion(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs.float(), targets)


def _training(names: Names) -> None:
    names["model"] = _net()
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=1e-2)
    names["lr_scheduler"] = names["scheduler"] = torch.optim.lr_scheduler.StepLR(names["optimizer"], 8)
    names["train_dataset"] = names["dataset"] = _dataset()
    names["loader"] = DataLoader(names["dataset"], batch_size=8)
    names["criterion"] = _criterion


def _changed(names: Names) -> None:
    """The page's model was trained."""
    state = names["model"].state_dict()
    assert any(not torch.equal(state[name].float(), value) for name, value in _net().state_dict().items())


def _lora(names: Names) -> None:
    import peft

    hybrid_pages.language(names)
    names.update(peft=peft, train_dataloader=DataLoader(names["dataset"], 8), batch=names["dataset"].ids[:8])


def _quantized(names: Names) -> None:
    if dist.get_rank() == 0:
        base(".")
    dist.barrier()
    names.update(folder="base", device="cpu")


def _trained_adapters(names: Names) -> None:
    session = names["session"]
    train(session.module, session.backward, session.optimizer.step)
    trained = [name for name, value in session.module.state_dict().items() if "lora_B" in name and value.any()]
    assert len(trained) == 7 * LAYERS  # they start as zeros


def _exists(*paths: str) -> Callable[[Names], None]:
    def after(_names: Names) -> None:
        if dist.is_initialized():
            dist.barrier()
        for path in paths:
            assert Path(path).exists(), path

    return after


def _deferred(names: Names) -> None:
    names.update(build_model=_net, HybridAdam=HybridAdam, torch=torch)


def _blocks(names: Names) -> None:
    _training(names)
    names["model"].blocks = [names["model"][0]]


def _trained_in_half(names: Names) -> None:
    plan = names["plan"]
    assert plan.precision.param_dtype is torch.bfloat16 and plan.shard.packing.unit_names == ("0",)
    session, (inputs, targets) = names["session"], next(iter(names["loader"]))
    session.backward(names["criterion"](session.module(inputs).float(), targets))
    session.optimizer.step()
    _changed({"model": session.module})


def _in_dcp(names: Names) -> None:
    assert Path("runs/dcp/.metadata").is_file()
    names["session"].close()


def _epochs(names: Names) -> None:
    _training(names)
    names["train"] = lambda epoch: names.setdefault("epochs", []).append(epoch)


def _resumed(names: Names) -> None:
    """The first run began without a checkpoint, and a second one begins after its three epochs."""
    assert names["restored"] is None and names["epochs"] == [0, 1, 2]
    restored = names["session"].checkpoints.load("runs", "auto", lr_schedulers=[names["scheduler"]])
    assert restored.data_position == {"epoch": 3} and restored.step == 0
    names["session"].close()


def _copied_back(names: Names) -> None:
    """The files are the same, and the manifest was the last to be uploaded."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        there, again = ({p.name: p.read_bytes() for p in Path(f, "step-0").iterdir()} for f in ("runs", "again"))
        assert there == again and list(names["fsspec"].filesystem("memory").store)[-1].endswith("manifest.json")


def _of_deepspeed(_names: Names) -> None:
    """A directory that DeepSpeed wrote, as ``deepspeed-run``."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        with tarfile.open(ROOT / "tests" / "data" / "deepspeed.tar.xz") as archive:
            archive.extractall(".", filter="data")
        Path("ds", "zero2-2ranks-fp32").rename("deepspeed-run")
    if dist.is_initialized():
        dist.barrier()


def _written(names: Names) -> None:
    """A program for another library."""
    Path("src").mkdir()
    for path in (Path("train.py"), Path("src/other.py")):
        path.write_text("from transformers import Trainer, TrainingArguments\n")


def _converted(_names: Names) -> None:
    """One run of ours under ``runs``, and the one of DeepSpeed."""
    model = _net()
    session = build(model, torch.optim.AdamW(model.parameters()), replicated())
    session.backward(session.module(torch.ones(2, WIDTH)).square().mean())
    session.optimizer.step()
    session.checkpoints.save("runs", "step-1000")
    session.close()
    session.mesh.close()
    _of_deepspeed({})


def _lm_head(names: Names) -> None:
    """A model with a head and a configuration, in a directory that is opened by its format's own reader."""
    model = nn.ModuleDict({"lm_head": nn.Linear(64, 64)})
    session = build(model, None, zero(1))
    session.checkpoints.save("deepspeed-run", "step-1")
    session.close()
    names["model"] = model
    model.config = {"model_type": "gpt2"}


def _configuration(names: Names) -> None:
    _training(names)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    config = {"train_batch_size": 16, "optimizer": optimizer, "scheduler": {"type": "WarmupLR"}, "gradient_clipping": 1}
    Path(f"ds_config{dist.get_rank()}.json").write_text(json.dumps(config))
    Path(f"ds_config{dist.get_rank()}.json").rename("ds_config.json")
    dist.barrier()


def _muon(names: Names) -> None:
    names.update(config={"train_batch_size": 2}, deepspeed=shardwise.deepspeed)


def _muon_trains(names: Names) -> None:
    engine, optimizer, _, _ = names["deepspeed"].initialize(model=nn.Linear(WIDTH, WIDTH), config=names["config"])
    engine.backward(engine(torch.ones(1, WIDTH)).sum())
    engine.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4]
    engine.destroy()


def _activations(names: Names) -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    x = torch.ones(2, WIDTH, requires_grad=True)
    names.update(mask=torch.ones(2, WIDTH), x=x, given=x)
    names["block"] = lambda x, mask: layer(x * mask)


def _activations_back(names: Names) -> None:
    names["x"].sum().backward()
    assert names["given"].grad is not None and float(names["given"].grad.abs().sum()) > 0.0


def _trainer(names: Names) -> None:
    from tests.support.huggingface_setup import arguments, gpt2, rows

    options = {"eval_strategy": "no", "save_strategy": "no", "num_train_epochs": 1}
    names.update(model=gpt2(), args=arguments("trained", 4, **options), data=rows()[:8], dataset=rows()[:8])


def _trains_and_closes(names: Names) -> None:
    names["trainer"].train()
    names.pop("trainer").accelerator.close()


def lightning(names: Names) -> None:
    from tests.support.lightning_setup import data, quiet, toy

    quiet()
    names.update(model=toy(), loader=data())


def _sharded(names: Names) -> None:
    names.update(MyModel=_net, loader=DataLoader(_dataset(), batch_size=8), criterion=_criterion)


def _groups(names: Names) -> None:
    names["data_group"] = dist.new_group(list(range(dist.get_world_size())))
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    names.update(model_group=alone[dist.get_rank()], MyPartOfTheModel=_net)
    names["model"].close()


def _read_by_itself(names: Names) -> None:
    model = _net()
    session = build(model, None, zero(2))
    path = session.checkpoints.save("runs", "one")
    for name, value in session.module.state_dict().items():
        assert torch.equal(torch.from_numpy(names["read"](path, f"model/{name}").copy()), value)
    session.close()


# ---- the pages

CPU = "devices=2, accelerator='cpu'"
IN_FABRIC = (("devices=4", f"{CPU}, plugins=environment()"),)
IN_LIGHTNING = (("devices=4", f"{CPU}, max_epochs=1, logger=False, plugins=environment()"),)
PICTURE = "a picture of packages and files"
OTHER_VERSIONS = "it needs other versions of Lightning than the environment has; the page says what they gave"
DATA_RUNS = (('"runs"', '"data-runs"'),)  # "runs" has a checkpoint of the first block
LONG = "a program of several minutes; tests/ranks/huggingface/test_deepspeed_programs.py starts a small one"
AN_ERROR = "what an error looks like; tests/unit/project/test_test_runner.py and test_pool.py ask for its parts"

PAGES: dict[str, list[Block]] = {
    **GUIDE,
    "docs/disk.md": [
        Block("session = shardwise.shard(model", before=_deep, after=_on_the_disk),
        Block("from shardwise.nn.optimizer import HybridAdam", before=_deep),
    ],
    "docs/inside/disk.md": [*shown("a picture of files", "<directory>/")],
    "docs/offload.md": [
        Block("session = shardwise.shard(model", before=_deep, after=_all_on_the_host),
        Block("from shardwise.plan import zero", before=_deep, after=_half_on_the_host),
        Block("from shardwise.plan import DiskPlan", before=_deep, after=lambda names: names["session"].close()),
    ],
    "README.md": [
        *shown("it installs; the tests run in what `make dev` installed", "pip install ."),
        *shown("tests/ranks/docs/test_examples.py runs both sides of it", "import torch"),
        Block("from shardwise.huggingface", before=_trainer, after=_trains_and_closes),
        Block("import shardwise.deepspeed", before=_configuration, after=lambda names: names["engine"].destroy()),
        Block("import lightning.pytorch as pl", instead=(("devices=4", f"{CPU}, logger=False"),)),
        Block("from shardwise.booster import Booster", before=_training),
        Block("make demo    # train", how="make"),
    ],
    "docs/architecture.md": [*shown(PICTURE, "shardwise/")],
    "docs/booster.md": [
        Block("from shardwise.booster import Booster", before=_training, after=_changed),
        Block("booster.save_checkpoint(", after=lambda names: _is(names["first_batch"], 120)),
        Block("from shardwise import deferred_init", before=_deferred),
    ],
    "docs/shardformer.md": [
        Block("from shardwise.booster import Booster", before=hybrid_pages.mlp, after=hybrid_pages.mlp_cut),
        Block("from shardwise.shardformer import Shard", before=hybrid_pages.alone, after=hybrid_pages.alone_cut),
    ],
    "docs/checkpoint-format.md": [Block("import json", after=_read_by_itself)],
    "docs/checkpoints.md": [
        Block("import shardwise", before=_epochs, after=_resumed),
        Block("from torchdata", before=_unseen, instead=DATA_RUNS, after=_continues),
        Block(
            "shardwise checkpoint convert runs/step-1000 llama",
            how="shell",
            before=_converted,
            # Of a run with an adapter, as tests/unit/checkpoint/test_formats_peft_colossalai_deepspeed.py converts one.
            left_out="shardwise checkpoint convert runs/step-1000 adapter --to peft",
        ),
        Block("from shardwise import open_ch", alone=True, before=_lm_head, after=_exists("out/model.safetensors")),
        Block("session.checkpoints.load(", before=_other_names, after=_renamed),
        Block("generator.checkpoints.save(", before=_two_models, after=_exists("runs/discriminator/step-3")),
        Block("from pathlib import Path", alone=True, after=_copied_back),
    ],
    "docs/command-line.md": [
        *shown("test_command_line_page.py runs it", "import os", "$ shardwise run"),
        Block("$ shardwise estimate", how="shell"),
        Block("$ shardwise trace", how="shell"),
        Block("$ shardwise schedule", how="shell"),
        Block("$ shardwise checkpoint inspect", how="shell", before=_converted),
        *(Block(f"$ shardwise checkpoint {action}", how="shell") for action in ("verify", "convert", "diff")),
        Block("$ shardwise port", how="shell", before=_written),
        *shown("the report of one machine; test_command_line_page.py compares its sections", "$ shardwise env"),
    ],
    "docs/deepspeed.md": [
        Block("import shardwise.deepspeed as deepspeed", before=_configuration, after=_exists("checkpoints/latest")),
        Block(
            "plan, report = deepspeed.to_plan(",
            after=lambda names: _is("zero_optimization.stage" in names["report"].used, True),
        ),
        Block("x = deepspeed.checkpointing.checkpoint(", before=_activations, after=_activations_back),
        Block("from shardwise.deepspeed.utils import safe_get_full_fp32_param"),
    ],
    "docs/deepspeed-rare.md": [Block('config["optimizer"] = {"type": "Muon"', before=_muon, after=_muon_trains)],
    "docs/porting.md": [Block("shardwise port train.py", how="shell", before=_written)],
    "docs/lora.md": [
        Block("import torch", before=_lora, after=_exists("adapter/adapter_model.safetensors")),
        Block("import peft", before=_lora, after=_exists("adapter/adapter_config.json")),
        Block("import torch", before=_quantized, after=_trained_adapters),
    ],
    "docs/metrics.md": [
        Block("from contextlib", before=hybrid_pages.trained, after=hybrid_pages.recorded),
        Block("def print_loss"),
        Block("import lightning.pytorch as pl", before=lightning, instead=IN_LIGHTNING, after=_exists("lightning.csv")),
        Block("from torch.profiler", before=hybrid_pages.profiled, after=_exists("trace-1.json")),
    ],
    "docs/native.md": [
        Block("import torch", before=hybrid_pages.language, instead=(("shardwise.shutdown()", ""),)),
        Block("session = shardwise.shard(model, optimizer, stage=3", before=hybrid_pages.accumulating),
        Block("session.module.eval()", before=hybrid_pages.evaluating, after=hybrid_pages.generated),
        *shown("a table, whose form tests/unit/memory/test_ledger_and_placement.py compares", "chunks"),
        Block("from shardwise import Settings", before=hybrid_pages.planned, after=hybrid_pages.ended),
        Block("from shardwise.plan import TensorPlan"),
        Block('plan = Settings(stage=3, precision="bf16")', before=hybrid_pages.language, after=hybrid_pages.read),
        *shown("a plan's file, which tests/unit/plan/test_plan.py reads", "stage = 3"),
    ],
    "docs/hybrid-parallel.md": [
        Block("from torch.utils.data import", before=hybrid_pages.language, after=hybrid_pages.llama_cut),
        Block("session = shardwise.shard", before=hybrid_pages.deeper, after=hybrid_pages.llama_staged),
        Block("session = shardwise.shard", before=hybrid_pages.language, after=hybrid_pages.llama_shared),
        Block("feed_forward = ", before=hybrid_pages.unknown, after=hybrid_pages.divided),
    ],
    "docs/booster-plugins.md": [
        Block("from shardwise.booster import Booster", before=hybrid_pages.deeper, after=hybrid_pages.llama_staged)
    ],
    "docs/huggingface.md": [
        Block("from shardwise.huggingface", before=_trainer, after=_exists("model/model.safetensors")),
        *shown("tests/ranks/huggingface/test_trl.py trains with it", "from trl import"),
        Block("from shardwise.huggingface import ShardwiseAccelerator", before=_training, after=_changed),
        *shown(LONG, "shardwise run --as deepspeed"),
    ],
    "docs/from-torch.md": [
        *shown("test_examples.py runs both sides of it", "import torch"),
        Block("import torch", before=_blocks, after=_trained_in_half),
        Block("import torch.distributed", after=_in_dcp),
    ],
    "docs/lightning.md": [Block("import lightning.pytorch as pl", before=lightning, instead=IN_LIGHTNING)],
    "docs/fabric.md": [
        Block("import torch", before=hybrid_pages.fabric, instead=IN_FABRIC, after=hybrid_pages.in_fabric)
    ],
    "docs/memory-profiling.md": [
        Block("$ shardwise trace examples/trace_memory.py:build", how="shell"),
        Block("from pathlib import Path"),
    ],
    "docs/optim.md": [Block("from shardwise.nn.optimizer import HybridAdam", before=_training)],
    "docs/sharded-model.md": [
        Block("from shardwise.nn.optimizer import CPUAdam", before=_sharded),
        Block("with ZeroInitContext(", before=_groups),
    ],
    "docs/checking-correctness.md": [
        Block("# ranks.py", how="main"),
        Block("from operator import add", how="main"),
        *shown(AN_ERROR, "shardwise.testing.pool.RankError:"),
        Block("# parity.py", how="main", after=lambda names: _is(names["expected"].norms[-1] > 0.0, True)),
        *shown(AN_ERROR, "parameters after 5 steps:"),
        Block("# traffic.py", how="main"),
        Block("# conftest.py", how="main", after=lambda names: _is(callable(names["rank_pools"]), True)),
    ],
    "docs/inside/front-ends.md": [*shown(OTHER_VERSIONS, "python -m pip install --no-deps --target old")],
    "docs/inside/tests.md": [Block("make gpu ", how="make"), Block("make matrix  ", how="make")],
}
"""By page, its blocks in their order."""


def _is(found: object, wanted: object) -> None:
    assert found == wanted, (found, wanted)
