"""Schedules are complete, end, hold what they promise, and equal torch's."""

from __future__ import annotations

import pytest

from shardwise.core.parallel.pipeline.schedule import Action, Kind, Schedule, given_schedule, make_schedule, simulate

SIZES = [(ranks, microbatches) for ranks in (1, 2, 3, 4) for microbatches in (1, 2, 3, 4, 5, 8, 12)]


def made() -> list[Schedule]:
    plain = [make_schedule("1f1b", ranks, 1, microbatches) for ranks, microbatches in SIZES]
    plain += [make_schedule("zbv", ranks, 2, microbatches) for ranks, microbatches in SIZES]
    return plain + [make_schedule("interleaved", r, chunks, m) for r, m in SIZES for chunks in (1, 2, 3)]


def test_every_action_comes_once_and_all_come_to_an_end() -> None:
    for schedule in made():
        expected = [(stage, each) for stage in range(schedule.stages) for each in range(schedule.microbatches)]
        for kind in Kind if schedule.splits else (Kind.FORWARD, Kind.BACKWARD):
            found = [(a.stage, a.microbatch) for order in schedule.orders for a in order if a.kind is kind]
            assert sorted(found) == expected
        for rank, order in enumerate(schedule.orders):
            assert {schedule.rank_of(action.stage) for action in order} == {rank}
        spans = simulate(schedule, lambda action: 1.0 if action.kind is Kind.FORWARD else 2.0)
        assert all(len(each) == len(order) for each, order in zip(spans, schedule.orders, strict=True))
        forward = schedule.forward_only()
        assert sum(map(len, simulate(forward, lambda _: 1.0))) == len(expected)


def test_messages_of_a_direction_are_taken_in_the_order_in_which_they_are_made() -> None:
    """A communicator without tags carries them."""
    for schedule in made():
        ways: dict[tuple[int, int, Kind], list[Action]] = {}
        for action, sender, receiver in schedule.messages():
            assert schedule.rank_of(action.stage) == sender != receiver
            ways.setdefault((sender, receiver, action.kind), []).append(action)
        for (sender, _, _), taken in ways.items():
            assert [each for each in schedule.orders[sender] if each in set(taken)] == taken


def torchs(ranks: int, chunks: int, microbatches: int, rank: int) -> list[Action]:
    from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops

    total = microbatches * chunks
    warm = min((ranks - rank - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * ranks, total)

    def forward_stage(step: int) -> int:
        return (step // ranks) % chunks * ranks + rank

    def backward_stage(step: int) -> int:
        return (chunks - 1 - (step - warm) // ranks % chunks) * ranks + rank

    rest = total - warm
    found = _get_1f1b_rank_ops(
        chunks, ranks, warm, rest, warm, rank, forward_stage, backward_stage, num_1f1b_microbatches=rest
    )
    return [
        Action(
            Kind.FORWARD if each.computation_type.name == "FORWARD" else Kind.BACKWARD,
            each.stage_index,
            each.microbatch_index,
        )
        for each in found
        if each
    ]


def test_orders_are_torchs() -> None:
    for ranks, chunks, microbatches in ((2, 2, 4), (4, 2, 8), (4, 1, 8), (2, 3, 6)):
        schedule = make_schedule("1f1b" if chunks == 1 else "interleaved", ranks, chunks, microbatches)
        for rank, order in enumerate(schedule.orders):
            assert list(order) == torchs(ranks, chunks, microbatches, rank)


def test_the_order_of_zbv_is_torchs() -> None:
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    kinds = {"FORWARD": Kind.FORWARD, "BACKWARD_INPUT": Kind.BACKWARD, "BACKWARD_WEIGHT": Kind.WEIGHT}
    for ranks in range(1, 7):
        for microbatches in range(1, 20):
            torchs_own = object.__new__(ScheduleZBVZeroBubble)  # its constructor wants stages, and communicates
            torchs_own.pp_group_size, torchs_own.num_stages = ranks, 2 * ranks
            torchs_own._n_microbatches = microbatches
            schedule = make_schedule("zbv", ranks, 2, microbatches)
            for rank, order in enumerate(schedule.orders):
                expected = torchs_own._calculate_single_rank_operations(rank)
                assert list(order) == [
                    Action(kinds[each.computation_type.name], each.stage_index, each.microbatch_index or 0)
                    for each in expected
                    if each is not None
                ]
            assert given_schedule(ranks, tuple(tuple(map(str, order)) for order in schedule.orders)) == schedule


def test_what_waits_in_a_circle_is_told() -> None:
    forward, backward = Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)
    with pytest.raises(ValueError, match=r"by rank at \{0: '0B0'\}"):
        simulate(Schedule("wrong", 1, 1, ((backward, forward),)), lambda _: 1.0)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule='zigzag'"):
        make_schedule("zigzag", 2, 1, 2)
    with pytest.raises(ValueError, match="2 stages a rank"):
        make_schedule("1f1b", 2, 2, 2)
    with pytest.raises(ValueError, match="schedule='zbv' with 1 stages a rank: give 2"):
        make_schedule("zbv", 2, 1, 2)
    for text in ("F0", "0G0", 3):
        with pytest.raises(ValueError, match=f"{text!r} is no action"):
            given_schedule(1, ((text,),))  # type: ignore[arg-type]
