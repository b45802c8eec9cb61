"""Save a whole run, and restore it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from shardwise.core.base.validate import MOST_STEP, as_path, boolean, check_type, integer
from shardwise.core.checkpoint.async_save import AsyncSaver, HostSnapshot
from shardwise.core.checkpoint.atomic import DISK
from shardwise.core.checkpoint.directory import CheckpointRoot, check_tag
from shardwise.core.checkpoint.load import Check, Restored, restore
from shardwise.core.checkpoint.load_plan import Fit, Rows
from shardwise.core.checkpoint.native_format import Bytes, as_bytes
from shardwise.core.checkpoint.save import SaveInputs, SavePlan, Scheduler, begin
from shardwise.core.checkpoint.training_run import Run, Trained, as_run


class Checkpointer:
    """Saves and restores one run: the type of ``session.checkpoints``. Every method is collective.

    Args:
        session: a session of our engine, or any :class:`~shardwise.core.checkpoint.training_run.Run`.
        files: the file system that saves use.

    Examples:
        >>> path = session.checkpoints.save("checkpoints", keep=3)
        >>> restored = session.checkpoints.load("checkpoints")
    """

    def __init__(self, session: Trained | Run, files: Any = DISK) -> None:
        self._run, self._files = as_run(session), files
        self._saver = AsyncSaver(self._run.members)
        self._damaged: set[str] = set()
        self.steps = 0
        """Number of updates, including those before a restored checkpoint."""
        self.latest = True
        """Whether a save writes a file ``latest`` next to the checkpoints, with the name of the newest one."""
        if self._run.optimizers:
            self._run.optimizers[0].optimizer.register_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self.steps += 1

    # ---- saving

    def save(
        self,
        root: str | os.PathLike[str],
        tag: str | None = None,
        *,
        step: int | None = None,
        lr_schedulers: Sequence[Scheduler] = (),
        data_position: Any = None,
        user_state: Any = None,
        keep: int | None = None,
        use_async: bool = False,
    ) -> str:
        """Save model, optimizers, loss scale, schedulers, random number generators and the values passed here.

        The checkpoint ``root/tag`` is either absent or complete. An existing tag is replaced in one step.

        Args:
            root: a directory of checkpoints on storage that all ranks share; created if it does not exist.
            tag: name of this checkpoint; ``step-<step>`` by default.
            step: training step; by default the number of updates.
            lr_schedulers: objects with ``state_dict``.
            data_position: this rank's position in its data: numbers, strings, tensors, lists, tuples, dicts.
            user_state: more values of these types; those of rank 0 are saved.
            keep: remove checkpoints older than the ``keep`` newest complete ones afterwards. Checkpoints with a missing
                or truncated file, and those that :meth:`load` skipped as damaged, are not counted.
            use_async: copy to host memory and return; a thread writes. An unfinished save is waited for first, and its
                error is raised here or in :meth:`wait_for_saves`.

        Returns:
            The checkpoint's path.

        Raises:
            CheckpointError: on every rank, if one rank could not write (no space, no permission, a failed device), an
                earlier asynchronous save failed, or some ranks do not see the directory. Earlier checkpoints are
                unchanged, and training can go on.
            ValueError: an invalid tag, ``keep`` < 1, a step < 0, a value that a checkpoint cannot hold, different tags
                on different ranks, or another save into ``root`` that is not finished.
            TypeError: ``keep`` or ``step`` is not an integer.

        Examples:
            >>> position = {"epoch": 2, "batch": 40}
            >>> path = session.checkpoints.save("checkpoints", data_position=position, keep=3)
        """
        if keep is not None:
            integer("keep", keep, 1, what="how many checkpoints remain (None: all),")
        boolean("use_async", use_async)
        check_type("lr_schedulers", lr_schedulers, Collection, "a list of schedulers")
        step = self.steps if step is None else integer("step", step, 0, MOST_STEP)
        tag = check_tag(f"step-{step}" if tag is None else tag)
        root = as_path("root", root, "the directory of checkpoints")
        with self._run.doing(f"saving checkpoint {tag!r} in {root}"):
            self.wait_for_saves()
            run = self._run
            run.settle()
            inputs = SaveInputs(step, self.steps, lr_schedulers, data_position, user_state)
            there = CheckpointRoot(os.fspath(root), self._files, self.latest, self._damaged)
            try:
                self._write(there, tag, inputs, keep, use_async)
            except BaseException:
                if not self._saver.running:  # its thread ends the save itself
                    there.discard()
                raise
            return os.path.join(os.fspath(root), tag)

    def _write(self, root: CheckpointRoot, tag: str, inputs: SaveInputs, keep: int | None, use_async: bool) -> None:
        run = self._run
        job = begin(run, root, tag, inputs.step, self._files, keep)

        def prepare() -> tuple[SavePlan, Iterable[Bytes]]:
            plan = SavePlan(run, inputs, job.digests)
            return plan, map(as_bytes, plan.values())

        def copy(image: HostSnapshot) -> tuple[SavePlan, Iterable[Bytes]]:
            plan = SavePlan(run, inputs, job.digests)
            return plan, image.take(plan.layout, plan.values())

        if use_async:
            self._saver.start(run.device.type == "cuda", copy, lambda ranks, copied: job.run(copied, ranks.gather))
        else:
            job.run(prepare, run.gather)

    @property
    def saving(self) -> bool:
        """Return True if an asynchronous save is still being written."""
        return self._saver.running

    def wait_for_saves(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: the last asynchronous save failed.
        """
        self._saver.wait_for_saves()

    def close(self) -> None:
        """Wait for saves, and release memory and communicators. Raises as :meth:`wait_for_saves` does."""
        self._saver.close()

    # ---- restoring

    def load(
        self,
        root: str | os.PathLike[str],
        tag: str | None = None,
        *,
        strict: bool = True,
        lr_schedulers: Sequence[Scheduler] = (),
        rename: Mapping[str, str] | None = None,
        rows: Mapping[str, Rows] | None = None,
        check: Check = None,
    ) -> Restored | None:
        """Restore a checkpoint with any number of ranks, parallelism, stage, packing, tier and precision.

        Args:
            root: a directory of checkpoints, or one checkpoint, in this format or another one that ``open_checkpoint``
                reads (Hugging Face, DCP, ColossalAI, DeepSpeed, a single file): weights, and optimizer state if the
                format has it.
            tag: name of the checkpoint. ``None`` takes the newest. ``"auto"`` takes the newest complete one: rank 0
                prints which damaged ones are skipped, and None is returned if there is no checkpoint.
            strict: missing and unexpected names, other param groups, and the state of another class of optimizer or
                scheduler are errors. Different shapes always are. False loads what fits by name; rank 0 warns of
                optimizer state that is ignored or missing, and if no name fits.
            lr_schedulers: as many schedulers as were saved, in the same order, or no scheduler.
            rename: names in the checkpoint, or regular expressions of parts of names, with the names in the model, such
                as ``{"^transformer": "model"}``. Every match is replaced, as by ``re.sub``.
            rows: parameters that may have another number of rows in the model, with the values of new rows
                (``"keep"``, ``"zero"``, ``"mean"``), such as ``{"embed.weight": "mean"}``.
            check: called on every rank with the saved ``user_state`` before anything is changed. An error that it
                raises on one rank is raised on all.

        Returns:
            The position in training, see :class:`Restored`; ``None`` under ``"auto"`` if there is no checkpoint.

        Raises:
            CheckpointDamage: bytes are missing or wrong (raised on every rank). The message names file and tensor, and
                says whether some values were already replaced.
            CheckpointError: a file cannot be read; some ranks do not see the checkpoint; or ``"auto"`` has loaded
                values of a damaged checkpoint, and the next older one does not fit or (``strict=False``) does not
                replace all of them.
            FileNotFoundError: there is no such checkpoint.
            ValueError: names, shapes or classes do not fit; nothing was changed.

        Examples:
            >>> restored = session.checkpoints.load("checkpoints", "auto")
            >>> epoch = restored.data_position["epoch"] if restored is not None else 0
        """
        root = as_path("root", root, "the directory of checkpoints")
        check_type("lr_schedulers", lr_schedulers, Collection, "a list of schedulers")
        self.wait_for_saves()
        with self._run.doing(f"loading checkpoint {tag!r} of {root}"):
            restored = restore(self._run, root, tag, strict, lr_schedulers, Fit(rename, rows), check)
        if restored is not None:
            self.steps = restored.updates
            self._damaged.discard(os.path.realpath(restored.path))
            self._damaged.update(map(os.path.realpath, restored.skipped))
        return restored
