"""``make elsewhere``: run the README's commands and a short set of tests in another user's environment.

The clone is named ``shardwise`` and lies in a folder with a space and a non-ASCII letter in its name. The commands run
as an ordinary user if the caller is root, on one core, with a read-only home, temporary files on another file system,
another umask, locale and time zone, and variables that a launcher or another program left in the shell. The clone uses
this environment's packages. Tests run in random order; ``--seed`` chooses it.
"""

import argparse
import os
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOBODY = 65534
TESTS = (
    "tests/unit/cli/test_cli.py",
    "tests/unit/memory/test_disk.py",
    "tests/unit/cli/test_formats_cli.py",
    "tests/unit/compat/test_aliases.py",
    "tests/unit/mesh/test_device_assignment.py",
    "tests/unit/plan/test_plan.py",
    "tests/unit/compat/test_port.py",
    "tests/ranks/checkpoint/test_checkpoint_resume.py",
    "tests/ranks/checkpoint/test_output_files.py",
    "tests/ranks/engine/test_host_waits.py",
    "tests/ranks/testing/test_pool.py",
)
"""Tests that read or write files, start processes, or depend on file names and on environment variables."""
DEMO = "--steps 3"


def other_user() -> list[str]:
    """Return a command that runs another one as an ordinary user, or nothing if the caller is one.

    The user can read everything, so that a Python in root's home can be used, but write only what all users can.
    """
    if os.geteuid() or not shutil.which("setpriv"):
        return []
    read = "+dac_read_search"
    user = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return ["setpriv", *user, f"--inh-caps={read}", f"--ambient-caps={read}"]


def one_core() -> list[str]:
    """Return a command that runs another one on a single core."""
    return ["taskset", "-c", "0"] if shutil.which("taskset") else []


def make_clone(folder: Path) -> Path:
    """Make a clone with a ``.venv`` that has this environment's packages and the clone's own ``shardwise``."""
    clone = folder / "shardwise"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    venv = clone / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--copies", "--without-pip", str(venv)], check=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(venv), "platbase": str(venv)}))
    # The path is relative, since Python reads this file in the locale's encoding.
    paths = [os.path.relpath(clone, packages), *site.getsitepackages()]
    (packages / "packages.pth").write_text("".join(f"{each}\n" for each in paths), "utf-8")
    script = venv / "bin" / "shardwise"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(str(venv / "bin" / "python"))} -m shardwise "$@"\n', "utf-8")
    script.chmod(0o755)
    for stamp in (".made", ".runtime", ".dev"):
        (venv / stamp).touch()
    return clone


def surroundings(folder: Path, temporary: Path) -> dict[str, str]:
    """Return the environment variables of the commands."""
    home = folder / "home"
    home.mkdir(mode=0o555)
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "LANG": "tr_TR.UTF-8",
        "LC_ALL": "tr_TR.UTF-8",
        "TZ": "Asia/Kathmandu",
        "OMP_NUM_THREADS": "3",
        "PYTHONPATH": str(home),
        "WORLD_SIZE": "7",
        "RANK": "3",
        "LOCAL_RANK": "3",
        "MASTER_ADDR": "192.0.2.1",
        "MASTER_PORT": "1",
    }


def run(tests: list[str], seed: int) -> int:
    """Make the clone, run ``make demo`` and ``make test`` in it, and return the first failure's exit status."""
    other = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="shardwise elsewhere é ") as name,
        tempfile.TemporaryDirectory(prefix="temporary files ", dir=other) as temporary,
    ):
        folder = Path(name)
        clone, environment = make_clone(folder), surroundings(folder, Path(temporary))
        user = other_user()
        if user:
            folder.chmod(0o755)
            subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(clone), temporary], check=True)
        options = f"-p no:cacheprovider -m 'not full' --shuffle {seed} {' '.join(tests)}"
        for command in (["make", "demo", f"DEMO={DEMO}"], ["make", "test", "WORKERS=1", f"TESTS={options}"]):
            print(f"+ {shlex.join(command)}", flush=True)
            done = subprocess.run([*one_core(), *user, *command], cwd=clone, env=environment, umask=0o077)
            if done.returncode:
                return done.returncode
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.elsewhere", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the order of the tests")
    parser.add_argument("tests", nargs="*", help="instead of the short set")
    options = parser.parse_args(arguments)
    return run(options.tests or list(TESTS), options.seed)


if __name__ == "__main__":
    sys.exit(main())
