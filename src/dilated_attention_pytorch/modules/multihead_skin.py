"""Multihead attention around any attention module: projections, positions, sub-layer norm, decoding."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attention_maps import attention_rows
from ..checks import check_device, check_flags, check_float_dtype, check_positive_int
from ..core.tracing import uncompiled
from ..decode import DilatedKVCache
from ..ring import shard_positions
from ..spec import Execution
from .attention import DilatedAttention
from .call_checks import check_positive, explain_mismatch
from .multihead_call import Call, check_decodes
from .multihead_state import copy_projections, regroup_projections
from .ring import check_together, raise_together


class MultiheadSkin(nn.Module):
    """Projects to heads, calls `attention`, and projects back; called like `nn.MultiheadAttention`.

    Args:
        embed_dim, num_heads: features of input and output, split evenly over the heads.
        attention: module with `forward(query, key, value, is_causal=False, attention_mask=None)`, which takes
            query (b, n, h, d), key and value (b, n, h_kv, d), attention_mask (b, n) bool with True = attend,
            and returns (b, n, h, d). If its attribute `takes_other_lengths` is true, keys may have another
            length than queries.
        layer_norm: normalise the attention output over embed_dim before `out_proj`, with `layer_norm_eps`;
            the sub-layer norm of MAGNETO (arXiv:2210.06423), which LongNet uses.
        gamma_init: gain of the initial weights of v_proj and out_proj, MAGNETO's gamma; `magneto_gamma`
            gives it by the depth of a model.
        batch_first: tensors are (b, n, embed_dim); (n, b, embed_dim) if False.
        num_kv_heads: heads of key and value, a divisor of num_heads (grouped-query attention).
        fused_qkv: hold the three input projections in one `qkv_proj`, which self-attention applies at once.
            Where key or value is another tensor, its parts are applied, and its forward hooks do not run.
        positions: position encoding, a module `(q, k, positions) -> (q, k)` that is applied after the
            projections, with q (b, n, h, d), k (b, n, h_kv, d) and positions int64 (n,) or (b, n).
        bias, device, dtype: of all projections; the norm always has a bias.

    It has no bias_k, bias_v, zero attention, kdim or vdim, and takes no unbatched input. Where padding leaves
    a query without keys, attention decides; those of this package give zeros, not NaN.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
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
        # The name of torchscale, whose checkpoints so load as they are.
        self.inner_attn_ln = (
            nn.LayerNorm(embed_dim, layer_norm_eps, True, True, device, dtype) if layer_norm else None
        )
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
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
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
            need_weights: also return the weights averaged over the heads, for short inputs; see
                `attention_rows` for long ones. An `attention` that is not of this package gives them by a
                method `attention_weights(query, key, is_causal, attention_mask) -> (b, n, n)`.
            attn_mask: None or the square causal mask (n, n), which means is_causal. Its values are compared
                on every call: is_causal=True is the cheap way to say it.
            positions: (n,) or (b, n) integers for the position encoding. By default 0 .. n - 1; with a cache
                they continue after the tokens that each row has, and in a ring they are those of this part.
            cache: from `make_cache`: query holds the next n tokens of each row, which attend causally to all
                before them. Needs is_causal=True and no gradients.
            lengths: (b,) ints, how many of the n tokens of each row are real, with a cache only.
        """
        key = query if key is None else key
        value = key if value is None else value
        call = Call(
            query,
            key,
            value,
            key_padding_mask,
            need_weights,
            attn_mask,
            is_causal,
            positions,
            cache,
            lengths,
            self.batch_first,
        )
        check = partial(self._check_call, call)
        attend = check_together(self.attention.ring, check) if self.is_sharded else check()
        is_causal = is_causal or attn_mask is not None
        q, k, v = self._heads(call, attend)
        if cache is not None:
            out = cache.attend(q, k, v, lengths=lengths)
            _warn_isolated(self.attention, cache)
        else:
            out = self.attention(q, k, v, is_causal=is_causal, attention_mask=attend)
        out = out.flatten(2)
        out = self.out_proj(out if self.inner_attn_ln is None else self.inner_attn_ln(out))
        weights = self._weights(q, k, is_causal, attend) if need_weights else None
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def check_call(self, query: Tensor, key: Tensor | None = None, **given: Any) -> None:
        """Raises what `forward` raises for its arguments before it computes. Not for rings, which agree.

        For modules with several caches, of which none is to take tokens unless all can.
        """
        key = query if key is None else key
        self._check_call(Call(query, key, key, **given, batch_first=self.batch_first))

    def attention_rows(
        self,
        query: Tensor,
        rows: Sequence[int] | Tensor,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The probabilities with which positions `rows` of query attend to every key: (b, h, len(rows), n).

        For attention maps of long inputs, of modules around a `DilatedAttention` in one process. Without
        dropout, differentiable; memory grows with len(rows) x n. `positions` are those of `forward`.
        """
        how: dict[str, Any] = {"is_causal": is_causal, "positions": positions}
        call = Call(query, query, query, key_padding_mask, **how, batch_first=self.batch_first)
        attend = self._check_call(call)
        if not self._has_rows:
            raise ValueError(f"attention_rows needs a dilated pattern, got a {type(self.attention).__name__}")
        if self.is_sharded:
            raise ValueError(
                "attention_rows needs the whole sequence in one process, got a part in each of "
                f"{self.attention.ring.num_processes}"
            )
        q, k, _ = self._heads(call, attend)
        return self._rows(q, k, rows, is_causal, attend)

    def make_cache(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> DilatedKVCache:
        """An empty cache for `forward`; device and dtype are those of the first tokens by default."""
        check_decodes(self.attention)
        attention, spec = self.attention, self.attention.spec
        return DilatedKVCache(
            spec.segment_lengths,
            spec.dilation_rates,
            batch_size=batch_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_heads=self.num_heads,
            scale=spec.scale,
            head_mixing=spec.head_mixing,
            head_offsets=spec.head_offsets,
            execution=Execution(
                attention.kernel,
                attention.workspace_bytes,
                use_pattern_cache=attention.use_pattern_cache,
            ),
            device=device,
            dtype=dtype,
        )

    def load_multihead_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies the state dict of an `nn.MultiheadAttention` into the projections, not into the norm.

        The input projections may be joint or separate there. Nothing is copied unless everything fits.
        """
        if self.num_kv_heads != self.num_heads:
            heads = f"num_kv_heads={self.num_kv_heads} and num_heads={self.num_heads}"
            raise ValueError(f"nn.MultiheadAttention has as many key as query heads, got {heads}")
        copy_projections(state, *self._qkv_parameters(), self.out_proj)

    @property
    def is_sharded(self) -> bool:
        """Whether inputs are parts of a sequence that several processes share."""
        return getattr(self.attention, "is_sharded", False)

    @property
    def _has_rows(self) -> bool:
        return isinstance(self.attention, DilatedAttention)

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

    def _heads(self, call: Call, attend: Tensor | None) -> list[Tensor]:
        """Projected heads with their positions."""
        own = None if self.positions is None else self._own_positions(call)
        try:
            shown = call.without_hidden(attend)
            q, k, v = self._project(shown.query, shown.key, shown.value)
            if self.positions is not None:
                q, k = self.positions(q, k, self._chosen_positions(call, own))
        except Exception as error:
            if self.is_sharded:  # or the other processes would wait for this one, and meet its next call
                raise_together(self.attention.ring, error)
            raise
        return [q, k, v]

    def _own_positions(self, call: Call) -> Tensor:
        """Where the tokens stand in their sequences: (n,) or (b, n) int64 on the device of query."""
        n, device = call.sizes()[1], call.query.device
        if self.is_sharded:
            ring = self.attention.ring
            return shard_positions(n, ring.group, device, ring.timeout)
        if call.cache is not None:
            return _continued(call.cache, n, device)
        return torch.arange(n, device=device)

    def _chosen_positions(self, call: Call, own: Tensor | None) -> Tensor | None:
        if call.positions is None or own is None:
            return own
        given = call.positions.to(own.device, torch.int64)
        if hasattr(self.positions, "check_given"):
            self.positions.check_given(given, own)
        return given

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Heads of query (b, n, h, d), key and value (b, n, h_kv, d)."""
        try:
            projected = self._projections(query, key, value)
        except RuntimeError:
            weight = getattr(self.qkv_proj if self.fused_qkv else self.q_proj, "weight", None)
            explain_mismatch(weight, "the weights", query=query, key=key, value=value)
            raise
        heads = [x.unflatten(-1, (-1, self.head_dim)) for x in projected]  # type: ignore[no-untyped-call]
        return heads if self.batch_first else [x.transpose(0, 1) for x in heads]

    def _projections(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        if not self.fused_qkv:
            return [self.q_proj(query), self.k_proj(key), self.v_proj(value)]
        if query is key and key is value:
            return list(self.qkv_proj(query).split(self._qkv_sizes, -1))
        inputs = zip((query, key, value), *self._qkv_parameters(), strict=True)
        return [nn.functional.linear(x, weight, bias) for x, weight, bias in inputs]

    def _weights(self, q: Tensor, k: Tensor, is_causal: bool, attend: Tensor | None) -> Tensor:
        if hasattr(self.attention, "attention_weights"):
            weights: Tensor = self.attention.attention_weights(q, k, is_causal, attend)
            return weights
        return self._rows(q, k, range(q.shape[1]), is_causal, attend).mean(1).to(q.dtype)

    def _rows(
        self, q: Tensor, k: Tensor, rows: Sequence[int] | Tensor, is_causal: bool, attend: Tensor | None
    ) -> Tensor:
        spec = self.attention.spec
        return attention_rows(
            q,
            k,
            rows,
            spec.segment_lengths,
            spec.dilation_rates,
            is_causal=is_causal,
            scale=spec.scale,
            key_mask=attend,
            head_mixing=spec.head_mixing,
            head_offsets=spec.head_offsets,
            tail=spec.tail,
        )

    def _check_call(self, call: Call) -> Tensor | None:
        """Checks the arguments of `forward`, and returns the mask of keys that may be attended."""
        attend = call.attended(self.embed_dim)
        if not getattr(self.attention, "takes_other_lengths", False):
            call.check_one_length("self-attention patterns")
        if self.positions is not None:
            call.check_one_length("position encodings")
        elif call.positions is not None:
            raise ValueError("positions need a position encoding, got a module without one")
        if self.is_sharded and (call.need_weights or call.attn_mask is not None):
            asked = "need_weights" if call.need_weights else "attn_mask"
            raise ValueError(
                "weights and masks (n, n) need the whole sequence in one process (is_causal and "
                f"key_padding_mask do not), got {asked} with a part in each"
            )
        if call.need_weights and not (self._has_rows or hasattr(self.attention, "attention_weights")):
            raise ValueError(f"need_weights needs attention_weights, got a {type(self.attention).__name__}")
        if call.cache is not None:
            call.check_cached(self)
        elif call.lengths is not None:
            raise ValueError("lengths are for a cache, got none (key_padding_mask hides padding)")
        return attend

    def extra_repr(self) -> str:
        names = ("embed_dim", "num_heads", "num_kv_heads", "gamma_init", "batch_first")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


# The lengths of a cache change from call to call, and compilers would make a graph for each.
@uncompiled
def _warn_isolated(attention: DilatedAttention, cache: DilatedKVCache) -> None:
    attention.warn_isolated(max(cache.lengths))


@uncompiled
def _continued(cache: DilatedKVCache, n: int, device: torch.device) -> Tensor:
    """The positions of the next n tokens of each row: (n,) if all rows are as long, else (b, n)."""
    starts, positions = cache.lengths, torch.arange(n, device=device)
    if len(set(starts)) == 1:
        return positions + starts[0]
    return torch.tensor(starts, device=device)[:, None] + positions
