"""Names from the requirement documents: each a set of options over `DilatedAttention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..checks import check_flags
from ..core import MemoryPool
from ..core.attention_buffer_manager import AttentionBufferManager, Settings, shared_buffer_manager
from .attention import DilatedAttention


class ImprovedDilatedAttention(DilatedAttention):
    """`DilatedAttention` under the name `dropout` for its dropout option. It computes the same."""

    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        dropout: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, dropout=dropout, **options)


class ImprovedDilatedAttentionV2(ImprovedDilatedAttention):
    """`ImprovedDilatedAttention` whose scratch and large results come from a buffer manager.

    Args:
        enable_buffer_manager: False takes memory as `DilatedAttention` does.
        enable_buffer_reuse, enable_preallocation: of the manager; see `AttentionBufferManager`.
        buffer_manager: one of your own, with its own settings. By default all modules with the same settings
            share one, so that a model of many layers holds the scratch of a single one.
        options: those of `DilatedAttention`. With `enable_memory_pool` the manager takes its memory from the
            global pool, with `lightweight_pool` it leaves out what costs time.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        dropout: float | None = None,
        *,
        enable_buffer_manager: bool = True,
        enable_buffer_reuse: bool = True,
        enable_preallocation: bool = False,
        buffer_manager: AttentionBufferManager | None = None,
        **options: Any,
    ) -> None:
        pooling = {
            name: options.get(name, False)
            for name in ("lightweight_pool", "enable_profiling", "enable_memory_pool")
        }
        check_flags(
            enable_buffer_manager=enable_buffer_manager,
            enable_buffer_reuse=enable_buffer_reuse,
            enable_preallocation=enable_preallocation,
            **pooling,
        )
        if buffer_manager is not None and not isinstance(buffer_manager, AttentionBufferManager):
            raise TypeError(
                f"buffer_manager must be an AttentionBufferManager, got {type(buffer_manager).__name__}"
            )
        if buffer_manager is not None and not enable_buffer_manager:
            raise ValueError("a buffer_manager is used or not, got one and enable_buffer_manager=False")
        if not enable_buffer_manager and (enable_preallocation or not enable_buffer_reuse):
            raise ValueError(
                "enable_buffer_reuse=False and enable_preallocation=True are for a buffer manager, got "
                "enable_buffer_manager=False"
            )
        settings = Settings(enable_buffer_reuse, enable_preallocation, *pooling.values())
        if buffer_manager is not None:
            _check_settings(buffer_manager, settings)
        elif enable_buffer_manager:
            buffer_manager = shared_buffer_manager(settings)
        object.__setattr__(self, "buffer_manager", buffer_manager)
        super().__init__(segment_lengths, dilation_rates, dropout, **options)

    buffer_manager: AttentionBufferManager | None

    def get_buffer_stats(self) -> dict[str, Any]:
        """The statistics of the buffer manager; empty without one."""
        return {} if self.buffer_manager is None else self.buffer_manager.get_stats()

    def cleanup_buffers(self) -> None:
        """Frees all idle buffers of the manager, also those of other modules that share it."""
        if self.buffer_manager is not None:
            self.buffer_manager.clear_cache()

    @property
    def _memory_pool(self) -> MemoryPool | None:
        if self.buffer_manager is None or not self.enable_memory_pool:
            return super()._memory_pool
        return self.buffer_manager.pool

    @property
    def _memory(self) -> str:
        return super()._memory if self.buffer_manager is None else self.buffer_manager.name

    def _profile(self) -> None:
        manager = self.buffer_manager
        if manager is None or self.use_pattern_cache or self.enable_memory_pool:
            super()._profile()
        if manager is not None and self.enable_profiling:
            manager.enable_profiling = True


def _check_settings(manager: AttentionBufferManager, asked: Settings) -> None:
    """A manager of the user's has settings of its own: what is asked for besides must be what it does."""
    own = manager.settings
    contradictions = {
        "enable_buffer_reuse=False": own.enable_reuse and not asked.enable_reuse,
        "enable_preallocation=True": asked.enable_preallocation and not own.enable_preallocation,
        "lightweight_pool=True": asked.lightweight and not own.lightweight,
        "enable_memory_pool=True": asked.is_pooled and not own.is_pooled,
    }
    if against := [name for name, contradicts in contradictions.items() if contradicts]:
        names = ", ".join(against)
        raise ValueError(f"the settings of a buffer_manager are its own, got {names} against them")
