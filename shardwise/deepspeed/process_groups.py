"""``deepspeed.utils.groups``: which ranks hold parts of the same model, and which see different data.

They are those of the engine that was made last, and of the ``mpu`` that it was given; before one, all ranks are
data-parallel.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.distributed import ProcessGroup

from shardwise.core.mesh import Mesh
from shardwise.deepspeed.collectives import (
    get_global_rank,
    get_rank,
    get_world_group,
    get_world_size,
)
from shardwise.deepspeed.groups import DATA, MODEL
from shardwise.session import Session

__all__ = ["get_data_parallel_group", "get_model_parallel_group", "remember_groups"]

_last: list[tuple[weakref.ref[Session], Any]] = []


def remember_groups(session: Session, mpu: Any) -> None:
    """Those of ``session``, and of the ``mpu`` that it was made with, count from here on."""
    _last[:] = [(weakref.ref(session), mpu)]


def _mesh() -> Mesh | None:
    session = _last[0][0]() if _last else None
    return None if session is None else session.mesh


def _mpu() -> Any:
    return _last[0][1] if _last else None


def get_data_parallel_group() -> ProcessGroup:
    """The ranks that see different data, and share the shards of what this one has a part of."""
    mpu, mesh = _mpu(), _mesh()
    if mpu is not None:
        return getattr(mpu, DATA)()  # type: ignore[no-any-return]
    if mesh is None or mesh.device_mesh is None or mesh.tensor.size == 1:
        return get_world_group() if mesh is None or mesh.members is None else mesh.members.process_group
    axis = "dp_shard" if mesh.replicate.size == 1 else "dp_replicate"
    if mesh.shard.size > 1 and mesh.replicate.size > 1:
        raise NotImplementedError(
            f"the data-parallel group of {mesh!r}: it is of two axes and torch has none; session.mesh has both"
        )
    return mesh.device_mesh.get_group(axis)


def get_data_parallel_world_size() -> int:
    """How many see different data, ranks that share sequences counted each by itself."""
    mpu, mesh = _mpu(), _mesh()
    if mpu is not None or mesh is None:
        return get_world_size(get_data_parallel_group() if mpu is not None else None)
    return mesh.size


def get_data_parallel_rank() -> int:
    """This rank's number among them."""
    mpu, mesh = _mpu(), _mesh()
    if mpu is not None or mesh is None:
        return get_rank(get_data_parallel_group() if mpu is not None else None)
    return mesh.rank


def get_model_parallel_group() -> ProcessGroup | None:
    """The ranks with other parts of the same layers; ``None`` where each has all of them."""
    mpu, mesh = _mpu(), _mesh()
    for name in MODEL if mpu is not None else ():
        if hasattr(mpu, name):
            return getattr(mpu, name)()  # type: ignore[no-any-return]
    if mesh is None or mesh.device_mesh is None or mesh.tensor.size == 1:
        return None
    return mesh.device_mesh.get_group("tp")


def get_model_parallel_world_size() -> int:
    """How many ranks hold one model together."""
    group = get_model_parallel_group()
    return 1 if group is None else get_world_size(group)


def get_model_parallel_rank() -> int:
    """This rank's number among them."""
    group = get_model_parallel_group()
    return 0 if group is None else get_rank(group)


def get_tensor_model_parallel_src_rank() -> int:
    """The first of them, among all processes."""
    group = get_model_parallel_group()
    return get_rank() if group is None else get_global_rank(group, 0)


def get_sequence_parallel_world_size() -> int:
    """How many ranks see parts of the same sequences."""
    mesh = _mesh()
    return 1 if mesh is None else mesh.sequence.size


def get_sequence_parallel_rank() -> int:
    """This rank's number among them."""
    mesh = _mesh()
    return 0 if mesh is None else mesh.sequence.rank


def get_sequence_parallel_group() -> ProcessGroup | None:
    """``None`` where none share sequences.

    Raises:
        NotImplementedError: some do: the exchange is the engine's, and torch has no group of them.
    """
    if get_sequence_parallel_world_size() == 1:
        return None
    raise NotImplementedError(
        f"a torch group of the {get_sequence_parallel_world_size()} ranks that share sequences: the model exchanges by "
        "itself what they need; make one with torch.distributed.new_group for anything else"
    )
