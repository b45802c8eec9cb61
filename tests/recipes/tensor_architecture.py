"""An architecture for tensor parallelism: rules that shard the layers of a custom model."""

from torch import Tensor, nn
from torch.nn import functional

from shardwise.core.parallel.tensor import Architecture, Attention, Embedding, Head, Mlp


class MiniBlock(nn.Module):
    head_dim = 4

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * heads * self.head_dim), nn.Linear(heads * self.head_dim, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.0)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


class Mini(nn.Module):
    def __init__(self, vocabulary: int = 29, width: int = 24, heads: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(MiniBlock(width, heads), MiniBlock(width, heads))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(ids)))


# Rules by class name; layers without a rule are replicated.
ARCHITECTURE = Architecture(
    "mini",
    {
        "Mini": (Embedding("words"), Head("head")),
        "MiniBlock": (Attention(fused="qkv", out="out"), Mlp(columns=("up",), rows=("down",))),
    },
)
