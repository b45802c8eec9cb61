"""``search_chunk_configuration``: the search that GeminiPlugin makes, for programs that make it themselves."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise.checked import as_kind
from shardwise.chunk.search import search_chunk_numel, waste_numel
from shardwise.comm import ranks_of
from shardwise.plan import BySearch

__all__ = ["search_chunk_configuration"]

MEBI = 2**20


def search_chunk_configuration(
    model: nn.Module,
    search_range_m: float,
    search_interval: int,
    min_chunk_size_m: float = 32,
    filter_exlarge_params: bool = True,
    strict_ddp_flag: bool = False,
    process_group: dist.ProcessGroup | None = None,
    memstas: Any = None,
) -> tuple[dict[int, dict[str, Any]], int, int]:
    """The chunk size that leaves least empty at the ends of chunks, for ``chunk_config_dict=`` of GeminiPlugin and
    GeminiDDP.

    Args:
        model: whose parameters are packed, in their order.
        search_range_m: sizes up to that many times 2**20 elements above the smallest are tried,
        search_interval: in steps of that many elements.
        min_chunk_size_m: the least size, times 2**20 elements; a smaller model is one chunk that stays gathered.
        filter_exlarge_params: both values are the same: a parameter far larger than the others has a chunk of its own.
        strict_ddp_flag: both values are the same: all ranks have the same parameters.
        process_group: the ranks that share a chunk; ``None``: all.
        memstas: ``None``, or a record of a step, whose order is not used.

    Returns:
        ``{ranks: {"chunk_size": elements, "keep_gathered": bool}}``; the model's elements; the elements left empty.

    Raises:
        ValueError: a number out of range.
    """
    as_kind("model", model, nn.Module, "an nn.Module")
    numels = [parameter.numel() for parameter in model.parameters()]
    ranks = len(ranks_of("process_group", process_group)) if dist.is_initialized() else 1
    packing = BySearch(
        search_range_numel=round(search_range_m * MEBI),
        interval_numel=search_interval,
        min_chunk_numel=max(1, round(min_chunk_size_m * MEBI)),
    )
    total = sum(numels)
    if total < packing.min_chunk_numel:
        return {ranks: {"chunk_size": max(1, total), "keep_gathered": True}}, total, 0
    size = search_chunk_numel(numels, packing)
    config = {"chunk_size": math.ceil(size / ranks) * ranks, "keep_gathered": False}
    return {ranks: config}, total, waste_numel(numels, size)
