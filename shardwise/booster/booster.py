"""The Booster: ``boost`` a model and its optimizer with a plugin, then train, save and load through one interface."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from shardwise import checkpoint as files
from shardwise.booster.interface import OptimizerWrapper, parameter_shapes
from shardwise.booster.mixed_precision import MixedPrecision, mixed_precision_factory
from shardwise.booster.plugin.base import Plugin, refuse

__all__ = ["Booster"]

SIZE_PER_SHARD = 1024


def _is_dataloader(value: object) -> bool:
    return isinstance(value, DataLoader) or (hasattr(value, "__iter__") and not callable(value))


class Booster:
    """Args:
        device: where the model is put when there is no plugin; ``None`` leaves it. A plugin chooses the device itself.
        mixed_precision: ``"fp16"``, ``"bf16"`` or a :class:`MixedPrecision`; for TorchDDPPlugin and for no plugin.
            The other plugins have a precision of their own.
        plugin: one of :mod:`shardwise.booster.plugin`; ``None`` is one ordinary process.

    Raises:
        NotImplementedError: ``mixed_precision`` is ``"fp16_apex"``, ``"fp16_naive"`` or ``"fp8"``.
        ValueError: it is another unknown name.
        TypeError: an argument of the wrong kind.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        mixed_precision: MixedPrecision | str | None = None,
        plugin: Plugin | None = None,
    ) -> None:
        if plugin is not None and not isinstance(plugin, Plugin):
            raise TypeError(f"plugin={plugin!r:.80}: give a plugin of shardwise.booster.plugin, or None")
        if isinstance(mixed_precision, str):
            mixed_precision = mixed_precision_factory(mixed_precision)
        elif mixed_precision is not None and not isinstance(mixed_precision, MixedPrecision):
            raise TypeError(f"mixed_precision={mixed_precision!r:.80}: give 'fp16', 'bf16' or a MixedPrecision")
        if plugin is not None and device is not None and plugin.control_device():
            warnings.warn(
                f"device={str(device)!r} has no effect: {type(plugin).__name__} chooses the device", stacklevel=2
            )
            device = None
        if plugin is not None and mixed_precision is not None and plugin.control_precision():
            warnings.warn(
                f"mixed_precision has no effect: {type(plugin).__name__} has a precision argument of its own",
                stacklevel=2,
            )
            mixed_precision = None
        self.plugin = plugin
        self.device = None if device is None else torch.device(device)
        self.mixed_precision = mixed_precision

    # -- training

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: Any = None,
    ) -> Any:
        """The same objects, ready to train. Collective over all ranks.

        Returns:
            ``(model, optimizer, criterion, dataloader, lr_scheduler)``; what was not given is ``None``. Called with the
            data loader third, as ``boost(model, optimizer, dataloader, criterion)``: those four in that order (with
            ``lr_scheduler`` fifth if one was given).

        Raises:
            TypeError: ``model`` or ``optimizer`` is something else.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model={model!r:.80}: give a torch.nn.Module")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer={optimizer!r:.80}: give a torch.optim.Optimizer, or None")
        swapped = _is_dataloader(criterion) and not _is_dataloader(dataloader)
        if swapped:
            criterion, dataloader = dataloader, criterion  # type: ignore[assignment]
        if self.plugin is not None:
            model, optimizer = self.plugin.configure(model, optimizer)
        elif self.device is not None:
            model = model.to(self.device)
        if self.mixed_precision is not None:
            model, optimizer, criterion = self.mixed_precision.configure(model, optimizer, criterion)
        if optimizer is not None and self.plugin is None and not isinstance(optimizer, OptimizerWrapper):
            optimizer = OptimizerWrapper(optimizer)
        if not swapped:
            return model, optimizer, criterion, dataloader, lr_scheduler
        returned = (model, optimizer, dataloader, criterion)
        return returned if lr_scheduler is None else (*returned, lr_scheduler)

    def backward(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Backward from ``loss`` (a scalar, this rank's mean), with loss scaling where there is any.

        Raises:
            TypeError: ``optimizer`` is not a boosted one.
        """
        backward = getattr(optimizer, "backward", None)
        if backward is None:
            raise TypeError(f"optimizer is a plain {type(optimizer).__name__}; give the one that boost returned")
        backward(loss)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Raises:
        NotImplementedError: no plugin has pipeline parallelism yet.
        """
        raise NotImplementedError(
            f"execute_pipeline needs pipeline parallelism (HybridParallelPlugin, not available yet); plugin is "
            f"{type(self.plugin).__name__}. Call model, criterion and booster.backward instead"
        )

    def no_sync(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Backward passes inside accumulate without exchanging gradients; the first one after it exchanges the sum.

        Without a plugin there is nothing to exchange.

        Raises:
            RuntimeError: the plugin reduces gradients in every backward pass.
            ValueError: neither is something that ``boost`` returned.
        """
        return nullcontext() if self.plugin is None else self.plugin.no_sync(model, optimizer)

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> nn.Module:
        """Raises:
        NotImplementedError: apply ``peft.get_peft_model`` to the model before ``boost`` instead.
        """
        refuse("enable_lora", type(model).__name__, "call peft.get_peft_model(model, config) before boost")
        return model

    def save_lora_as_pretrained(self, model: nn.Module, checkpoint: str, use_safetensors: bool = False) -> None:
        """Raises:
        NotImplementedError: until ``enable_lora`` exists.
        """
        refuse("save_lora_as_pretrained", checkpoint, "save the whole model with save_model")

    # -- checkpoints

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = SIZE_PER_SHARD,
        use_safetensors: bool = False,
    ) -> None:
        """Write the full model as one safetensors file. Collective: every rank calls, rank 0 writes.

        Args:
            model: a boosted model.
            checkpoint: the file. It is replaced in one move, so a failure leaves what was there.
            shard: several files; not yet.
            gather_dtensor: only True.
            prefix: put before every name.
            size_per_shard: for ``shard=True``.
            use_safetensors: the format is safetensors either way; True also requires the ending ``.safetensors``.

        Raises:
            NotImplementedError: ``shard=True`` or ``gather_dtensor=False``.
            ValueError: the path has the ending of a torch pickle.
            Exception: on rank 0, why the file could not be written; CheckpointError on the others.
        """
        _check_saving(shard, gather_dtensor, size_per_shard)
        path = files.target(checkpoint, ".safetensors")
        if use_safetensors and path.suffix != ".safetensors":
            raise ValueError(f"checkpoint={str(path)!r} with use_safetensors=True: give a name ending in .safetensors")
        full = dict(model.state_dict())
        for names in files.model_names(_unwrap(model)):  # gathering may have made copies of what is one tensor
            full |= {name: full[names[0]] for name in names if name in full and names[0] in full}
        state = {f"{prefix or ''}{name}": value for name, value in full.items()}
        files.on_rank_zero(lambda: files.write_model(state, path), f"save the model to {path}")

    def load_model(self, model: nn.Module, checkpoint: str | Path, strict: bool = True) -> nn.Module:
        """Load a full model into a boosted one (or a plain one). Collective; every rank reads the file.

        Args:
            model: a boosted model.
            checkpoint: a safetensors file, a torch file (``.pt``, ``.pth``, ``.bin``, ``.ckpt``; read with
                ``weights_only=True``), or a directory with ``model.safetensors`` or ``pytorch_model.bin``.
            strict: refuse missing and unexpected names. A shape that differs is always refused.

        Returns:
            ``model``.

        Raises:
            ValueError: it does not fit; lists every name that does not. Nothing was loaded then, on any rank.
            FileNotFoundError: nothing there.
            CheckpointError: the file is damaged, or another rank failed.
        """
        plain = _unwrap(model)
        # Only shapes are wanted; a sharded model has them without gathering anything.
        layout = getattr(model, "state_layout", plain.state_dict)
        expected = layout()
        tied = files.model_names(plain)

        def read() -> dict[str, Any]:
            return files.align_model_state(files.read_model(checkpoint), expected, tied, strict)

        model.load_state_dict(files.on_every_rank(read, f"load the model from {checkpoint}"), strict=strict)
        return model

    def save_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = SIZE_PER_SHARD,
    ) -> None:
        """Write the full optimizer state, its param groups and the loss scaler as one safetensors file. Collective.

        Raises:
            NotImplementedError: ``shard=True``, ``gather_dtensor=False`` or a ``prefix`` (for several files).
            ValueError: the path has the ending of a torch pickle.
            Exception: on rank 0, why the file could not be written; CheckpointError on the others.
        """
        _check_saving(shard, gather_dtensor, size_per_shard)
        if prefix is not None:
            refuse("prefix", prefix, "optimizer states are stored by parameter index; leave it None")
        path = files.target(checkpoint, ".safetensors")
        state = optimizer.state_dict()
        shapes = parameter_shapes(optimizer)
        files.on_rank_zero(lambda: files.write_optimizer(state, shapes, path), f"save the optimizer to {path}")

    def load_optimizer(self, optimizer: torch.optim.Optimizer, checkpoint: str | Path) -> torch.optim.Optimizer:
        """Load what ``save_optimizer`` wrote (or a torch file of an optimizer's state). Collective.

        Returns:
            ``optimizer``.

        Raises:
            ValueError: other groups or shapes than the optimizer has. Nothing was loaded then, on any rank.
            FileNotFoundError: nothing there.
            CheckpointError: the file is damaged, or another rank failed.
        """

        own = parameter_shapes(optimizer)

        def read() -> dict[str, Any]:
            state, shapes = files.read_optimizer(checkpoint)
            files.check_optimizer_state(state, shapes, own)
            return state

        state = files.on_every_rank(read, f"load the optimizer from {checkpoint}")
        if "scaler" in state and getattr(optimizer, "scaler", None) is None:
            del state["scaler"]  # written by an fp16 run, read by one that needs no loss scale
        optimizer.load_state_dict(state)
        return optimizer

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Write the scheduler's state as JSON. Collective: every rank calls, rank 0 writes.

        Raises:
            ValueError: the path has the ending of a torch pickle.
            Exception: on rank 0, why the file could not be written; CheckpointError on the others.
        """
        path = files.target(checkpoint, ".json")
        state = lr_scheduler.state_dict()
        files.on_rank_zero(lambda: files.write_lr_scheduler(state, path), f"save the lr_scheduler to {path}")

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Load what ``save_lr_scheduler`` wrote (or a torch file of a scheduler's state). Collective.

        Raises:
            FileNotFoundError: nothing there.
            CheckpointError: the file is damaged, or another rank failed.
        """
        what = f"load the lr_scheduler from {checkpoint}"
        lr_scheduler.load_state_dict(files.on_every_rank(lambda: files.read_lr_scheduler(checkpoint), what))


def _unwrap(model: nn.Module) -> nn.Module:
    unwrap = getattr(model, "unwrap", None)
    plain: nn.Module = model if unwrap is None else unwrap()
    return plain


def _check_saving(shard: bool, gather_dtensor: bool, size_per_shard: int) -> None:
    if shard:
        refuse("shard", shard, "leave it False: the state is written as one file")
    if not gather_dtensor:
        refuse("gather_dtensor", gather_dtensor, "leave it True: files hold full tensors")
    if size_per_shard != SIZE_PER_SHARD:
        warnings.warn(f"size_per_shard={size_per_shard} has no effect: the state is written as one file", stacklevel=3)
