"""Tiny modules, each with one feature that can break sharded training, with batches and a loss for each.

Weights and batches depend only on seeds, so every rank and an unsharded run build the same ones. In fp64 a model has
(up to rounding) its fp32 values. No forward pass is random.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import modules

Batch = dict[str, Any]
_ROWS = 4


@dataclass(frozen=True)
class ModelCase:
    """A model to test with.

    Attributes:
        name: its key in :data:`MODELS`; send this to ranks, and look the case up there.
        build: builds the module with floating parameters of a dtype (unless the module sets its own).
        inputs: builds one rank's batch from a generator and a floating dtype: ``{"args": ..., "kwargs": ..., ...}``.
        loss: scalar loss of a model and a batch, the mean over the batch.
        why: the difficulty that it tests.
    """

    name: str
    build: Callable[[torch.dtype], nn.Module]
    inputs: Callable[[torch.Generator, torch.dtype], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    why: str

    def factory(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        """Return a new module; equal ``dtype`` and ``seed`` give equal weights in every process."""
        before = torch.get_default_dtype()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # the only generator that is restored
            torch.set_default_dtype(dtype)
            try:
                model = self.build(dtype)
            finally:
                torch.set_default_dtype(before)
        _fill(model, seed)
        return model

    def batch(self, seed: int, dtype: torch.dtype = torch.float32) -> Batch:
        """Return one rank's batch of 4 rows; equal arguments give equal batches in every process."""
        return self.inputs(torch.Generator().manual_seed(seed), dtype)


def _fill(model: nn.Module, seed: int) -> None:
    """Fill from one fp64 stream, so that dtypes agree: 1 + noise for parameters that start at 1, otherwise noise."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            fan_in = parameter.shape[-1] if parameter.dim() > 1 and parameter.shape[-1] else 4
            start = 1.0 if parameter.numel() and bool((parameter == 1).all()) else 0.0
            parameter.copy_(start + noise * (0.1 if start else fan_in**-0.5))


def make_batches(
    case: ModelCase,
    world_size: int,
    steps: int = 2,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[list[list[Batch]]]:
    """Return all batches of a run: ``[step][micro-batch][rank]``, all of them different."""
    count = iter(range(seed * 1000003, seed * 1000003 + steps * micro_batches * world_size))
    return [
        [[case.batch(next(count), dtype) for _ in range(world_size)] for _ in range(micro_batches)]
        for _ in range(steps)
    ]


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors inside dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with a large eps, so that gradients which are zero except for rounding do not become full steps."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.1)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of (output - target)^2, in fp32 if the output has 16 bits."""
    if output.dtype in (torch.float16, torch.bfloat16):
        output = output.float()
    return (output - target.to(output.dtype)).square().mean()


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, modules.Answer):
        return [output.first, *_tensors(output.rest)]
    if isinstance(output, dict):
        output = list(output.values())
    return [tensor for part in output for tensor in _tensors(part)]


def _regression(model: nn.Module, batch: Batch) -> Tensor:
    """Compare every tensor of the output, in any container, with the same target."""
    outputs = _tensors(model(*batch["args"], **batch.get("kwargs", {})))
    losses = [mean_square(output, batch["target"][..., : output.shape[-1]]) for output in outputs]
    return torch.stack([loss.to(losses[0].dtype) for loss in losses]).sum()


def _first_output_only(model: nn.Module, batch: Batch) -> Tensor:
    return mean_square(_tensors(model(*batch["args"]))[0], batch["target"])


