"""Setup for the Lightning tests: a Trainer on the ranks of the pool, small models and data, and a run's final weights.

Everything here is called on a rank. Lightning uses the pool's process group through a cluster environment with
processes that exist already, so a run starts no process.
"""

import logging
import os
import warnings
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardwise.strategies.lightning_packages import LIGHTNING, Namespace
from shardwise.testing import pool

WIDTH, HIDDEN, OUT = 6, 16, 3

# Ranks that start from here on have imported Lightning (4 s of a core each) before they are forked.
if LIGHTNING.pytorch not in pool._PRELOAD:
    pool._PRELOAD.append(LIGHTNING.pytorch)


@cache
def _environment(ns: Namespace) -> Any:
    class PoolEnvironment(ns.load_fabric("plugins.ClusterEnvironment")):  # type: ignore[misc]
        creates_processes_externally = True
        main_address, main_port = "127.0.0.1", 1  # not used: the process group exists

        @staticmethod
        def detect() -> bool:
            return False

        def world_size(self) -> int:
            return dist.get_world_size()

        def set_world_size(self, size: int) -> None:
            assert size == dist.get_world_size()

        def global_rank(self) -> int:
            return dist.get_rank()

        def set_global_rank(self, rank: int) -> None:
            assert rank == dist.get_rank()

        local_rank = global_rank

        def node_rank(self) -> int:
            return 0

    return PoolEnvironment


def since(*version: int) -> bool:
    """Return whether Lightning has this version or a later one, for tests of behavior that differs between them."""
    return tuple(int(part) for part in LIGHTNING.version.split(".")[: len(version)]) >= version


def quiet(ns: Namespace = LIGHTNING) -> None:
    """Suppress Lightning's messages about small runs."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in (ns.pytorch, ns.fabric):
        logging.getLogger(name).setLevel(logging.ERROR)
    texts = ("does not have many workers", "number of training batches", "sync_dist=True", "treespec")
    for text in (*texts, "have no `val_dataloader`"):
        warnings.filterwarnings("ignore", f".*{text}.*")


def trainer(strategy: Any, ns: Namespace = LIGHTNING, **arguments: Any) -> Any:
    """Return a Trainer over all ranks of the pool, on their device; ``strategy`` is a name or an instance."""
    quiet(ns)
    environment = _environment(ns)()
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    defaults: dict[str, Any] = {**dict.fromkeys(off, False), "max_epochs": 1, "num_sanity_val_steps": 0}
    defaults |= {"accelerator": "auto", "devices": dist.get_world_size()}
    plugins = [environment, *arguments.pop("plugins", [])]
    return ns.load("Trainer")(strategy=strategy, plugins=plugins, **{**defaults, **arguments})


def fabric(strategy: Any, ns: Namespace, **arguments: Any) -> Any:
    """Return a launched Fabric over all ranks of the pool, on their device; ``ns`` is one of Fabric's packages."""
    quiet(ns)
    plugins = [_environment(ns)(), *arguments.pop("plugins", [])]
    where = {"accelerator": "auto", "devices": dist.get_world_size(), "plugins": plugins}
    made = ns.load("Fabric")(strategy=strategy, **where, **arguments)
    made.launch()
    return made


def stock(ns: Namespace = LIGHTNING) -> Any:
    """Return Lightning's own data parallelism: the oracle."""
    return ns.load("strategies.ddp.DDPStrategy")()


class _Toy:
    """Two layers. ``where`` names the hook that builds them; keyword arguments change what a test needs."""

    def __init__(
        self, where: str = "init", optimizer: str = "adamw", lr: float = 0.05, schedule: bool = False, seed: int = 3
    ) -> None:
        super().__init__()
        self.where, self.kind, self.lr, self.schedule, self.seed = where, optimizer, lr, schedule, seed
        self.net: nn.Module | None = None
        self.seen: list[str] = []
        if where == "init":
            self.build()

    def build(self) -> None:
        if self.net is None:
            torch.manual_seed(self.seed)
            inner = nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()
            self.net = nn.Sequential(*inner, nn.Linear(HIDDEN, OUT))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs).float(), targets.float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)  # type: ignore[attr-defined]
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)  # type: ignore[attr-defined]

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)  # type: ignore[attr-defined]

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])  # type: ignore[operator,no-any-return]

    def make_optimizer(self) -> torch.optim.Optimizer:
        params = [p for p in self.parameters() if p.requires_grad]  # type: ignore[attr-defined]
        if self.kind == "sgd":
            return torch.optim.SGD(params, lr=self.lr, momentum=0.9)
        return torch.optim.AdamW(params, lr=self.lr, weight_decay=0.1, eps=1e-3)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer()
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@cache
def _built_in(hook: str) -> type:
    """Return a module that ``hook`` builds."""
    return type("Toy", (_Toy,), {hook: lambda self: self.build()})


@cache
def module_class(ns: Namespace, body: type) -> Any:
    """Return ``body`` as a LightningModule of ``ns``."""
    return type(body.__name__.strip("_"), (body, ns.load("LightningModule")), {})


def toy(ns: Namespace = LIGHTNING, body: type | None = None, **arguments: Any) -> Any:
    """Return the small LightningModule, equal on every rank; ``body`` is a subclass of ``Toy`` with more hooks."""
    where = arguments.get("where", "init")
    return module_class(ns, body or (_Toy if where == "init" else _built_in(where)))(**arguments)


Toy = _Toy


class Silent(Toy):
    """Logs nothing, since some versions of torch cannot trace Lightning's ``log``. It has one layer less to trace."""

    def build(self) -> None:
        torch.manual_seed(self.seed)
        self.net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


def data(batches: int = 4, batch_size: int = 4, seed: int = 0) -> DataLoader[Any]:
    """Return a loader of ``batches`` batches per rank (Lightning distributes it over the ranks)."""
    generator = torch.Generator().manual_seed(seed)
    rows = batches * batch_size * dist.get_world_size()
    inputs = torch.randn(rows, WIDTH, generator=generator)
    targets = torch.sin(inputs[:, :OUT]) + 0.1 * torch.randn(rows, OUT, generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size)


def weights(made: Any) -> dict[str, Tensor]:
    """Return the full weights after a run of ``trainer``, by name; equal on every rank."""
    return {name: value.detach().float().clone() for name, value in made.strategy.lightning_module_state_dict().items()}


def close(made: Any) -> None:
    """End the sharding, so that the rank is as before."""
    getattr(made.strategy, "unshard", lambda: None)()


def fit(
    strategy: Any, model: Any, ns: Namespace = LIGHTNING, loader: Any = None, **arguments: Any
) -> dict[str, Tensor]:
    """Train, from the checkpoint ``ckpt_path`` if there is one, and return the full weights."""
    start = arguments.pop("ckpt_path", None)
    made = trainer(strategy, ns, **arguments)
    made.fit(model, data() if loader is None else loader, ckpt_path=start)
    found = weights(made)
    close(made)
    return found


def worst(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two states; NaN if either has NaN."""
    assert one.keys() == other.keys()
    return float(torch.stack([(one[name] - other[name]).abs().max() for name in one]).max())
