"""Modules and parameters that are added, removed or moved after sharding: as in plain torch, or an error names them.

Also: LoRA on packed experts (peft's ``target_parameters``), which parametrizes around each forward pass; torch's data
parallelism around a sharded model, which is refused because it would train with zero gradients; and ``unshard()``,
after which the session no longer changes the model.
"""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parametrize
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from shardwise.plan import zero
from shardwise.session import Session, build
from shardwise.testing import assert_close
from tests.support.engine_setup import (
    PLANS,
    adam,
    data,
    loss_of,
    mean_square,
    one_mesh,
    plain_steps,
    seeded,
    sgd,
    sharded,
    told,
    two_layers,
)
from tests.support.on_ranks import assert_refused, everywhere, on_ranks
from tests.support.sets import full

STAGES = ["zero3", *full("zero2", "zero3_gloo")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
        self.extra = nn.Linear(6, 6)
        self.extra.requires_grad_(False)
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x + self.words(torch.arange(4)))
        return self.head(x + self.extra(x))


# ---- refused changes


def replace_module(model: Net) -> None:
    model.head = nn.Linear(6, 6).double()


def resize(model: Net) -> None:
    """Replace the embedding as Hugging Face's resize_token_embeddings does."""
    old, model.words = model.words, nn.Embedding(8, 6).double()
    with torch.no_grad():
        model.words.weight[:5] = old.weight


def remove_module(model: Net) -> None:
    del model.body[2]


def add_adapter(model: Net) -> None:
    """Wrap the head as peft does: the old layer becomes a part of the new one."""
    base, model.head = model.head, nn.Sequential(nn.Linear(6, 6).double())
    model.head.append(base)


def tie(model: Net) -> None:
    model.head.weight = model.body[0].weight


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def parametrized(model: Net) -> None:
    parametrize.register_parametrization(model.head, "weight", Doubled(), unsafe=True)


def unfreeze(model: Net) -> None:
    model.extra.requires_grad_(True)


WRONG: list[tuple[Callable[[Net], None], str, bool]] = [
    (replace_module, "head.weight (6, 6)", True),
    (resize, "words.weight (8, 6)", True),
    (remove_module, "body.2.weight (6, 6)", True),
    (add_adapter, "head.0.weight (6, 6)", True),
    (tie, "head.weight", False),
    (parametrized, "head", True),
    (unfreeze, "extra.weight", False),
]
"""A change, the name in the message, and whether a forward pass raises it already."""


@on_ranks(2)
@pytest.mark.parametrize("name", STAGES)
def test_added_or_removed_parameters_are_refused(name: str) -> None:
    with one_mesh(PLANS[name]) as mesh:
        for change, parameter, at_once in WRONG:
            model = seeded(Net)
            with sharded(model, sgd(model), PLANS[name], mesh) as session:
                session.backward(loss_of(session))
                # At ZeRO-3 the weight that resize() copies has to be gathered.
                with session.module.gathered() if change is resize else nullcontext():
                    change(model)
                calls = [session.optimizer.step, session.module.state_dict, partial(loss_of, session)]
                for call in calls[: 2 + at_once]:
                    message = told(call)
                    assert parameter in message and "before sharding" in message, (change.__name__, message)
        model = seeded(Net)
        with sharded(model, sgd(model), PLANS[name], mesh) as session:
            model.guest = nn.Linear(2, 2).requires_grad_(False)
            train(session, 0)
            model.guest.requires_grad_(True)
            assert "guest.weight (2, 2)" in told(session.module.state_dict)


# ---- allowed changes


