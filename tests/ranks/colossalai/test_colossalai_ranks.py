"""ColossalAI's API on ranks: wrapped models and optimizers train as one process; launch, groups and the coordinator."""

import socket
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shardwise.colossalai.booster import Booster
from shardwise.colossalai.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from shardwise.colossalai.cluster import DistCoordinator, ProcessGroupManager, ProcessGroupMesh
from shardwise.colossalai.interface import ModelWrapper, OptimizerWrapper
from shardwise.colossalai.lazy import LazyInitContext
from shardwise.colossalai.nn.optimizer import HybridAdam
from shardwise.colossalai.zero import (
    GeminiAdamOptimizer,
    GeminiDDP,
    GeminiOptimizer,
    LowLevelZeroOptimizer,
    zero_model_wrapper,
    zero_optim_wrapper,
)
from torch import Tensor, nn

from shardwise import colossalai
from shardwise.testing import PlainRecipe, assert_close, train_plain
from tests.support.launching import SECONDS, forked, start
from tests.support.on_ranks import assert_refused, on_ranks, raises

STEPS, ROWS = 3, 4


class Tied(nn.Module):
    """A weight in two places, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("factor", torch.full((), 0.5))

    def forward(self, batch: Tensor) -> Tensor:
        """Args and result: [rows, 6]."""
        return self.last(torch.tanh(self.frozen(self.first(batch)))) * self.factor


def model(dtype: torch.dtype = torch.float32) -> Tied:
    torch.manual_seed(7)
    return Tied().to(dtype)


def batches() -> Tensor:
    """Return the batches of all ranks: [steps, ranks, rows, 6]."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(STEPS, dist.get_world_size(), ROWS, 6, generator=generator)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([each for each in parameters if each.requires_grad], lr=1e-2)


def alone(max_norm: float = 0.0) -> dict[str, Tensor]:
    """Train one process on the batches of all ranks; return its state."""
    steps, recipe = [[list(step)] for step in batches()], PlainRecipe(max_norm=max_norm)
    run = train_plain(model, lambda m, x: m(x).square().mean(), lambda m: adam(m.parameters()), steps, recipe)
    return run.model.state_dict()


def train(called: nn.Module, optimizer: Any) -> None:
    for batch in batches():
        optimizer.zero_grad()
        optimizer.backward(called(batch[dist.get_rank()]).square().mean())
        optimizer.step()


@on_ranks(2)
def test_low_level_zero_optimizer_without_a_wrapped_model() -> None:
    same, sharded = alone(), alone(max_norm=0.05)
    replicas = ProcessGroupMesh(1, dist.get_world_size())
    settings: list[tuple[dict[str, Any], Mapping[str, Tensor]]] = [
        ({}, same),
        ({"partition_grad": True, "overlap_communication": True, "clip_grad_norm": 0.05}, sharded),
        ({"cpu_offload": True, "reduce_bucket_size": 16}, same),
    ]
    rows = [replicas.get_group_along_axis(axis) for axis in (0, 1)]
    settings += [({"dp_process_group": one, "extra_dp_group": two}, same) for one, two in (rows, rows[::-1])]
    for arguments, expected in settings:
        plain = model()
        optimizer = LowLevelZeroOptimizer(adam(plain.parameters()), **arguments)
        assert isinstance(optimizer, OptimizerWrapper)
        train(plain, optimizer)
        optimizer._force_wait_all_gather()
        assert_close(plain.state_dict(), expected, 1e-6, str(arguments))
        before = optimizer.state_dict()
        optimizer.optim.state = []  # the user cleared it
        optimizer.load_state_dict(before)
        torch.testing.assert_close(optimizer.state_dict(), before)
    first = plain(batches()[0, dist.get_rank()]).square().mean()
    optimizer.backward(first)
    whole = model()
    whole.load_state_dict(plain.state_dict())
    whole(batches()[0].flatten(0, 1)).square().mean().backward()
    grad = optimizer.get_param_grad(plain.first.weight)
    assert_close({"grad": grad}, {"grad": whole.first.weight.grad}, 1e-6, "get_param_grad")
    with optimizer.no_sync():
        optimizer.backward(plain(batches()[0, 0]).square().mean())
    fresh = LowLevelZeroOptimizer(adam(model().parameters()))
    fresh.load_state_dict(optimizer.state_dict())
    assert_close(fresh.state_dict()["state"][0], optimizer.state_dict()["state"][0], 0.0, "the optimizer's state")
    half = LowLevelZeroOptimizer(adam(model().parameters()), forced_dtype=torch.bfloat16, master_weights=False)
    assert half.session.params[0].dtype is torch.bfloat16

    def made(**wrong: Any) -> LowLevelZeroOptimizer:
        return LowLevelZeroOptimizer(adam(model().parameters()), **wrong)

    mixed = [*model().parameters(), nn.Parameter(torch.zeros(2).double())]
    assert_refused(
        (lambda: made(pg_to_param_list={}), "pg_to_param_list"),
        (lambda: made(dp_process_group=replicas.get_group_along_axis(0)), "neighbors that cover all ranks"),
        (lambda: LowLevelZeroOptimizer(adam(mixed)), "torch.float64"),
        (lambda: optimizer.get_param_grad(whole.first.weight), "is not in"),
    )


