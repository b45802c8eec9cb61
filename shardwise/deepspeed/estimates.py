"""What model, gradients and Adam's state will take, before anything is built: DeepSpeed's estimators, for this engine.

For 16-bit parameters with fp32 masters, Psi parameters and N ranks: 2 Psi of parameters (2 Psi/N at stage 3), 2 Psi/N
of reduced gradients, 4 Psi/N of masters and 8 Psi/N of Adam's state, as docs/architecture.md promises; beside them
exchange buffers, and at stage 3 the layer that runs. Activations are not in it. Of a frozen parameter there is nothing
but its 2 bytes. Chunks hold whole parameters, so where only counts are known none is taken to be larger than a chunk
may be; of a model that is there the sizes are seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.checked import MOST_NUMEL, number, whole
from shardwise.sizes import size_classes, size_text

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
MASTERS_AND_STATE, ADAM, GRADIENTS = 12, 8, 2
BUCKET_NUMEL, MIN_CHUNKS = 500_000_000, 8
"""Of stages 1 and 2: a chunk has at most so many elements, and there are at least so many chunks."""


def _parameters(name: str, count: float) -> int:
    return whole(name, count, 1, MOST_NUMEL, "a number of parameters", floats=True)


def _ranks(num_gpus_per_node: int, num_nodes: int, factor: float) -> int:
    number("additional_buffer_factor", factor, "(0, inf)")
    gpus = whole("num_gpus_per_node", num_gpus_per_node, 1, what="a number of GPUs")
    return gpus * whole("num_nodes", num_nodes, 1, what="a number of nodes")


@dataclass(frozen=True)
class _Sizes:
    """Of a model, in parameters: all of it, what is trained, the largest layer, and each trained parameter by itself
    (``None``: only counts are known)."""

    total: int
    trained: int
    layer: int = 1
    each: tuple[int, ...] | None = None

    @classmethod
    def of(cls, model: nn.Module) -> _Sizes:
        """Tied parameters count once. They need no memory yet."""
        each = tuple(param.numel() for param in model.parameters() if param.requires_grad)
        return cls(
            total=_parameters("total_params", sum(param.numel() for param in model.parameters())),
            trained=sum(each),
            layer=max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()),
            each=each,
        )

    def exchanged(self, stage: int) -> int:
        """Elements of the exchange buffers."""
        if stage == 3:
            return _buffers((self.layer, self.layer) if self.each is None else self.each)
        most = min(BUCKET_NUMEL, -(-self.total // MIN_CHUNKS))
        larger = [numel for numel in self.each or () if numel > most]
        rest = self.trained - sum(larger)
        return _buffers((*larger, min(most, rest), min(most, max(rest - most, 0))))


def _buffers(chunks: Sequence[int]) -> int:
    """Two of the largest for chunks of a class of sizes, as ``reduce.grads.SlotPool`` has them."""
    return sum(chunks[places[0]] * min(len(places), 2) for places in size_classes(chunks))


def _host(sizes: _Sizes, ranks: int, state: bool, params: bool, built: int) -> float:
    """A rank's host memory: what training keeps there of state and parameters, or what the build needs.

    While a model is built, ``built`` bytes are there beside parameters, masters and gradients, where these are at home
    in host memory; Adam's state comes with the first step.
    """
    shards = (HALF * params * sizes.total + (MASTERS_AND_STATE + GRADIENTS) * state * sizes.trained) / ranks
    return max(shards, built + shards - ADAM * state * sizes.trained / ranks)


def _stage_2(sizes: _Sizes, gpus: int, nodes: int, offload: bool, factor: float) -> tuple[int, int]:
    ranks = _ranks(gpus, nodes, factor)
    state = (MASTERS_AND_STATE + GRADIENTS) * sizes.trained / ranks
    device = HALF * sizes.total + HALF * sizes.exchanged(2) + (0 if offload else state)
    return int(_host(sizes, ranks, offload, False, SINGLE * sizes.total) * gpus * factor), int(device)


def _stage_3(
    sizes: _Sizes, gpus: int, nodes: int, state: bool, params: bool, init: bool, factor: float
) -> tuple[int, int, int]:
    ranks = _ranks(gpus, nodes, factor)
    layer = HALF * (sizes.layer + sizes.exchanged(3))  # gathered, and on its way
    kept = (MASTERS_AND_STATE + GRADIENTS) * (not state) * sizes.trained + HALF * (not params) * sizes.total
    host = _host(sizes, ranks, state, params, 0 if init else SINGLE * sizes.total)
    host += SINGLE * sizes.layer * init  # values are made one tensor after the other
    return int(host * gpus * factor), int(layer + kept / ranks), layer


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
    total = _parameters("total_params", total_params)
    return _stage_2(_Sizes(total, total), num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor)


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

    Where ``stage3_max_live_parameters`` is 0; by default more stays gathered.

    Args:
        total_params, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor: see
            :func:`estimate_zero2_model_states_mem_needs`.
        largest_layer_params: of the module with most parameters of its own.
        cpu_offload_params: so are the shards of parameters.
        zero_init: the model is made in ``zero.Init``.
    """
    total = _parameters("total_params", total_params)
    sizes = _Sizes(total, total, _parameters("largest_layer_params", largest_layer_params))
    return _stage_3(
        sizes, num_gpus_per_node, num_nodes, cpu_offload, cpu_offload_params, zero_init, additional_buffer_factor
    )