class Logged(nn.Module):
    """Wrap a module; create a buffer and a module in the first forward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))
            self.norm = nn.LayerNorm(6, elementwise_affine=False)
        self.seen += 1
        return self.norm(self.inner(x))


def changed(model: Net) -> Net:
    model.body[1] = nn.Tanh()
    model.head = Logged(model.head)
    model.shift = nn.Linear(6, 6).double().requires_grad_(False)
    model.extra.register_forward_hook(lambda _module, _args, out: out + model.shift(torch.ones(6, dtype=out.dtype)))
    model.body[2].weight.requires_grad_(False)
    return model


@on_ranks(2)
@pytest.mark.parametrize("name", STAGES)
def test_modules_without_trainable_parameters_may_change(name: str) -> None:
    plain, model = seeded(Net), seeded(Net)
    torch.manual_seed(5)
    expected = plain_steps(changed(plain), adam(plain), 3)
    with sharded(model, adam(model), PLANS[name]) as session:
        before = session.module.state_dict()["body.2.weight"]
        torch.manual_seed(5)
        changed(model)
        for step in range(3):
            train(session, step)
        after = session.module.state_dict()
    assert after.pop("head.seen") == 3 and expected.pop("head.seen") == 6
    assert_close(after, expected, 1e-11, name)
    assert torch.equal(before, after["body.2.weight"])


def frozen_for_a_while(session: Session, model: Net) -> None:
    for step in range(4):
        model.head.requires_grad_(step % 2 == 0)
        train(session, step)


def frozen_before_backward(session: Session, model: Net) -> None:
    """Freeze between forward and backward: in the second pass of a step, then in its only pass."""
    for step in range(4):
        for index in range(2 - step % 2):
            loss = session.module(data(session.mesh.rank, step, index)).square().mean()
            model.head.requires_grad_(not (step % 2 or index))
            session.backward(loss)
        assert (model.head.weight.grad is None) == bool(step % 2)
        model.head.requires_grad_(True)
        session.optimizer.step()
        session.optimizer.zero_grad()


def thawing_plainly(late: bool) -> dict[str, Tensor]:
    """Train with plain torch; ``late`` freezes as :func:`frozen_before_backward` does."""
    model = seeded(Net)
    optimizer = sgd(model)
    for step in range(4):
        for index in range(2 - step % 2 if late else 1):
            model.head.requires_grad_(late or step % 2 == 0)
            losses = [model(data(rank, step, index)).square().mean() / 2 for rank in range(2)]
            model.head.requires_grad_(not (step % 2 or index))
            torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "train"),
    [
        ("zero2", frozen_for_a_while),
        ("zero3", frozen_before_backward),
        *full(("zero2", frozen_before_backward), ("zero3", frozen_for_a_while)),
        *full(("zero3_gloo", frozen_for_a_while), ("zero3_gloo", frozen_before_backward)),
    ],
)
def test_temporarily_frozen_parameters(name: str, train: Callable[[Session, Net], None]) -> None:
    model = seeded(Net)
    with sharded(model, sgd(model), PLANS[name]) as session:
        train(session, model)
        assert_close(session.module.state_dict(), thawing_plainly(train is frozen_before_backward), 1e-11, name)


def base() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "head_dim": 8, "vocab_size": 32}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "decoder_sparse_step": 1}
    config = Qwen3MoeConfig(**sizes, **counts, num_experts=4, num_experts_per_tok=2, use_cache=False)
    return Qwen3MoeForCausalLM(config)


def adapted() -> nn.Module:
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    with warnings.catch_warnings(action="ignore"):
        model = get_peft_model(base(), LoraConfig(r=2, target_modules=[], target_parameters=experts, lora_dropout=0.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.02)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.5)


def adapted_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))
    return model(input_ids=ids, labels=ids).loss


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def merged(model: nn.Module) -> dict[str, Tensor]:
    return dict(copy.deepcopy(model).merge_and_unload().state_dict())


@on_ranks(2)
@pytest.mark.parametrize("name", full("zero2", "zero3", "zero3_tensor", "zero3_gloo"))
def test_lora_on_packed_experts_equals_plain_torch(name: str, tmp_path: Path) -> None:
    plain, model = adapted(), adapted()
    optimizer = optimizer_of(plain)
    with sharded(model, optimizer_of(model), PLANS[name]) as session:
        for step in range(2):
            expected = sum(adapted_loss(plain, rank, step) for rank in range(2)) / 2
            expected.backward()
            loss = adapted_loss(session.module, session.mesh.rank, step)
            session.backward(loss)
            assert abs(sum(everywhere(loss.item())) / 2 - expected.item()) < 1e-5
            assert_close(grads_of(model), grads_of(plain), 1e-4, f"{name}, gradients")
            for each in (session.optimizer, optimizer):
                each.step()
                each.zero_grad()
        assert_close(session.module.state_dict(), plain.state_dict(), 1e-4, name)
        folder = tmp_path / str(session.mesh.rank)
        with session.module.gathered():
            model.save_pretrained(folder)
    whole = merged(PeftModel.from_pretrained(base(), folder))
    assert_close(whole, merged(plain), 1e-4, f"{name}, exported and merged")


RESIDENT = ["ddp", "zero1", "zero2"]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


# ---- wrappers of torch as the model, or in it

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DDP,
    "DataParallel": nn.DataParallel,
}


@on_ranks()
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", list(WRAPPERS))
def test_wrapped_models_are_refused(kind: str, ranks: int) -> None:
    model = seeded(net)
    wrapped = WRAPPERS[kind](model)
    for outer, name in ((wrapped, "the model"), (nn.Sequential(wrapped), "module '0' of the model")):
        for plan in ("ddp", "zero2", "zero3"):
            message = told(lambda outer=outer, plan=plan: build(outer, adam(outer), PLANS[plan]), ValueError)
            assert message.startswith(f"{name} is a {kind}") and "pass the wrapped model" in message
    assert not any(vars(module).get("_is_sharded") for module in model.modules())


# ---- DDP around the model


class Outer(nn.Module):
    """A wrapper without the attributes of its inner module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def train(session: Session, step: int) -> None:
    session.backward(mean_square(session.module, session.mesh.rank, step))
    session.optimizer.step()
    session.optimizer.zero_grad()


