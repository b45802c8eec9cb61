"""Which host has what of which checkpoint: parts, as each host lists its own, and the saves that they make up."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpoint.format import MANIFEST, digest_of, has_pieces, read_files
from shardwise.checkpoint.source import CheckpointDamage

__all__ = ["DAMAGED", "HIDDEN", "OTHERS", "Part", "Version", "digests_in", "list_parts", "versions_of"]

HIDDEN = re.compile(r"\.(?P<tag>.+)\.(?P<kind>saving|replaced|purged)-[0-9a-f]{16}")
"""Names in a directory of checkpoints that are none: see :mod:`shardwise.checkpoint.directory`."""
SHOWN = 5  # files in a message
OTHERS, DAMAGED = "another job's", "damaged"
"""Why a part is spared."""


# [Note: A checkpoint in parts]
# Where hosts do not share the directory, each has its part of a checkpoint in its own: the files that its ranks wrote,
# and the manifest, which names all files and is the same on all, byte for byte. So a part knows to which save it
# belongs, and parts that are copied into one directory are an ordinary checkpoint.
# * A save has three phases, each ended by an agreement: every file is on its disk; every host has the manifest on its
#   disk, in the directory that is still hidden; every host renames its directory (SaveJob.run). What was there before
#   is removed after that. So where one host has renamed, all have all of their part of the new save on their disks, and
#   where one has not, all have all of the one before, hidden or not. A kill at any moment leaves one of the two whole.
# * A part therefore counts under whatever name it has: a hidden directory with a manifest is either about to get its
#   name, or was exchanged for its successor. A save is there if one host shows it (its directory is not hidden), and
#   whole if every file of its manifest is on some host. Loading takes the newest that is whole.
# * The next save finishes what was cut short before it writes: a hidden part of a save that some host shows, and that
#   is newer than what this host shows, gets its name; the rest goes (CheckpointRoot.ready).
# * A rank that hears in the middle of the phases that a peer is lost does not know how far that one got, and removes
#   nothing.
@dataclass(frozen=True)
class Part:
    """What one host has of one save.

    Attributes:
        tag: of the checkpoint.
        name: of the directory, in that of the checkpoints.
        shown: whether it is not hidden.
        digest: the checksum of the manifest; parts with one digest belong together.
        serial, step: the head's.
        hosts: the head's.
        names: of all files of the save.
        wrote: by file, which of ``hosts`` wrote it.
        here: numbers of the files that are in this directory, as long as they were written.
        damage: why the manifest cannot be read; nothing else is known then.
        spared: ``OTHERS``: it is not this run's to count or remove; ``DAMAGED``: a load found it so.
    """

    tag: str
    name: str
    shown: bool
    digest: str = ""
    serial: int = 0
    step: int = 0
    hosts: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    wrote: tuple[int, ...] = ()
    here: tuple[int, ...] = ()
    damage: str = ""
    spared: str = ""

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Part:
        """What another rank's ``vars`` became as JSON."""
        own: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in fields.items()}
        return cls(**own)


def _places(root: str, tag: str | None) -> list[tuple[str, str, bool]]:
    """Tag, name and whether it is shown, of each directory in ``root`` that may be a part."""
    try:
        names = sorted(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for name in names:
        match = HIDDEN.fullmatch(name)
        if match and match["kind"] != "purged":
            # What stepped aside is shown until its successor is.
            stands = match["kind"] == "replaced" and match["tag"] not in names
            found.append((match["tag"], name, stands))
        elif not name.startswith("."):
            found.append((name, name, True))
    return [each for each in found if tag in (None, each[0])]


def digests_in(root: str, tag: str | None = None) -> list[list[str]]:
    """Name and digest of what may be a part, as the manifests' ends say: cheap to read, and compared with others'."""
    found = []
    for _, name, shown in _places(root, tag):
        path = os.path.join(root, name)
        if os.path.exists(os.path.join(path, MANIFEST)) or (shown and os.path.isdir(path) and has_pieces(path)):
            found.append([name, digest_of(os.path.join(path, MANIFEST))])
    return found


def list_parts(root: str, tag: str | None = None) -> list[Part]:
    """The parts in ``root``, all or those of ``tag``. Reads the manifests, and looks for the files that they name."""
    found = []
    for tagged, name, shown in _places(root, tag):
        path = os.path.join(root, name)
        if not os.path.isdir(path):
            continue
        try:
            head, facts = read_files(path)
        except FileNotFoundError:
            continue
        except CheckpointDamage as error:
            if shown:
                found.append(Part(tagged, name, shown, damage=str(error)))
            continue
        here = tuple(n for n, fact in enumerate(facts) if _is_there(os.path.join(path, fact.name), fact.nbytes))
        names, wrote = tuple(fact.name for fact in facts), tuple(fact.host for fact in facts)
        digest = digest_of(os.path.join(path, MANIFEST))
        found.append(Part(tagged, name, shown, digest, head.serial, head.step, head.hosts, names, wrote, here))
    return found


def _is_there(path: str, nbytes: int) -> bool:
    try:
        return os.path.isfile(path) and os.stat(path).st_size == nbytes
    except OSError:
        return False


@dataclass
class Version:
    """One save, from the parts that hosts have of it.

    Attributes:
        parts: by the number of the host that has one; where it has two, the one with more files.
    """

    tag: str
    serial: int
    damage: str = ""
    parts: dict[int, Part] = field(default_factory=dict)
    shown: bool = False

    @property
    def any(self) -> Part:
        """One of them: what it says of the whole is the same in all."""
        return next(iter(self.parts.values()))

    def holders(self) -> list[int | None]:
        """By file, the first host that has it."""
        found: list[int | None] = [None] * len(self.any.names)
        for host in sorted(self.parts, reverse=True):
            for file in self.parts[host].here:
                found[file] = host
        return found

    def problem(self, called: Sequence[str]) -> str:
        """Why it cannot be loaded, or nothing; ``called`` are the names of the hosts that are present."""
        if self.damage:
            return self.damage
        part = self.any
        absent = [number for number, holder in enumerate(self.holders()) if holder is None]
        if not absent:
            return ""
        listed = []
        for host in sorted({part.wrote[number] for number in absent}):
            names = [part.names[number] for number in absent if part.wrote[number] == host]
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            wrote = f" of {part.hosts[host]}" if part.hosts else ""
            listed.append(f"{', '.join(names[:SHOWN])}{more}{wrote}")
        return (
            f"checkpoint {self.tag!r} of step {part.step} is not whole: none of the hosts that are here "
            f"({', '.join(called)}) has {'; '.join(listed)}. Start on the hosts that wrote it, copy their directories "
            "to one that is here, or load another checkpoint"
        )


def versions_of(rows: Sequence[Sequence[Part]], called: Sequence[str]) -> list[Version]:
    """The saves that hosts show, newest first; those of which a manifest is damaged before all others, as in a
    directory that is shared.

    Args:
        rows: by host, its parts.
        called: by host, its name.
    """
    damaged = [
        Version(part.tag, 0, f"on {called[host]}: {part.damage}")
        for host, row in enumerate(rows)
        for part in row
        if part.damage
    ]
    found: dict[tuple[str, str], Version] = {}
    for host, row in enumerate(rows):
        for part in row:
            if part.damage:
                continue
            version = found.setdefault((part.tag, part.digest), Version(part.tag, part.serial))
            version.shown |= part.shown
            if host not in version.parts or len(part.here) > len(version.parts[host].here):
                version.parts[host] = part
    whole = [version for version in found.values() if version.shown]
    return damaged + sorted(whole, key=lambda version: version.serial, reverse=True)
