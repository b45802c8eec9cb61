"""The Booster: ``boost`` a model and its optimizer with a plugin, then train, save and load through one interface."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import nn
from torch.utils.data import DataLoader

from shardwise.booster.dataloader import is_dataloader
from shardwise.booster.interface import OptimizerWrapper, unwrap_model
from shardwise.booster.lora import ENABLED, adapter_writer, add_lora_parameters, with_adapter
from shardwise.booster.mixed_precision import MixedPrecision, mixed_precision_factory
from shardwise.booster.plugin.base import Plugin
from shardwise.booster.runs import Runs
from shardwise.booster.targets import SIZE_PER_SHARD, checked_loading, model_writer, optimizer_writer, target
from shardwise.core.base.warnings import warn_user
from shardwise.core.checkpoint import PortableFiles, Restored, write_lr_scheduler
from shardwise.core.checkpoint.fitting import Fit, Rows
from shardwise.core.checkpoint.schedulers import fitting_state
from shardwise.core.parallel.pipeline import merged

__all__ = ["Booster", "CheckpointIO", "FitOptions", "SaveOptions"]

METHODS = ("model", "optimizer", "lr_scheduler", "checkpoint")
NAMES = frozenset({*(f"{verb}_{what}" for verb in ("save", "load") for what in METHODS), "save_lora_as_pretrained"})


class CheckpointIO:
    """``save_model``, ``load_model`` and the other methods of a Booster that save and load, under any plugin."""

    def __init__(self, booster: Any) -> None:
        self._booster = booster

    def __getattr__(self, name: str) -> Any:
        if name not in NAMES:
            raise AttributeError(f"{type(self).__name__} has no {name!r}, but {', '.join(sorted(NAMES))}")
        return getattr(self._booster, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *NAMES})

    def synchronize(self) -> None:
        """Return when nothing is being written any more; see ``Booster.wait``."""
        self._booster.wait()

    # ColossalAI's own names of the two halves of a wait, which its examples and tests call; here a save is one thing.
    _sync_d2h = synchronize
    _sync_io = synchronize


class SaveOptions(TypedDict, total=False):
    """Keyword arguments of :meth:`Booster.save_checkpoint`.

    ``tag`` (default ``step-<step>``), ``step`` (default: updates so far), ``data_position`` (where this rank is in its
    data) and ``user_state`` (rank 0's): numbers, strings, tensors and containers of them; ``keep``: how many
    whole checkpoints remain; ``use_async``.
    """

    tag: str
    step: int
    data_position: Any
    user_state: Any
    keep: int
    use_async: bool


class FitOptions(TypedDict, total=False):
    """Keyword arguments with which :meth:`Booster.load_checkpoint` fits a checkpoint to another model."""

    rename: Mapping[str, str] | None
    """Names in the checkpoint, or regular expressions, and what they are here."""
    rows: Mapping[str, Rows] | None
    """Parameters that may have another number of rows, and what new ones get: ``"keep"``, ``"zero"``, ``"mean"``."""


class Booster:
    """Args:
        device: where the model is put when there is no plugin; ``None`` leaves it. A plugin chooses the device itself.
        mixed_precision: ``"fp16"``, ``"bf16"`` or a :class:`MixedPrecision`; for TorchDDPPlugin and for no plugin.
            The other plugins have a precision of their own.
        plugin: one of :mod:`shardwise.booster.plugin`; ``None`` is one ordinary process.

    Raises:
        NotImplementedError: ``mixed_precision`` is ``"fp16_apex"``, ``"fp16_naive"`` or ``"fp8"``.
        ValueError: it is another unknown name, or ``device`` is no device.
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
            warn_user(f"device={str(device)!r} has no effect: {type(plugin).__name__} chooses the device")
            device = None
        if plugin is not None and mixed_precision is not None and plugin.control_precision():
            warn_user(f"mixed_precision has no effect: {type(plugin).__name__} has a precision argument of its own")
            mixed_precision = None
        self.plugin = plugin
        try:
            self.device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError):
            raise ValueError(f"device={device!r}: give a torch.device or its name, such as 'cpu' or 'cuda:0'") from None
        self.mixed_precision = mixed_precision
        self._runs, self._files = Runs(), PortableFiles()

    checkpoint_io = property(CheckpointIO)

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
        if optimizer is not None and vars(model).get(ENABLED):
            add_lora_parameters(model, optimizer)
        swapped = is_dataloader(criterion) and not is_dataloader(dataloader)
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
        self._runs.add(model, optimizer, self.plugin is not None)
        if not swapped:
            return model, optimizer, criterion, dataloader, lr_scheduler
        returned = (model, optimizer, dataloader, criterion)
        return returned if lr_scheduler is None else (*returned, lr_scheduler)

    def backward(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Backward from ``loss`` (a scalar, this rank's mean), with loss scaling where there is any.

        Raises:
            TypeError: ``optimizer`` is not a boosted one.
            RuntimeError: its model is in stages; see :meth:`execute_pipeline`.
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
        *,
        broadcast_loss: bool = False,
    ) -> dict[str, Any]:
        """The passes of one batch through a model in stages, micro-batch by micro-batch: forward and backward, or under
        ``torch.no_grad()`` forward alone. Collective. ``optimizer.step()`` follows, perhaps after several calls, whose
        gradients add up.

        Args:
            data_iter: its next item is the batch, the same on every rank of the pipeline: a mapping of the model's
                arguments, a sequence of them, or one tensor. Batches may be of any size.
            model: what boost returned.
            criterion: ``criterion(outputs, inputs)`` is a micro-batch's loss, the mean over its rows; it is called
                where the last stage is.
            optimizer: what boost returned with the model; ``None`` for forward passes alone.
            return_loss: the result has the loss.
            return_outputs: the result has the model's outputs; they need memory for the whole batch.
            broadcast_loss: an extension: every rank gets the loss.

        Returns:
            ``loss``: detached, the micro-batches' losses weighed by their rows, on the ranks with the last stage, on
            others ``None``; ``outputs``: of all micro-batches as one, there, where they were asked for.

        Raises:
            NotImplementedError: the model is not in stages.
            ValueError: gradients are enabled and there is no optimizer, or one of another model.
            StopIteration: ``data_iter`` is at its end.
        """
        steps = self._runs.pipeline(model, optimizer, type(self.plugin).__name__)
        return _pipeline_step(steps, data_iter, criterion, optimizer, (return_loss, return_outputs, broadcast_loss))

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

    # -- adapters

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> nn.Module:
        """``model`` with a LoRA adapter of peft: train the result. Call it before boost, under any plugin.

        Base weights are frozen: they get no gradient, no exchange and no optimizer state. An optimizer that was built
        before this gets the adapter's parameters at boost.

        Args:
            model: a plain module.
            pretrained_dir: load a saved adapter (trainable) instead of a new one.
            lora_config: a ``peft.LoraConfig`` for a new one.
            bnb_quantization_config: accelerate's, of how weights are packed; ``None``: 4 bits (nf4, twice), computed
                with in bf16.
            quantize: pack the weights of linear layers by bitsandbytes, but that of the head (QLoRA).

        Raises:
            ImportError: peft is not installed, or bitsandbytes where it is to pack.
            TypeError: a configuration of another kind.
            ValueError: neither directory nor configuration, a boosted model, or one without values to pack.
        """
        if self.plugin is not None and not self.plugin.support_lora():
            raise ValueError(f"{type(self.plugin).__name__} does not support LoRA; train the whole model")
        return with_adapter(model, pretrained_dir, lora_config, bnb_quantization_config, quantize)

    def save_lora_as_pretrained(self, model: nn.Module, checkpoint: str | Path, use_safetensors: bool = False) -> None:
        """Write the adapter so that ``PeftModel.from_pretrained`` and ``enable_lora(pretrained_dir=...)`` load it.

        Collective: every rank calls, rank 0 writes ``adapter_config.json`` and ``adapter_model.bin`` (or
        ``.safetensors``) into the directory ``checkpoint``. Base weights are not read.

        Raises:
            ValueError: the model has no adapter.
            CheckpointError: on every rank, when rank 0 could not write; what was there still is.
        """
        write = adapter_writer(unwrap_model(model), Path(checkpoint), use_safetensors)
        self._runs.wait_for_saves()
        self._files.save_model(self._runs.of_model(model), write, f"save the adapter to {checkpoint}")

    # -- checkpoints

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = SIZE_PER_SHARD,
        use_safetensors: bool | None = None,
        use_async: bool = False,
    ) -> None:
        """Write the full model. Collective: every rank calls, rank 0 writes what it gathers a piece at a time.

        Args:
            model: a boosted model, or a plain one.
            checkpoint: a file, of torch if it ends in ``.pt``, ``.pth``, ``.bin`` or ``.ckpt``, otherwise of
                safetensors; with ``shard`` a directory that ``from_pretrained`` loads. Either is replaced in one move,
                so a failure leaves what was there.
            shard: several files with an index.
            gather_dtensor: only True.
            prefix: put before every name; with ``shard`` into the files' names, as Hugging Face's ``variant``.
            size_per_shard: MB of 2**20 bytes; a shard is larger only where one tensor is.
            use_safetensors: of shards: False gives ColossalAI's torch files (``pytorch_model-00001.bin``), True and
                ``None`` safetensors. Of a file the ending decides; True requires ``.safetensors``.
            use_async: copy to host memory and return; a thread gathers and writes. A failure is raised by the next
                ``save_model``, by any load, or by :meth:`wait`. A checkpoint that is being written is waited for.

        Raises:
            NotImplementedError: ``gather_dtensor=False``.
            ValueError: the path has another ending, or a size is not positive.
            CheckpointError: on every rank, when one failed; what was there still is.
        """
        write = model_writer(
            unwrap_model(model), checkpoint, shard, gather_dtensor, prefix, size_per_shard, use_safetensors
        )
        self._runs.wait_for_saves()  # a checkpoint that is being written may be in the directory that is replaced
        self._files.save_model(self._runs.of_model(model), write, f"save the model to {checkpoint}", use_async)

    def load_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
        *,
        rename: Mapping[str, str] | None = None,
        rows: Mapping[str, Rows] | None = None,
    ) -> nn.Module:
        """Load a model of any format into a boosted one (or a plain one). Collective; each rank reads what it needs.

        Args:
            model: a boosted model.
            checkpoint: a file, a directory, or an index; any format of docs/checkpoints.md. Torch files are read with
                ``weights_only=True``.
            strict: refuse missing and unexpected names. False loads what fits, and warns (rank 0) where no name does. A
                shape that differs is always refused.
            low_cpu_mem_mode: no effect, False warns: each rank reads what it needs, straight into its place.
            num_threads: no effect; another number than 1 warns.
            rename, rows: names and numbers of rows that differ; see :meth:`Checkpointer.load`.

        Returns:
            ``model``.

        Raises:
            ValueError: it does not fit; lists every name that does not. Nothing was loaded then, on any rank.
            FileNotFoundError: nothing there.
            CheckpointError: it is damaged or cannot be read, on every rank.
        """
        path = checked_loading(checkpoint, low_cpu_mem_mode, num_threads)
        self._files.load_model(self._runs.of_model(model), path, strict, Fit(rename, rows))
        return model

    def save_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = SIZE_PER_SHARD,
        use_async: bool = False,
    ) -> None:
        """Write the full optimizer state, its param groups and the loss scale. Collective; see :meth:`save_model`.

        Args:
            optimizer: a boosted optimizer, or a plain one.
            checkpoint: a file, of torch (a ``state_dict()``) if it ends in ``.pt``, ``.pth``, ``.bin`` or ``.ckpt``,
                otherwise of safetensors; with ``shard`` a directory in ColossalAI's layout (torch files).
            shard: several files with an index; names of parameters and loss scale are in the index.
            gather_dtensor: only True.
            prefix: in the files' names, with ``shard`` only.
            size_per_shard: MB of 2**20 bytes.
            use_async: as in :meth:`save_model`.

        Raises:
            NotImplementedError: ``gather_dtensor=False``.
            ValueError: the path has another ending, a size is not positive, or a prefix is given without ``shard``.
            CheckpointError: on every rank, when one failed; what was there still is.
        """
        write = optimizer_writer(checkpoint, shard, gather_dtensor, prefix, size_per_shard)
        run, index = self._runs.of_optimizer(optimizer)
        self._runs.wait_for_saves()
        self._files.save_optimizer(run, index, write, f"save the optimizer to {checkpoint}", use_async)

    def load_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        checkpoint: str | Path,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
        *,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        rows: Mapping[str, Rows] | None = None,
    ) -> torch.optim.Optimizer:
        """Load an optimizer's state of any format. Collective; each rank reads what it needs.

        Parameters are matched by name where the checkpoint has names, otherwise by their order in the groups.

        Args:
            optimizer: a boosted optimizer.
            checkpoint: a file, a directory, or an index.
            low_cpu_mem_mode: no effect, as in :meth:`load_model`.
            num_threads: no effect; another number than 1 warns.
            strict: other groups, and the state of another class, are errors. False loads by name what fits,
                resets the rest, and warns on rank 0; where there are no names the groups must be equal.
            rename, rows: as in :meth:`load_model`; rows that are new have a state of zero.

        Returns:
            ``optimizer``.

        Raises:
            ValueError: other groups, names or shapes than the optimizer has, or the state of another class. Nothing was
                loaded then, on any rank.
            FileNotFoundError: nothing there.
            CheckpointError: it is damaged or cannot be read, on every rank.
        """
        path = checked_loading(checkpoint, low_cpu_mem_mode, num_threads)
        run, _ = self._runs.of_optimizer(optimizer)
        self._files.load_optimizer(run, path, strict, Fit(rename, rows))
        return optimizer

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Write the scheduler's state: as a torch file if the path ends in ``.pt``, ``.pth``, ``.bin`` or ``.ckpt``,
        otherwise as JSON. Collective: every rank calls, rank 0 writes.

        Raises:
            ValueError: the path has another ending.
            CheckpointError: on every rank, when rank 0 could not write; what was there still is.
        """
        path = target(checkpoint, ".json")
        what = f"save the lr_scheduler to {path}"
        run = self._runs.of_scheduler(lr_scheduler)
        self._files.on_rank_zero(run, lambda: write_lr_scheduler(lr_scheduler, path), what)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Load what ``save_lr_scheduler`` wrote (or a torch file of a scheduler's state). Collective.

        Raises:
            FileNotFoundError: nothing there.
            CheckpointError: the file is damaged or cannot be read, on every rank.
            ValueError: it is the state of another class of scheduler, or one for another number of param groups.
        """
        what = f"load the lr_scheduler from {checkpoint}"
        run = self._runs.of_scheduler(lr_scheduler)
        lr_scheduler.load_state_dict(self._files.everywhere(run, lambda: fitting_state(lr_scheduler, checkpoint), what))

    # -- everything at once

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        **options: Unpack[SaveOptions],
    ) -> str:
        """Save everything of a run as ``directory/<tag>``: weights, masters, optimizer state, loss scale, schedulers,
        every rank's random number generators and place in its data, and what you add. Collective; all ranks write.

        Args:
            directory: of checkpoints.
            model: what boost returned.
            optimizer: what boost returned with it. Its state is saved in any case.
            lr_scheduler: one, or a list of them.
            options: see :class:`SaveOptions`.

        Returns:
            The checkpoint's path.

        Raises:
            ValueError: model and optimizer were not boosted together, or something that a checkpoint cannot hold.
            CheckpointError: on every rank, when one failed; earlier checkpoints are as they were.
        """
        self._files.wait_for_saves()
        saver = self._runs.saver(model, optimizer)
        return saver.save(directory, lr_schedulers=_several(lr_scheduler), **options)

    def load_checkpoint(
        self,
        directory: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        *,
        tag: str | None = None,
        resume: Literal["auto"] | None = None,
        strict: bool = True,
        **fit: Unpack[FitOptions],
    ) -> Restored | None:
        """Restore what :meth:`save_checkpoint` saved, under any plugin and number of ranks. Collective.

        Args:
            directory: of checkpoints; or one checkpoint, of any format.
            model: what boost returned.
            optimizer: what boost returned with it.
            lr_scheduler: one, or a list of them, as when saving; ``None`` leaves them.
            tag: which; the newest if not given.
            resume: ``"auto"``: the newest whole one; damaged ones are skipped with a notice, and ``None`` is returned
                where there is none, so that one command starts and resumes a run.
            strict: names that are missing or unexpected are errors. Shapes always are.
            fit: see :class:`FitOptions`.

        Returns:
            Where training was: step, user state and this rank's data position.

        Raises:
            ValueError: it does not fit (nothing was changed), or ``tag`` and ``resume`` are both given.
            FileNotFoundError: there is no such checkpoint.
            CheckpointDamage: bytes are missing or wrong, on every rank; where values were replaced already, it says so.
        """
        if resume not in (None, "auto") or (resume is not None and tag is not None):
            raise ValueError(f"resume={resume!r}, tag={tag!r}: give resume='auto', or a tag, or neither")
        self._files.wait_for_saves()
        saver = self._runs.saver(model, optimizer)
        given = _several(lr_scheduler)
        return saver.load(directory, resume or tag, strict=strict, lr_schedulers=given, **fit)

    def wait(self) -> None:
        """Return when nothing that this Booster saves asynchronously is being written any more.

        Raises:
            CheckpointError: one of the saves failed, on every rank.
        """
        try:
            self._files.wait_for_saves()
        finally:
            self._runs.wait_for_saves()

    def close(self) -> None:
        """Give back what boosted models share with other ranks and hold on disks, after waiting for saves; ranks need
        not call it together. Save first: the models and optimizers are not to be used any more. Calling it again does
        nothing. Without it the same goes with the last reference to model and optimizer.

        Raises:
            CheckpointError: an asynchronous save failed; everything is closed.
        """
        try:
            self._files.wait_for_saves()
        finally:
            self._runs.close()