@on_ranks()
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("ddp", 1), ("zero2", 2), ("zero3", 2), *full(("ddp", 2), ("zero1", 1), ("zero1", 2), ("zero2", 1), ("zero3", 1))],
)
def test_ddp_around_a_sharded_model_is_refused(name: str, ranks: int) -> None:
    plain, model = seeded(net), seeded(net)
    before = DDP(model) if name in RESIDENT else None
    with one_mesh(PLANS[name]) as mesh:
        with sharded(model, adam(model), PLANS[name], mesh) as session:
            calls = [lambda: DDP(session.module), lambda: DDP(session.model)]
            if name in RESIDENT:
                hidden = DDP(Outer(session.module))
                calls += [lambda: hidden(data(mesh.rank, 0)), lambda: before(data(mesh.rank, 0))]
            assert_refused(*((call, "DistributedDataParallel around a sharded Sequential") for call in calls))
            for step in range(2):
                train(session, step)
            expected = plain_steps(plain, adam(plain), 2, ranks=ranks)
            assert_close(session.module.state_dict(), expected, 1e-11, name)
            session.unshard()
        DDP(model)(data(mesh.rank, 0)).sum().backward()  # the model is unsharded
        assert model[0].weight.grad is not None and model[0].weight.grad.abs().sum() > 0


def enter(session: Session, write_back: bool) -> None:
    with session.module.gathered(write_back=write_back):
        pass


def loss(session: Session) -> Tensor:
    """Return the loss of the unsharded model."""
    return session.model(torch.ones(2, 6, dtype=torch.float64)).sum()


def call_around(session: Session) -> None:
    with session.backward_pass():
        loss(session).backward()


