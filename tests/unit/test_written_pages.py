"""Which pages of a private mapping were written to: asked of the kernel, and what is done where it does not say."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise.comm import Group, pages
from shardwise.comm.joint import JointBuffer, tensor_in

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason=f"memfd and pagemap are Linux's, this is {sys.platform}"
)

PAGE = mmap.PAGESIZE
NUMEL = 8 * PAGE // 4


class Ranks:
    """What a joint buffer knows of its group."""

    rank, size, name = 0, 2, "test"


@contextmanager
def joint() -> Iterator[tuple[JointBuffer, Tensor]]:
    """A buffer of two ranks behind the first page, and the array itself."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, 9 * PAGE)
    shared = mmap.mmap(fd, 9 * PAGE)
    private = mmap.mmap(fd, 9 * PAGE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(fd)
    everyone = tensor_in(shared, PAGE, NUMEL, torch.float32)
    everyone.copy_(torch.arange(NUMEL))
    group: Group = Ranks()  # type: ignore[assignment]
    yield JointBuffer(group, list(everyone.split(NUMEL // 2)), private, PAGE), everyone


def dropped(buffer: JointBuffer) -> bool:
    """Whether the kernel was asked to drop this rank's copies of pages."""
    with mock.patch.object(buffer, "_drop", wraps=buffer._drop) as drop:
        buffer.drop_private()
    return bool(drop.call_count)


@pytest.mark.parametrize("at", [0, 1, PAGE // 4 - 1, PAGE // 4, 5000, NUMEL - 1])
def test_every_written_element_is_seen_and_nothing_else(at: int) -> None:
    with joint() as (buffer, everyone):
        buffer.drop_private()
        whole = buffer.whole()
        assert buffer.written() is False
        assert torch.equal(whole, everyone) and buffer.written() is False and not dropped(buffer)
        everyone[at] += 1.0  # what an owner writes is no copy, and shows
        assert torch.equal(whole, everyone) and buffer.written() is False
        whole[at] = -1.0
        assert buffer.written() is True and everyone[at] != -1.0
        assert dropped(buffer) and buffer.written() is False
        assert torch.equal(buffer.whole(), everyone)


@pytest.mark.parametrize("missing", ["no such file", "nothing in it", "not the truth"])
def test_where_the_system_does_not_say_all_counts_as_written(missing: str, tmp_path: Path) -> None:
    path = tmp_path / "pagemap"
    if missing == "nothing in it":
        path.touch()
    told = mock.patch.object(pages, "written", return_value=False) if missing == "not the truth" else None
    with joint() as (buffer, everyone), told or mock.patch.object(pages, "PAGEMAP", str(path)):
        buffer.drop_private()
        assert buffer.written() is None
        whole = buffer.whole()
        whole[3] = -1.0
        assert dropped(buffer) and dropped(buffer)
        assert torch.equal(buffer.whole(), everyone)


def test_what_is_asked_of_the_kernel_covers_the_pages_of_the_bytes() -> None:
    with joint() as (buffer, _):
        buffer.drop_private()
        whole = buffer.whole()
        address = whole.data_ptr()
        whole[PAGE // 4] = 0.0  # the second page
        assert pages.written(address, PAGE) is False and pages.written(address, PAGE + 1) is True
        assert pages.written(address + PAGE + 100, 1) is True and pages.written(address + 2 * PAGE, 5 * PAGE) is False
        assert pages.written(address, 0) is False


def test_a_released_buffer_knows_nothing() -> None:
    with joint() as (buffer, _):
        buffer.drop_private()
        buffer.release()
        assert buffer.written() is None
        buffer.drop_private()
