"""``python -m benchmarks.eight_bits``: bytes on the wire and losses of the same run in fp32, bf16 and 8 bits.

One Llama (random weights, untied) trains over gloo, without shared memory, so that everything travels: by ZeRO-2, by
ZeRO-3, and with layers cut over two ranks. Bytes are those that one rank sends of parameters, gradients and activations
in its last step; what the ranks agree on besides is not counted. They are the same on every machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.parts import VOCABULARY, made
from benchmarks.table import MIB, replace_section

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "inside" / "benchmark-tables.md"
RANKS = 2
NUMBERS = ("fp32", "bf16", "fp8")
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def trained(layout: str, numbers: str, width: int, layers: int, steps: int) -> tuple[int, float]:
    """Bytes that this rank sends in the last step, and that step's loss."""
    import torch.distributed as dist

    from shardwise.plan import replicated, zero
    from shardwise.session import build

    torch.set_num_threads(1)
    half = None if numbers == "fp32" else torch.bfloat16
    plans = {"ZeRO-2": zero(2, half), "ZeRO-3": zero(3, half), "tp2": replicated(half).but(tp=RANKS)}
    plan = plans[layout].but(shared_memory=False, compress="fp8" if numbers == "fp8" else None)
    model = made(width, layers)
    session = build(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan)
    # Ranks with parts of layers see the same.
    seed = 0 if layout == "tp2" else dist.get_rank()
    ids = torch.randint(0, VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(seed))
    for _ in range(steps):
        session.reset_traffic()
        loss = session.module(input_ids=ids, labels=ids).loss
        session.backward(loss)
        session.optimizer.step()
    sent = sum(session.traffic()[kind] for kind in KINDS)
    session.close()
    session.mesh.close()
    return sent, float(loss.detach())


def main() -> None:
    from shardwise.testing import close_pools, run_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--write", action="store_true", help=f"replace the section in {DOCUMENT.name}")
    options = parser.parse_args()
    lines = [
        "| | fp32 | bf16 | 8 bits | to bf16 | loss in fp32 | bf16 | 8 bits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for layout in ("ZeRO-2", "ZeRO-3", "tp2"):
        found = [
            run_ranks(RANKS, trained, layout, numbers, options.width, options.layers, options.steps, timeout=600.0)[0]
            for numbers in NUMBERS
        ]
        sent = " | ".join(f"{each / MIB:.2f} MiB" for each, _ in found)
        losses = " | ".join(f"{loss:.3f}" for _, loss in found)
        lines.append(f"| {layout} | {sent} | {found[2][0] / found[1][0]:.3f} | {losses} |")
        print(lines[-1], flush=True)
    close_pools()
    if options.write:
        replace_section(DOCUMENT, "eight bits", "\n".join(lines))


if __name__ == "__main__":
    main()
