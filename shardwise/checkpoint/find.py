"""Which checkpoint a load takes, and how each rank opens it, also where each host has a part of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.directory import scan
from shardwise.checkpoint.exchange import Remote
from shardwise.checkpoint.format import MANIFEST, decode_manifest, has_pieces, read_head
from shardwise.checkpoint.formats.detect import detect_format, located, open_checkpoint
from shardwise.checkpoint.formats.trainer import kind_of
from shardwise.checkpoint.hosts import Hosts
from shardwise.checkpoint.parts import Part, Version, digests_in, list_parts, versions_of
from shardwise.checkpoint.peers import Peers
from shardwise.checkpoint.read import NativeSource
from shardwise.checkpoint.source import CheckpointDamage, CheckpointSource
from shardwise.checkpoint.write import agree
from shardwise.printable import printable

__all__ = ["Candidate", "find_checkpoints", "opening", "opening_at"]

Opens = Callable[[], CheckpointSource]
"""Opens a checkpoint on this rank. Not collective."""
ADVICE = "give the directory that was saved into, or tag='auto'"


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be loaded.

    Attributes:
        path: of it, where it is shown; the same on all ranks.
        parts: which host has what of it, where not all hosts have all of it; see [Note: A checkpoint in parts].
    """

    path: str
    parts: Version | None = None


def _candidates(root: str, tag: str | None) -> list[str]:
    """Directories to try, in order. Raises FileNotFoundError, CheckpointDamage (unreadable heads without "auto")."""
    if _is_one(root):
        return [_itself(root, tag)]
    found = scan(root)
    if tag == "auto":
        return [each.path for each in found]
    if tag is not None:
        chosen = [each.path for each in found if each.tag == tag]
        place = Path(root, tag)
        if not chosen and place.is_dir() and kind_of(place) is not None:
            return [str(place)]  # a Trainer's checkpoint-N
        if not chosen:
            raise _absent(root, tag, [each.tag for each in found])
        return chosen
    if not found:
        try:
            if tag is None and detect_format(root):
                return [str(located(Path(root)))]  # of a format of others
        except FileNotFoundError as error:
            raise FileNotFoundError(f"no checkpoint in {root}; {ADVICE} ({error})") from error
    broken = [each for each in found if each.head is None]
    if broken:
        raise CheckpointDamage(f"{broken[0].damage}; name another tag, or use tag='auto' to skip it")
    return [found[0].path]


def _is_one(root: str) -> bool:
    """Whether a checkpoint itself is there, not a directory of some."""
    return os.path.exists(os.path.join(root, MANIFEST)) or has_pieces(root)


def _itself(root: str, tag: str | None) -> str:
    if tag not in (None, "auto"):
        raise ValueError(f"{root} is a checkpoint itself, and tag={tag!r} was given: leave the tag out")
    return root


def _absent(root: str, tag: str, there: Sequence[str]) -> FileNotFoundError:
    return FileNotFoundError(f"no checkpoint {tag!r} in {root}; there: {', '.join(there) or 'none'}")


def find_checkpoints(peers: Peers, root: str, tag: str | None) -> list[Candidate]:
    """What to try, in order. Collective.

    Args:
        peers: the ranks.
        root: a directory of checkpoints, or one.
        tag: as for :meth:`shardwise.checkpoint.session.Checkpointer.load`.

    Raises:
        FileNotFoundError, CheckpointDamage, ValueError: on every rank.
    """
    run, hosts, what = peers.run, peers.hosts(), f"find a checkpoint in {root}"

    def choose() -> dict[str, Any]:
        seen = _seen(root) if len(hosts.names) > 1 and hosts.leads(run.rank) else None
        try:
            return {"seen": seen, "paths": _candidates(root, tag) if run.rank == 0 else []}
        except FileNotFoundError as error:
            return {"seen": seen, "absent": str(error)}
        except CheckpointDamage as error:
            return {"seen": seen, "damage": str(error)}

    rows = agree(run.gather, run.rank, what, choose)[1]
    seen = [row["seen"] for row in rows if row["seen"] is not None]
    if any(each["apart"] or each != seen[0] for each in seen):
        return _find_parts(peers, hosts, root, tag, any(each["one"] for each in seen))
    first = rows[0]
    if "damage" in first:
        raise CheckpointDamage(printable(f"rank 0 could not {what}: {first['damage']}"))
    if "absent" in first:
        raise FileNotFoundError(printable(first["absent"]))
    return [Candidate(path) for path in first["paths"]]


def _seen(root: str) -> dict[str, Any]:
    """What a host sees at ``root``, so that hosts find out whether they see the same; and whether a checkpoint there is
    in parts."""
    one = _is_one(root)
    folder, name = _split(root)
    there = digests_in(root)
    beside = digests_in(folder, name)
    places = [os.path.join(root, each) for each, _ in there] + [os.path.join(folder, each) for each, _ in beside]
    return {"one": one, "in": there, "beside": beside, "apart": any(map(_is_part, places))}


def _split(root: str) -> tuple[str, str]:
    folder, name = os.path.split(os.path.abspath(root))
    return folder, name


def _is_part(path: str) -> bool:
    try:
        return len(read_head(path).hosts) > 1
    except (CheckpointDamage, FileNotFoundError):
        return False


