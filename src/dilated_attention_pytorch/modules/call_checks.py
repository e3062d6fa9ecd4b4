"""A call of a module over (b, n, embed_dim): what its inputs, masks, positions and caches must be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import autocasts, check_dense, check_flags
from ..core.tracing import uncompiled
from ..decode import DilatedKVCache
from .attention import DilatedAttention

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
OF_SPEC = ("segment_lengths", "dilation_rates", "scale", "head_mixing", "head_offsets")
OF_HEADS = ("num_heads", "num_kv_heads", "head_dim")


class Call(NamedTuple):
    """The arguments of `MultiheadModule.forward`, and the layout in which its tensors are."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    need_weights: bool = False
    attn_mask: Tensor | None = None
    is_causal: bool = False
    positions: Tensor | None = None
    cache: DilatedKVCache | None = None
    lengths: Sequence[int] | Tensor | None = None
    batch_first: bool = True

    def sizes(self) -> tuple[int, int, int]:
        """Batch, number of queries, number of keys."""
        time = 1 if self.batch_first else 0
        return self.query.shape[1 - time], self.query.shape[time], self.key.shape[time]

    def attended(self, embed_dim: int) -> Tensor | None:
        """Checks flags, inputs and masks, and returns the mask of keys that may be attended, (b, m)."""
        check_flags(need_weights=self.need_weights, is_causal=self.is_causal)
        self._check_inputs(embed_dim)
        b, n, m = self.sizes()
        if self.attn_mask is not None:
            if n != m:
                raise ValueError(f"attn_mask needs as many keys as queries, got {m} and {n}")
            check_causal_mask(self.attn_mask, n, self.query.device)
        if self.positions is not None:
            check_positions(self.positions, b, n)
            if self.positions.is_meta and not self.query.is_meta:
                raise ValueError("positions must have values, got a tensor on the meta device")
        ignored = self.key_padding_mask
        return None if ignored is None else attended_keys(ignored, b, m, self.query.device)

    def _check_inputs(self, embed_dim: int) -> None:
        layout = "(b, n, embed_dim)" if self.batch_first else "(n, b, embed_dim)"
        for name in ("query", "key", "value"):
            check_embedded(name, getattr(self, name), embed_dim, layout)
        batch = 0 if self.batch_first else 1
        key, value = self.key.shape, self.value.shape
        if key != value or key[batch] != self.query.shape[batch]:
            shapes = f"{tuple(self.query.shape)}, {tuple(key)} and {tuple(value)}"
            raise ValueError(f"key and value need one shape with the batch of query, got {shapes}")

    def without_hidden(self, attend: Tensor | None) -> Call:
        """Zeros for hidden keys and values of others than the queries: they may hold anything, NaN included,
        which would reach the gradients of the projections."""
        if attend is None or self.query is self.key is self.value:
            return self
        hidden = (~attend if self.batch_first else ~attend.t()).unsqueeze(-1)
        key = self.key.masked_fill(hidden, 0.0)
        value = key if self.value is self.key else self.value.masked_fill(hidden, 0.0)
        return self._replace(key=key, value=value)

    def check_one_length(self, why: str) -> None:
        if self.query.shape != self.key.shape:
            shapes = f"{tuple(self.query.shape)}, {tuple(self.key.shape)} and {tuple(self.value.shape)}"
            raise ValueError(f"{why} need one shape of query, key and value, got {shapes}")

    def check_cached(self, module: Any) -> None:
        """Raises where a call with a cache asks for what no cache can give, or the cache is another's."""
        attention = module.attention
        check_decodes(attention)
        cache = self.cache
        if not isinstance(cache, DilatedKVCache):
            raise TypeError(f"cache must be a DilatedKVCache, got {type(cache).__name__}")
        if not self.is_causal:
            raise ValueError("a cache holds the past of causal attention, got is_causal=False")
        for name in ("key_padding_mask", "attn_mask"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} does not go with a cache (lengths says what is real), got one")
        if self.need_weights:
            raise ValueError("need_weights needs all keys, which a cache does not keep, got both")
        if attention._dropout_now:
            dropout = attention.spec.dropout_p
            raise ValueError(f"a cache has no dropout, got {dropout} in training: call eval() first")
        sources = dict.fromkeys(OF_SPEC, (attention.spec, cache.spec))
        for name, pair in (sources | dict.fromkeys(OF_HEADS, (module, cache))).items():
            own, other = (getattr(each, name) for each in pair)
            if own != other:
                raise ValueError(f"cache must be one of make_cache: its {name} is {other}, not {own}")
        if cache.batch_size != self.sizes()[0]:
            sizes = f"{cache.batch_size} and {self.sizes()[0]}"
            raise ValueError(f"cache and query must have as many rows, got {sizes}")


def check_caches(caches: Sequence[DilatedKVCache], num_layers: int) -> None:
    """Raises unless there is a cache for each layer."""
    if not isinstance(caches, Sequence):
        raise TypeError(f"caches must be a list with one for each layer, got a {type(caches).__name__}")
    if len(caches) != num_layers:
        raise ValueError(f"caches must hold one for each of {num_layers} layers, got {len(caches)}")
    for cache in caches:
        if not isinstance(cache, DilatedKVCache):
            raise TypeError(f"caches must hold DilatedKVCaches, got a {type(cache).__name__}")
    if len({id(cache) for cache in caches}) < num_layers:
        raise ValueError("caches must be one for each layer, got one for several")


