"""Transformer layers over dilated attention, and stacks of them: pre-norm MAGNETO blocks (arXiv:2210.06423).

Attributes have the names of torchscale, so that its state dicts load as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..checks import check_flags, keyword_names, one_of, refuse_unknown
from ..decode import DilatedKVCache
from .attention import Branch, Device, Dtype, Mask
from .call_checks import check_caches, check_embedded, check_in_step, explain_mismatch
from .longnet_config import LongNetEncoderConfig, StackConfig
from .multihead import MULTIHEAD_KINDS, POSITION_OPTIONS, MultiheadDilatedAttention, MultiheadModule
from .parts import CROSS_ATTENTIONS, DenseAttention, DropPath, FeedForward, check_lengths, magneto_gamma
from .pretrained import PretrainedModel

Lengths = Sequence[int] | Tensor | None
Caches = Sequence[DilatedKVCache] | None
_NOT_OF_LAYERS = ("drop_path_rate", "normalize_output", "checkpoint_activations", "attention_options")


class DilatedTransformerEncoderLayer(nn.Module):
    """x + self_attn(norm(x)), then x + ffn(norm(x)); called like `nn.TransformerEncoderLayer`.

    Args:
        d_model, nhead, dim_feedforward: features, heads, and features inside the feed-forward part.
        segment_lengths, dilation_rates: of the attention, one entry a branch; or max_length, the longest
            sequence, for which `branches_for` gives them.
        dropout, attention_dropout, activation_dropout: of both outputs, of attention weights, and inside the
            feed-forward part; in training only.
        drop_path: probability that a row of the batch skips a part, in training only.
        activation: "gelu", "relu" or "swish".
        sub_layer_norm: MAGNETO's norms before the last projection of either part.
        gamma_init: gain of the initial weights; `magneto_gamma` gives it by depth.
        kind: of the attention, one of `MULTIHEAD_KINDS`.
        batch_first: tensors are (b, n, d_model); (n, b, d_model) if False.
        attention_options: such as num_kv_heads and position_encoding; see `MultiheadDilatedAttention`.

    Always pre-norm: there is no norm_first. In an `nn.TransformerEncoder` pass enable_nested_tensor=False.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        segment_lengths: Branch = None,
        dilation_rates: Branch = None,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str = "gelu",
        layer_norm_eps: float = 1e-5,
        *,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        drop_path: float = 0.0,
        sub_layer_norm: bool = True,
        gamma_init: float = 1.0,
        kind: str = "standard",
        batch_first: bool = True,
        device: Device = None,
        dtype: Dtype = None,
        **attention_options: Any,
    ) -> None:
        super().__init__()
        check_flags(sub_layer_norm=sub_layer_norm, batch_first=batch_first)
        one_of("kind", kind, tuple(MULTIHEAD_KINDS))
        refuse_unknown(type(self).__name__, attention_options, self.option_names(kind))
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        shared = {"layer_norm_eps": layer_norm_eps, "gamma_init": gamma_init, **placed}
        shared["layer_norm"] = sub_layer_norm
        make: Callable[..., MultiheadDilatedAttention] = MULTIHEAD_KINDS[kind]
        how = (segment_lengths, dilation_rates, attention_dropout)
        self.self_attn = make(d_model, nhead, *how, batch_first=batch_first, **shared, **attention_options)
        self.self_attn_layer_norm = nn.LayerNorm(d_model, layer_norm_eps, **placed)
        inside: dict[str, Any] = {"activation": activation, "activation_dropout": activation_dropout}
        self.ffn = FeedForward(d_model, dim_feedforward, dropout=dropout, **inside, **shared)
        self.final_layer_norm = nn.LayerNorm(d_model, layer_norm_eps, **placed)
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(drop_path, batch_first=batch_first)

    @classmethod
    def option_names(cls, kind: str = "standard") -> frozenset[str]:
        """The keywords that the class takes, those of its attention included."""
        return keyword_names(cls) | MULTIHEAD_KINDS[kind].option_names()

    def reset_parameters(self) -> None:
        """Initialises all parts, as after `.to_empty()`."""
        for part in self.children():
            if isinstance(part, (MultiheadModule, FeedForward, nn.LayerNorm)):
                part.reset_parameters()

    def forward(
        self,
        src: Tensor,
        src_mask: Mask = None,
        src_key_padding_mask: Mask = None,
        is_causal: bool = False,
        *,
        cache: DilatedKVCache | None = None,
        lengths: Lengths = None,
    ) -> Tensor:
        """src (b, n, d_model) -> (b, n, d_model).

        Args:
            src_mask: None or the square causal mask; is_causal=True is the cheap way to say it.
            src_key_padding_mask: (b, n) bool, True where a key is ignored. It hides keys only: the output has
                values at padded positions, too.
            cache, lengths: as in `MultiheadModule.forward`, with is_causal=True.
        """
        self._check_input("src", src)
        masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask}
        x = self._attend_self(src, **masks, is_causal=is_causal, cache=cache, lengths=lengths)
        return self._feed_forward(x)

    def _check_input(self, name: str, x: Tensor) -> None:
        layout = "(b, n, d_model)" if self.self_attn.batch_first else "(n, b, d_model)"
        check_embedded(name, x, self.self_attn.embed_dim, layout)

    def _attend_self(self, x: Tensor, **call: Any) -> Tensor:
        try:
            normed = self.self_attn_layer_norm(x)
        except RuntimeError:
            explain_mismatch(self.self_attn_layer_norm.weight, "the weights", input=x)
            raise
        out: Tensor = x + self.drop_path(self.dropout(self.self_attn(normed, **call)[0]))
        return out

    def _feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop_path(self.ffn(self.final_layer_norm(x)))
        return out


