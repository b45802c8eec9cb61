"""Sequence parallelism of one model: inputs of its body are sharded over the ranks, and outputs are gathered."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.base.fingerprint import WORD, word_of
from shardwise.core.base.rng import RankRng, dropouts_of
from shardwise.core.base.warnings import warn_user
from shardwise.core.comm import Description, Group, P2PChannel, collectively
from shardwise.core.parallel.sequence.attention import OWN_ATTENTION, Pass, called, original_of, running
from shardwise.core.parallel.sequence.axis import SequenceAxis
from shardwise.core.parallel.sequence.parts import Parts
from shardwise.core.parallel.sequence.requirements import Requirements, required, rotary_by_length
from shardwise.core.parallel.sequence.ring import Rotation
from shardwise.core.parallel.tensor.loss import labels_by_position
from shardwise.plan.parallel import SequencePlan


class SequenceLoss:
    """Sequence-parallel version of transformers' ``ForCausalLMLoss``. The result is the same on all ranks.

    Args:
        axis: the ranks.
        parts: how the sequences are sharded.
        inner: the loss of this rank's logits, which may also be sharded along the vocabulary.
    """

    def __init__(self, axis: SequenceAxis, parts: Parts, inner: Callable[..., Tensor]) -> None:
        self.axis, self.parts, self.inner = axis, parts, inner

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the mean loss over the labels of full sequences, or their sum divided by ``num_items_in_batch``.

        Args:
            logits: ``[rows, part, vocabulary]``.
            labels: ``[rows, length]``, of full sequences; each is the target of the position before it.
            vocab_size, num_items_in_batch, ignore_index: see the loss functions of transformers.
            shift_labels: ``[rows, length]``, targets position by position; used instead of ``labels``.
        """
        shift_labels = labels_by_position(labels, shift_labels, ignore_index)
        if shift_labels.shape[-1] != self.parts.length:
            raise ValueError(
                f"labels of {tuple(shift_labels.shape)} where {self.axis.size} ranks share sequences of "
                f"{self.parts.length}: give them for whole sequences"
            )
        if num_items_in_batch is None:
            num_items_in_batch = (shift_labels != ignore_index).sum().to(logits.device)
        own = self.parts.take(shift_labels, -1, self.axis.rank, ignore_index).contiguous()
        share = self.inner(
            logits=logits,
            labels=None,
            vocab_size=vocab_size,
            num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index,
            shift_labels=own,
            **kwargs,
        )
        return self.axis.total(share)


PASS = "a forward pass over shared sequences"
SAME = "All ranks that share sequences get the same whole batch."


