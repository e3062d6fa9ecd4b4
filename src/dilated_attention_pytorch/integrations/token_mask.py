"""The masks that transformers makes for dilated attention: which places hold tokens, and who sees whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from ..core.tracing import uncompiled

SLIDING_WINDOW = (
    "a sliding window (segments take its place: switch it off in the config, or let such layers keep their "
    'own attention by "sliding_layers": "own")'
)


class MaskRefusal(ValueError, AttributeError):
    """A model looks into its mask. An AttributeError too, so that `hasattr` says no."""


@dataclass(frozen=True, eq=False)
class TokenMask:
    """What the attention of a layer may see. Models hand it on; those that read it themselves get an error.

    The mask tells causality, and not the layer: eager attention, too, obeys its mask alone.

    Attributes:
        is_causal: whether a token sees only those before it.
        tokens: None where all places hold tokens; bool (b, N), True at tokens; or int32 (b, N), the number of
            each token's document in its row. Shorter than the keys of a static cache.
        pairs: bool (b, 1, n, N), for a layer that keeps its own attention.
        refusal: why no layer can use this mask. Models make masks for layers that they may not have.
    """

    is_causal: bool
    tokens: Tensor | None = None
    pairs: Tensor | None = None
    refusal: str | None = None

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
    call: dict[str, Any] = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "use_vmap": use_vmap,
        "device": device,
    }
    settings = getattr(config, "dilated_attention", None) or {}
    if local_size is not None and settings.get("sliding_layers") == "own":
        never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        pairs = sdpa_mask(**call, kv_offset=kv_offset, **{**kwargs, **never})
        return TokenMask(is_causal, pairs=pairs)
    try:
        for name, value in {"local_size": local_size, "kv_offset": kv_offset or None}.items():
            if value is not None:
                raise ValueError(f"dilated attention cannot honour {SLIDING_WINDOW}, got {name}={value}")
        return TokenMask(is_causal, _tokens(**call))
    except ValueError as error:
        return TokenMask(is_causal, refusal=str(error))


def _tokens(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    mask_function: Callable[..., Any] | None,
    attention_mask: Tensor | None,
    use_vmap: bool,
    device: torch.device | str,
) -> Tensor | None:
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if use_vmap:
        raise ValueError("dilated attention cannot honour a mask function of the model's own")
    end = int(q_offset) + q_length  # of the tokens so far; a static cache has room for more
    if mask_function not in (None, causal_mask_function, bidirectional_mask_function):
        if not q_length == end == kv_length or attention_mask is not None:
            raise ValueError("dilated attention cannot honour a mask function of the model's own")
        return _documents(mask_function, batch_size, kv_length, device)
    if end > kv_length or (mask_function is bidirectional_mask_function and end != kv_length):
        raise ValueError(
            f"dilated attention has no cross attention, got {q_length} queries and {kv_length} keys"
        )
    if attention_mask is None:
        return None if end == kv_length else torch.ones(batch_size, end, dtype=torch.bool, device=device)
    if attention_mask.shape[1] < end or bool(attention_mask[:, end:].any()):
        raise ValueError(
            f"attention_mask must cover the {end} tokens so far, those in the cache too, and no others, "
            f"got shape {tuple(attention_mask.shape)}"
        )
    mask = attention_mask[:, :end].bool()
    return None if end == kv_length and bool(mask.all()) else mask


def _documents(
    mask_function: Callable[..., Any], b: int, n: int, device: torch.device | str
) -> Tensor | None:
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
