"""Multihead attention around any attention module: projections, sub-layer norm, the masks of torch.nn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.blocks import check_flags
from ..spec import DEFAULT_DILATION_RATES, DEFAULT_SEGMENT_LENGTHS
from .attention import DilatedAttention
from .block_sparse import BlockSparseDilatedAttention, BlockSparseRingDilatedAttention
from .presets import ImprovedDilatedAttention
from .ring import RingDilatedAttentionV2, check_together, raise_together
from .skin import AttentionSkin


class MultiheadSkin(nn.Module):
    """Projects to heads, calls `attention`, and projects back; called like `nn.MultiheadAttention`.

    Args:
        embed_dim, num_heads: features of input and output, split evenly over the heads.
        attention: module with `forward(query, key, value, is_causal=False, attention_mask=None)`, which takes
            query (b, n, h, d), key and value (b, n, h_kv, d), attention_mask (b, n) bool with True = attend,
            and returns (b, n, h, d).
        layer_norm: normalise the attention output over embed_dim before `out_proj`, with `layer_norm_eps`;
            the sub-layer norm of MAGNETO (arXiv:2210.06423), which LongNet uses.
        gamma_init: gain of the initial weights of v_proj and out_proj, MAGNETO's gamma.
        batch_first: tensors are (b, n, embed_dim); (n, b, embed_dim) if False.
        num_kv_heads: heads of key and value, a divisor of num_heads (grouped-query attention).
        fused_qkv: hold the three input projections in one `qkv_proj`, which self-attention applies at once.
        bias, device, dtype: of all projections; the norm always has a bias.

    It has no bias_k, bias_v, zero attention, kdim or vdim, and takes no unbatched input. Where padding leaves
    a query without keys, attention decides; those of this package give zeros, not NaN.
    """

    # nn.TransformerEncoder and its layer read these: they must not bypass this module in evaluation.
    in_proj_bias, _qkv_same_embed_dim = None, False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        attention: nn.Module,
        *,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        batch_first: bool = True,
        num_kv_heads: int | None = None,
        fused_qkv: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_positive(int, embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
        _check_positive((int, float), layer_norm_eps=layer_norm_eps, gamma_init=gamma_init)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, got {num_kv_heads} and {num_heads}")
        check_flags(bias=bias, layer_norm=layer_norm, batch_first=batch_first, fused_qkv=fused_qkv)
        if not isinstance(attention, nn.Module):
            raise TypeError(f"attention must be an nn.Module, got {attention!r}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.batch_first, self.fused_qkv, self.gamma_init = batch_first, fused_qkv, gamma_init
        self._qkv_sizes = [heads * self.head_dim for heads in (num_heads, num_kv_heads, num_kv_heads)]
        if fused_qkv:
            self.qkv_proj = nn.Linear(embed_dim, sum(self._qkv_sizes), bias, device, dtype)
        else:
            made = (nn.Linear(embed_dim, size, bias, device, dtype) for size in self._qkv_sizes)
            self.q_proj, self.k_proj, self.v_proj = made
        self.attention: Any = attention
        self.norm = nn.LayerNorm(embed_dim, layer_norm_eps, True, True, device, dtype) if layer_norm else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the projections and the norm, not `attention`. Call it after those of submodules."""
        weights, biases = self._qkv_parameters()
        gains = (1.0, 1.0, self.gamma_init, self.gamma_init)
        for weight, gain in zip((*weights, self.out_proj.weight), gains, strict=True):
            nn.init.xavier_normal_(weight, gain)
        for bias in (*biases, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        if self.norm is not None:
            self.norm.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """query, key and value (b, n, embed_dim) -> (out (b, n, embed_dim), weights (b, n, n) or None).

        Args:
            key, value: of the shape of query; key is query and value is key by default.
            key_padding_mask: (b, n) bool, True where a key is ignored, or float of 0 and -inf.
            need_weights: also return the weights averaged over the heads, if `attention` has a method
                `attention_weights(query, key, is_causal, attention_mask) -> (b, n, n)`; an error if not.
            attn_mask: None or the square causal mask (n, n), which means is_causal. Its values are compared
                on every call: is_causal=True is the cheap way to say it.
        """
        key = query if key is None else key
        value = key if value is None else value
        check = partial(
            self._check_call, query, key, value, key_padding_mask, need_weights, attn_mask, is_causal
        )
        is_sharded = getattr(self.attention, "is_sharded", False)
        attend = check_together(self.attention.ring, check) if is_sharded else check()
        is_causal = is_causal or attn_mask is not None
        try:
            q, k, v = self._project(query, key, value)
        except Exception as error:
            if is_sharded:  # or the other processes would wait for this one, and meet its next call
                raise_together(self.attention.ring, error)
            raise
        out = self.attention(q, k, v, is_causal=is_causal, attention_mask=attend).flatten(2)
        out = self.out_proj(out if self.norm is None else self.norm(out))
        weights = self.attention.attention_weights(q, k, is_causal, attend) if need_weights else None
        return (out if self.batch_first else out.transpose(0, 1)), weights

    @torch.no_grad()
    def load_multihead_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies the state dict of an `nn.MultiheadAttention` into the projections, not into the norm.

        The input projections may be joint or separate there. Nothing is copied unless everything fits.
        """
        if self.num_kv_heads != self.num_heads:
            heads = f"num_kv_heads={self.num_kv_heads} and num_heads={self.num_heads}"
            raise ValueError(f"nn.MultiheadAttention has as many key as query heads, got {heads}")
        if not isinstance(state, Mapping) or not all(isinstance(x, Tensor) for x in state.values()):
            raise TypeError(f"state must be a state dict of tensors, got {type(state).__name__}")
        weights, biases = self._qkv_parameters()
        targets = {"in_proj_weight": weights}
        if "in_proj_weight" not in state:
            targets = {f"{x}_proj_weight": [weight] for x, weight in zip("qkv", weights, strict=True)}
        targets["out_proj.weight"] = [self.out_proj.weight]
        if self.out_proj.bias is not None:
            targets |= {"in_proj_bias": biases, "out_proj.bias": [self.out_proj.bias]}
        problems = [f"{name} is missing" for name in targets if name not in state]
        problems += [f"{name} is unexpected" for name in state if name not in targets]
        for name, parts in targets.items():
            shape = torch.cat(parts).shape
            if name in state and state[name].shape != shape:
                problems.append(f"{name} must be {tuple(shape)}, got {tuple(state[name].shape)}")
        if problems:
            raise ValueError("the state dict does not fit: " + "; ".join(problems))
        for name, parts in targets.items():
            for part, piece in zip(parts, state[name].chunk(len(parts)), strict=True):
                part.copy_(piece)

    def _qkv_parameters(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and biases (or None) of query, key and value; of a fused projection the slices."""
        if not self.fused_qkv:
            projections = (self.q_proj, self.k_proj, self.v_proj)
            return [each.weight for each in projections], [each.bias for each in projections]
        weights, bias = torch.split(self.qkv_proj.weight, self._qkv_sizes), self.qkv_proj.bias
        return list(weights), [bias] * 3 if bias is None else list(torch.split(bias, self._qkv_sizes))

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Heads of query (b, n, h, d), key and value (b, n, h_kv, d)."""
        if not self.fused_qkv:
            projected = [self.q_proj(query), self.k_proj(key), self.v_proj(value)]
        elif query is key and key is value:
            projected = list(self.qkv_proj(query).split(self._qkv_sizes, -1))
        else:
            inputs = zip((query, key, value), *self._qkv_parameters(), strict=True)
            projected = [nn.functional.linear(x, weight, bias) for x, weight, bias in inputs]
        heads = [x.unflatten(-1, (-1, self.head_dim)) for x in projected]
        return heads if self.batch_first else [x.transpose(0, 1) for x in heads]

    def _check_call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ignored: Tensor | None,
        need_weights: bool,
        mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor | None:
        """Checks the arguments of `forward`, and returns the mask of keys that may be attended."""
        check_flags(need_weights=need_weights, is_causal=is_causal)
        self._check_inputs(query, key, value)
        if getattr(self.attention, "is_sharded", False) and (need_weights or mask is not None):
            asked = "need_weights" if need_weights else "attn_mask"
            raise ValueError(
                "weights and masks (n, n) need the whole sequence in one process (is_causal and "
                f"key_padding_mask do not), got {asked} with a part in each"
            )
        b, n = query.shape[:2] if self.batch_first else query.shape[1::-1]
        if mask is not None:
            _check_causal_mask(mask, n)
        if need_weights and not hasattr(self.attention, "attention_weights"):
            raise ValueError(f"need_weights needs attention_weights, got a {type(self.attention).__name__}")
        return None if ignored is None else _attended(ignored, b, n, query.device)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        layout = "(b, n, embed_dim)" if self.batch_first else "(n, b, embed_dim)"
        for name, x in {"query": query, "key": key, "value": value}.items():
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
            if x.is_nested or x.layout != torch.strided or not x.is_floating_point():
                kind = "a nested one" if x.is_nested else f"{x.layout} of {x.dtype}"
                raise TypeError(f"{name} must be a dense floating-point tensor, got {kind}")
            if x.dim() != 3 or x.shape[2] != self.embed_dim:
                rule = f"{name} must have the shape {layout} with embed_dim {self.embed_dim}"
                raise ValueError(f"{rule}, got {tuple(x.shape)}")
        if not query.shape == key.shape == value.shape:
            shapes = f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            raise ValueError(f"self-attention patterns need one shape of query, key and value, got {shapes}")

    def extra_repr(self) -> str:
        names = ("embed_dim", "num_heads", "num_kv_heads", "gamma_init", "batch_first")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


class MultiheadDilatedAttention(MultiheadSkin):
    """`MultiheadSkin` around `DilatedAttention`, for which are segment_lengths, dilation_rates, dropout (or
    attention_dropout) and attention_options; the other arguments are those of `MultiheadSkin`.
    """

    _attention_class: Callable[..., AttentionSkin] = DilatedAttention
    _fuses_qkv = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int] = DEFAULT_SEGMENT_LENGTHS,
        dilation_rates: Sequence[int] = DEFAULT_DILATION_RATES,
        dropout: float | None = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        batch_first: bool = True,
        num_kv_heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention_options: Any,
    ) -> None:
        if dropout == 0.0 and "attention_dropout" in attention_options:
            dropout = None  # not given, so that the other name decides
        super().__init__(
            embed_dim,
            num_heads,
            # Without device and dtype: there they say what inputs must have, which autocast and .to() change.
            self._attention_class(segment_lengths, dilation_rates, dropout=dropout, **attention_options),
            bias=bias,
            layer_norm=layer_norm,
            layer_norm_eps=layer_norm_eps,
            gamma_init=gamma_init,
            batch_first=batch_first,
            num_kv_heads=num_kv_heads,
            fused_qkv=self._fuses_qkv,
            device=device,
            dtype=dtype,
        )


class ImprovedMultiheadDilatedAttention(MultiheadDilatedAttention):
    """`MultiheadDilatedAttention` with fused input projections, around `ImprovedDilatedAttention`."""

    _attention_class = ImprovedDilatedAttention
    _fuses_qkv = True


class RingMultiheadDilatedAttention(MultiheadDilatedAttention):
    """`MultiheadDilatedAttention` with fused input projections, around `RingDilatedAttentionV2`.

    With several processes its tensors are this process's part of the sequence, (b, n_local, embed_dim), and
    key_padding_mask (b, n_local) is that of its own keys; attn_mask and need_weights are refused. The
    gradients of its weights are those of this part: sum them over the group.
    """

    _attention_class = RingDilatedAttentionV2
    _fuses_qkv = True


class BlockSparseMultiheadDilatedAttention(MultiheadDilatedAttention):
    """`MultiheadDilatedAttention` around `BlockSparseDilatedAttention`; takes its `sparse_config`."""

    _attention_class: Callable[..., AttentionSkin] = BlockSparseDilatedAttention
    _fuses_qkv = True


class BlockSparseRingMultiheadDilatedAttention(BlockSparseMultiheadDilatedAttention):
    """`MultiheadDilatedAttention` around `BlockSparseRingDilatedAttention`.

    With several processes it takes parts of the sequence, as `RingMultiheadDilatedAttention` does.
    """

    _attention_class = BlockSparseRingDilatedAttention


def _attended(ignored: Tensor, b: int, n: int, device: torch.device) -> Tensor:
    """The attention mask, True = attend, of a key_padding_mask."""
    if not isinstance(ignored, Tensor) or not (ignored.dtype == torch.bool or ignored.is_floating_point()):
        kind = getattr(ignored, "dtype", type(ignored).__name__)
        raise TypeError(f"key_padding_mask must be a bool or float tensor, got {kind}")
    if ignored.shape != (b, n):
        raise ValueError(f"key_padding_mask must be (b, n) = {(b, n)}, got {tuple(ignored.shape)}")
    if ignored.device != device:
        raise ValueError(f"key_padding_mask must be on the device of query, {device}, got {ignored.device}")
    if ignored.dtype == torch.bool:
        return ~ignored
    attended = ignored == 0
    message = "a float key_padding_mask must hold only 0 (attend) and -inf (ignore), got other values"
    _require((attended | (ignored == -math.inf)).all(), message)
    return attended


def _check_causal_mask(mask: Tensor, n: int) -> None:
    rule = "attn_mask must be None or the square causal mask: the pattern decides what is attended"
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(f"{rule}, got {getattr(mask, 'dtype', type(mask).__name__)}")
    if mask.shape != (n, n):
        raise ValueError(f"{rule}, got the shape {tuple(mask.shape)} for n = {n}")
    future = torch.ones_like(mask, dtype=torch.bool).triu(1)
    expected = future if mask.dtype == torch.bool else torch.where(future, -math.inf, 0.0)
    _require((mask == expected).all(), f"{rule}, got another mask")


def _require(fact: Tensor, message: str) -> None:
    """Raises unless `fact`; a traced graph, which cannot branch on values, asserts when it runs."""
    if torch.compiler.is_compiling():
        torch._assert_async(fact, message)
    elif not fact:
        raise ValueError(message)


def _check_positive(kind: type | tuple[type, ...], **values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, kind):
            raise TypeError(f"{name} must be {'an integer' if kind is int else 'a number'}, got {value!r}")
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
