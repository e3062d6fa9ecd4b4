"""Multihead attention by kind: each a name and a set of options over `MultiheadModule`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..checks import keyword_names, refuse_unknown
from ..spec import resolve_branches
from .attention import AttentionModule, DilatedAttention, ImprovedDilatedAttention
from .block_sparse import BlockSparseDilatedAttention, BlockSparseRingDilatedAttention
from .multihead_module import MultiheadModule
from .positions import DEFAULT_ROTARY_BASE, DEFAULT_XPOS_SCALE_BASE, make_position_encoding
from .ring import RingDilatedAttentionV2

__all__ = [
    "MULTIHEAD_KINDS",
    "BlockSparseMultiheadDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "ImprovedMultiheadDilatedAttention",
    "MultiheadDilatedAttention",
    "MultiheadModule",
    "RingMultiheadDilatedAttention",
]

_FIXED = ("attention", "fused_qkv", "positions")  # arguments of `MultiheadModule` that a kind decides
POSITION_OPTIONS = ("position_encoding", "rotary_base", "xpos_scale_base")


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
