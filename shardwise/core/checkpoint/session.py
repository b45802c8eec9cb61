"""One call that saves everything of a session, and one that restores it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.core.base.checked import MOST_STEP, as_path, switch, whole
from shardwise.core.checkpoint.atomic import DISK
from shardwise.core.checkpoint.directory import CheckpointRoot, check_tag
from shardwise.core.checkpoint.fitting import Fit, Rows
from shardwise.core.checkpoint.format import Head, as_bytes
from shardwise.core.checkpoint.restore import Check, Restored, restore
from shardwise.core.checkpoint.run import Run, Trained, as_run
from shardwise.core.checkpoint.snapshot import Lane
from shardwise.core.checkpoint.write import Contents, Given, SaveJob, Scheduler, begin

__all__ = ["Checkpointer"]


class Checkpointer:
    """Saves and restores one run; every method is collective.

    Args:
        session: what is saved: a session of our engine, or any :class:`~shardwise.core.checkpoint.run.Run`.
        files: the file system that saves go through.
    """

    def __init__(self, session: Trained | Run, files: Any = DISK) -> None:
        self._run, self._files = as_run(session), files
        self._lane = Lane(self._run.members)
        self._damaged: set[str] = set()
        self.steps = 0
        """Updates so far, those before a restored checkpoint included."""
        self.latest = True
        """Whether saving leaves a file ``latest`` beside the checkpoints, which names the newest."""
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
        """Save model, optimizers, loss scale, schedulers, random number generators and what is given here.

        The checkpoint is ``root/tag``: not there, or complete. A tag that exists is replaced in one step.

        Args:
            root: a directory of checkpoints that all ranks see; made where it is missing.
            tag: name of this one; ``step-<step>`` if not given.
            step: how far training is; by default the number of updates.
            lr_schedulers: anything with ``state_dict``.
            data_position: where this rank is in its data: numbers, strings, tensors, lists, tuples, dicts.
            user_state: the same, of rank 0.
            keep: remove afterwards what is older than the ``keep`` newest whole ones. One of which a file is missing or
                cut off does not count, nor one that :meth:`load` skipped as damaged.
            use_async: copy to host memory and return; a thread writes. A save that still runs is waited for first, and
                its error raised here or in :meth:`wait_for_saves`.

        Returns:
            The checkpoint's path.

        Raises:
            CheckpointError: on every rank, when one could not write (no space, no permission, a failed device) or an
                asynchronous save before this one failed; or some ranks do not see the directory, and are named. Earlier
                checkpoints are as they were, training can go on.
            ValueError: a tag that is no plain name, ``keep`` < 1, a step < 0, or something that a checkpoint
                cannot hold; on every rank, another tag on another rank, or another save into ``root`` is under way.
            TypeError: ``keep`` or ``step`` is no whole number.
        """
        if keep is not None:
            whole("keep", keep, 1, what="how many checkpoints remain (None: all),")
        switch("use_async", use_async)
        step = self.steps if step is None else whole("step", step, 0, MOST_STEP)
        tag = check_tag(f"step-{step}" if tag is None else tag)
        root = as_path("root", root, "the directory of checkpoints")
        with self._run.doing(f"saving checkpoint {tag!r} in {root}"):
            self.wait_for_saves()
            run = self._run
            run.settle()
            given = Given(step, self.steps, lr_schedulers, data_position, user_state)
            there = CheckpointRoot(os.fspath(root), self._files, self.latest, self._damaged)
            try:
                self._write(there, tag, given, keep, use_async)
            except BaseException:
                if not self._lane.running:  # its thread ends the save itself
                    there.discard()
                raise
            return os.path.join(os.fspath(root), tag)

    def _write(self, root: CheckpointRoot, tag: str, given: Given, keep: int | None, use_async: bool) -> None:
        run = self._run
        begun = begin(run, root, tag)
        contents: Contents | None = None
        failure: Exception | None = None
        try:
            contents = Contents(run, given, begun.digests)
        except Exception as error:  # the others learn of it when they agree on what was written
            failure = error

        def values() -> Iterator[torch.Tensor]:
            if failure is not None or contents is None:
                raise failure or RuntimeError(f"no contents ({contents}); report this")
            return contents.values()

        job = SaveJob(run.rank, begun, self._files, Head(tag, begun.serial, given.step), contents, keep)
        if use_async:
            self._lane.start(
                run.device.type == "cuda",
                lambda image: image.take(job.layout, values()),
                lambda ranks, copied: job.run(lambda: copied()(), ranks.gather),
            )
        else:
            job.run(lambda: map(as_bytes, values()), run.gather)

    @property
    def saving(self) -> bool:
        """Whether an asynchronous save is still being written."""
        return self._lane.running

    def wait_for_saves(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            CheckpointError: the last asynchronous save failed.
        """
        self._lane.wait_for_saves()

    def close(self) -> None:
        """Wait, and give back memory and communicators. Raises as :meth:`wait_for_saves` does."""
        self._lane.close()

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
        """Restore what :meth:`save` saved, at any number of ranks, also of those that layers are cut over, stage,
        packing, tier and precision.

        Args:
            root: a directory of checkpoints, or one checkpoint, of this format or of another that
                ``open_checkpoint`` reads (Hugging Face, DCP, ColossalAI, DeepSpeed, a
                single file): weights, and optimizer state where the format has it.
            tag: which; ``None``: the newest; ``"auto"``: the newest whole one, those that are damaged are skipped
                with a notice from rank 0, and None is returned where there is no checkpoint at all.
            strict: names that are missing from the checkpoint or from the model, other param groups, and the state of
                another class of optimizer or scheduler are errors. Shapes always are. False takes what fits by name,
                and warns, on rank 0, of what optimizers leave out or start anew with, and where no name fits.
            lr_schedulers: as many as were saved, in the same order, or none.
            rename: names in the checkpoint, or regular expressions, and what they are here; see
                :func:`~shardwise.core.checkpoint.formats.lazy.renamed`.
            rows: parameters that may have another number of rows here, and what new ones get (``"keep"``, ``"zero"``,
                ``"mean"``); see :class:`~shardwise.core.checkpoint.fitting.Fit`.
            check: called on every rank with what was given as ``user_state``, before anything is changed. What it
                raises on one rank is raised on all.

        Returns:
            Where training was; see :class:`Restored`.

        Raises:
            CheckpointDamage: bytes are missing or wrong (file and tensor are named), on every rank; where some values
                were replaced already, the message says so.
            CheckpointError: a file may not be read; some ranks do not see the checkpoint, and are named; or ``"auto"``
                has replaced values by those of a damaged checkpoint, and the next older one does not fit or
                (``strict=False``) would leave some of them.
            FileNotFoundError: there is no such checkpoint.
            ValueError: names, shapes or classes do not fit; nothing was changed.
        """
        root = as_path("root", root, "the directory of checkpoints")
        self.wait_for_saves()
        with self._run.doing(f"loading checkpoint {tag!r} of {root}"):
            restored = restore(self._run, root, tag, strict, lr_schedulers, Fit(rename, rows), check)
        if restored is not None:
            self.steps = restored.updates
            self._damaged.discard(os.path.realpath(restored.path))
            self._damaged.update(map(os.path.realpath, restored.skipped))
        return restored
