"""Loads with ``rename=`` and ``rows=``: checkpoints whose names or numbers of rows differ from the model's."""

import copy
import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin
from shardwise.cli.main import main
from shardwise.core.checkpoint import Checkpointer, TorchRun
from shardwise.core.checkpoint.formats import open_checkpoint
from shardwise.plan import Plan, zero
from shardwise.session import build
from shardwise.testing import assert_close
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full

OLD = 11
Rule = Literal["keep", "zero", "mean"]
PLANS: dict[str, Plan] = {
    "zero-1": zero(1),
    "zero-3": zero(3),
    "bf16": zero(2, torch.bfloat16),
    "host": zero(3).but(state_host_fraction=1.0),
}


class Net(nn.Module):
    """An embedding tied to the head; the head's bias has one element per row."""

    def __init__(self, words: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(words, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, words)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(x))))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.03)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """Return a checkpoint of OLD words after two updates, its weights, and its first moments by name."""
    model = Net(OLD, 1)
    optimizer = adamw(model)
    for _ in range(2):
        model(torch.arange(OLD)).square().sum().backward()
        optimizer.step()
    path = Checkpointer(TorchRun(model, optimizer)).save(tmp_path_factory.mktemp("runs"), "one")
    moments = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    return path, {name: value.detach().clone() for name, value in model.state_dict().items()}, moments


def expected_rows(old: Tensor, here: Tensor, how: str) -> Tensor:
    both = min(len(old), len(here))
    new = {"keep": here[both:], "zero": torch.zeros_like(here[both:])}.get(how)
    if new is None:
        new = old.double().mean(0).to(old.dtype).expand_as(here[both:])
    return torch.cat([old[:both], new])


def check(state: dict[str, Tensor], weights: dict[str, Tensor], here: dict[str, Tensor], how: str) -> None:
    expected = {name: expected_rows(weights[name], here[name], how) for name in weights if name.startswith("head.")}
    expected |= {"embed.weight": expected["head.weight"]}
    expected |= {name: value for name, value in weights.items() if name.startswith("body")}
    dtype = state["embed.weight"].dtype
    tolerance = 0.0 if how != "mean" else 1e-6
    assert_close(state, {name: value.to(dtype) for name, value in expected.items()}, tolerance, how)


def moments_of(path: str) -> dict[str, Tensor]:
    with open_checkpoint(path) as source:
        facts = source.tensors()
        found = {name.split("/")[2]: name for name in facts if name.endswith("/exp_avg")}
        return {n: source.read(full, 0, facts[full].numel).reshape(facts[full].shape) for n, full in found.items()}


ROWS = [(17, "keep"), (17, "zero"), (17, "mean"), (5, "keep")]  # with 5 words no row is new
QUICK = [(plan, *ROWS[number]) for number, plan in enumerate(PLANS)]
CASES = [(plan, *rows) for plan in PLANS for rows in ROWS]


@on_ranks(3)
@pytest.mark.parametrize(("plan", "words", "how"), [*QUICK, *full(*(case for case in CASES if case not in QUICK))])
def test_rows_of_a_resized_vocabulary(saved: Any, plan: str, words: int, how: Rule, tmp_path: Path) -> None:
    path, weights, moments = saved
    here = {name: value.detach() for name, value in Net(words, 2).state_dict().items()}
    model = Net(words, 2)
    session = build(model, adamw(model), PLANS[plan])
    restored = session.checkpoints.load(path, rows={"embed.weight": how, "head.bias": how})
    check(session.module.state_dict(), weights, here, how)
    assert restored is not None and len(restored.resized) == 2
    assert restored.resized[0].startswith(f"embed.weight: {OLD} rows in the checkpoint, {words} in the model")
    session.checkpoints.save(tmp_path, "again")
    again = moments_of(str(tmp_path / "again"))
    zeros = {name: torch.zeros_like(here[name]) for name in moments}
    expected = {n: expected_rows(v, zeros[n], "zero") if v.shape != zeros[n].shape else v for n, v in moments.items()}
    assert_close(again, expected, 0.0, "moments")
    session.backward(session.module(torch.arange(words)).square().sum())
    session.optimizer.step()  # the loaded model can be trained
    session.close()


