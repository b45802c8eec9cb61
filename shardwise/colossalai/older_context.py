"""``legacy``: the global context of programs that are plain data-parallel, and their configuration."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.booster.process_groups import ProcessGroupMesh
from shardwise.colossalai import starting
from shardwise.colossalai.programs import set_seed

__all__ = [
    "AmpType",
    "Config",
    "GlobalContext",
    "ParallelMode",
    "global_context",
    "is_using_pp",
    "launch",
    "launch_from_torch",
]


class ParallelMode(Enum):
    """Which ranks are meant. Those beside ``GLOBAL`` and ``DATA`` are this one alone."""

    GLOBAL = "global"
    DATA = "data"
    MODEL = "model"
    PIPELINE = "pipe"
    TENSOR = "tensor"
    SEQUENCE = "sequence"
    SEQUENCE_DP = "sequence_dp"
    PARALLEL_1D = "1d"
    PARALLEL_2D_ROW = "2d_row"
    PARALLEL_2D_COL = "2d_col"
    PARALLEL_3D_INPUT = "3d_input"
    PARALLEL_3D_WEIGHT = "3d_weight"
    PARALLEL_3D_OUTPUT = "3d_output"
    PARALLEL_2P5D_ROW = "2p5d_row"
    PARALLEL_2P5D_COL = "2p5d_col"
    PARALLEL_2P5D_DEP = "2p5d_dep"
    PARALLEL_2P5D_XZ = "2p5d_xz"


class AmpType(Enum):
    """Ways to compute in 16 bits that older configurations name. ``Booster(mixed_precision="fp16")`` is torch's."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"


class Config(dict[str, Any]):
    """A mapping whose entries are attributes, too; mappings in it are alike."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        for key, value in (config or {}).items():
            self[key] = Config(value) if isinstance(value, Mapping) else value

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no {name!r}, but {sorted(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    @staticmethod
    def from_file(filename: str | Path) -> Config:
        """The names that a Python file binds, which is run for that.

        Raises:
            ValueError: it is no Python file.
        """
        if Path(filename).suffix != ".py":
            raise ValueError(f"config={str(filename)!r}: give a Python file, or a mapping")
        return Config({k: v for k, v in runpy.run_path(str(filename)).items() if not k.startswith("__")})


class GlobalContext:
    """Who this process is. All ranks are data-parallel; models are divided by HybridParallelPlugin.

    Attributes:
        config: what the program was launched with.
    """

    def __init__(self) -> None:
        self.config = Config()

    def load_config(self, config: Mapping[str, Any] | str | Path) -> None:
        """Take a configuration, of a mapping or of a Python file.

        Raises:
            NotImplementedError: it divides models.
        """
        loaded = Config.from_file(config) if isinstance(config, str | Path) else Config(config)
        parallel = loaded.get("parallel") or {}
        for name, given in parallel.items():
            size = given.get("size", 1) if isinstance(given, Mapping) else given
            if name != "data" and size not in (None, 1):
                raise NotImplementedError(
                    f"config: parallel={{{name!r}: {given!r}}}: boost the model with HybridParallelPlugin(tp_size=, "
                    "pp_size=, sp_size=) instead"
                )
        self.config = loaded

    @staticmethod
    def _met() -> bool:
        return dist.is_available() and dist.is_initialized()

    @staticmethod
    def _wide(parallel_mode: ParallelMode) -> bool:
        if not isinstance(parallel_mode, ParallelMode):
            raise TypeError(f"parallel_mode={parallel_mode!r}: give a ParallelMode")
        return parallel_mode in (ParallelMode.GLOBAL, ParallelMode.DATA)

    def is_initialized(self, parallel_mode: ParallelMode) -> bool:
        """Whether there are such ranks: once the processes have met, in the modes of more than one."""
        return self._wide(parallel_mode) and self._met()

    def get_global_rank(self) -> int:
        """This process' among all."""
        return dist.get_rank() if self._met() else 0

    def get_local_rank(self, parallel_mode: ParallelMode) -> int:
        """This process' among the ranks of a mode."""
        return self.get_global_rank() if self._wide(parallel_mode) else 0

    def get_world_size(self, parallel_mode: ParallelMode) -> int:
        """Ranks of a mode."""
        return dist.get_world_size() if self._wide(parallel_mode) and self._met() else 1

    def get_ranks_in_group(self, parallel_mode: ParallelMode) -> list[int]:
        """Of a mode, among all."""
        wide = self._wide(parallel_mode)
        return list(range(self.get_world_size(parallel_mode))) if wide else [self.get_global_rank()]

    def get_group(self, parallel_mode: ParallelMode) -> dist.ProcessGroup:
        """Of the ranks of a mode. Those of one rank are made at first use, which is collective over all.

        Raises:
            RuntimeError: the processes have not met.
        """
        if not self._met():
            raise RuntimeError(f"get_group({parallel_mode}) before the processes have met: launch first")
        world = dist.group.WORLD
        if self._wide(parallel_mode) and world is not None:
            return world
        mesh = ProcessGroupMesh(dist.get_world_size(), 1)
        group = mesh.get_group_along_axis(1)
        assert group is not None
        return group

    def is_first_rank(self, parallel_mode: ParallelMode) -> bool:
        """Whether this is the first of a mode."""
        return self.get_local_rank(parallel_mode) == 0

    def is_last_rank(self, parallel_mode: ParallelMode) -> bool:
        """Whether this is the last of a mode."""
        return self.get_local_rank(parallel_mode) == self.get_world_size(parallel_mode) - 1

    def is_pipeline_first_stage(self, ignore_virtual: bool = False) -> bool:
        """True: the model is in one piece."""
        return True

    def is_pipeline_last_stage(self, ignore_virtual: bool = False) -> bool:
        """True: the model is in one piece."""
        return True

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different data."""
        return self.get_world_size(ParallelMode.DATA)

    tensor_parallel_size = pipeline_parallel_size = 1

    def set_seed(self, seed: int) -> None:
        """Start random numbers from ``seed``, the same on every rank."""
        set_seed(seed)

    def destroy(self) -> None:
        """Leave the process group."""
        if self._met():
            dist.destroy_process_group()


global_context = GlobalContext()


def is_using_pp() -> bool:
    """False: a model in stages is HybridParallelPlugin's."""
    return False


def launch(
    config: Mapping[str, Any] | str | Path,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str = "nccl",
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """:func:`shardwise.colossalai.starting.launch` with a configuration, which ``global_context.config`` is then."""
    global_context.load_config(config)
    starting.launch(rank, world_size, host, port, backend, local_rank, seed, verbose)


def launch_from_torch(
    config: Mapping[str, Any] | str | Path, backend: str = "nccl", seed: int = 1024, verbose: bool = True
) -> None:
    """:func:`launch` with torchrun's variables."""
    global_context.load_config(config)
    starting.launch_from_torch(backend, seed, verbose)
