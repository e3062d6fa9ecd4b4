"""Multihead attention: projections, positions and sub-layer norm around an attention module; its kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attention_maps import attention_rows, attention_sums
from ..checks import (
    check_device,
    check_flags,
    check_float_dtype,
    check_positive,
    check_positive_int,
    keyword_names,
    refuse_unknown,
)
from ..decode import DilatedKVCache
from ..spec import resolve_branches
from .attention import AttentionModule, Device, DilatedAttention, Dtype, ImprovedDilatedAttention, Mask
from .block_sparse import BlockSparseDilatedAttention, BlockSparseRingDilatedAttention
from .call_checks import (
    OF_HEADS,
    OF_SPEC,
    Call,
    check_call,
    check_decodes,
    explain_mismatch,
    warn_isolated_cache,
)
from .positions import DEFAULT_ROTARY_BASE, DEFAULT_XPOS_SCALE_BASE, make_position_encoding
from .pretrained import load_torch_weights, regroup_projections
from .ring import RingDilatedAttentionV2, check_together, raise_error

_FIXED = ("attention", "fused_qkv", "positions")  # arguments of `MultiheadModule` that a kind decides
POSITION_OPTIONS = ("position_encoding", "rotary_base", "xpos_scale_base")


class MultiheadModule(nn.Module):
    """Projects to heads, calls `attention`, and projects back; called like `nn.MultiheadAttention`.

    Args:
        attention: a module that is called like `DilatedAttention`. If its attribute `takes_other_lengths` is
            true, keys may have another length than queries.
        fused_qkv: hold the three input projections in one `qkv_proj`, which self-attention applies at once.
            Where key or value is another tensor, its parts are applied, and its forward hooks do not run.
        positions: position encoding, a module `(q, k, positions) -> (q, k)` that is applied after the
            projections, with q (b, n, h, d), k (b, n, h_kv, d) and positions int64 (n,) or (b, n).
        The others are those of `MultiheadDilatedAttention`.

    Where padding leaves a query without keys, attention decides; those of this package give zeros, not NaN.
    """

    # nn.TransformerEncoder and its layer read these: they must not bypass this module in evaluation.
    in_proj_bias, _qkv_same_embed_dim = None, False
    choice: Any = None  # of a factory: what it chose and why

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
        positions: nn.Module | None = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for name, size in sizes.items():
            check_positive_int(name, size, bits=28)  # so that weights can be counted in 64 bits
        check_positive(layer_norm_eps=layer_norm_eps, gamma_init=gamma_init)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, got {num_kv_heads} and {num_heads}")
        check_flags(bias=bias, layer_norm=layer_norm, batch_first=batch_first, fused_qkv=fused_qkv)
        if not isinstance(attention, nn.Module):
            raise TypeError(f"attention must be an nn.Module, got {attention!r}")
        if positions is not None and not isinstance(positions, nn.Module):
            raise TypeError(f"positions must be an nn.Module or None, got {positions!r}")
        check_device(device)
        check_float_dtype("dtype", dtype)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.batch_first, self.fused_qkv, self.gamma_init = batch_first, fused_qkv, gamma_init
        self._qkv_sizes = [heads * self.head_dim for heads in (num_heads, num_kv_heads, num_kv_heads)]
        if fused_qkv:
            self.qkv_proj = nn.Linear(embed_dim, sum(self._qkv_sizes), bias, device, dtype)
        else:
            made = (nn.Linear(embed_dim, size, bias, device, dtype) for size in self._qkv_sizes)
            self.q_proj, self.k_proj, self.v_proj = made
        self.positions: Any = positions
        self.attention: Any = attention
        norm = nn.LayerNorm(embed_dim, layer_norm_eps, True, True, device, dtype) if layer_norm else None
        self.inner_attn_ln = norm  # the name of torchscale, whose checkpoints so load as they are
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
        if self.inner_attn_ln is not None:
            self.inner_attn_ln.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Mask = None,
        need_weights: bool = False,
        attn_mask: Mask = None,
        is_causal: bool = False,
        *,
        positions: Tensor | None = None,
        cache: DilatedKVCache | None = None,
        lengths: Sequence[int] | Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """query, key and value (b, n, embed_dim) -> (out (b, n, embed_dim), weights (b, n, n) or None).

        Args:
            key, value: of the shape of query; key is query and value is key by default.
            key_padding_mask: (b, n) bool, True where a key is ignored, or float of 0 and -inf.
            need_weights: also return the weights averaged over the heads, for short inputs (`attention_rows`
                is for long ones). An `attention` of your own gives them by a method
                `attention_weights(query, key, is_causal, attention_mask) -> (b, n, n)`.
            attn_mask: None or the square causal mask (n, n); is_causal=True is the cheap way to say it.
            positions: (n,) or (b, n) integers for the position encoding. By default 0 .. n - 1; with a cache
                they continue after the tokens that each row has, and in a ring they are those of this part.
            cache: from `make_cache`: query holds the next n tokens of each row, which attend causally to all
                before them. Needs is_causal=True and no gradients.
            lengths: (b,) ints, how many of the n tokens of each row are real, with a cache only.
        """
        key = query if key is None else key
        value = key if value is None else value
        masks = (key_padding_mask, need_weights, attn_mask, is_causal)
        call = Call(query, key, value, *masks, positions, cache, lengths, self.batch_first)
        check = partial(check_call, self, call)
        attend = check_together(self.attention.ring, check) if self.is_sharded else check()
        is_causal = is_causal or attn_mask is not None
        q, k, v = self._heads(call, attend)
        if cache is not None:
            out = cache.attend(q, k, v, lengths=lengths)
            warn_isolated_cache(self.attention, cache)
        else:
            out = self.attention(q, k, v, is_causal=is_causal, attention_mask=attend)
        out = out.flatten(2)
        out = self.out_proj(out if self.inner_attn_ln is None else self.inner_attn_ln(out))
        weights = self._weights(q, k, is_causal, attend) if need_weights else None
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def check_call(self, query: Tensor, key: Tensor | None = None, **given: Any) -> None:
        """Raises what `forward` would, so that none of several caches takes tokens unless all can."""
        key = query if key is None else key
        check_call(self, Call(query, key, key, **given, batch_first=self.batch_first))

    def attention_rows(
        self,
        query: Tensor,
        rows: Sequence[int] | Tensor,
        key_padding_mask: Mask = None,
        is_causal: bool = False,
        *,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The probabilities with which positions `rows` of query attend to every key: (b, h, len(rows), n).

        For attention maps of long inputs, of modules around a `DilatedAttention` in one process. Without
        dropout, differentiable; memory grows with len(rows) x n. `positions` are those of `forward`.
        """
        call = Call(query, query, query, key_padding_mask, is_causal=is_causal, positions=positions)
        q, k, attend = self._mapped_heads(call)
        return self._rows(q, k, rows, is_causal, attend)

    def attention_sums(self, query: Tensor, weights: Tensor, *, residual: bool = False) -> Tensor:
        """`weights @ A` for weights (b, r, n), where A (b, n, n) is the mean over heads of `attention_rows`.

        With `residual` it is a step of attention rollout, `weights @ M`: M is A plus the identity, each row
        divided by its sum. Time and memory are those of a training step of the attention: A is never built.
        """
        check_flags(residual=residual)
        q, k, _ = self._mapped_heads(Call(query, query, query))
        if not isinstance(weights, Tensor) or weights.shape[::2] != q.shape[:2] or weights.dim() != 3:
            got = tuple(weights.shape) if isinstance(weights, Tensor) else weights
            raise ValueError(f"weights must have the shape (b, r, n) for query (b, n, embed_dim), got {got}")
        spec = replace(self.attention.spec, dropout_p=0.0, detach_mixing=False)
        execution = replace(self.attention._execution, memory="fresh")
        return attention_sums(q, k, weights, spec, execution, residual=residual)

    def make_cache(self, batch_size: int, device: Device = None, dtype: Dtype = None) -> DilatedKVCache:
        """An empty cache for `forward`; device and dtype are those of the first tokens by default."""
        check_decodes(self.attention)
        settings = {name: getattr(self.attention.spec, name) for name in OF_SPEC}
        settings |= {name: getattr(self, name) for name in OF_HEADS}
        settings |= {"device": device, "dtype": dtype, "batch_size": batch_size}
        return DilatedKVCache(**settings, execution=replace(self.attention._execution, memory="fresh"))

    def load_multihead_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies the state dict of an `nn.MultiheadAttention` into the projections, not into the norm.

        The input projections may be joint or separate there. Nothing is copied unless everything fits.
        """
        if self.num_kv_heads != self.num_heads:
            heads = f"num_kv_heads={self.num_kv_heads} and num_heads={self.num_heads}"
            raise ValueError(f"nn.MultiheadAttention has as many key as query heads, got {heads}")
        load_torch_weights(self, self.out_proj, state)

    @property
    def is_sharded(self) -> bool:
        """Whether inputs are parts of a sequence that several processes share."""
        return getattr(self.attention, "is_sharded", False)

    def regroup(self, state: MutableMapping[str, Any], prefix: str = "") -> None:
        """Joins and names the input projections at `prefix` in a state dict as this module holds them."""
        kinds = ("weight",) if self.out_proj.bias is None else ("weight", "bias")
        regroup_projections(state, prefix, fused=self.fused_qkv, sizes=self._qkv_sizes, kinds=kinds)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.regroup(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _qkv_parameters(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and biases (or None) of query, key and value; of a fused projection the slices."""
        if not self.fused_qkv:
            projections = (self.q_proj, self.k_proj, self.v_proj)
            return [each.weight for each in projections], [each.bias for each in projections]
        weights, bias = torch.split(self.qkv_proj.weight, self._qkv_sizes), self.qkv_proj.bias
        return list(weights), [bias] * 3 if bias is None else list(torch.split(bias, self._qkv_sizes))

    def _heads(self, call: Call, attend: Mask) -> list[Tensor]:
        """Projected heads with their positions."""
        ring = self.attention.ring if self.is_sharded else None
        own = None if self.positions is None else call.own_positions(ring)
        try:
            shown = call.without_hidden(attend)
            q, k, v = self._project(shown.query, shown.key, shown.value)
            if own is not None:
                chosen = own if call.positions is None else call.positions.to(own.device, torch.int64)
                if chosen is not own and hasattr(self.positions, "check_given"):
                    self.positions.check_given(chosen, own)
                q, k = self.positions(q, k, chosen)
        except Exception as error:
            if ring is not None:  # or the other processes would wait for this one, and meet its next call
                check_together(ring, partial(raise_error, error))
            raise
        return [q, k, v]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Heads of query (b, n, h, d), key and value (b, n, h_kv, d)."""
        try:
            if not self.fused_qkv:
                projected = [self.q_proj(query), self.k_proj(key), self.v_proj(value)]
            elif query is key and key is value:
                projected = list(self.qkv_proj(query).split(self._qkv_sizes, -1))
            else:
                inputs = zip((query, key, value), *self._qkv_parameters(), strict=True)
                projected = [nn.functional.linear(x, weight, bias) for x, weight, bias in inputs]
        except RuntimeError:
            weight = getattr(self.qkv_proj if self.fused_qkv else self.q_proj, "weight", None)
            explain_mismatch(weight, "the weights", query=query, key=key, value=value)
            raise
        heads = [x.unflatten(-1, (-1, self.head_dim)) for x in projected]
        return heads if self.batch_first else [x.transpose(0, 1) for x in heads]

    def _mapped_heads(self, call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries and keys whose probabilities can be told, and which keys are attended."""
        call = call._replace(batch_first=self.batch_first)
        attend = check_call(self, call)
        if not isinstance(self.attention, DilatedAttention):
            raise ValueError(f"attention_rows needs a dilated pattern, got a {type(self.attention).__name__}")
        if self.is_sharded:
            raise ValueError("attention_rows needs the whole sequence in one process, got a part in each")
        q, k, _ = self._heads(call, attend)
        return q, k, attend

    def _rows(self, q: Tensor, k: Tensor, rows: Any, is_causal: bool, attend: Mask) -> Tensor:
        of_spec = {name: getattr(self.attention.spec, name) for name in (*OF_SPEC, "tail")}
        return attention_rows(q, k, rows, **of_spec, is_causal=is_causal, key_mask=attend)

    def _weights(self, q: Tensor, k: Tensor, is_causal: bool, attend: Mask) -> Tensor:
        own: Callable[..., Tensor] | None = getattr(self.attention, "attention_weights", None)
        if own is not None:
            return own(q, k, is_causal, attend)
        return self._rows(q, k, range(q.shape[1]), is_causal, attend).mean(1).to(q.dtype)

    def extra_repr(self) -> str:
        names = ("embed_dim", "num_heads", "num_kv_heads", "gamma_init", "batch_first")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