def test_rows_of_tied_names_must_agree(saved: Any) -> None:
    path, weights, _ = saved
    model = Net(17, 2)
    loader = Checkpointer(TorchRun(model, adamw(model)))
    with pytest.raises(ValueError, match=r"head\.weight and embed\.weight are one parameter"):
        loader.load(path, rows={"embed.weight": "mean", "head.weight": "zero", "head.bias": "mean"})
    here = {name: value.detach().clone() for name, value in model.state_dict().items()}
    loader.load(path, rows={"embed.weight": "mean", "head.weight": "mean", "head.bias": "mean"})
    check(dict(model.state_dict()), weights, here, "mean")


@pytest.mark.parametrize("words", [17, 5])
def test_optimizer_state_that_is_not_elementwise_is_reset(words: int, tmp_path: Path) -> None:
    """Adafactor's row and column statistics are reset; other parameters keep their state."""

    def start(rows: int, steps: int) -> tuple[Net, torch.optim.Optimizer]:
        model = Net(rows, 1)
        optimizer = torch.optim.Adafactor(model.parameters())
        for _ in range(steps):
            model(torch.arange(rows)).square().sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = start(OLD, 2)
    expected = copy.deepcopy(optimizer.state[model.body.weight])
    Checkpointer(TorchRun(model, optimizer)).save(tmp_path)
    model, optimizer = start(words, 1)
    restored = Checkpointer(TorchRun(model, optimizer)).load(
        tmp_path, rows={"embed.weight": "zero", "head.bias": "zero"}
    )
    assert restored is not None
    whole, by_rows = restored.resized
    assert whole.endswith("is dropped") and "starts anew" not in by_rows
    assert not optimizer.state[model.embed.weight]
    assert str(optimizer.state[model.body.weight]) == str(expected)
    model(torch.arange(words)).square().sum().backward()
    optimizer.step()
    assert optimizer.state[model.embed.weight]["row_var"].shape == (words, 1)


@on_ranks(2)
@pytest.mark.parametrize("words", [17, *full(5)])
def test_rows_under_a_plugin(saved: Any, words: int) -> None:
    path, weights, _ = saved
    here = {name: value.detach() for name, value in Net(words, 2).state_dict().items()}
    booster, plain = Booster(plugin=GeminiPlugin(precision="fp32")), Net(words, 2)
    model: Any
    model, optimizer, *_ = booster.boost(plain, adamw(plain))
    rows: Any = {"embed.weight": "keep", "head.bias": "keep"}
    raises(ValueError, r"embed\.weight.*rows=\{'embed\.weight': 'keep'\}", lambda: booster.load_model(model, path))
    booster.load_model(model, path, rows=rows)
    booster.load_optimizer(optimizer, path, rows=rows)  # type: ignore[arg-type]
    check({name: value.detach().cpu() for name, value in model.state_dict().items()}, weights, here, "keep")
    booster.close()


