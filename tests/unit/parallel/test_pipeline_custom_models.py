"""Tests of pipeline stages with custom models and with wrapped Hugging Face models, both stages on one rank.

- A model with one hidden state trains exactly; one that uses an earlier stage's output again raises an error.
- Wrapped models match plain training, or the error says why they cannot be divided.
- The backward pass split into input and weight gradients (``WeightGradients``) gives the gradients of one pass.
- Sentinels of failed passes are recognized, and an interrupted step ends the session.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwise.core.parallel.pipeline.batch import split_batch
from shardwise.core.parallel.pipeline.run import StageRun, is_sentinel, sentinel
from shardwise.core.parallel.pipeline.schedule import make_schedule
from shardwise.core.parallel.pipeline.split import Passes, WeightGradients, WeightsApart
from shardwise.core.parallel.pipeline.staging import TABLES, Body, stage_model
from shardwise.testing import assert_close
from tests.support.hybrid_setup import VOCABULARY, WIDTH, made
from tests.support.on_ranks import raises
from tests.support.tensor_setup import Exact

OWN_VOCABULARY, OWN_WIDTH, LENGTH = 17, 8, 5
IDS = torch.randint(0, OWN_VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(1))
Way = Callable[[Any, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(OWN_WIDTH, OWN_WIDTH)

    def forward(self, x: Tensor, x0: Tensor | None = None, in_place: bool = False) -> Tensor:
        if in_place:
            x = functional.relu_(x)
        return x + torch.tanh(self.f(x)) + (0.0 if x0 is None else 0.5 * x0)


class Net(nn.Module):
    """A model whose head gets ``way(self, ids)``."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.embed, self.head = nn.Embedding(OWN_VOCABULARY, OWN_WIDTH), nn.Linear(OWN_WIDTH, OWN_VOCABULARY)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.pos, self.scale = nn.Parameter(torch.zeros(1, LENGTH, OWN_WIDTH)), nn.Parameter(torch.ones(4))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.way(self, ids))


def loss_of(logits: Any, ids: Any) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), (ids["ids"] if isinstance(ids, dict) else ids).flatten())


def staged(
    model: nn.Module, style: str = "interleaved", batch: Any = None, parts: int = 2, train: bool = True, **more: Any
) -> Tensor:
    """Return the loss of one step with two stages on this rank; gradients are accumulated."""
    own = {"layers_by_stage": (2, 2), "body": Body(tokens="embed")} if batch is None else {}
    staging = stage_model(model, 0, 1, 2, **own | more, v_shaped=style == "zbv")
    staging.install()
    try:
        divided = split_batch({"ids": IDS} if batch is None else batch, parts, None)
        criterion = loss_of if batch is None else model_loss
        schedule = make_schedule(style, 1, 2, len(divided))
        loss = StageRun(staging, None).step(schedule, divided, criterion, Passes() if train else None).loss
    finally:
        staging.remove()
    assert loss is not None
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def through(model: Any, x: Tensor, first: int = 0) -> Tensor:
    for layer in model.layers[first:]:
        x = layer(x)
    return x


def skip_to_layers(model: Any, ids: Tensor) -> Tensor:
    x = x0 = model.embed(ids)
    for layer in model.layers:
        x = layer(x, x0)
    return x


def mean_of_all(model: Any, ids: Tensor) -> Tensor:
    x, seen = model.embed(ids), []
    for layer in model.layers:
        x = layer(x)
        seen.append(x)
    return torch.stack(seen).mean(0)


def side_by_side(model: Any, ids: Tensor) -> Tensor:
    x = model.embed(ids)
    model.layers[0](x)
    return through(model, x, 1)


def twice(model: Any, ids: Tensor) -> Tensor:
    return through(model, through(model, model.embed(ids)))


def extrapolated(model: Any, ids: Tensor) -> Tensor:
    x0 = model.embed(ids)
    x = model.layers[0](x0)
    return through(model, x + (x - x0), 1)


class Unseen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, grad.sum(0, keepdim=True)


def unseen(x: Tensor, y: Tensor) -> Tensor:
    return Unseen.apply(x, y)  # type: ignore[no-untyped-call]


def through_first(model: Any, ids: Tensor) -> Tensor:
    return model.layers[1](model.layers[0](model.embed(ids)))  # type: ignore[no-any-return]


AGAIN = [skip_to_layers, mean_of_all]


