"""Tests of model parallelism on GPUs: two and four ranks, on one shared GPU or one each, match one process."""

import pytest
import torch

from gpu.on_device import device_of_rank
from shardwise.session import shard
from shardwise.testing import RankPool

TWO = ("tp2", "pp2", "sp2 all_to_all", "sp2 ring")
FOUR = ("dp2tp2 zero3", "pp4", "tp2pp2x2 sequences", "sp4 ring", "sp4 rings of 2", "hybrid shard")


def wrong(device_type: str, layout: str) -> str:
    """Return what differs too much from one process in three steps: losses, gradients, norms, parameters, fp32 and
    fp64.
    """
    from tests.parity import hybrid

    device = device_of_rank(device_type)
    return "".join(found.wrong for found in hybrid.measured("llama", [layout], ["float64", "float32"], device))


@pytest.mark.packages("transformers")
@pytest.mark.parametrize("layout", TWO + FOUR)
def test_layout_matches_one_process(request: pytest.FixtureRequest, device_type: str, layout: str) -> None:
    pool: RankPool = request.getfixturevalue("two_ranks" if layout in TWO else "four_ranks")
    assert pool.run(wrong, device_type, layout, timeout=300.0) == [""] * pool.world_size


def generated(device_type: str) -> bool:
    """Return whether a model whose parameters are gathered for each use generates the same tokens as before."""
    from transformers import LlamaConfig, LlamaForCausalLM

    device = device_of_rank(device_type)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, **sizes)).to(device).eval()  # type: ignore[arg-type]
    ids = torch.arange(2, 20, device=device).view(2, 9)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)  # type: ignore[operator]
    session = shard(model, device=device)
    with torch.no_grad():
        found = session.module.generate(ids, **options)  # type: ignore[operator]
    session.close()
    session.mesh.close()
    return torch.equal(found, expected)


@pytest.mark.packages("transformers")
def test_sharded_model_generates(pool: RankPool, device_type: str) -> None:
    assert pool.run(generated, device_type) == [True] * pool.world_size
