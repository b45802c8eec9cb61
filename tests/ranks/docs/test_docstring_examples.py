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
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def examples(quick: bool) -> list[doctest.DocTest]:
    sources = [source for source in ours() if source.name.startswith(QUICK) == quick]
    documented = [(s.name, node) for s in sources for node in ast.walk(s.tree) if isinstance(node, DOCUMENTED)]
    found = []
    for module, node in documented:
        name, text = f"{module}: {getattr(node, 'name', 'module')}", ast.get_docstring(node) or ""
        found.append(doctest.DocTestParser().get_doctest(text, {}, name, None, None))
    return [test for test in found if test.examples]


def given(names: Names, code: str) -> None:
    """Set what an example finds: a layer with its optimizer and data, and what the example uses and does not make."""
    free = {each.get_name() for each in symtable.symtable(code, "", "exec").get_symbols() if not each.is_assigned()}
    torch.manual_seed(0)
    names.update(torch=torch, shardwise=shardwise, model=nn.Linear(8, 4), criterion=nn.functional.mse_loss)
    names.update(inputs=torch.randn(2, 8), targets=torch.zeros(2, 4), micro_batches=[torch.randn(2, 8)] * 4)
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
    names["loader"] = DataLoader(TensorDataset(torch.randn(8, 8), torch.zeros(8, 4)), 2)
    if "stats" in free:
        names["stats"] = shardwise.trace_memory(names["model"], names["inputs"])
    if "module" in free:
        lightning(names)
        names["module"] = names["model"]
    if free & {"batch", "booster", "dataset"}:
        hybrid_pages.language(names, 2)
        names["batch"] = dict.fromkeys(("input_ids", "labels"), names["dataset"].ids[:4])
    if "booster" in free:
        plugin = HybridParallelPlugin(tp_size=1, pp_size=2, zero_stage=1, precision="fp32", num_microbatches=2)
        booster = names["booster"] = Booster(plugin=plugin)
        names["model"], names["optimizer"], *_ = booster.boost(names["model"], names["optimizer"])
        booster.save_checkpoint("checkpoints", names["model"], names["optimizer"])
    if "session" in free or "open_checkpoint" in code:
        staged = {"stage": 1, "pp": 2, "microbatches": 2} if "batch" in free else {}
        session = names["session"] = shardwise.shard(names["model"], names["optimizer"], **staged)
        session.checkpoints.save("checkpoints", data_position={"epoch": 2})
        if not staged:
            names.update(loss=session.module(names["inputs"]).square().mean(), metrics=Metrics(session))


def run_examples(quick: bool) -> int:
    """Run each in a folder of its own, which the ranks share; one that reads files runs on rank 0 alone."""
    tests = examples(quick)
    for number, test in enumerate(tests):
        Path(str(number)).mkdir(exist_ok=True)
        code, printed = "".join(example.source for example in test.examples), []
        for example in test.examples if "Trainer(" in code else []:
            example.want = example.want or "..."  # a Trainer prints its progress on rank 0
        with contextlib.chdir(str(number)), contextlib.redirect_stderr(io.StringIO()), launched():
            given(test.globs, code)
            if "open_checkpoint" not in code or dist.get_rank() == 0:
                runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.FAIL_FAST)
                assert not runner.run(test, out=printed.append).failed, f"{test.name}\n{''.join(printed)}"
            dist.barrier()
    return len(tests)


@pytest.mark.parametrize("quick", [True, *full(False)])
def test_examples_run_as_printed(quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RankPool(2) as pool:
        assert pool.run(run_examples, quick, timeout=300.0) == [len(examples(quick))] * 2
