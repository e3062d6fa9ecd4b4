"""`DilatedAttention`: dilated attention with its options kept in a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..functional import attend, spec_of
from ..plan import DEFAULT_WORKSPACE_BYTES
from ..spec import DilatedSpec, HeadMixing, HeadOffsets, Tail, resolve_branches
from .skin import AttentionSkin, named_options, one_dropout


class DilatedAttention(AttentionSkin):
    """Dilated attention over (b, n, h, d) tensors; see `dilated_attention` for what it computes.

    Args:
        segment_lengths, dilation_rates: one entry a branch; given together, or both left out.
        max_length: the longest sequence, for which `branches_for` gives the branches that are left out.
        softmax_scale: factor of the scores, 1 / sqrt(d) by default.
        attention_dropout: probability to drop an attention weight, in training only; also `dropout`.
        head_mixing, head_offsets, tail, detach_mixing: as in `dilated_attention`.
        kernel, workspace_bytes: as in `Execution`.
        enable_memory_pool: scratch and large results come from the global memory pool, and a call that runs
            out of memory frees what is idle and tries again in smaller tiles. See docs/memory.md.
        lightweight_pool: of the pool only what costs next to nothing: scratch is reused, results are fresh.
        enable_profiling: more figures in the statistics of the pattern cache and the pool in use. Both serve
            all modules, and so does this switch.
        allow_isolated_segments: a call with more tokens than the longest segment does not warn; see
            `AttentionSkin.forward`.
        use_pattern_cache: plans are kept by shape in the global pattern cache; False plans each call anew.
        device, dtype: what the inputs must have, checked when given. The module has no parameters of its own.
    """

    workspace_default = DEFAULT_WORKSPACE_BYTES

    @named_options
    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        *,
        max_length: int | None = None,
        allow_isolated_segments: bool = False,
        dropout: float | None = None,
        enable_memory_pool: bool = False,
        enable_profiling: bool = False,
        lightweight_pool: bool = False,
        use_pattern_cache: bool = True,
        head_mixing: HeadMixing = "all",
        head_offsets: HeadOffsets = "interleaved",
        tail: Tail = "exact",
        detach_mixing: bool = False,
        kernel: str = "auto",
        workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        spec = DilatedSpec(
            *resolve_branches(segment_lengths, dilation_rates, max_length),
            scale=softmax_scale,
            dropout_p=one_dropout(attention_dropout, dropout),
            head_mixing=head_mixing,
            head_offsets=head_offsets,
            tail=tail,
            detach_mixing=detach_mixing,
        )
        super().__init__(
            spec,
            allow_isolated_segments=allow_isolated_segments,
            enable_memory_pool=enable_memory_pool,
            enable_profiling=enable_profiling,
            lightweight_pool=lightweight_pool,
            use_pattern_cache=use_pattern_cache,
            kernel=kernel,
            workspace_bytes=workspace_bytes,
            device=device,
            dtype=dtype,
        )

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None
    ) -> Tensor:
        spec = self._call_spec(is_causal)
        return attend(query, key, value, spec, self._execution, key_mask=mask)[0]

    def _call_spec(self, is_causal: bool) -> DilatedSpec:
        """What a call computes."""
        spec = self.spec
        return spec_of(
            spec.segment_lengths,
            spec.dilation_rates,
            is_causal,
            spec.scale,
            self._dropout_now,
            spec.head_mixing,
            spec.head_offsets,
            spec.tail,
            spec.detach_mixing,
        )

    def _changed(self) -> dict[str, tuple[Any, Any]]:
        spec = self.spec
        return {
            "head_mixing": (spec.head_mixing, "all"),
            "head_offsets": (spec.head_offsets, "interleaved"),
            "tail": (spec.tail, "exact"),
            "detach_mixing": (spec.detach_mixing, False),
            **super()._changed(),
        }
