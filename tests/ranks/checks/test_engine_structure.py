"""Modules and parameters that come, go or move after sharding: as in plain torch, or an error that names them.

LoRA on packed experts (peft's ``target_parameters``), which puts a parametrization around each forward pass.
torch's own data parallelism left around a model that is sharded: refused, since it would train by gradients of 0.
What ``unshard()`` has given back stays as it is, whatever is asked of the session.
"""

import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parametrize
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.session import OneParameter, Session, ShardedOptimizer, build
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import (
    PLANS,
    adam,
    check,
    data,
    loss_of,
    one_mesh,
    run_plain,
    seeded,
    sgd,
    sharded,
    told,
)
from tests.support.sets import full

STAGES = ["zero3", *full("zero2", "zero3_gloo")]
State = dict[str, Tensor]


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


# ---- errors


def replace_module(model: Net) -> None:
    model.head = nn.Linear(6, 6).double()


def resize(model: Net) -> None:
    """As Hugging Face's resize_token_embeddings."""
    old, model.words = model.words, nn.Embedding(8, 6).double()
    with torch.no_grad():
        model.words.weight[:5] = old.weight


def remove_module(model: Net) -> None:
    del model.body[2]


def add_adapter(model: Net) -> None:
    """As peft: the old layer becomes a part of the new one."""
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


def unfreeze_a_guest(model: Net) -> None:
    model.guest = nn.Linear(2, 2).requires_grad_(False)


WRONG: list[tuple[Callable[[Net], None], str, bool]] = [
    (replace_module, "head.weight (6, 6)", True),
    (resize, "words.weight (8, 6)", True),
    (remove_module, "body.2.weight (6, 6)", True),
    (add_adapter, "head.0.weight (6, 6)", True),
    (tie, "head.weight", False),
    (parametrized, "head", True),
    (unfreeze, "extra.weight", False),
]
"""Change, what the message names, and whether a forward pass tells it already."""


def wrong(plan: Plan) -> list[list[str]]:
    found = []
    with one_mesh(plan) as mesh:
        for change, _, at_once in WRONG:
            model = seeded(Net)
            with sharded(model, sgd(model), plan, mesh) as session:
                session.backward(loss_of(session))
                if change is resize:  # what it copies is not there at ZeRO-3
                    with session.module.gathered():
                        change(model)
                else:
                    change(model)
                messages = [told(session.optimizer.step), told(session.module.state_dict)]
                if at_once:
                    messages.append(told(lambda: loss_of(session)))
                found.append(messages)
        model = seeded(Net)
        with sharded(model, sgd(model), plan, mesh) as session:
            unfreeze_a_guest(model)
            session.backward(loss_of(session))
            session.optimizer.step()
            model.guest.requires_grad_(True)
            found.append([told(session.module.state_dict)])
    return found


@pytest.mark.parametrize("name", STAGES)
def test_parameters_that_come_or_go_are_refused(name: str) -> None:
    for results in run_ranks(2, wrong, PLANS[name]):
        assert "guest.weight (2, 2)" in results.pop()[0]
        for (change, parameter, _), messages in zip(WRONG, results, strict=True):
            for message in messages:
                assert parameter in message and "before sharding" in message, (change.__name__, message)


# ---- what goes on as in plain torch


class Logged(nn.Module):
    """Wraps a module and makes a buffer and a module of its own on the way."""

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


def program(model: nn.Module, rank: int, step: int) -> object:
    yield model(data(rank, step)).square().mean(), False


def harmless(plan: Plan) -> tuple[State, State]:
    model = seeded(Net)
    with sharded(model, adam(model), plan) as session:
        before = session.module.state_dict()
        torch.manual_seed(5)
        changed(model)
        for step in range(3):
            session.backward(session.module(data(session.mesh.rank, step)).square().mean())
            session.optimizer.step()
        return before, session.module.state_dict()


def changed_net() -> nn.Module:
    """Seeded, then changed as it is after sharding."""
    torch.manual_seed(0)
    model = Net()
    torch.manual_seed(5)
    return changed(model)


@pytest.mark.parametrize("name", STAGES)
def test_what_has_nothing_to_train_may_come_and_go(name: str) -> None:
    expected = run_plain(changed_net, program, 2, 3)
    for before, after in run_ranks(2, harmless, PLANS[name]):
        after.pop("head.seen")
        expected.pop("head.seen", None)
        assert_close(after, expected, 1e-11, name)
        assert torch.equal(before["body.2.weight"], after["body.2.weight"])


