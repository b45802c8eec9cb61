"""The reference for a sharded run: the same training in one process, in plain PyTorch, without code of the engine.

:func:`train_plain` computes data-parallel training: the gradient of a step is the mean over ranks of
the sum over micro-batches. With 16-bit parameters it repeats the mixed-precision arithmetic unsharded
(Micikevicius et al., arXiv 1710.03740): gradients in 16 bits per rank and micro-batch, summed over ranks in fp32 and
rounded once, accumulated in 16 bits, and an fp32 copy of the weights for the optimizer. Without that copy the optimizer
updates the 16-bit parameters themselves, with gradients that were unscaled and clipped in fp32 and rounded once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.base.torch_internals import point

__all__ = ["PlainRecipe", "PlainRun", "train_plain"]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class PlainRecipe:
    """The arithmetic of a run.

    Attributes:
        max_norm: largest global norm of the gradients; 0 turns clipping off.
        norm_type: p of the norm, including ``math.inf``.
        param_dtype: dtype of floating-point parameters and inputs; ``None``: no cast. Parameters of BatchNorm stay
            fp32 if its statistics do.
        buffer_dtype: dtype of floating-point buffers, other than fp64 ones; ``None``: no cast.
        reduce_dtype: dtype of the mean over ranks; ``None``: the parameter's compute dtype.
        accumulate_dtype: dtype of the sum over micro-batches; ``None``: the reduce dtype.
        masters: 16-bit parameters have an fp32 copy, which the optimizer updates; otherwise it updates the parameters.
        loss_scale: constant loss scale; gradients are divided by it in fp32 before the norm.
        mean_over_micro_batches: divide gradients by the number of micro-batches (``average="mean"`` of a plan);
            ``False``: add them.
        tokens: a function that returns the weight of a rank's batch (``average="tokens"``). The step's gradient is the
            sum of weighted gradients over micro-batches and ranks, divided by the sum of the weights. ``None``: see
            ``mean_over_micro_batches``.
    """

    max_norm: float = 0.0
    norm_type: float = 2.0
    param_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype | None = None
    masters: bool = True
    loss_scale: float = 1.0
    mean_over_micro_batches: bool = False
    tokens: Callable[[Any], float] | None = None

    def weight(self, batch: Any) -> float:
        """Return the factor of the loss of ``batch``.

        Args:
            batch: a rank's batch.
        """
        return self.tokens(batch) if self.tokens is not None else 1.0

    def divisor(self, step: Sequence[Sequence[Any]]) -> float:
        """Return the divisor of the mean over ranks of the sum over micro-batches.

        Args:
            step: ``[micro-batch][rank]``.
        """
        if self.tokens is not None:
            return sum(self.tokens(batch) for micro in step for batch in micro) / len(step[0])
        return float(len(step)) if self.mean_over_micro_batches else 1.0

    def __post_init__(self) -> None:
        if self.max_norm < 0 or self.norm_type <= 0 or self.loss_scale <= 0:
            raise ValueError(f"{self}: give max_norm >= 0, norm_type > 0 and loss_scale > 0")


@dataclass
class PlainRun:
    """Results of a run by step.

    Attributes:
        losses: ``[step][micro-batch][rank]``.
        gradients: gradients of each step by name, averaged and unscaled, before clipping; fp32 for 16-bit parameters,
            otherwise in the parameter's dtype. Parameters without a gradient are absent.
        norms: global norms of these gradients.
        skipped: whether each step was skipped, because a gradient is not finite and there is a loss scale.
        parameters: parameters after each step, in the compute dtype of the model.
        masters: parameters after each step, in the dtype that the optimizer updates (fp32 for 16-bit parameters).
        buffers: buffers after each step.
        model: the module after the last step.
        optimizer: the optimizer after the last step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[list[list[float]]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    masters: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)


