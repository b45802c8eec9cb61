"""Tests of the figures of the package's structure, the budgets, the notes, and the layout of the tests."""

import ast
from collections import Counter

from tests.budgets import BUDGETS, complaints, counted
from tests.sources import PACKAGE, ROOT, Source, around, assert_none, ours
from tests.structure import SEAM, code_lines, comment_lines, note_complaints, notes, private_sites, rooms

TEXT = '''"""Of
two lines."""

import torch  # why

# A reason.
def f(p):
    """One."""
    p.data = torch._C.thing(p._version)  # noqa: X
    return torch.__version__, p.data
'''


def test_lines_of_code_and_of_comments() -> None:
    assert code_lines(Source("x", TEXT)) == 4
    assert comment_lines(TEXT) == 2


def test_private_names_of_torch() -> None:
    text = TEXT + "from torch._dynamo import disable\nfrom torch.nn import Linear\n"
    found = sorted(name for _, name in private_sites(Source("x", text)))
    assert found == ["p._version", "p.data =", "torch._C.thing", "torch._dynamo.disable"]


def test_private_names_of_torch_are_in_one_file() -> None:
    outside = [source for source in ours() if source.name not in SEAM]
    found = [f"{source.name}:{line} {name}" for source in outside for line, name in private_sites(source)]
    assert not found, "name it in shardwise/core/base/torch_internals.py, with its reason:\n" + "\n".join(found)


def test_every_part_is_within_its_budget() -> None:
    assert_none(complaints())


def test_budgets_name_each_room_once() -> None:
    named = [room for budget in BUDGETS.values() for room in budget.rooms]
    assert sorted(named) == sorted(set(named)) and set(named) <= set(rooms())
    assert all(counted().values())


def test_every_room_is_counted() -> None:
    found = rooms()
    assert found["engine"].code > 1000 and found["checkpoint"].cls[0] > 100


NOTES = """
# [Note: Why a]
# Because.
class A:  # See [Note: Why b].
    # See [Note: Why
    # c] and [Note: Why a].
    pass
"""


def test_notes_and_references_are_found() -> None:
    assert notes(NOTES) == (["Why a"], {"Why a", "Why b", "Why c"})
    assert notes("# See\n# [Note: Why a]\nx = 1\n") == ([], {"Why a"})


def test_duplicate_notes_and_missing_references_are_complaints() -> None:
    twice, to_b, to_c = note_complaints({"one": NOTES, "other": "# [Note: Why a]\n# Again.\n"})
    assert "['one', 'other']" in twice and "[Note: Why b]" in to_b and "[Note: Why c]" in to_c
    assert note_complaints({"one": "# [Note: Why a]\n# Because.\n", "other": "See [Note: Why\na]."}) == []


def test_notes_are_unique_and_references_resolve() -> None:
    texts = {source.name: source.text for source in ours()}
    texts |= {str(path): path.read_text() for path in [*ROOT.glob("docs/**/*.md"), ROOT / "CONTRIBUTING.md"]}
    assert sum(len(notes(text)[0]) for text in texts.values()) > 20
    assert note_complaints(texts) == []


def test_folders_of_tests_have_names_of_packages() -> None:
    """A test file next to these folders would make them importable: ``deepspeed`` would seem to be installed."""
    for part in ("unit", "ranks"):
        files = list((ROOT / "tests" / part).glob("*.py"))
        assert not files, f"move into a folder named as the package whose behavior it tests: {files}"
        folders = {path.parent.name for path in ROOT.glob(f"tests/{part}/*/*.py")}
        packages = {path.parent.name for path in (ROOT / PACKAGE).glob("**/__init__.py")}
        unknown = folders - packages - {"docs", "late", "front_ends", "project"}
        assert len(folders) > 10 and not unknown, f"no package of shardwise is named so: {unknown}"


def test_tests_import_private_names_of_their_own_package_only() -> None:
    imports = [
        (source.name.split(".")[2], node.module.split("."), alias.name)
        for source in around()
        if source.name.startswith(("tests.unit.", "tests.ranks."))
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}.")
        for alias in node.names
    ]
    assert len(imports) > 500
    assert_none(
        [f"{folder}: {module} {name}" for folder, module, name in imports if name[0] == "_" and folder not in module]
    )


def test_file_names_of_tests_are_unique() -> None:
    """The folders are no packages, so a second file with the same name would be taken for the first.

    Exception: Python requires the name of its startup file, which lies in a folder that only one run has on its path.
    """
    files = (path for path in ROOT.glob("tests/**/*.py") if path.name not in ("sitecustomize.py", "conftest.py"))
    count = Counter(path.name for path in files if not (path.parent / "__init__.py").exists())
    assert len(count) > 150 and [name for name, times in count.items() if times > 1] == []
