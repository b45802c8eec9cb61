"""Which sizes share memory."""

from __future__ import annotations

from hypothesis import given, strategies

from shardwise.core.base.sizes import size_classes


def test_what_is_more_than_half_of_the_largest_shares_its_class() -> None:
    assert size_classes([]) == []
    assert size_classes([5, 10, 6, 2, 10]) == [[1, 4, 2], [0], [3]]
    assert size_classes([0, 0]) == [[0], [1]]


@given(strategies.lists(strategies.integers(0, 100)))
def test_every_place_is_in_one_class(sizes: list[int]) -> None:
    classes = size_classes(sizes)
    assert sorted(place for places in classes for place in places) == list(range(len(sizes)))
    largest = [sizes[places[0]] for places in classes]
    for places, most, following in zip(classes, largest, [*largest, 0][1:] if largest else [], strict=True):
        assert all((most >= sizes[at] and 2 * sizes[at] > most) or most == 0 for at in places) and 2 * following <= most
