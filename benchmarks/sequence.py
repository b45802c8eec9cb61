"""``python -m benchmarks.sequence``: memory and time of a pass, forward and backward, of ranks that share a sequence.

A small Llama (random weights, fp32) with its own loss, in fresh processes for each line. Peak memory is what the
process holds at most during the pass beyond what it held before it (Linux' ``VmHWM``, set back before), so activations,
logits and gradients; of several ranks that with the most. ``1/N`` is the share of one rank's.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.table import replace_section

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "inside" / "benchmark-tables.md"
MIB = 1024**2
VOCABULARY, WIDTH = 256, 32


def made(layers: int, heads: int, length: int) -> nn.Module:
    """The same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=WIDTH * 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=length,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def held(what: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {what}: this needs Linux")


def measured(mode: str, ranks: int, layers: int, heads: int, length: int) -> tuple[int, float, float]:
    """Peak bytes of a pass beyond what was held before, its seconds, and the loss."""
    from shardwise.core.comm import GroupMaker
    from shardwise.core.parallel.sequence import share_sequences
    from shardwise.plan import SequencePlan

    torch.set_num_threads(1)
    model = made(layers, heads, length)
    maker = GroupMaker(torch.device("cpu"), None, 3600.0)
    if ranks > 1:
        line = [list(range(ranks))]
        group, wire = maker.make("sp", line), maker.make_wire("sp", line)
        share_sequences(model, SequencePlan(mode=mode), group, wire).install()  # type: ignore[arg-type]
    small = torch.arange(64).view(1, -1)
    model(input_ids=small, labels=small).loss.backward()  # what is made once
    model.zero_grad()
    ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))
    before = held("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return held("VmHWM") - before, time.perf_counter() - start, float(loss.detach())


def main() -> None:
    from shardwise.testing import close_pools, run_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192], help="in tokens, up to 131072 say")
    parser.add_argument("--modes", nargs="+", default=["ring_attn", "all_to_all"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--write", action="store_true", help=f"replace the section in {DOCUMENT.name}")
    options = parser.parse_args()
    if sys.platform != "linux":
        raise SystemExit(f"{sys.platform}: peak memory is read from /proc, which Linux has")
    lines = ["| tokens | ranks | mode | peak of a rank | one rank's | of it | seconds |", "|" + "---|" * 7]
    print("\n".join(lines), flush=True)
    for length in options.lengths:
        alone, expected = 0, 0.0
        for mode, ranks in [("", 1), *[(mode, options.ranks) for mode in options.modes]]:
            found = run_ranks(ranks, measured, mode, ranks, options.layers, options.heads, length, timeout=3600.0)
            close_pools()
            peak, seconds, loss = max(row[0] for row in found), max(row[1] for row in found), found[0][2]
            if ranks == 1:
                alone, expected = peak, loss
            if abs(loss - expected) > 1e-5 * expected:
                raise RuntimeError(f"{mode} over {ranks} ranks: a loss of {loss}, and one rank has {expected}")
            name = mode or "(one rank)"
            sizes = f"{peak / MIB:.0f} MiB | {alone / MIB:.0f} MiB | {peak / alone:.2f} (1/N {1 / ranks:.2f})"
            lines.append(f"| {length} | {ranks} | {name} | {sizes} | {seconds:.1f} |")
            print(lines[-1], flush=True)
    if options.write:
        replace_section(DOCUMENT, "sequence", "\n".join(lines))


if __name__ == "__main__":
    main()
