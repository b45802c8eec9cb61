"""The figures of the package's shape count what they say."""

from __future__ import annotations

from tests.structure import SEAM, code_lines, comment_lines, private_sites, rooms
from tests.test_architecture import Source, ours

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