# [Note: What sharing sequences changes]
# Every rank gets full batches, so a program is the same as on one rank. At the beginning of the body, each rank takes
# its part of the tokens, with their positions. Everything in the body is computed for these tokens only, except
# attention, which sees full sequences through the attention implementation that is set in the model's configuration
# meanwhile. Masks are not materialized: layers pass an object that refers to the pass, so that a recomputed layer uses
# its own pass. At the end of the body, hidden states are gathered, unless they are used only by transformers' loss of a
# causal language model, which is a sum over positions. Modules stay the same objects, with other forward functions,
# until remove().
class Sequences:
    """Sequence parallelism of one model over the ranks of an axis. The model is unchanged until :meth:`install`.

    Args:
        model: an unsharded model, or one whose layers are sharded over another axis.
        found: the model's body and its requirements.
        plan: the sequence-parallel settings.
        axis: the ranks.
    """

    def __init__(self, model: nn.Module, requirements: Requirements, plan: SequencePlan, axis: SequenceAxis) -> None:
        self.model, self.plan, self.axis = model, plan, axis
        self.body, self.table = requirements.body, requirements.table
        self._heads, self._configs = requirements.heads, requirements.configs
        self._private = RankRng(axis.rank)
        self._rates = dropouts_of(self.body.modules())
        self._names = inspect.signature(type(self.body).forward).parameters
        self._local = False
        """Whether logits stay sharded in the current pass."""
        self._looked = False
        """Whether the contents of a batch have been compared."""
        self._labels: Tensor | None = None
        """Labels of the current pass, if its loss is computed from sharded logits."""
        self._now: Pass | None = None
        self._farthest = 0
        self._parts: Parts | None = None
        self._undo: list[Callable[[], bool]] = []

    # ---- install and remove

    def install(self) -> None:
        """Change the model so that its forward passes are sequence-parallel."""
        for config in self._configs:
            self._undo.append(_name_attention(config))
        for module in self.body.modules():
            kind = OWN_ATTENTION.get(type(module).__name__)
            if kind is not None:
                self._swap(module, kind)
            if rotary_by_length(module):
                self._replace(module, self._rotary)
        self._replace(self.body, self._run_body)
        if self.table.end:
            self._replace(self.body.get_submodule(self.table.end), self._run_end)
        for head in self._heads:
            self._replace(head, self._run_head)

    def remove(self) -> None:
        """Undo :meth:`install`, except in layers that are still sharded over another axis; a later call, after these
        are restored, undoes the rest."""
        self._undo = [undo for undo in self._undo[::-1] if not undo()][::-1]

    def _replace(self, module: nn.Module, run: Callable[..., Any]) -> None:
        """Make ``module(...)`` call ``run(module, its original forward, ...)``."""
        before = vars(module).get("forward")

        def undo() -> bool:
            module.__dict__.pop("forward")
            if before is not None:
                module.__dict__["forward"] = before
            return True

        module.__dict__["forward"] = _Forward(module, before, run)
        self._undo.append(undo)

    def _swap(self, module: nn.Module, kind: type[nn.Module]) -> None:
        own = type(module)
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
        shared = type(own.__name__, (kind, own), names)

        def undo() -> bool:
            if type(module) is shared:
                module.__class__ = own
            return type(module) is own

        module.__class__ = shared
        self._undo.append(undo)

    # ---- forward passes

    def _run_head(self, head: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a causal language model. Logits stay sharded if they are used only by the model's own loss."""
        inputs = self._by_name(inspect.signature(type(head).forward).parameters, args, kwargs)
        logits_to_keep = inputs.get("logits_to_keep")
        labelled = inputs.get("labels") is not None
        keeps_all = logits_to_keep is None or (isinstance(logits_to_keep, int) and logits_to_keep == 0)
        states = inputs.get("output_hidden_states")
        if states is None:
            states = getattr(head.config, "output_hidden_states", False)
        if not self.plan.parallel_output or not labelled or not keeps_all or states:
            return forward(*args, **kwargs)
        before = vars(head).get("_loss_function")
        inner = head.loss_function

        def loss(*values: Any, **named: Any) -> Tensor:
            assert self._parts is not None
            return SequenceLoss(self.axis, self._parts, inner)(*values, **named)

        self._local, head._loss_function, self._labels = True, loss, inputs["labels"]
        try:
            return forward(*args, **kwargs)
        finally:
            self._local, self._labels = False, None
            if before is None:
                vars(head).pop("_loss_function", None)
            else:
                head._loss_function = before

    def _run_body(self, _: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs = self._by_name(self._names, args, kwargs)
        tokens = self._checked(inputs)
        zigzag = self.plan.mode == "ring_attn"
        self._parts = parts = Parts(tokens.shape[-1], self.axis.size, zigzag)
        now = self._enter(inputs, tokens, parts)
        if "use_cache" in self._names:
            if now.packed is not None and _uses_cache(self.body, inputs):
                warn_user(
                    "position_ids restart inside a row, so its documents do not attend to each other. Without sequence "
                    "parallelism transformers masks such a row as one document under use_cache=True: set "
                    "model.config.use_cache = False for the same losses on any number of ranks"
                )
            inputs["use_cache"] = False
        rates = self._rates if self.body.training else ()
        self._now = now
        try:
            with running(now), self._private.drawing(True, tokens.device, rates):
                output = forward(**inputs)
        except BaseException:
            self.axis.wire.forget()
            raise
        finally:
            self._now = None
        return self._leave(output, parts)

    def _enter(self, inputs: dict[str, Any], tokens: Tensor, parts: Parts) -> Pass:
        """Replace ``inputs`` by this rank's part of them."""
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        rows = tokens.numel() // tokens.shape[-1]
        full_mask = None if mask is None else mask.reshape(-1, mask.shape[-1]).to(tokens.device)
        numbers = None
        if positions is not None and self.table.packed and mask is None:
            flat = positions.reshape(-1, positions.shape[-1]).expand(rows, -1)
            numbers = _packed(flat)
        padding = None if full_mask is None or bool((full_mask != 0).all()) else full_mask != 0
        for name, dim in (("input_ids", -1), ("token_type_ids", -1), ("inputs_embeds", -2)):
            if inputs.get(name) is not None:
                inputs[name] = parts.take(inputs[name], dim, self.axis.rank)
        if self.table.positions != "none":
            if positions is None:
                positions = self._counted(tokens, full_mask)
            by_length = any(rotary_by_length(module) for module in self.body.modules())
            self._farthest = int(positions.max()) if by_length else 0
            inputs["position_ids"] = parts.take(positions, -1, self.axis.rank)
        # A mask of full length defines the number of keys, and disables the detection of packed sequences.
        ones = tokens.new_ones((rows, parts.length), dtype=torch.long)
        inputs["attention_mask"] = parts.pad(ones if full_mask is None else full_mask, -1)
        rotation = None
        if self.plan.mode == "ring_attn":
            rotation = Rotation(self.axis, parts, self.plan.inner_ring or self.axis.size)
        packed_positions = None if numbers is None else flat
        return Pass(self.axis, parts, rotation, padding, packed_positions, numbers)

    def _counted(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Return positions as the model computes them for full sequences."""
        if self.table.positions == "mask" and mask is not None:
            counts = mask.long()
            return counts.cumsum(1) * counts - 1
        return torch.arange(tokens.shape[-1], device=tokens.device).unsqueeze(0)

    def _leave(self, output: Any, parts: Parts) -> Any:
        """Gather the hidden states in ``output``, unless sharded hidden states are needed."""
        last = output["last_hidden_state"] if isinstance(output, Mapping) else output[0]
        ends_here = not self.table.end and not self._local

        def gathered(x: Any) -> Any:
            if x is last and not ends_here:
                return x
            return parts.gather(x, -2, self.axis)

        if not isinstance(output, Mapping):  # tuples of states after the last state have to be gathered, too
            extra = [_each(item, gathered) if isinstance(item, tuple | list) else item for item in output[1:]]
            return (gathered(last), *extra)
        for name in ("hidden_states", "last_hidden_state"):
            if output.get(name) is not None:
                output[name] = _each(output[name], gathered)  # type: ignore[index]
        return output

    def _run_end(self, _: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the last module of the body whose input is sharded, and gather its output."""
        output = forward(*args, **kwargs)
        if self._local or self._parts is None:
            return output
        hidden = self._parts.gather(output[0], -2, self.axis)
        if isinstance(output, Mapping):
            output["last_hidden_state"] = hidden  # type: ignore[index]
            return output
        return (hidden, *output[1:])

    def _rotary(
        self, _: nn.Module, forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute rotary frequencies that depend on the maximal position of the batch, which may be on another rank."""
        if self._now is None:
            return forward(x, position_ids, *args, **kwargs)
        last = position_ids.new_full((*position_ids.shape[:-1], 1), self._farthest)
        cos, sin = forward(x, torch.cat([position_ids, last], -1), *args, **kwargs)
        return cos[..., :-1, :], sin[..., :-1, :]

    # ---- validation

    def _by_name(
        self, names: Mapping[str, inspect.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        positional = [name for name in names if name != "self"]
        return dict(zip(positional, args, strict=False)) | kwargs

    def _check(self, inputs: dict[str, Any]) -> None:
        """Raise an error for inputs that sequence parallelism does not support, before any communication.

        Raises:
            ValueError: an input is not supported.
        """
        who, size = type(self.model).__name__, self.axis.size
        if inputs.get("past_key_values") is not None:
            raise ValueError(
                f"a {who} whose {size} ranks share sequences was given past_key_values, and there is no cache of "
                "parts: for generate() give use_cache=False, or use sp=1"
            )
        for name in ("output_attentions", "output_router_logits"):
            if inputs.get(name) or getattr(self._configs[0], name, False):
                raise ValueError(
                    f"{name}=True of a {who} whose {size} ranks share sequences: each has those of its own part; leave "
                    "it False, or use sp=1"
                )
        if inputs.get("encoder_hidden_states") is not None:
            raise ValueError(f"encoder_hidden_states for a {who} whose {size} ranks share sequences: use sp=1")
        if (inputs.get("input_ids") is None) == (inputs.get("inputs_embeds") is None):
            raise ValueError(f"a {who} takes either input_ids or inputs_embeds: give one of them")
        mask = inputs.get("attention_mask")
        length = (
            inputs["input_ids"].shape[-1] if inputs.get("input_ids") is not None else inputs["inputs_embeds"].shape[-2]
        )
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() < 4 and mask.shape[-1] == length):
            shown = f"of {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"{mask!r:.60}"
            raise ValueError(
                f"attention_mask={shown} for a {who} whose {size} ranks share sequences of {length}: give [rows, "
                f"{length}], 0 for padding"
            )
        for name in ("position_ids", "token_type_ids"):
            other = inputs.get(name)
            if other is not None and other.shape[-1] != length:
                raise ValueError(
                    f"{name} of {tuple(other.shape)} for a {who} whose {size} ranks share sequences of {length}: give "
                    "them for whole sequences"
                )

    def _checked(self, inputs: dict[str, Any]) -> Tensor:
        """Check the inputs of every rank, and return the tokens as ``[..., length]``. Collective.

        Raises:
            ValueError: on all ranks, if the inputs of one are not supported, or they differ.
        """
        with collectively(self.axis.group, PASS, SAME, ValueError, describe=lambda: self._described(inputs)):
            self._check(inputs)
        return _tokens(inputs)

    def _described(self, inputs: dict[str, Any]) -> Description:
        """Return the shape of the tokens, which is always compared, and a checksum of the inputs.

        Values are always compared on a CPU, but elsewhere only in the first pass, since reading them synchronizes.
        """
        tokens = _tokens(inputs)
        looks, self._looked = tokens.device.type == "cpu" or not self._looked, True
        extra = (inputs.get("attention_mask"), inputs.get("position_ids"), self._labels)
        seen = [x for x in (tokens, *extra) if looks and isinstance(x, Tensor)]
        checksum = sum(int(word_of(x, start=place + 1)) for place, x in enumerate(seen)) % WORD
        return {"the batch": {"shape": list(tokens.shape), "checksum": checksum}}


def _tokens(inputs: dict[str, Any]) -> Tensor:
    tokens: Tensor = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"][..., 0]
    return tokens


class _Forward:
    """Replaces the forward function of a module.

    A copy of the module has its original function again, so that it computes full sequences with its own weights.
    """

    def __init__(self, module: nn.Module, before: Callable[..., Any] | None, run: Callable[..., Any]) -> None:
        self._module, self._before, self._run = module, before, run
        update_wrapper(self, module.forward)

    @property
    def _own(self) -> Callable[..., Any]:
        if self._before is not None:
            return self._before
        # After a graph break, torch.compile looks a bound method up by its name again, which would call this object.
        return partial(type(self._module).forward, self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._module, self._own, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return deepcopy(self._own, memo)


def share_sequences(
    model: nn.Module, plan: SequencePlan, group: Group, wire: P2PChannel, parts: int = 1, compress: bool = False
) -> Sequences:
    """Prepare sequence parallelism of ``model`` over the ranks of ``group``. The model is not changed.

    Args:
        model: a model of transformers, or a wrapper of one.
        plan: the mode and other settings.
        group: the ranks.
        wire: the point-to-point channel between them.
        parts: number of ranks over which heads are already sharded.
        compress: exchange heads in 8 bits.

    Raises:
        ValueError: the model does not support sequence parallelism, or not with this plan.
    """
    return Sequences(model, required(model, plan, group.size, parts), plan, SequenceAxis(group, wire, compress))


_NAMED: dict[int, tuple[Any, int]] = {}
"""Configurations that name the sequence-parallel attention, by their id, with the number of sequence-parallel models
that use each."""


def _name_attention(config: Any) -> Callable[[], bool]:
    """Set the sequence-parallel attention in ``config``. The returned function undoes this when it was called for every
    model that uses ``config``."""
    original = original_of(config._attn_implementation)
    config._attn_implementation = called(original)
    _NAMED[id(config)] = config, _NAMED.get(id(config), (config, 0))[1] + 1

    def put_back() -> bool:
        _, users = _NAMED.pop(id(config))
        if users > 1:
            _NAMED[id(config)] = config, users - 1
        else:
            config._attn_implementation = original
        return True

    return put_back


def _uses_cache(body: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Return whether the model would make a key-value cache, with which transformers does not look for documents."""
    default = getattr(getattr(body, "config", None), "use_cache", False)
    return bool(default if inputs.get("use_cache") is None else inputs["use_cache"])


def _packed(positions: Tensor) -> Tensor | None:
    """Return ``[rows, length]``, the index of each token's packed sequence, or ``None`` if rows have one sequence."""
    begins = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    return begins.cumsum(-1) if bool(begins.any()) else None


def _each(item: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(item, tuple | list):
        return tuple(change(x) for x in item)
    return change(item) if isinstance(item, Tensor) else item
