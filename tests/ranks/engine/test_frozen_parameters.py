"""Frozen parameters, sparse buffers and averaged models.

* ``compress_frozen``: losses, gradients, norms and parameters equal those of a plain model whose frozen weights are
  rounded in the same blocks; bytes equal the formula; states, files and write-backs have the unrounded values.
* Frozen parameters of any dtype, and of subclasses, are sharded like floating-point ones.
* Sparse buffers (edges of a graph) are broadcast from rank 0 like dense ones, or refused before the model changes.
* torch's ``AveragedModel`` of a 16-bit model has to average the fp32 state dicts.
"""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing._internal.two_tensor import TwoTensor

from shardwise import shard
from shardwise.core.base.torch_internals import give_subclass
from shardwise.core.checkpoint import CheckpointError
from shardwise.core.mesh import Mesh, init_distributed
from shardwise.plan import ByNumel, ByTensor, DiskPlan, Plan, on_device, replicated, zero
from shardwise.session import Session, build
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import data, mean_square, one_mesh, plain_steps, seeded, sgd, sharded
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full
from tests.support.steps import take_steps
from tests.support.tier_setup import with_tiers

RTOL = 1e-11  # computed in fp64: only the order of sums differs
WIDTH, HIDDEN, WORDS, STEPS = 6, 37, 11, 3
ODD = torch.int8, torch.float64


class Codes(nn.Parameter):
    """A subclass as for packed weights, whose bits have another meaning."""


class Adapted(nn.Module):
    """A frozen base with trained adapters.

    Frozen: fp32 and bf16 weights, small, empty and packed ones. Trained parameters, the buffer and the computation are
    fp64.
    """

    def __init__(self, dtype: torch.dtype, packed: bool = False) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(HIDDEN, WIDTH).to(dtype))
        self.back = nn.Linear(HIDDEN, WIDTH, dtype=dtype)
        self.empty = nn.Parameter(torch.empty(0, 3))
        numbers = torch.randn(WIDTH, WIDTH).to(dtype)
        self.mixing = give_subclass(Codes, numbers) if packed else nn.Parameter(numbers)
        self.codes = nn.Parameter(torch.randint(-9, 9, (WIDTH,), dtype=ODD[0]), requires_grad=False)
        self.exact = nn.Parameter(torch.randn(WIDTH, dtype=ODD[1]))
        self.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(3, WIDTH).double() / 3)
        self.up = nn.Parameter(torch.randn(HIDDEN, 3).double() / 3)
        self.register_buffer("scale", torch.rand(WIDTH).double())

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.base.t().double() + x @ self.down.t() @ self.up.t())
        y = y @ self.back.weight.t().double() + self.back.bias
        z = y @ self.mixing.as_subclass(Tensor).double() * self.codes / 9 + self.exact
        return torch.tanh(x + z * self.scale)


class Net(nn.Module):
    """An embedding tied to its head, both frozen, and a trained bias."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.requires_grad_(False)
        self.layers = nn.ModuleList([Adapted(torch.float32), Adapted(torch.bfloat16), Adapted(torch.float32, True)])
        self.bias = nn.Parameter(torch.randn(WORDS).double())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).double()
        for layer in self.layers:
            x = layer(x)
        return x @ self.head.weight.t().double() + self.bias


def net(seed: int = 5) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(WORDS, (7, 4), generator=generator)
    return nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that has the frozen parameters in its groups, too."""
    return torch.optim.Adam(model.parameters(), lr=0.05, eps=0.05)


# ---- the reference: blocks of 128 from the start of each shard, each scaled by the least power of two that fits

LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}


def in_blocks(shard: Tensor, format_: str) -> Tensor:
    parts = []
    for block in shard.split(128):
        largest = block.abs().max().item()
        scale = 2.0 ** math.ceil(math.log2(largest / LARGEST[format_])) if largest else 1.0
        scaled = block.double() / scale
        whole = scaled.float().to(torch.float8_e4m3fn).double() if format_ == "fp8" else scaled.round()
        parts.append((whole * scale).to(shard.dtype))
    return torch.cat(parts)


