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
from ..ring import shard_positions
from .attention import DilatedAttention
from .ring import RingOptions

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

    def without_hidden(self, attend: Tensor | None) -> Call:
        """Zeros for hidden keys and values of others than the queries: they may hold anything, NaN included,
        which would reach the gradients of the projections."""
        if attend is None or self.query is self.key is self.value:
            return self
        hidden = (~attend if self.batch_first else ~attend.t()).unsqueeze(-1)
        key = self.key.masked_fill(hidden, 0.0)
        value = key if self.value is self.key else self.value.masked_fill(hidden, 0.0)
        return self._replace(key=key, value=value)

    def own_positions(self, ring: RingOptions | None) -> Tensor:
        """Where the tokens stand in their sequences: (n,) or (b, n) int64 on the device of query."""
        n, device = self.sizes()[1], self.query.device
        if ring is not None:
            return shard_positions(n, ring.group, device, ring.timeout)
        positions = torch.arange(n, device=device)
        return positions if self.cache is None else _continue(self.cache, positions)


def check_call(module: Any, call: Call) -> Tensor | None:
    """Checks a call of a `MultiheadModule`, and returns the mask of keys that may be attended, (b, m)."""
    check_flags(need_weights=call.need_weights, is_causal=call.is_causal)
    _check_inputs(module, call)
    (b, n, m), attention, device = call.sizes(), module.attention, call.query.device
    if call.attn_mask is not None:
        if n != m:
            raise ValueError(f"attn_mask needs as many keys as queries, got {m} and {n}")
        _check_causal(call.attn_mask, n, device)
    if call.positions is not None:
        if module.positions is None:
            raise ValueError("positions need a position encoding, got a module without one")
        check_positions(call.positions, b, n)
        check_dense("positions", call.positions, needs_values=not call.query.is_meta)
    attend = None
    if call.key_padding_mask is not None:
        attend = _attended_keys(call.key_padding_mask, b, m, device)
    if module.is_sharded and (call.need_weights or call.attn_mask is not None):
        asked = "need_weights" if call.need_weights else "attn_mask"
        raise ValueError(
            "weights and masks (n, n) need the whole sequence in one process (is_causal and "
            f"key_padding_mask do not), got {asked} with a part in each"
        )
    has_weights = isinstance(attention, DilatedAttention) or hasattr(attention, "attention_weights")
    if call.need_weights and not has_weights:
        raise ValueError(f"need_weights needs attention_weights, got a {type(attention).__name__}")
    if call.cache is not None:
        _check_cached(module, call, call.cache)
    elif call.lengths is not None:
        raise ValueError("lengths are for a cache, got none (key_padding_mask hides padding)")
    return attend


def _check_inputs(module: Any, call: Call) -> None:
    layout = "(b, n, embed_dim)" if call.batch_first else "(n, b, embed_dim)"
    for name in ("query", "key", "value"):
        check_embedded(name, getattr(call, name), module.embed_dim, layout)
    batch = 0 if call.batch_first else 1
    query, key, value = call.query.shape, call.key.shape, call.value.shape
    shapes = f"{tuple(query)}, {tuple(key)} and {tuple(value)}"
    if key != value or key[batch] != query[batch]:
        raise ValueError(f"key and value need one shape with the batch of query, got {shapes}")
    takes_others = getattr(module.attention, "takes_other_lengths", False)
    if query != key and (module.positions is not None or not takes_others):
        why = "position encodings" if takes_others else "self-attention patterns"
        raise ValueError(f"{why} need one shape of query, key and value, got {shapes}")


def _check_cached(module: Any, call: Call, cache: DilatedKVCache) -> None:
    """Raises where a call with a cache asks for what no cache can give, or the cache is another's."""
    attention = module.attention
    check_decodes(attention)
    if not isinstance(cache, DilatedKVCache):
        raise TypeError(f"cache must be a DilatedKVCache, got {type(cache).__name__}")
    if not call.is_causal:
        raise ValueError("a cache holds the past of causal attention, got is_causal=False")
    for name in ("key_padding_mask", "attn_mask"):
        if getattr(call, name) is not None:
            raise ValueError(f"{name} does not go with a cache (lengths says what is real), got one")
    if call.need_weights:
        raise ValueError("need_weights needs all keys, which a cache does not keep, got both")
    if attention._dropout_now:
        dropout = attention.spec.dropout_p
        raise ValueError(f"a cache has no dropout, got {dropout} in training: call eval() first")
    sources = dict.fromkeys(OF_SPEC, (attention.spec, cache.spec)) | dict.fromkeys(OF_HEADS, (module, cache))
    for name, pair in sources.items():
        own, other = (getattr(each, name) for each in pair)
        if own != other:
            raise ValueError(f"cache must be one of make_cache: its {name} is {other}, not {own}")
    if cache.batch_size != (rows := call.sizes()[0]):
        raise ValueError(f"cache and query must have as many rows, got {cache.batch_size} and {rows}")


