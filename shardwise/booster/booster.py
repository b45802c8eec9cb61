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

from shardwise.booster.checkpoint_io import (
    SIZE_PER_SHARD,
    CheckpointIO,
    checked_loading,
    model_writer,
    optimizer_writer,
    target,
)
from shardwise.booster.checkpoint_runs import Runs
from shardwise.booster.lora import ENABLED, adapter_writer, add_lora_parameters, with_adapter
from shardwise.booster.mixed_precision import MixedPrecision, mixed_precision_factory
from shardwise.booster.plugin.base import Plugin
from shardwise.booster.wrappers import OptimizerWrapper, unwrap_model
from shardwise.core.base.warnings import warn_user
from shardwise.core.checkpoint import PortableFiles, Restored, write_lr_scheduler
from shardwise.core.checkpoint.load_plan import Fit, Rows
from shardwise.core.checkpoint.schedulers import fitting_state
from shardwise.core.parallel.pipeline.batch import merged


class SaveOptions(TypedDict, total=False):
    """Keyword arguments of :meth:`Booster.save_checkpoint`.

    Attributes:
        tag: name of the checkpoint below the directory; by default ``step-<step>``.
        step: number of the step; by default the updates so far.
        data_position: this rank's position in its data: numbers, strings, tensors and containers of them.
        user_state: further values of the same kinds, those of rank 0.
        keep: number of complete checkpoints to keep; by default all.
        use_async: write in the background; :meth:`Booster.wait` waits for it.
    """

    tag: str
    step: int
    data_position: Any
    user_state: Any
    keep: int
    use_async: bool


class FitOptions(TypedDict, total=False):
    """Keyword arguments of :meth:`Booster.load_checkpoint` for a model with other names or numbers of rows."""

    rename: Mapping[str, str] | None
    """Names in the checkpoint, or regular expressions, with the names in the model."""
    rows: Mapping[str, Rows] | None
    """Parameters that may have another number of rows, with values of new rows: ``"keep"``, ``"zero"``, ``"mean"``."""


