"""Environment variables by which launchers and clusters tell a process of its ranks."""

from collections.abc import Mapping

PREFIXES = (
    *("RANK", "LOCAL_", "WORLD_", "NODE_RANK", "MASTER_", "GROUP_", "ROLE_", "TASKS"),
    *("TORCHELASTIC_", "PET_", "SLURM_", "OMPI_", "PMI", "OMP_NUM_THREADS"),
)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without these variables, which the user's shell may have and no test expects."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIXES)}
