"""Operators that save a parameter for backward, and ways to run a model that change what autograd saves."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 5, 6


class Op(nn.Module):
    """An operator on a ``[5, 6]`` tensor.

    Args:
        modules: its modules, by name.
        shapes: shapes of its own parameters, by name.
        run: the function to call with this module and the tensor.
    """

    def __init__(
        self,
        run: Callable[[Any, Tensor], Tensor],
        modules: dict[str, nn.Module] | None = None,
        **shapes: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.run = run
        for name, module in (modules or {}).items():
            self.add_module(name, module)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(0.5 + torch.rand(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Scaling(torch.autograd.Function):
    """Saves its weight by ``save_for_backward``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Keeping(torch.autograd.Function):
    """Stores its weight on ``ctx`` itself, as many fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad * ctx.weight, (grad * ctx.x).sum(0)


def _on(module: nn.Module, *shape: int) -> nn.Module:
    """Apply the module to the tensor, or to as many of its elements as ``shape`` has."""

    def run(op: Any, x: Tensor) -> Tensor:
        y = op.inner(x.flatten()[: torch.Size(shape).numel()].view(shape) if shape else x)
        return y[0] if isinstance(y, tuple) else y

    return Op(run, {"inner": module})


def _attention(times: int = 1, **options: Any) -> nn.Module:
    def run(op: Any, x: Tensor) -> Tensor:
        key = torch.cat([x] * times, 1)[None]
        return op.inner(x[None], key, key)[0]

    return Op(run, {"inner": nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)})


def _decoder() -> nn.Module:
    layer = nn.TransformerDecoderLayer(WIDTH, 2, 4, 0.0, batch_first=True)
    return Op(lambda op, x: op.inner(x[None], x.flip(0)[None]), {"inner": layer})


def _bag(op: Any, x: Tensor) -> Tensor:
    return F.embedding_bag(INDICES, op.w, mode="sum", per_sample_weights=op.s) * x[:2]


def _looked_up(module: nn.Module) -> nn.Module:
    return Op(lambda op, x: op.inner(INDICES) * x[0], {"inner": module})


def _by_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention by matrix products, which has derivatives of every order."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


HEADS = {"q": (2, 4, 4), "k": (2, 4, 4), "v": (2, 4, 4)}
INDICES = torch.tensor([[0, 3, 2], [3, 1, 3]])
IMAGE = (1, 2, 3, 5)
ENCODER: dict[str, Any] = {"nhead": 2, "dim_feedforward": 4, "dropout": 0.0, "batch_first": True}

OPS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: _on(nn.Linear(WIDTH, 4)),
    "conv2d": lambda: _on(nn.Conv2d(2, 3, 2), *IMAGE),
    "conv_transpose2d": lambda: _on(nn.ConvTranspose2d(2, 3, 2), *IMAGE),
    "layer_norm": lambda: _on(nn.LayerNorm(WIDTH)),
    "rms_norm": lambda: _on(nn.RMSNorm(WIDTH)),
    "batch_norm1d": lambda: _on(nn.BatchNorm1d(WIDTH)),
    "batch_norm_eval": lambda: _on(nn.BatchNorm1d(WIDTH).eval()),
    "prelu": lambda: _on(nn.PReLU(WIDTH)),
    "lstm": lambda: _on(nn.LSTM(WIDTH, 3, 2, proj_size=2)),
    "lstm_cell": lambda: _on(nn.LSTMCell(WIDTH, 3)),
    "attention": _attention,
    "encoder_layer": lambda: _on(nn.TransformerEncoderLayer(WIDTH, **ENCODER), 1, ROWS, WIDTH),
    "decoder_layer": _decoder,
    "weight_norm": lambda: _on(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 4))),
    "embedding": lambda: _looked_up(nn.Embedding(4, WIDTH, scale_grad_by_freq=True)),
    "embedding_bag": lambda: Op(_bag, w=(4, WIDTH), s=(2, 3)),
    "f_linear": lambda: Op(lambda op, x: F.linear(F.linear(x, op.a), op.b), a=(3, 6), b=(6, 3)),
    "sdpa": lambda: Op(lambda op, x: F.scaled_dot_product_attention(op.q, op.k, op.v) * x[:4, :4], **HEADS),
    "sdpa_math": lambda: Op(lambda op, x: _by_math(op.q, op.k, op.v) * x[:4, :4], **HEADS),
    "sdpa_query": lambda: Op(lambda op, x: F.scaled_dot_product_attention(op.q, x[None], x[None]), q=(1, 3, WIDTH)),
    "matmul": lambda: Op(lambda op, x: op.w @ x, w=(3, 5)),
    "mul": lambda: Op(lambda op, x: x * op.w + x / op.w, w=(WIDTH,)),
    "pow": lambda: Op(lambda op, x: (1 + x * x) ** op.w + op.w**3, w=(WIDTH,)),
    "elementwise": lambda: Op(lambda op, x: x * op.w.sin() * op.w.abs() + op.w.log(), w=(WIDTH,)),
    "activations": lambda: Op(lambda op, x: x * op.w.softmax(0) * F.silu(op.w) * F.gelu(op.w), w=(WIDTH,)),
    "cdist": lambda: Op(lambda op, x: torch.cdist(x, op.w), w=(3, 6)),
    "cosine": lambda: Op(lambda op, x: F.cosine_similarity(x, op.w, 1)[:, None] * F.normalize(op.w), w=(5, 6)),
    "solve": lambda: Op(lambda op, x: torch.linalg.solve(op.w + 9 * torch.eye(5, dtype=x.dtype), x), w=(5, 5)),
    "function": lambda: Op(lambda op, x: Scaling.apply(x, op.w), w=(WIDTH,)),
    "function_keeps": lambda: Op(lambda op, x: Keeping.apply(x, op.w), w=(WIDTH,)),
}
NOT_BATCHED = {"batch_norm1d", "lstm", "lstm_cell"}
NOT_BATCHED |= {"function", "function_keeps", "embedding_bag"}
"""Operators without support for ``torch.func.vmap``."""
ONCE = {"cdist", "encoder_layer", "decoder_layer", "sdpa", "sdpa_query"}
"""Operators without a second derivative. Attention over three dimensions has none since torch 2.15, which uses the
CPU's kernel."""