@pytest.mark.parametrize("way", AGAIN)
def test_outputs_of_earlier_stages_cannot_be_used_again(way: Way) -> None:
    told = r"Net uses the output of Net\.embed or of a layer of an earlier stage again in stage 1.*pp=1"
    raises(RuntimeError, told, staged, Net(way))
    with torch.no_grad():
        assert staged(Net(way), train=False).isnan()


def in_a_row(model: Any, ids: Tensor) -> Tensor:
    return through(model, through(model, model.embed(ids)), 2)


def test_layers_are_called_once() -> None:
    raises(RuntimeError, r"calls layers\.0 after layers of stage 1", staged, Net(twice))
    raises(RuntimeError, r"calls layers\.2 twice in stage 1", staged, Net(in_a_row))


def test_loss_cannot_use_outputs_of_earlier_stages() -> None:
    class Both(Net):
        def forward(self, ids: Tensor) -> Any:
            x0 = self.embed(ids)
            return self.head(through(self, x0)), x0

    staging = stage_model(Both(through), 0, 1, 2, None, Body(tokens="embed"))
    staging.install()
    run, parts = StageRun(staging, None), split_batch({"ids": IDS}, 2, None)
    schedule = make_schedule("interleaved", 1, 2, 2)
    run.step(schedule, parts, lambda out, ids: loss_of(out[0], ids), Passes())
    with pytest.raises(RuntimeError, match=r"uses the output of Both\.embed"):
        run.step(schedule, parts, lambda out, ids: loss_of(out[0], ids) + out[1].mean(), Passes())


def only_shapes(model: Any, ids: Tensor) -> Tensor:
    x = model.embed(ids)
    mask = torch.zeros_like(x) + torch.ones(1, 1).to(x).expand_as(x) * x.new_zeros(x.shape[-1])
    assert not mask.any() and len(x) == x.size(0) == x.shape[0]
    x = through(model, x.to(x.dtype).contiguous() + torch.zeros(1, device="cpu"))
    assert x.shape == mask.shape
    return x


def by_layers(call: Callable[[Any, Tensor], Tensor]) -> Way:
    """Return a way that calls ``call(layer, x)`` for one layer after the other."""
    return lambda model, ids: functools.reduce(lambda x, layer: call(layer, x), model.layers, model.embed(ids))


EXACT: dict[str, Way] = {
    "plain": lambda m, ids: through(m, m.embed(ids)),
    "side by side": side_by_side,
    "extrapolated": extrapolated,
    "scaled": lambda m, ids: through(m, m.embed(ids) * 2.0),
    "scaled in place": lambda m, ids: through(m, m.embed(ids).mul_(2.0)),
    "scaled between layers": lambda m, ids: through(m, m.layers[0](m.embed(ids)) * 1.7, 1),
    "scaled between stages": lambda m, ids: through(m, through_first(m, ids) * 1.7, 2),
    "with a parameter": lambda m, ids: through(m, m.embed(ids) + m.pos),
    "with a parameter between stages": lambda m, ids: through(m, unseen(through_first(m, ids), m.pos), 2),
    "depends on values": lambda m, ids: through(m, m.embed(ids) if m.embed(ids).mean() > 100.0 else m.embed(ids) * 3.0),
    "copied": lambda m, ids: through(m, m.embed(ids).clone() * 1.0),
    "frozen and zero": lambda m, ids: through(m, m.embed(ids) + m.pos.detach()),
    "only shapes": only_shapes,
    "checkpointed": by_layers(functools.partial(checkpoint, use_reentrant=False)),
    "checkpointed, reentrant": by_layers(functools.partial(checkpoint, use_reentrant=True)),
    "begins in place": by_layers(lambda layer, x: layer(x, in_place=True)),
}


@pytest.mark.parametrize("style", ["interleaved", "zbv"])
@pytest.mark.parametrize("case", EXACT)
def test_models_with_one_hidden_state_are_exact(case: str, style: str) -> None:
    model = Net(EXACT[case])
    expected = loss_of(model(IDS), IDS)
    expected.backward()
    grads = gradients(model)
    model.zero_grad()
    loss = staged(model, style, layers_by_stage=(3, 1) if case == "only shapes" else (2, 2))
    assert_close({"loss": loss}, {"loss": expected.detach()}, 1e-13, "loss")
    assert_close(gradients(model), grads, 1e-12, "gradients", floor=1e-2)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_close({"loss": staged(model, train=False)}, {"loss": expected.detach()}, 1e-13, "forward alone")