def _find_parts(peers: Peers, hosts: Hosts, root: str, tag: str | None, one: bool) -> list[Candidate]:
    """The same where hosts do not see the same, or what they see is in parts."""
    run = peers.run
    folder, only = _split(root) if one else (root, None if tag in (None, "auto") else tag)
    what = f"find the parts of a checkpoint in {folder}"

    def look() -> list[dict[str, Any]] | None:
        if one:
            _itself(root, tag)
        return [vars(part) for part in list_parts(folder, only)] if hosts.leads(run.rank) else None

    rows = agree(run.gather, run.rank, what, look)[1]
    parts = [[Part.read(each) for each in row] for row in rows if row is not None]
    found = versions_of(parts, hosts.names)
    if only is not None and not found:
        raise _absent(folder, only, []) if not one else FileNotFoundError(f"no checkpoint in {root}; {ADVICE}")
    if not found and tag is None:
        raise FileNotFoundError(f"no checkpoint in {root}; {ADVICE}")
    if tag is None and found and found[0].damage:
        raise CheckpointDamage(f"{found[0].damage}; name another tag, or use tag='auto' to skip it")
    if tag != "auto":  # of one tag the newest save that is whole, where a kill has left two
        found = [next((each for each in found if not each.problem(hosts.names)), found[0])] if only else found[:1]
    return [Candidate(os.path.join(folder, each.tag), each) for each in found]


@contextmanager
def opening(peers: Peers, candidate: Candidate) -> Iterator[Opens]:
    """A function that opens the checkpoint on this rank, while others read theirs too; what it opened is closed at the
    end of the block. Collective.

    Raises:
        CheckpointDamage: on every rank; parts of it are nowhere.
    """
    opened: list[CheckpointSource] = []
    path, version = candidate.path, candidate.parts

    def keep(source: CheckpointSource) -> CheckpointSource:
        opened.append(source)
        return source

    try:
        if version is None:
            native = os.path.exists(os.path.join(path, MANIFEST))
            yield lambda: keep(NativeSource(path) if native else open_checkpoint(path))
            return
        run, hosts = peers.run, peers.hosts()
        problem = version.problem(hosts.names)
        if problem:
            raise CheckpointDamage(printable(problem))
        directory = _directory(path, version, hosts.of[run.rank])
        holders = version.holders()
        mine = _remote(path, version, holders, hosts, run.rank)
        clients = _clients(version, holders, hosts, run.rank)
        with peers.exchange(directory, version.any.names, clients, mine) as exchange:

            def open_parts() -> CheckpointSource:
                if mine.manifest is None:
                    return keep(NativeSource(directory, far=exchange))
                manifest = decode_manifest(exchange.manifest(), os.path.join(path, MANIFEST))
                return keep(NativeSource(path, manifest=manifest, far=exchange))

            yield open_parts
    finally:
        for source in opened:
            source.close()


@contextmanager
def opening_at(peers: Peers, path: str, open_here: Opens) -> Iterator[Opens]:
    """As :func:`opening`, of a checkpoint at ``path`` that hosts may have parts of; any other is opened by
    ``open_here``, on each rank by itself. Collective."""
    run = peers.run
    if len(peers.hosts().names) > 1:
        there = agree(run.gather, run.rank, f"look at {path}", lambda: _is_one(path))[1]
        found = find_checkpoints(peers, path, None)[0] if any(there) else None
        if found is not None and found.parts is not None:
            with opening(peers, found) as open_parts:
                yield open_parts
            return
    opened: list[CheckpointSource] = []

    def open_it() -> CheckpointSource:
        opened.append(open_here())
        return opened[0]

    try:
        yield open_it
    finally:
        for source in opened:
            source.close()


def _directory(path: str, version: Version, host: int) -> str:
    """Where a host has its part; where it would be, if it has none."""
    name = version.parts[host].name if host in version.parts else version.tag
    return os.path.join(os.path.dirname(path), name)


def _remote(path: str, version: Version, holders: Sequence[int | None], hosts: Hosts, rank: int) -> Remote:
    """Whom a rank asks for what its host does not have.

    Args:
        path: of the checkpoint.
        version: what hosts have of it.
        holders: by file, the first host that has it.
        hosts: all.
        rank: of the one that asks.
    """
    mine = hosts.of[rank]
    here = set(version.parts[mine].here) if mine in version.parts else set[int]()
    ranks, places = dict[int, int](), dict[int, str]()
    asked = {host: _in_turn(hosts, host, rank) for host in version.parts}
    there = {host: f"{hosts.names[host]}:{_directory(path, version, host)}" for host in version.parts}
    for file, (name, holder) in enumerate(zip(version.any.names, holders, strict=True)):
        if file not in here and holder is not None:
            ranks[file] = asked[holder]
            places[file] = os.path.join(there[holder], name)
    return Remote(ranks, places, None if mine in version.parts else asked[min(version.parts)])


def _clients(version: Version, holders: Sequence[int | None], hosts: Hosts, rank: int) -> list[int]:
    """The ranks that ask ``rank`` by their :func:`_remote`, without making those: each is as long as there are files,
    which are as many as ranks. What a host lacks says whom all of its ranks ask."""
    mine = hosts.of[rank]
    wanted = [file for file, holder in enumerate(holders) if holder == mine]
    clients = list[int]()
    for host, others in enumerate(hosts.ranks):
        if host in version.parts:
            asks = not set(version.parts[host].here).issuperset(wanted)
        else:
            asks = bool(wanted) or mine == min(version.parts)
        if asks:
            clients += [other for other in others if _in_turn(hosts, mine, other) == rank]
    return sorted(clients)


def _in_turn(hosts: Hosts, host: int, rank: int) -> int:
    """Which rank of a host that has something ``rank`` asks for it: they take turns."""
    own = hosts.ranks[host]
    return own[rank % len(own)]
