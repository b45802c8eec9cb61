"""How a shard is cut: every element of every parameter once, in order, by param group, at most a tile long."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwise.core.shards.layout import ParamInfo, make_layout
from shardwise.core.update.tile_plan import plan_tiles
from shardwise.plan import ByNumel


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    groups=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    ranks=st.integers(1, 5),
    tile_numel=st.integers(1, 70),
)
def test_every_element_is_in_one_piece(sizes: list[int], groups: list[int], ranks: int, tile_numel: int) -> None:
    facts = [ParamInfo((f"p{i}",), torch.Size([n]), torch.float32, True, 0, groups[i]) for i, n in enumerate(sizes)]
    layout = make_layout(facts, nn.Module(), ByNumel(chunk_numel=50), ranks, 1)
    covered: dict[int, list[int]] = {i: [] for i in range(len(sizes))}
    for spec in layout.chunks:
        for rank in range(ranks):
            last = 0
            for tile in plan_tiles(spec, rank, groups, tile_numel):
                assert tile.pieces and tile.end - tile.start <= tile_numel
                for piece in tile.pieces:
                    assert groups[piece.param] == tile.group
                    assert last <= piece.start < piece.end <= spec.shard_numel(rank)
                    last = piece.end
                    slot = spec.slots[piece.slot]
                    assert slot.param == piece.param
                    assert spec.bounds[rank] + piece.start == slot.start + piece.offset
                    covered[piece.param] += range(piece.offset, piece.offset + piece.end - piece.start)
    assert {i: sorted(found) for i, found in covered.items()} == {i: list(range(n)) for i, n in enumerate(sizes)}


def test_neighbours_of_one_group_share_a_tile_until_it_is_full() -> None:
    facts = [ParamInfo((f"p{i}",), torch.Size([n]), torch.float32, True, 0, 0) for i, n in enumerate((4, 4, 4, 10))]
    (spec,) = make_layout(facts, nn.Module(), ByNumel(chunk_numel=100), 1, 1).chunks
    spans = [(t.start, t.end, len(t.pieces)) for t in plan_tiles(spec, 0, [0] * 4, 8)]
    assert [end - start for start, end, _ in spans] == [8, 4, 8, 2]
    assert len(plan_tiles(spec, 0, [0, 0, 1, 0], 100)) == 3
