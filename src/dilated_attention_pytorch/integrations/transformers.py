"""`attn_implementation="dilated"` for models of Hugging Face transformers.

    from dilated_attention_pytorch.integrations.transformers import register

    register()
    config.dilated_attention = {"segment_lengths": [2048, 8192], "dilation_rates": [1, 4]}
    model = AutoModelForCausalLM.from_pretrained(name, config=config, attn_implementation="dilated")

Nothing of transformers is imported before `register` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.tracing import uncompiled
from ..ops import document_bounds
from ..ring import group_size
from .settings import check_settings
from .token_rows import attend_new, attend_rows

# Settings that no new token of a causal sequence can feel: `attend_last` does not take them.
WITHOUT_EFFECT_ON_NEW = ("tail", "detach_mixing", "memory", "use_pattern_cache")

# What models hand to their attention that changes its result, and that dilated attention has no place for.
REFUSED = {
    "sliding_window": "a sliding window (segments take its place: switch it off in the config)",
    "softcap": "soft capping of the scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "output_attentions": "attention weights as an output (dilated_attention_pytorch.attention_rows has them)",
    "cache": "a paged cache",
    "indices": "a model that selects its own keys",
    "block_indices": "a model that selects its own blocks of keys",
}


def register(name: str = "dilated") -> None:
    """Makes `attn_implementation=name` known to transformers, with its mask function. May be repeated.

    Models then read `config.dilated_attention`, see `check_settings`. Raises ImportError without
    transformers, and ValueError for the name of another implementation.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"name must be an identifier, got {name!r}")
    attentions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    if attentions.get(name, dilated_attention_forward) is not dilated_attention_forward or (
        name == "eager" or masks.get(name, dilated_attention_mask) is not dilated_attention_mask
    ):
        raise ValueError(f"name must not be that of another attention implementation, got {name!r}")
    # transformers looks for these words in a name, and then expects what belongs to them.
    if any(word in name for word in ("flash", "flex", "sdpa", "paged")):
        raise ValueError(f"name must not contain flash, flex, sdpa or paged, got {name!r}")
    AttentionInterface.register(name, dilated_attention_forward)
    AttentionMaskInterface.register(name, dilated_attention_mask)


def use_dilated_attention(model: nn.Module, settings: Mapping[str, Any], *, name: str = "dilated") -> None:
    """Switches a model of transformers to dilated attention, all of its sub-models too.

    Args:
        model: a `PreTrainedModel`.
        settings: what `config.dilated_attention` will hold, see `check_settings`.
        name: under which to register.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a PreTrainedModel of transformers, got {type(model).__name__}")
    plain = check_settings(settings)
    register(name)
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    fixed = [type(each).__name__ for each in models if not each._can_set_attn_implementation()]
    if fixed:
        raise ValueError(
            f"model must take its attention from transformers' AttentionInterface, got {', '.join(fixed)}"
        )
    for each in models:
        each.config.dilated_attention = dict(plain)
    model.set_attn_implementation(name)


@uncompiled
def dilated_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """What transformers calls to make the mask that `dilated_attention_forward` gets.

    Returns:
        None where all kv_length positions are tokens; or a bool mask (b, tokens so far), True at tokens and
        False at padding, which is shorter than the keys of a static cache; or an int32 mask (b, n), the
        number of the document of each token, where position_ids pack several into a row.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    for name, value in {"local_size": local_size, "kv_offset": kv_offset or None}.items():
        if value is not None:
            window = REFUSED["sliding_window"]
            raise ValueError(f"dilated attention cannot honour {window}, got {name}={value}")
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


