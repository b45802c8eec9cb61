"""``shardwise demo --device-memory``: malformed sizes are refused in one line, tiny ones choose a model."""

from __future__ import annotations

import pytest

from shardwise.cli import demo
from shardwise.cli.errors import BadInput
from shardwise.cli.main import _parser


def checked(*options: str) -> demo.DemoConfig:
    return demo.check(_parser().parse_args(["demo", *options]))


MALFORMED = ["0", "0MiB", "-1", "nan", "inf", "1e3MiB", "0x10", "64 sheep", "", " ", "MiB", "1.2.3GiB", "0.4B"]


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_sizes(text: str) -> None:
    with pytest.raises(BadInput) as problem:
        checked("--device-memory", text)
    said = str(problem.value)
    assert said.startswith("--device-memory: ") and repr(text) in said and "64MiB" in said and "\n" not in said


@pytest.mark.parametrize("text", ["1", "1B", "100", "1KiB", "64KB"])
def test_a_device_of_a_few_bytes(text: str) -> None:
    """What is chosen is the smallest model; that its device is too small for it is found by training."""
    config = checked("--device-memory", text)
    assert config.tiers is not None and config.tiers.device_bytes is not None and config.tiers.device_bytes <= 64_000
    assert config.width == 16 and config.depth >= 1 and config.heads == 1
    assert config.context >= 16 and config.batch == 1 and config.learning_rate > 0
