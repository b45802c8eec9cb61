"""Program of four ranks on two hosts: tensor parallelism inside a host, data or pipeline parallelism across hosts."""

import socket
from typing import Any

import torch
import torch.distributed as dist

from shardwise.booster import Booster
from shardwise.booster.plugin import HybridParallelPlugin
from shardwise.testing import assert_close
from tests.support.hybrid_setup import MAX_NORM, STEPS, Texts, made, optimizer_of, plain
from tests.support.on_ranks import everywhere

BATCH = 2


def first_loss(outputs: Any, _: Any) -> torch.Tensor:
    return outputs.loss


def train(pp_size: int, zero_stage: int) -> None:
    plugin = HybridParallelPlugin(
        tp_size=2,
        pp_size=pp_size,
        num_microbatches=2 if pp_size > 1 else None,
        zero_stage=zero_stage,
        precision="fp32",
        max_norm=MAX_NORM,
    )
    _, replicas = plugin.data_parallel()
    texts = Texts(STEPS * BATCH * replicas)
    texts.items["labels"] = texts.items["input_ids"]  # the same number of labels in each micro-batch
    loader = plugin.prepare_dataloader(texts, BATCH)
    booster = Booster(plugin=plugin)
    model = made("llama")
    model, optimizer, *_ = booster.boost(model, optimizer_of(model), None, loader)
    session = plugin.session(model)
    names = everywhere(socket.gethostname())
    hosts = {names[rank] for rank in session.mesh.tensor.exchange_object(dist.get_rank())}
    assert len(hosts) == 1 and len(set(names)) == 2, "layers are cut inside a host"
    assert type(session.mesh.tensor).__name__ == "SharedGroup", session.mesh.tensor
    across = session.mesh.pipeline if pp_size > 1 else session.mesh.world
    assert type(across).__name__ == "GlooGroup", across
    batches = iter(loader)
    values: dict[str, torch.Tensor] = {}
    for loss, norm, right in plain("llama", replicas, BATCH, True, full=True):
        if pp_size > 1:
            out = booster.execute_pipeline(batches, model, first_loss, optimizer, broadcast_loss=True)["loss"]
        else:
            out = model(**next(batches)).loss
            booster.backward(out, optimizer)
        losses = everywhere(out.item())
        optimizer.step()
        assert abs(sum(losses) / len(losses) - loss) < 1e-10 * loss
        assert abs(optimizer.get_grad_norm() - norm) < 1e-10 * norm
        optimizer.zero_grad()
        values = right
    assert_close(dict(model.state_dict()), values, 1e-9, "parameters")
    booster.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(pp_size=1, zero_stage=2)
    train(pp_size=2, zero_stage=1)
    print(f"rank {dist.get_rank()} on {socket.gethostname()}: equal to plain PyTorch")
    dist.destroy_process_group()
