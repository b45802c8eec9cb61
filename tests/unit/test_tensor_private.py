"""Random numbers of a rank's part: what the generators are before, inside and behind it, also of a GPU's kind."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch

from shardwise.core.base.rng import RankRng

CPU = torch.device("cpu")
RATES = ((SimpleNamespace(p=0.5), "p"),)


class Philox:
    """What is asked of a GPU's generator: a seed, and how far it is."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.seed, self.offset = 11, 8

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.offset = offset

    def manual_seed(self, seed: int) -> None:
        assert 0 <= seed < 2**63
        self.seed, self.offset = seed, 0

    def state(self) -> tuple[int, int]:
        return self.seed, self.offset


def test_a_generator_of_a_gpus_kind_goes_on_behind_the_part() -> None:
    seeds: dict[int, list[int]] = {}
    for rank in range(4):
        generator, private = Philox(), RankRng(rank)
        with mock.patch("shardwise.core.base.rng.default_generator", lambda _, found=generator: found):
            for behind in ((11, 12), (11, 16)):
                private.enter(generator.device, RATES)
                assert private.inside and generator.offset == 0
                seeds.setdefault(rank, []).append(generator.seed)
                generator.set_offset(40)  # dropout draws
                with private.drawing(False, generator.device, RATES):
                    assert generator.state() == behind
                assert generator.offset == 40 and generator.seed == seeds[rank][-1]
                private.leave()
                assert generator.state() == behind and not private.inside
    drawn = [seed for each in seeds.values() for seed in each]
    assert len(set(drawn)) == len(drawn) == 8


def numbers(private: RankRng) -> tuple[torch.Tensor, torch.Tensor]:
    """Inside and behind, of one state before."""
    torch.manual_seed(3)
    private.enter(CPU, RATES)
    inside = torch.rand(5)
    private.leave()
    return inside, torch.rand(5)


def test_ranks_draw_their_own_inside_and_the_same_behind() -> None:
    with torch.random.fork_rng(devices=[]):
        inside, behind = zip(*(numbers(RankRng(rank)) for rank in range(3)), strict=True)
        once_more = numbers(RankRng(1))
    assert len({tuple(each.tolist()) for each in (*inside, behind[0])}) == 4
    assert all(torch.equal(each, behind[0]) for each in behind)
    assert torch.equal(once_more[0], inside[1])


def test_what_all_have_is_drawn_alike_inside_and_the_rest_goes_on() -> None:
    def draws(common: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        private = RankRng(1)
        private.enter(CPU, RATES)
        found = [torch.rand(3)]
        if common:
            with private.drawing(False, CPU, RATES):
                found.append(torch.rand(3))
        found.append(torch.rand(3))
        private.leave()
        return [*found, torch.rand(3)]

    with torch.random.fork_rng(devices=[]):
        with_common, without = draws(True), draws(False)
    own, shared, more, behind = with_common
    assert torch.equal(own, without[0]) and torch.equal(more, without[1])
    assert torch.equal(shared, without[2]) and not torch.equal(behind, without[2])
