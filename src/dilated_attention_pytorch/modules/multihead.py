"""Multihead attention by kind: each a name and a set of options over `MultiheadSkin`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..checks import refuse_unknown
from ..spec import resolve_branches
from .attention import DilatedAttention
from .block_sparse import BlockSparseDilatedAttention, BlockSparseRingDilatedAttention
from .multihead_skin import MultiheadSkin
from .positions import DEFAULT_ROTARY_BASE, DEFAULT_XPOS_SCALE_BASE, make_position_encoding
from .presets import ImprovedDilatedAttention
from .ring import RingDilatedAttentionV2
from .skin import AttentionSkin

__all__ = [
    "MULTIHEAD_KINDS",
    "BlockSparseMultiheadDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "ImprovedMultiheadDilatedAttention",
    "MultiheadDilatedAttention",
    "MultiheadSkin",
    "RingMultiheadDilatedAttention",
]

POSITION_OPTIONS = ("position_encoding", "rotary_base", "xpos_scale_base")


class MultiheadDilatedAttention(MultiheadSkin):
    """Projections around `DilatedAttention`: called like `nn.MultiheadAttention`, whose state dict it loads.

    Args:
        embed_dim, num_heads: features of input and output, split evenly over the heads.
        segment_lengths, dilation_rates, attention_options: of `DilatedAttention`.
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

    _attention_class: type[AttentionSkin] = DilatedAttention
    _fuses_qkv = False

    @classmethod
    def option_names(cls) -> frozenset[str]:
        """The keywords that the class takes, those of its attention included."""
        own = inspect.signature(MultiheadDilatedAttention.__init__).parameters
        return cls._attention_class.option_names() | {*own} - {"self", "attention_options"}

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        dropout: float | None = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        batch_first: bool = True,
        num_kv_heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        max_length: int | None = None,
        position_encoding: str | None = None,
        rotary_base: float = DEFAULT_ROTARY_BASE,
        xpos_scale_base: float = DEFAULT_XPOS_SCALE_BASE,
        **attention_options: Any,
    ) -> None:
        refuse_unknown(type(self).__name__, attention_options, self.option_names())
        if "attention_dropout" in attention_options and dropout == 0.0:
            dropout = None  # not given, so that the other name decides
        segment_lengths, dilation_rates = resolve_branches(
            segment_lengths, dilation_rates, max_length, num_heads
        )
        # Without device and dtype: there they say what inputs must have, which autocast and .to() change.
        make: Callable[..., AttentionSkin] = self._attention_class
        attention = make(
            segment_lengths=segment_lengths,
            dilation_rates=dilation_rates,
            dropout=dropout,
            **attention_options,
        )
        super().__init__(
            embed_dim,
            num_heads,
            attention,
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

    _attention_class: type[AttentionSkin] = BlockSparseDilatedAttention
    _fuses_qkv = True


class BlockSparseRingMultiheadDilatedAttention(BlockSparseMultiheadDilatedAttention):
    """`MultiheadDilatedAttention` around `BlockSparseRingDilatedAttention`; takes its `sparse_config`.

    With several processes it takes parts of the sequence, as `RingMultiheadDilatedAttention` does.
    """

    _attention_class = BlockSparseRingDilatedAttention


MULTIHEAD_KINDS: Mapping[str, type[MultiheadDilatedAttention]] = {
    "standard": MultiheadDilatedAttention,
    "improved": ImprovedMultiheadDilatedAttention,
    "ring": RingMultiheadDilatedAttention,
    "block_sparse": BlockSparseMultiheadDilatedAttention,
    "block_sparse_ring": BlockSparseRingMultiheadDilatedAttention,
}
