"""`DilatedAttention`: the functional door with its options kept in a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_execution
from ..core import MemoryPool, PatternCache, get_global_memory_pool, get_global_pattern_cache
from ..core.blocks import check_flag
from ..core.sources import FRESH, LIGHTWEIGHT, POOL
from ..functional import dilated_attention
from ..plan import DEFAULT_WORKSPACE_BYTES
from ..spec import (
    DEFAULT_DILATION_RATES,
    DEFAULT_SEGMENT_LENGTHS,
    DilatedSpec,
    HeadMixing,
    HeadOffsets,
    Tail,
)


class DilatedAttention(nn.Module):
    """Dilated attention over (b, n, h, d) tensors; see `dilated_attention` for what it computes.

    Args:
        segment_lengths, dilation_rates: one entry a branch; given together, or both left at their defaults.
        softmax_scale: factor of the scores, 1 / sqrt(d) by default.
        attention_dropout: probability to drop an attention weight, in training only; also `dropout`.
        head_mixing, head_offsets, tail, detach_mixing, kernel, workspace_bytes: as in `dilated_attention`.
        enable_memory_pool: scratch and large results come from the global memory pool, and a call that runs
            out of memory frees what is idle and tries again in smaller tiles. See docs/memory.md.
        lightweight_pool: of the pool only what costs next to nothing: scratch is reused, results are fresh.
        enable_profiling: more figures in the statistics of the pattern cache and the pool in use. Both serve
            all modules, and so does this switch.
        use_pattern_cache: plans are kept by shape in the global pattern cache; False plans each call anew.
        device, dtype: what the inputs must have, checked when given. The module has no parameters of its own.
    """

    choice: Any = None  # of `create_dilated_attention`: what it chose and why

    def __init__(
        self,
        segment_lengths: Sequence[int] = DEFAULT_SEGMENT_LENGTHS,
        dilation_rates: Sequence[int] = DEFAULT_DILATION_RATES,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        *,
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
        super().__init__()
        if dropout is not None and attention_dropout not in (0.0, dropout):
            raise ValueError(
                "dropout and attention_dropout are one option, got the two values "
                f"{dropout} and {attention_dropout}"
            )
        flags = {
            "enable_memory_pool": enable_memory_pool,
            "enable_profiling": enable_profiling,
            "lightweight_pool": lightweight_pool,
            "use_pattern_cache": use_pattern_cache,
        }
        for name, flag in flags.items():
            check_flag(name, flag)
        self.spec = DilatedSpec(
            segment_lengths,
            dilation_rates,
            scale=softmax_scale,
            dropout_p=attention_dropout if dropout is None else dropout,
            head_mixing=head_mixing,
            head_offsets=head_offsets,
            tail=tail,
            detach_mixing=detach_mixing,
        )
        self.enable_memory_pool, self.lightweight_pool = enable_memory_pool, lightweight_pool
        self.use_pattern_cache, self.enable_profiling = use_pattern_cache, enable_profiling
        check_execution(kernel, workspace_bytes, self._memory, use_pattern_cache)
        self._profile()
        # A bool, because torch.compile turns a float it reads from a module into a symbol and compiles twice.
        self._drops = self.spec.dropout_p > 0
        self.kernel, self.workspace_bytes = kernel, workspace_bytes
        self.device = None if device is None else torch.device(device)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        self.dtype = dtype

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """query (b, n, h, d), key and value (b, n, h_kv, d) -> (b, n, h, d).

        `attention_mask` is (b, n) bool, True where a key may be attended.
        """
        self._check_declared(query)
        spec = self.spec
        return dilated_attention(
            query,
            key,
            value,
            spec.segment_lengths,
            spec.dilation_rates,
            is_causal=is_causal,
            scale=spec.scale,
            dropout_p=spec.dropout_p if self.training and self._drops else 0,
            key_mask=attention_mask,
            head_mixing=spec.head_mixing,
            head_offsets=spec.head_offsets,
            tail=spec.tail,
            detach_mixing=spec.detach_mixing,
            kernel=self.kernel,
            workspace_bytes=self.workspace_bytes,
            memory=self._memory,
            use_pattern_cache=self.use_pattern_cache,
        )

    @property
    def _pattern_cache(self) -> PatternCache | None:
        return get_global_pattern_cache() if self.use_pattern_cache else None

    @property
    def _memory_pool(self) -> MemoryPool | None:
        return get_global_memory_pool() if self.enable_memory_pool else None

    @property
    def _memory(self) -> str:
        """The name of where a call's memory comes from, as the functional door takes it."""
        if self.lightweight_pool and not self.enable_memory_pool:
            raise ValueError("lightweight_pool is a way to use the memory pool, got enable_memory_pool=False")
        if not self.enable_memory_pool:
            return FRESH
        return LIGHTWEIGHT if self.lightweight_pool else POOL

    def _profile(self) -> None:
        if not self.enable_profiling:
            return
        profiled = [each for each in (self._pattern_cache, self._memory_pool) if each is not None]
        if not profiled:
            raise ValueError("enable_profiling needs a pattern cache or a memory pool, got neither")
        for each in profiled:
            each.enable_profiling = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._profile()

    def _check_declared(self, query: Tensor) -> None:
        if not isinstance(query, Tensor):
            return  # dilated_attention rejects it
        if self.dtype is not None and query.dtype != self.dtype:
            raise TypeError(f"this module was made for {self.dtype}, got {query.dtype}")
        if self.device is not None and (
            query.device.type != self.device.type or self.device.index not in (None, query.device.index or 0)
        ):
            raise ValueError(f"this module was made for the device {self.device}, got {query.device}")

    def extra_repr(self) -> str:
        spec = self.spec
        text = f"segment_lengths={spec.segment_lengths}, dilation_rates={spec.dilation_rates}"
        changed = {
            "softmax_scale": (spec.scale, None),
            "attention_dropout": (spec.dropout_p, 0.0),
            "head_mixing": (spec.head_mixing, "all"),
            "head_offsets": (spec.head_offsets, "interleaved"),
            "tail": (spec.tail, "exact"),
            "detach_mixing": (spec.detach_mixing, False),
            "enable_memory_pool": (self.enable_memory_pool, False),
            "lightweight_pool": (self.lightweight_pool, False),
            "use_pattern_cache": (self.use_pattern_cache, True),
            "kernel": (self.kernel, "auto"),
            "workspace_bytes": (self.workspace_bytes, DEFAULT_WORKSPACE_BYTES),
            "device": (self.device, None),
            "dtype": (self.dtype, None),
        }
        return text + "".join(f", {name}={v!r}" for name, (v, default) in changed.items() if v != default)
