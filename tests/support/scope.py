"""Setup for tests of groups: a group over all ranks, known values, and the plain computation."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.comm import Group, GroupMaker, NativeGroup, P2PChannel, choose
from shardwise.core.comm.control import Control
from shardwise.core.comm.summing import RankSum

CPU = torch.device("cpu")
PER_HOST = 2


@contextmanager
def hosts_of(ranks: int) -> Iterator[None]:
    """Let groups take so many neighboring ranks for those of one host, inside this context."""
    real = choose.host_facts()
    with mock.patch.object(choose, "host_facts", lambda: real | {"host": f"host {dist.get_rank() // ranks}"}):
        yield


class Scope:
    """A context with a group over all ranks, which is closed with its communicators at the end."""

    def __init__(self, kind: str, timeout_s: float = 60.0) -> None:
        ranks = [list(range(dist.get_world_size()))]
        self.maker = GroupMaker(CPU, kind == "shared", timeout_s)
        if kind == "native":
            names = ("control", "gather", "reduce")
            control, *others = (self.maker.process_group(name, ranks, "gloo") for name in names)
            self.group: Group = NativeGroup("test", CPU, Control("test", control), *others)
        else:
            self.group = self.maker.make("test", ranks)
            if hasattr(self.group, "sum"):  # small tiles, so that small tensors have several of them
                self.group.sum = RankSum(512)

    def __enter__(self) -> Group:
        return self.group

    def wire(self) -> P2PChannel:
        """Return a point-to-point channel between the ranks; collective."""
        return self.maker.make_wire("test", [list(range(dist.get_world_size()))])

    def __exit__(self, *_: object) -> None:
        self.group.close()
        self.maker.close()


@functools.lru_cache(maxsize=200)
def values(rank: int, numel: int, dtype: torch.dtype, round_: int = 0) -> Tensor:
    """Return what rank ``rank`` puts into a buffer; every rank can compute it."""
    generator = torch.Generator().manual_seed(1000 * round_ + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def summed(size: int, numel: int, dtype: torch.dtype, out: torch.dtype, scale: float, round_: int = 0) -> Tensor:
    """Compute plainly: add in rank order in fp32 (fp64 for fp64), scale, round once."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    own = [values(rank, numel, dtype, round_).to(exact) for rank in range(size)]
    return (functools.reduce(torch.add, own) * scale).to(out)


def same(found: Tensor, expected: Tensor, kind: str) -> None:
    if kind != "native":
        assert torch.equal(found, expected)
        return
    # The backend adds in its own order and rounds 16-bit sums at every hop.
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[found.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
