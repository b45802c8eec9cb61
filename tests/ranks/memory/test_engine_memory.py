"""Live bytes per rank against the formulas of ZeRO, measured from tensors and not only by ``session.memory()``.

With Psi parameters in bf16, an fp32 master and Adam: weights 2, gradients 2, master and two moments 12 bytes each.
* stage 1: 2 Psi + 2 Psi + 12 Psi / N
* stage 2: 2 Psi + 14 Psi / N + slots
* stage 3: 16 Psi / N + max(budget, what is in use) + slots

Slots are the exchange buffers that unsharded gradients pass through: at most two for all chunks whose sizes lie within
a factor of two, and over messages as many more as ``exchange_bytes`` allows. Scratch memory comes on top, which does
not grow with the model: at most three times the shard of the largest chunk in fp32, for two tiles of the sum over ranks
(bounded by their own size on large models) and one tile of the update.

Over gloo each reduction in flight also has receive buffers, the (N-1) other slices of its chunk: for as many chunks as
there are slots where these limit them (stages 2 and 3), and for all chunks, 2 Psi (N-1)/N, where gradients are
unsharded (stage 1).

``shardwise estimate`` reports the bytes of a build, by tier and kind, without building.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.cli.main import main
from shardwise.core.comm.shared_memory import MappedBuffer
from shardwise.core.update.tile_plan import TILE_NUMEL
from shardwise.plan import ByModule, Plan, zero
from shardwise.session import MemoryReport, Session, Settings, estimate_memory, shard
from shardwise.testing import run_ranks
from tests.support.counters import live_tensor_bytes, live_tensors
from tests.support.engine_setup import PLANS, adam, data, seeded, sharded
from tests.support.models import MODELS
from tests.support.on_ranks import on_ranks
from tests.support.sets import campaign, full

WIDTH, DEPTH = 64, 12
UNIT = WIDTH * WIDTH + WIDTH


def mapped_bytes(session: Session) -> int:
    """Memory of peers that this rank maps: it belongs to them, and is counted there."""
    peers: dict[int, int] = {}
    engine = session._engine
    buffers = [chunk.source.exchange for chunk in engine.shards.chunks] + engine.grads.reducer._buckets._buffers
    buffers += [state.buffer for state in engine.grads.reducer.states if state.buffer is not None]
    for buffer in buffers:
        if isinstance(buffer, MappedBuffer):  # one array, of which a part belongs to this rank
            storage = buffer.local.untyped_storage()
            peers[storage._cdata] = storage.nbytes() - buffer.local.nbytes
            continue
        for whole in (*buffer.peers, *buffer._full[1]):
            if whole.data_ptr() != buffer.local.data_ptr():
                peers[whole.untyped_storage()._cdata] = whole.untyped_storage().nbytes()
    return sum(peers.values())


def measure(plan: Plan) -> tuple[MemoryReport, int]:
    """Return also the storage bytes of all tensors that the session added, without peers' memory mapped here."""
    before = live_tensor_bytes()
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
    with sharded(model, torch.optim.Adam(model.parameters()), plan) as session:
        for _ in range(3):
            loss = session.module(torch.randn(2, WIDTH)).float().square().mean()
            session.backward(loss)
            held = session.memory()
            session.optimizer.step()
        del loss
        return held, live_tensor_bytes() - before - mapped_bytes(session)