def _classification(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(*batch["args"])
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return nn.functional.cross_entropy(logits.flatten(0, -2), batch["target"].flatten())


def _numbers(*shape: int) -> Callable[[torch.Generator, torch.dtype], Batch]:
    """Return batches of floating inputs ``[4, *shape]`` and targets of the same shape."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Batch:
        x, y = (torch.randn(_ROWS, *shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
        return {"args": (x,), "target": y}

    return make


def _tokens(vocabulary: int, length: int) -> Callable[[torch.Generator, torch.dtype], Batch]:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Batch:
        del dtype
        tokens = torch.randint(vocabulary, (_ROWS, length + 1), generator=generator)
        return {"args": (tokens[:, :-1],), "target": tokens[:, 1:]}

    return make


def _with_choice(generator: torch.Generator, dtype: torch.dtype) -> Batch:
    batch = _numbers(6)(generator, dtype)
    batch["args"] += (int(torch.randint(3, (), generator=generator)),)
    return batch


def _nested(generator: torch.Generator, dtype: torch.dtype) -> Batch:
    batch = _numbers(6)(generator, dtype)
    (x,) = batch["args"]
    mask = torch.rand(x.shape, generator=generator) > 0.3
    return {"args": ({"x": x},), "kwargs": {"extra": [x * 0.5, (mask, None)], "power": 2}, "target": batch["target"]}


_SIX = _numbers(6)
_Entry = tuple[str, Callable[[torch.dtype], nn.Module], Callable[[torch.Generator, torch.dtype], Batch], str]


def _cases(entries: Sequence[_Entry], loss: Callable[[nn.Module, Batch], Tensor]) -> dict[str, ModelCase]:
    return {name: ModelCase(name, build, inputs, loss, why) for name, build, inputs, why in entries}


_REGRESSION: list[_Entry] = [
    ("mlp", lambda d: modules.Mlp(), _SIX, "nothing: the base line"),
    ("odd_sizes", lambda d: modules.OddSizes(), _numbers(7), "sizes 7x13, 1 and 3 that no rank count divides"),
    ("frozen", lambda d: modules.Frozen(), _SIX, "parameters without gradient before, between and inside layers"),
    ("all_frozen_child", lambda d: modules.FrozenChild(), _SIX, "a child without any trainable parameter"),
    ("unused", lambda d: modules.Unused(), _SIX, "a parameter and a whole submodule that no forward touches"),
    ("used_twice", lambda d: modules.UsedTwice(), _SIX, "one module called twice per forward"),
    ("alias", lambda d: modules.Alias(), _SIX, "one module registered under two names"),
    ("around_children", lambda d: modules.AroundChildren(), _SIX, "own parameters used before and after its children"),
    ("late_parameter", lambda d: modules.LateParameter(), _SIX, "a child's weight used after that child's forward"),
    ("zero_sized", lambda d: modules.ZeroSized(), _SIX, "parameters with no elements"),
    ("non_contiguous", lambda d: modules.NonContiguous(), _numbers(7), "a transposed parameter"),
    ("mixed_fp64", lambda d: modules.MixedDtypes(torch.float64), _SIX, "fp64 parameters among the others"),
    ("mixed_bf16", lambda d: modules.MixedDtypes(torch.bfloat16), _SIX, "bf16 parameters among the others"),
    ("buffers", lambda d: modules.Buffers(), _SIX, "BatchNorm in evaluation, integer and non-persistent buffers"),
    ("scalar", lambda d: modules.Scalar(), _SIX, "a 0-dimensional parameter"),
    ("residual", lambda d: modules.Residual(), _SIX, "a ModuleList of residual blocks"),
    ("inplace", lambda d: modules.InPlace(), _SIX, "in-place activations on the outputs of layers"),
    ("mixture", lambda d: modules.Mixture(), _with_choice, "a branch chosen by the batch: ranks take different ones"),
    ("attention", lambda d: modules.Attention(), _numbers(3, 6), "MultiheadAttention uses its child's weight directly"),
    ("lstm", lambda d: modules.Recurrent(), _numbers(3, 6), "an LSTM keeps references to its flat weights"),
    ("nested_inputs", lambda d: modules.NestedInputs(), _nested, "inputs in dicts, lists and keywords, with None"),
    ("output_dict", lambda d: modules.SeveralOutputs("dict"), _SIX, "a dict of outputs"),
    ("output_tuple", lambda d: modules.SeveralOutputs("tuple"), _SIX, "nested tuples of outputs"),
    ("output_dataclass", lambda d: modules.SeveralOutputs("dataclass"), _SIX, "outputs inside a dataclass"),
    ("checkpointed", lambda d: modules.Checkpointed(reentrant=False), _SIX, "activation checkpointing"),
    ("checkpointed_reentrant", lambda d: modules.Checkpointed(reentrant=True), _SIX, "the reentrant kind of it"),
]
_PARTIAL: list[_Entry] = [
    ("unused_output", lambda d: modules.SeveralOutputs("tuple"), _SIX, "outputs that the loss leaves out")
]
_CLASSIFICATION: list[_Entry] = [
    ("tied", lambda d: modules.Tied(), _tokens(11, 5), "embedding and head share a weight"),
    ("functional", lambda d: modules.FunctionalHead(), _tokens(11, 5), "F.linear with a child's weight"),
    ("gpt", lambda d: modules.TinyGpt(), _tokens(17, 6), "pre-norm blocks, causal attention, tied head"),
    ("gpt_checkpointed", lambda d: modules.TinyGpt(checkpointed=True), _tokens(17, 6), "the same, checkpointed"),
]

MODELS: dict[str, ModelCase] = (
    _cases(_REGRESSION, _regression) | _cases(_PARTIAL, _first_output_only) | _cases(_CLASSIFICATION, _classification)
)
