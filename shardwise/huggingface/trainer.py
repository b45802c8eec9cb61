"""``transformers.Trainer`` with a plan: it uses our accelerator, and gathers and scatters in saving and loading."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from shardwise.core.base.validate import Names, check_type
from shardwise.core.checkpoint import EngineRun
from shardwise.core.checkpoint.formats.atomic_files import output_files
from shardwise.core.checkpoint.save import agree
from shardwise.huggingface.accelerator import ShardwiseAccelerator
from shardwise.metrics import Metrics, Writer
from shardwise.plan import Plan
from shardwise.session import Session

STATE = "shardwise"  # the directory in a checkpoint of the Trainer
WEIGHTS = re.compile(
    r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)"
    r"|(model\.safetensors|pytorch_model\.bin)\.index\.json"
)
"""Names that ``save_pretrained`` gives to files of weights (an adapter has only one file)."""

REFUSED = {
    "fsdp": "leave it out, the plan shards",
    "deepspeed": "leave it out, the plan shards",
    "auto_find_batch_size": "give per_device_train_batch_size",
    "torch_compile": "compile the model's blocks before the Trainer gets it (docs/differences.md)",
    "fp16_full_eval": "leave it out",
    "bf16_full_eval": "leave it out",
    "save_on_each_node": "leave it out",
}
"""Training arguments that have to be false, and what to do instead."""


class ShardwiseTrainer(Trainer):
    """A ``Trainer`` that shards its model and optimizer as ``plan`` says.

    ``save_model`` writes files for ``from_pretrained``. Checkpoints also have a native checkpoint of model, optimizer,
    loss scale and schedule, which any plan and number of ranks can resume; checkpoints of a plain ``Trainer`` can be
    resumed, too. ``bf16`` and ``fp16`` of the arguments mean 16-bit parameters with fp32 masters instead of autocast.

    Args:
        plan: a :class:`Plan`, such as ``zero(3)`` of ``shardwise.plan``.

    The other arguments are those of ``Trainer``.

    Raises:
        ValueError: unsupported arguments: FSDP, DeepSpeed, ``auto_find_batch_size``, ``torch_compile``, evaluation in
            full 16 bits, ``save_on_each_node``, several GPUs in one process; a plan that does not keep gradients; TRL's
            ``use_vllm`` if parameters are not kept gathered.

    Examples:
        >>> from transformers import TrainingArguments
        >>> from shardwise.huggingface import ShardwiseTrainer
        >>> from shardwise.plan import zero
        >>> arguments = TrainingArguments("runs", max_steps=2, use_cpu=not torch.cuda.is_available())
        >>> trainer = ShardwiseTrainer(model, arguments, train_dataset=dataset, plan=zero(3))
        >>> output = trainer.train()
        >>> trainer.save_model("model-hf")
    """

    def __init__(self, *args: Any, plan: Plan, **kwargs: Any) -> None:
        self.plan = plan
        self._mixed_precision: str | None = None
        self._accelerator_options: dict[str, Any] = {}
        self._own_dtype: torch.dtype | None = None
        super().__init__(*args, **kwargs)
        _check(self.args, plan)

    # ---- the accelerator

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        options = super()._build_accelerator_args(**kwargs)
        self._mixed_precision = options.pop("mixed_precision", None)
        self._accelerator_options = dict(options)
        return {**options, "mixed_precision": "no"}

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator as the base class does, as a :class:`ShardwiseAccelerator`."""
        _check(self.args, self.plan)
        super().create_accelerator_and_postprocess()
        self.accelerator = ShardwiseAccelerator(
            plan=self.plan, mixed_precision=self._mixed_precision, **self._accelerator_options
        )
        self.accelerator.names = Names("trainer.session.module", "trainer.optimizer.step()", "trainer.save_model()")
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the plan defines the device; evaluation without training moves the model in ``prepare_model``."""

    @property
    def session(self) -> Session | None:
        """The session of the model; ``None`` before training."""
        result: Session | None = self.accelerator.session_of(self.model)
        return result

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.session is None:
            parameters = self.model.parameters() if self.model is not None else ()
            self._own_dtype = next((p.dtype for p in parameters if p.is_floating_point()), None)
        gather_for_references(self.callback_handler.callbacks, self.accelerator.session_of)
        return super()._prepare_for_training(*args, **kwargs)  # type: ignore[no-untyped-call]

    # ---- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model for ``from_pretrained``. Collective; the main process writes.

        A new directory becomes visible when it is complete. In an existing one each file is replaced atomically.

        Args:
            output_dir: the directory; ``None`` is that of the arguments.
            _internal_call: set by transformers; leave it out.

        Raises:
            CheckpointError: the main process could not write; every rank raises it, and earlier files are unchanged.
            ValueError: the same, if the main process raised ValueError.
        """
        session = self.session
        if session is None:
            super().save_model(output_dir, _internal_call)
            return
        path = Path(str(output_dir if output_dir is not None else self.args.output_dir))
        state = self.accelerator.get_state_dict(self.model)
        run = EngineRun(session)
        what = f"save the model to {path}"
        with asks_prompts(session):
            agree(run.gather, what, lambda: self._write_model(path, state), share=False)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write_model(self, path: Path, state: dict[str, Any]) -> None:
        if not self.args.should_save:
            return
        with output_files(path, lambda name: WEIGHTS.fullmatch(name) is not None) as fresh:
            self._save(str(fresh), state_dict=state)
            if self._own_dtype is not None and (fresh / "config.json").is_file():
                # The values are those of the masters for any compute dtype.
                config: Any = getattr(self.model, "config", None)
                config.dtype = str(self._own_dtype).removeprefix("torch.")
                config.save_pretrained(str(fresh))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        session = self.session
        if session is None:
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            session.checkpoints.save(output_dir, STATE, step=self.state.global_step, lr_schedulers=self._schedulers())

    def _schedulers(self) -> list[Any]:
        return [] if self.lr_scheduler is None else [self.lr_scheduler]

    # ---- loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        session = self.session
        if model is not None or session is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        with loads_adapters(session) as loader:
            super()._load_from_checkpoint(resume_from_checkpoint, loader)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        session = self.session
        path = None if checkpoint is None else os.path.join(checkpoint, STATE)
        if session is not None and path is not None and os.path.isdir(path):
            session.checkpoints.load(path, lr_schedulers=self._schedulers())
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        session, own = self.session, self.model
        if session is None:
            super()._load_best_model()
            return
        with loads_adapters(session) as loader:
            self.model = loader
            try:
                super()._load_best_model()
            finally:
                self.model = own