class MultiheadDilatedAttention(MultiheadModule):
    """Projections around `DilatedAttention`: called like `nn.MultiheadAttention`, whose state dict it loads.

    Args:
        embed_dim, num_heads: features of input and output, split evenly over the heads.
        segment_lengths, dilation_rates: of `DilatedAttention`; `options` may name its other options.
        max_length: the longest sequence, for which `branches_for` gives the branches that are left out.
        dropout: probability to drop an attention weight, in training only; also `attention_dropout`.
        layer_norm: normalise the attention output before `out_proj`, with `layer_norm_eps`; the sub-layer
            norm of MAGNETO (arXiv:2210.06423), which LongNet uses and `nn.MultiheadAttention` has not.
        gamma_init: gain of the initial weights of v_proj and out_proj; `magneto_gamma` gives it by depth.
        batch_first: tensors are (b, n, embed_dim); (n, b, embed_dim) if False.
        num_kv_heads: heads of key and value, a divisor of num_heads (grouped-query attention).
        position_encoding: None, "rotary" (`RotaryEmbedding`) or "xpos" (`XPos`), applied to queries and keys.
        rotary_base: base of the wavelengths of both.
        xpos_scale_base: positions over which the decay of "xpos" falls to its base.
        bias, device, dtype: of the projections; the norm always has a bias.

    It has no bias_k, bias_v, zero attention, kdim or vdim, and takes no unbatched input.
    """

    _attention_class: type[AttentionModule] = DilatedAttention
    _fuses_qkv = False

    @classmethod
    def option_names(cls) -> frozenset[str]:
        """The keywords that the class takes, those of its attention included."""
        return cls._attention_class.option_names() | keyword_names(cls) - {*_FIXED}

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        dropout: float | None = 0.0,
        *,
        max_length: int | None = None,
        position_encoding: str | None = None,
        rotary_base: float = DEFAULT_ROTARY_BASE,
        xpos_scale_base: float = DEFAULT_XPOS_SCALE_BASE,
        **options: Any,
    ) -> None:
        refuse_unknown(type(self).__name__, options, self.option_names())
        # device and dtype as well: an attention demands them of its inputs, which autocast and .to() change.
        own = {name: options.pop(name) for name in keyword_names(MultiheadModule) if name in options}
        if "attention_dropout" in options and dropout == 0.0:
            dropout = None  # not given, so that the other name decides
        branches = resolve_branches(segment_lengths, dilation_rates, max_length, num_heads)
        options |= dict(zip(("segment_lengths", "dilation_rates"), branches, strict=True))
        make: Callable[..., AttentionModule] = self._attention_class
        attention = make(dropout=dropout, **options)
        super().__init__(embed_dim, num_heads, attention, fused_qkv=self._fuses_qkv, **own)
        self.positions = make_position_encoding(
            position_encoding,
            self.head_dim,
            # Only dilated patterns never leave their segments.
            attention.spec.segment_lengths if isinstance(attention, DilatedAttention) else None,
            rotary_base=rotary_base,
            xpos_scale_base=xpos_scale_base,
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

    _attention_class: type[AttentionModule] = BlockSparseDilatedAttention
    _fuses_qkv = True


class BlockSparseRingMultiheadDilatedAttention(BlockSparseMultiheadDilatedAttention):
    """`BlockSparseMultiheadDilatedAttention` over parts of a sequence, as `RingMultiheadDilatedAttention`."""

    _attention_class = BlockSparseRingDilatedAttention


MULTIHEAD_KINDS: Mapping[str, type[MultiheadDilatedAttention]] = {
    "standard": MultiheadDilatedAttention,
    "improved": ImprovedMultiheadDilatedAttention,
    "ring": RingMultiheadDilatedAttention,
    "block_sparse": BlockSparseMultiheadDilatedAttention,
    "block_sparse_ring": BlockSparseRingMultiheadDilatedAttention,
}