def frozen_for_a_while(session: Session, model: Net) -> None:
    for step in range(4):
        model.head.requires_grad_(step % 2 == 0)
        session.backward(session.module(data(session.mesh.rank, step)).square().mean())
        session.optimizer.step()


def frozen_before_backward(session: Session, model: Net) -> None:
    """Between a step's forward and backward passes: in its second pass, then in its only one."""
    for step in range(4):
        for index in range(2 - step % 2):
            loss = session.module(data(session.mesh.rank, step, index)).square().mean()
            model.head.requires_grad_(not (step % 2 or index))
            session.backward(loss)
        assert (model.head.weight.grad is None) == bool(step % 2)
        model.head.requires_grad_(True)
        session.optimizer.step()
        session.optimizer.zero_grad()


def thawing(plan: Plan, train: Callable[[Session, Net], None]) -> State:
    model = seeded(Net)
    with sharded(model, sgd(model), plan) as session:
        train(session, model)
        return session.module.state_dict()


def thawing_plainly(late: bool) -> State:
    """With ``late`` as in :func:`frozen_before_backward`."""
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


@pytest.mark.parametrize(
    ("name", "train"),
    [
        ("zero2", frozen_for_a_while),
        ("zero3", frozen_before_backward),
        *full(("zero2", frozen_before_backward), ("zero3", frozen_for_a_while)),
        *full(("zero3_gloo", frozen_for_a_while), ("zero3_gloo", frozen_before_backward)),
    ],
)
def test_parameters_that_are_frozen_for_a_while(name: str, train: Callable[[Session, Net], None]) -> None:
    expected = thawing_plainly(train is frozen_before_backward)
    for state in run_ranks(2, thawing, PLANS[name], train):
        assert_close(state, expected, 1e-11, name)


STEPS = 2


Result = tuple[list[float], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]
"""Losses, the last gradients, the state, and the weights with the adapter merged into them."""


def base() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        use_cache=False,
    )
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


def trained_plainly() -> Result:
    model = adapted()
    optimizer, losses = optimizer_of(model), []
    for step in range(STEPS):
        loss = sum(adapted_loss(model, rank, step) for rank in range(2)) / 2
        loss.backward()
        losses.append(float(loss.detach()))
        grads = grads_of(model)
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, grads, state, merged(model)


def merged(model: nn.Module) -> dict[str, Tensor]:
    return dict(copy.deepcopy(model).merge_and_unload().state_dict())


def trained(plan: Plan) -> Result:
    model, losses = adapted(), []
    with sharded(model, optimizer_of(model), plan) as session:
        for step in range(STEPS):
            loss = adapted_loss(session.module, session.mesh.rank, step)
            session.backward(loss)
            grads = grads_of(model)
            session.optimizer.step()
            session.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        state = session.module.state_dict()
        with tempfile.TemporaryDirectory() as folder:
            with session.module.gathered():
                model.save_pretrained(folder)
            return losses, grads, state, merged(PeftModel.from_pretrained(base(), folder))


@pytest.mark.parametrize("name", full("zero2", "zero3", "zero3_tensor", "zero3_gloo"))
def test_adapters_of_experts_train_as_plainly(name: str) -> None:
    losses, grads, state, whole = trained_plainly()
    results = run_ranks(2, trained, PLANS[name])
    for step in range(STEPS):
        assert abs(sum(found[step] for found, *_ in results) / 2 - losses[step]) < 1e-5
    for _, found_grads, found, found_whole in results:
        assert_close(found_grads, grads, 1e-4, f"{name}, gradients")
        assert_close(found, state, 1e-4, name)
        assert_close(found_whole, whole, 1e-4, f"{name}, exported and merged")


RESIDENT = ["ddp", "zero1", "zero2"]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def one_pass(model: nn.Module, rank: int, step: int):  # type: ignore[no-untyped-def]
    yield model(data(rank, step)).square().mean(), False


# ---- as the model, or in it

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DDP,
    "DataParallel": nn.DataParallel,
}


