"""``python -m benchmarks.parts``: layers cut over ranks, by shardwise and by torch's ``parallelize_module`` (DTensor).

Both cut the same Llama (random weights, untied) in the same processes and take turns, forward and backward pass alone.
What is compared is the time that the main thread computes, since that is what a GPU would wait for; wall time beside
it. Losses are compared as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.table import replace_section

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "inside" / "benchmark-tables.md"
VOCABULARY = 512


def made(width: int, layers: int) -> nn.Module:
    """The same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 2,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def by_dtensor(model: nn.Module, ranks: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (ranks,))
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)


def by_shardwise(model: nn.Module) -> None:
    import torch.distributed as dist

    from shardwise.core.comm import GroupMaker
    from shardwise.core.parallel.tensor import Axis, cut_model
    from shardwise.plan import TensorPlan

    maker = GroupMaker(torch.device("cpu"), None, 300.0)
    group = maker.make("tp", [list(range(dist.get_world_size()))])
    cutting = cut_model(model, Axis(group), TensorPlan(parallel_output=False, vocabulary_multiple=1))
    cutting.cut_values()
    cutting.install()
    model._maker = maker  # type: ignore[assignment]  # lives as long


def timed(step: Callable[[], float]) -> tuple[float, float, float]:
    """Seconds of the main thread, wall seconds, and the loss."""
    wall, own = time.perf_counter(), time.thread_time()
    loss = step()
    return time.thread_time() - own, time.perf_counter() - wall, loss


def measured(ranks: int, width: int, layers: int, length: int, rounds: int) -> list[tuple[float, float, float, float]]:
    """By round: main-thread and wall seconds of shardwise, and of DTensor."""
    torch.set_num_threads(1)
    ours, theirs = made(width, layers), made(width, layers)
    by_shardwise(ours)
    by_dtensor(theirs, ranks)
    ids = torch.arange(2 * length).view(2, length) % VOCABULARY

    def step(model: nn.Module) -> Callable[[], float]:
        def run() -> float:
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return float(loss.detach())

        return run

    first, second = step(ours), step(theirs)
    found = []
    for index in range(rounds + 2):
        own, wall, loss = timed(first)
        other, other_wall, other_loss = timed(second)
        if abs(loss - other_loss) > 1e-4 * abs(other_loss):
            raise RuntimeError(f"losses {loss} and {other_loss} in round {index}: they compute different things")
        found.append((own, wall, other, other_wall))
    return found[2:]


def main() -> None:
    from shardwise.testing import close_pools, run_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true", help=f"replace the section in {DOCUMENT.name}")
    options = parser.parse_args()
    lines = [
        "| ranks | width | main thread, shardwise | DTensor | ratio | wall ratio |",
        "|---|---|---|---|---|---|",
    ]
    for ranks in options.ranks:
        for width in options.widths:
            by_rank = run_ranks(ranks, measured, ranks, width, options.layers, options.length, options.rounds)
            rows = by_rank[0]
            own, other = statistics.median(row[0] for row in rows), statistics.median(row[2] for row in rows)
            ratio = statistics.median(row[0] / row[2] for row in rows)
            wall = statistics.median(row[1] / row[3] for row in rows)
            times = f"{own * 1e3:.1f} ms | {other * 1e3:.1f} ms"
            lines.append(f"| {ranks} | {width} | {times} | {ratio:.2f} | {wall:.2f} |")
            print(lines[-1], flush=True)
    close_pools()
    if options.write:
        replace_section(DOCUMENT, "parts", "\n".join(lines))


if __name__ == "__main__":
    main()
