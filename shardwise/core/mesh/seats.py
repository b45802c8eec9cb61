"""Which device each rank computes on: one GPU for each where there are as many, and never two ranks on one unseen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Seat", "check_own_gpus", "decide", "own_index"]

REMEDY = (
    "start as many ranks on a host as it has GPUs, or give each its own (CUDA_VISIBLE_DEVICES, or Slurm's "
    "--gpus-per-task=1)"
)


@dataclass(frozen=True)
class Seat:
    """What one rank found, and would take by itself.

    Attributes:
        rank: its number.
        host: its host's name.
        asked: the device that it was asked to take, or ``None``.
        device: the one that it would take: ``"cpu"`` or ``"cuda:<number>"``.
        gpu: what tells that GPU from all others; ``None``: nothing does, or it is none.
        visible: how many GPUs it sees.
    """

    rank: int
    host: str
    asked: str | None
    device: str
    gpu: str | None
    visible: int

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


def own_index(local_rank: int, visible: int) -> int:
    """Which of the ``visible`` GPUs (at least 1) a rank takes by itself.

    The one with its number where it sees all of the host's, and where it sees fewer, those are its own: then any of
    them is right, and this one also where neighbours see the same few. Whether another rank has it, too, is only known
    when they compare.
    """
    return local_rank % visible


def decide(seats: Sequence[Seat], may_share: bool) -> tuple[bool, str | None]:
    """Whether all ranks stay on what they would take, or compute on the CPU instead; and what has to be said of it.

    Args:
        seats: of all ranks, the same on each, so that all decide alike.
        may_share: several ranks may compute on one GPU.

    Raises:
        ValueError: some would take a GPU and some not, or several the same one that was asked for.
    """
    gpu, cpu = [s for s in seats if s.on_gpu], [s for s in seats if not s.on_gpu]
    if gpu and cpu:
        raise ValueError(
            f"ranks {[s.rank for s in cpu]} would compute on the CPU ({_why(cpu[0])}), and ranks "
            f"{[s.rank for s in gpu]} on GPUs: start all where there are GPUs, or give device='cpu' on all of them"
        )
    crowded = _shared(seats)
    if not crowded or (may_share and all(s.asked is not None for s in seats)):
        return True, None
    if all(s.asked is None for s in seats):
        return False, (
            f"{_crowd(crowded)}, so all {len(seats)} ranks compute on the CPU, and no GPU is used: {REMEDY}; or give "
            "device='cpu'"
        )
    raise ValueError(f"{_crowd(crowded)}: {REMEDY}; or share it on purpose with backend='gloo'")


def check_own_gpus(seats: Sequence[Seat]) -> None:
    """Raises:
    ValueError: two ranks are on one GPU; NCCL would refuse that, or wait for ever.
    """
    crowded = _shared(seats)
    if crowded:
        raise ValueError(f"{_crowd(crowded)}: {REMEDY}, and give each rank its own device; or device='cpu'")


def _why(seat: Seat) -> str:
    if seat.asked is not None:
        return f"rank {seat.rank} was asked to take {seat.asked}"
    return f"rank {seat.rank} sees {seat.visible} GPUs on {seat.host}"


def _shared(seats: Sequence[Seat]) -> list[list[Seat]]:
    """The ranks of each GPU that several take."""
    by_gpu: dict[str, list[Seat]] = {}
    for seat in seats:
        if seat.on_gpu and seat.gpu is not None:
            by_gpu.setdefault(seat.gpu, []).append(seat)
    return [each for each in by_gpu.values() if len(each) > 1]


def _crowd(crowded: Sequence[Sequence[Seat]]) -> str:
    first = crowded[0]
    more = f" (and {len(crowded) - 1} more GPUs are shared)" if len(crowded) > 1 else ""
    names = sorted({s.device for s in first})
    return (
        f"ranks {[s.rank for s in first]} would share the GPU {first[0].gpu} of {first[0].host}, which is "
        f"{' and '.join(names)} to them; each sees {first[0].visible}{more}"
    )