def test_one_module_used_as_several_layers_is_refused() -> None:
    model = Net(EXACT["plain"])
    model.layers[2] = model.layers[0]
    for rank in range(2):
        told = r"layers\.0 and layers\.2 of the Net are one module, in stages 0"
        raises(ValueError, told, stage_model, model, rank, 2, 2, None, Body(tokens="embed"))
        stage_model(model, rank, 2, 1, None, Body(tokens="embed"))


MODEL_IDS = torch.randint(1, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(5))
BATCH = {"input_ids": MODEL_IDS, "labels": MODEL_IDS}


def model_loss(outputs: Any, _inputs: Any = None) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs.loss


def check_is_plain(model: nn.Module, batch: Any, parts: int = 2) -> None:
    """Compare loss and gradients with plain training; all rows of the batch must have the same weight."""
    with Exact():
        expected = model_loss(model(**batch))
    expected.backward()
    grads = gradients(model)
    model.zero_grad()
    with Exact():
        loss = staged(model, batch=batch, parts=parts)
    assert_close({"loss": loss}, {"loss": expected.detach()}, 1e-12, "loss")
    assert_close(gradients(model), grads, 1e-11, "gradients", floor=1e-2)


class Wrapped(nn.Module):
    """A module around a language model, which gets ``inputs(self, input_ids)``."""

    def __init__(self, inputs: Callable[[Any, Tensor], dict[str, Tensor]], **modules: nn.Module) -> None:
        super().__init__()
        self.lm = made("llama")
        self.inputs = inputs
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.lm(**self.inputs(self, input_ids), labels=labels)


def embedded(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], dict[str, Tensor]]:
    return lambda model, ids: {"inputs_embeds": change(model.lm.get_input_embeddings()(ids))}


PROMPT = torch.ones(1, 3, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize(
    "inputs",
    [
        embedded(lambda x: x * 4.0),
        embedded(lambda x: torch.cat([PROMPT.expand(len(x), -1, -1), x], 1)[:, : x.shape[1]]),
        lambda _model, ids: {"inputs_embeds": torch.nn.functional.one_hot(ids % WIDTH, WIDTH).double()},
    ],
    ids=["scaled", "a prompt", "embeddings given"],
)
def test_changes_of_the_embeddings_are_applied_once(inputs: Any) -> None:
    check_is_plain(Wrapped(inputs), BATCH)


def test_norm_after_the_embedding_needs_body_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llama")

    class Normed(type(model.model)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, **given: Any) -> Any:
            given["inputs_embeds"] = self.embed_norm(self.embed_tokens(input_ids))
            return super().forward(**given)

    model.model.__class__ = Normed
    model.model.embed_norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
    raises(RuntimeError, r"calls model\.embed_norm before .* of Normed .*Body\.before", staged, model, batch=BATCH)
    monkeypatch.setitem(TABLES, "Normed", replace(TABLES["LlamaModel"], before=("embed_norm",)))
    check_is_plain(model, BATCH)


class Exit(nn.Module):
    def __init__(self, **asked: Any) -> None:
        super().__init__()
        self.lm, self.head = made("llama").model, nn.Linear(WIDTH, 1, dtype=torch.float64)
        self.asked = asked

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.lm(input_ids=input_ids, **self.asked)[0]).mean()


def test_output_hidden_states_of_inner_models_is_refused() -> None:
    for name in ("output_hidden_states", "output_attentions"):
        told = f"{name}=True for a LlamaModel in pipeline stages"
        raises(ValueError, told, staged, Exit(**{name: True}), batch=BATCH)
    asked = {**BATCH, "output_hidden_states": True}
    raises(ValueError, "True for a LlamaForCausalLM in pipeline stages", staged, made("llama"), batch=asked)
    model = Exit()
    model.lm.config.output_hidden_states = True
    raises(ValueError, "output_hidden_states=True for a LlamaModel in pipeline stages", staged, model, batch=BATCH)
    model.asked["output_hidden_states"] = False
    check_is_plain(model, BATCH)
    assert not model.lm._forward_pre_hooks


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_num_items_in_batch_counts_all_microbatches(kind: Callable[[int], Any]) -> None:
    labels = MODEL_IDS.clone()
    labels[0, 2:], labels[3, 4:] = -100, -100
    for parts in (1, 3, 4):  # 3 parts have 2, 1 and 1 rows
        check_is_plain(made("llama"), {"input_ids": MODEL_IDS, "labels": labels, "num_items_in_batch": kind(17)}, parts)


