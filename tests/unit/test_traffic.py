"""The traffic counter, and what a group of one rank counts."""

from __future__ import annotations

import torch

from shardwise.core.base.device import live_bytes
from shardwise.core.comm import LocalGroup, Traffic


def test_counts_by_kind_and_resets() -> None:
    traffic = Traffic()
    traffic.add("all_gather", 10)
    traffic.add("all_gather", 5)
    traffic.add("exchange", 0)
    none = dict.fromkeys(("reduce_scatter", "all_reduce", "broadcast", "exchange", "send"), 0)
    assert traffic.bytes == {"all_gather": 15, **none}
    assert traffic.calls["all_gather"] == 2 and traffic.calls["exchange"] == 1
    by_kind = traffic.bytes
    traffic.reset()
    assert traffic.bytes is by_kind and set(by_kind.values()) == {0} and set(traffic.calls.values()) == {0}


def test_one_rank_sends_nothing() -> None:
    group = LocalGroup("alone", torch.device("cpu"))
    full, shard = group.buffers([(4, torch.float16), (4, torch.float32)])
    full.local.fill_(3.0)
    out = torch.empty(4)
    group.reduce_scatter(out, full, 0.5).wait()
    assert out.tolist() == [1.5] * 4
    group.all_reduce(full, 2.0).wait()
    assert full.local.tolist() == [6.0] * 4
    group.all_gather(out, shard).wait()
    assert out.tolist() == [0.0] * 4
    assert group.exchange([1, 2]) == [[1.0, 2.0]] and group.exchange_object((1, "a")) == [[1, "a"]]
    group.broadcast(out, 0)
    assert not any(group.traffic.bytes.values()) and group.traffic.calls["all_gather"] == 1


def test_live_bytes_counts_a_storage_once() -> None:
    whole = torch.zeros(100)
    views = [whole[:10], whole.view(10, 10).t(), torch.zeros(3, dtype=torch.float64), torch.empty(5, device="meta")]
    assert live_bytes([whole, *views, torch.empty(0)]) == 400 + 24