class Shape(NamedTuple):
    """A chunk for the reference: slots as (name, start, end), and the offsets of the shards."""

    dtype: torch.dtype
    trainable: bool
    resident: bool
    bounds: list[int]
    slots: list[tuple[str, int, int]]


def shapes(session: Session) -> list[Shape]:
    layout = session._engine.shards.layout
    return [
        Shape(
            chunk.spec.dtype,
            chunk.spec.trainable,
            chunk.resident,
            list(chunk.spec.bounds),
            [(layout.facts[slot.param].names[0], slot.start, slot.end) for slot in chunk.spec.slots],
        )
        for chunk in session._engine.shards.chunks
    ]


def narrow(shape: Shape) -> bool:
    packed = any(name == "layers.2.mixing" for name, _, _ in shape.slots)
    return not (shape.trainable or shape.resident or packed) and shape.dtype in (torch.float32, torch.bfloat16)


@torch.no_grad()
def round_frozen(model: nn.Module, found: list[Shape], format_: str) -> set[str]:
    """Round the frozen weights; return the names of the rounded ones."""
    params, names = dict(model.named_parameters()), set[str]()
    for shape in found:
        if not narrow(shape):
            continue
        whole = torch.zeros(shape.bounds[-1], dtype=shape.dtype)
        for name, start, end in shape.slots:
            whole[start:end] = params[name].flatten()
        shards = [whole[at:to] for at, to in zip(shape.bounds, shape.bounds[1:], strict=False)]
        whole = torch.cat([in_blocks(shard, format_) for shard in shards])
        for name, start, end in shape.slots:
            params[name].copy_(whole[start:end].view(params[name].shape))
            names |= {name}
    return names


