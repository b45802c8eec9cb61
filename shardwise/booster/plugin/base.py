"""What every plugin offers the Booster, and the base of the plugins that run on shardwise's engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from shardwise.booster.dataloader import distributed_dataloader, distributed_sampler, require_map_style
from shardwise.plan import Plan

__all__ = ["Boosted", "Plugin", "ShardedPlugin", "refuse", "start_ranks"]

Boosted = tuple[nn.Module, torch.optim.Optimizer | None, Callable[..., Any] | None, Any, Any]


def refuse(argument: str, value: object, instead: str) -> None:
    """Raises:
    NotImplementedError: naming the argument, its value and what to do.
    """
    raise NotImplementedError(f"{argument}={value!r} is not available yet; {instead}")


def start_ranks() -> torch.device:
    """This process's device; the process group is started from the launcher's variables where none is yet."""
    from shardwise.mesh.launch import init_distributed

    return init_distributed()


class Plugin(ABC):
    """A way to run a model over ranks. ``Booster`` calls these methods; users call ``prepare_dataloader``."""

    def control_precision(self) -> bool:
        """Whether the plugin decides number formats, so that the Booster's ``mixed_precision`` is ignored."""
        return True

    def control_device(self) -> bool:
        """Whether the plugin decides the device, so that the Booster's ``device`` is ignored."""
        return True

    def supported_precisions(self) -> list[str]:
        """Names that the plugin's precision can have."""
        return ["fp16", "bf16", "fp32"]

    def supported_devices(self) -> list[str]:
        """Device types."""
        return ["cuda", "cpu"]

    def support_no_sync(self) -> bool:
        """Whether :meth:`no_sync` can be used with these arguments."""
        return True

    def support_lora(self) -> bool:
        """Whether ``Booster.enable_lora`` can be used."""
        return False

    @abstractmethod
    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """The five, ready to train. Collective over all ranks; what is ``None`` stays ``None``."""

    @abstractmethod
    def no_sync(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Backward passes inside accumulate without exchanging gradients; the first one after it exchanges the sum."""

    def data_parallel(self) -> tuple[int, int]:
        """(this rank's index, number) among the ranks that see different data."""
        start_ranks()
        if not (dist.is_available() and dist.is_initialized()):
            return 0, 1
        return dist.get_rank(), dist.get_world_size()

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type[Any] | None = None,
        **kwargs: Any,
    ) -> DataLoader[Any]:
        """A ``DataLoader`` whose sampler divides ``dataset`` over the data-parallel ranks.

        Args:
            dataset: a map-style dataset.
            batch_size: samples a rank and step.
            shuffle: another order every epoch; call ``dataloader.sampler.set_epoch(epoch)``.
            seed: of the order and of the workers; the same on every rank.
            drop_last: drop the last incomplete batch, and the samples that would make the ranks' shares unequal.
            pin_memory: see ``DataLoader``.
            num_workers: see ``DataLoader``.
            distributed_sampler_cls: instead of ``torch.utils.data.DistributedSampler``.
            kwargs: further arguments of ``DataLoader``.

        Raises:
            TypeError: the dataset has no length.
            ValueError: ``kwargs`` holds a sampler.
        """
        require_map_style(dataset)
        replicas = self.data_parallel()
        sampler = distributed_sampler(
            dataset, replicas, shuffle=shuffle, seed=seed, drop_last=drop_last, cls=distributed_sampler_cls
        )
        options = {"drop_last": drop_last, "pin_memory": pin_memory, "num_workers": num_workers, **kwargs}
        return distributed_dataloader(dataset, batch_size, replicas, seed=seed, sampler=sampler, options=options)

    def prepare_train_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Another name of :meth:`prepare_dataloader`, used by published examples."""
        return self.prepare_dataloader(*args, **kwargs)


class ShardedPlugin(Plugin):
    """A plugin that is a :class:`~shardwise.plan.Plan` for the engine and nothing else."""

    _mesh: Any = None

    @cached_property
    def _module_of(self) -> WeakKeyDictionary[torch.optim.Optimizer, nn.Module]:
        return WeakKeyDictionary()

    @abstractmethod
    def plan(self, world_size: int) -> Plan:
        """The plan for that many ranks."""

    def check_device(self, device: torch.device) -> None:
        """Raise where an argument does not go with ``device``."""

    def mesh(self) -> Any:
        """The ranks' mesh, made at first use and shared by every model boosted with this plugin. Collective."""
        if self._mesh is None:
            from shardwise.mesh import Mesh

            device = start_ranks()
            self.check_device(device)
            plan = self.plan(self.data_parallel()[1])
            self._mesh = Mesh.create(plan.mesh, device, plan.comm)
        return self._mesh

    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        from shardwise.build import build

        mesh = self.mesh()
        session = build(model, optimizer, self.plan(mesh.size), mesh)
        if session.optimizer is not None:
            self._module_of[session.optimizer] = session.module
        return session.module, session.optimizer, criterion, dataloader, lr_scheduler

    def no_sync(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> AbstractContextManager[None]:
        if not self.support_no_sync():
            raise RuntimeError(
                f"{type(self).__name__} reduces gradients in every backward pass, so there is nothing that no_sync "
                "could leave out; accumulate by calling backward several times before step"
            )
        if model is None and optimizer is not None:
            model = self._module_of.get(optimizer)
        no_sync = getattr(model, "no_sync", None)
        if no_sync is not None:
            context: AbstractContextManager[None] = no_sync()
            return context
        raise ValueError(f"no_sync(model={model!r:.60}, optimizer={optimizer!r:.60}): give what boost returned")
