"""Subprocesses that tests start: they find the source tree, for any working directory, shell and locale of the
caller."""

import atexit
import contextlib
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.launcher_variables import without_launcher

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600.0
"""A limit that only a hang reaches, also where importing torch takes a minute."""


def surroundings(*paths: Path, **changes: str) -> dict[str, str]:
    """Return a program's environment: no launcher's variables, the source tree and ``paths`` first, and text in
    UTF-8."""
    kept = without_launcher(os.environ)
    found = os.pathsep.join(filter(None, [str(ROOT), *map(str, paths), kept.get("PYTHONPATH", "")]))
    return kept | {"PYTHONPATH": found, "PYTHONUTF8": "1"} | changes


def python(
    *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None, **popen: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` to its end; return its standard output and errors as text."""
    command, environment = [sys.executable, *arguments], surroundings() if env is None else env
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | popen
    return subprocess.run(command, cwd=cwd, env=environment, encoding="utf-8", timeout=SECONDS, check=False, **streams)


def status(*arguments: object) -> int:
    """Return the exit status of ``shardwise ARGUMENTS``, from a call in this process."""
    from shardwise.cli.main import main

    try:
        return main([*map(str, arguments)])
    except SystemExit as stopped:
        return int(stopped.code or 0)


def _run(arguments: list[str], folder: str, environment: dict[str, str], written: list[str]) -> None:
    """Do in a new process what ``python ARGUMENTS`` does, including what Python does at its end."""
    for number, path in enumerate(written, 1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    kind, *rest = arguments if arguments[0] in ("-c", "-m") else ("", *arguments)
    own = os.path.dirname(os.path.abspath(rest[0])) if not kind else folder
    sys.path[:0] = [own, *environment["PYTHONPATH"].split(os.pathsep)]
    code: object = 0
    try:
        if kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = rest
            runs = runpy.run_module if kind else runpy.run_path
            runs(rest[0], run_name="__main__")
    except SystemExit as stopped:
        code = stopped.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader may be gone
            stream.flush()
    os._exit(code)  # type: ignore[arg-type]


def forked_python(
    *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Do as :func:`python`, in a fork of the server behind the rank pool, which has imported torch already."""
    from tests.support.launching import Forked, forked

    environment = dict(surroundings() if env is None else env)
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        written = [os.path.join(folder, name) for name in ("out", "err")]
        for path in written:
            Path(path).touch()
        process = Forked(forked(_run, list(arguments), str(cwd), environment, written))
        try:
            code = process.wait(SECONDS)
        finally:
            if process.poll() is None:
                process.send_signal(9)
                process.wait()
        out, err = (Path(path).read_text("utf-8") for path in written)
    return subprocess.CompletedProcess(arguments, code, out, err)


def until(what: str, happened: Callable[[], object], ended: Callable[[], object] = lambda: None) -> None:
    """Wait for an event; fail if ``ended`` returns the status of a process, after whose end it cannot come."""
    last = time.monotonic() + SECONDS
    while not happened():
        assert ended() is None, f"{what}: the process has ended by itself"
        assert time.monotonic() < last, f"{what}: not within {SECONDS:.0f} s, which only a hang takes"
        time.sleep(0.02)