TWELVE = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("again", [None, False, True], ids=["kept", "again", "reentrant"])
def test_split_backward_matches_one_backward(kind: str, again: bool | None) -> None:
    model: Any = made(kind)
    expected = copy.deepcopy(model)
    expected(input_ids=TWELVE, labels=TWELVE).loss.backward()
    products = [m for m in model.modules() if isinstance(m, nn.Linear) or hasattr(m, "nf")]
    model.get_input_embeddings().weight.register_hook(lambda grad: 2 * grad)
    expected.get_input_embeddings().weight.grad *= 2
    for layer in model.modules():
        if again is not None and hasattr(layer, "gradient_checkpointing"):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=again)
    apart, later, passes = WeightsApart(), WeightGradients(), Passes()
    with apart:
        loss = model(input_ids=TWELVE, labels=TWELVE).loss
    with apart.into(later):
        passes.inputs(loss, None, later)
    parts = {id(param) for module in products for param in module.parameters(recurse=False)}
    early = {id(param) for param in model.parameters() if param.grad is not None}
    assert early and early & parts <= {id(model.get_input_embeddings().weight)}  # of a tied head
    assert len(later._left) == len(parts) > 10
    passes.weights(later)
    assert not later._left
    assert_close(gradients(model), gradients(expected), 1e-12, kind)


def test_weight_gradients_that_cannot_be_postponed() -> None:
    """Frozen weights, inputs without a gradient, products with an expression of a parameter, and autocast."""
    frozen, first, last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    frozen.weight.requires_grad_(False)
    x = torch.randn(4, 3)
    apart, later = WeightsApart(), WeightGradients()
    with apart:
        hidden = frozen(first(x)) @ torch.eye(3)
        hidden = nn.functional.linear(hidden, 2 * last.weight)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = last(hidden)
    with apart.into(later):
        Passes().inputs(hidden.float().sum(), None, later)
    assert not later._left
    assert all(p.grad is not None for m in (first, last) for p in m.parameters())
    assert frozen.bias.grad is not None and frozen.weight.grad is None


def test_autograd_grad_in_forward_is_refused() -> None:
    layer, x = nn.Linear(3, 1), torch.randn(2, 3, requires_grad=True)
    with WeightsApart(), pytest.raises(RuntimeError, match=r"a stage's \(1, 3\) weight outside of the schedule's"):
        torch.autograd.grad(layer(x).sum(), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sentinels_are_recognized(dtype: torch.dtype) -> None:
    for shape in ((2, 3), (1,), (5,)):
        x = sentinel(torch.Size(shape), dtype, torch.device("cpu"))
        assert x.dtype == dtype and x.shape == shape and is_sentinel(x) and x.isnan().all()
        nans = torch.full(shape, float("nan"), dtype=dtype)
        infinite = torch.full(shape, float("inf"), dtype=dtype)
        for other in (nans, -nans, infinite - infinite, 0 * infinite, torch.zeros(shape, dtype=dtype)):
            assert not is_sentinel(other)
    assert not is_sentinel(sentinel(torch.Size((2,)), torch.int64, torch.device("cpu")))
    assert not is_sentinel(torch.zeros(0))


def test_an_interrupt_ends_the_session_and_an_error_does_not() -> None:
    model: Any = made("llama")
    ids = torch.arange(6).view(2, 3)
    staging = stage_model(model, 0, 1, 2)
    staging.install()
    run, parts = StageRun(staging, None), split_batch({"input_ids": ids, "labels": ids}, 2, None)
    schedule, raised = make_schedule("interleaved", 1, 2, 2), list[BaseException]()

    def criterion(outputs: Any, _inputs: Any) -> torch.Tensor:
        if raised:
            raise raised.pop()
        return outputs.loss

    raised.append(ZeroDivisionError("no"))
    with pytest.raises(ZeroDivisionError) as error:
        run.step(schedule, parts, criterion, Passes())
    assert "call zero_grad() on every rank" in error.value.__notes__[0]
    assert run.step(schedule, parts, criterion, Passes()).loss is not None
    raised.append(KeyboardInterrupt())
    raises(KeyboardInterrupt, None, lambda: run.step(schedule, parts, criterion, Passes()))
    told = r"ended in KeyboardInterrupt: .*the session is over"
    raises(RuntimeError, told, run.step, schedule, parts, criterion, Passes())