def padded(unit_numel: int, ranks: int) -> int:
    """Return the size in 16 bits, where each shard begins at a multiple of 64 bytes."""
    return -(-unit_numel // (32 * ranks)) * 32 * ranks


SETTINGS = [(2, None, 1), *full((2, None, None), (3, False, 0), (3, False, 3))]
SETTINGS += campaign((3, None, None), (2, False, None))


@pytest.mark.parametrize(("world_size", "shared", "more"), SETTINGS)
def test_formulas(world_size: int, shared: bool | None, more: int | None) -> None:
    """``more`` is the number of buffers above two; by default none over mapped memory, and all over messages."""
    unit = padded(UNIT, world_size)
    count = 2 + more if more is not None else (2 if shared is None else DEPTH)
    exchange_bytes = None if more is None else 2 * unit * more
    psi = unit * DEPTH
    share = psi // world_size
    # The fp32 gradient for one call of the optimizer: here all of it, since a tile may be larger.
    assert share < TILE_NUMEL["cpu"]
    scratch = 4 * share + 2 * 4 * unit // world_size
    for stage in (1, 2, 3):
        plan = zero(stage, torch.bfloat16).but(packing=ByModule(unit_classes=()), prefetch=0, shared_memory=shared)
        plan = plan.but(exchange_bytes=exchange_bytes if stage > 1 else None)
        slots = count * 2 * unit
        receive = 0 if shared is None else (world_size - 1) * 2 * (psi if stage == 1 else count * unit) // world_size
        whole = {1: 2 * psi + 2 * psi + 12 * share, 2: 2 * psi + 14 * share + slots, 3: 16 * share + slots}[stage]
        for report, live in run_ranks(world_size, measure, plan):
            assert report.master_bytes == 4 * share
            steps = 4 * 2 * DEPTH * 2  # Adam's step counters: fp32 scalars, at most two shards per parameter
            assert 8 * share - 8 * 32 * DEPTH * world_size <= report.optimizer_bytes <= 8 * share + steps
            assert report.parameters_bytes == (2 * share if stage == 3 else 2 * psi)
            assert report.gradients_bytes == (2 * psi if stage == 1 else 2 * share + slots)
            gathered = 2 * unit if stage == 3 else 0
            assert report.gathered_bytes == report.peak_gathered_bytes == gathered
            # Over shared memory the gathered tensors are the ranks' own shards, and take no memory.
            copied = gathered if shared is False else 0
            assert report.copied_bytes == report.peak_copied_bytes == copied
            assert 0 < report.scratch_bytes <= 4 * share
            assert report.total_bytes - report.scratch_bytes - copied <= whole + steps
            slack = scratch + copied + receive + steps + 4096
            assert whole - slots <= live + copied <= whole + copied + slack, (stage, report, live, whole, slack)


@pytest.mark.parametrize("name", ["zero3", *campaign("zero1", "zero2", "zero3_gloo", "zero2_gloo")])
@on_ranks(2, timeout=120)
def test_nothing_grows_over_a_hundred_steps(name: str) -> None:
    """Live bytes and tensors stay equal after training, evaluation and a few full states.

    A rank that falls behind may keep one more buffer, once; a leak of one tensor in two steps would be 40.
    """
    model, plan, points = seeded(MODELS["residual"].factory), PLANS[name], list[tuple[int, int]]()
    with sharded(model, adam(model, 1e-3), plan) as session:
        for step in range(1, 101):
            session.backward(session.module(data(session.mesh.rank, step)).square().mean())
            session.optimizer.step()
            with torch.no_grad():
                session.module(data(session.mesh.rank, step))
            if step % 10 == 0:
                session.module.state_dict(), session.optimizer.state_dict(), session.full_gradients()
                points.append((live_tensor_bytes(), sum(1 for _ in live_tensors())))
        assert len(session._engine.pool._gathered) <= 2
    (first_bytes, first_count), (last_bytes, last_count) = points[1], points[-1]
    assert last_count <= first_count + 6 and last_bytes <= first_bytes + 3 * 8 * 140, points


TRANSIENT = ("gathered parameters", "idle arrays", "update scratch")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


def make() -> nn.Module:
    """Return a model with sizes that two ranks do not divide, buffers of two dtypes, and a frozen layer."""
    model = nn.Sequential(nn.Linear(64, 47), nn.BatchNorm1d(47), nn.Linear(47, 65), nn.Linear(65, 3))
    model[2].requires_grad_(False)
    return model


def make_llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def check(kind: str, offload: str | None, llama: bool = False, **settings: object) -> None:
    build, batch = (make_llama, torch.ones(2, 5, dtype=torch.long)) if llama else (make, torch.randn(4, 64))
    model = build()
    session = shard(model, getattr(torch.optim, kind)(model.parameters()), offload=offload, device="cpu", **settings)
    for _ in range(2):
        made = session.module(batch)
        session.backward((made.logits if llama else made).float().sum())
        by_tier = session.memory().by_tier
        session.optimizer.step()
        session.optimizer.zero_grad()
    session.close()
    with torch.device("meta"):
        model = build()
    optimizer, mesh = getattr(torch.optim, kind)(model.parameters()), session.mesh
    found = estimate_memory(model, optimizer, session.plan, dist.get_world_size(), mesh.shard.rank, "cpu")
    lasting = {tier: {k: v for k, v in own.items() if k not in TRANSIENT} for tier, own in by_tier.items()}
    assert found == lasting, (kind, offload, settings)


@pytest.mark.parametrize("stage", [1, 2, 3, *full(0)])
@on_ranks(2)
def test_estimate_equals_the_accounts_of_a_build(stage: int, tmp_path: Path) -> None:
    for offload in (None, "host", str(tmp_path)):
        check("AdamW", offload, stage=stage, precision="bf16")
    check("Adagrad", None, stage=stage)


@on_ranks(4)
def test_estimate_of_tensor_and_sequence_parallel_ranks_and_replicas() -> None:
    check("AdamW", None, llama=True, tp=2)
    check("AdamW", "host", llama=True, sp=2)
    for stage, offload in ((1, None), (2, "host"), (3, None)):
        check("AdamW", offload, stage=stage, precision="bf16", replicas=2)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(architectures=["LlamaForCausalLM"], **SIZES).save_pretrained(tmp_path)
    model = make_llama()
    numel = sum(each.numel() for each in model.parameters())
    assert main(["estimate", str(tmp_path), "--ranks", "2", "--offload", "host", "--device", "cpu", "--json"]) == 0
    plan = Settings(precision="bf16", offload="host").plan()
    found = json.loads(capsys.readouterr().out)
    by_tier = estimate_memory(model, torch.optim.AdamW(model.parameters()), plan, 2, 0, "cpu")
    assert found.pop("num_parameters") == numel and found["host"]["total_bytes"] == sum(by_tier["host"].values())
    shown = {tier: {kind[:-6].replace("_", " "): n for kind, n in own.items() if n} for tier, own in found.items()}
    assert by_tier == {tier: {kind: n for kind, n in own.items() if kind != "total"} for tier, own in shown.items()}
    offload = ["--ranks", "2", "--offload", "host", "--offload-params", "disk"]
    assert main(["estimate", str(tmp_path), *offload, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kinds = (found["disk"]["parameters_bytes"], *(found["host"][f"{kind}_bytes"] for kind in ("gradients", "masters")))
    assert numel <= kinds[0] < 1.01 * numel and kinds == (kinds[0], kinds[0], 2 * kinds[0])
    assert main(["estimate", str(tmp_path), *offload]) == 0
    rows = {line[:16].strip(): line[16:].split() for line in capsys.readouterr().out.splitlines()[:-1]}
    assert rows["on one rank"] == ["device", "host", "disk"] and rows["masters"][:2] == ["0", "B"]
    for wrong, message in (
        ("--stage 2 --offload-params host", "use --stage 3"),
        ("--ranks 4 --pp 2", "--pp 2 cannot be estimated; estimate a function"),
        ("--ranks 4 --replicas 3", "dp_replicate=3 (replicas) needs a multiple of 3 ranks"),
        ("--ranks 4 --tp 3", "tp=3 needs a multiple of 3 ranks, but the number of ranks is 4. Change --ranks, or"),
        ("--rank 4", "--rank 4 with --ranks 1: did you mean --ranks 4?"),
        ("--ranks 4 --rank 4", "--rank 4: give a whole number <= 3"),
        ("--optimizer Adafactor", "--optimizer Adafactor cannot be estimated"),
        ("--optimizer LBFGS", "error: optimizer LBFGS works on all parameters at once"),
    ):
        assert main(["estimate", str(tmp_path), *wrong.split()]) == 2
        assert message in capsys.readouterr().err
    assert main(["estimate", str(tmp_path / "no")]) == 2
    assert "no such folder, and no cached model of the hub; give one of the two, or download" in capsys.readouterr().err
