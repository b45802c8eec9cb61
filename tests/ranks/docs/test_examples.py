"""The programs of README.md and of some pages, and the examples that have no other test, each as printed."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from demo.model import ByteGPT, ModelSize
from page_blocks import ROOT, fences
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, mse_loss

from shardwise.testing import assert_close, run_ranks
from tests.support.on_ranks import on_ranks

EXAMPLES = ROOT / "examples"
RANKS = 2


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a temporary folder, because examples write files to the working directory."""
    monkeypatch.chdir(tmp_path)


def printed(name: str) -> tuple[str, dict[str, Any]]:
    """Run an example; return its output and its variables. Warnings are errors, because users would see them."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings(action="error"):
        names = runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return out.getvalue(), names


def _side(sign: str, page: str = "README.md") -> str:
    """Return one side of the diff that a page shows: lines without a sign, and those with ``sign``."""
    (lines,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return "\n".join(line[1:] for line in lines.splitlines() if line[:1] in ("", " ", sign))


def _readme(sign: str) -> dict[str, torch.Tensor]:
    from tests.support.huggingface_setup import LENGTH, gpt2

    dataset = torch.randint(17, (8, LENGTH), generator=torch.Generator().manual_seed(2))
    if not Path("my-model").exists():
        gpt2().save_pretrained("my-model")
    names: dict[str, Any] = {"dataset": dataset}
    exec(_side(sign), names)
    if sign == "+":
        assert Path("runs").is_dir()
        return {name: value.clone() for name, value in names["session"].module.state_dict().items()}
    return torch.load("weights.pt")


def test_readme_program_equals_plain_torch() -> None:
    (plain,), (sharded,) = run_ranks(1, _readme, "-"), run_ranks(1, _readme, "+")
    assert_close(sharded, plain, rtol=1e-5, what="parameters")
    first, second = run_ranks(RANKS, _readme, "+")
    assert_close(first, second, rtol=0.0, what="parameters of the two ranks")
    assert any(not torch.equal(first[name], plain[name]) for name in plain)


@on_ranks(RANKS)
def test_ported_ddp_program_equals_ddp() -> None:
    found = []
    for sign in "-+":
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(dist.get_rank())
        batches = [(torch.randn(4, 8, generator=generator), torch.ones(4, 8)) for _ in range(3)]
        names: dict[str, Any] = {"model": torch.nn.Linear(8, 8), "loader": batches, "criterion": mse_loss}
        exec(_side(sign, "docs/from-torch.md").replace("dist.init_process_group()", ""), names)  # done by the ranks
        dist.barrier()
        found.append(dict(names["session"].module.state_dict() if sign == "+" else torch.load("weights.pt")))
    assert_close(found[1], found[0], rtol=1e-5, what="parameters")


def _quickstart(epochs: int) -> list[str]:
    """Run the blocks of the page as one program; return the epochs that this rank printed."""
    program = "\n".join(fence.text for fence in fences("docs/quickstart.md") if fence.language == "python")
    program = program.replace("shardwise.shutdown()", "session.close()")  # the pool keeps its process group
    assert "else 0, 3):" in program
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(program.replace("else 0, 3):", f"else 0, {epochs}):"), names)
    return re.findall(r"^epoch (\d)", out.getvalue(), re.MULTILINE)


@pytest.mark.full
def test_quickstart_resumes_after_a_restart() -> None:
    assert run_ranks(RANKS, _quickstart, 3) == [["0", "1", "2"], []]
    assert run_ranks(RANKS, _quickstart, 5) == [["3", "4"], []]


@on_ranks(1)
@pytest.mark.full
def test_notebook_cells_run_in_order(tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text("utf-8"))["cells"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"), {})
    records = [json.loads(line) for line in (tmp_path / "notebook.jsonl").read_text("utf-8").splitlines()]
    last = float(out.getvalue().splitlines()[-1])  # the loss of the model after unshard()
    assert len(records) == 50 and last < records[-1]["loss"] < records[0]["loss"] / 2


def _losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"epoch \d+: loss (\S+)$", text, re.MULTILINE)]


@pytest.mark.full
@pytest.mark.parametrize(("name", "epochs"), [("fabric_strategies.py", 5), ("ray_train.py", 20)])
def test_examples_whose_library_starts_the_ranks(name: str, epochs: int, tmp_path: Path) -> None:
    pytest.importorskip("ray" if name.startswith("ray") else "lightning")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # Ray writes a token and its results to the home directory, and by default prints each line twice.
    variables = os.environ | {"PYTHONPATH": paths, "HOME": str(tmp_path), "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
    done = subprocess.run([sys.executable, EXAMPLES / name], env=variables, capture_output=True, text=True, timeout=600)
    losses = _losses(done.stdout + done.stderr)
    assert done.returncode == 0 and len(losses) == epochs and losses[-1] < losses[0], done.stderr
    assert list(tmp_path.glob("*-checkpoint/**/manifest.json"))


def _accelerated() -> list[float]:
    from tests.support.huggingface_setup import launched

    with launched():
        return _losses(printed("huggingface_accelerate.py")[0])


@pytest.mark.full
def test_accelerate_learns_and_saves_its_state(tmp_path: Path) -> None:
    losses, others = run_ranks(RANKS, _accelerated)
    assert len(losses) == 4 and losses[-1] < losses[0] / 2 and others == []
    assert any((tmp_path / "accelerate-state").iterdir())


def test_every_example_is_run_by_a_test() -> None:
    tests = "".join(path.read_text("utf-8") for path in Path(__file__).parents[1].rglob("test_*.py"))
    programs = [*EXAMPLES.rglob("*.py"), *EXAMPLES.rglob("*.ipynb")]
    names = [path.name for path in programs if path.parent.name != "demo"]
    assert len(names) > 8 and [name for name in names if f'"{name}"' not in tests] == []


@on_ranks(RANKS)
def test_booster_gpt_learns_and_saves_the_model(tmp_path: Path) -> None:
    text, names = printed("booster_gpt.py")
    losses, state = _losses(text), names["model"].state_dict()
    # Only rank 0 prints.
    assert losses == [] if dist.get_rank() else len(losses) == 10 and losses[-1] < 1.5 < 2.4 < losses[0]
    dist.barrier()
    (saved,) = tmp_path.iterdir()
    assert saved.name == "booster_gpt.safetensors"
    assert_close(load_file(saved), state, rtol=0.0, what="the saved model")


def _offload() -> tuple[str, dict[str, dict[str, int]], int]:
    text, names = printed("offload.py")
    return text, names["held"].by_tier, names["held"].device_capacity_bytes


def _plain_offload() -> tuple[float, int]:
    """Return the last loss of ten steps without offload, and the bytes that they need."""
    torch.manual_seed(0)
    model = ByteGPT(ModelSize(width=256, depth=8, heads=4, context=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.randint(256, (2, 65))
    for _ in range(10):
        loss = cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item(), 16 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.full
def test_offload_example_trains_within_its_device_memory() -> None:
    (shown, tiers, capacity), (silent, *_) = run_ranks(RANKS, _offload)
    ((loss, unsharded_bytes),) = run_ranks(1, _plain_offload)  # a rank has imported the optimizers already
    assert float(shown.split()[1]) == pytest.approx(loss, abs=1e-3) and loss < 4.0  # three decimals are printed
    assert silent == ""
    assert capacity == 32 * 2**20 and round(unsharded_bytes / 2**20) == 97  # the comment of the example says 97 MiB
    assert 0 < sum(tiers["device"].values()) <= capacity
    assert sum(tiers["host"].values()) > 0.45 * unsharded_bytes and f"of {capacity >> 20}" in shown


@on_ranks(1)
@pytest.mark.full
def test_trace_memory_draws_and_shows_a_lower_peak_with_checkpointing(tmp_path: Path) -> None:
    text, _ = printed("trace_memory.py")
    found = re.search(r"^peak (\S+) MiB, with checkpointing (\S+) MiB$", text, re.MULTILINE)
    assert found is not None, text
    plain, frugal = map(float, found.groups())
    assert 0 < frugal < 0.8 * plain and "◀ peak" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.svg", "trace.txt"]
    assert ElementTree.fromstring((tmp_path / "trace.svg").read_text("utf-8")).tag.endswith("svg")
    assert (tmp_path / "trace.txt").read_text("utf-8").count("\n") > 20


def _finetuned(*options: str) -> list[float]:
    main = runpy.run_path(str(EXAMPLES / "finetune.py"))["main"]
    return main(["--sequences", "64", *options])


def _all_epochs_trained() -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        losses = _finetuned("--text", "text.txt")
    return len(losses), out.getvalue()


def test_finetune_learns_resumes_and_exports() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first, _ = run_ranks(RANKS, _finetuned, "--epochs", "1", timeout=300.0)
    again, _ = run_ranks(RANKS, _finetuned, timeout=300.0)
    assert first[1] < first[0] - 0.1 and again[0] == pytest.approx(first[1], abs=1e-3) and len(again) == 2
    Path("text.txt").write_text("Each rank reads its own part of the text. " * 2000, "utf-8")
    (evaluations, shown), (_, other) = run_ranks(RANKS, _all_epochs_trained, timeout=300.0)
    assert evaluations == 1 and other == "" and shown == "runs has 2 trained epochs of 2: nothing to train\n"
    tokens = AutoTokenizer.from_pretrained("tuned")("The statement", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert AutoModelForCausalLM.from_pretrained("tuned")(tokens).logits.isfinite().all()


@pytest.mark.full
def test_finetune_trains_adapters(tmp_path: Path) -> None:
    run_ranks(RANKS, _finetuned, "--lora", "--epochs", "1", timeout=300.0)
    assert (tmp_path / "tuned" / "adapter_model.safetensors").is_file()


def test_finetune_page_shows_the_program() -> None:
    program = {line.strip() for line in (EXAMPLES / "finetune.py").read_text("utf-8").splitlines()}
    blocks = [fence.text for fence in fences("docs/finetune.md") if fence.language == "python"]
    assert len(blocks) == 6
    assert [line for block in blocks for line in block.splitlines() if line.strip() not in program] == []
