"""Names from the requirement documents: each a set of options over `DilatedAttention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.attention_buffer_manager import AttentionBufferManager, shared_buffer_manager
from .attention import DEFAULT_DILATION_RATES, DEFAULT_SEGMENT_LENGTHS, DilatedAttention


class ImprovedDilatedAttention(DilatedAttention):
    """`DilatedAttention` under the name `dropout` for its dropout option. It computes the same."""

    def __init__(
        self,
        segment_lengths: Sequence[int] = DEFAULT_SEGMENT_LENGTHS,
        dilation_rates: Sequence[int] = DEFAULT_DILATION_RATES,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, dropout=dropout, **options)


class ImprovedDilatedAttentionV2(ImprovedDilatedAttention):
    """`ImprovedDilatedAttention` whose scratch and large results come from a buffer manager.

    Args:
        enable_buffer_manager: False takes memory as `DilatedAttention` does.
        enable_buffer_reuse, enable_preallocation: of the manager; see `AttentionBufferManager`.
        buffer_manager: one of your own. By default all modules with the same settings share one, so that a
            model of many layers holds the scratch of a single one.
        options: those of `DilatedAttention`. With `enable_memory_pool` the manager takes its memory from the
            global pool, with `lightweight_pool` it leaves out what costs time.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int] = DEFAULT_SEGMENT_LENGTHS,
        dilation_rates: Sequence[int] = DEFAULT_DILATION_RATES,
        dropout: float = 0.0,
        *,
        enable_buffer_manager: bool = True,
        enable_buffer_reuse: bool = True,
        enable_preallocation: bool = False,
        buffer_manager: AttentionBufferManager | None = None,
        **options: Any,
    ) -> None:
        if buffer_manager is not None and not isinstance(buffer_manager, AttentionBufferManager):
            raise TypeError(
                f"buffer_manager must be an AttentionBufferManager, got {type(buffer_manager).__name__}"
            )
        if buffer_manager is None and enable_buffer_manager:
            buffer_manager = shared_buffer_manager(
                enable_buffer_reuse,
                enable_preallocation,
                options.get("lightweight_pool", False),
                options.get("enable_profiling", False),
                options.get("enable_memory_pool", False),
            )
        object.__setattr__(self, "buffer_manager", buffer_manager if enable_buffer_manager else None)
        super().__init__(segment_lengths, dilation_rates, dropout, **options)

    buffer_manager: AttentionBufferManager | None

    def get_buffer_stats(self) -> dict[str, Any]:
        """The statistics of the buffer manager; empty without one."""
        return {} if self.buffer_manager is None else self.buffer_manager.get_stats()

    def cleanup_buffers(self) -> None:
        """Frees all idle buffers of the manager, also those of other modules that share it."""
        if self.buffer_manager is not None:
            self.buffer_manager.clear_cache()

    def _choose_memory(self) -> str:
        return super()._choose_memory() if self.buffer_manager is None else self.buffer_manager.name
