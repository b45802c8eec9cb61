"""Assignment of devices to ranks: one GPU per rank if there are enough GPUs, and no silent sharing of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

REMEDY = (
    "start as many ranks on a host as it has GPUs, or give each its own (CUDA_VISIBLE_DEVICES, or Slurm's "
    "--gpus-per-task=1)"
)


@dataclass(frozen=True)
class RankDevice:
    """The device that one rank would choose without the other ranks.

    Attributes:
        rank: the rank.
        host: the name of its host.
        requested: the device that the user gave, or ``None``.
        device: the device that it would choose: ``"cpu"`` or ``"cuda:<index>"``.
        gpu: the identity of that GPU; ``None`` if it has none, or the device is the CPU.
        visible: the number of visible GPUs.
    """

    rank: int
    host: str
    requested: str | None
    device: str
    gpu: str | None
    visible: int

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


def own_index(local_rank: int, visible: int) -> int:
    """Return which of the ``visible`` GPUs (at least 1) a rank chooses without the other ranks.

    If the rank sees all GPUs of the host, that is the one with its local rank. If it sees fewer, any of them is valid,
    and this choice also works if adjacent ranks see the same GPUs. Ranks that chose the same GPU detect it when they
    compare their choices.
    """
    return local_rank % visible


def decide(devices: Sequence[RankDevice], may_share: bool) -> tuple[bool, str | None]:
    """Return whether all ranks keep their devices (otherwise all use the CPU), and a warning for that case.

    Args:
        devices: choices of all ranks; the same list on each, so that all decide the same.
        may_share: several ranks may compute on one GPU.

    Raises:
        ValueError: some ranks would use a GPU and some not, or several ranks the same GPU that the user gave.
    """
    gpu, cpu = [s for s in devices if s.on_gpu], [s for s in devices if not s.on_gpu]
    if gpu and cpu:
        raise ValueError(
            f"ranks {[s.rank for s in cpu]} would compute on the CPU ({_why(cpu[0])}), and ranks "
            f"{[s.rank for s in gpu]} on GPUs. Start all ranks where there are GPUs, or give device='cpu' on all"
        )
    crowded = _shared(devices)
    if not crowded or (may_share and all(s.requested is not None for s in devices)):
        return True, None
    if all(s.requested is None for s in devices):
        return False, (
            f"{_crowd(crowded)}, so all {len(devices)} ranks compute on the CPU, and no GPU is used. To use GPUs, "
            f"{REMEDY}. To silence this warning, give device='cpu'"
        )
    raise ValueError(f"{_crowd(crowded)}. To fix it, {REMEDY}; to share the GPU on purpose, give backend='gloo'")


def check_own_gpus(devices: Sequence[RankDevice]) -> None:
    """Raise ValueError if two ranks are on one GPU, since NCCL would refuse that, or hang."""
    crowded = _shared(devices)
    if crowded:
        raise ValueError(f"{_crowd(crowded)}. To fix it, {REMEDY}; or give device='cpu'")


def _why(seat: RankDevice) -> str:
    if seat.requested is not None:
        return f"rank {seat.rank} was given device={seat.requested!r}"
    return f"rank {seat.rank} sees {seat.visible} GPUs on {seat.host}"


def _shared(devices: Sequence[RankDevice]) -> list[list[RankDevice]]:
    """Return the ranks of each GPU that several ranks chose."""
    by_gpu: dict[str, list[RankDevice]] = {}
    for seat in devices:
        if seat.on_gpu and seat.gpu is not None:
            by_gpu.setdefault(seat.gpu, []).append(seat)
    return [each for each in by_gpu.values() if len(each) > 1]


def _crowd(crowded: Sequence[Sequence[RankDevice]]) -> str:
    first = crowded[0]
    more = f" (and {len(crowded) - 1} more GPUs are shared)" if len(crowded) > 1 else ""
    names = sorted({s.device for s in first})
    return (
        f"ranks {[s.rank for s in first]} would share the GPU {first[0].gpu} of {first[0].host}, which is "
        f"{' and '.join(names)} to them; each sees {first[0].visible} GPUs{more}"
    )