class Table(nn.Module):
    """Some operators on one tensor, between two layers that evict what was gathered before.

    Args:
        names: names of the operators.
    """

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.ops = nn.ModuleDict({name: OPS[name]() for name in names})
        self.last = nn.Linear(WIDTH, WIDTH)
        self.around_all: Callable[[], AbstractContextManager[object]] = nullcontext
        self.around_op: Callable[[], AbstractContextManager[object]] = nullcontext
        self.together, self.reentrant = 0, True

    def few(self, x: Tensor, *names: str) -> Tensor:
        total = x.new_zeros(())
        for name in names:
            with self.around_op():
                y = self.ops[name](x)
            # Each element has another weight, so that no gradient cancels.
            total = total + (y * torch.linspace(1.0, 2.0, y.numel(), dtype=y.dtype).view(y.shape)).mean()
        return total

    def forward(self, x: Tensor) -> Tensor:
        with self.around_all():
            return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        names = list(self.ops)
        if not self.together:
            total = self.few(x, *names)
        else:
            total = x.new_zeros(())
            for start in range(0, len(names), self.together):
                some = names[start : start + self.together]
                total = total + checkpoint(self.few, x, *some, use_reentrant=self.reentrant)
        return total + self.last(x).square().mean()


Way = Callable[[Any, Any, Tensor], Tensor]
"""``way(table, model, x)``: the loss of ``model``, which runs ``table``."""


def identity() -> AbstractContextManager[None]:
    return saved_tensors_hooks(lambda t: t, lambda t: t)


def plainly(_table: Table, model: nn.Module, x: Tensor) -> Tensor:
    return model(x)  # type: ignore[no-any-return]


def on_cpu(_table: Table, model: nn.Module, x: Tensor) -> Tensor:
    with save_on_cpu():
        return model(x)  # type: ignore[no-any-return]


def under_identity(_table: Table, model: nn.Module, x: Tensor) -> Tensor:
    with identity():
        return model(x)  # type: ignore[no-any-return]


def checkpointed(_table: Table, model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=True)  # type: ignore[no-any-return]


def checkpointed_without_reentry(_table: Table, model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False)  # type: ignore[no-any-return]


def checkpointed_within(table: Table, model: nn.Module, x: Tensor) -> Tensor:
    table.together = 2
    return model(x)  # type: ignore[no-any-return]


def checkpointed_twice(table: Table, model: nn.Module, x: Tensor) -> Tensor:
    table.together = 2
    return checkpoint(model, x, use_reentrant=True)  # type: ignore[no-any-return]


def checkpointed_twice_without_reentry(table: Table, model: nn.Module, x: Tensor) -> Tensor:
    table.together, table.reentrant = 2, False
    return checkpoint(model, x, use_reentrant=False)  # type: ignore[no-any-return]


def inner_identity(table: Table, model: nn.Module, x: Tensor) -> Tensor:
    table.around_op = identity
    return model(x)  # type: ignore[no-any-return]


def inner_on_cpu(table: Table, model: nn.Module, x: Tensor) -> Tensor:
    table.around_op = save_on_cpu
    return model(x)  # type: ignore[no-any-return]


def without_hooks(_table: Table, model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        return model(x)  # type: ignore[no-any-return]


def graph_inside(table: Table, model: nn.Module, x: Tensor) -> Tensor:
    table.around_all = torch.enable_grad
    with torch.no_grad():
        return model(x)  # type: ignore[no-any-return]


def penalty(_table: Table, model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().mean()  # type: ignore[no-any-return]


def penalty_under_identity(table: Table, model: nn.Module, x: Tensor) -> Tensor:
    with identity():
        return penalty(table, model, x)


def mapped(_table: Table, model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(model)(torch.stack([x, x.cos()])).mean()


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (
        plainly,
        on_cpu,
        under_identity,
        checkpointed,
        checkpointed_without_reentry,
        checkpointed_within,
        checkpointed_twice,
        checkpointed_twice_without_reentry,
        inner_identity,
        inner_on_cpu,
        without_hooks,
        graph_inside,
        penalty,
        penalty_under_identity,
        mapped,
    )
}


def ops_of(way: str) -> list[str]:
    """Return the operators that can be run in this way."""
    left_out = NOT_BATCHED if way == "mapped" else ONCE if way.startswith("penalty") else ()
    return [name for name in OPS if name not in left_out]
