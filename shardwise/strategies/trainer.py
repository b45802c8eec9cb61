"""The base class of the strategies for Lightning's Trainer: one session per LightningModule.

``setup`` shards the module and its optimizers. Then the Trainer calls the sharded module, and the engine reduces,
clips, scales and steps. The session outlives the run, so that saving, testing or fitting again continues from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal, cast

import torch

from shardwise.core.deferred import deferred_init
from shardwise.metrics import Metrics, Writer
from shardwise.plan import Plan
from shardwise.session import Session
from shardwise.strategies.lightning_packages import Namespace, Strategy
from shardwise.strategies.precision import NumberFormat, ShardedPrecision, as_sharded, correct_throughput
from shardwise.strategies.sessions import OF_TRAINER, Live, live_session, shard
from shardwise.strategies.trainer_checkpoints import Saving, check_schedulers, fit_schedulers

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
PASSED_ON = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "precision",
    "process_group_backend",
    "timeout",
    "start_method",
)


def passed_on(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments of a strategy that Lightning's ``DDPStrategy`` takes, without ``None``."""
    return {name: values[name] for name in PASSED_ON if values.get(name) is not None}


class ShardedStrategy(Strategy):
    """Base class that :func:`~shardwise.strategies.lightning_packages.build` completes.

    Subclasses override :meth:`_plan`.
    """

    model: Any
    optimizers: Any
    lr_scheduler_configs: Any

    def __init__(self, **lightning: Any) -> None:
        self._live: Live | None = None
        self._saving = Saving(self)
        super().__init__(**lightning)

    # ---- hooks for subclasses

    def _plan(self, module: Any) -> Plan:
        """Return the plan for ``module``, a LightningModule that is not sharded yet."""
        raise NotImplementedError(f"{type(self).__name__} has no _plan: override it")

    def _check(self, trainer: Any) -> None:
        """Raise an error or warn, before anything is built, about options of the Trainer that do not work."""

    def _built(self, session: Session, trainer: Any) -> None:
        """Called with the session of a run before its first use."""

    def _clips(self, value: float, algorithm: str) -> bool:
        """Return whether to apply the Trainer's clipping; ``False`` if the plan clips."""
        return True

    def _building(self) -> AbstractContextManager[Any]:
        """Return the context of ``configure_model`` and ``configure_sharded_model`` before the module is sharded."""
        return deferred_init()

    # ---- properties

    @property
    def session(self) -> Session:
        """The session that this strategy runs.

        Raises:
            RuntimeError: ``setup`` was not called.
        """
        if self._live is None:
            raise RuntimeError(
                f"session={self._live}: {type(self).__name__} shards the model when the Trainer runs; read it in a "
                "hook or afterwards"
            )
        return self._live.session

    @property
    def format(self) -> NumberFormat:
        """Number format of the precision."""
        return cast(NumberFormat, self.precision_plugin.format)

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin, always a :class:`ShardedPrecision`."""
        # The default is not stored: Lightning would take it for the user's choice.
        return as_sharded(self.ns, ShardedPrecision, self._precision_plugin)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = None if plugin is None else as_sharded(self.ns, ShardedPrecision, plugin)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return True: a checkpoint is loaded into shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Return True if Lightning restores optimizer states, which is only done from a single file."""
        return self._saving.is_single_file

    # ---- a run

    def setup(self, trainer: Any) -> None:
        """Shard the module, or continue with its session. Collective."""
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn.value == "fit"
        check_callbacks(self.ns, trainer)
        # A step cannot change tensors that hooks create in inference mode.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        self._check(trainer)
        self._saving.outline_dumps(trainer)
        module = self.lightning_module
        live = live_session(module)
        if live is not None and (fitting or not live.fits(self._plan(module), self.root_device)):
            live.unshard()
            live = None
        if live is None:
            if fitting:
                if self._layer_sync:
                    self._layer_sync.apply(module)
                self.model = module
                self.setup_optimizers(trainer)
            else:
                self._reset_optimizers_and_schedulers()
            live = self._shard(module, fitting)
        self._live = live
        self.precision_plugin.clips = self._clips
        self.model = live.session.module
        correct_throughput(self.ns, trainer, live.session.plan.precision.param_dtype or torch.float32)
        self._built(live.session, trainer)
        self.setup_precision_plugin()
        self.barrier("shardwise.setup")

    def _shard(self, module: Any, fitting: bool) -> Live:
        mock = self.ns.load("core.optimizer._MockOptimizer")  # Lightning's stand-in for "no optimizer"
        real = [each for each in self.optimizers if not isinstance(each, mock)] if fitting else []
        live = shard(module, real, self._plan(module), self.root_device, OF_TRAINER)
        if real:
            self.optimizers = list(live.session.optimizers)
        return live

    def model_to_device(self) -> None:
        """Do nothing: sharding has moved the model."""

    def teardown(self) -> None:
        """End a run: wait for unfinished saves and keep the session."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        running = trainer is not None and trainer.state.status.value == "running"
        if self._live is not None and running:
            self.session.checkpoints.wait_for_saves()
            if isinstance(self._launcher, self.ns.load("strategies.launchers._MultiProcessingLauncher")):
                self.unshard()  # the launcher sends the module's state to the main process
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()

    def unshard(self) -> None:
        """Turn the module into an ordinary one with full parameters on the host of every rank. Collective."""
        if self._live is not None:
            live, self._live = self._live, None
            live.unshard()
            self.model, self.optimizers = live.module, []
            if self._layer_sync:
                self._layer_sync.revert(live.module)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Build models without memory until they are sharded."""
        live = live_session(self.lightning_module)
        if live is not None:
            with deferred_init(), live.preserve():
                yield
        else:
            with self._building():
                yield

    # ---- passes and steps

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Skip reductions inside if the plan keeps unsharded gradients (stages 0 and 1)."""
        keeps = self._live is not None and self.session.plan.shard.reduce == "last"
        return self.session.no_sync() if keeps else nullcontext()

    # ---- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full state on the host of every rank, in fp32 if there are masters. Collective."""
        return self._saving.module_state()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the full state of ``optimizer`` on every rank in torch's format. Collective."""
        return self._saving.optimizer_state(getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a directory of shards, or one file if a ``checkpoint_io`` was given. Collective."""
        self._saving.save(checkpoint, filepath, storage_options, super().save_checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Restore from a directory or file of any format that ``open_checkpoint`` reads. Collective."""
        return self._restored(self._saving.load(checkpoint_path, weights_only, super().load_checkpoint))

    def _restored(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return ``checkpoint`` with schedulers' states that fit; ``on_load_checkpoint`` sees it next."""
        module = self.lightning_module
        if module.trainer.state.fn.value == "fit":
            check_schedulers(self.lr_scheduler_configs, checkpoint, module.strict_loading)
            fit_schedulers(self.lr_scheduler_configs, checkpoint)
        if self._live is not None:
            self._live.remember()
        return checkpoint

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load the weights of a single file. The weights of a directory are already loaded.

        Modules that ``on_load_checkpoint`` built again are dropped with a warning: they are not sharded.
        """
        if self._live is not None:
            self._live.put_back()
        self._saving.load_model(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the optimizer states of a single file."""
        self._saving.load_optimizers(checkpoint)


# ---- callbacks

_Callback: Any = object  # Lightning's Callback, once built for a namespace


def num_ids(batch: Any) -> int:
    """Return the number of elements of ``batch["input_ids"]``; 0 for other batches."""
    return int(batch["input_ids"].numel()) if isinstance(batch, Mapping) and "input_ids" in batch else 0


class MetricsCallback(_Callback):  # type: ignore[misc]
    """Records :class:`~shardwise.metrics.Metrics` after the steps of the optimizer, at ``trainer.global_step``.

    The loss is the sum of the losses that Lightning has divided by ``accumulate_grad_batches``, so the mean over the
    batches of a step, or NaN if ``training_step`` returns no loss. The operations of the first step are counted if
    ``peak_flops`` is given.

    Args:
        writers: functions of :mod:`shardwise.metrics`, or your own.
        every: number of steps between two records.
        peak_flops: operations per second of the device in the dtype of the model, for ``mfu``.
        tokens: returns the number of tokens of a batch; by default that of the elements of ``batch["input_ids"]``.

    Attributes:
        metrics (Metrics): the metrics of the run, from its first step on.
    """

    def __init__(
        self, *writers: Writer, every: int = 1, peak_flops: float | None = None, tokens: Callable[[Any], int] = num_ids
    ) -> None:
        self._writers, self._every, self._peak_flops, self._tokens_of = writers, every, peak_flops, tokens
        self._counting = ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        session = getattr(trainer.strategy, "session", None)
        self.metrics = Metrics(session, *self._writers, every=self._every, peak_flops=self._peak_flops)
        self.metrics.steps, self._loss, self._tokens = trainer.global_step, 0.0, 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._counting.close()  # of a batch that a hook skipped
        if self._peak_flops and not self.metrics.flops:
            self._counting.enter_context(self.metrics.count_flops())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._counting.close()
        self._loss += (outputs or {}).get("loss", math.nan)
        self._tokens += self._tokens_of(batch) * trainer.strategy.session.data_ranks
        if trainer.global_step > self.metrics.steps:
            self.metrics.steps = trainer.global_step - 1  # manual optimization may step several times in a batch
            self.metrics.step(self._loss, self._tokens)
            self._loss, self._tokens = 0.0, 0

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._counting.close()


# Callbacks that do not work with sharded parameters.

AVERAGES = (
    "it averages and exchanges unsharded parameters",
    "average the checkpoints of several epochs afterwards",
)
REFUSED = {
    "callbacks.stochastic_weight_avg.StochasticWeightAveraging": AVERAGES,
    "callbacks.weight_averaging.WeightAveraging": AVERAGES,
    "callbacks.finetuning.BaseFinetuning": (
        "it unfreezes parameters during training, after they were packed for the optimizer",
        "fit in two runs and set requires_grad before each",
    ),
    "callbacks.pruning.ModelPruning": (
        "it replaces parameters by masked ones during training",
        "prune before training, or in your own optimizer",
    ),
}


UNFREEZING = {"unfreeze_and_add_param_group", "make_trainable", "add_param_group"}


def _only_freezes(callback: Any) -> bool:
    """Return whether ``finetune_function`` of a ``BaseFinetuning`` names no function that unfreezes.

    An unfreeze elsewhere raises an error when it runs.
    """
    code = getattr(getattr(callback, "finetune_function", None), "__code__", None)
    return code is not None and not UNFREEZING & {*code.co_names}


def check_callbacks(namespace: Namespace, trainer: Any) -> None:
    """Check the callbacks of a run that trains.

    Raises:
        NotImplementedError: a callback is one of :data:`REFUSED`.
    """
    if trainer.state.fn.value != "fit":
        return
    for path, (reason, instead) in REFUSED.items():
        refused = namespace.find(path)  # some versions do not have it
        for callback in trainer.callbacks if refused is not None else ():
            if isinstance(callback, refused) and not _only_freezes(callback):
                raise NotImplementedError(
                    f"{type(callback).__name__} with {type(trainer.strategy).__name__}: {reason}. Instead, {instead}"
                )
