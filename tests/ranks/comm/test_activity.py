"""What ranks tell each other of their calls never keeps one of them waiting."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from shardwise.core.comm import Activity, activity
from shardwise.testing import run_ranks


def asked(path: str) -> list[bool]:
    """Whether a rank asks the run's own store, one in a file, and the same under two prefixes."""
    found, file = [], dist.FileStore(f"{path}-{dist.get_rank()}", 1)
    for store in (activity.default_store(), file, dist.PrefixStore("a", dist.PrefixStore("b", file))):
        with mock.patch.object(activity, "default_store", lambda store=store: store):
            found.append(Activity()._store is not None)
    return found


def test_a_store_in_a_file_is_not_asked(tmp_path: Path) -> None:
    """A killed rank may have written half a record, which torch reads for ever."""
    assert run_ranks(2, asked, str(tmp_path / "store")) == [[True, False, False]] * 2


def test_the_first_meeting_of_a_pass_waits_as_long_as_the_group() -> None:
    activity = Activity(limit_s=60.0)
    activity.met("tensor")
    assert activity.limit("shard") is None
    activity.met("shard")
    assert activity.limit("shard") == timedelta(seconds=60)
    with activity.doing("saving"):
        assert activity.limit("shard") is None
    activity.begin_pass()
    assert activity.limit("shard") is None