def dilated_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' `AttentionInterface`.

    Args:
        module: the attention layer; its `config.dilated_attention` holds the settings.
        query: (b, h, n, d), the last n of N positions.
        key, value: (b, h_kv, N, d), values may have fewer features; what lies beyond the mask's length is
            the unused room of a static cache.
        attention_mask: what `dilated_attention_mask` returns.
        dropout, scaling: of the probabilities and of the scores; 0 and 1 / sqrt(d) by default.
        is_causal: by default what the module says.

    Returns:
        (out (b, n, h, d) with the features of the values, None). Padding gives zeros.

    The segments of a row count its tokens: padding, on either side or between, takes no place in them. With
    n == N, and whenever a gradient is needed, this is `dilated_attention`; else the new tokens read only the
    keys that their segments select.
    """
    _refuse(module, query, kwargs)
    settings = {**check_settings(_settings_of(module)), "scale": scaling}
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    features = value.shape[-1]
    if features < query.shape[-1]:  # multi-head latent attention
        value = nn.functional.pad(value, (0, query.shape[-1] - features))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask = _check_mask(attention_mask, kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k"), q, k)
    if mask is not None:
        k, v = k[:, : mask.shape[1]], v[:, : mask.shape[1]]
    n, total = q.shape[1], k.shape[1]
    if n > total or (n < total and not causal):
        raise ValueError(f"dilated attention has no cross attention, got {n} queries and {total} keys")
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if n == total or needs_gradient or dropout:
        if n < total:
            q = nn.functional.pad(q, (0, 0, 0, 0, total - n, 0))  # in front, where nothing is read
        out = attend_rows(q, k, v, mask, dropout_p=dropout, is_causal=bool(causal), **settings)
        return out[:, total - n :, :, :features], None
    options = {name: value for name, value in settings.items() if name not in WITHOUT_EFFECT_ON_NEW}
    return attend_new(q, k, v, mask, **options)[..., :features], None


def _refuse(module: nn.Module, query: Tensor, kwargs: Mapping[str, Any]) -> None:
    for name, what in REFUSED.items():
        value = kwargs.get(name)
        if value is not None and value is not False:
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"dilated attention cannot honour {what}: {name} must be None, got {shown}")
    is_decoder, is_causal = getattr(module, "is_decoder", False), getattr(module, "is_causal", True)
    is_cross = getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__
    if is_cross or (is_decoder and not is_causal):
        raise ValueError(f"dilated attention has no cross attention, got {type(module).__name__}")
    heads = getattr(getattr(module, "config", None), "num_attention_heads", query.shape[1])
    if heads != query.shape[1] and group_size() > 1:
        raise ValueError(
            f"dilated attention needs all {heads} heads of a layer on one rank, got {query.shape[1]}: "
            "tensor parallelism is not supported here"
        )


def _settings_of(module: nn.Module) -> Mapping[str, Any]:
    config = getattr(module, "config", None)
    settings: Mapping[str, Any] | None = getattr(config, "dilated_attention", None)
    if settings is None:
        raise ValueError(
            "dilated attention needs its settings, as in config.dilated_attention = "
            '{"segment_lengths": [2048, 8192], "dilation_rates": [1, 4]}, '
            f"got none in the {type(config).__name__} of {type(module).__name__}"
        )
    return settings


def _check_mask(
    mask: Tensor | None, boundaries: Tensor | None, key_boundaries: Tensor | None, q: Tensor, k: Tensor
) -> Tensor | None:
    """The mask of a call; boundaries of documents, as for flash attention, become one."""
    if mask is not None:
        # A mask of a model's own making, which is int64 or float, must not pass for the numbers of documents.
        is_ours = isinstance(mask, Tensor) and mask.dim() == 2 and mask.dtype in (torch.bool, torch.int32)
        if not is_ours or mask.shape[0] != q.shape[0] or not q.shape[1] <= mask.shape[1] <= k.shape[1]:
            raise ValueError(
                "attention_mask must be bool with one entry a token, (b, N), not one a pair of tokens, got "
                f"{getattr(mask, 'dtype', type(mask).__name__)} of shape {tuple(getattr(mask, 'shape', ()))} "
                f"for {tuple(k.shape[:2])} keys"
            )
    is_padded = mask is not None and mask.dtype == torch.bool
    if boundaries is not None or key_boundaries is not None:
        if q.shape[0] != 1 or is_padded:
            raise ValueError(
                "cu_seq_lens_q must pack documents into one row without padding, got "
                f"{q.shape[0]} rows{' with padding' if is_padded else ''}"
            )
        mask = _packed(boundaries, key_boundaries, q, k)
    if mask is not None and mask.dtype != torch.bool and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"packed documents cannot continue from a cache, got {q.shape[1]} of {k.shape[1]} tokens"
        )
    return mask


@uncompiled
def _packed(boundaries: Tensor | None, key_boundaries: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """Numbers of the documents (1, N) between boundaries, which must be those of queries and keys alike."""
    own = _checked_bounds("cu_seq_lens_q", boundaries, k.shape[1])
    if own != _checked_bounds("cu_seq_lens_k", key_boundaries, k.shape[1]):
        raise ValueError(
            "cu_seq_lens_q must equal cu_seq_lens_k, as documents attend to themselves, got others"
        )
    places = torch.arange(k.shape[1], device=q.device)
    return torch.bucketize(places, torch.tensor(own, device=q.device), right=True, out_int32=True)[None]


def _checked_bounds(name: str, boundaries: Tensor | None, n: int) -> tuple[int, ...]:
    if not isinstance(boundaries, Tensor) or boundaries.dtype not in (torch.int32, torch.int64):
        kind = getattr(boundaries, "dtype", type(boundaries).__name__)
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {kind}")
    if boundaries.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(boundaries.shape)}")
    try:
        return document_bounds(boundaries, n)
    except ValueError as error:
        raise ValueError(f"{name} must hold the boundaries of documents: {error}") from error
