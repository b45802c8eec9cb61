"""One changed checkpoint, read in one way, and the outcome."""

import collections
import contextlib
import functools
import gc
import io
import os
import pathlib
import re
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch

from shardwise.cli.main import main as command
from shardwise.core.checkpoint.formats import dcp, open_checkpoint
from shardwise.core.checkpoint.formats.lazy_tensors import blocks
from shardwise.core.checkpoint.source import CheckpointError
from tests.faults.fuzz.changes import apply_change
from tests.faults.fuzz.pickles import MARKER
from tests.faults.fuzz.subjects import SUBJECTS, EngineSubject, PlainSubject, Subject
from tests.faults.fuzz.values import SECRET
from tests.support.counters import forget_peak, resident_bytes

READ, REFUSED = "read", "refused"
TARGETS = ("native", "huggingface", "single", "dcp", "torchtitan", "colossalai", "peft")
HEX = "0123456789abcdef"
PLANTED = (
    *(f".t.{before}-{HEX}" for before in ("saving", "replaced", "output-saving", "output-replaced")),
    *(".latest.partial", "latest", ".t.safetensors.partial"),
)
"""Names in the output directory that are links to a file outside."""
UNKNOWN = re.compile(
    r"could not [^\n]*: (?!CheckpointError|CheckpointDamage|ValueError)[A-Z]\w+(Error|Exception|Stop\w*): "
)
"""The message about an unexpected error that ranks send each other."""
MEMORY = re.compile(r"allocate|MemoryError|out of memory|not enough memory")


