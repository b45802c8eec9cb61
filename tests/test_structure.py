"""The figures of the package's shape count what they say."""

from __future__ import annotations

from collections import Counter

from tests.structure import SEAM, code_lines, comment_lines, notes, private_sites, rooms
from tests.test_architecture import ROOT, Source, ours

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
    assert not found, "name it in shardwise/torch_internals.py, with its reason:\n" + "\n".join(found)


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


def test_notes_and_what_refers_to_them_are_found() -> None:
    assert notes(NOTES) == (["Why a"], {"Why a", "Why b", "Why c"})
    assert notes("# See\n# [Note: Why a]\nx = 1\n") == ([], {"Why a"})


def test_every_note_has_one_place_and_what_refers_to_one_finds_it() -> None:
    pages = {path.name: path.read_text() for path in [*ROOT.glob("docs/*.md"), ROOT / "CONTRIBUTING.md"]}
    found = {name: notes(text) for name, text in ({s.name: s.text for s in ours()} | pages).items()}
    made = Counter(note for names, _ in found.values() for note in names)
    assert made, "no note was found at all"
    assert [name for name, count in made.items() if count > 1] == []
    assert {(where, name) for where, (_, names) in found.items() for name in names if name not in made} == set()