class MetricsCallback(TrainerCallback):
    """Records :class:`~shardwise.metrics.Metrics` whenever the Trainer logs (``logging_steps``).

    ``loss`` and ``grad_norm`` are the Trainer's: the mean over the steps since the last log and over the ranks, and the
    norm before clipping. Tokens are counted if ``include_num_input_tokens_seen`` of the arguments is set, and the
    operations of the first step if ``peak_flops`` is given.

    Args:
        writers: functions of :mod:`shardwise.metrics`, or your own.
        peak_flops: operations per second of the device in the dtype of the model, for ``mfu``.

    Attributes:
        metrics (Metrics): the metrics of the run, from its first step on.
    """

    def __init__(self, *writers: Writer, peak_flops: float | None = None) -> None:
        self._writers, self._peak_flops, self._counting = writers, peak_flops, ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self._counting.close()  # of a run that failed
        self.metrics = Metrics(getattr(optimizer, "session", None), *self._writers, peak_flops=self._peak_flops)
        self.metrics.steps, self._tokens = state.global_step, state.num_input_tokens_seen

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._peak_flops and not self.metrics.flops:
            self._counting.enter_context(self.metrics.count_flops())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._counting.close()
        self.metrics.count(state.num_input_tokens_seen - self._tokens)
        self._tokens = state.num_input_tokens_seen

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.metrics.record(logs["loss"], logs.get("grad_norm"))


@functools.cache
def sharded_trainer(base: type[Trainer]) -> type[ShardwiseTrainer]:
    """Return a subclass of ``base``, such as TRL's ``SFTTrainer``, that takes a ``plan``; see
    :class:`ShardwiseTrainer`.

    Args:
        base: a class that derives from ``Trainer``.

    Raises:
        TypeError: ``base`` is not a ``Trainer`` of transformers.

    Examples:
        >>> from transformers import Seq2SeqTrainer
        >>> from shardwise.huggingface import sharded_trainer
        >>> ShardedSeq2SeqTrainer = sharded_trainer(Seq2SeqTrainer)
    """
    if not (isinstance(base, type) and issubclass(base, Trainer)):
        raise TypeError(f"base={base!r:.80}: give a class that derives from transformers.Trainer")
    if issubclass(base, ShardwiseTrainer):
        return base
    return type(f"Shardwise{base.__name__}", (ShardwiseTrainer, base), {"__doc__": ShardwiseTrainer.__doc__})


