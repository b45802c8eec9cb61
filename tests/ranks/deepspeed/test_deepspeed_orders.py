"""Ranks that give parameters in different orders: each gets its own values, or the call is an error on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import deepspeed
from shardwise.testing import run_ranks
from tests.support.launching import finished

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "gradient_clipping": 0.0,
}


def values(second: int) -> list[list[float]]:
    with deepspeed.zero.Init():
        if second:
            model: nn.Module = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(3, second, bias=False))
        else:  # a copy, as nn.TransformerEncoder makes them
            layer = nn.Linear(3, 4, bias=False)
            model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers  # type: ignore[arg-type]
    params = list(model.parameters())
    order = params if dist.get_rank() == 0 else [*reversed(params), params[0]]
    with deepspeed.zero.GatheredParameters(order, modifier_rank=0), torch.no_grad():
        for number, param in enumerate(params, 1):
            param.fill_(number)
    before = [param.unique().tolist() for param in params]
    engine = deepspeed.initialize(model=model, config=CONFIG)[0]
    assert [value.unique().tolist() for value in engine.state_dict().values()] == before
    engine.destroy()
    return before


@pytest.mark.parametrize("second", [4, 5, 0])
def test_gathered_parameters_without_an_engine(second: int) -> None:
    assert run_ranks(2, values, second) == [[[1.0], [2.0]]] * 2


def refused() -> list[str]:
    with deepspeed.zero.Init():
        params = list(nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4)).parameters())
    messages = []
    for own in (params[: 4 - dist.get_rank()], params[:2] if dist.get_rank() == 0 else params[1:3]):
        try:
            with deepspeed.zero.GatheredParameters(own, modifier_rank=0):
                pass
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_different_parameters_without_an_engine_are_an_error() -> None:
    for number, shape in run_ranks(2, refused):
        assert "parameter 3 is on rank 0 and not on rank 1" in number
        assert "shape of parameter 0 is '(4,)' on rank 1 and '(4, 3)' on rank 0" in shape


def read_in_different_orders() -> str:
    from shardwise.deepspeed import utils

    engine = deepspeed.initialize(model=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), config=CONFIG)[0]
    weight = engine.module[dist.get_rank()].weight
    try:
        utils.safe_get_full_fp32_param(weight)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_values_of_different_parameters_are_an_error() -> None:
    for message in run_ranks(2, read_in_different_orders):
        assert message.startswith("PeerError: ") and "shards of 0.weight" in message and "shards of 1.weight" in message


PROGRAM = """
import sys

import deepspeed
import torch
from transformers import BertForSequenceClassification
from transformers.integrations import HfDeepSpeedConfig

config, folder = {config}, sys.argv[1]
gathered = deepspeed.zero.GatheredParameters


def in_another_order(params, *args, **kwargs):  # transformers makes a list of a set of tensors
    ordered = sorted(params, key=id) if isinstance(params, list) and len(params) > 1 else params
    return gathered(ordered[::-1] if deepspeed.comm.get_rank() else ordered, *args, **kwargs)


deepspeed.zero.GatheredParameters = in_another_order
kept = HfDeepSpeedConfig(config)
torch.manual_seed(1 + int(__import__("os").environ["RANK"]))
model = BertForSequenceClassification.from_pretrained(folder, num_labels=7)
engine = deepspeed.initialize(model=model, config=config)[0]
torch.save(engine.state_dict(), folder + "/" + str(deepspeed.comm.get_rank()))
"""


@pytest.mark.full
def test_a_new_head_of_a_pretrained_model(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    base = transformers.BertModel(transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **sizes))
    base.save_pretrained(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM.format(config=CONFIG))
    command = ["shardwise", "run", "--as", "deepspeed", "--nproc", "2", str(tmp_path / "program.py"), str(tmp_path)]
    status, shown = finished(*command, log=tmp_path / "log")
    assert status == 0, shown[-4000:]
    first, second = (torch.load(tmp_path / str(rank), weights_only=True) for rank in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        if name.startswith("bert."):
            assert torch.equal(value, base.state_dict()[name.removeprefix("bert.")]), name
    assert tuple(first["classifier.weight"].shape) == (7, 16) and not first["classifier.bias"].any()
    assert 0.01 < float(first["classifier.weight"].std()) < 0.04
