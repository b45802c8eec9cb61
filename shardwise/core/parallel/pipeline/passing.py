"""What stands for the hidden state where a stage runs the model's forward pass before its own layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.core.base.torch_internals import no_subclass_dispatch, version_of

__all__ = ["Passage", "Passed"]

LOOKS = frozenset(
    {
        "shape", "dtype", "device", "layout", "ndim", "size", "dim", "ndimension", "stride", "numel", "nelement",
        "requires_grad", "requires_grad_", "is_leaf", "grad_fn", "_version", "itemsize", "nbytes", "element_size",
        "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "storage_offset", "is_contiguous",
        "is_floating_point", "is_complex", "is_signed", "is_inference", "is_same_size", "get_device", "result_type",
        "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "zeros_like", "ones_like", "empty_like",
        "full_like", "rand_like", "randn_like", "randint_like"
    }
)
"""What does not depend on values."""
AS_ANOTHER = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})
"""Neither do these, of what is given second."""
READS = frozenset(
    {
        "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose",
        "is_nonzero"
    }
)
SAME = frozenset(
    {
        "detach", "clone", "contiguous", "alias", "view_as", "to", "type", "float", "double", "half", "bfloat16", "cpu",
        "cuda"
    }
)
"""Values are the same where shape and dtype are."""


class _Alias(torch.autograd.Function):
    """The same memory, and neither a leaf nor a view of one: a layer may begin in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def plain(x: Tensor) -> Tensor:
    """An ordinary tensor in the same graph."""
    if not isinstance(x, Passed):
        return x
    with no_subclass_dispatch():
        found: Tensor = x.as_subclass(Tensor)
    return found


def _version(x: Tensor) -> int | None:
    with no_subclass_dispatch():
        return None if x.is_inference() else version_of(x)


# [Note: Hidden states that are passed by]
# Before its own layers a stage has what the stage before has sent in place of the embedding's output and of each
# earlier layer's. That is right where a model does nothing but hand it from one to the next. So it goes that way as a
# tensor that knows which module stands behind it, and whose operations are looked at:
# * shapes, dtypes and devices may be asked for (masks, positions);
# * what else is computed of it before the stage's own layers is passed on as such a tensor, too. Where it comes to a
#   layer it has to be equal to what has arrived, of the last module's output alone, and of nothing that is trained;
# * once the stage's own layers have begun, on ordinary tensors, nothing may be computed of it any more: that would be
#   an earlier output which this stage does not have.
# It has the values, and is in the graph, so what is computed again in backward passes by any checkpointing is right.
class Passed(Tensor):
    """The hidden state behind one of the modules that another stage has, or what was computed of it.

    Attributes:
        passage: whose it is.
        turn: of the module that it stands behind.
        maker: that module's name.
        same: nothing but the module's output.
        trained: computed of something that is trained, too.
        reused: how outputs of several modules came together in it.
        version: of its memory.
    """

    passage: Passage | None = None
    turn = 0
    maker = ""
    same = False
    trained = False
    reused = ""
    version: int | None = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with no_subclass_dispatch():
            made = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        tensors = [each for each in _flat((*args, *kwargs.values())) if isinstance(each, Tensor)]
        given = [each for each in tensors if isinstance(each, Passed) and each.passage is not None]
        if not given or name in LOOKS or (name in AS_ANOTHER and args and not isinstance(args[0], Passed)):
            return made
        passage = given[0].passage
        assert passage is not None
        return passage.computed(name, given, [each for each in tensors if not isinstance(each, Passed)], made)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            f"what {self.maker} returns is taken apart (x, y = ...), where stages pass a hidden state of one tensor: "
            f"{ONE_TENSOR}"
        )


ONE_TENSOR = (
    "have each layer take and return one tensor, with what else goes from layer to layer put into it (torch.cat, "
    "torch.stack), or use pp=1 (pp_size=1); where a layer returns a tuple of which the model uses the first alone, "
    "describe it with Body(tuples=True) (shardwise.register_body)"
)


def _flat(values: Any) -> Iterator[Any]:
    for each in values:
        if isinstance(each, list | tuple):
            yield from _flat(each)
        elif isinstance(each, dict):
            yield from _flat(each.values())
        else:
            yield each