def given(kind: str) -> list[str]:
    said = []
    for inside in (False, True):
        model = seeded(net)
        wrapped = WRAPPERS[kind](model)
        outer = nn.Sequential(wrapped) if inside else wrapped
        for name in ("ddp", "zero2", "zero3"):
            said.append(told(lambda outer=outer, name=name: build(outer, adam(outer), PLANS[name]), ValueError))
        assert not any(vars(module).get("_is_sharded") for module in model.modules())
    return said


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", list(WRAPPERS))
def test_a_model_in_a_wrapper_of_torch_is_refused(kind: str, ranks: int) -> None:
    for outermost, *_, inside in run_ranks(ranks, given, kind):
        assert f"module '' of the model is a {kind}" in outermost and "pass the wrapped model" in outermost
        assert f"module '0' of the model is a {kind}" in inside


# ---- around it


class Outer(nn.Module):
    """Has no attributes of the module in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def around(name: str) -> tuple[list[str], dict[str, Tensor]]:
    """What is said, and the state after two steps in spite of it."""
    said: list[str] = []
    model = seeded(net)
    with one_mesh(PLANS[name]) as mesh:
        with sharded(model, adam(model), PLANS[name], mesh) as session:
            said += [told(lambda: DDP(session.module)), told(lambda: DDP(session.model))]
            if name in RESIDENT:
                hidden = DDP(Outer(session.module))
                said.append(told(lambda: hidden(data(mesh.rank, 0))))
                del hidden
            for step in range(2):
                train(session, step)
            state = session.module.state_dict()
            session.unshard()
        DDP(model)(data(mesh.rank, 0)).sum().backward()  # it is the user's again
        assert model[0].weight.grad is not None and model[0].weight.grad.abs().sum() > 0
    return said, state


def train(session: Session, step: int) -> None:
    session.module(data(session.mesh.rank, step)).square().mean().backward()
    session.optimizer.step()
    session.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("ddp", 1), ("zero2", 2), ("zero3", 2), *full(("ddp", 2), ("zero1", 1), ("zero1", 2), ("zero2", 1), ("zero3", 1))],
)
def test_ddp_around_a_sharded_model_is_refused_and_changes_nothing(name: str, ranks: int) -> None:
    found = run_ranks(ranks, around, name)
    for said, _ in found:
        assert len(said) == (3 if name in RESIDENT else 2)
        assert all("DistributedDataParallel around a sharded Sequential" in message for message in said), said
    check([state for _, state in found], run_plain(net, one_pass, ranks, 2), name)


def before_the_model_was_sharded() -> str:
    model = seeded(net)
    outer = DDP(model)
    with sharded(model, adam(model), PLANS["zero1"]) as session:
        message = told(lambda: outer(data(session.mesh.rank, 0)))
        train(session, 0)  # without it
        return message


def test_a_ddp_that_was_made_before_is_refused_when_it_runs() -> None:
    for message in run_ranks(2, before_the_model_was_sharded):
        assert "DistributedDataParallel around a sharded Sequential" in message


def unsharded_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def enter(session: Session, write_back: bool) -> None:
    with session.module.gathered(write_back=write_back):
        pass


def unshard_optimizer_of(session: Session) -> ShardedOptimizer:
    return session.optimizers[0]


def one(session: Session) -> OneParameter:
    found = session.one(session.params[0])
    assert found is not None
    return found


def loss(session: Session) -> torch.Tensor:
    """Of the model that was given back."""
    return session.model(torch.ones(2, 4)).sum()  # type: ignore[no-any-return]


def call_around(session: Session) -> None:
    with session.backward_pass():
        loss(session).backward()  # type: ignore[no-untyped-call]


Use = Callable[[Session, Path], object]
USES: dict[str, Use] = {
    "state_dict": lambda session, _: session.module.state_dict(),
    "load_state_dict": lambda session, _: session.module.load_state_dict(unsharded_net().state_dict()),
    "gathered": lambda session, _: enter(session, write_back=False),
    "written back": lambda session, _: enter(session, write_back=True),
    "save": lambda session, folder: session.checkpoints.save(folder / "new"),
    "load": lambda session, folder: session.checkpoints.load(folder / "saved"),
    "step": lambda session, _: unshard_optimizer_of(session).step(),
    "backward": lambda session, _: session.backward(loss(session)),
    "backward of the optimizer": lambda session, _: unshard_optimizer_of(session).backward(loss(session)),
    "backward_by_grad": lambda session, _: unshard_optimizer_of(session).backward_by_grad(
        loss(session), torch.ones(())
    ),
    "backward_pass": lambda session, _: call_around(session),
    "expect_backward": lambda session, _: session.expect_backward(2.0),
    "load_state_dict of the optimizer": lambda session, _: unshard_optimizer_of(session).load_state_dict({}),
    "write_back": lambda session, _: session.write_back(),
    "offload_states": lambda session, _: session.offload_states(),
    "full_gradients": lambda session, _: session.full_gradients(),
    "clip_grad_by_norm": lambda session, _: unshard_optimizer_of(session).clip_grad_by_norm(1.0),
    "clip_grad_by_value": lambda session, _: unshard_optimizer_of(session).clip_grad_by_value(1.0),
    "value": lambda session, _: one(session).value(),
    "set_value": lambda session, _: one(session).set_value(torch.ones(4, 4)),
    "set_gradient": lambda session, _: one(session).set_gradient(torch.ones(4, 4)),
    "set_state": lambda session, _: one(session).set_state("momentum_buffer", torch.ones(4, 4)),
}
EACH = {"zero2": PLANS["zero2"], "zero3": PLANS["zero3"], "kept": zero(3).but(gathered_budget_bytes=10**8)}


def state_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Values, and gradients."""
    grads = {f"{name}.grad": param.grad for name, param in model.named_parameters()}
    return {**{key: value.clone() for key, value in model.state_dict().items()}, **grads}