ONES = torch.ones(6, 6)
USES: dict[str, Callable[[Session, Path], object]] = {
    "state_dict": lambda session, _: session.module.state_dict(),
    "load_state_dict": lambda session, _: session.module.load_state_dict(seeded(net, 1).state_dict()),
    "gathered": lambda session, _: enter(session, write_back=False),
    "written back": lambda session, _: enter(session, write_back=True),
    "save": lambda session, folder: session.checkpoints.save(folder / "new"),
    "load": lambda session, folder: session.checkpoints.load(folder / "saved"),
    "step": lambda session, _: session.optimizer.step(),
    "backward": lambda session, _: session.backward(loss(session)),
    "backward of the optimizer": lambda session, _: session.optimizer.backward(loss(session)),
    "backward_by_grad": lambda session, _: session.optimizer.backward_by_grad(loss(session), torch.ones(())),
    "backward_pass": lambda session, _: call_around(session),
    "expect_backward": lambda session, _: session.expect_backward(2.0),
    "load_state_dict of the optimizer": lambda session, _: session.optimizer.load_state_dict({}),
    "write_back": lambda session, _: session.write_back(),
    "offload_states": lambda session, _: session.offload_states(),
    "full_gradients": lambda session, _: session.full_gradients(),
    "clip_grad_by_norm": lambda session, _: session.optimizer.clip_grad_by_norm(1.0),
    "clip_grad_by_value": lambda session, _: session.optimizer.clip_grad_by_value(1.0),
    "value": lambda session, _: session.one(session.params[0]).value(),
    "set_value": lambda session, _: session.one(session.params[0]).set_value(ONES),
    "set_gradient": lambda session, _: session.one(session.params[0]).set_gradient(ONES),
    "set_state": lambda session, _: session.one(session.params[0]).set_state("momentum_buffer", ONES),
}
EACH = {"zero2": PLANS["zero2"], "zero3": PLANS["zero3"], "kept": zero(3).but(gathered_budget_bytes=10**8)}


def state_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return {name: value.clone() for name, value in model.state_dict().items()}, grads_of(model)


@on_ranks(2)
@pytest.mark.parametrize("name", ["zero3", *full("zero2", "kept")])
def test_session_calls_after_unshard_raise(name: str, tmp_path: Path) -> None:
    """Regression: at ZeRO-3 some of these calls set the weights to NaN, with or without an error."""
    with one_mesh(EACH[name]) as mesh:
        for use, call in USES.items():
            model = seeded(net)
            with sharded(model, sgd(model), EACH[name], mesh) as session:
                if use == "load":
                    session.checkpoints.save(tmp_path / "saved")
                session.backward(loss_of(session))
                session.optimizer.step()
                with torch.no_grad():
                    loss_of(session)
                assert bool(session._engine.pool._gathered) == (name != "zero2")
                session.unshard()
                assert not session._engine.pool._gathered
                values, grads = state_of(model)
                message = told(partial(call, session, tmp_path), Exception)
                assert "Sequential is no longer sharded since unshard()" in message, (use, message)
                session.unshard()  # no effect
                session.drop_gathered()
            for found, before in zip(state_of(model), (values, grads), strict=True):
                assert_close(found, before, 0.0, f"after {use}")


@on_ranks(2)
def test_step_of_the_old_optimizer_raises_after_close_and_unshard() -> None:
    """Its step() would update shards of no model. After close() the ZeRO-3 parameters have no values, so that the error
    asks for a new build, and not only for a new optimizer.
    """
    anew = "make a new one on model.parameters()"
    closed = "model that was closed: build it again, with a new one"
    for end, name, words in (
        (Session.close, "zero3", closed),
        (Session.unshard, "zero3", anew),
        (Session.close, "zero2", anew),
        (Session.unshard, "zero2", anew),
    ):
        model = two_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = build(model, optimizer, PLANS[name])
        end(session)
        message = told(optimizer.step)
        assert "SGD" in message and words in message, message
        session.mesh.close()