# Lengths change from call to call, and compilers would make a graph for each.
@uncompiled
def check_in_step(caches: Sequence[DilatedKVCache]) -> None:
    """Raises unless all have seen the same tokens."""
    first = caches[0]
    for number, cache in enumerate(caches):
        if cache.lengths != first.lengths:
            raise ValueError(
                f"caches must have seen the same tokens, got lengths {first.lengths} in layer 0 and "
                f"{cache.lengths} in layer {number}: after a call that failed between layers, reset them"
            )
        if (cache.device, cache.dtype) != (first.device, first.dtype):
            raise ValueError(
                f"caches must have one device and dtype, got {first.device} and {first.dtype} in layer 0, "
                f"{cache.device} and {cache.dtype} in layer {number}"
            )


def check_decodes(attention: Any) -> None:
    """Raises unless the attention is dilated, in one process."""
    if not isinstance(attention, DilatedAttention):
        kind = type(attention).__name__
        raise ValueError(f"a cache needs dilated attention, whose segments bound it, got a {kind}")
    if attention.is_sharded:
        raise ValueError("a cache needs the sequence in one process, got a part of it in each")


def check_embedded(name: str, x: Tensor, embed_dim: int, layout: str = "(b, n, embed_dim)") -> None:
    """x is a dense floating-point tensor of the layout."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided or not x.is_floating_point():
        kind = "a nested one" if x.is_nested else f"{x.layout} of {x.dtype}"
        raise TypeError(f"{name} must be a dense floating-point tensor, got {kind}")
    if x.dim() != 3 or x.shape[2] != embed_dim:
        width = layout.strip("()").split(", ")[-1]
        rule = f"{name} must have the shape {layout} with {width} {embed_dim}"
        raise ValueError(f"{rule}, got {tuple(x.shape)}")


def explain_mismatch(other: object, whose: str, **inputs: Tensor) -> None:
    """Raises if an input has another device than `other`, or another dtype that autocast does not cast.

    Weights are compared only after torch has failed, to say why: wrappers that shard or quantise them hold
    them otherwise than they use them.
    """
    if not isinstance(other, Tensor):
        return
    for name, x in inputs.items():
        if x.device != other.device:
            raise ValueError(f"{name} must be on the device of {whose}, {other.device}, got {x.device}")
        casts = autocasts(x.device) and torch.float64 not in (x.dtype, other.dtype)
        if x.dtype != other.dtype and not casts:
            raise TypeError(f"{name} must have the dtype of {whose}, {other.dtype}, got {x.dtype}")


def attended_keys(ignored: Tensor, b: int, n: int, device: torch.device) -> Tensor:
    """The attention mask, True = attend, of a key_padding_mask."""
    if not isinstance(ignored, Tensor) or not (ignored.dtype == torch.bool or ignored.is_floating_point()):
        kind = getattr(ignored, "dtype", type(ignored).__name__)
        raise TypeError(f"key_padding_mask must be a bool or float tensor, got {kind}")
    check_dense("key_padding_mask", ignored)
    if ignored.shape != (b, n):
        raise ValueError(f"key_padding_mask must be (b, n) = {(b, n)}, got {tuple(ignored.shape)}")
    if ignored.device != device:
        raise ValueError(f"key_padding_mask must be on the device of query, {device}, got {ignored.device}")
    if ignored.dtype == torch.bool:
        return ~ignored
    attended = ignored == 0
    message = "a float key_padding_mask must hold only 0 (attend) and -inf (ignore), got other values"
    require((attended | (ignored == -math.inf)).all(), message)
    return attended


def check_causal_mask(mask: Tensor, n: int, device: torch.device) -> None:
    rule = "attn_mask must be None or the square causal mask: the pattern decides what is attended"
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(f"{rule}, got {getattr(mask, 'dtype', type(mask).__name__)}")
    if mask.shape != (n, n):
        raise ValueError(f"{rule}, got the shape {tuple(mask.shape)} for n = {n}")
    check_dense("attn_mask", mask)
    if mask.device != device:
        raise ValueError(f"attn_mask must be on the device of query, {device}, got {mask.device}")
    future = torch.ones_like(mask, dtype=torch.bool).triu(1)
    expected = future if mask.dtype == torch.bool else torch.where(future, -math.inf, 0.0)
    require((mask == expected).all(), f"{rule}, got another mask")


def check_positions(positions: Tensor, b: int, n: int) -> None:
    if not isinstance(positions, Tensor) or positions.dtype not in _INTEGERS:
        kind = getattr(positions, "dtype", type(positions).__name__)
        raise TypeError(f"positions must be a tensor of integers, got {kind}")
    check_dense("positions", positions)
    if positions.shape not in ((n,), (b, n)):
        shapes = f"(n,) = {(n,)} or (b, n) = {(b, n)}"
        raise ValueError(f"positions must have the shape {shapes}, got {tuple(positions.shape)}")


def require(fact: Tensor, message: str) -> None:
    """Raises unless `fact`; a traced graph, which cannot branch on values, asserts when it runs."""
    if fact.is_meta:
        return  # nothing to look at
    if torch.compiler.is_compiling():
        torch._assert_async(fact, message)
    elif not fact:
        raise ValueError(message)
