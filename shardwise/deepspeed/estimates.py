"""What model, gradients and Adam's state will take, before anything is built: DeepSpeed's estimators, for this engine.

For 16-bit parameters with fp32 masters, Psi parameters and N ranks: 2 Psi of parameters (2 Psi/N at stage 3), 2 Psi/N
of reduced gradients, 4 Psi/N of masters and 8 Psi/N of Adam's state, as docs/architecture.md promises; beside them two
exchange buffers of the largest chunk, and at stage 3 the layer that runs. Activations are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.checked import MOST_NUMEL, number, whole
from shardwise.sizes import size_text

__all__ = [
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]

HALF, SINGLE = 2, 4
"""Bytes of an element."""
MASTERS_AND_STATE, GRADIENTS = 12, 2
BUCKET_NUMEL, MIN_CHUNKS = 500_000_000, 8
"""Of stages 1 and 2: a chunk has at most so many elements, and there are at least so many chunks."""


def _parameters(name: str, count: float) -> int:
    return whole(name, count, 1, MOST_NUMEL, "a number of parameters", floats=True)


def _ranks(num_gpus_per_node: int, num_nodes: int, factor: float) -> int:
    number("additional_buffer_factor", factor, "(0, inf)")
    gpus = whole("num_gpus_per_node", num_gpus_per_node, 1, what="a number of GPUs")
    return gpus * whole("num_nodes", num_nodes, 1, what="a number of nodes")


def _host(total_params: int, ranks: int, kept: int, built: int) -> float:
    """A rank's host memory: what training keeps there (bytes a parameter over all ranks), or what the build needs.

    While a model is built, ``built`` bytes a parameter are there beside masters and gradients, where these are at home
    in host memory; Adam's state comes with the first step.
    """
    arena = kept - 8 if kept > MASTERS_AND_STATE else kept
    return max(total_params * kept / ranks, total_params * built + total_params * arena / ranks)


def estimate_zero2_model_states_mem_needs(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of host memory a node, times ``additional_buffer_factor``, and of GPU memory a rank, at stage 2.

    Args:
        total_params: of the model; 2851e6 is as good as 2851000000.
        num_gpus_per_node, num_nodes: the ranks.
        cpu_offload: masters and Adam's state are at home in host memory.
        additional_buffer_factor: for what else a process has there.

    Raises:
        ValueError: a number below 1, or a factor that is not positive.
    """
    total_params = _parameters("total_params", total_params)
    ranks = _ranks(num_gpus_per_node, num_nodes, additional_buffer_factor)
    state = MASTERS_AND_STATE + GRADIENTS
    exchange = 2 * HALF * min(BUCKET_NUMEL, -(-total_params // MIN_CHUNKS))
    device = HALF * total_params + exchange + (0 if cpu_offload else state * total_params / ranks)
    host = _host(total_params, ranks, state if cpu_offload else 0, SINGLE)
    return int(host * num_gpus_per_node * additional_buffer_factor), int(device)


def estimate_zero3_model_states_mem_needs(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """The same at stage 3, and bytes of the layer that runs with its exchange buffers, which are in the second.

    Args:
        total_params, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor: see
            :func:`estimate_zero2_model_states_mem_needs`.
        largest_layer_params: of the module with most parameters of its own.
        cpu_offload_params: so are the shards of parameters.
        zero_init: the model is made in ``zero.Init``.
    """
    total_params = _parameters("total_params", total_params)
    ranks = _ranks(num_gpus_per_node, num_nodes, additional_buffer_factor)
    largest_layer_params = _parameters("largest_layer_params", largest_layer_params)
    layer = 3 * HALF * largest_layer_params  # gathered, and twice on its way
    on_host = (MASTERS_AND_STATE + GRADIENTS) * cpu_offload + HALF * cpu_offload_params
    device = layer + (MASTERS_AND_STATE + GRADIENTS + HALF - on_host) * total_params / ranks
    host = _host(total_params, ranks, on_host, 0 if zero_init else SINGLE)
    host += SINGLE * largest_layer_params * zero_init  # values are made one tensor after the other
    return int(host * num_gpus_per_node * additional_buffer_factor), int(device), layer


def _counted(model: nn.Module) -> tuple[int, int]:
    """Parameters of a model (tied ones once), and of its largest module by itself. They need no memory yet."""
    total = sum(param.numel() for param in model.parameters())
    return total, max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())


def _print(stage: int, facts: str, gpus: int, nodes: int, rows: Sequence[tuple[int, int, str]]) -> None:
    lines = [
        f"Memory of parameters, gradients and Adam's state at ZeRO-{stage}, in 16 bits with fp32 masters",
        f"{facts}; {nodes} x {gpus} GPUs (nodes x GPUs of each); activations are not in it",
        f"{'host, a node':>14} | {'GPU, each':>12} | configuration",
        *(f"{size_text(host):>14} | {size_text(device):>12} | {options}" for host, device, options in rows),
    ]
    print("\n".join(lines), flush=True)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print a table for a model that is there."""
    total, _ = _counted(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print a table for a model of so many parameters: with and without offloading."""
    rows = []
    for offload in (True, False):
        found = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        rows.append((*found, f"offload_optimizer={_where(offload)}"))
    _print(2, f"{int(total_params):,} parameters", num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print a table for a model that is there."""
    total, largest = _counted(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print a table for a model of so many parameters: every way to offload, with and without ``zero.Init``."""
    rows = []
    for state, params in ((True, True), (True, False), (False, False)):
        for init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                state,
                params,
                init,
                additional_buffer_factor,
            )
            options = f"offload_param={_where(params)}, offload_optimizer={_where(state)}, zero_init={int(init)}"
            rows.append((host, device, options))
    facts = f"{int(total_params):,} parameters, {int(largest_layer_params):,} in the largest layer"
    _print(3, facts, num_gpus_per_node, num_nodes, rows)


def _where(offload: bool) -> str:
    return "cpu " if offload else "none"