def check_decodes(attention: Any) -> None:
    """Raises unless the attention is dilated, in one process."""
    if not isinstance(attention, DilatedAttention):
        kind = type(attention).__name__
        raise ValueError(f"a cache needs dilated attention, whose segments bound it, got a {kind}")
    if attention.is_sharded:
        raise ValueError("a cache needs the sequence in one process, got a part of it in each")


def check_caches(caches: Sequence[DilatedKVCache], num_layers: int) -> None:
    """Raises unless there is a cache for each layer."""
    if not isinstance(caches, Sequence):
        raise TypeError(f"caches must be a list with one for each layer, got a {type(caches).__name__}")
    for cache in caches:
        if not isinstance(cache, DilatedKVCache):
            raise TypeError(f"caches must hold DilatedKVCaches, got a {type(cache).__name__}")
    if len(caches) != num_layers:
        raise ValueError(f"caches must hold one for each of {num_layers} layers, got {len(caches)}")
    if len({id(cache) for cache in caches}) < num_layers:
        raise ValueError("caches must be one for each layer, got one for several")


# The lengths of caches change from call to call, and compilers would make a graph for each.
@uncompiled
def _continue(cache: DilatedKVCache, positions: Tensor) -> Tensor:
    """The positions of the next tokens of each row: (n,) if all rows are as long, else (b, n)."""
    starts = cache.lengths
    if len(set(starts)) == 1:
        return positions + starts[0]
    return torch.tensor(starts, device=positions.device)[:, None] + positions


@uncompiled
def warn_isolated_cache(attention: DilatedAttention, cache: DilatedKVCache) -> None:
    attention.warn_isolated(max(cache.lengths))


@uncompiled
def check_in_step(caches: Sequence[DilatedKVCache]) -> None:
    """Raises unless all have seen the same tokens."""
    for rule, facts in (
        ("have seen the same tokens, got lengths", [cache.lengths for cache in caches]),
        ("have one device and dtype, got", [(str(cache.device), cache.dtype) for cache in caches]),
    ):
        for number, fact in enumerate(facts):
            if fact != facts[0]:
                got = f"{facts[0]} in layer 0 and {fact} in layer {number}"
                raise ValueError(f"caches must {rule} {got}: after a call that failed, reset them")


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


def _check_mask(name: str, mask: Tensor, sizes: str, shape: tuple[int, int], device: Any) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(f"{name} must be a bool or float tensor, got {kind}")
    check_dense(name, mask)
    if mask.shape != shape:
        raise ValueError(f"{name} must be {sizes} = {shape}, got {tuple(mask.shape)}")
    if mask.device != device:
        raise ValueError(f"{name} must be on the device of query, {device}, got {mask.device}")


def _attended_keys(ignored: Tensor, b: int, n: int, device: Any) -> Tensor:
    """The attention mask, True = attend, of a key_padding_mask."""
    _check_mask("key_padding_mask", ignored, "(b, n)", (b, n), device)
    if ignored.dtype == torch.bool:
        return ~ignored
    attended = ignored == 0
    message = "a float key_padding_mask must hold only 0 (attend) and -inf (ignore), got other values"
    require((attended | (ignored == -math.inf)).all(), message)
    return attended


def _check_causal(mask: Tensor, n: int, device: Any) -> None:
    _check_mask("attn_mask", mask, "(n, n)", (n, n), device)
    future = torch.ones_like(mask, dtype=torch.bool).triu(1)
    expected = future if mask.dtype == torch.bool else torch.where(future, -math.inf, 0.0)
    rule = "attn_mask must be None or the square causal mask: the pattern decides what is attended"
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


def check_tokens(tokens: Tensor, device: torch.device, vocab_size: int) -> None:
    """Of `LongNetLM.check_tokens`."""
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64:
        kind = getattr(tokens, "dtype", type(tokens).__name__)
        raise TypeError(f"tokens must be an int64 tensor, got {kind}")
    check_dense("tokens", tokens)
    if tokens.dim() != 2 or 0 in tokens.shape:
        raise ValueError(f"tokens must be (b, n) with b and n at least 1, got {tuple(tokens.shape)}")
    if tokens.device != device:
        raise ValueError(f"tokens must be on the device of the model, {device}, got {tokens.device}")
    if device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= vocab_size:
            known = f"from 0 to vocab_size - 1 = {vocab_size - 1}"
            raise ValueError(f"tokens must be {known}, got {low if low < 0 else high}")
