"""The interface between plugins and the Booster, and the base class of the plugins on shardwise's engine."""

from __future__ import annotations

import inspect
import os
import tempfile
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from shardwise.booster.checkpoint_runs import SESSION, remember_session
from shardwise.booster.lora import add_lora_parameters
from shardwise.booster.wrappers import ModelWrapper, give_names
from shardwise.core.base.validate import MOST_SEED, Names, boolean, integer, refuse
from shardwise.core.base.validate import fraction as share
from shardwise.core.base.warnings import warn_user
from shardwise.core.parallel.float8 import convert_to_float8_training
from shardwise.plan import DiskPlan, Plan

if TYPE_CHECKING:
    from shardwise.session import Session

Boosted = tuple[nn.Module, torch.optim.Optimizer | None]


def start_ranks() -> torch.device:
    """Create the process group from the launcher's variables if it does not exist. Return this process's device.

    Raises:
        RuntimeError: the launcher started several processes, and the process group has one rank.
    """
    from shardwise.core.mesh.launch import check_joined, init_distributed

    device = init_distributed()
    check_joined()
    return device


def all_ranks() -> tuple[int, int]:
    """Return (rank of this process, number of ranks); creates the process group as :func:`start_ranks` does."""
    start_ranks()
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def data_parallel_size(ranks: int, tp_size: int, pp_size: int = 1, sp_size: int = 1) -> int:
    """Return the number of data-parallel ranks.

    Raises:
        ValueError: the product of the sizes does not divide them.
    """
    if ranks % (tp_size * pp_size * sp_size):
        sizes = f"tp_size={tp_size}"
        sizes += "".join(f" x {name}={size}" for name, size in (("pp_size", pp_size), ("sp_size", sp_size)) if size > 1)
        raise ValueError(
            f"{sizes} does not divide the {ranks} ranks: start another number of them, or give sizes whose product "
            f"divides {ranks}"
        )
    return ranks // (tp_size * pp_size * sp_size)


def with_optimizer(plan: Plan, optimizer: torch.optim.Optimizer | None) -> Plan:
    """Return ``plan`` with the fraction of optimizer state on disk that the optimizer requests.

    An optimizer requests it by ``nvme_offload_fraction`` (a fraction of all state) and ``nvme_offload_dir`` (``None``:
    the directory of temporary files), as HybridAdam and CPUAdam do. Other state stays where the plan has it, if it
    fits. Host memory for transfers is pinned if the plan reduces during backward.

    Raises:
        ValueError: the fraction is not in [0, 1].
        NotImplementedError: the plan places state by the memory trace, which only knows device and host.
    """
    fraction = getattr(optimizer, "nvme_offload_fraction", 0.0) or 0.0
    share(f"{type(optimizer).__name__}'s nvme_offload_fraction", fraction)
    if fraction == 0.0:
        return plan
    tiers = plan.tiers
    if tiers.auto is not None:
        refuse("nvme_offload_fraction", fraction, "use placement_policy='static', or an optimizer without it")
    directory = os.fspath(getattr(optimizer, "nvme_offload_dir", None) or tempfile.gettempdir())
    return plan.but(
        tiers=replace(
            tiers,
            state_disk_fraction=float(fraction),
            state_host_fraction=min(tiers.state_host_fraction, 1.0 - fraction),
            pin_memory=tiers.pin_memory or plan.comm.overlap,
            disk=DiskPlan(directory=directory),
        )
    )


def updates_early(plan: Plan, device: torch.device) -> bool:
    """Return True if some state can be updated during backward. On a GPU this is state on the host or a disk."""
    tiers = plan.tiers
    elsewhere = tiers.auto is not None or tiers.state_host_fraction + tiers.state_disk_fraction > 0.0
    return plan.grad.update == "backward" and (device.type == "cpu" or elsewhere)


