"""A schedule as a picture: SVG for a browser, letters for a terminal. No dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shardwise.core.parallel.pipeline.schedule import (
    Action,
    Kind,
    Schedule,
    Span,
    bubble_fraction,
    expected_bubble,
    simulate,
)

Times = tuple[float, float, float]
"""Times of F, B and W in a stage; in schedules without W, B includes it."""

COLORS = {
    Kind.FORWARD: ("#4c78a8", "#86b3d9"),
    Kind.BACKWARD: ("#54a24b", "#9ad18f"),
    Kind.WEIGHT: ("#e07b39", "#f2b284"),
}
"""Colors for the odd and for the even stages of a rank, counted from 1."""
NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "gradients of weights"}
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
WIDTH, LEFT, RIGHT, TOP, ROW, BAR, BOTTOM = 1120, 72, 20, 84, 40, 32, 16
LEAST_FOR_NUMBER = 14
IDLE = "."


def _spans(schedule: Schedule, times: Times) -> list[list[Span]]:
    forward, backward, weight = times
    backward_time = backward if schedule.splits else backward + weight
    of_kind = {Kind.FORWARD: forward, Kind.BACKWARD: backward_time, Kind.WEIGHT: weight}
    return simulate(schedule, lambda action: of_kind[action.kind])


def _turn(schedule: Schedule, action: Action) -> int:
    """Return the index of the action's stage among those of its rank."""
    return action.stage // schedule.ranks


def _figures(schedule: Schedule, times: Times, spans: Sequence[Sequence[Span]]) -> list[str]:
    stages = schedule.stages // schedule.ranks
    each = "1 stage" if stages == 1 else f"{stages} stages"
    lines = [f"{schedule.name}: {schedule.ranks} ranks with {each} each, {schedule.microbatches} micro-batches"]
    expected = expected_bubble(schedule) if len({*times}) == 1 else None
    formula = f" (by formula {expected:.1%})" if expected is not None else ""
    lines.append(f"bubble: ranks are idle for {bubble_fraction(spans):.1%} of the time{formula}")
    in_flight = " ".join(str(schedule.most_in_flight(rank)) for rank in range(schedule.ranks))
    lines.append(f"largest number of forward passes whose activations are stored, by rank: {in_flight}")
    if schedule.splits:
        waiting = " ".join(str(schedule.most_waiting(rank)) for rank in range(schedule.ranks))
        lines.append(f"largest number of passes whose weight gradients are postponed, by rank: {waiting}")
    return lines


def schedule_text(schedule: Schedule, times: Times = (1.0, 1.0, 1.0), width: int = 160) -> str:
    """Return lines with figures, and a line for each rank: F, B and W with the number of the micro-batch, in lower case
    for every second stage of a rank. If lines would be wider than ``width``, numbers are left out, and longer lines are
    continued below the last rank.
    """
    spans = _spans(schedule, times)
    unit = min(time for time in times if time > 0)
    columns = round(max(each[-1].end for each in spans) / unit)
    label = len(str(schedule.microbatches - 1)) + 1
    lead = len(f"rank {schedule.ranks - 1} ")
    if lead + columns * (label + 1) > width:
        label = 0
    cell = label + 1
    rows = []
    for done in spans:
        row = [IDLE + " " * label] * columns
        for span in done:
            letter = span.action.kind.value
            letter = letter.lower() if _turn(schedule, span.action) % 2 else letter
            first, last = round(span.start / unit), round(span.end / unit)
            text = f"{letter}{span.action.microbatch}".ljust(cell) if label else letter
            more = "-" * label + " " if label else letter
            row[first:last] = [text, *[more] * (last - first - 1)][: last - first]
        rows.append("".join(row).rstrip())
    room = max(width - lead, 1)
    parts = range(0, max(map(len, rows)), room)
    lines = [f"rank {rank}".ljust(lead) + row[at : at + room] for at in parts for rank, row in enumerate(rows)]
    legend = "F forward, B backward" + (", W gradients of weights" if schedule.splits else "")
    small = "; lower case: every second stage of a rank" if schedule.stages > schedule.ranks else ""
    longer = ", - continues" if any("-" in row for row in rows) else ""
    return "\n".join([*_figures(schedule, times, spans), f"{legend}{longer}, {IDLE} idle{small}", *lines])


def draw_schedule(schedule: Schedule, times: Times = (1.0, 1.0, 1.0)) -> str:
    """Return the schedule as an SVG document with a tooltip for each action."""
    spans = _spans(schedule, times)
    end = max(each[-1].end for each in spans)
    scale = (WIDTH - LEFT - RIGHT) / end
    height = TOP + ROW * schedule.ranks + BOTTOM
    figures = _figures(schedule, times, spans)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' "
        f"{FONT} font-size='13' fill='#333'>",
        f"<rect width='{WIDTH}' height='{height}' fill='#fff'/>",
        f"<text x='{LEFT}' y='26' font-size='17'>{escape(figures[0])}</text>",
        f"<text x='{LEFT}' y='46'>{escape(figures[1])}</text>",
    ]
    at = float(LEFT)
    for kind in Kind if schedule.splits else (Kind.FORWARD, Kind.BACKWARD):
        parts.append(f"<rect x='{at:.0f}' y='58' width='12' height='12' fill='{COLORS[kind][0]}'/>")
        parts.append(f"<text x='{at + 18:.0f}' y='69'>{NAMES[kind]}</text>")
        at += 40 + 7.5 * len(NAMES[kind])
    for rank, done in enumerate(spans):
        y = TOP + ROW * rank
        parts.append(f"<text x='12' y='{y + BAR / 2 + 5:.0f}'>rank {rank}</text>")
        parts.append(f"<rect x='{LEFT}' y='{y}' width='{WIDTH - LEFT - RIGHT}' height='{BAR}' fill='#eee'/>")
        for span in done:
            action, x, wide = span.action, LEFT + span.start * scale, (span.end - span.start) * scale
            color = COLORS[action.kind][_turn(schedule, action) % 2]
            tip = f"{NAMES[action.kind]} of stage {action.stage}, micro-batch {action.microbatch}"
            number = f"<text x='{x + wide / 2:.1f}' y='{y + BAR / 2 + 4:.0f}' text-anchor='middle' font-size='11' "
            number += f"fill='#fff'>{action.microbatch}</text>"
            parts.append(
                f"<g><title>{tip}</title><rect x='{x:.1f}' y='{y}' width='{wide:.1f}' height='{BAR}' fill='{color}' "
                f"stroke='#fff' stroke-width='0.7'/>{number if wide >= LEAST_FOR_NUMBER else ''}</g>"
            )
    return "\n".join([*parts, "</svg>"]) + "\n"