def _print(sizes: _Sizes, facts: str, gpus: int, nodes: int, title: str, rows: Sequence[tuple[int, int, str]]) -> None:
    frozen = f" ({sizes.total - sizes.trained:,} of them frozen)" if sizes.trained < sizes.total else ""
    lines = [
        f"Memory of parameters, gradients and Adam's state at {title}, in 16 bits with fp32 masters",
        f"{sizes.total:,} parameters{frozen}{facts}; {nodes} x {gpus} GPUs (nodes x GPUs of each); "
        "activations are not in it",
        f"{'host, a node':>14} | {'GPU, each':>12} | configuration",
        *(f"{size_text(host):>14} | {size_text(device):>12} | {options}" for host, device, options in rows),
    ]
    print("\n".join(lines), flush=True)


def _print_2(sizes: _Sizes, gpus: int, nodes: int, factor: float) -> None:
    rows = [
        (*_stage_2(sizes, gpus, nodes, offload, factor), f"offload_optimizer={_where(offload)}")
        for offload in (True, False)
    ]
    _print(sizes, "", gpus, nodes, "ZeRO-2", rows)


def _print_3(sizes: _Sizes, gpus: int, nodes: int, factor: float) -> None:
    rows = []
    for state, params in ((True, True), (True, False), (False, False)):
        for init in (True, False):
            host, device, _ = _stage_3(sizes, gpus, nodes, state, params, init, factor)
            options = f"offload_param={_where(params)}, offload_optimizer={_where(state)}, zero_init={int(init)}"
            rows.append((host, device, options))
    # More may stay gathered by default, up to a size that is no property of the model.
    title = "ZeRO-3 with stage3_max_live_parameters=0"
    _print(sizes, f", {sizes.layer:,} in the largest layer", gpus, nodes, title, rows)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print a table for a model that is there, whose frozen parameters and large ones are seen."""
    _print_2(_Sizes.of(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print a table for a model of so many parameters: with and without offloading."""
    total = _parameters("total_params", total_params)
    _print_2(_Sizes(total, total), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print a table for a model that is there, whose frozen parameters and large ones are seen."""
    _print_3(_Sizes.of(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print a table for a model of so many parameters: every way to offload, with and without ``zero.Init``."""
    total = _parameters("total_params", total_params)
    sizes = _Sizes(total, total, _parameters("largest_layer_params", largest_layer_params))
    _print_3(sizes, num_gpus_per_node, num_nodes, additional_buffer_factor)


def _where(offload: bool) -> str:
    return "cpu " if offload else "none"