class Plugin(ABC):
    """A method of distributed training. ``Booster`` calls these methods; users call ``prepare_dataloader``."""

    def control_precision(self) -> bool:
        """Return True if the plugin defines number formats, so that the Booster's ``mixed_precision`` is ignored."""
        return True

    def control_device(self) -> bool:
        """Return True if the plugin defines the device, so that the Booster's ``device`` is ignored."""
        return True

    def supported_precisions(self) -> list[str]:
        """Return the accepted values of ``precision``."""
        return ["fp16", "bf16", "fp32"]

    def supported_devices(self) -> list[str]:
        """Return the supported device types."""
        return ["cuda", "cpu"]

    def support_no_sync(self) -> bool:
        """Return True if :meth:`no_sync` can be used with these arguments."""
        return True

    def support_lora(self) -> bool:
        """Return True if ``Booster.enable_lora`` can be used."""
        return True

    def add_lora_params_to_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Add the trainable parameters of an adapter to the optimizer, each to the group of the parameter that it
        adapts.

        For a model of ``enable_lora`` boost does this. Call it before boost for other models, if the optimizer was
        built before the adapter. Parameters that are already in a group stay there.

        Args:
            model: the model with an adapter.
            optimizer: an optimizer of the model's other parameters.
        """
        add_lora_parameters(model, optimizer)

    @abstractmethod
    def configure(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Boosted:
        """Prepare model and optimizer for training, and return them. Collective. The optimizer may be ``None``.

        Args:
            model: a plain module.
            optimizer: its optimizer, or ``None``.

        Returns:
            The prepared model and optimizer.
        """

    @abstractmethod
    def no_sync(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Return a context without reductions: gradients add up locally, and the first later pass reduces the sum.

        Args:
            model: the boosted model.
            optimizer: the boosted optimizer.
        """

    def data_parallel(self) -> tuple[int, int]:
        """Return (this rank's index, number) among the data-parallel ranks."""
        return all_ranks()

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
        """Return a ``DataLoader`` whose sampler divides ``dataset`` over the data-parallel ranks.

        Workers use a generator seeded with ``seed`` and the rank, so they differ between ranks and between epochs and a
        run is reproducible.

        Args:
            dataset: a map-style dataset.
            batch_size: samples per rank and step.
            shuffle: use another order in every epoch; call ``dataloader.sampler.set_epoch(epoch)``.
            seed: seed of the order and of the workers; must be equal on all ranks.
            drop_last: drop the last incomplete batch, and samples that cannot be divided evenly over the ranks.
            pin_memory: copy batches to pinned host memory, as ``DataLoader`` does.
            num_workers: worker processes of the ``DataLoader``; 0: none.
            distributed_sampler_cls: sampler class; ``None``: ``torch.utils.data.DistributedSampler``.
            kwargs: further arguments of ``DataLoader``.

        Raises:
            TypeError: the dataset is iterable-style, which no sampler can divide over ranks, or an argument has a wrong
                type.
            ValueError: ``kwargs`` has a sampler, or a number is out of range.
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(dataset).__name__} has no length, so no sampler can divide it over the ranks; divide it in its "
                "own __iter__ (torch.distributed.get_rank()) and pass your own DataLoader to boost"
            )
        if batch_size is not None:
            integer("batch_size", batch_size, 1, what="a number of samples")
        integer("seed", seed, 0, MOST_SEED)
        integer("num_workers", num_workers, 0, what="a number of processes")
        for name, value in (("drop_last", drop_last), ("pin_memory", pin_memory), ("shuffle", shuffle)):
            boolean(name, value)
        for name in sorted({"sampler", "batch_sampler"} & kwargs.keys()):
            raise ValueError(
                f"{name}={kwargs[name]!r}: prepare_dataloader makes the sampler itself; give distributed_sampler_cls, "
                "or build torch.utils.data.DataLoader yourself and pass it to boost"
            )
        replicas = self.data_parallel()
        cls = distributed_sampler_cls or DistributedSampler
        options = {
            "sampler": _sampler(dataset, replicas, shuffle, seed, drop_last, cls),
            "generator": torch.Generator().manual_seed(seed + replicas[0]),
            **kwargs,
        }
        return DataLoader(
            dataset, batch_size, drop_last=drop_last, pin_memory=pin_memory, num_workers=num_workers, **options
        )

    def prepare_train_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Call :meth:`prepare_dataloader`; published examples use this name."""
        return self.prepare_dataloader(*args, **kwargs)


def _sampler(
    dataset: Dataset[Any], replicas: tuple[int, int], shuffle: bool, seed: int, drop_last: bool, cls: type[Any]
) -> Any:
    """Return a sampler of class ``cls`` for a rank: ``replicas`` are its index and the number of data-parallel ranks.

    It is called as ``cls(dataset, num_replicas=, rank=, shuffle=)``, and with ``seed=`` and ``drop_last=`` if its
    signature has them; a warning names those that it does not have.
    """
    rank, size = replicas
    accepted = inspect.signature(cls).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    options = {"seed": seed, "drop_last": drop_last}
    missing = [name for name in options if not (anything or name in accepted)]
    needed = [name for name in missing if (shuffle if name == "seed" else drop_last)]
    if needed:
        warn_user(f"{cls.__name__} takes no {' and no '.join(needed)}, so it is not passed on")
    options = {name: value for name, value in options.items() if name not in missing}
    return cls(dataset, num_replicas=size, rank=rank, shuffle=shuffle, **options)


