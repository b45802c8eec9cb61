"""What is asked of a Hugging Face model beside its cuts: which kernels it takes, which layers it computes again.

All of it can be put back. transformers is never imported: its models are known by what
they have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.pipeline import layers_of_stages
from shardwise.remarks import warn_user
from shardwise.shardformer.shard.grad_ckpt_config import GradientCheckpointConfig
from shardwise.shardformer.shard.kernels import Kernels, compile_activations, fuse_norms

__all__ = ["StageDivision", "changed_model"]

FLASH = "sdpa"
"""transformers' name of torch's ``scaled_dot_product_attention``."""
LAYER = "GradientCheckpointingLayer"
FUNCTION, FLAG = "_gradient_checkpointing_func", "gradient_checkpointing"
_ABSENT: Any = object()


@dataclass(frozen=True)
class StageDivision:
    """Into how many stages a stack of layers is divided.

    Attributes:
        stages: of the model.
        layers: by stage; ``None``: as :func:`~shardwise.pipeline.layers_of_stages` does.
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
    """Change ``model``; an error inside of the block puts it back.

    Args:
        model: the user's.
        kernels: what it computes by; a model that has no such thing keeps its own, with a warning.
        checkpointing: which layers are computed again in backward; ``None``: as the model has it.
        division: which layers a stage of it has.

    Raises:
        ValueError: the model has no layers that can be, or not that many.
    """
    before: list[tuple[Any, str, Any]] = []
    try:
        if checkpointing is not None:
            _checkpoint(model, checkpointing, division, before)
        if kernels.flash:
            _take_flash(model, before)
        if kernels.norms:
            fuse_norms(model, before)
        if kernels.activations:
            compile_activations(model, before)
        yield
    except BaseException:
        for owner, name, value in reversed(before):
            if value is _ABSENT:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, value)
        raise


def _checkpoint(
    model: nn.Module,
    config: GradientCheckpointConfig,
    division: StageDivision,
    before: list[tuple[Any, str, Any]],
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
    wanted: list[tuple[nn.Module, bool]] = []
    for layers in stacks.values():
        counts = layers_of_stages(len(layers), division.stages, division.layers)
        of_stages = zip(counts, config.layers_of(counts), strict=True)
        wanted += zip(layers, [at < again for count, again in of_stages for at in range(count)], strict=True)
    function = partial(checkpoint, use_reentrant=False)
    for layer, again in wanted:
        before += [(layer, name, vars(layer).get(name, _ABSENT)) for name in (FUNCTION, FLAG)]
        if not hasattr(layer, FUNCTION):  # a program that switched it on chose how
            setattr(layer, FUNCTION, function)
        setattr(layer, FLAG, again)


def _take_flash(model: nn.Module, before: list[tuple[Any, str, Any]]) -> None:
    configs: dict[int, Any] = {id(c): c for c in (getattr(module, "config", None) for module in model.modules())}
    known = [config for config in configs.values() if hasattr(config, "_attn_implementation")]
    choose = getattr(model, "set_attn_implementation", None)
    error: Exception | None = None
    if choose is not None:
        before += [(config, "_attn_implementation", config._attn_implementation) for config in reversed(known)]
        try:
            choose(FLASH)
        except (ValueError, ImportError) as refusal:
            error = refusal
    kept = {str(config._attn_implementation) for config in known} - {FLASH}
    if kept or error is not None or not known:
        reason = f" ({error})" if error is not None else ""
        kinds = f" is {', '.join(sorted(kept))}" if kept else ""
        warn_user(
            f"enable_flash_attention=True without effect in a {type(model).__name__}, whose attention{kinds} is its own"
            f"{reason}"
        )