@on_ranks(2)
def test_gemini_ddp_and_zero_model_wrapper() -> None:
    expected = alone()
    with LazyInitContext():
        torch.manual_seed(7)
        lazy = Tied()
    for plain, arguments in ((model(), {"shard_param_frac": 0.5}), (lazy, {"extra_dp_group": None})):
        wrapped = GeminiDDP(plain, mixed_precision=torch.float32, min_chunk_size_m=1e-5, **arguments)  # type: ignore[arg-type]
        optimizer = GeminiOptimizer(adam(wrapped.parameters()), wrapped)
        train(wrapped, optimizer)
        assert isinstance(wrapped, ModelWrapper) and wrapped.unwrap() is plain
        assert_close(wrapped.state_dict(only_rank_0=False), expected, 1e-6, "GeminiDDP")
        assert len(wrapped.state_dict()) == (len(expected) if dist.get_rank() == 0 else 0)
    used = GeminiDDP(model(), mixed_precision=torch.float32)  # used before an optimizer exists
    before = used(batches()[0, 0]).detach()
    used.load_state_dict(expected)
    assert not torch.equal(before, used(batches()[0, 0]))
    used.load_state_dict(model().state_dict())
    with warnings.catch_warnings(action="ignore"):
        late = GeminiAdamOptimizer(used, lr=1e-2, adamw_mode=False, verbose=True)
    train(used, late)
    assert_close(used.state_dict(only_rank_0=False), expected, 1e-6, "an optimizer that came late")
    assert (late.get_grad_norm() or 0.0) >= 0.0 and late.optim.param_groups is late.param_groups
    assert_refused(
        (lambda: GeminiOptimizer(adam(used.parameters()), used), "make one for each model"),
        (lambda: GeminiDDP(model(), mixed_precision=torch.int8), "int8"),
        (lambda: GeminiOptimizer(adam(model().parameters()), model()), "GeminiDDP"),
        (lambda: late.backward(torch.ones(()), inputs=[]), "inputs"),
        (lambda: zero_model_wrapper(model(), 4), "give 1, 2 or 3"),
        (lambda: zero_optim_wrapper(model(), adam(model().parameters())), "zero_model_wrapper"),
    )
    with pytest.warns(UserWarning, match="shard_param_frac"):
        GeminiDDP(model(), scatter_after_inference=False)
    for stage in (1, 2, 3):
        config = {"mixed_precision": torch.float32, "device": "cpu"} if stage == 3 else None
        by_hand = zero_model_wrapper(model(), stage, config)
        wrapper = zero_optim_wrapper(
            by_hand, adam(by_hand.parameters()), optim_config={"gpu_margin_mem_ratio": 0.0} if stage == 3 else {}
        )
        train(by_hand, wrapper)
        state = by_hand.state_dict(only_rank_0=False) if stage == 3 else by_hand.state_dict()
        assert_close(state, expected, 1e-6, f"stage {stage} by hand")


def test_unknown_arguments_of_gemini_optimizers_are_named() -> None:
    m: Any = zero_model_wrapper(model(), 3, {"mixed_precision": torch.float32, "device": "cpu"})
    assert_refused(
        (lambda: GeminiOptimizer(adam(m.parameters()), m, clipping_norm=1.0), "clipping_norm=1.0 is no argument"),
        (lambda: GeminiOptimizer(adam(m.parameters()), m, maxnorm=1.0), "did you mean 'max_norm'"),
        (lambda: GeminiOptimizer(adam(m.parameters()), m, amsgrad=True), "give options of the Adam to that"),
        (lambda: GeminiAdamOptimizer(m, learning_rate=1e-4), "learning_rate=0.0001 is no option of HybridAdam"),
        (lambda: zero_optim_wrapper(m, adam(m.parameters()), optim_config={"clip": 1.0}), "clip=1.0 is no arg"),
        error=TypeError,
    )