def _check(args: TrainingArguments, plan: Plan) -> None:
    check_type("plan", plan, Plan, "a Plan, such as shardwise.plan.zero(3)")
    for name, instead in REFUSED.items():
        if getattr(args, name):  # its value may not be the user's: fsdp is True for any text
            raise ValueError(f"TrainingArguments({name}=...) is not available with a plan: {instead}")
    if args.n_gpu > 1:
        raise ValueError(f"{args.n_gpu} GPUs in one process: start one process per GPU (shardwise run or torchrun)")
    served = getattr(args, "use_vllm", False)  # an argument of TRL
    if served and not plan.shard.always_gathered:
        raise ValueError(
            f"use_vllm={served} with sharded parameters: TRL would send NaN to its server. Leave it out, or use a plan "
            "that keeps parameters gathered, such as zero(2)"
        )
    if plan.grad.update == "backward":
        raise ValueError(
            f"a plan with update={plan.grad.update!r} keeps no gradients for the logged norm: use update='step'"
        )


# ---- peft's own loading of an adapter into a sharded model.


def _is_peft(model: nn.Module) -> bool:
    try:
        from peft import PeftModel
    except ImportError:
        return False
    return isinstance(model, PeftModel)


def _has_prompts(model: Any) -> bool:
    return _is_peft(model) and any(config.is_prompt_learning for config in model.peft_config.values())


def asks_prompts(session: Session) -> AbstractContextManager[None]:
    """Return a context for peft's saving, which reads the prompt modules even if it gets a state."""
    model: Any = session.model
    return session.gathered(model.prompt_encoder.parameters()) if _has_prompts(model) else nullcontext()


# [Note: Adapters into shards]
# To load an adapter, peft reads the names of the model's state, replaces the adapter's tensors, and calls the model's
# load_state_dict. During that, the sharded model handles both calls: nothing is gathered for a base model of any size,
# and fp32 masters get the exact values of the file. There are two exceptions. Prompts are loaded into their own module,
# which gets full tensors. And peft would convert 16-bit adapters to fp32 afterwards; here the plan defines the dtype.
@contextmanager
def loads_adapters(session: Session) -> Iterator[nn.Module]:
    """Make ``load_adapter`` of the session's model load into shards and masters inside. Every rank enters.

    Yields the module that loads: the user's module for a model of peft; for others nothing changes.
    """
    model: Any = session.model
    if not _is_peft(model):
        yield session.module
        return
    answers: dict[str, Any] = {"load_adapter": partial(model.load_adapter, autocast_adapter_dtype=False)}
    if _has_prompts(model):
        with session.module.gathered(write_back=True), _answered(model, answers):
            yield model
        return
    outline, own = session.module.state_layout(), model.state_dict

    def state_dict(**how: Any) -> dict[str, Any]:
        # Calls with arguments come from the sharded model itself.
        state: dict[str, Any] = own(**how) if how else dict(outline)
        return state

    answers |= {"state_dict": state_dict, "load_state_dict": session.module.load_state_dict}
    with _answered(model, answers):
        yield model


@contextmanager
def _answered(model: nn.Module, answers: dict[str, Any]) -> Iterator[None]:
    """Replace methods of ``model`` inside."""
    before = {name: model.__dict__[name] for name in answers if name in model.__dict__}
    model.__dict__.update(answers)
    try:
        yield
    finally:
        for name in answers:
            del model.__dict__[name]
        model.__dict__.update(before)


# ---- Callbacks of a Trainer that read all parameters of its model.


SYNC = "sync_target_model"  # the static method that TRL's SyncRefModelCallback calls on every rank at the same steps
ORIGINAL = "_shardwise_original"
"""Attribute of a replaced function with the original, because a callback may be passed to a Trainer of other models."""


# [Note: References that follow]
# ``sync_ref_model`` of TRL mixes the model into its reference by ``target.data.mul_(...).add_(param.data)``. A
# parameter that is not gathered has NaN values, and reads through ``.data`` cannot be detected, so models are gathered
# around this call.
def gather_for_references(callbacks: Iterable[Any], session_of: Callable[[nn.Module], Session | None]) -> None:
    """Gather models for callbacks that mix the model into a reference (those with ``sync_target_model``)."""
    for each in callbacks:
        sync = getattr(each, SYNC, None)
        if callable(sync):
            setattr(each, SYNC, _with_gathered(getattr(sync, ORIGINAL, sync), session_of))


def _with_gathered(sync: Callable[..., None], session_of: Callable[[nn.Module], Session | None]) -> Callable[..., None]:
    def mix(model: nn.Module, target_model: nn.Module, *arguments: Any, **options: Any) -> None:
        with ExitStack() as blocks:
            for each, changes in ((model, False), (target_model, True)):
                session = session_of(each)
                if session is not None:
                    blocks.enter_context(session.module.gathered(write_back=changes))
            sync(model, target_model, *arguments, **options)

    setattr(mix, ORIGINAL, sync)
    return mix
