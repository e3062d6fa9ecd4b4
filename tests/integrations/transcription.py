"""torchscale's LongNet and Prov-GigaPath's slide encoder, written down plainly from their formulas.

State dicts and tensors in, tensors out; nothing of the library is used. Like torchscale it pads with zeros
after the projections. Unlike torchscale it cuts the padding of each segment before the segments are joined,
which torchscale forgets where a segment length is no multiple of its rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

State = Mapping[str, Tensor]


@dataclass
class Settings:
    heads: int
    segments: Sequence[int]
    rates: Sequence[int]
    is_causal: bool = False
    detach_mixing: bool = True
    xpos_base: float | None = None
    eps: float = 1e-5
    activation: str = field(default="gelu")


def linear(state: State, name: str, x: Tensor) -> Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def layer_norm(state: State, name: str, x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + eps).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]


def branch(q: Tensor, k: Tensor, v: Tensor, w: int, r: int, is_causal: bool) -> tuple[Tensor, Tensor]:
    """One branch over (b, n, h, d): outputs, and log-sum-exps (b, n, h), -1e8 where nothing is selected."""
    b, n, h, d = q.shape
    w = min(w, n)
    segments = math.ceil(n / w)
    padded = math.ceil(w / r) * r
    # (b, segments, padded, h, d)
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, segments * w - n)).view(b, segments, w, h, d) for x in (q, k, v))
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padded - w)) for x in (q, k, v))
    group = math.ceil(h / r)
    outs, lses = [], []
    for head in range(h):
        offset = head // group
        qs, ks, vs = (x[:, :, offset::r, head] for x in (q, k, v))
        scores = qs @ ks.transpose(-1, -2) / math.sqrt(d)
        if is_causal:
            length = scores.shape[-1]
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        out = q.new_zeros(b, segments, padded, d)
        lse = q.new_full((b, segments, padded), -1e8)
        out[:, :, offset::r] = scores.softmax(-1) @ vs
        lse[:, :, offset::r] = scores.logsumexp(-1)
        outs.append(out[:, :, :w].reshape(b, segments * w, d)[:, :n])
        lses.append(lse[:, :, :w].reshape(b, segments * w)[:, :n])
    return torch.stack(outs, 2), torch.stack(lses, 2)


def dilated(q: Tensor, k: Tensor, v: Tensor, how: Settings) -> Tensor:
    """Branches mixed by their softmax denominators: (b, n, h, d) in, (b, n, h, d) out."""
    pairs = zip(how.segments, how.rates, strict=True)
    outs, lses = zip(*(branch(q, k, v, w, r, how.is_causal) for w, r in pairs), strict=True)
    weights = torch.stack(lses).softmax(0).unsqueeze(-1)
    return (torch.stack(outs) * (weights.detach() if how.detach_mixing else weights)).sum(0)


def xpos(x: Tensor, base: float, sign: int) -> Tensor:
    """Turns pairs of features (2i, 2i + 1) of (b, n, h, d), and scales queries (sign 1) or keys (sign -1)."""
    n, d = x.shape[1], x.shape[3]
    even = torch.arange(0, d, 2, dtype=x.dtype)
    centred = torch.arange(n, dtype=x.dtype) + (-n // 2)
    scale = ((even + 0.4 * d) / (1.4 * d)) ** (sign * centred[:, None] / base)  # (n, d / 2)
    angle = torch.arange(n, dtype=x.dtype)[:, None] * 10000.0 ** (-even / d)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(scale, angle)[:, None]
    return torch.view_as_real(turned).flatten(-2)


def self_attention(state: State, name: str, x: Tensor, how: Settings) -> Tensor:
    q, k, v = (linear(state, f"{name}.{p}_proj", x).unflatten(-1, (how.heads, -1)) for p in "qkv")
    if how.xpos_base is not None:
        q, k = xpos(q, how.xpos_base, 1), xpos(k, how.xpos_base, -1)
    out = dilated(q, k, v, how).flatten(2)
    if f"{name}.inner_attn_ln.weight" in state:
        out = layer_norm(state, f"{name}.inner_attn_ln", out, how.eps)
    return linear(state, f"{name}.out_proj", out)


def cross_attention(state: State, name: str, x: Tensor, memory: Tensor, heads: int) -> Tensor:
    q = linear(state, f"{name}.q_proj", x).unflatten(-1, (heads, -1)).transpose(1, 2)
    k, v = (
        linear(state, f"{name}.{p}_proj", memory).unflatten(-1, (heads, -1)).transpose(1, 2) for p in "kv"
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return linear(state, f"{name}.out_proj", (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def feed_forward(state: State, name: str, x: Tensor, how: Settings) -> Tensor:
    x = linear(state, f"{name}.fc1", x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    x = (F.gelu(wide) if how.activation == "gelu" else F.relu(wide)).to(x.dtype)
    if f"{name}.ffn_layernorm.weight" in state:
        x = layer_norm(state, f"{name}.ffn_layernorm", x, how.eps)
    return linear(state, f"{name}.fc2", x)


def layers(state: State, prefix: str, x: Tensor, how: Settings, memory: Tensor | None = None) -> list[Tensor]:
    """The input and the state after each layer, before the last norm."""
    states, depth = [x], 0
    while f"{prefix}layers.{depth}.final_layer_norm.weight" in state:
        name = f"{prefix}layers.{depth}"
        normed = layer_norm(state, f"{name}.self_attn_layer_norm", x, how.eps)
        x = x + self_attention(state, f"{name}.self_attn", normed, how)
        if memory is not None:
            normed = layer_norm(state, f"{name}.encoder_attn_layer_norm", x, how.eps)
            x = x + cross_attention(state, f"{name}.encoder_attn", normed, memory, how.heads)
        x = x + feed_forward(
            state, f"{name}.ffn", layer_norm(state, f"{name}.final_layer_norm", x, how.eps), how
        )
        states.append(x)
        depth += 1
    return states


def stack(state: State, prefix: str, x: Tensor, how: Settings, memory: Tensor | None = None) -> Tensor:
    """An encoder or decoder: all layers and the last norm."""
    return layer_norm(state, f"{prefix}layer_norm", layers(state, prefix, x, how, memory)[-1], how.eps)


def position_table(width: int, grid: int, dtype: torch.dtype) -> Tensor:
    """(1 + grid * grid, width): zeros for the class token, then row after row of the grid."""
    omega = 1 / 10000 ** (torch.arange(width // 4, dtype=dtype) / (width / 4))
    table = torch.zeros(1 + grid * grid, width, dtype=dtype)
    for row in range(grid):
        for column in range(grid):
            parts = [f(place * omega) for place in (column, row) for f in (torch.sin, torch.cos)]
            table[1 + row * grid + column] = torch.cat(parts)
    return table


def slide_encoder(
    state: State,
    tiles: Tensor,
    coords: Tensor,
    how: Settings,
    *,
    grid: int,
    tile_size: int = 256,
    all_layers: bool = False,
    global_pool: bool = False,
) -> list[Tensor]:
    """Prov-GigaPath's `LongNetViT`: tiles (b, n, c), coords (b, n, 2) -> embeddings (b, width)."""
    x = linear(state, "patch_embed.proj", tiles)
    table = position_table(x.shape[-1], grid, x.dtype)
    cell = torch.floor(coords / tile_size).long()
    x = x + table[cell[..., 0] * grid + cell[..., 1] + 1]
    cls = (state["cls_token"] + table[0]).expand(len(x), 1, -1)
    x = torch.cat([cls, x], 1)
    found = layers(state, "encoder.", x, how) if all_layers else [stack(state, "encoder.", x, how)]
    if global_pool:
        return [layer_norm(state, "norm", x[:, 1:].mean(1), 1e-6) for x in found]
    return [layer_norm(state, "norm", x, 1e-6)[:, 0] for x in found]


