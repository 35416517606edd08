"""A GPT as one rank would write it: the model that every strategy has to reproduce. It knows nothing of ranks.

Pre-norm blocks (RMSNorm), rotary positions, grouped-query attention, SwiGLU or GELU, no biases. Each matrix is a plain
`nn.Linear` of its own and the blocks are a list, so a strategy can be applied from outside: shard `attn.q`, wrap a
block, or take `embed`, `norm` and `head` away (nn.Identity) and keep some of the blocks, which is a pipeline stage.

Shapes: B batch, S sequence, D model, F ffn hidden, H heads, G key/value heads, K head dim, V vocab.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. Raises ValueError for one that cannot be built, naming the nearest that can.

    kv_heads: key/value heads, each serving heads / kv_heads query heads; None: as many as heads. seq: longest sequence.
    mlp: "swiglu" or "gelu". tie: the head uses the embedding's matrix. dropout: on what a block adds to the residual.

    >>> config = GPTConfig(dim=64, heads=4)
    >>> config.head_dim, config.query_groups, config.ffn
    (16, 4, 192)
    """

    layers: int = 4
    dim: int = 128
    heads: int = 4
    kv_heads: int | None = None
    vocab: int = 256
    seq: int = 128
    mlp: str = "swiglu"
    tie: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "dim", "heads", "query_groups", "vocab", "seq"):
            value = getattr(self, name)
            name = "kv_heads" if name == "query_groups" else name
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.dim % (unit := 2 * self.heads):
            below, above = self.dim // unit * unit, -(-self.dim // unit) * unit
            legal = f"dim={below} or dim={above}" if below else f"dim={above}"
            raise ValueError(
                f"dim={self.dim} must be a multiple of 2 x heads = {unit} (rotary positions turn pairs): use {legal}"
            )
        if self.heads % self.query_groups:
            legal = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}: use one of {legal}")
        if self.mlp not in ("swiglu", "gelu"):
            raise ValueError(f'mlp must be "swiglu" or "gelu", not {self.mlp!r}')
        if not isinstance(self.tie, bool):
            raise ValueError(f"tie must be True or False, not {self.tie!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is the share of numbers set to zero: at least 0 and below 1, not {self.dropout}")

    @property
    def head_dim(self) -> int:
        """K: numbers per head."""
        return self.dim // self.heads

    @property
    def query_groups(self) -> int:
        """G: key/value heads, `heads` of them unless kv_heads says otherwise."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def ffn(self) -> int:
        """F: 4 D for GELU. SwiGLU has a third matrix, so 8/3 D gives as many parameters; up to a multiple of 32."""
        return 4 * self.dim if self.mlp == "gelu" else -(-8 * self.dim // (3 * 32)) * 32


def rotary(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Unit complex numbers that `rotate` multiplies by: positions [..., S] -> [..., S, 1, K/2].

    Pair i of a head turns by position * 10000^(-2i/K) (RoFormer, arXiv 2104.09864, 3.2), in float32 or better.
    """
    real = torch.promote_types(dtype, torch.float32)
    pair = torch.arange(0, head_dim, 2, device=positions.device, dtype=real)  # [K/2]
    angle = positions[..., None, None].to(real) * 10000 ** (-pair / head_dim)  # [..., S, 1, K/2]
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turns each pair of x [B, S, H, K] by its angle; then the product of q and k depends on their distance alone."""
    real = x.to(torch.promote_types(x.dtype, torch.float32))
    pairs = torch.view_as_complex(real.unflatten(-1, (-1, 2)))  # [B, S, H, K/2]
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)  # [B, S, H, K]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k' / sqrt(K)) v over no later positions: q [B, H, S, K], k and v [B, G, S, K] -> [B, H, S, K]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245).

    The number of heads is read from the width of q, k and v: with fewer columns there are fewer heads. `attend` is an
    attribute so that a sharded sequence can bring its own.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        kv_dim = config.query_groups * config.head_dim
        self.head_dim = config.head_dim
        self.q = nn.Linear(config.dim, config.dim, bias=False)
        self.k = nn.Linear(config.dim, kv_dim, bias=False)
        self.v = nn.Linear(config.dim, kv_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        q, k = rotate(q, rotation), rotate(k, rotation)  # q: [B, S, H, K]   k, v: [B, S, G, K]
        heads = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # [B, H, S, K]
        return self.out(heads.transpose(1, 2).flatten(-2))  # [B, S, D]


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), arXiv 2002.05202."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn, bias=False)
        self.up = nn.Linear(config.dim, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # [B, S, F] -> [B, S, D]


class GELU(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # [B, S, F] -> [B, S, D]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [B, S, D] -> [B, S, D]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.mlp = SwiGLU(config) if config.mlp == "swiglu" else GELU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x), rotation))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Tokens in, logits of the next token out.

    The weights are a function of (config, seed) alone: the same on any device and in any process, and no draw is taken
    from torch's global generators. Under `torch.device("meta")` it has shapes and no memory.
    """

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        # Layers draw weights when they are made; those are thrown away, so the global generator gets its state back.
        with torch.random.fork_rng(devices=[]), torch.device("meta" if device.type == "meta" else "cpu"):
            self.embed = nn.Embedding(config.vocab, config.dim)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.RMSNorm(config.dim, eps=1e-5)
            self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tie:
            self.head.weight = self.embed.weight
        self.init_weights(seed)
        self.to(device)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draws every parameter anew, each from a stream of its own, named by (seed, parameter name).

        So a rank that holds some of the layers gets the numbers that they have in the whole model.
        """
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if parameter.dim() == 1:  # a norm's scale
                parameter.fill_(1.0)
                continue
            generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            parameter.copy_(drawn.normal_(std=self._init_std(name), generator=generator))

    def _init_std(self, name: str) -> float:
        """GPT-2's 0.02, less for what is added to the residual, so that its variance doesn't grow with depth."""
        residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
        return 0.02 / (2 * self.config.layers) ** 0.5 if residual else 0.02

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """tokens [B, S] (whole numbers below V) -> logits [B, S, V].

        positions [S] or [B, S]: where in the sequence each token stands; None: 0 .. S-1. Whoever cuts a sequence into
        parts says so here. Raises ValueError for another shape, or more than config.seq tokens.
        """
        if tokens.dim() < 2:
            raise ValueError(f"tokens must be [B, S], and are {list(tokens.shape)}: tokens[None] is a batch of one")
        if (length := tokens.shape[1]) > self.config.seq:
            raise ValueError(
                f"a sequence of {length} tokens, and config.seq is {self.config.seq}: "
                f"cut it, or build the model with GPTConfig(seq={length})"
            )
        x = self.embed(tokens)  # [B, S, D]
        if positions is None:
            positions = torch.arange(length, device=x.device)
        rotation = rotary(positions, self.config.head_dim, x.dtype)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))  # [B, S, V]