class Booster:
    """Shard models and optimizers with a plugin, and save and load them.

    Args:
        device: device of the model without a plugin; ``None`` does not move it. A plugin chooses the device itself.
        mixed_precision: ``"fp16"``, ``"bf16"`` or a :class:`MixedPrecision`; for TorchDDPPlugin and without a plugin.
            The other plugins have their own precision.
        plugin: a plugin of ``shardwise.booster.plugin``; ``None`` is a single process.

    Raises:
        NotImplementedError: ``mixed_precision`` is ``"fp16_apex"``, ``"fp16_naive"`` or ``"fp8"``.
        ValueError: ``mixed_precision`` is unknown for another reason, or ``device`` is not a device.
        TypeError: an argument of the wrong type.

    Examples:
        >>> from shardwise.booster import Booster
        >>> from shardwise.booster.plugin import GeminiPlugin
        >>> booster = Booster(plugin=GeminiPlugin(precision="bf16", max_norm=1.0))
        >>> model, optimizer, criterion, _, _ = booster.boost(model, optimizer, criterion)
        >>> booster.backward(criterion(model(inputs), targets), optimizer)
        >>> optimizer.step()
        >>> optimizer.zero_grad()
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
            raise TypeError(f"mixed_precision={mixed_precision!r:.80}: give 'fp16' or 'bf16', and a plugin as plugin=")
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
            raise ValueError(f"device={device!r:.80}: give a torch.device or its name; a plugin as plugin=") from None
        self.mixed_precision = mixed_precision
        self._runs, self._files = Runs(), PortableFiles()

    checkpoint_io = property(CheckpointIO)

    # ---- training

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: Any = None,
    ) -> Any:
        """Prepare the objects for training, and return them. Collective over all ranks.

        Args:
            model: a plain module, which is sharded in place.
            optimizer: an optimizer of its parameters.
            criterion: the loss function, if there is one.
            dataloader: the data loader, of ``plugin.prepare_dataloader``.
            lr_scheduler: a scheduler of the optimizer.

        Returns:
            ``(model, optimizer, criterion, dataloader, lr_scheduler)``; missing arguments are ``None``. If the data
            loader is the third argument, as in ``boost(model, optimizer, dataloader, criterion)``: these four in that
            order (with ``lr_scheduler`` fifth if there is one).

        Raises:
            TypeError: ``model`` or ``optimizer`` has another type.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"boost(model={type(model).__name__}): give a torch.nn.Module, and the optimizer second")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"boost(optimizer={type(optimizer).__name__}): give a torch.optim.Optimizer, or None")
        if optimizer is not None and vars(model).get(ENABLED):
            add_lora_parameters(model, optimizer)
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
        self._runs.add(model, optimizer, self.plugin is not None)
        if not swapped:
            return model, optimizer, criterion, dataloader, lr_scheduler
        returned = (model, optimizer, dataloader, criterion)
        return returned if lr_scheduler is None else (*returned, lr_scheduler)

    def backward(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Run the backward pass of ``loss`` (a scalar, this rank's mean), with the loss scale if there is one.

        Args:
            loss: a scalar, the mean over this rank's micro-batch.
            optimizer: the optimizer that ``boost`` returned.

        Raises:
            TypeError: ``optimizer`` is not a boosted one.
            RuntimeError: the model has pipeline stages; see :meth:`execute_pipeline`.
        """
        backward = getattr(optimizer, "backward", None)
        if backward is None or isinstance(optimizer, torch.Tensor):
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
        """Run forward and backward passes of one batch through a model with pipeline stages, by micro-batch.
        Collective.

        Under ``torch.no_grad()`` only forward passes run. Call ``optimizer.step()`` afterwards; the gradients of
        several calls accumulate.

        Args:
            data_iter: an iterator whose next item is the batch: a mapping of the model's arguments, a sequence of them,
                or one tensor, equal on every rank of the pipeline. Batches may have any size.
            model: the boosted model.
            criterion: ``criterion(outputs, inputs)`` returns the loss of a micro-batch, the mean over its rows. It is
                called on the rank of the last stage.
            optimizer: the optimizer boosted with the model; ``None`` for forward passes only.
            return_loss: return the loss.
            return_outputs: return the model's outputs, which need memory for the full batch.
            broadcast_loss: return the loss on every rank. ColossalAI does not have this argument.

        Returns:
            ``loss``: detached, the mean of the micro-batches' losses weighted by rows, on the ranks of the last stage,
            on others ``None``; ``outputs``: the outputs of all micro-batches, on the same ranks, if ``return_outputs``.

        Raises:
            NotImplementedError: the model has no pipeline stages.
            ValueError: gradients are enabled and there is no optimizer, or one of another model.
            TypeError: ``data_iter`` is not an iterator.
            StopIteration: ``data_iter`` is exhausted.
            PeerError: the iterator of another rank is exhausted, or another rank failed.

        Examples:
            >>> results = booster.execute_pipeline(
            ...     iter([batch]), model, lambda outputs, inputs: outputs.loss, optimizer, return_loss=True
            ... )
            >>> optimizer.step()
            >>> optimizer.zero_grad()
        """
        steps = self._runs.pipeline(model, optimizer, type(self.plugin).__name__)
        train = torch.is_grad_enabled()
        if optimizer is None and train:
            raise ValueError(
                f"optimizer={optimizer}: Optimizer should be passed when doing backward. Give the one that boost "
                "returned, or call execute_pipeline under torch.no_grad(), for forward passes alone"
            )
        if not isinstance(data_iter, Iterator):
            raise TypeError(f"data_iter={data_iter!r:.80}: give an iterator, such as iter(dataloader)")
        try:
            batch = next(data_iter)
        except Exception as error:  # other ranks would wait for this rank
            steps.without_batch(error)
            raise
        outcome = steps.step(batch, criterion, train, return_outputs)
        loss = outcome.loss if return_loss else None
        if return_loss and broadcast_loss:
            loss = steps.everywhere(loss)
        return {"loss": loss, "outputs": merged(outcome.outputs) if outcome.outputs else None}

    def no_sync(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Return a context without reductions: gradients add up locally, and the first later pass reduces the sum.

        Without a plugin this has no effect.

        Args:
            model: the boosted model, or ``None`` if ``optimizer`` is given.
            optimizer: the boosted optimizer.

        Raises:
            RuntimeError: the plugin reduces gradients in every backward pass.
            ValueError: neither argument was returned by ``boost``.
        """
        return nullcontext() if self.plugin is None else self.plugin.no_sync(model, optimizer)

    # ---- adapters

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> nn.Module:
        """Return ``model`` with a LoRA adapter of peft to train. Call it before boost, under any plugin.

        Base weights are frozen: they have no gradients, no communication and no optimizer state. If the optimizer was
        built before this call, boost adds the adapter's parameters to it.

        Args:
            model: a plain module.
            pretrained_dir: load a saved adapter (trainable) instead of a new one.
            lora_config: a ``peft.LoraConfig`` for a new adapter.
            bnb_quantization_config: accelerate's configuration of packed weights; ``None``: 4 bits (nf4 with double
                quantization), with computation in bf16.
            quantize: pack the weights of linear layers except the head with bitsandbytes (QLoRA).

        Raises:
            ImportError: peft is not installed, or bitsandbytes if it is needed.
            TypeError: a configuration of another type.
            ValueError: neither a directory nor a configuration is given, the model is boosted, or it has no values to
                pack.
        """
        if self.plugin is not None and not self.plugin.support_lora():
            raise ValueError(f"{type(self.plugin).__name__} does not support LoRA; train the whole model")
        return with_adapter(model, pretrained_dir, lora_config, bnb_quantization_config, quantize)

    def save_lora_as_pretrained(self, model: nn.Module, checkpoint: str | Path, use_safetensors: bool = False) -> None:
        """Write the adapter so that ``PeftModel.from_pretrained`` and ``enable_lora(pretrained_dir=...)`` load it.

        Collective: every rank calls it, and rank 0 writes ``adapter_config.json`` and ``adapter_model.bin`` (or
        ``.safetensors``) into the directory ``checkpoint``. Base weights are not read.

        Args:
            model: the boosted model with an adapter.
            checkpoint: the directory.
            use_safetensors: write ``adapter_model.safetensors`` instead of ``adapter_model.bin``.

        Raises:
            ValueError: the model has no adapter.
            CheckpointError: rank 0 could not write (raised on every rank); earlier files are unchanged.
        """
        write = adapter_writer(unwrap_model(model), Path(checkpoint), use_safetensors)
        self._runs.wait_for_saves()
        self._files.save_model(self._runs.of_model(model), write, f"save the adapter to {checkpoint}")

    # ---- checkpoints

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
        """Write the full model. Collective: every rank calls it, and rank 0 gathers and writes one block at a time.

        Args:
            model: a boosted model, or a plain one.
            checkpoint: a file, of torch if it ends in ``.pt``, ``.pth``, ``.bin`` or ``.ckpt``, otherwise of
                safetensors; with ``shard`` a directory that ``from_pretrained`` loads. Either is replaced in one step,
                so after a failure the earlier one is unchanged.
            shard: several files with an index.
            gather_dtensor: must be True: the full model is written.
            prefix: prefix of every name; with ``shard`` part of the files' names, like Hugging Face's ``variant``.
            size_per_shard: largest size of a shard in MB of 2**20 bytes; only a shard of a single tensor may be larger.
            use_safetensors: format of shards: False writes ColossalAI's torch files (``pytorch_model-00001.bin``), True
                and ``None`` safetensors. For a file the suffix decides; True requires ``.safetensors``.
            use_async: copy to host memory and return; a thread gathers and writes. An error is raised by the next
                ``save_model``, by any load, or by :meth:`wait`. An unfinished save is waited for first.

        Raises:
            NotImplementedError: ``gather_dtensor=False``.
            ValueError: the path has another suffix, or a size is not positive.
            CheckpointError: a rank failed (raised on every rank); earlier files are unchanged.
        """
        write = model_writer(
            unwrap_model(model), checkpoint, shard, gather_dtensor, prefix, size_per_shard, use_safetensors
        )
        self._runs.wait_for_saves()  # an unfinished save may write into the directory that is replaced
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
        """Load a model of any format into a boosted or plain model. Collective. Each rank reads only its part.

        Args:
            model: a boosted model.
            checkpoint: a file, a directory, or an index; any format of :func:`open_checkpoint`. Torch files are read
                with ``weights_only=True``.
            strict: missing and unexpected names are errors. False loads what fits, and warns (rank 0) if no name fits.
                Different shapes are always errors.
            low_cpu_mem_mode: no effect (False warns): each rank reads only what it needs, directly into its shards.
            num_threads: no effect; another number than 1 warns.
            rename: names in the checkpoint, or regular expressions, with the names in the model.
            rows: parameters that may have another number of rows, with values of new rows: ``"keep"``, ``"zero"`` or
                ``"mean"``; see :meth:`Checkpointer.load`.

        Returns:
            ``model``.

        Raises:
            ValueError: names or shapes do not fit; all are listed. Nothing was loaded on any rank.
            FileNotFoundError: there is no checkpoint.
            CheckpointError: the checkpoint is damaged or cannot be read (raised on every rank).
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
            gather_dtensor: must be True: the full model is written.
            prefix: part of the files' names, with ``shard`` only.
            size_per_shard: largest size of a shard in MB of 2**20 bytes.
            use_async: write in the background, as in :meth:`save_model`.

        Raises:
            NotImplementedError: ``gather_dtensor=False``.
            ValueError: the path has another suffix, a size is not positive, or there is a prefix without ``shard``.
            CheckpointError: a rank failed (raised on every rank); earlier files are unchanged.
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
        """Load an optimizer's state of any format. Collective. Each rank reads only its part.

        Parameters are matched by name if the checkpoint has names, otherwise by their order in the groups.

        Args:
            optimizer: a boosted optimizer.
            checkpoint: a file, a directory, or an index.
            low_cpu_mem_mode: no effect, as in :meth:`load_model`.
            num_threads: no effect; another number than 1 warns.
            strict: other groups, and the state of another class, are errors. False loads by name what fits, resets
                other state, and warns on rank 0; without names the groups must be equal.
            rename: names in the checkpoint, or regular expressions, with the names in the model.
            rows: parameters that may have another number of rows, as in :meth:`load_model`; the state of new rows is 0.

        Returns:
            ``optimizer``.

        Raises:
            ValueError: groups, names or shapes differ from the optimizer's, or the state is of another class. Nothing
                was loaded on any rank.
            FileNotFoundError: there is no checkpoint.
            CheckpointError: the checkpoint is damaged or cannot be read (raised on every rank).
        """
        path = checked_loading(checkpoint, low_cpu_mem_mode, num_threads)
        run, _ = self._runs.of_optimizer(optimizer)
        self._files.load_optimizer(run, path, strict, Fit(rename, rows))
        return optimizer

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Write the scheduler's state. Collective: every rank calls it, and rank 0 writes.

        The file is a torch file if the path ends in ``.pt``, ``.pth``, ``.bin`` or ``.ckpt``, otherwise JSON.

        Args:
            lr_scheduler: the scheduler that ``boost`` returned.
            checkpoint: the file.

        Raises:
            ValueError: the path has another suffix.
            CheckpointError: rank 0 could not write (raised on every rank); an earlier file is unchanged.
        """
        path = target(checkpoint, ".json")
        what = f"save the lr_scheduler to {path}"
        run = self._runs.of_scheduler(lr_scheduler)
        self._files.on_rank_zero(run, lambda: write_lr_scheduler(lr_scheduler, path), what)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Load a file of ``save_lr_scheduler`` (or a torch file of a scheduler's state). Collective.

        Args:
            lr_scheduler: the scheduler that ``boost`` returned.
            checkpoint: the file.

        Raises:
            FileNotFoundError: there is no file.
            CheckpointError: the file is damaged or cannot be read (raised on every rank).
            ValueError: the file has the state of another class of scheduler, or of another number of param groups.
        """
        what = f"load the lr_scheduler from {checkpoint}"
        run = self._runs.of_scheduler(lr_scheduler)
        lr_scheduler.load_state_dict(self._files.everywhere(run, lambda: fitting_state(lr_scheduler, checkpoint), what))

    # ---- complete runs

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        **options: Unpack[SaveOptions],
    ) -> str:
        """Save all state of a run as ``directory/<tag>``. Collective; all ranks write.

        The checkpoint has weights, masters, optimizer state, loss scale, schedulers, every rank's random number
        generators and position in its data, and ``user_state``.

        Args:
            directory: a directory of checkpoints.
            model: the boosted model.
            optimizer: the optimizer boosted with it. Its state is saved in any case.
            lr_scheduler: one scheduler, or a list of schedulers.
            options: ``tag``, ``step``, ``data_position``, ``user_state``, ``keep`` and ``use_async``, see
                :class:`SaveOptions`.

        Returns:
            The checkpoint's path.

        Raises:
            ValueError: model and optimizer were not boosted together, or a value that a checkpoint cannot hold.
            CheckpointError: a rank failed (raised on every rank); earlier checkpoints are unchanged.

        Examples:
            >>> path = booster.save_checkpoint("checkpoints", model, optimizer)
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
        """Restore a checkpoint of :meth:`save_checkpoint` under any plugin and number of ranks. Collective.

        Args:
            directory: a directory of checkpoints; or one checkpoint, of any format.
            model: the boosted model.
            optimizer: the optimizer boosted with it.
            lr_scheduler: one scheduler or a list, as in the save; ``None`` does not restore schedulers.
            tag: name of the checkpoint; the newest by default.
            resume: ``"auto"``: load the newest complete checkpoint and report damaged ones, or return ``None`` if no
                checkpoint exists, so that the same command starts and resumes a run.
            strict: missing or unexpected names are errors. Different shapes are always errors.
            fit: ``rename`` and ``rows``, see :class:`FitOptions`.

        Returns:
            The position in training: step, user state and this rank's data position.

        Raises:
            ValueError: names or shapes do not fit (nothing was changed), or both ``tag`` and ``resume``.
            FileNotFoundError: there is no such checkpoint.
            CheckpointDamage: bytes are missing or wrong (raised on every rank); the message says if values were already
                replaced.

        Examples:
            >>> restored = booster.load_checkpoint("checkpoints", model, optimizer, resume="auto")
            >>> step = restored.step if restored is not None else 0
        """
        if resume not in (None, "auto") or (resume is not None and tag is not None):
            raise ValueError(f"resume={resume!r}, tag={tag!r}: give resume='auto', or a tag, or neither")
        self._files.wait_for_saves()
        saver = self._runs.saver(model, optimizer)
        schedulers = _several(lr_scheduler)
        return saver.load(directory, resume or tag, strict=strict, lr_schedulers=schedulers, **fit)

    def wait(self) -> None:
        """Wait until all asynchronous saves of this Booster are written.

        Raises:
            CheckpointError: a save failed (raised on every rank).
        """
        try:
            self._files.wait_for_saves()
        finally:
            self._runs.wait_for_saves()

    def close(self) -> None:
        """Wait for saves, and release the communicators and files of boosted models. Idempotent; not collective.

        Save first: the models and optimizers cannot be used afterwards. Without this call, the last reference to model
        and optimizer releases them.

        Raises:
            CheckpointError: an asynchronous save failed; everything is closed.
        """
        try:
            self._files.wait_for_saves()
        finally:
            self._runs.close()


def _is_dataloader(value: object) -> bool:
    """Return True for a data loader, or any object of the user that yields batches; a loss function is not one."""
    return isinstance(value, DataLoader) or (hasattr(value, "__iter__") and not callable(value))


def _several(lr_scheduler: Any) -> list[Any]:
    if lr_scheduler is None:
        return []
    return list(lr_scheduler) if isinstance(lr_scheduler, list | tuple) else [lr_scheduler]
