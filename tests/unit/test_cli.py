"""The command line without ranks: arguments, one-line errors, schedules, progress, and launchers."""

from __future__ import annotations

import io
import re
import socket
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from launching import SECONDS, finished, started
from program_setup import forked_python, python, surroundings
from sets import campaign, full
from torch import nn

from shardwise.cli import demo, run
from shardwise.cli.demo_model import ByteGPT, ModelSize, generate
from shardwise.cli.demo_train import learning_rate_factor, starting_state
from shardwise.cli.errors import BadInput
from shardwise.cli.launch import status_of
from shardwise.cli.main import _parser, main
from shardwise.cli.progress import Progress, StepFacts, progress_text

BAD_DEMO = [
    ("--plugin nothing", "invalid choice: 'nothing'"),
    ("--plugin ddp --stage 2", "--stage 2: the plugin ddp has no stages"),
    ("--tp 0", "--tp 0"),
    ("--pp 0", "--pp 0"),
    ("--tp 2 --plugin ddp", "--tp 2 --pp 1: --plugin ddp does not divide"),
    ("--tp 2 --nproc 3", "--tp 2 --pp 1: --nproc 3 has to be a multiple of 2"),
    ("--tp 2 --pp 2 --nproc 2", "--tp 2 --pp 2: --nproc 2 has to be a multiple of 4"),
    ("--tp 4 --nproc 4 --width 64 --heads 2", "--heads 2 and --depth 3 have to be at least as many"),
    ("--pp 4 --nproc 4", "--depth 3 have to be at least as many"),
    ("--stage 3", "--stage 3"),
    ("--nproc 0", "--nproc 0"),
    ("--steps 0", "--steps 0"),
    ("--plugin gemini --precision fp32", "--precision fp32: gemini"),
    ("--plugin fsdp --precision fp16", "--precision fp16: fsdp"),
    ("--width 10 --heads 4", "--width 10"),
    ("--learning-rate nan", "--learning-rate nan"),
    ("--learning-rate inf", "--learning-rate inf"),
    ("--seed 12345678901234567890123", "--seed 12345678901234567890123: give a number <= 9223372036854775807"),
    ("--seed -1", "--seed -1: give a number >= 0"),
    ("--steps 99999999999", "--steps 99999999999: give a number <= 2147483647"),
    ("--nproc 100000", "--nproc 100000: give a number <= 4096"),
    ("--width 2000000 --heads 1000", "--width 2000000 --depth 3: "),
    ("--size 9999999B", "--size 9999999B: give"),
    ("--device-memory 99999999999PiB", "--device-memory: '99999999999PiB' is more than"),
    ("--offload-optim nan", "--offload-optim nan: give a share in [0, 1]"),
    ("--data /nowhere/at/all", "/nowhere/at/all: no such folder"),
    ("--data /dev/null", "/dev/null: is a file"),
    ("--out /dev/null", "--out /dev/null"),
    ("--out /dev/null/below", "--out /dev/null/below: cannot be made (Not a directory)"),
    ("--nonsense", "--nonsense"),
]
BAD_RUN = [
    ("--nproc 0 SCRIPT", "--nproc 0"),
    ("--nproc 100000 SCRIPT", "--nproc 100000: give the number of ranks on this host, <= 4096"),
    ("--node-rank -1 SCRIPT", "--node-rank -1: give a whole number >= 0"),
    ("--max-restarts -1 SCRIPT", "--max-restarts -1"),
    ("/nowhere.py", "/nowhere.py: no such file"),
    ("--nnodes 2 SCRIPT", "--nnodes 2"),
    *(
        (f"--nnodes {wrong} --rdzv-endpoint host:1 SCRIPT", f"--nnodes {wrong}: give a number of hosts >= 1")
        for wrong in ("abc", "0", "0:2", "3:2", "2:", "-1", "1:2:3", "9999999999")
    ),
    ("--nnodes 2 --node-rank 2 --rdzv-endpoint host:1 SCRIPT", "--node-rank 2: --nnodes 2 has hosts 0 to 1"),
    ("--nnodes 2:4 --node-rank 4 --rdzv-endpoint host:1 SCRIPT", "--node-rank 4: --nnodes 2:4 has hosts 0 to 3"),
    ("--node-rank 1 SCRIPT", "--node-rank 1: --nnodes 1 has hosts 0 to 0"),
    ("--nnodes 2 --rdzv-endpoint host:port SCRIPT", "--rdzv-endpoint host:port: 'port' is no port"),
    ("--nnodes 2 --rdzv-endpoint host:99999 SCRIPT", "--rdzv-endpoint host:99999: '99999' is no port"),
    ("", "the following arguments are required: script (see"),
]


