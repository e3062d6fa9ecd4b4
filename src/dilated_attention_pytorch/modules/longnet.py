"""LongNet (arXiv:2307.02486): encoder-decoder over embedded sequences, and a causal language model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_dense, check_device, check_float_dtype
from ..decode import DilatedKVCache
from .longnet_config import LongNetConfig, LongNetLMConfig
from .longnet_stack import Caches, LongNetDecoder, LongNetEncoder, magneto_gamma
from .pretrained import PretrainedModel
from .sampling import Generation, Sampling
from .transformer import Device, Dtype, Lengths, Mask


class LongNet(PretrainedModel):
    """Encoder and decoder of dilated attention over embedded sequences (b, n, d_model).

    Args:
        d_model, nhead, num_encoder_layers, num_decoder_layers, dim_feedforward: as in `nn.Transformer`.
        settings: the other fields of `LongNetConfig`, such as position_encoding ("rotary" by default) and
            cross_attention, or of the attention modules, as in `LongNetEncoder`; all is plain data.

    It embeds nothing and has no output layer: inputs and results are features. `config` holds the settings.
    """

    config_class = LongNetConfig
    config: LongNetConfig

    def __init__(
        self,
        d_model: int = 768,
        nhead: int = 12,
        num_encoder_layers: int = 12,
        num_decoder_layers: int = 12,
        dim_feedforward: int = 3072,
        *,
        device: Device = None,
        dtype: Dtype = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        layers = (num_encoder_layers, num_decoder_layers)
        settings |= {"num_encoder_layers": layers[0], "num_decoder_layers": layers[1]}
        settings |= {"d_model": d_model, "nhead": nhead, "dim_feedforward": dim_feedforward}
        self.config = config = LongNetConfig.of(**settings)
        gammas = [config.gamma_init] * 2
        if config.gamma_init is None and config.sub_layer_norm:
            # Encoders of an encoder-decoder have a gain of their own.
            gammas = [magneto_gamma(*layers, is_decoder=is_decoder) for is_decoder in (False, True)]
        options = {**config.stack_options(), "device": device, "dtype": dtype}
        self.encoder = LongNetEncoder(num_layers=layers[0], **{**options, "gamma_init": gammas[0]})
        options |= {"gamma_init": gammas[1], "cross_attention": config.cross_attention}
        self.decoder = LongNetDecoder(num_layers=layers[1], **options)

    def forward(
        self,
        src: Tensor,
        tgt: Tensor | None = None,
        *,
        src_key_padding_mask: Mask = None,
        tgt_key_padding_mask: Mask = None,
        memory_key_padding_mask: Mask = None,
        src_is_causal: bool = False,
        tgt_is_causal: bool = True,
    ) -> Tensor:
        """src (b, n, d_model), tgt (b, n_tgt, d_model) -> (b, n_tgt, d_model).

        Args:
            tgt: what the decoder reads, src by default.
            src_key_padding_mask: (b, n) bool, True where a key is ignored.
            tgt_key_padding_mask: (b, n_tgt), src_key_padding_mask by default where tgt is src by default.
            memory_key_padding_mask: what the decoder ignores of src, src_key_padding_mask by default.
            src_is_causal, tgt_is_causal: whether positions of encoder and decoder see only their past.
        """
        memory = self.encoder(src, src_key_padding_mask, src_is_causal)
        if memory_key_padding_mask is None:
            memory_key_padding_mask = src_key_padding_mask
        if tgt is None and tgt_key_padding_mask is None:
            tgt_key_padding_mask = src_key_padding_mask
        masks = (tgt_key_padding_mask, memory_key_padding_mask)
        out: Tensor = self.decoder(src if tgt is None else tgt, memory, *masks, tgt_is_causal)
        return out

    def reset_parameters(self) -> None:
        """Initialises all weights anew, as after `.to_empty()` of a model made on the meta device."""
        self.encoder.reset_parameters()
        self.decoder.reset_parameters()


class LongNetLM(PretrainedModel):
    """Causal language model of dilated attention: tokens in, logits of the next tokens out.

    Args:
        settings: the other fields of `LongNetLMConfig`, such as position_encoding ("rotary" by default),
            tie_embeddings and pad_token, or of the attention modules, as in `LongNetEncoder`; all is plain
            data.

    Embeddings are scaled by sqrt(d_model). With tie_embeddings their weights are those of the output as well,
    and stand in the state dict once. `config` holds the settings. There is no largest length.
    """

    config_class = LongNetLMConfig
    config: LongNetLMConfig

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 768,
        nhead: int = 12,
        num_layers: int = 12,
        *,
        device: Device = None,
        dtype: Dtype = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        settings |= {"vocab_size": vocab_size, "d_model": d_model, "nhead": nhead, "num_layers": num_layers}
        self.config = config = LongNetLMConfig.of(**settings)
        check_device(device)
        check_float_dtype("dtype", dtype)
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed_tokens = nn.Embedding(vocab_size, d_model, **placed)
        self.embed_dropout = nn.Dropout(config.dropout)
        options = {**config.stack_options(), **placed}
        self.decoder = LongNetDecoder(num_layers=num_layers, cross_attention=None, **options)
        self.output_projection: nn.Linear | None = None
        if not config.tie_embeddings:
            self.output_projection = nn.Linear(d_model, vocab_size, bias=False, **placed)
        self._initialise_tokens()

    def _initialise_tokens(self) -> None:
        for part in (self.embed_tokens, self.output_projection):
            if part is not None:
                nn.init.normal_(part.weight, std=self.config.d_model**-0.5)

    def reset_parameters(self) -> None:
        """Initialises all weights anew, as after `.to_empty()` of a model made on the meta device."""
        self.decoder.reset_parameters()
        self._initialise_tokens()

    def forward(
        self, tokens: Tensor, *, key_padding_mask: Mask = None, caches: Caches = None, lengths: Lengths = None
    ) -> Tensor:
        """tokens (b, n) int64 -> logits (b, n, vocab_size) of the token that follows each.

        Args:
            key_padding_mask: (b, n) bool, True where a token is ignored. Tokens never see later ones, so
                padding behind the end of a row needs none.
            caches: of `make_caches`; tokens then continue what the caches have seen, without gradients.
            lengths: with caches, (b,) how many of the n tokens are real in each row; the others' logits mean
                nothing.
        """
        return self.logits(self.features(tokens, key_padding_mask, caches=caches, lengths=lengths))

    def features(
        self, tokens: Tensor, key_padding_mask: Mask = None, *, caches: Caches = None, lengths: Lengths = None
    ) -> Tensor:
        """What `forward` computes before `logits`, (b, n, d_model)."""
        self.check_tokens(tokens)
        x = self.embed_dropout(self.embed_tokens(tokens) * math.sqrt(self.config.d_model))
        out: Tensor = self.decoder(x, None, key_padding_mask, caches=caches, lengths=lengths)
        return out

    def logits(self, features: Tensor) -> Tensor:
        """features (..., d_model) -> logits (..., vocab_size)."""
        head = self.embed_tokens if self.output_projection is None else self.output_projection
        return nn.functional.linear(features, head.weight)

    def make_caches(self, batch_size: int) -> list[DilatedKVCache]:
        """Empty caches for `forward`, one a layer; see `LongNetDecoder.make_caches`."""
        return self.decoder.make_caches(batch_size)

    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        *,
        lengths: Lengths = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | Sequence[int] | None = None,
        stop_tokens: Iterable[int] = (),
        prefill_chunk: int | None = None,
        on_token: Callable[[Tensor], object] | None = None,
    ) -> Tensor:
        """prompt (b, n) int64 -> tokens (b, n + new): each row's prompt and its continuation.

        Args:
            max_new_tokens: new tokens of a row at most; new is smaller if all rows stop before.
            lengths: (b,) how many tokens of each row are its prompt, where rows differ; the others, at the
                end of the row, are ignored. New tokens follow the last one of the row's prompt.
            do_sample, temperature, top_k, top_p, seed: how a token is chosen, see `Sampling`; by default it
                is the likeliest.
            stop_tokens: a row ends with the first of these; after that it is filled with pad_token.
            prefill_chunk: read the prompt in parts of so many tokens, which bounds its memory.
            on_token: called with the new tokens (b,) as soon as they are known.

        Runs in evaluation mode and without gradients, whatever the mode of the model, which is not switched:
        several threads may generate, and one may train. The memory and the time of a token are bounded by the
        segments, however long the text.
        """
        sampling = Sampling(do_sample, temperature, top_k, top_p, seed)
        generation = Generation(self, prompt, max_new_tokens, sampling, lengths, stop_tokens, prefill_chunk)
        new = []
        for tokens in generation:
            new.append(tokens)
            if on_token is not None:
                on_token(tokens)
        return generation.join(new)

    def stream(self, prompt: Tensor, max_new_tokens: int, **options: Any) -> Iterator[Tensor]:
        """The new tokens of `generate` one by one: tokens (b,), pad_token in rows that have stopped.

        `options` are those of `generate` but for on_token.
        """
        how = {each.name: options.pop(each.name) for each in fields(Sampling) if each.name in options}
        return iter(Generation(self, prompt, max_new_tokens, Sampling(**how), **options))

    def check_tokens(self, tokens: Tensor) -> None:
        """Raises unless tokens are (b, n) int64 on the model's device and, on the CPU, below vocab_size."""
        if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64:
            kind = getattr(tokens, "dtype", type(tokens).__name__)
            raise TypeError(f"tokens must be an int64 tensor, got {kind}")
        check_dense("tokens", tokens)
        if tokens.dim() != 2 or 0 in tokens.shape:
            raise ValueError(f"tokens must be (b, n) with b and n at least 1, got {tuple(tokens.shape)}")
        device = self.embed_tokens.weight.device
        if tokens.device != device:
            raise ValueError(f"tokens must be on the device of the model, {device}, got {tokens.device}")
        if device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = (int(x) for x in tokens.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                known = f"from 0 to vocab_size - 1 = {self.config.vocab_size - 1}"
                raise ValueError(f"tokens must be {known}, got {low if low < 0 else high}")