class DilatedTransformerDecoderLayer(DilatedTransformerEncoderLayer):
    """The encoder layer with attention to a memory in between; called like `nn.TransformerDecoderLayer`.

    Args:
        cross_attention: "dense" attends to all of a memory of any length, "dilated" in the pattern of the
            self-attention to a memory of the same length, whose positions correspond, None to no memory.
            Without sub-layer norm and position encoding, as in torchscale. "dense" is refused in a ring, of
            whose processes each has a part of the memory. Of the attention's options it has num_kv_heads,
            attention_dropout, bias and softmax_scale; the others are of dilated attention only.
        Others: as in `DilatedTransformerEncoderLayer`.

    With a cache dense attention projects the memory anew in each call.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        segment_lengths: Branch = None,
        dilation_rates: Branch = None,
        *others: Any,
        cross_attention: str | None = "dense",
        **options: Any,
    ) -> None:
        if cross_attention is not None:
            one_of("cross_attention", cross_attention, CROSS_ATTENTIONS)
        super().__init__(d_model, nhead, segment_lengths, dilation_rates, *others, **options)
        self.cross_attention = cross_attention
        self.encoder_attn: MultiheadModule | None = None
        self.encoder_attn_layer_norm: nn.LayerNorm | None = None
        if cross_attention is None:
            return
        own: MultiheadModule = self.self_attn
        placed: dict[str, Any] = {name: options.get(name) for name in ("device", "dtype")}
        self.encoder_attn_layer_norm = nn.LayerNorm(d_model, self.self_attn_layer_norm.eps, **placed)
        shape = {name: getattr(own, name) for name in ("num_kv_heads", "gamma_init", "batch_first")}
        shape |= {"layer_norm": False, **placed}
        dropout = options.get("attention_dropout", 0.0)
        if cross_attention == "dense":
            dense, bias = DenseAttention(options.get("softmax_scale"), dropout), options.get("bias", True)
            self.encoder_attn = MultiheadModule(d_model, nhead, dense, bias=bias, **shape)
        else:
            unlike = {*keyword_names(DilatedTransformerEncoderLayer), *POSITION_OPTIONS, *shape}
            pattern = {name: value for name, value in options.items() if name not in unlike}
            make: Callable[..., MultiheadModule] = type(own)
            branches = (segment_lengths, dilation_rates, dropout)
            self.encoder_attn = make(d_model, nhead, *branches, **shape, **pattern)

    def forward(  # type: ignore[override]
        self,
        tgt: Tensor,
        memory: Tensor | None = None,
        tgt_mask: Mask = None,
        memory_mask: Mask = None,
        tgt_key_padding_mask: Mask = None,
        memory_key_padding_mask: Mask = None,
        tgt_is_causal: bool = True,
        memory_is_causal: bool = False,
        *,
        cache: DilatedKVCache | None = None,
        lengths: Lengths = None,
    ) -> Tensor:
        """tgt (b, n, d_model) and memory (b, m, d_model) -> (b, n, d_model).

        Causal by default, unlike the layer of torch, whose `nn.TransformerDecoder` says tgt_is_causal=False
        unless it gets the causal tgt_mask.

        Args:
            memory: needed unless cross_attention is None.
            tgt_mask, memory_mask: None or the square causal mask, as in `MultiheadModule.forward`.
            tgt_key_padding_mask, memory_key_padding_mask: (b, n) and (b, m) bool, True where ignored.
            cache, lengths: of the self-attention, as in `MultiheadModule.forward`.
        """
        self._check_input("tgt", tgt)
        check_flags(memory_is_causal=memory_is_causal)
        masks = {"attn_mask": tgt_mask, "key_padding_mask": tgt_key_padding_mask}
        cross = {"attn_mask": memory_mask, "key_padding_mask": memory_key_padding_mask}
        self._check_memory(tgt, memory, {**cross, "is_causal": memory_is_causal}, cache)
        x = self._attend_self(tgt, **masks, is_causal=tgt_is_causal, cache=cache, lengths=lengths)
        if self.encoder_attn is not None and self.encoder_attn_layer_norm is not None:
            normed = self.encoder_attn_layer_norm(x)
            attended, _ = self.encoder_attn(normed, memory, **cross, is_causal=memory_is_causal)
            x = x + self.drop_path(self.dropout(attended))
        return self._feed_forward(x)

    def _check_memory(
        self, tgt: Tensor, memory: Tensor | None, call: dict[str, Any], cache: DilatedKVCache | None
    ) -> None:
        """Raises where the layer cannot read such a memory; with a cache all that cross attention would."""
        if self.encoder_attn is None:
            names = ("memory", "memory_mask", "memory_key_padding_mask", "memory_is_causal")
            given = dict(zip(names, (memory, *call.values()), strict=True)).items()
            if found := [name for name, value in given if value is not None and value is not False]:
                raise ValueError(f"a layer without cross attention takes no memory, got {', '.join(found)}")
            return
        if memory is None:
            raise ValueError(f"{self.cross_attention} cross attention needs a memory, got None")
        if self.cross_attention == "dense" and self.self_attn.is_sharded:
            hint = "cross_attention='dilated' goes around their ring"
            rule = "dense cross attention needs all of the memory in each process"
            raise ValueError(f"{rule}, got layers whose sequences several processes share ({hint})")
        if cache is None:
            return
        if self.cross_attention == "dilated":
            rule = "dilated cross attention needs all of the target beside its memory"
            raise ValueError(f"{rule}, got a cache (cross_attention='dense' decodes)")
        # Before self-attention runs, or the cache would take tokens that then find no memory.
        self._check_input("memory", memory)
        explain_mismatch(tgt, "tgt", memory=memory)
        self.encoder_attn.check_call(tgt, memory, **call)
        time = 1 if self.self_attn.batch_first else 0
        check_lengths(tgt.shape[time], memory.shape[time], call["is_causal"])


class LongNetStack(PretrainedModel):
    """Layers, one after the other, and a final norm. It can be saved where its settings are plain data."""

    config_class: ClassVar[type[StackConfig]] = LongNetEncoderConfig
    _layer_class: type[DilatedTransformerEncoderLayer] = DilatedTransformerEncoderLayer

    def __init__(
        self,
        d_model: int = 768,
        nhead: int = 12,
        num_layers: int = 12,
        *,
        device: Device = None,
        dtype: Dtype = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if "batch_first" in settings:
            raise TypeError("batch_first is no option of a stack, whose tensors are (b, n, d_model)")
        settings |= {"d_model": d_model, "nhead": nhead, "num_layers": num_layers}
        self.config = config = self.config_class.of(**settings)
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        options = {**config.stack_options(), **config.attention_options, **placed}
        for name in _NOT_OF_LAYERS:
            del options[name]
        cross_attention = getattr(config, "cross_attention", None)
        if self._layer_class is DilatedTransformerDecoderLayer:
            options["cross_attention"] = cross_attention
        if config.gamma_init is None:
            # Alone, encoder and decoder have one gain; behind an encoder its number of layers plays no part.
            gain = magneto_gamma(0 if cross_attention is None else 1, num_layers, is_decoder=True)
            options["gamma_init"] = gain if config.sub_layer_norm else 1.0
        self.d_model, self.checkpoint_activations = d_model, config.checkpoint_activations
        rates = [config.drop_path_rate * depth / max(1, num_layers - 1) for depth in range(num_layers)]
        self.layers: Any = nn.ModuleList(self._layer_class(**options, drop_path=rate) for rate in rates)
        norm = nn.LayerNorm(d_model, config.layer_norm_eps, **placed) if config.normalize_output else None
        self.layer_norm: nn.LayerNorm | None = norm

    def reset_parameters(self) -> None:
        """Initialises all layers, as after `.to_empty()`."""
        for layer in self.layers:
            layer.reset_parameters()
        if self.layer_norm is not None:
            self.layer_norm.reset_parameters()

    def make_caches(
        self, batch_size: int, device: Device = None, dtype: Dtype = None
    ) -> list[DilatedKVCache]:
        """An empty cache a layer, for `caches` of `forward`; see `MultiheadModule.make_cache`."""
        return [layer.self_attn.make_cache(batch_size, device, dtype) for layer in self.layers]

    @property
    def is_sharded(self) -> bool:
        """Whether inputs are parts of a sequence that several processes share."""
        return bool(self.layers[0].self_attn.is_sharded)

    def _run(
        self, x: Tensor, call: dict[str, Any], caches: Caches, return_all: bool
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Applies layer by layer, each with the arguments `call` and its cache, then the final norm."""
        check_embedded("x", x, self.d_model, "(b, n, d_model)")
        check_flags(return_all=return_all)
        if caches is not None:
            self._check_cached(x, call, caches)
        recompute = self.checkpoint_activations and self.training and torch.is_grad_enabled()
        states = [x] if return_all else []
        for index, layer in enumerate(self.layers):
            if recompute and caches is None:
                x = checkpoint(layer, x, **call, use_reentrant=False)
            else:
                x = layer(x, **call, cache=None if caches is None else caches[index])
            if return_all:
                states.append(x)
        out = x if self.layer_norm is None else self.layer_norm(x)
        return (out, states) if return_all else out

    def _check_cached(self, x: Tensor, call: dict[str, Any], caches: Sequence[DilatedKVCache]) -> None:
        """Raises before any layer runs: caches of which some had taken the tokens would be out of step."""
        check_caches(caches, len(self.layers))
        given = [each for each in (x, *call.values()) if isinstance(each, Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*given, *self.layers.parameters())):
            hint = "call it under torch.no_grad() or torch.inference_mode()"
            raise ValueError(f"with caches there is no gradient: {hint}, got tensors that require one")
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.self_attn.check_call(x, is_causal=True, cache=cache)
        check_in_step(caches)