class Passage:
    """From where a stage's input comes in to its own first layer.

    Args:
        whose: the model's name.
        tokens: the embedding's, with its body's.
    """

    def __init__(self, whose: str, tokens: str) -> None:
        self._whose, self._tokens = whose, tokens
        self._stage = 0
        self._arrived: Tensor | None = None
        self._running = self._behind = False
        self._turn = 0
        self._latest: Passed | None = None
        """What was handed out last."""
        self._now: Tensor | None = None
        """The same as an ordinary tensor, and its version then."""
        self._written: int | None = None
        self._seen: set[object] = set()
        """Where values were looked at, on a GPU."""

    def enter(self, stage: int, arrived: Tensor | None) -> None:
        """A forward pass of ``stage`` begins, or a backward pass in which some is computed again."""
        self._stage, self._arrived = stage, arrived
        self._running = self._behind = False
        self._latest = self._now = None

    def begin(self) -> None:
        """It is a forward pass."""
        self._running, self._turn = True, 0

    def end(self) -> None:
        """The model's forward pass is over; what is computed of its output follows."""
        self._running, self._latest, self._now = False, None, None

    @property
    def on_the_way(self) -> str:
        """The module of another stage behind which the forward pass is; empty: it is in the stage's own layers."""
        return "" if self._latest is None or self._behind else self._latest.maker

    def first(self) -> Tensor:
        """The embedding's output."""
        assert self._arrived is not None
        return self._next(self._tokens, _Alias.apply(self._arrived))  # type: ignore[no-untyped-call]

    def through(self, name: str, hidden: Any, training: bool) -> Tensor:
        """The output of the layer ``name``, which another stage has.

        Raises:
            TypeError: it is called with something else than one tensor.
            RuntimeError: with something else than what has arrived.
        """
        found = self._one_tensor(name, hidden)
        if not self._running:
            return found
        if self._behind:
            raise RuntimeError(
                f"the {self._whose} calls {name} behind layers of stage {self._stage}, and it is one of a stage "
                "before: layers have to be called once, in their order; use pp=1 (pp_size=1)"
            )
        return self._next(name, self._checked(name, found, training))

    def taken(self, name: str, hidden: Any, rest: Any, training: bool) -> Tensor:
        """What the own layer ``name`` is to have in place of ``hidden``; ``rest`` are its other arguments.

        Raises:
            TypeError, RuntimeError: as :meth:`through`; or it is called with what an earlier module has made.
        """
        found = self._one_tensor(name, hidden)
        if self._arrived is None:
            return found
        if not self._running:
            return plain(found)
        for each in _flat(rest):
            if isinstance(each, Passed):
                raise RuntimeError(self._reuse(each.maker, f"in {name}"))
        if self._behind and isinstance(found, Passed):
            raise RuntimeError(self._reuse(found.maker, f"in {name}"))
        if not self._behind:
            found, self._behind = self._checked(name, found, training), True
        return found

    def computed(self, name: str, given: Sequence[Passed], others: Sequence[Tensor], made: Any) -> Any:
        """What ``name`` made of ``given``, and of ``others``.

        Raises:
            RuntimeError: nothing may be, here.
        """
        reads = name in READS
        if not reads and not any(isinstance(each, Tensor) for each in _flat((made,))):
            return made
        if self._behind or self._arrived is None:
            raise RuntimeError(self._reuse(given[0].maker, f"in {name}"))
        if reads:
            raise RuntimeError(
                f"the {self._whose} reads values of what {given[0].maker} has made ({name}) before the layers of stage "
                f"{self._stage}, which has what stage {self._stage - 1} has sent in its place: do it inside of a layer"
            )
        return self._marked(name, given, others, made)

    def _marked(self, name: str, given: Sequence[Passed], others: Sequence[Tensor], made: Any) -> Any:
        if isinstance(made, list | tuple):
            parts = [self._marked(name, given, others, each) for each in made]
            return list(parts) if isinstance(made, list) else tuple(parts)
        if not isinstance(made, Tensor):
            return made
        last = max(given, key=lambda each: each.turn)
        reused = next((each.reused for each in given if each.reused), "")
        if any(each.turn != last.turn for each in given):
            reused = reused or self._reuse(min(given, key=lambda each: each.turn).maker, f"in {name}")
        trained = any(each.trained for each in given) or any(each.requires_grad for each in others)
        same = name in SAME and all(_is_same(each) for each in given)
        same = same and made.shape == last.shape and made.dtype == last.dtype
        x = made if isinstance(made, Passed) else self._mark(made, last.turn, last.maker)
        if x is not last or trained or reused:
            x.same, x.trained, x.reused = same, trained, reused
        return x

    def _next(self, maker: str, now: Tensor) -> Passed:
        self._turn += 1
        self._now, self._written = now, _version(now)
        self._latest = self._mark(now, self._turn, maker)
        self._latest.same = True
        return self._latest

    def _mark(self, x: Tensor, turn: int, maker: str) -> Passed:
        with no_subclass_dispatch():
            marked = x.as_subclass(Passed)
        marked.passage, marked.turn, marked.maker, marked.version = self, turn, maker, _version(x)
        return marked

    def _checked(self, name: str, hidden: Tensor, training: bool) -> Tensor:
        """``hidden`` as an ordinary tensor; it is what has arrived."""
        if not isinstance(hidden, Passed):  # made where operations are not seen, as by a torch.autograd.Function
            if self._arrived is not None and _trained(hidden, self._arrived):
                raise RuntimeError(self._changed(name, self._tokens))
            self._check_values(name, hidden, training, self._tokens)
            return hidden
        if hidden.reused or hidden.turn != self._turn or hidden.passage is not self or self._now is None:
            raise RuntimeError(hidden.reused or self._reuse(hidden.maker, f"in {name}"))
        if hidden.trained or _version(self._now) != self._written:
            raise RuntimeError(self._changed(name, hidden.maker))
        if hidden is self._latest:
            return self._now
        if not _is_same(hidden):
            self._check_values(name, plain(hidden), training, hidden.maker)
        return plain(hidden)

    def _check_values(self, name: str, hidden: Tensor, training: bool, maker: str) -> None:
        """On a GPU, where looking would wait, the first time of each shape."""
        arrived = self._arrived
        assert arrived is not None
        where = self._stage, name, hidden.shape, arrived.shape, training
        if hidden.device.type != "cpu" and where in self._seen:
            return
        same = hidden.shape == arrived.shape and hidden.dtype == arrived.dtype
        if not same or not torch.allclose(hidden, arrived, rtol=0.0, atol=0.0, equal_nan=True):
            raise RuntimeError(self._changed(name, maker))
        self._seen.add(where)

    def _one_tensor(self, name: str, hidden: object) -> Tensor:
        if not isinstance(hidden, Tensor):
            raise TypeError(
                f"the {self._whose} calls {name} with a {type(hidden).__name__} for its hidden state: {ONE_TENSOR}"
            )
        return hidden

    def _changed(self, name: str, maker: str) -> str:
        return (
            f"the {self._whose} changes hidden states between {maker} and {name} (it scales them, adds a parameter, "
            f"puts a prompt before them, or the like): stage {self._stage} would do it again with what stage "
            f"{self._stage - 1} has sent. Do it inside of one of the two, or in a module that is named in "
            "Body.before (shardwise.register_body)"
        )

    def _reuse(self, maker: str, where: str) -> str:
        return (
            f"the {self._whose} uses the output of {maker} again, behind the module that comes next ({where}): stage "
            f"{self._stage} has what stage {self._stage - 1} has sent alone, the hidden state behind the last layer "
            "there. Carry it along inside of the hidden state (torch.cat, torch.stack), or use pp=1 (pp_size=1)"
        )


def _is_same(x: Passed) -> bool:
    return x.same and x.version is not None and _version(x) == x.version


def _trained(x: Tensor, arrived: Tensor) -> bool:
    """Whether something that is trained went into ``x`` beside ``arrived``."""
    left, known = [x.grad_fn], {arrived.grad_fn, None}
    while left:
        node = left.pop()
        if node in known:
            continue
        known.add(node)
        if getattr(node, "variable", arrived) is not arrived:
            return True
        left += [each for each, _ in node.next_functions]  # type: ignore[union-attr]
    return False
