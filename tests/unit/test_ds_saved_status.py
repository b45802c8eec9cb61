"""What a function of a program's own, that saves a sharded parameter, is told of it in its backward pass."""

from __future__ import annotations

from typing import Any

import torch
from shardwise.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed

SEEN: list[Any] = []


class Product(torch.autograd.Function):
    """Gathers its weight where that has to be, as programs for DeepSpeed do."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        SEEN.append(weight.ds_status)  # type: ignore[attr-defined]
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        SEEN.append(weight.ds_status)
        with deepspeed.zero.GatheredParameters([weight], enabled=weight.ds_status != ZeroParamStatus.AVAILABLE):
            return grads[0] @ weight, grads[0].t() @ inputs


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = Product.apply(inputs, self.weight)  # type: ignore[no-untyped-call]
        return found


def test_a_saved_parameter_is_gathered_and_says_so() -> None:
    model, inputs = Layer(), torch.tensor([[1.0, -2.0, 3.0]])
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
    config = {"train_batch_size": 1, "gradient_clipping": 0.0, "zero_optimization": zero}
    engine = deepspeed.initialize(model=model, config={**config, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}})[
        0
    ]
    SEEN.clear()
    engine.backward(engine(inputs).square().sum())
    assert SEEN == [ZeroParamStatus.AVAILABLE] * 2
    assert not hasattr(inputs, "ds_status")
    # The compiler asks the class for each of its names, once in a process.
    torch.overrides._get_overridable_functions.cache_clear()
    assert torch.Tensor in torch.overrides.get_overridable_functions()
    assert torch.equal(torch.compile(lambda x: x + 1, backend="eager")(inputs), inputs + 1)
    engine.step()
    plain = torch.arange(6.0).reshape(2, 3).requires_grad_()
    (inputs @ plain.t()).square().sum().backward()
    torch.testing.assert_close(engine.state_dict()["weight"], plain.detach() - 0.5 * plain.grad)  # type: ignore[operator]
    engine.destroy()