def layer_shapes(
    depth: int, width: int, hidden: int, *, norms: bool = True, cross: bool = False
) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a state dict of torchscale's LongNet encoder or decoder."""
    matrices = {f"self_attn.{p}_proj": (width, width) for p in ("k", "v", "q", "out")}
    matrices |= {"ffn.fc1": (hidden, width), "ffn.fc2": (width, hidden)}
    vectors = {"self_attn_layer_norm": width, "final_layer_norm": width}
    if norms:
        vectors |= {"self_attn.inner_attn_ln": width, "ffn.ffn_layernorm": hidden}
    if cross:
        matrices |= {f"encoder_attn.{p}_proj": (width, width) for p in ("k", "v", "q", "out")}
        vectors["encoder_attn_layer_norm"] = width
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(depth):
        for name, shape in matrices.items():
            shapes |= {f"layers.{layer}.{name}.weight": shape, f"layers.{layer}.{name}.bias": shape[:1]}
        for name, size in vectors.items():
            shapes |= {f"layers.{layer}.{name}.weight": (size,), f"layers.{layer}.{name}.bias": (size,)}
    return shapes | {"layer_norm.weight": (width,), "layer_norm.bias": (width,)}


def slide_shapes(channels: int, depth: int, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of Prov-GigaPath's slide encoder."""
    inner = {f"encoder.{name}": shape for name, shape in layer_shapes(depth, width, hidden).items()}
    outer = {"cls_token": (1, 1, width), "norm.weight": (width,), "norm.bias": (width,)}
    return outer | {"patch_embed.proj.weight": (width, channels), "patch_embed.proj.bias": (width,)} | inner


def random_state(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Random weights: matrices that keep the size of their input, gains around 1, all else around 0."""
    state = {}
    for name, shape in shapes.items():
        if len(shape) == 2:
            state[name] = torch.randn(shape, dtype=dtype) * 1.5 / math.sqrt(shape[1])
        else:
            state[name] = torch.randn(shape, dtype=dtype) * 0.3 + name.endswith("weight")
    return state