def train_plain(
    model_factory: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    optimizer_factory: Callable[[nn.Module], torch.optim.Optimizer],
    batches: Sequence[Sequence[Sequence[Any]]],
    recipe: PlainRecipe | None = None,
) -> PlainRun:
    """Train in this process, without sharding.

    Args:
        model_factory: returns the module with its initial values, the same at every call.
        loss: scalar loss of a module and one rank's batch, a mean over that batch.
        optimizer_factory: returns the optimizer of a module's parameters.
        batches: ``[step][micro-batch][rank]``.
        recipe: clipping and dtypes; ``None``: no clipping, and the module's dtypes.

    Returns:
        Losses, gradients, norms and parameters of each step.

    Raises:
        ValueError: steps with different numbers of ranks.

    Examples:
        >>> from shardwise.testing import train_plain
        >>> batches = [[[torch.ones(2, 8), torch.zeros(2, 8)]]]  # one step, one micro-batch, two ranks
        >>> expected = train_plain(
        ...     lambda: torch.nn.Linear(8, 4),
        ...     lambda model, batch: model(batch).square().mean(),
        ...     lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        ...     batches,
        ... )
        >>> sorted(expected.parameters[0])
        ['bias', 'weight']
    """
    recipe = recipe or PlainRecipe()
    ranks = {len(micro) for step in batches for micro in step}
    if len(ranks) > 1:
        raise ValueError(f"batches for {sorted(ranks)} ranks in one run; give every micro-batch the same number")
    model = model_factory()
    halves = recipe.param_dtype in _HALF or any(p.dtype in _HALF for p in model.parameters())
    formats = (recipe.param_dtype, recipe.buffer_dtype, recipe.reduce_dtype, recipe.accumulate_dtype)
    if not halves and formats == (None,) * 4 and recipe.loss_scale == 1.0:
        return _train_as_is(model, loss, optimizer_factory(model), batches, recipe)
    owner = _masters(model_factory(), recipe) if recipe.masters else model
    return _train_in_formats(model, loss, owner, optimizer_factory, batches, recipe)


def _copies(named: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _param_with_grad(gradient: Tensor) -> nn.Parameter:
    """Return a parameter with this gradient and its dtype, for torch's clipping functions."""
    param = nn.Parameter(torch.empty_like(gradient))
    param.grad = gradient
    return param


def _record_and_step(run: PlainRun, owner: nn.Module, gradients: Mapping[str, Tensor], recipe: PlainRecipe) -> None:
    """Clip ``gradients`` in place and update ``owner``, whose parameters the optimizer has."""
    graded = [(name, p, gradients[name]) for name, p in _trained(owner) if name in gradients]
    run.gradients.append(_copies((name, gradient) for name, _, gradient in graded))
    # The infinity norm of an empty tensor is an error, so parameters without elements are excluded.
    counted = [gradient for _, _, gradient in graded if gradient.numel()]
    run.norms.append(float(torch.nn.utils.get_total_norm(counted, recipe.norm_type)))
    if recipe.max_norm:
        torch.nn.utils.clip_grad_norm_([_param_with_grad(g) for g in counted], recipe.max_norm, recipe.norm_type)
    finite = all(bool(gradient.isfinite().all()) for gradient in counted)
    skip = recipe.loss_scale != 1.0 and not finite  # without a scale, plain training applies NaN
    run.skipped.append(skip)
    for _, parameter, gradient in graded:
        parameter.grad = gradient.to(parameter.dtype)  # rounds where 16-bit parameters have no masters
    if not skip:
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)


def _record_values(run: PlainRun, owner: nn.Module) -> None:
    run.masters.append(_copies(owner.named_parameters()))
    run.parameters.append(_copies(run.model.named_parameters()))
    run.buffers.append(_copies(run.model.named_buffers()))


def _train_as_is(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Sequence[Sequence[Any]]],
    recipe: PlainRecipe,
) -> PlainRun:
    run = PlainRun(model, optimizer)
    for step in batches:
        run.losses.append([])
        for micro in step:
            values = []
            for batch in micro:
                value = loss(model, batch)
                (value * recipe.weight(batch) / len(micro)).backward()  # type: ignore[no-untyped-call]
                values.append(float(value.detach()))
            run.losses[-1].append(values)
        # Divided after the sums, see `PlainRecipe`: a weight that is not a power of two would round every gradient.
        divisor = recipe.divisor(step)
        for _, parameter in _trained(model):
            if parameter.grad is not None and divisor != 1.0:
                parameter.grad /= divisor
        gradients = {name: p.grad for name, p in _trained(model) if p.grad is not None}
        _record_and_step(run, model, gradients, recipe)
        _record_values(run, model)
    return run


