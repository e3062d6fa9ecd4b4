"""Rows in which not every place holds a token, as transformers makes them: their masks and their attention.

Masks are (b, N): bool with True at tokens, or int32, the number of each token's document in its row. Segments
count tokens, and padding takes no place in them. Results at padding are zeros, but for a padded first place
that sees both ways: models pool there, so it attends as the first token of its row would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from ..attention_maps import attention_rows
from ..checks import document_bounds
from ..core.tracing import uncompiled
from ..decode import attend_last
from ..functional import dilated_attention

SLIDING_WINDOW = (
    "a sliding window (segments take its place: switch it off in the config, or let such layers keep their "
    'own attention by "sliding_layers": "own")'
)
OF_ATTENTION_ROWS = ("segment_lengths", "dilation_rates", "scale", "head_mixing", "head_offsets", "tail")


class MaskRefusal(ValueError, AttributeError):
    """A model looks into its mask. An AttributeError too, so that `hasattr` says no."""


@dataclass(frozen=True, eq=False)
class TokenMask:
    """What the attention of a layer may see. Models hand it on; those that read it themselves get an error.

    The mask tells causality, and not the layer: eager attention, too, obeys its mask alone.
    """

    is_causal: bool
    tokens: Tensor | None = None  # (b, N) as above, shorter than the keys of a static cache; None: all places
    pairs: Tensor | None = None  # bool (b, 1, n, N), for a layer that keeps its own attention
    refusal: str | None = None  # why no layer can use it: models make masks for layers that they may not have

    ndim: ClassVar[int] = 4  # as the masks have that transformers takes for ready

    def contiguous(self) -> TokenMask:
        """`generate` calls this where the cache is static."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse_reading()

    def _refuse_reading(self, *_: object) -> NoReturn:
        raise MaskRefusal("dilated attention cannot honour a model that reads its attention mask itself")

    __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __rsub__ = _refuse_reading
    __and__ = __rand__ = __invert__ = _refuse_reading


@uncompiled
def dilated_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | TokenMask | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> TokenMask:
    """What transformers calls to make the mask that `dilated_attention_forward` gets.

    Masks that dilated attention cannot honour are errors in the layers that use them, not here.
    """
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

    if isinstance(attention_mask, TokenMask):  # `generate` has made it ahead
        return attention_mask
    is_causal = mask_function is not bidirectional_mask_function
    sizes, end = (batch_size, q_length, kv_length), int(q_offset) + q_length
    settings = getattr(config, "dilated_attention", None) or {}
    if local_size is not None and settings.get("sliding_layers") == "own":
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "device": device}
        kwargs |= {"q_offset": q_offset, "kv_offset": kv_offset, "use_vmap": use_vmap}
        kwargs |= {"mask_function": mask_function, "attention_mask": attention_mask}
        return TokenMask(is_causal, pairs=sdpa_mask(*sizes, **kwargs))
    try:
        for name, value in {"local_size": local_size, "kv_offset": kv_offset or None}.items():
            if value is not None:
                raise ValueError(f"dilated attention cannot honour {SLIDING_WINDOW}, got {name}={value}")
        if use_vmap:
            raise ValueError("dilated attention cannot honour a mask function of the model's own")
        return TokenMask(is_causal, _tokens(sizes, end, mask_function, attention_mask, device))
    except ValueError as error:
        return TokenMask(is_causal, refusal=str(error))