def _words(options: str) -> list[str]:
    """With the name of this file, which may have spaces, for a script."""
    return [__file__ if each == "SCRIPT" else each for each in options.split()]


def _status(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as stopped:
        return int(stopped.code or 0)


def test_help_has_no_default_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("demo", "run", "trace", "checkpoint convert", "checkpoint diff"):
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        assert "None" not in capsys.readouterr().out, command


@pytest.mark.parametrize(
    ("words", "program"),
    [("demo --stepz 3", "shardwise demo"), ("checkpoint verify x --y", "shardwise checkpoint verify")],
)
def test_an_unknown_option_is_an_error_of_its_command(
    words: str, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(words.split())
    text = capsys.readouterr().err
    assert error.value.code == 2 and text.startswith(f"{program}: error: unrecognized") and f"{program} --help" in text


@pytest.mark.parametrize(("options", "expected"), BAD_DEMO)
def test_demo_refuses_in_one_line(options: str, expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert _status(["demo", *options.split()]) == 2
    shown = capfd.readouterr().err
    assert expected in shown and shown.count("\n") == 1 and "Traceback" not in shown


@pytest.mark.parametrize(("options", "expected"), BAD_RUN)
def test_run_refuses_in_one_line(options: str, expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert _status(["run", *_words(options)]) == 2
    shown = capfd.readouterr().err
    assert expected in shown and shown.count("\n") == 1


def test_an_empty_folder_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _status(["demo", "--data", str(tmp_path)]) == 2
    assert "0 bytes of text found" in capfd.readouterr().err


def _run_options(text: str) -> tuple[list[str], list[str]]:
    options = _parser().parse_args(["run", *_words(text)])
    return run.launcher_arguments(options), run.program(options)


def test_run_passes_the_script_its_own_options() -> None:
    launcher, script = _run_options("--nproc 4 SCRIPT --nproc 9 --n 1 -m --help")
    assert launcher == ["--nproc-per-node=4", "--max-restarts=0", "--standalone", "--local-addr=127.0.0.1"]
    assert script == [__file__, "--nproc", "9", "--n", "1", "-m", "--help"]


def test_run_across_hosts() -> None:
    launcher, _ = _run_options("--nproc 8 --nnodes 2 --node-rank 1 --rdzv-endpoint h:1 --rdzv-id job SCRIPT")
    assert "--standalone" not in launcher
    expected = {"--nnodes=2", "--rdzv-endpoint=h:1", "--rdzv-id=job", "--node-rank=1", "--rdzv-conf=is_host=0"}
    assert expected <= set(launcher)
    launcher, _ = _run_options("--nnodes 2:4 --node-rank 3 --rdzv-endpoint h:1 SCRIPT")
    assert {"--nnodes=2:4", "--node-rank=3"} <= set(launcher)


def test_config_survives_json_and_has_the_plugins_defaults() -> None:
    config = demo.check(_parser().parse_args(["demo", "--plugin", "low_level_zero"]))
    assert config.stage == 2 and demo.DemoConfig.from_json(config.to_json()) == config
    assert demo.check(_parser().parse_args(["demo", "--plugin", "gemini"])).stage is None


@pytest.mark.parametrize(("code", "status"), [(0, 0), (7, 7), (-9, 137), (-15, 143)])
def test_status_of(code: int, status: int) -> None:
    assert status_of(code) == status


@pytest.mark.parametrize(
    ("flag", "status", "whole"),
    [("kill", 137, False), *full(("exit", 5, True)), *campaign(("kill", 137, True))],
)
def test_run_returns_the_status_of_the_script(tmp_path: Path, flag: str, status: int, whole: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nos.kill(os.getpid(), 9) if sys.argv[1] == 'kill' else sys.exit(5)\n")
    command = ["shardwise", "run", "--nproc", "1", str(script), flag]
    found, shown = finished(*command, log=tmp_path / "log", whole=whole, fork_ranks=False)
    assert found == status, shown
    assert "rank 0 ended with" in shown and "Traceback" not in shown


MEETING = """
import os, pathlib, sys
import torch, torch.distributed as dist
from shardwise.mesh.launch import init_distributed, shutdown

init_distributed("cpu")
total = torch.tensor(2.0 ** dist.get_rank())
dist.all_reduce(total)
names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
facts = [dist.get_rank(), dist.get_world_size(), int(total), *(os.environ[name] for name in names)]
pathlib.Path(sys.argv[1], f"started-by-{os.getppid()}").write_text(" ".join(map(str, facts)))
shutdown()
"""


def _is_known(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


@pytest.mark.skipif(not _is_known(socket.getfqdn()), reason="ranks meet under this host's name, which is unknown")
@pytest.mark.parametrize("whole", [False, *campaign(True)], ids=["forks", "whole"])
def test_launchers_of_two_hosts_make_one_group(tmp_path: Path, whole: bool) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "found"
    script.write_text(MEETING)
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["shardwise", "run", "--nproc", "1", "--nnodes", "2"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "meeting"]
    logs = [tmp_path / f"log-{host}" for host in range(2)]
    with ExitStack() as stack:
        hosts = [
            started(*command, "--node-rank", str(host), str(script), str(folder), log=log, whole=whole)
            for host, log in enumerate(logs)
        ]
        launchers = [stack.enter_context(host) for host in hosts]
        statuses = [launcher.wait(SECONDS) for launcher in launchers]
    assert statuses == [0, 0], [log.read_text() for log in logs]
    by_rank = sorted(path.read_text() for path in folder.iterdir())
    assert by_rank == [f"{rank} 2 3 {rank} 2 0 1 meeting" for rank in range(2)]
    assert {path.name for path in folder.iterdir()} == {f"started-by-{launcher.pid}" for launcher in launchers}


def test_learning_rate_warms_up_and_falls() -> None:
    rates = [learning_rate_factor(step, 100, 300) for step in range(100, 301)]
    assert rates[0] == pytest.approx(1 / 20) and max(rates) == 1.0 and rates[-1] == pytest.approx(0.05)
    assert all(later <= earlier for earlier, later in pairwise(rates[20:]))
    assert learning_rate_factor(0, 100, 300) > 0  # before its start, as a scheduler asks when it is made


def test_what_a_run_continues_with() -> None:
    size = ModelSize(width=8, depth=1, heads=1, context=4)
    config = demo.check(_parser().parse_args(["demo", "--steps", "100"]))
    fresh, opening = starting_state(config, size, "text", None)
    assert (fresh.goal, fresh.step, opening) == (100, 0, "training for 100 steps")

    stopped = replace(fresh, step=40, windows=320)
    state, opening = starting_state(config, size, "text", stopped)
    assert (state.step, state.goal, state.windows, opening) == (40, 100, 320, "resumed at step 40 of 100")

    state, opening = starting_state(config, size, "text", replace(fresh, step=100))
    assert (state.goal, state.phase_start) == (200, 100) and "training 100 steps further, to 200" in opening
    again, _ = starting_state(config, size, "text", replace(state, step=150))
    assert (again.step, again.goal) == (150, 200)  # a second run that was stopped ends where it would have

    longer, _ = starting_state(replace(config, steps=500), size, "text", stopped)
    assert longer.goal == 500
    moved, opening = starting_state(replace(config, nproc=3, plugin="ddp"), size, "other", stopped)
    assert moved.windows == 0 and "saved by low_level_zero on 2 ranks" in opening and "another text" in opening
    with pytest.raises(BadInput, match="'width': 8"):
        starting_state(config, ModelSize(width=16, depth=1, heads=1, context=4), "text", stopped)


FACTS = StepFacts(
    step=7, last_step=100, loss=2.5, tokens=2048, memory_bytes=3 * 2**20, unsharded_bytes=2**23, learning_rate=1e-3
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line() -> None:
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        progress = Progress(enabled=True, stream=stream)
        for step in (99, 100):
            progress._shown -= 100  # as if time had passed
            progress.step(replace(FACTS, step=step))
        progress.say("done")
    assert terminal.getvalue().count("\r") == 2 and terminal.getvalue().count("\n") == 2
    assert log.getvalue().count("\n") == 3
    for part in ("step 100/100", "loss 2.500", "tokens/s", "3.0 of 8.0 MiB", "lr 1.00e-03"):
        assert part in log.getvalue()


def test_progress_tells_each_tier_and_not_their_sum() -> None:
    text = progress_text(replace(FACTS, memory_bytes=9 * 2**20, tiers="device 2 MiB, host 7 MiB, disk 0 B"), 10.0)
    assert "device 2 MiB, host 7 MiB, disk 0 B (unsharded 8.0 MiB)" in text
    assert "9.0" not in text and "peak" not in text


def test_progress_is_not_too_often_and_only_where_enabled() -> None:
    log = io.StringIO()
    progress = Progress(enabled=True, stream=log)
    progress.step(FACTS)
    assert log.getvalue() == ""
    progress.step(replace(FACTS, step=100))
    assert log.getvalue().count("\n") == 1
    silent = io.StringIO()
    Progress(enabled=False, stream=silent).say("no")
    assert silent.getvalue() == ""


def test_the_model_is_causal_and_tied_and_generates_the_same_twice() -> None:
    model = ByteGPT(ModelSize(width=16, depth=2, heads=2, context=8))
    assert model.head.weight is model.embed.weight
    text = torch.randint(256, (1, 8))
    changed = text.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 256
    assert torch.equal(model(text)[:, :-1], model(changed)[:, :-1])
    one, two = (generate(model, b"ab", 12, context=8, temperature=0.7, seed=3) for _ in range(2))
    assert one == two and len(one) == 12
    assert generate(model, b"ab", 3, 8, 0.0, 0) == generate(model, b"ab", 3, 8, 0.0, 1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_sample_is_no_run_of_blanks(temperature: float) -> None:
    class Blank(nn.Module):
        """Has learnt that a blank follows a blank; what else might come is even."""

        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Parameter(torch.zeros(256))
            with torch.no_grad():
                self.scores[ord(" ")] = 50.0

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            return self.scores.expand(*text.shape, 256)

    text = generate(Blank(), b"if x:\n", 90, 64, temperature, 0)
    runs = [len(run) for run in re.findall(rb"[ \t\r\n\0]+", text)]
    assert len(text) == 90 and max(runs) == 8 and len(text.split()) >= 9


def test_importing_the_command_line_does_not_import_torch() -> None:
    done = python("-c", "import sys; import shardwise.cli.main; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_run_takes_a_library_whose_place_we_take() -> None:
    launcher, script = _run_options("--as deepspeed --nproc 2 SCRIPT --as x")
    assert launcher[-1] == "--module" and script == ["shardwise.cli.as_world", "deepspeed", __file__, "--as", "x"]
    _, script = _run_options("--as deepspeed -m program -m x")
    assert script == ["shardwise.cli.as_world", "deepspeed", "-m", "program", "-m", "x"]
    assert main(["run", "--as", "horovod", __file__]) == 2


OURS = """
import sys, beside, deepspeed, importlib.metadata
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
print(deepspeed.__name__, importlib.metadata.version('deepspeed'), beside.VALUE, sys.argv[1:])
"""
TOO_LATE = """
import sys, types
sys.modules['deepspeed'] = types.ModuleType('deepspeed')
import shardwise.deepspeed.as_deepspeed
"""


@pytest.mark.parametrize("whole", [False, *campaign(True)], ids=["forks", "whole"])
def test_run_puts_our_names_in_place_of_a_library(whole: bool, tmp_path: Path) -> None:
    runs = python if whole else forked_python
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    program = tmp_path / "program.py"
    program.write_text(OURS)
    for start in ([str(program)], ["-m", "program"]):
        command = ["-m", "shardwise.cli.as_world", "deepspeed", *start, "a", "-m"]
        shown = runs(*command, cwd=tmp_path, env=surroundings(tmp_path))
        assert shown.stdout.split(maxsplit=3) == ["shardwise.deepspeed", "0.19.8", "3", "['a', '-m']\n"], shown
    program.write_text(TOO_LATE)
    shown = runs(str(program))
    assert shown.returncode == 1 and "deepspeed is imported already" in shown.stderr
    shown = runs("-m", "shardwise.cli.as_world", "horovod", "x")
    assert shown.returncode == 1 and "give one of colossalai, deepspeed" in shown.stderr