def _compute_dtype(parameter: Tensor, recipe: PlainRecipe) -> torch.dtype:
    return (recipe.param_dtype if parameter.dtype.is_floating_point else None) or parameter.dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def _masters(model: nn.Module, recipe: PlainRecipe) -> nn.Module:
    """Return the module whose parameters the optimizer updates: fp32 if the computation is in 16 bits."""
    for parameter in model.parameters():
        point(parameter, parameter.detach().to(_wide(_compute_dtype(parameter, recipe))))
    return model


def _cast_floating(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((key, _cast_floating(item, dtype)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast_floating(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_cast_floating(item, dtype) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: _cast_floating(getattr(value, f.name), dtype) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **changes)
    return value


def _cast_model(model: nn.Module, recipe: PlainRecipe) -> None:
    """Cast buffers, and parameters and (by a hook) floating-point inputs to the compute dtype."""
    for buffer in model.buffers() if recipe.buffer_dtype is not None else ():
        if buffer.is_floating_point() and buffer.dtype != torch.float64:
            point(buffer, buffer.detach().to(recipe.buffer_dtype))
    dtype = recipe.param_dtype
    if dtype is None:
        return
    for module in model.modules():
        statistics = module.running_mean if isinstance(module, nn.modules.batchnorm._BatchNorm) else None
        if statistics is None or statistics.dtype != torch.float32 or dtype not in _HALF:
            for param in module.parameters(recurse=False):
                if param.is_floating_point():
                    point(param, param.detach().to(dtype))

    def cast_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _cast_floating(args, dtype), _cast_floating(kwargs, dtype)

    model.register_forward_pre_hook(cast_inputs, with_kwargs=True)


def _reduce(gradients: list[Tensor | None], recipe: PlainRecipe) -> Tensor | None:
    """Return the mean over ranks. 16-bit gradients are summed in fp32 and rounded once; missing ones are zero."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    dtype = recipe.reduce_dtype or present[0].dtype
    total = torch.zeros_like(present[0], dtype=torch.float32 if dtype in _HALF else dtype)
    for gradient in present:
        total += gradient.to(dtype).to(total.dtype)
    return (total * (1.0 / len(gradients))).to(dtype)


def _micro_batch(
    run: PlainRun, loss: Callable[[nn.Module, Any], Tensor], micro: Sequence[Any], recipe: PlainRecipe
) -> dict[str, Tensor]:
    """Run every rank's backward pass, then the reduction; append the losses."""
    values: list[float] = []
    by_rank: dict[str, list[Tensor | None]] = {name: [] for name, _ in _trained(run.model)}
    for batch in micro:
        value = loss(run.model, batch)
        scaled = (value.float() if value.dtype in _HALF else value) * recipe.weight(batch) * recipe.loss_scale
        scaled.backward()  # type: ignore[no-untyped-call]
        values.append(float(value.detach()))
        for name, parameter in _trained(run.model):
            by_rank[name].append(parameter.grad)
            parameter.grad = None
    run.losses[-1].append(values)
    reduced = {name: _reduce(gradients, recipe) for name, gradients in by_rank.items()}
    return {name: gradient for name, gradient in reduced.items() if gradient is not None}


def _train_in_formats(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    owner: nn.Module,
    optimizer_factory: Callable[[nn.Module], torch.optim.Optimizer],
    batches: Sequence[Sequence[Sequence[Any]]],
    recipe: PlainRecipe,
) -> PlainRun:
    _cast_model(model, recipe)
    run = PlainRun(model, optimizer_factory(owner))
    computed = dict(model.named_parameters())
    for step in batches:
        run.losses.append([])
        sums: dict[str, Tensor] = {}
        for micro in step:
            for name, gradient in _micro_batch(run, loss, micro, recipe).items():
                gradient = gradient.to(recipe.accumulate_dtype or gradient.dtype)
                sums[name] = sums[name] + gradient if name in sums else gradient
        divisor = recipe.loss_scale * recipe.divisor(step)
        wide = {n: sums[n].to(_wide(p.dtype)) / divisor for n, p in owner.named_parameters() if n in sums}
        _record_and_step(run, owner, wide, recipe)
        with torch.no_grad():
            for name, updated in owner.named_parameters():
                computed[name].copy_(updated)  # without masters this copies the parameter into itself
        _record_values(run, owner)
    return run