def _tokens(
    sizes: tuple[int, int, int], end: int, mask_function: Any, attention_mask: Tensor | None, device: Any
) -> Tensor | None:
    """`TokenMask.tokens` of n new of `end` tokens so far; a static cache has room for more, `total`."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    b, n, total = sizes
    if mask_function not in (None, causal_mask_function, bidirectional_mask_function):
        if not n == end == total or attention_mask is not None:
            raise ValueError("dilated attention cannot honour a mask function of the model's own")
        return _documents(mask_function, b, total, device)
    if end > total or (mask_function is bidirectional_mask_function and end != total):
        raise ValueError(f"dilated attention has no cross attention, got {n} queries and {total} keys")
    if attention_mask is None:
        return None if end == total else torch.ones(b, end, dtype=torch.bool, device=device)
    if attention_mask.shape[1] < end or bool(attention_mask[:, end:].any()):
        rule = f"attention_mask must cover the {end} tokens so far, those in the cache too, and no others"
        raise ValueError(f"{rule}, got shape {tuple(attention_mask.shape)}")
    mask = attention_mask[:, :end].bool()
    return None if end == total and bool(mask.all()) else mask


def _documents(mask_function: Callable[..., Any], b: int, n: int, device: Any) -> Tensor | None:
    """Numbers of the documents (b, n) of a mask that is causal within each; other masks are refused."""
    rows = torch.arange(b, device=device)[:, None]
    here = torch.arange(n, device=device)[None].expand(b, n)
    joined = mask_function(rows, 0, here[:, 1:], here[:, :-1]).expand(b, n - 1)
    ahead = mask_function(rows, 0, here[:, :-1], here[:, 1:])
    is_first = torch.cat([torch.ones_like(rows, dtype=torch.bool), ~joined], 1)
    starts = torch.where(is_first, here, 0).cummax(1).values
    if bool(ahead.any()) or not bool(mask_function(rows, 0, here, starts).all()):
        raise ValueError("dilated attention cannot honour a mask that is not causal within documents")
    return None if bool(joined.all()) else is_first.cumsum(1, dtype=torch.int32)


def checked_mask(
    mask: Tensor | None, boundaries: Tensor | None, key_boundaries: Tensor | None, q: Tensor, k: Tensor
) -> Tensor | None:
    """The mask of a call; boundaries of documents, as for flash attention, become one."""
    (b, n), total = q.shape[:2], k.shape[1]
    if mask is not None:
        # A mask of a model's own making, which is int64 or float, must not pass for the numbers of documents.
        is_ours = isinstance(mask, Tensor) and mask.dim() == 2 and mask.dtype in (torch.bool, torch.int32)
        if not is_ours or mask.shape[0] != b or not n <= mask.shape[1] <= total:
            rule = "attention_mask must be bool with one entry a token, (b, N), not one a pair of tokens"
            kind = getattr(mask, "dtype", type(mask).__name__)
            shapes = f"{tuple(getattr(mask, 'shape', ()))} for {tuple(k.shape[:2])} keys"
            raise ValueError(f"{rule}, got {kind} of shape {shapes}")
    if boundaries is not None or key_boundaries is not None:
        is_padded = mask is not None and mask.dtype == torch.bool
        if b != 1 or is_padded:
            rule = "cu_seq_lens_q must pack documents into one row without padding"
            raise ValueError(f"{rule}, got {b} rows{' with padding' if is_padded else ''}")
        mask = _packed(boundaries, key_boundaries, total, q.device)
    if mask is not None and mask.dtype != torch.bool and n != total:
        raise ValueError(f"packed documents cannot continue from a cache, got {n} of {total} tokens")
    return mask


@uncompiled
def _packed(boundaries: Any, key_boundaries: Any, n: int, device: torch.device) -> Tensor:
    """Numbers of the documents (1, n) between boundaries, which must be those of queries and keys alike."""
    bounds = []
    for name, given in (("cu_seq_lens_q", boundaries), ("cu_seq_lens_k", key_boundaries)):
        if not isinstance(given, Tensor) or given.dtype not in (torch.int32, torch.int64):
            kind = getattr(given, "dtype", type(given).__name__)
            raise TypeError(f"{name} must be an int32 or int64 tensor, got {kind}")
        if given.dim() != 1:
            raise ValueError(f"{name} must have one dimension, got shape {tuple(given.shape)}")
        try:
            bounds.append(document_bounds(given, n))
        except ValueError as error:
            raise ValueError(f"{name} must hold the boundaries of documents: {error}") from error
    if bounds[0] != bounds[1]:
        raise ValueError("cu_seq_lens_q must equal cu_seq_lens_k, documents attend to themselves, got others")
    places, ends = torch.arange(n, device=device), torch.tensor(bounds[0], device=device)
    return torch.bucketize(places, ends, right=True, out_int32=True)[None]


def attend_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """All places of each row, (b, N, h, d), with the options of `dilated_attention`; differentiable."""
    if mask is not None:
        return _attend_packed(q, k, v, mask, options)
    out: Tensor = dilated_attention(q, k, v, **options)
    return out


@uncompiled
def longest_row(mask: Tensor | None, n: int) -> int:
    """Tokens of the longest row, or of the longest document, of n places."""
    if mask is None:
        return n
    if mask.dtype == torch.bool:
        return int(mask.sum(1).max())
    return max(int(row.unique_consecutive(return_counts=True)[1].max()) for row in mask)


@uncompiled
def _attend_packed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    (b, n), is_packed = mask.shape, mask.dtype != torch.bool
    row = torch.arange(b, device=mask.device)[:, None]
    # Every place of packed documents holds a token; else the tokens are gathered, and a row is a document.
    places = slice(None) if is_packed else mask.flatten().nonzero()[:, 0]
    document = (row * (n + 1) + mask if is_packed else row.expand(b, n)).flatten()[places]
    if not len(document):
        return torch.zeros_like(q)
    counts: Tensor = torch.unique_consecutive(document, return_counts=True)[1]
    boundaries = nn.functional.pad(counts.cumsum(0), (1, 0))
    packed_q, packed_k, packed_v = (x.flatten(0, 1)[places][None] for x in (q, k, v))
    out: Tensor = dilated_attention(packed_q, packed_k, packed_v, cu_seqlens=boundaries, **options)[0]
    if not isinstance(places, slice):
        out = out.new_zeros(b * n, *out.shape[1:]).index_copy(0, places, out)
    out = out.view(b, n, *out.shape[1:])
    return out if is_packed or options.get("is_causal") else _attend_first(out, q, k, v, mask, options)


def _attend_first(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: Any) -> Tensor:
    """`out` with padded first places filled in, one row after the other: few batches have them."""
    options = {name: value for name, value in options.items() if name in OF_ATTENTION_ROWS}
    for row in (mask.any(1) & ~mask[:, 0]).nonzero()[:, 0]:
        places = mask[row].nonzero()[:, 0]
        query = torch.cat([q[row, :1], q[row, places[1:]]])[None]
        shares: Tensor = attention_rows(query, k[row, places][None], [0], **options)[0, :, 0]
        values = v[row, places].repeat_interleave(q.shape[2] // v.shape[2], 1)
        first = torch.einsum("ht,thd->hd", shares, values.to(shares.dtype))
        out = out.index_put((row, torch.zeros_like(row)), first.to(out.dtype))
    return out


@uncompiled
def attend_new(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """The last n of N places, (b, n, h, d), with the options of `attend_last`; causal, without gradients."""
    if mask is None:
        out: Tensor = attend_last(q, k, v, **options)
        return out
    is_new_token, back = mask[:, -q.shape[1] :], None
    if bool((mask[:, 1:] < mask[:, :-1]).any()):  # padding behind a token: move it to the front of its row
        order, new_order = (x.byte().argsort(stable=True, dim=1) for x in (mask, is_new_token))
        q, k, v = _reorder(q, new_order), _reorder(k, order), _reorder(v, order)
        back = new_order.argsort(1)
    out = attend_last(q, k, v, starts=k.shape[1] - mask.sum(1), **options)
    out = out if back is None else _reorder(out, back)
    return out.masked_fill(~is_new_token[..., None, None], 0.0)


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    """(b, n, h, d) in the order (b, n) of each row."""
    return x.take_along_dim(order[..., None, None], 1)