class Other(nn.Module):
    """The same layers under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"tokens": nn.Embedding(OLD, 6), "layer": nn.Linear(6, 6)})
        self.head = nn.Linear(6, OLD)
        self.head.weight = self.model["tokens"].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.model["layer"](self.model["tokens"](x))))


RULES = {"embed.weight": "model.tokens.weight", r"^body\.(\w+)$": r"model.layer.\1"}
NEW = {"embed.weight": "model.tokens.weight", "body.weight": "model.layer.weight", "body.bias": "model.layer.bias"}


@on_ranks(2)
def test_rename_with_a_sharded_session(saved: Any, tmp_path: Path) -> None:
    path, weights, moments = saved
    model = Other()
    session = build(model, adamw(model), zero(3))
    session.checkpoints.load(path, rename=RULES)
    expected = {NEW.get(name, name): value for name, value in weights.items()}
    assert_close(session.module.state_dict(), expected, 0.0, "renamed")
    session.checkpoints.save(tmp_path, "again")
    expected = {NEW.get(name, name): value for name, value in moments.items()}
    assert_close(moments_of(str(tmp_path / "again")), expected, 0.0, "moments")
    session.close()


@pytest.mark.parametrize(
    ("name", "rows", "fit"),
    [
        ("head", 4, {}),
        ("top", 4, {"rename": {"^head": "top"}}),
        ("head", 5, {"rows": {"head.weight": "keep", "head.bias": "keep"}}),
    ],
    ids=["as it is", "renamed", "rows"],
)
def test_missing_optimizer_state_is_refused_despite_rename(name: str, rows: int, fit: Any, tmp_path: Path) -> None:
    """Only ``strict=False`` loads a checkpoint without optimizer state."""
    saved_model = nn.ModuleDict({"head": nn.Linear(3, 4)})
    Checkpointer(TorchRun(saved_model)).save(tmp_path)
    model = nn.ModuleDict({name: nn.Linear(3, rows)})
    loader = Checkpointer(TorchRun(model, adamw(model)))
    raises(ValueError, "missing from the checkpoint: optimizer 0", lambda: loader.load(tmp_path, **fit))
    assert loader.load(tmp_path, strict=False, **fit) is not None


@pytest.mark.parametrize("whole", [True, False])
def test_load_without_any_matching_name_warns(saved: Any, whole: bool) -> None:
    """With ``strict=False``, a name prefix means that nothing is loaded, so a warning says it."""
    path, weights, _ = saved
    booster, plain = Booster(), nn.ModuleDict({"model": Net(OLD, 2)})
    model: Any
    model, optimizer, *_ = booster.boost(plain, adamw(plain))

    def load(**fit: Any) -> list[str]:
        with warnings.catch_warnings(record=True, action="always") as caught:
            if whole:
                booster.load_checkpoint(path, model, optimizer, strict=False, **fit)
            else:
                booster.load_model(model, path, strict=False, **fit)
        return [str(each.message) for each in caught if "no parameter of the model" in str(each.message)]

    (told,) = load()
    assert "model.embed.weight" in told and "it has body.bias" in told
    assert load(rename={"^": "model."}) == []
    assert torch.equal(plain["model"].body.weight, weights["body.weight"])  # type: ignore[union-attr,arg-type]


def test_rename_on_the_command_line(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _, moments = saved
    rules = [f"--rename={old}={new}" for old, new in RULES.items()]
    assert main(["checkpoint", "convert", path, str(tmp_path / "x"), "--to", "native", *rules]) == 0
    assert_close(moments_of(str(tmp_path / "x")), {NEW.get(n, n): v for n, v in moments.items()}, 0.0, "converted")
    assert main(["checkpoint", "inspect", path, "--rename", r"^body=trunk"]) == 0
    assert "model/trunk.weight" in capsys.readouterr().out
    assert main(["checkpoint", "inspect", path, "--rename", "nothing=else"]) == 2
    assert "no name in the checkpoint matches" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"absent": "x"}, "'absent' to 'x': no name"),
        ({"(": "x"}, "regular expression"),
        ({"body": r"\3"}, "regular expression"),
        ({r"^body\.weight$": "head.bias"}, "'head.bias'"),
    ],
)
def test_invalid_rename_rules_are_refused(saved: Any, rules: dict[str, str], said: str) -> None:
    error = raises(ValueError, "rename", lambda: open_checkpoint(saved[0], rename=rules))
    assert said in error


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"absent": "keep"}, "no such parameter"),
        ({"embed.weight": "twice"}, "is not a rule"),
        ({"body.weight": "keep"}, "in more than the number of rows"),
    ],
)
def test_invalid_rows_are_refused(saved: Any, rows: Any, said: str) -> None:
    model = Net(17, 2)
    model.body = nn.Linear(5, 6)
    with pytest.raises(ValueError, match=r"nothing was loaded|rows=") as error:
        Checkpointer(TorchRun(model)).load(saved[0], rows=rows)
    assert said in str(error.value)


def test_booster_checkpoint_of_several_models_is_refused() -> None:
    booster, models = Booster(), [Net(3, 1), Net(3, 2)]
    for call in (booster.save_checkpoint, booster.load_checkpoint):
        with pytest.raises(ValueError, match=r"2 models and 2 optimizers.*directory of its own"):
            call("runs", models, [adamw(each) for each in models])  # type: ignore[arg-type]