def _several(lr_scheduler: Any) -> list[Any]:
    if lr_scheduler is None:
        return []
    return list(lr_scheduler) if isinstance(lr_scheduler, list | tuple) else [lr_scheduler]


def _pipeline_step(
    steps: Any,
    data_iter: Iterator[Any],
    criterion: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    wanted: tuple[bool, bool, bool],
) -> dict[str, Any]:
    """See :meth:`shardwise.booster.Booster.execute_pipeline`.

    Args:
        steps: of the model's session.
        data_iter, criterion, optimizer: as there.
        wanted: the loss, the outputs, the loss on every rank.

    Raises:
        ValueError: gradients are enabled and there is no optimizer.
        TypeError: ``data_iter`` is no iterator.
        StopIteration: it is at its end.
        PeerError: another rank's is at its end, or failed.
    """
    wants_loss, wants_outputs, broadcast_loss = wanted
    train = torch.is_grad_enabled()
    if optimizer is None and train:
        raise ValueError(
            f"optimizer={optimizer}: Optimizer should be passed when doing backward. Give the one that boost returned, "
            "or call execute_pipeline under torch.no_grad(), for forward passes alone"
        )
    if not isinstance(data_iter, Iterator):
        raise TypeError(f"data_iter={data_iter!r:.80}: give an iterator, such as iter(dataloader)")
    try:
        batch = next(data_iter)
    except Exception as error:  # the others would wait for this rank
        steps.without_batch(error)
        raise
    outcome = steps.step(batch, criterion, train, wants_outputs)
    loss = outcome.loss if wants_loss else None
    if wants_loss and broadcast_loss:
        loss = steps.everywhere(loss)
    return {"loss": loss, "outputs": merged(outcome.outputs) if outcome.outputs else None}
