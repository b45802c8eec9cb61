"""Values that no file should have, and trees with one of them in place of another value.

A value is written as JSON, so that a recipe can contain it; what JSON cannot represent is an object with the key
``"!"``.
"""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import torch

SECRET = "outside/secret"  # next to the directory of the checkpoint that is read

NUMBERS = (None, True, False, 0, 1, -1, 2, 7, 1.5, -0.0, 2**31, 2**45, 2**63, -(2**63) - 1, 10**30)
TEXTS = ("", "many", "float32", "load", "\x1b[2Jx", "a\0b", "\ud800", "$", "#0")
PATHS = (".", "..", "../" + SECRET, "../outside", "/dev/zero", "/etc/hostname", "C:\\x", "//x/y")
LISTS: tuple[Any, ...] = ([], [None], [0], [1], [[]], [1, 2, 3], [-1], [2**62, 2**62], [2**45], ["many"])
OBJECTS: tuple[Any, ...] = (
    *({}, {"a": None}, {"": []}, {"$tensor": "none"}, {"$tensor": []}, {"$float": "x"}, {"$float": []}),
    *({"$float": "inf"}, {"$tuple": 3}, {"$tuple": [1, 2]}, {"$items": 3}, {"$items": [[[], 1]]}, {"$items": [[1]]}),
    *({"$counter": [["a", "b"]]}, {"dtype": "load", "value": 1}, {"dtype": "float32", "value": "x"}),
    *({"dtype": "float32", "value": [1], "shape": [7]}, {"dtype": "float32", "value": 3.0}),
    {"dtype": "float32", "value": [1.0, 2.0, 3.0], "shape": [3]},
)
PLAIN: tuple[Any, ...] = (*NUMBERS, *TEXTS, *PATHS, *LISTS, *OBJECTS)
SPECIAL: tuple[dict[str, Any], ...] = (
    *({"!": kind} for kind in ("inf", "nan", "secret")),
    *({"!": "deep", "n": number} for number in (60, 150, 900, 100_000)),
    *({"!": "digits", "n": 5_000}, {"!": "long", "n": 100_000}, {"!": "many", "n": 100_000}),
)
ONLY_TEXT: tuple[dict[str, Any], ...] = ({"!": "colliding", "n": 60_000},)


class Stale(Exception):
    """A recipe no longer fits its checkpoint, and has to be recorded again."""


def draw_value(random: random.Random, pickled: bool) -> Any:
    """Return one of the values above."""
    kind = random.random()
    if kind < 0.7:
        return random.choice(PLAIN)
    return random.choice(SPECIAL + (ONLY_PICKLED if pickled else ONLY_TEXT))


def made(value: Any, secret: str) -> Any:
    """Return the Python object that a value stands for; ``secret`` is the absolute path of a file outside."""
    if not (isinstance(value, dict) and "!" in value):
        return value
    kind, number = value["!"], value.get("n", 0)
    if kind == "tensor":
        return TENSORS[value["kind"]]()
    if kind in ("deep", "shared"):
        nested: Any = 0
        for _ in range(min(number, 150)):  # torch's pickler calls itself
            nested = [nested] if kind == "deep" else [nested, nested]
        return nested
    simple: dict[str, Callable[[], Any]] = {
        "inf": lambda: float("inf"),
        "nan": lambda: float("nan"),
        "secret": lambda: secret,
        "digits": lambda: 2 ** (3 * number),
        "long": lambda: "x" * number,
        "many": lambda: [0] * number,
        "tuple": lambda: (1, (2,)),
        "bytes": lambda: b"\0" * 100,
    }
    return simple[kind]()


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: torch.zeros(1).expand(2**45),
    "empty": lambda: torch.empty(0),
    "scalar": lambda: torch.tensor(3.0),
    "bool": lambda: torch.ones(3, dtype=torch.bool),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "integers": lambda: torch.arange(4),
    "two": lambda: torch.ones(2, 2),
    "nan": lambda: torch.full((3,), float("nan")),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
}


ONLY_PICKLED: tuple[dict[str, Any], ...] = (
    *({"!": "tensor", "kind": kind} for kind in TENSORS),
    *({"!": "tuple"}, {"!": "shared", "n": 40}, {"!": "bytes"}),
)


def written(value: Any, secret: str) -> str:
    """Return the JSON text of a value, as no library would write it."""
    if not (isinstance(value, dict) and "!" in value):
        return json.dumps(value)
    kind, number = value["!"], value.get("n", 0)
    if kind == "deep":
        return "[" * number + "0" + "]" * number
    if kind == "colliding":
        pairs = ", ".join(f"[{(2**61 - 1) * (each + 1)}, 0]" for each in range(number))
        return f'{{"$items": [{pairs}]}}'
    if kind == "digits":
        return "7" * number
    return json.dumps(made(value, secret))


# ---- trees of dictionaries, lists, tuples and records


def children(node: Any) -> list[tuple[Any, Any]]:
    """Return the keys and values inside a value; if a key is not a string, the number of its position."""
    if isinstance(node, dict):
        return [(key if isinstance(key, str) else place, value) for place, (key, value) in enumerate(node.items())]
    if isinstance(node, list | tuple):
        return list(enumerate(node))
    if isinstance(node, torch.Tensor | torch.dtype | str | bytes | type) or not hasattr(node, "__dict__"):
        return []
    return list(vars(node).items())


def draw_path(random: random.Random, tree: Any) -> list[Any]:
    """Return a random path to a value: small containers are as likely as large ones."""
    path: list[Any] = []
    while True:
        inside = children(tree)
        if not inside or (path and random.random() < 0.15):
            return path
        key, tree = random.choice(inside)
        path.append(key)


def change_tree(tree: Any, path: list[Any], change: Callable[[Any], Any]) -> Any:
    """Return a copy of ``tree`` in which the value at ``path`` is replaced by ``change`` of it.

    Raises:
        Stale: there is nothing at ``path``.
    """
    if not path:
        return change(tree)
    key, *rest = path
    known = dict(children(tree))
    if key not in known:
        raise Stale(f"nothing at {path}")
    inner = change_tree(known[key], rest, change)
    if isinstance(tree, dict):
        real = key if key in tree else list(tree)[key]
        return type(tree)((name, inner if name == real else value) for name, value in tree.items())
    if isinstance(tree, list | tuple):
        items = [inner if place == key else value for place, value in enumerate(tree)]
        return items if isinstance(tree, list) else tuple(items)
    other = copy.copy(tree)
    object.__setattr__(other, key, inner)
    return other


def without(tree: Any, path: list[Any]) -> Any:
    """Return a copy of ``tree`` without the value at ``path``."""

    def cut(node: Any) -> Any:
        if isinstance(node, dict):
            real = path[-1] if path[-1] in node else list(node)[path[-1]]
            return type(node)((name, value) for name, value in node.items() if name != real)
        if isinstance(node, list | tuple):
            return type(node)(value for place, value in enumerate(node) if place != path[-1])
        other = copy.copy(node)
        vars(other).pop(path[-1], None)
        return other

    return change_tree(tree, path[:-1], cut)


def renamed(tree: Any, path: list[Any], name: str) -> Any:
    """Return a copy of ``tree`` in which the key at the end of ``path`` is called ``name``."""

    def other(node: Any) -> Any:
        if not isinstance(node, dict) or path[-1] not in node:
            return node
        return type(node)((name if key == path[-1] else key, value) for key, value in node.items())

    return change_tree(tree, path[:-1], other)
