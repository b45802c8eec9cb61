"""Tests of the documentation site: navigation, names of the API reference, quoted messages.

``make site`` checks links, reference names and external resources.
"""

import ast
import importlib
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from shardwise.cli import main
from shardwise.core.grads.chunk_grads import REDUCTION, Reduction
from shardwise.core.mesh.gloo_addresses import Listener, check_listeners
from shardwise.core.shards.chunk import RESIDENCY, Residency

yaml = pytest.importorskip("yaml", reason="the extra hf brings PyYAML")
ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
OUTSIDE = {"CHANGELOG.md", "CONTRIBUTING.md", "examples/ray_train.md"}
"""Pages from outside of docs/."""


def pages_of(entries: list[Any]) -> list[str]:
    """Yield the pages of a navigation in order."""
    found: list[str] = []
    for entry in entries:
        [below] = entry.values()
        found += pages_of(below) if isinstance(below, list) else [below]
    return found


def test_navigation_has_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2].partition("\nnot_in_nav:")[0]
    pages = pages_of(yaml.safe_load(nav))
    internals = {path.name for path in (DOCS / "inside").glob("*.md")} - {"index.md"}
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | OUTSIDE
    assert pages[0] == "index.md" and len(pages) == len(set(pages))
    assert set(pages) == there - {f"inside/{name}" for name in internals}, "add the page to nav: in mkdocs.yml"
    listed = re.findall(r"(?m)^\| \[.*?\]\((.*?)\) \|", (DOCS / "inside" / "index.md").read_text("utf-8"))
    assert len(listed) == len(internals) and set(listed) == internals, "list the page in docs/inside/index.md"


def test_every_example_is_listed() -> None:
    listed = re.findall(r"\]\(\.\./examples/(.*?)\)", (DOCS / "examples.md").read_text("utf-8"))
    programs = [*ROOT.glob("examples/*.*"), *ROOT.glob("examples/booster_plugins/*.py")]
    examples = {str(path.relative_to(ROOT / "examples")) for path in programs}
    assert len(listed) == len(examples) and set(listed) == examples, "list the program in docs/examples.md"


PUBLIC = ["", ".booster", ".booster.plugin", ".plan", ".huggingface", ".metrics", ".deepspeed", ".pytorch"]


@pytest.mark.parametrize("package", PUBLIC)
def test_reference_has_every_public_name(package: str) -> None:
    text = "".join(path.read_text("utf-8") for path in (DOCS / "reference").glob("*.md"))
    names = {*importlib.import_module(f"shardwise{package}").__all__} - {"__version__"}
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_cluster_page_has_error_options_and_manifest() -> None:
    page = (DOCS / "multi-node.md").read_text("utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    there = [Listener(rank, f"node-{rank}", str(rank), "127.0.1.1", ["eth0", "docker0"]) for rank in (0, 1)]
    with pytest.raises(ValueError) as error:
        check_listeners(there)
    assert f"ValueError: {error.value}" in [" ".join(block.split()) for block in blocks]
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("shardwise run")]
    read = [main._parser().parse_args(line.split()[1:]) for line in commands]
    assert [(each.nnodes, each.nproc) for each in read] == [("1", "8"), ("2", "8")]
    assert {each.script for each in read} == {"finetune.py"}
    [manifest] = [block for block in blocks if block.startswith("apiVersion")]
    service, job = yaml.safe_load_all(manifest)
    pod = job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    assert pod["subdomain"] == service["metadata"]["name"] and job["spec"]["completions"] == job["spec"]["parallelism"]
    [container] = pod["containers"]
    assert f"--nnodes={job['spec']['completions']}" in container["command"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


def test_troubleshooting_page_quotes_the_messages() -> None:
    """Compare the fixed words of the messages; two of them are torch's and the system's."""
    table = re.findall(r"^\| (`.*?`.*?) \|", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)
    quotes = [quote for cell in table for quote in re.findall(r"`([^`]+ [^`]+)`", cell)]
    known = {"Bus error", "more than one element of the written-to tensor refers to a single memory location"}
    trees = [ast.parse(path.read_text("utf-8")) for path in (ROOT / "shardwise").rglob("*.py")]
    texts = {
        each.value if isinstance(each, ast.Constant) else "".join(str(getattr(v, "value", "")) for v in each.values)
        for tree in trees
        for each in ast.walk(tree)
        if isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, str))
    }
    assert len(quotes) > 20
    assert [quote for quote in quotes if quote not in known and not any(quote in text for text in texts)] == []


def test_pictures_are_up_to_date() -> None:
    pictures = importlib.import_module("docs.pictures.__main__")
    there = {path.name: path.read_text("utf-8") for path in (DOCS / "pictures").glob("*.svg")}
    assert there == {name: draw() for name, draw in pictures.PICTURES.items()}, "make pictures draws them anew"
    assert set(pictures.WAYS) == {(old, new) for old, new, _ in RESIDENCY} and set(pictures.PLACES) == set(Residency)
    drawn = {(old, new) for old, new, _ in REDUCTION}
    assert set(pictures.WAYS_OF_GRADIENTS) == drawn and set(pictures.PLACES_OF_GRADIENTS) == set(Reduction)
    pages = "".join(path.read_text("utf-8") for path in DOCS.rglob("*.md"))
    for name, text in there.items():
        assert f"pictures/{name})" in pages and ElementTree.fromstring(text).tag.endswith("svg")
