"""Every example (``>>>``) in a docstring of the package runs as printed, on two ranks.

The ranks are of their own, because examples leave sessions and registered names behind.
"""

import ast
import contextlib
import doctest
import io
import symtable
from pathlib import Path

import hybrid_pages
import pytest
import torch
import torch.distributed as dist
from documentation_setup import lightning
from page_blocks import Names

import shardwise
from shardwise.booster import Booster
from shardwise.booster.plugin import HybridParallelPlugin
from shardwise.metrics import Metrics
from shardwise.testing import RankPool
from tests.sources import ours
from tests.support.huggingface_setup import launched
from tests.support.sets import full

QUICK = ("shardwise.session", "shardwise.core.")
"""How the names of the modules begin whose examples the quick set runs."""


def examples(quick: bool) -> list[doctest.DocTest]:
    parse = doctest.DocTestParser().get_doctest
    return [
        parse(node.value.value, {}, f"{source.name}: {getattr(owner, 'name', '')}", source.name, node.lineno - 1)
        for source in ours()
        if source.name.startswith(QUICK) == quick
        for owner in ast.walk(source.tree)
        for node in ast.iter_child_nodes(owner)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and ">>>" in str(node.value.value)
    ]


def given(names: Names, code: str) -> None:
    """Set what an example finds: a layer with its optimizer and data, and what the example uses and does not make."""
    free = {each.get_name() for each in symtable.symtable(code, "", "exec").get_symbols() if not each.is_assigned()}
    torch.manual_seed(0)
    model, inputs = torch.nn.Linear(8, 4), torch.randn(2, 8)
    names.update(torch=torch, shardwise=shardwise, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    names.update(inputs=inputs, targets=inputs[:, :4], criterion=torch.nn.functional.mse_loss, micro_batches=[inputs])
    names["loader"] = torch.utils.data.DataLoader([(row, row[:4]) for row in torch.randn(8, 8)], 2)
    names["stats"] = shardwise.trace_memory(torch.nn.Linear(8, 4), inputs)
    if "module" in free:
        lightning(names)
        names["module"] = names["model"]
    if free & {"batch", "booster", "dataset"}:
        hybrid_pages.deeper(names)
        ids, names["dataset"] = names["train_dataset"].ids, names["train_dataset"]
        names["batch"] = dict.fromkeys(("input_ids", "labels"), ids[:4])
    if free & {"batch", "booster"}:
        plugin = HybridParallelPlugin(tp_size=1, pp_size=2, zero_stage=1, precision="fp32", num_microbatches=2)
        booster = names["booster"] = Booster(plugin=plugin)
        names["model"], names["optimizer"], *_ = booster.boost(names["model"], names["optimizer"])
        names["session"] = plugin.session(names["model"])
        booster.save_checkpoint("checkpoints", names["model"], names["optimizer"])
    elif "session" in free or "open_checkpoint" in code:
        session = names["session"] = shardwise.shard(model, names["optimizer"])
        session.checkpoints.save("checkpoints", data_position={"epoch": 2})
        names.update(loss=session.module(inputs).square().mean(), metrics=Metrics(session))


def run(tests: list[doctest.DocTest]) -> None:
    """Run each in a folder of its own, which the ranks share; one that reads files runs on rank 0 alone."""
    for number, test in enumerate(tests):
        Path(str(number)).mkdir(exist_ok=True)
        code, printed = "".join(example.source for example in test.examples), []
        for example in test.examples if "Trainer(" in code else []:
            example.want = example.want or "..."  # a Trainer prints its progress on rank 0
        with contextlib.chdir(str(number)), contextlib.redirect_stderr(io.StringIO()), launched():
            given(test.globs, code)
            if "session" in code or "open_checkpoint" not in code or dist.get_rank() == 0:
                runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.FAIL_FAST)
                assert not runner.run(test, out=printed.append).failed, "".join(printed)
            dist.barrier()


@pytest.mark.parametrize("quick", [True, *full(False)])
def test_examples_run(quick: bool, own_pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(tests := examples(quick)) > 30 and own_pool.run(run, tests, timeout=300.0)
