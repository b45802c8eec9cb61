"""Changes of a Hugging Face model other than sharding: kernels, and activation checkpointing.

All changes can be undone. transformers is not imported: its models are recognized by their attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwise.core.base.warnings import warn_user
from shardwise.core.parallel.module_classes import Mixin, mixed_class
from shardwise.core.parallel.pipeline.staging import layers_of_stages
from shardwise.shardformer.shard_config import GradientCheckpointConfig

FLASH = "sdpa"
"""transformers' name of torch's ``scaled_dot_product_attention``."""
LAYER = "GradientCheckpointingLayer"
FUNCTION, FLAG = "_gradient_checkpointing_func", "gradient_checkpointing"


RMS_NORMS = ("RMSNorm", "T5LayerNorm")
"""Suffixes of the names of transformers' RMS norm classes, which have ``weight`` and ``variance_epsilon``."""


@dataclass(frozen=True)
class Kernels:
    """The kernels of a model.

    Attributes:
        flash: torch's kernels for attention.
        norms: torch's kernel for each RMS norm.
    """

    flash: bool = False
    norms: bool = False


def kernels_of(arguments: Any) -> Kernels:
    """Return the kernels of the ``enable_...`` arguments."""
    a, every = arguments, arguments.enable_all_optimization
    if a.enable_jit_fused:
        warn_user("enable_jit_fused=True has no effect: call torch.compile on the layers whose activations are slow")
    return Kernels(every or a.enable_flash_attention, every or a.enable_fused_normalization)


@dataclass(frozen=True)
class StageDivision:
    """The number of stages into which a stack of layers is divided.

    Attributes:
        stages: number of stages.
        layers: number of layers by stage; ``None``: see :func:`~shardwise.core.parallel.pipeline.layers_of_stages`.
    """

    stages: int = 1
    layers: Sequence[int] | None = None


@contextmanager
def changed_model(
    model: nn.Module,
    kernels: Kernels,
    checkpointing: GradientCheckpointConfig | None,
    division: StageDivision = StageDivision(),
) -> Iterator[None]:
    """Change ``model``; an error inside the block restores it.

    Args:
        model: the user's module.
        kernels: the kernels to use; a model without support keeps its own, with a warning.
        checkpointing: layers that are recomputed in backward; ``None``: as the model has it.
        division: the layers of each stage.

    Raises:
        ValueError: the model has no layers that can be checkpointed, or fewer than that.
    """
    with ExitStack() as undo:
        if checkpointing is not None:
            _checkpoint(model, checkpointing, division, undo)
        if kernels.flash:
            _take_flash(model, undo)
        if kernels.norms:
            _fuse_norms(model, undo)
        yield
        undo.pop_all()


def _checkpoint(
    model: nn.Module,
    config: GradientCheckpointConfig,
    division: StageDivision,
    undo: ExitStack,
) -> None:
    stacks: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if any(base.__name__ == LAYER for base in type(module).__mro__):
            stacks.setdefault(name.rpartition(".")[0], []).append(module)
    if not stacks:
        raise ValueError(
            f"gradient_checkpoint_config={config!r} for a {type(model).__name__}: it has no layers of transformers' "
            f"{LAYER}; leave it None, and use torch.utils.checkpoint in the model"
        )
    expected: list[tuple[nn.Module, bool]] = []
    for layers in stacks.values():
        counts = layers_of_stages(len(layers), division.stages, division.layers)
        of_stages = zip(counts, config.layers_of(counts), strict=True)
        expected += zip(layers, [at < again for count, again in of_stages for at in range(count)], strict=True)
    function = partial(checkpoint, use_reentrant=False)
    for layer, again in expected:
        undo.callback(vars(layer).update, {name: vars(layer)[name] for name in (FUNCTION, FLAG) if name in vars(layer)})
        for name in (FUNCTION, FLAG):
            undo.callback(vars(layer).pop, name, None)
        if not hasattr(layer, FUNCTION):  # a program that enabled it has set the function
            setattr(layer, FUNCTION, function)
        setattr(layer, FLAG, again)


def _take_flash(model: nn.Module, undo: ExitStack) -> None:
    configs: dict[int, Any] = {id(c): c for c in (getattr(module, "config", None) for module in model.modules())}
    known = [config for config in configs.values() if hasattr(config, "_attn_implementation")]
    choose = getattr(model, "set_attn_implementation", None)
    error: Exception | None = None
    if choose is not None:
        for config in reversed(known):
            undo.callback(setattr, config, "_attn_implementation", config._attn_implementation)
        try:
            choose(FLASH)
        except (ValueError, ImportError) as refusal:
            error = refusal
    attention = {str(config._attn_implementation) for config in known} - {FLASH}
    if attention or error is not None or not known:
        reason = f" ({error})" if error is not None else ""
        kinds = f" is {', '.join(sorted(attention))}" if attention else ""
        warn_user(
            f"enable_flash_attention=True without effect in a {type(model).__name__}, whose attention{kinds} is its own"
            f"{reason}"
        )


def _fuse_norms(model: nn.Module, undo: ExitStack) -> None:
    norms = [
        module
        for module in model.modules()
        if type(module).__module__.startswith("transformers.")
        and type(module).__name__.endswith(RMS_NORMS)
        and hasattr(module, "variance_epsilon")
        and not isinstance(module, FusedRmsNorm)
    ]
    for norm in norms:
        undo.callback(setattr, norm, "__class__", type(norm))
        norm.__class__ = mixed_class(type(norm), FusedRmsNorm, type(norm))
    if not norms and not any(
        isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm) for module in model.modules()
    ):
        warn_user(f"enable_fused_normalization=True without effect in a {type(model).__name__}: it has no known norm")


class FusedRmsNorm(Mixin):
    """The forward of an RMS norm of transformers, in one kernel if weight and input have the same dtype."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != self.weight.dtype:
            own: Tensor = super().forward(hidden_states)
            return own
        return functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)
