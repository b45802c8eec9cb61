"""The supported releases of Python and torch, read from the project's files, and the interpreters on this machine."""

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9._!-]+)")
VERSION = "import platform; print(platform.python_version())"


@dataclass(frozen=True, order=True)
class Cell:
    """A combination of Python and torch, each as (major, minor), such as ``(3, 12)`` and ``(2, 13)``."""

    python: tuple[int, int]
    torch: tuple[int, int]

    def __str__(self) -> str:
        return f"{dotted(self.python)}:{dotted(self.torch)}"


def dotted(minor: tuple[int, int]) -> str:
    """Return ``3.12`` for ``(3, 12)``."""
    return f"{minor[0]}.{minor[1]}"


def minors(bounds: str) -> list[tuple[int, int]]:
    """Return the releases between bounds such as ``>=3.11,<3.15``.

    Raises:
        ValueError: the bounds have another form.
    """
    found = re.fullmatch(r"[a-z]*>=(\d+)\.(\d+),<(\d+)\.(\d+)", bounds)
    if not found or found[1] != found[3]:
        raise ValueError(f"{bounds!r}: write bounds within one major version, as >=2.11,<2.16")
    return [(int(found[1]), minor) for minor in range(int(found[2]), int(found[4]))]


def supported() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the releases of Python and torch that ``pyproject.toml`` allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (torch,) = (line for line in project["dependencies"] if re.match(r"torch\b", line))
    return minors(project["requires-python"]), minors(torch)


def cells() -> list[Cell]:
    """Return all combinations."""
    pythons, torches = supported()
    return [Cell(python, torch) for python in pythons for torch in torches]


def constraints(torch: tuple[int, int]) -> Path:
    """Return the file with the exact version of each package for a release of torch."""
    return ROOT / "constraints" / f"torch-{dotted(torch)}.txt"


def normal(name: str) -> str:
    """Return a package's name as registries normalize it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def own_pins(path: Path) -> dict[str, str]:
    """Return the exact version of each package in one file, without those of files that it includes.

    Raises:
        ValueError: a line is neither ``name==version``, nor ``-c file``, nor a comment.
    """
    found: dict[str, str] = {}
    for line in path.read_text("utf-8").splitlines():
        if not line or line.startswith(("#", "-c ")):
            continue
        pin = PIN.fullmatch(line)
        if pin is None or normal(pin[1]) in found:
            raise ValueError(f"{path.name}: {line!r}: write name==version, each package once")
        found[normal(pin[1])] = pin[2]
    return found


def pins(path: Path) -> dict[str, str]:
    """Return the exact version of each package in a file of constraints and in the files that it includes."""
    taken = re.findall(r"(?m)^-c (.+)$", path.read_text("utf-8"))
    found: dict[str, str] = {}
    for part in [*(pins(path.parent / name) for name in taken), own_pins(path)]:
        twice = found.keys() & part.keys()
        if twice:
            raise ValueError(f"{path.name}: {sorted(twice)} stand in a file that it takes in as well: say it once")
        found |= part
    return found


def version_of(interpreter: str) -> str | None:
    """Return the version of an interpreter, such as ``3.12.1``, or ``None`` if it cannot be run."""
    try:
        run = subprocess.run([interpreter, "-c", VERSION], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # the path may have a shim of pyenv for a version that is not installed
    return run.stdout.strip()


def minor_of(version: str) -> tuple[int, int]:
    """Return ``(2, 13)`` for ``2.13.0+cpu``."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def interpreters(given: Iterable[str], pythons: Iterable[tuple[int, int]]) -> Mapping[tuple[int, int], str]:
    """Return the path of an interpreter for each of ``pythons``: one of ``given``, or one on the search path.

    Raises:
        ValueError: one of ``given`` cannot be run, or its version is not supported.
    """
    known, found = supported()[0], dict[tuple[int, int], str]()
    for path in given:
        version = version_of(path)
        if version is None or minor_of(version) not in known:
            names = ", ".join(map(dotted, known))
            raise ValueError(f"--python {path}: {version or 'no Python that runs'}; give one of {names}")
        found[minor_of(version)] = path
    for python in pythons:
        path = shutil.which(f"python{dotted(python)}") or ""
        if python not in found and path and (version := version_of(path)) and minor_of(version) == python:
            found[python] = path
    return found