class DPPluginBase(Plugin):
    """Base of the plugins with data parallelism only, and of GeminiPlugin."""

    def no_sync(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which gradients are not reduced. ``model`` is the boosted model.

        Args:
            model: the boosted model.
            optimizer: no effect.

        Raises:
            ValueError: ``model`` is not a boosted one.
        """
        if not isinstance(model, ModelWrapper):
            raise ValueError(f"no_sync(model={type(model).__name__}): give the model that boost returned")
        return model.no_sync()


class ShardedPlugin(Plugin):
    """A plugin that translates its arguments into a :class:`~shardwise.plan.Plan` for the engine."""

    names = Names("the boosted model", "step() of the boosted optimizer", "booster.save_model(model, path)")
    _mesh: Any = None

    @abstractmethod
    def plan(self, world_size: int) -> Plan:
        """Return the plan for this number of ranks, including model-parallel ranks.

        Args:
            world_size: number of all ranks.
        """

    def check_device(self, device: torch.device) -> None:
        """Raise if an argument does not fit ``device``.

        Args:
            device: the device of this rank.
        """

    def prepare(self, session: Any) -> None:
        """Set up a new :class:`~shardwise.session.Session` with settings that are not in a plan. Called once.

        Args:
            session: the session of the boosted model.
        """

    def data_parallel(self) -> tuple[int, int]:
        """Return (index of this rank, number of ranks) among the data-parallel ranks of the plan."""
        rank, ranks = all_ranks()
        return self.plan(ranks).mesh.data_parallel(rank, ranks)

    def mesh(self) -> Any:
        """Return the device mesh, made at first use and shared by all models of this plugin. Collective."""
        if self._mesh is None:
            from shardwise.core.mesh import Mesh

            device = start_ranks()
            self.check_device(device)
            plan = self.plan(all_ranks()[1])
            vars(self)["_mesh"] = Mesh.create(plan.mesh, device, plan.comm)  # the dataclass is frozen
        return self._mesh

    def configure(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Boosted:
        from shardwise.session import build

        mesh = self.mesh()
        plan = with_optimizer(self.plan(mesh.mesh_group.size), optimizer)
        take_offload = getattr(optimizer, "take_offload", None)
        if take_offload is not None:
            take_offload()  # from now on the plan defines the location of state, not the optimizer
        if plan.grad.update == "backward" and not updates_early(plan, mesh.device):
            warn_user(
                f"update={plan.grad.update!r} updates nothing during backward: masters and optimizer state are all on "
                f"{mesh.device}, where step() updates them; put some on the host, or use update='step'"
            )
        session = build(model, optimizer, plan, mesh, names=self.names)
        if getattr(self, "use_fp8", False):  # applies to the layers as they are now, sharded and cast
            convert_to_float8_training(model)
        self.prepare(session)
        give_names(session)
        remember_session(session)
        return session.module, session.optimizers[0] if session.optimizers else None

    def session(self, model: nn.Module) -> Session:
        """Return the session of a boosted model, which has its plan, ``memory()``, ``traffic()``, ``full_gradients()``.

        Args:
            model: the model that ``boost`` returned, or the original one.

        Raises:
            ValueError: the model was not boosted, or not by a plugin on the engine.
        """
        session: Session | None = vars(model).get(SESSION)
        if session is None:
            raise ValueError(f"session({type(model).__name__}): give the model that boost returned under this plugin")
        return session

    def no_sync(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> AbstractContextManager[None]:
        if not self.support_no_sync():
            raise RuntimeError(
                f"{type(self).__name__} reduces gradients in every backward pass, so no_sync is not available; "
                "accumulate by calling backward several times before step"
            )
        if model is None and optimizer is not None:
            session = vars(optimizer).get(SESSION)
            model = None if session is None else session.module
        no_sync = getattr(model, "no_sync", None)
        if no_sync is not None:
            context: AbstractContextManager[None] = no_sync()
            return context
        raise ValueError(f"no_sync({type(model).__name__}, {type(optimizer).__name__}): give what boost returned")