class Bounds:
    """The limits for reading a checkpoint of ``nbytes``; holes in its files do not count."""

    SECONDS, SECONDS_PER_MIB = 5.0, 4.0
    """CPU time of all threads together."""
    MEMORY_BYTES, MEMORY_TIMES = 256 << 20, 40

    def __init__(self, nbytes: int) -> None:
        self.seconds = self.SECONDS + self.SECONDS_PER_MIB * nbytes / 2**20
        self.memory_bytes = self.MEMORY_BYTES + self.MEMORY_TIMES * nbytes

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Return the limits for the files in a directory."""
        facts = [path.lstat() for path in folder.rglob("*")]
        return cls(sum(min(each.st_size, each.st_blocks * 512) for each in facts))


def ways_of(subject: Subject) -> list[str]:
    """Return every way to read it."""
    if "scheduler" in subject.loads:
        return ["plain:scheduler"]
    found = ["inspect", "inspect --json", "verify", "verify", "diff", "read", "read"]
    found += [f"convert {to}" for to in TARGETS]
    for each in subject.loads:
        found += [f"engine:{each}", f"engine:{each}", f"plain:{each}"]
    return found


# ---- watching what a process does

_Events = list[tuple[str, tuple[Any, ...]]]
_watched: _Events | None = None
_CHANGING = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")
_CHANGING += ("os.chmod", "os.chown")
_RUNNING = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect")
_RUNNING += ("pickle.find_class",)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _watched is not None and (event == "open" or event in _CHANGING or event in _RUNNING):
        _watched.append((event, args))


_hooked = functools.cache(functools.partial(sys.addaudithook, _hook))


@contextlib.contextmanager
def _audited() -> Iterator[_Events]:
    global _watched
    _hooked()
    _watched = found = []
    try:
        yield found
    finally:
        _watched = None


class Trials:
    """Runs recipes in one directory, which has the checkpoints of :func:`make_subjects` as ``base``."""

    def __init__(self, place: Path) -> None:
        self.place, self.base, self.folder = place, place / "base", place / "ckpt"
        self.out, self.secret = place / "out", place / SECRET
        self.secret.parent.mkdir(exist_ok=True)
        self._runs: dict[str, Any] = {}
        os.chdir(place)  # where code in a checkpoint would write its mark
        self._classes = self._libraries()
        for kind in ("engine", "plain"):  # make now the imports that loads make
            self._prepare(kind)
        gc.collect()
        gc.freeze()  # it takes long to look through the libraries again

    @staticmethod
    def _libraries() -> list[Any]:
        classes = [pathlib.PurePosixPath, pathlib.PosixPath, torch.Size, collections.OrderedDict]
        classes += sorted(set(dcp.STAND_INS.values()), key=repr)
        return [{k: id(v) for k, v in vars(each).items() if k not in ("__doc__", "_abc_impl")} for each in classes]

    def _clean(self) -> None:
        for path in (self.folder, self.out, self.secret.parent):
            shutil.rmtree(path, ignore_errors=True)
        self.secret.parent.mkdir()
        self.secret.write_text("secret")
        self.out.mkdir()
        (self.place / MARKER).unlink(missing_ok=True)

    def fresh(self, subject: Subject) -> Path:
        """Restore the checkpoint as it was written."""
        self._clean()
        shutil.copytree(self.base / subject.folder, self.folder)
        return self.folder

    def run(self, recipe: dict[str, Any]) -> str:
        """Return :data:`READ`, :data:`REFUSED`, or what is wrong.

        Raises:
            Stale: the recipe no longer fits.
        """
        subject, way = SUBJECTS[recipe["subject"]], recipe["way"]
        self.fresh(subject)
        for change in recipe["changes"]:
            apply_change(self.folder, change)
        for name in recipe.get("planted", ()):
            (self.out / name).symlink_to(self.secret)
        bounds, before = Bounds.of(self.folder), _listing(self.folder)
        path = self.folder / subject.opened
        if ":" in way:
            self._prepare(way.partition(":")[0])
        gc.collect()
        descriptors, there = len(os.listdir("/proc/self/fd")), resident_bytes("VmRSS")
        forget_peak()
        start = time.process_time()
        with _audited() as events:
            outcome = self._read(path, way)
        taken, most = time.process_time() - start, resident_bytes("VmHWM") - there
        problems = [] if outcome in (READ, REFUSED) else [outcome]
        if taken > bounds.seconds:
            problems.append(f"took {taken:.0f} s of {bounds.seconds:.0f}")
        if most > bounds.memory_bytes:
            problems.append(f"took {most >> 20} MiB of memory, {bounds.memory_bytes >> 20} are allowed")
        gc.collect()
        left = len(os.listdir("/proc/self/fd")) - descriptors
        if left > 0:
            problems.append(f"{left} files left open")
        problems += self._trespasses(events)
        if _listing(self.folder) != before:
            problems.append("the checkpoint itself was changed")
        return "; ".join(problems) or outcome

    def _trespasses(self, events: _Events) -> list[str]:
        found = [f"{name} {args!r:.80}" for name, args in events if name in _RUNNING]
        if (self.place / MARKER).exists():
            found.append("code of the checkpoint was run")
        if self._libraries() != self._classes:
            found.append("a class of a library was changed")
        if [*self.secret.parent.iterdir()] != [self.secret] or self.secret.read_text() != "secret":
            found.append("a file outside was written")
        for name, args in events:
            if name == "open":
                path, _, flags = args
                wrote = bool(flags and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
                paths = [path] if isinstance(path, str | bytes) else []
            elif name in _CHANGING:
                # With a directory's descriptor the path is relative to that.
                inside = any(type(each) is int and each > 2 for each in args[1:]) and name != "os.chmod"
                paths, wrote = [each for each in args if isinstance(each, str | bytes) and not inside], True
            else:
                continue
            found += [f"{name} {path!r:.80}" for path in map(os.fsdecode, paths) if self._outside(path, wrote)]
        return found

    def _outside(self, path: str, wrote: bool) -> bool:
        full = os.path.normpath(os.path.join(self.place, path))
        if wrote:
            return not f"{full}/".startswith(f"{self.out}/") and not full.startswith(("/proc/", "/dev/null"))
        return full.startswith((f"{self.place}/outside", "/etc/hostname", "/dev/zero", "/dev/urandom", "/x/"))

    # ---- ways to read

    def _prepare(self, kind: str) -> None:
        if kind not in self._runs:
            self._runs[kind] = EngineSubject() if kind == "engine" else PlainSubject()
            self._runs[kind].step()

    def _forget(self, kind: str) -> None:
        run = self._runs.pop(kind)
        if isinstance(run, EngineSubject):
            run.session.close()

    def _read(self, path: Path, way: str) -> str:
        try:
            with warnings.catch_warnings(action="ignore"):
                if ":" in way:
                    return self._load(path, *way.split(":"))
                return self._open(path) if way == "read" else self._command(path, way)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            trace = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__}: {error!s:.150} ({Path(trace.filename).name}:{trace.lineno})"

    def _open(self, path: Path) -> str:
        try:
            with contextlib.closing(open_checkpoint(path)) as source:
                source.state()
                for name, fact in source.tensors().items():
                    for start, numel in blocks(fact):
                        source.read(name, start, numel)
        except (CheckpointError, FileNotFoundError, ValueError) as error:
            return _words(error, isinstance(error, CheckpointError) or "version" in str(error) or "no" in str(error))
        return READ

    def _command(self, path: Path, way: str) -> str:
        action, *more = way.split()
        arguments = ["checkpoint", action, str(path), *([] if action == "convert" else more)]
        if action == "convert":
            target = self.out / ("t.safetensors" if more[0] == "single" else "t")
            arguments += [str(target), "--to", more[0]]
        elif action == "diff":
            arguments.append(str(path))
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = command(arguments)
        text = out.getvalue() + err.getvalue()
        errors = [line for line in err.getvalue().splitlines() if not line.startswith("note: ")]
        if "Traceback" in text or not all(c.isprintable() or c == "\n" for c in text):
            return f"printed {text!r:.200}"
        if MEMORY.search(text):
            return f"memory: {text!r:.200}"
        if status == 0 and not errors:
            return READ
        if status == 1 and action in ("verify", "diff") and out.getvalue() and not errors:
            return REFUSED
        if status == 2 and len(errors) == 1 and not (action == "convert" and target.exists()):
            return REFUSED
        return f"status {status} with {len(errors)} lines: {text!r:.300}"

    def _load(self, path: Path, kind: str, way: str) -> str:
        run = self._runs[kind]
        before = run.state()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                run.load(path, way)
        except (CheckpointError, FileNotFoundError, ValueError) as error:
            outcome = _words(error, not UNKNOWN.search(str(error)))
            changed = [] if "already loaded" in str(error) else differing(before, run.state())
            if changed:
                outcome = f"{', '.join(changed)} changed before {type(error).__name__}: {error!s:.200}"
            if changed or "already loaded" in str(error):
                self._forget(kind)
            return outcome
        except BaseException:
            self._forget(kind)
            raise
        try:
            run.step()
        except Exception as error:
            return f"loaded, but the next step raises {type(error).__name__}: {error!s:.200}"
        finally:
            self._forget(kind)
        return READ


def _words(error: BaseException, known: bool) -> str:
    text = str(error)
    if not known or MEMORY.search(text) or not all(c.isprintable() or c == "\n" for c in text):
        return f"{type(error).__name__}: {text!r:.250}"
    return REFUSED


MISSING = object()


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5))
        return type(a) is type(b) and repr(a) == repr(b)

    return sorted(name for name in one | other if not same(one.get(name, MISSING), other.get(name, MISSING)))


def _listing(folder: Path) -> list[Any]:
    return [(str(path), *path.lstat()[:7]) for path in sorted(folder.rglob("*"))]