def _plugins() -> None:
    rank = dist.get_rank()
    plugin = HybridParallelPlugin(tp_size=2, pp_size=2, precision="fp32", num_microbatches=2, dp_outside=False)
    stage = plugin.stage_manager
    assert (stage.stage, stage.num_stages) == (rank // 2, 2) and stage.is_last_stage() == (rank >= 2)
    assert dist.get_process_group_ranks(plugin.tp_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(plugin.pp_group) == [rank % 2, rank % 2 + 2]
    assert plugin.pg_mesh.get_ranks_in_group(plugin.pp_group) == [rank % 2, rank % 2 + 2]
    assert dist.get_process_group_ranks(plugin.dp_group) == [rank] == dist.get_process_group_ranks(plugin.sp_group)
    assert plugin.dp_size == 1
    folded = HybridParallelPlugin(tp_size=1, pp_size=2, precision="fp32", num_model_chunks=2, pp_style="zbv")
    last = folded.stage_manager
    assert last.is_last_stage() == (rank % 2 == 0) and last.is_last_stage(ignore_chunk=True) == (rank % 2 == 1)
    assert last.is_first_stage() == (rank % 2 == 0) and last.is_interleave and folded.dp_size == 2
    sizes: dict[str, Any] = {"tp_size": 2, "pp_size": 1, "sp_size": 2, "enable_sequence_parallelism": True}
    shared = HybridParallelPlugin(precision="fp32", sequence_parallelism_mode="all_to_all", **sizes)
    assert dist.get_process_group_ranks(shared.sp_group) == [rank % 2, rank % 2 + 2] and shared.dp_size == 1
    expected = alone()
    for each in (
        LowLevelZeroPlugin(stage=2, precision="fp32", extra_dp_size=2),
        GeminiPlugin(precision="fp32", extra_dp_size=2),
        TorchDDPPlugin(),
    ):
        booster = Booster(plugin=each)
        plain = model()
        hybrid = HybridAdam(adam(plain.parameters()).param_groups, lr=1e-2, adamw_mode=False)
        boosted, optimizer, *_ = booster.boost(plain, hybrid)
        assert isinstance(boosted, ModelWrapper) and isinstance(optimizer, OptimizerWrapper)
        train(boosted, optimizer)
        assert_close(boosted.state_dict(), expected, 1e-6, type(each).__name__)
        booster.close()


@on_ranks(4)
def test_launch_groups_and_plugins(tmp_path: Path) -> None:
    directory = str(tmp_path)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    colossalai.launch(rank, ranks, "localhost", 29500, seed=5)  # the group exists already: only the seed changes
    drawn = [torch.empty(3) for _ in range(ranks)]
    dist.all_gather(drawn, torch.rand(3))
    assert all(torch.equal(each, drawn[0]) for each in drawn)
    with pytest.raises(RuntimeError, match=f"rank=0, world_size={ranks + 1}, but torch.distributed is initialized"):
        colossalai.launch(0, ranks + 1, "localhost", 29500)
    coordinator = DistCoordinator()
    assert (coordinator.rank, coordinator.world_size) == (rank, ranks) == (coordinator._rank, coordinator._world_size)
    assert coordinator._local_rank == coordinator.local_rank
    assert coordinator.is_master() == (rank == 0) and coordinator.is_last_process() == (rank == ranks - 1)
    found = Path(directory) / "found"
    with coordinator.priority_execution():
        if rank == 0:
            found.write_text("x")
        assert found.exists()
    coordinator.block_all()
    assert coordinator.on_master_only()(lambda: 4)() == (4 if rank == 0 else None)
    mesh = ProcessGroupMesh(2, 2)
    assert mesh.coordinate() == (rank // 2, rank % 2) and mesh.size() == mesh.shape == (2, 2) and mesh.rank == rank
    for axis, expected in (
        (0, [rank % 2, rank % 2 + 2]),
        (1, [rank // 2 * 2, rank // 2 * 2 + 1]),
        ([0, 1], [0, 1, 2, 3]),
    ):
        group = mesh.get_group_along_axis(axis)
        assert group is not None and group is mesh.get_group_along_axis(axis)
        assert mesh.get_ranks_in_group(group) == expected == dist.get_process_group_ranks(group)
    part = mesh.create_group_along_axis(0, [0])
    assert (part is None) == (rank > 1)
    assert coordinator.is_master(mesh.get_group_along_axis(1)) == (rank % 2 == 0)
    mesh.destroy_mesh_process_groups()
    manager = ProcessGroupManager()
    manager.create_process_group("even", [0, 2])
    assert rank % 2 or dist.get_world_size(manager.get("even")) == 2
    manager.destroy_all()
    raises(ValueError, "'even'", lambda: manager.get("even"))
    raises(ValueError, "grid of 3", lambda: ProcessGroupMesh(3))
    _plugins()


def meet(rank: int, world_size: int, port: int, directory: str) -> None:
    colossalai.launch(rank=rank, world_size=world_size, host="localhost", port=port, backend="nccl", local_rank=rank)
    coordinator = DistCoordinator()
    assert coordinator.local_rank == rank and coordinator.is_node_master() == (rank == 0)
    coordinator.print_on_node_master("met")
    coordinator.print_on_master("met")
    (Path(directory) / str(rank)).write_text(f"{dist.get_world_size()}")
    coordinator.destroy()


def test_launch_without_a_launcher(tmp_path: Path) -> None:
    """The server that starts ranks forks them, because it has imported torch."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = [start(forked(meet, rank, 2, port, str(tmp_path))) for rank in (0, 1)]
    try:
        for each in started:
            each.join(SECONDS)
        assert [each.exitcode for each in started] == [0, 0]
    finally:
        for each in started:
            each.kill()
    assert [each.read_text() for each in sorted(tmp_path.iterdir())] == ["2", "2"]
