"""The demo with less device memory than its model needs: options, one run beyond the device, and a clear refusal."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import demo_several
import pytest
from launching import finished
from sets import campaign

from shardwise.cli import demo
from shardwise.cli.demo_model import ByteGPT, ModelSize
from shardwise.cli.demo_tiers import MEMORY_MARKER, Shape, TierOptions, batch_for, context_for, parse_count, shape_for
from shardwise.cli.errors import BadInput
from shardwise.cli.main import _parser
from shardwise.testing import RankPool

MEBI = 2**20
SMALL = "--size 300K --context 32 --batch 1 --steps 3 --sample 0 --device cpu"


def _checked(text: str) -> demo.DemoConfig:
    return demo.check(_parser().parse_args(["demo", *text.split()]))


def test_nothing_said_about_memory_changes_nothing() -> None:
    config = _checked("")
    assert (config.plugin, config.stage, config.tiers) == ("low_level_zero", 2, None)
    assert config.nproc == 2 and _checked("--offload-optim 1").nproc == 2
    assert (config.width, config.depth, config.heads) == (192, 3, 6)
    assert (config.context, config.batch, config.learning_rate) == (128, 4, 3e-3)


@pytest.mark.parametrize("size", ["2MiB", "64MiB", "1GiB", "24GiB"])
def test_the_model_is_four_times_its_device(size: str) -> None:
    config = _checked(f"--device-memory {size}")
    assert config.tiers is not None and config.tiers.device_bytes is not None
    assert config.plugin == "gemini" and config.nproc == 1 and config.width % (2 * config.heads) == 0
    shape = Shape(width=config.width, depth=config.depth, heads=config.heads)
    times = 16 * shape.parameters / config.tiers.device_bytes
    assert 4.0 <= times < 5.0
    # What one sequence keeps for backward leaves room.
    activations = config.context * config.batch * shape.width * shape.depth * 26 * 4
    assert activations <= 0.61 * config.tiers.device_bytes


def test_the_shape_counts_its_parameters() -> None:
    shape = shape_for(300_000)
    model = ByteGPT(ModelSize(width=shape.width, depth=shape.depth, heads=shape.heads, context=8))
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    assert 300_000 <= shape.parameters < 340_000 and shape.depth >= 6
    assert batch_for(shape, 32, 4, 10**9) == 4 and batch_for(shape, 32, 4, 1) == 1
    assert context_for(shape, 128, 4, 10**9) == 128 and context_for(shape, 128, 4, 1) == 16


def test_shares() -> None:
    tiers = _checked("--device-memory 64MiB --nproc 2").tiers
    assert tiers == TierOptions(
        device_bytes=64 * MEBI, placement="static", optim_host=1.0, optim_disk=0.0, params_host=1.0, disk_directory=None
    )
    half = _checked("--device-memory 64MiB --nproc 2 --precision bf16").tiers
    assert half == replace(tiers, params_host=0.0)  # a quarter of the device in 16 bits, half of it in fp32
    disk = _checked("--nvme-dir . --nvme-optim 0.25 --offload-params 0.5").tiers
    assert disk is not None and (disk.optim_disk, disk.optim_host, disk.params_host) == (0.25, 0.75, 0.5)
    rest = _checked("--nvme-dir . --offload-optim 0.25").tiers
    assert rest is not None and (rest.optim_disk, rest.optim_host, rest.disk_directory) == (0.75, 0.25, str(Path.cwd()))
    config = _checked("--device-memory 64MiB --placement auto")
    assert config.tiers is not None and config.tiers.placement == "auto"
    assert demo.DemoConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(("text", "count"), [("20M", 20_000_000), ("1.5b", 1_500_000_000), ("400K", 400_000), ("7", 7)])
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--device-memory lots", "--device-memory: 'lots' is no size"),
        ("--plugin ddp --device-memory 64MiB", "--plugin ddp with --device-memory"),
        ("--offload-optim 1.5", "--offload-optim 1.5: give a share in [0, 1]"),
        ("--offload-params nan", "--offload-params nan"),
        ("--nvme-optim 0.5", "--nvme-dir"),
        ("--nvme-dir /nowhere", "--nvme-dir /nowhere: no such folder"),
        ("--nvme-dir . --nvme-optim 0.7 --offload-optim 0.7", "more than 1 together"),
        ("--placement auto --offload-optim 1", "auto decides the shares"),
        ("--size 20X", "--size 20X"),
        ("--size 20M --depth 3", "--size 20M with --depth"),
    ],
)
def test_refused(options: str, expected: str) -> None:
    with pytest.raises(BadInput, match=re.escape(expected)) as problem:
        _checked(options)
    assert "\n" not in str(problem.value)


def _options(text: Path, out: Path, options: str, *more: str) -> list[str]:
    return ["demo", "--data", str(text), "--out", str(out), *SMALL.split(), *options.split(), *more]


def _facts(out: Path) -> tuple[dict[str, int], list[float]]:
    """Bytes by tier, and the losses."""
    facts = json.loads((out / "memory.json").read_text("utf-8"))
    return {tier: sum(kinds.values()) for tier, kinds in facts["tiers"].items()}, facts["losses"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        (folder / f"{i}.txt").write_text("the cat sat on the mat and looked at the rat. " * 20, "utf-8")
    return folder


@pytest.mark.parametrize("whole", [False, *campaign(True)], ids=["ranks", "whole"])
def test_it_trains_beyond_its_device_and_equals_a_run_that_fits(text: Path, tmp_path: Path, whole: bool) -> None:
    """The same model in 1.5 MiB a device with host and disk, and without a limit that matters."""
    disk = tmp_path / "disk"
    disk.mkdir()
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    beyond = _options(text, small, "--device-memory 1.5MiB --nvme-optim 0.4", "--nvme-dir", str(disk))
    fits = _options(text, large, "--nproc 1 --device-memory 1GiB --offload-optim 0 --offload-params 0")
    commands = [fits] if whole else [fits, beyond]
    with RankPool(1) as ranks:
        ((*_, shown),) = ranks.run(demo_several.trained, commands)
        ranks.run(demo_several.trained, [])  # garbage is collected before it
    if whole:
        stale = small / MEMORY_MARKER  # of a run that was killed; it would silence a rank
        stale.touch()
        status, shown = finished("shardwise", *beyond, log=tmp_path / "log", whole=True)
        assert status == 0, shown
        assert not stale.exists()
    held, losses = _facts(small)
    roomy, expected = _facts(large)
    assert len(losses) == 3 and all(map(math.isfinite, losses)) and losses == expected
    assert 0 < held["device"] <= 1.5 * MEBI < held["host"] and held["disk"] > 0, held
    assert roomy["host"] == roomy["disk"] == 0 and roomy["device"] > 1.5 * MEBI, roomy
    assert "step 3/3" in shown and "an unsharded run needs" in shown
    for tier in ("device", "host", "disk"):
        assert f"\n{tier}" in shown, shown
    for name in ("memory-tiers.svg", "memory-step.svg"):
        assert ElementTree.parse(small / name).getroot().tag.endswith("svg")
    assert not list(disk.iterdir()), "what was on the disk is gone with the run"


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.campaign)], ids=["forks", "whole"])
def test_too_little_memory_is_said_once(text: Path, tmp_path: Path, whole: bool) -> None:
    options = "--nproc 2 --device-memory 600KiB --offload-optim 0 --offload-params 0"
    command = ["shardwise", *_options(text, tmp_path / "run", options)]
    status, shown = finished(*command, log=tmp_path / "log", whole=whole)
    assert status == 1
    assert shown.count("too little device memory") == 1 and "Traceback" not in shown, shown
    assert "of a capacity of 600 KiB" in shown and "--offload-params 1" in shown
    assert not (tmp_path / "run" / MEMORY_MARKER).exists()
