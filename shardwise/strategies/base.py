"""What Lightning's strategies have in common: one session under a Trainer, whatever its plan.

The order of a run is Lightning's: ``setup`` shards the module and its optimizers; from then on the Trainer calls the
sharded module, and the engine reduces, clips, scales and steps. The session stays when the run ends, so that saving,
testing or fitting again goes on from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch

from shardwise.core.deferred import deferred_init
from shardwise.plan import Plan
from shardwise.session import Session
from shardwise.strategies.namespace import Namespace, build
from shardwise.strategies.precision import (
    NumberFormat,
    ShardedPrecision,
    check_replaceable,
    correct_throughput,
)
from shardwise.strategies.saving import Saving, check_schedulers, fit_schedulers
from shardwise.strategies.sessions import Live, live_session, shard

__all__ = ["REFUSED", "LightningArguments", "ShardedStrategy", "check_callbacks"]


_Base: Any = object  # Lightning's DDPStrategy, once built for a namespace


@dataclass(frozen=True)
class LightningArguments:
    """Arguments of Lightning's own strategies, which ours hand on.

    Attributes:
        accelerator: as in Lightning's ``DDPStrategy``.
        parallel_devices: as in Lightning's ``DDPStrategy``.
        cluster_environment: as in Lightning's ``DDPStrategy``.
        checkpoint_io: checkpoints become what it writes, single files; ``None``: a directory, each rank its part.
        precision_plugin: as in Lightning's ``DDPStrategy``.
        process_group_backend: as in Lightning's ``DDPStrategy``.
        timeout: of the process group.
        start_method: as in Lightning's ``DDPStrategy``.
    """

    accelerator: Any = None
    parallel_devices: list[torch.device] | None = None
    cluster_environment: Any = None
    checkpoint_io: Any = None
    precision_plugin: Any = None
    process_group_backend: str | None = None
    timeout: timedelta | None = None
    start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen"


class ShardedStrategy(_Base):  # type: ignore[misc]
    """To be built by :func:`shardwise.strategies.namespace.build`; a concrete strategy overrides :meth:`_plan`."""

    ns: ClassVar[Namespace]
    model: Any
    optimizers: Any
    lr_scheduler_configs: Any

    def __init__(self, **lightning: Any) -> None:
        self._live: Live | None = None
        self._saving = Saving(self)
        super().__init__(**{name: value for name, value in lightning.items() if value is not None})

    # ---- what a concrete strategy decides

    def _plan(self, module: Any) -> Plan:
        """The plan for ``module`` (a LightningModule before it is sharded), ``self.format`` and ``self.world_size``."""
        raise NotImplementedError(f"{type(self).__name__} has no _plan: override it")

    def _check(self, trainer: Any) -> None:
        """Raise or warn, before anything is built, where the Trainer or its module asks for what cannot be done."""

    def _built(self, session: Session, trainer: Any) -> None:
        """A session was made (or taken over from an earlier run) and is about to be used."""

    def _clips(self, value: float, algorithm: str) -> bool:
        """Whether the Trainer's clipping (``"norm"`` or ``"value"``) is done; ``False`` where the plan clips."""
        return True

    def _building(self) -> AbstractContextManager[Any]:
        """Around ``configure_model`` and ``configure_sharded_model`` of a module that is not sharded yet."""
        return deferred_init()

    # ---- facts

    @property
    def session(self) -> Session:
        """The session that this strategy runs.

        Raises:
            RuntimeError: there is none before ``setup``.
        """
        if self._live is None:
            raise RuntimeError(f"session={self._live}: {type(self).__name__} shards the model when the Trainer runs")
        return self._live.session

    @property
    def format(self) -> NumberFormat:
        """Number formats."""
        found: NumberFormat = self.precision_plugin.format
        return found

    @property
    def precision_plugin(self) -> Any:
        """Always a :class:`ShardedPrecision`."""
        # A default is not kept: Lightning takes one that is set for the user's choice.
        return self._precision_plugin if self._precision_plugin is not None else self._sharded_precision("32-true")

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None and not isinstance(plugin, ShardedPrecision):
            check_replaceable(self.ns, plugin)
            plugin = self._sharded_precision(plugin.precision)
        self._precision_plugin = plugin

    def _sharded_precision(self, precision: Any) -> Any:
        return build(self.ns, ShardedPrecision, "plugins.precision.precision.Precision", "ShardedPrecision")(precision)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: values go into shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether the last checkpoint is a single file, whose optimizer states Lightning hands over."""
        return self._saving.whole_file

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: steps are taken where Lightning counts them, after the last batch of an epoch too."""
        return False

    # ---- a run

    def setup(self, trainer: Any) -> None:
        """Shard the module, or go on with the session that it is in. Collective."""
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn.value == "fit"
        check_callbacks(self.ns, trainer)
        # Tensors that hooks make in inference mode could not be changed by steps, which are outside of it. The loop
        # that evaluates during training is never in it.
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
        mock = self.ns.load("core.optimizer._MockOptimizer")  # what Lightning takes for "no optimizer"
        real = [each for each in self.optimizers if not isinstance(each, mock)] if fitting else []
        live = shard(module, real, self._plan(module), self.root_device)
        if real:
            self.optimizers = list(live.session.optimizers)
        return live

    def model_to_device(self) -> None:
        """Sharding did."""

    def teardown(self) -> None:
        """End a run. The session stays; what is being saved is waited for."""
        launcher = self._launcher
        trainer = getattr(self.lightning_module, "_trainer", None)
        running = trainer is not None and trainer.state.status.value == "running"
        if self._live is not None and running:
            self.session.checkpoints.wait_for_saves()
            if isinstance(launcher, self.ns.load("strategies.launchers._MultiProcessingLauncher")):
                self.unshard()  # the launcher sends the module's own state to the main process
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()

    def unshard(self) -> None:
        """The module becomes an ordinary one, whole, on the host of every rank. Collective."""
        if self._live is not None:
            live, self._live = self._live, None
            live.unshard()
            self.model, self.optimizers = live.module, []
            if self._layer_sync:
                self._layer_sync.revert(live.module)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Models built inside have no memory until they are sharded."""
        live = live_session(self.lightning_module)
        if live is not None:
            with deferred_init(), live.kept():
                yield
        else:
            with self._building():
                yield

    # ---- passes and steps

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Passes inside keep whole gradients where the plan does (stages 0 and 1); elsewhere each is reduced."""
        if self._live is not None and self.session.plan.shard.reduce == "last":
            return self.session.no_sync()
        return nullcontext()

    # ---- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The full state on the host of every rank, fp32 where there are masters. Collective."""
        return self._saving.module_state()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The full state of ``optimizer`` on every rank, as plain torch has it. Collective."""
        return self._saving.optimizer_state(getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a directory, each rank its part; one file where a ``checkpoint_io`` was given. Collective."""
        self._saving.save(checkpoint, filepath, storage_options, super().save_checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Restore from a directory or file, of any format that ``open_checkpoint`` reads. Collective."""
        return self._restored(self._saving.load(checkpoint_path, weights_only, super().load_checkpoint))

    def _restored(self, found: dict[str, Any]) -> dict[str, Any]:
        """``found``, which ``on_load_checkpoint`` sees next."""
        module = self.lightning_module
        if module.trainer.state.fn.value == "fit":
            check_schedulers(self.lr_scheduler_configs, found, module.strict_loading)
            fit_schedulers(self.lr_scheduler_configs, found)
        if self._live is not None:
            self._live.remember()
        return found

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Weights of a single file; those of a directory are in place already.

        Modules that ``on_load_checkpoint`` built again are dropped with a warning: they would not be sharded.
        """
        if self._live is not None:
            self._live.put_back()
        self._saving.load_model(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Optimizer states of a single file."""
        self._saving.load_optimizers(checkpoint)


# ---- What would be wrong after a run, or fail within it, refused before: callbacks that change parameters, BatchNorm.


REFUSED = {
    "callbacks.stochastic_weight_avg.StochasticWeightAveraging": (
        "it averages and exchanges whole parameters, of which each rank has a part",
        "average the checkpoints of several epochs afterwards",
    ),
    "callbacks.weight_averaging.WeightAveraging": (
        "it averages and exchanges whole parameters, of which each rank has a part",
        "average the checkpoints of several epochs afterwards",
    ),
    "callbacks.finetuning.BaseFinetuning": (
        "it unfreezes parameters and adds them to the optimizer during training, and they are packed when it begins",
        "fit in two runs, with requires_grad set before each",
    ),
    "callbacks.pruning.ModelPruning": (
        "it replaces parameters by masked ones during training",
        "prune before training, or in an optimizer of your own",
    ),
}


def check_callbacks(namespace: Namespace, trainer: Any) -> None:
    """Look at the callbacks of a run that trains.

    Raises:
        NotImplementedError: one of :data:`REFUSED` is among them; the reason is given.
    """
    if trainer.state.fn.value != "fit":
        return
    for path, (reason, instead) in REFUSED.items():
        refused = namespace.find(path)  # not every version has each
        for callback in trainer.callbacks if refused is not None else ():
            if isinstance(callback, refused):
                raise NotImplementedError(
                    f"{type(callback).__name__} with {type(trainer.strategy).__name__}: {reason}; {instead}"
                )
