"""Tests of names and sentences: words that engineers from PyTorch would not search for, with the number of uses left.

A number only decreases: lower it when words are replaced, and remove the word's row when no use is left. A word without
a row may not be used.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator

from tests.sources import ROOT, Source, assert_none, ours

SLACK = 10
"""A number has to be lowered when the uses are fewer by more than this."""
NAMES = re.compile(
    "alike|anew|aside|asked|astray|beside|bringer|brought|carrier|census|cutting|disjoin|draws|encloses|enroll|errand|everyone"
    "|foresee|found|given|held|joint|kept|landing|landings|lanes|letters|others|party|remarks|rest|riders|said|seats|spare"
    "|summer|taken|told|unheld|void|wanted|watcher|whoever|whole"
)
"""Names of values, arguments, functions and classes, in any case."""
PROSE = re.compile(
    r"\b(?:beside|alike|anew|whoever|whatever|in its stead|is none|see there|in vain|by hand|nobody|somebody)\b",
    re.IGNORECASE,
)
"""Words of docstrings, comments, error messages and pages."""
LEFT_NAMES: dict[str, int] = {}
LEFT_PROSE = {"alike": 4, "beside": 2, "by hand": 3, "is none": 7, "nobody": 1}


def names_of(source: Source) -> Iterator[str]:
    """Yield each name that ``source`` binds: arguments, variables, attributes, functions, classes, and its own last
    part.
    """
    yield source.name.rsplit(".", 1)[-1]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def prose_of(text: str) -> Iterator[str]:
    """Yield comments and strings of Python code."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) or tokenize.tok_name[token.type] == "FSTRING_MIDDLE":
            yield token.string


def count_names() -> Counter[str]:
    """Return the number of banned names in the package."""
    found = (name.strip("_").lower() for source in ours() for name in names_of(source))
    return Counter(name for name in found if NAMES.fullmatch(name))


def count_prose() -> Counter[str]:
    """Return the number of banned words in the package's strings and comments and in the pages that users read."""
    texts = [text for source in ours() for text in prose_of(source.text)]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    texts += [page.read_text("utf-8") for page in pages]
    return Counter(word.lower() for text in texts for word in PROSE.findall(text))


def compared(found: Counter[str], left: dict[str, int]) -> list[str]:
    """Return complaints about numbers that increased, or that have to be lowered."""
    words = sorted(found.keys() | left.keys())
    above = [
        f"{word!r}: {found[word]} uses, {left.get(word, 0)} may be" for word in words if found[word] > left.get(word, 0)
    ]
    return above + [
        f"{word!r}: {found[word]} uses are left, lower its count from {left[word]}"
        for word in words
        if word in left and found[word] < max(left[word] - SLACK, 1)
    ]


def test_names() -> None:
    assert_none(compared(count_names(), LEFT_NAMES))


def test_prose() -> None:
    assert_none(compared(count_prose(), LEFT_PROSE))


def test_banned_names_and_words_are_found() -> None:
    source = Source("shardwise.beside", "def f(given): self.kept = 1\nclass Party: x = alike\nother = 2")
    found = sorted(name.lower() for name in names_of(source) if NAMES.fullmatch(name.lower()))
    assert found == ["beside", "given", "kept", "party"]
    text = "x = f'it lies beside {y} anew'  # alike\n'''by hand'''"
    assert [word for part in prose_of(text) for word in PROSE.findall(part)] == ["beside", "anew", "alike", "by hand"]
    above, below = compared(Counter(a=2, b=1), {"b": 30})
    assert above == "'a': 2 uses, 0 may be" and below == "'b': 1 uses are left, lower its count from 30"