def same(found: torch.Tensor | None, before: torch.Tensor | None) -> bool:
    return found is before if found is None or before is None else torch.equal(found, before)


def evaluate(session: Session) -> int:
    """How many units stay gathered."""
    with torch.no_grad():
        session.module(torch.ones(2, 4))
    return len(session.engine.pool._gathered)


def uses(name: str, folder: Path) -> dict[str, tuple[str, bool]]:
    found = {}
    mesh = Mesh.create(EACH[name].mesh, torch.device("cpu"), EACH[name].comm)
    for use, call in USES.items():
        model = unsharded_net()
        session = build(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), EACH[name], mesh)
        if use == "load":
            session.checkpoints.save(folder / "saved")
        session.backward(session.module(torch.ones(2, 4)).sum())
        session.optimizers[0].step()
        assert bool(evaluate(session)) == (name != "zero2")
        session.unshard()
        assert not session.engine.pool._gathered
        before = state_of(model)
        try:
            call(session, folder)
            message = ""
        except Exception as error:
            message = str(error)
        session.unshard()  # does nothing
        session.drop_gathered()
        session.close()
        found[use] = message, all(same(value, before[key]) for key, value in state_of(model).items())
    mesh.close()
    return found


@pytest.mark.parametrize("name", ["zero3", *full("zero2", "kept")])
def test_what_unshard_gave_back_is_not_taken_again(name: str, tmp_path: Path) -> None:
    """At ZeRO-3 the weights became NaN, after an error that said they had been moved, or after none; or nothing
    happened."""
    for found in run_ranks(2, uses, name, tmp_path):
        for use, (message, same) in found.items():
            assert "Sequential is no longer sharded since unshard()" in message, (use, message)
            assert same, f"{use} changed the model"


def old_optimizer(name: str) -> tuple[str, str]:
    messages = []
    for end in (Session.close, Session.unshard):
        model = unsharded_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = build(model, optimizer, PLANS[name])
        end(session)
        try:
            optimizer.step()
            messages.append("stepped")
        except RuntimeError as error:
            messages.append(str(error))
        session.mesh.close()
    return messages[0], messages[1]


def test_the_old_optimizer_says_that_it_has_parts_alone() -> None:
    """It would update pieces that are of no model, and nothing would be trained. After close() alone the parameters
    have no values at ZeRO-3, and a new optimizer is of no use."""
    for closed, unsharded in run_ranks(2, old_optimizer, "zero3"):
        assert "SGD" in closed and "model that was closed: build it again, with a new one" in closed
        assert "SGD" in unsharded and "make a new one on model.parameters()" in unsharded
    for messages in run_ranks(2, old_optimizer, "zero2"):
        assert all("make a new one on model.parameters()" in text for text in messages), messages