class Told(NamedTuple):
    """Losses of a rank by step, with an evaluation after the last; gradients and norms by step; the final state."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    norms: list[float]
    state: dict[str, Tensor]


def plainly(model: nn.Module, ranks: int) -> Told:
    """Train with plain torch; the losses are those of rank 0."""
    optimizer, result = optimizer_of(model), Told([], [], [], {})
    for step in range(STEPS):
        losses = [loss_of(model, rank, step) for rank in range(ranks)]
        (sum(losses) / ranks).backward()  # type: ignore[union-attr]
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        result.losses.append(losses[0].item())
        result.gradients.append(grads)
        result.norms.append(torch.cat([each.flatten() for each in grads.values()]).norm().item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        result.losses.append(loss_of(model.eval(), 0, STEPS).item())
    result.state.update({name: p.detach().clone() for name, p in model.named_parameters()})
    return result


def train(session: Session, steps: range, result: Told) -> None:
    for step in steps:
        loss = loss_of(session.module, session.mesh.rank, step)
        session.backward(loss)
        result.losses.append(loss.item())
        result.gradients.append({name: value.clone() for name, value in session.full_gradients().items()})
        session.optimizer.step()
        result.norms.append(session.optimizer.get_grad_norm() or 0.0)
        session.optimizer.zero_grad()


def end_of(session: Session, result: Told) -> Told:
    with torch.no_grad():
        result.losses.append(loss_of(session.module.eval(), session.mesh.rank, STEPS).item())
    result.state.update({n: v.clone() for n, v in session.module.full_state() if isinstance(v, Tensor)})
    return result


def shown(session: Session) -> dict[str, Tensor]:
    with session.module.gathered():
        return {name: p.detach().clone() for name, p in session.module.unwrap().named_parameters()}


def trained(plan: Plan, mesh: Mesh) -> tuple[Told, list[Shape], dict[str, Tensor]]:
    model = net()
    with sharded(model, optimizer_of(model), plan, mesh) as session:
        found, before = shapes(session), shown(session)
        result = Told([], [], [], {})
        train(session, range(STEPS), result)
        assert all(torch.equal(value, before[n]) for n, value in shown(session).items() if not is_trained(n))
        return end_of(session, result), found, before


def is_trained(name: str) -> bool:
    return name.endswith(("down", "up")) or name == "bias"


def plans(folder: str) -> dict[str, Plan]:
    base, host = zero(3), replace(on_device(), param_host_fraction=1.0, state_host_fraction=1.0)
    return {
        "modules": base.but(compress_frozen="int8"),
        "tensors": base.but(compress_frozen="int8", packing=ByTensor(persist_numel=WIDTH), prefetch=2),
        "straddling": base.but(compress_frozen="int8", packing=ByNumel(chunk_numel=300), gathered_fraction=0.4),
        "host": base.but(compress_frozen="int8", tiers=host),
        "disk": with_tiers(base, "all_disk", folder).but(compress_frozen="int8"),
        "capacity": base.but(compress_frozen="int8", device_capacity_bytes=1 << 20),
        "second copy": base.but(compress_frozen="int8", secondary=1),
        "fp8": base.but(compress_frozen="fp8"),
        "int4": base.but(compress_frozen="int4"),
    }


Result = tuple[Told, list[Shape], dict[str, Tensor]]


def trainings(plan: Plan) -> list[Result]:
    """Train over shared memory, then over gloo."""
    found = []
    for shared in (True, False):
        with one_mesh(plan.but(shared_memory=shared)) as mesh:
            found.append(trained(plan.but(shared_memory=shared), mesh))
    return found


def check(results: list[list[Result]], name: str, format_: str) -> None:
    plain, exact, ranks = net(), dict(net().named_parameters()), len(results)
    rounded = round_frozen(plain, results[0][0][1], format_)
    assert {each.split(".")[-1] for each in rounded} >= {"weight", "base"} and not any(map(is_trained, rounded))
    unrounded, used = plainly(net(), ranks), {n: p.detach().clone() for n, p in plain.named_parameters()}
    expected = plainly(plain, ranks)
    assert abs(unrounded.losses[0] - expected.losses[0]) > 1e-5  # the rounding is visible
    own = {key: value for key, value in expected.state.items() if is_trained(key)}
    for rank, result in enumerate(results):
        for found, _, before in result:
            for key, value in before.items():
                assert torch.equal(value, used[key]), (name, rank, key)
                assert is_trained(key) or torch.equal(found.state[key], exact[key])  # unrounded
            if rank == 0:
                assert found.losses == pytest.approx(expected.losses, rel=RTOL)
            assert found.norms == pytest.approx(expected.norms, rel=RTOL)
            for step, gradients in enumerate(expected.gradients):
                assert_close(found.gradients[step], gradients, RTOL, f"{name}: gradients of step {step}")
            assert_close({key: found.state[key] for key in own}, own, RTOL, f"{name}: parameters")


CASES = ["straddling", "host", "int4", *full("modules", "tensors", "disk", "capacity", "second copy", "fp8")]


@pytest.mark.parametrize("name", CASES)
def test_compress_frozen_equals_a_plain_model_with_rounded_weights(name: str, tmp_path: Path) -> None:
    results = run_ranks(2, trainings, plans(str(tmp_path))[name])
    check(results, name, name if name in LARGEST else "int8")


@on_ranks(2)
def test_gather_sends_one_byte_per_element_and_per_block() -> None:
    plan = zero(3).but(shared_memory=False, compress_frozen="int8", gathered_fraction=0.0)
    for each in (plan, plan.but(compress_frozen=None)):
        model, expected = net(), 0
        with sharded(model, optimizer_of(model), each) as session:
            session.reset_traffic()
            with torch.no_grad():
                model.layers[0](torch.zeros(1, WIDTH, dtype=torch.float64))
            for shape in (shape for shape in shapes(session) if shape.slots[0][0].startswith("layers.0")):
                numel, compressed = shape.bounds[1], each is plan and narrow(shape)
                expected += numel + -(-numel // 128) if compressed else numel * shape.dtype.itemsize
            assert session.traffic()["all_gather"] == expected


@on_ranks(2)
def test_checkpoints_have_unrounded_values_and_resume(tmp_path: Path) -> None:
    plan, folder = zero(3).but(compress_frozen="int8"), tmp_path / "saved"
    with one_mesh(plan) as mesh:
        model, whole = net(), Told([], [], [], {})
        with sharded(model, optimizer_of(model), plan, mesh) as session:
            train(session, range(2), whole)
            session.checkpoints.save(folder)
            train(session, range(2, STEPS), whole)
            end_of(session, whole)
        other, again = net(seed=9), Told([], [], [], {})
        with sharded(other, optimizer_of(other), plan, mesh) as session:
            session.checkpoints.load(folder)
            train(session, range(2, STEPS), again)
            end_of(session, again)
            session.unshard()
        assert again.losses == whole.losses[2:] and again.norms == whole.norms[2:]
        for key, value in net().named_parameters():
            assert torch.equal(again.state[key], whole.state[key]), key
            assert is_trained(key) or torch.equal(again.state[key], value), key
            assert torch.equal(dict(other.named_parameters())[key], again.state[key]), key
        plain = net(seed=9)  # the files have unrounded values for any reader
        with sharded(plain, optimizer_of(plain), zero(2), mesh) as session:
            session.checkpoints.load(folder)
            state = session.module.state_dict()
            assert all(is_trained(n) or torch.equal(state[n], p) for n, p in net().named_parameters())


@on_ranks(2)
def test_write_back_keeps_unrounded_values(tmp_path: Path) -> None:
    for name in ("modules", "tensors", "host", "disk", "second copy"):
        plan = plans(str(tmp_path))[name]
        model = net()
        with one_mesh(plan) as mesh, sharded(model, optimizer_of(model), plan, mesh) as session:
            expected = {n: v.clone() for n, v in session.module.full_state() if isinstance(v, Tensor)}
            with session.module.gathered(write_back=True), torch.no_grad():
                model.layers[1].base.fill_(0.3)  # not a bf16 number, and its bf16 value is not an 8-bit one
            expected["layers.1.base"].fill_(0.3)
            same(session, expected, name)
            with session.module.gathered(), torch.no_grad():
                model.layers[0].base.zero_()  # not written back
            same(session, expected, name)
            one = session.one(model.layers[0].back.weight)
            assert one is not None and torch.equal(one.value(), expected["layers.0.back.weight"])
            one.set_value(2 * one.value())
            expected["layers.0.back.weight"] *= 2
            same(session, expected, name)
            before = shown(session)
            assert not torch.equal(before["layers.0.back.weight"], expected["layers.0.back.weight"])
            session.module.load_state_dict(net(seed=8).state_dict())
            same(session, net(seed=8).state_dict(), name)
            assert not torch.equal(shown(session)["layers.0.back.weight"], before["layers.0.back.weight"])
            before = shown(session)
            session.module.load_state_dict(session.module.state_dict())
            after = shown(session)
            assert all(torch.equal(value, after[key]) for key, value in before.items()), name


def same(session: Session, expected: dict[str, Tensor], what: str) -> None:
    for key, value in session.module.full_state():
        assert not isinstance(value, Tensor) or torch.equal(value, expected[key]), (what, key)


def test_invalid_compress_frozen_is_refused() -> None:
    for plan in (zero(2), replicated()):
        with pytest.raises(ValueError, match=r"compress_frozen='int8' with gathered_fraction=1\.0: frozen"):
            plan.but(compress_frozen="int8")
    with pytest.raises(ValueError, match="compress_frozen='int2': give one of 'fp8', 'int8', 'int4', or None"):
        zero(3).but(compress_frozen="int2")
    plan = zero(3).but(compress_frozen="int8", compress_weights="fp8")
    assert Plan.from_dict(plan.to_dict()) == plan


DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64)
NUMEL = 24


class NumbersCodes(nn.Parameter):
    """A subclass as for packed weights, which overrides what operations do."""

    def to(self, *args: object, **kwargs: object) -> Tensor:
        raise AssertionError(f"packs itself on its way to {args}")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return super().__torch_function__(func, types, args, kwargs or {})


class Lookup(nn.Module):
    """Reads its table by rows; ``follows`` adds a second tensor with the same memory, which is read instead."""

    def __init__(self, dtype: torch.dtype, follows: bool) -> None:
        super().__init__()
        numbers = torch.randint(2, 100, (NUMEL,)).to(dtype).view(6, 4)
        self.codes = give_subclass(NumbersCodes, numbers) if follows else nn.Parameter(numbers, requires_grad=False)
        if follows:
            self.codes.same = self.codes.data.as_subclass(Tensor)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        beside = getattr(self.codes, "same", None)
        codes = self.codes if beside is None else beside
        out = _Scaled.apply(x, codes) if beside is not None else x @ _real(codes)
        if beside is not None:
            self.codes.data = beside  # as layers with 8-bit weights do
        return (out * self.scale) @ _real(codes).t()


class _Scaled(torch.autograd.Function):
    """Keep the table in ctx, where no saved-tensor hook sees it."""

    @staticmethod
    def forward(ctx, x: Tensor, codes: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.codes = codes
        return x @ _real(codes)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def, override]
        return grad @ _real(ctx.codes).t(), None


def _real(codes: Tensor) -> Tensor:
    return (codes.real if codes.is_complex() else codes).double() / 100


def numbers_net() -> nn.Module:
    own = [Lookup(dtype, follows=False) for dtype in DTYPES] + [Lookup(torch.int8, follows=True) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 6), *own).double()


def numbers_plans(folder: str) -> list[Plan]:
    on_disk = {"param_disk_fraction": 1.0, "state_disk_fraction": 1.0, "disk": DiskPlan(directory=folder)}
    return [
        zero(3),
        zero(3).but(shared_memory=False),
        zero(3).but(packing=ByTensor(persist_numel=0), param_host_fraction=1.0, state_host_fraction=1.0),
        zero(3).but(**on_disk),
        zero(2),
        replicated(),
    ]


def wrong_uses(session: Session, model: nn.Module) -> None:
    """Write to a parameter that is not gathered, and load another dtype."""
    state = session.module.state_dict()
    with torch.no_grad():
        model[1].codes.zero_()
    raises(RuntimeError, r"1\.codes \(6, 4\) was written to", session.module, data(0, 0))
    given = {name: value.float() if "codes" in name else value for name, value in state.items()}
    raises(RuntimeError, r"1\.codes: torch\.float32 instead of torch\.uint8", session.module.load_state_dict, given)


@on_ranks(2)
def test_frozen_parameters_of_every_dtype_are_sharded(tmp_path: Path) -> None:
    model = seeded(numbers_net)
    wanted = plain_steps(model, sgd(model), 2)
    for number, plan in enumerate(numbers_plans(str(tmp_path))):
        with one_mesh(plan) as mesh:
            model = seeded(numbers_net)
            with sharded(model, sgd(model), plan, mesh) as session:
                take_steps(session, range(2))
                trained = session.module.state_dict()
                assert_close(trained, wanted, 1e-11, f"plan {number}")
                assert all(trained[name].dtype is wanted[name].dtype for name in wanted)
                held = sum(tier.get("parameters", 0) for tier in session.memory().by_tier.values())
                whole = sum(chunk.padded_bytes for chunk in session._engine.shards.layout.chunks)
                assert held == (whole if plan.shard.always_gathered else whole // mesh.shard.size), number
                session.checkpoints.save(tmp_path, f"plan-{number}")
                if number == 0:
                    wrong_uses(session, model)
                if number < 2:
                    session.unshard()
                    mean_square(model, 0, 0).backward()  # attributes of parameters share their memory again
                    assert_close(dict(model.state_dict()), trained, 0.0, "unsharded")
            other = seeded(numbers_net, 7)
            with sharded(other, sgd(other), plan, mesh) as session:
                session.checkpoints.load(tmp_path, f"plan-{max(number - 1, 0)}")
                assert_close(session.module.state_dict(), trained, 1e-11, f"loaded under plan {number}")


def test_unpacked_and_wrapper_subclasses_are_refused() -> None:
    model = seeded(numbers_net)
    model[1].codes = give_subclass(NumbersCodes, torch.zeros(6, 4))
    model[1].codes.bnb_quantized = False
    still = r"1\.codes \(NumbersCodes, \(6, 4\)\) is still torch\.float32, and is packed when it moves"
    raises(ValueError, still, build, model, None, zero(3))
    quantized = nn.Sequential(nn.Linear(2, 2))
    quantized[0].weight = nn.Parameter(TwoTensor(torch.zeros(2, 2), torch.zeros(2, 2)), requires_grad=False)
    elsewhere = r"0\.weight \(TwoTensor, \(2, 2\)\) has its values in other tensors"
    raises(ValueError, elsewhere, build, quantized, None, zero(3))


MAKE: dict[str, Any] = {
    "coo": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
}


class Graph(nn.Module):
    def __init__(self, kind: str, scale: float, persistent: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(6, 6)
        edges = MAKE[kind](scale * torch.eye(6).roll(1, 0))
        self.register_buffer("edges", edges, persistent=persistent)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.lin(self.edges @ inputs)


def of_graph(model: nn.Module, _rank: int, _step: int) -> Tensor:
    return model(torch.arange(36.0).view(6, 6) / 36).square().mean()


def sharded_graph(model: nn.Module, stage: int = 1) -> Session:
    return shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_nonpersistent_sparse_buffers_are_broadcast(ranks: int, tmp_path: Path) -> None:
    init_distributed()
    for stage, kind in ((1, "coo"), (3, "csr"), (3, "csc")):
        plain, model = Graph(kind, 1.0), Graph(kind, 1.0 + dist.get_rank())
        session = sharded_graph(model, stage)
        assert torch.equal(model.edges.to_dense(), plain.edges.to_dense()) and model.edges.layout is plain.edges.layout
        take_steps(session, range(2), of_graph)
        session.checkpoints.save(tmp_path, kind)
        session.checkpoints.load(tmp_path, kind)
        expected = plain_steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 2, of_graph, ranks=1)
        assert_close(session.module.state_dict(), expected, 1e-6, kind)
        with pytest.raises(CheckpointError, match=r"user_state/graph is a tensor \(6, 6\) of layout .*to_dense\(\)"):
            session.checkpoints.save(tmp_path, "refused", user_state={"graph": model.edges})


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_persistent_or_different_sparse_buffers_are_refused(ranks: int) -> None:
    init_distributed()
    for kind in MAKE:
        model = Graph(kind, 1.0, persistent=True)
        raises(ValueError, r"edges \(6, 6\) has the layout torch.sparse_c.*persistent=False", sharded_graph, model)
        assert torch.equal(model.lin.weight, Graph(kind, 1.0).lin.weight)
    if ranks > 1:
        model = Graph("coo", 1.0)
        if dist.get_rank():
            model.edges = torch.zeros(6, 6).to_sparse()
        raises(ValueError, "tensor edges", sharded_graph, model)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_averaged_model_of_state_dicts(stage: int) -> None:
    """The reference averages the state dicts by a formula."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    plain, average = copy.deepcopy(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    session = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, precision="bf16")
    expected: dict[str, torch.Tensor] = {}
    for _ in range(3):
        session.backward(session.module(torch.ones(2, 4)).float().square().mean())
        session.optimizers[0].step()
        session.optimizers[0].zero_grad()
        state = session.module.state_dict()
        plain.load_state_dict(state)
        average.update_parameters(plain)
        expected = {name: (expected.get(name, value) + value) / 2 for name, value in state.items()}
    found = average.module.state_dict()
    assert {each.dtype for each in found.values()} == {torch.float32}
    assert any(bool((value != value.bfloat16()).any()) for value in state.values())
    assert_close(found, expected, 1e-6, "average")
    with pytest.raises(RuntimeError) as error, session.module.gathered():
        average.update_parameters(model)
    (note,) = error.value.__notes__
    assert "torch.bfloat16" in note and "load state_dict() of session.module" in note
    session.close()
