"""Tests that no module below the front-ends names a front-end or another library."""

import ast
import re
from collections.abc import Iterator

from tests.sources import PACKAGE, Source, assert_none, ours
from tests.test_architecture import ROWS, unit_and_row

# Names that code may not use; docstrings and comments may mention sources.
FOREIGN = re.compile(
    r"accelerate\b|\bapex\b|bitsandbytes|\bbnb|booster|colossal|deepspeed|diffusers|fabric|fairscale|gemini|hugging"
    r"|lightning|megatron|peft|\btimm\b|torchao|transformers|\btrl\b",
    re.IGNORECASE,
)
# Modules and packages that may use them, each with its reason.
FOREIGN_ALLOWED = {
    "core.checkpoint.formats": "files of other libraries",
    "core.checkpoint.model_config": "attributes under which models keep what such files have beside tensors",
    "core.engine.quantized_weights": "an attribute that tells weights which are not packed yet",
    "core.optim.state_form": "the name of a class in checkpoints",
    "core.base.warnings": "packages whose frames are no user's program",
    "core.parallel.sequence": "attention and masks of the models that it divides",
    "core.parallel.tensor": "architectures that it divides",
}
LAST = next(row for row, names in enumerate(ROWS) if "session" in names)


def _words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield names and strings of the code with their lines, without comments and docstrings."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value
        elif isinstance(node, ast.Name | ast.Attribute):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.lineno, node.arg or ""
        elif isinstance(node, ast.alias | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""


def check_foreign_names(source: Source) -> list[str]:
    """Check that a module below the front-ends names neither a front-end nor another library."""
    path = source.name.removeprefix(f"{PACKAGE}.")
    row = unit_and_row(source.name)[1]
    if row is None or row > LAST or any(path == each or path.startswith(f"{each}.") for each in FOREIGN_ALLOWED):
        return []
    return [
        f"{source.name}:{line} names {found[0]}: let the front-end do it, or say in general what is needed"
        for line, word in _words(source.tree)
        if (found := FOREIGN.search(word))
    ]


def test_modules_below_the_front_ends_name_no_other_library() -> None:
    assert_none(complaint for source in ours() for complaint in check_foreign_names(source))


def test_exceptions_are_still_needed() -> None:
    found = {s.name.removeprefix(f"{PACKAGE}.") for s in ours() for _, word in _words(s.tree) if FOREIGN.search(word)}
    for each in FOREIGN_ALLOWED:
        assert any(name == each or name.startswith(f"{each}.") for name in found), each


def test_the_checker() -> None:
    for module, text, expected in (
        ("core.engine", "def f(x):\n    return x.deepspeed_scale", "core.engine:2 names deepspeed"),
        ("core.shards.gather", "from transformers import x", "names transformers"),
        ("plan", "raise ValueError(f'{x}: use GeminiPlugin')", "names Gemini"),
        ("core.engine", "'Source: DeepSpeed.'\nx = 1  # as peft does\ny = accelerator", ""),
        ("sequence.attention", "from transformers import masking_utils", ""),
        ("booster.x", "from peft import x", ""),
    ):
        found = check_foreign_names(Source(f"{PACKAGE}.{module}", text))
        assert (expected in found[0]) if expected else not found, found
