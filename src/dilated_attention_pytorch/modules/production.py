"""`RingDilatedAttentionProduction`: a ring with the switches of long runs, in one configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..checks import check_flags, check_pool_size, one_of
from ..core import AttentionBufferManager, MemoryPool
from ..core.attention_buffer_manager import Settings, shared_buffer_manager
from ..core.host_memory import describe_bytes, device_memory
from ..core.tracing import uncompiled
from ..ops import without_autocast
from ..ring.schedule import STRATEGIES
from ..spec import DilatedSpec, resolve_branches
from .attention import Branch, Mask
from .ring import RingDilatedAttentionV2, RingOptions, Timeout

LOGGER = logging.getLogger("dilated_attention_pytorch")
# The fields that the base module does not show.
_FLAGS = ("use_gradient_checkpointing", "enable_error_recovery", "log_memory_usage")
_OWN = (*_FLAGS, "memory_pool_size", "mixed_precision")


@dataclass(frozen=True)
class RingAttentionConfig:
    """Settings of `RingDilatedAttentionProduction`: branches, ring, memory, precision, recovery.

    Args:
        segment_lengths, dilation_rates, max_length, dropout: as in `DilatedAttention`.
        ring_size, timeout, strategy: as in `RingDilatedAttentionV2`.
        use_gradient_checkpointing: only the inputs are kept for the backward pass, which attends once more;
            saves the output and its log-sum-exp, the memory of one of the inputs.
        memory_pool_size: the most idle buffers that the pool keeps, as in `MemoryPool`; None sets no limit
            beside its bytes, 0 keeps nothing. Modules of one size share a pool.
        enable_error_recovery: a call that runs out of memory frees what is idle and is tried again, then in
            smaller tiles (not with dropout, whose masks depend on them); False, and any ring of several
            processes, which must stay in step, raises the first error; the others raise RingError, at the
            latest after `timeout`.
        mixed_precision: True attends in bfloat16, or give torch.float16; the output has the dtype of the
            query again. As under autocast, float64 stays.
        log_memory_usage: after each call the logger "dilated_attention_pytorch" says, at level INFO, what the
            pool holds and what the device has left.
    """

    segment_lengths: Branch = None
    dilation_rates: Branch = None
    dropout: float = 0.0
    ring_size: int | None = None
    timeout: Timeout = None
    strategy: str = "auto"
    use_gradient_checkpointing: bool = False
    memory_pool_size: int | None = 10
    enable_error_recovery: bool = True
    mixed_precision: bool | torch.dtype = False
    log_memory_usage: bool = False
    max_length: int | None = None

    def __post_init__(self) -> None:
        branches = resolve_branches(self.segment_lengths, self.dilation_rates, self.max_length)
        spec = DilatedSpec(*branches, dropout_p=self.dropout)
        # As tuples, so that equal configurations are equal and hashable.
        object.__setattr__(self, "segment_lengths", spec.segment_lengths)
        object.__setattr__(self, "dilation_rates", spec.dilation_rates)
        RingOptions(self.ring_size, None, self.timeout)  # checks them
        one_of("strategy", self.strategy, STRATEGIES)
        check_pool_size("memory_pool_size", self.memory_pool_size)
        check_flags(**{name: getattr(self, name) for name in _FLAGS})
        low = self.mixed_precision
        if not isinstance(low, bool) and low not in (torch.bfloat16, torch.float16):
            raise TypeError(f"mixed_precision must be a bool, torch.bfloat16 or torch.float16, got {low!r}")

    @property
    def low_precision(self) -> torch.dtype | None:
        """The dtype in which calls attend, if it is not that of their inputs."""
        return (torch.bfloat16 if self.mixed_precision is True else self.mixed_precision) or None


class RingDilatedAttentionProduction(RingDilatedAttentionV2):
    """`RingDilatedAttentionV2` as a `RingAttentionConfig` says, with its scratch and large results pooled.

    Args:
        config: all of the configuration. Without it, its fields are given by name.
        options: other options of `RingDilatedAttentionV2`, such as group, softmax_scale or lightweight_pool.
    """

    def __init__(self, config: RingAttentionConfig | None = None, **options: Any) -> None:
        names = [each.name for each in fields(RingAttentionConfig) if each.name in options]
        given = {name: options.pop(name) for name in names}
        if config is None:
            config = RingAttentionConfig(**given)
        elif not isinstance(config, RingAttentionConfig):
            raise TypeError(f"config must be a RingAttentionConfig or None, got {config!r}")
        elif given:
            raise ValueError(f"config is the whole configuration, got {', '.join(given)} beside it")
        pooled, lightweight = options.pop("enable_memory_pool", True), options.get("lightweight_pool", False)
        check_flags(enable_memory_pool=pooled, lightweight_pool=lightweight)
        if not pooled:
            rule = "the memory of this module is pooled (memory_pool_size=0 keeps nothing)"
            raise ValueError(f"{rule}, got enable_memory_pool=False")
        pool_size, retries = config.memory_pool_size, config.enable_error_recovery
        settings = Settings(lightweight=lightweight, retries=retries, pool_size=pool_size)
        # Before the other options, whose checks ask where the memory comes from.
        object.__setattr__(self, "config", config)
        object.__setattr__(self, "_manager", shared_buffer_manager(settings))
        names = ["segment_lengths", "dilation_rates", "ring_size", "timeout", "strategy"]
        options |= {name: getattr(config, name) for name in names}
        # No dropout is None, so that attention_dropout is the same option.
        super().__init__(dropout=config.dropout or None, enable_memory_pool=True, **options)

    config: RingAttentionConfig
    _manager: AttentionBufferManager

    @classmethod
    def option_names(cls) -> frozenset[str]:
        """The keywords that the class takes, the fields of its configuration included."""
        return super().option_names() | {each.name for each in fields(RingAttentionConfig)}

    @property
    def memory_pool(self) -> MemoryPool:
        """Where scratch and large results come from; shared by the modules of one `memory_pool_size`."""
        return self._manager.pool

    def get_memory_stats(self) -> dict[str, Any]:
        """The statistics of `memory_pool` and `pattern_cache` (empty without one); idle buffers by type.

        Each of "buffers" is (number, bytes). Pool and cache serve other modules, too.
        """
        cache = self._pattern_cache
        return {
            "memory_pool": self.memory_pool.get_stats(),
            "buffers": self.memory_pool.idle_buffers(),
            "pattern_cache": {} if cache is None else cache.get_stats(),
        }

    def clear_caches(self) -> None:
        """Frees what is idle in the pool and drops all plans of the pattern cache, of other modules too."""
        self.memory_pool.clear()
        if self._pattern_cache is not None:
            self._pattern_cache.clear()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Mask) -> Tensor:
        call = (q, k, v, is_causal, mask)
        if self.config.use_gradient_checkpointing and torch.is_grad_enabled():
            drops = self._dropout_now > 0
            out: Tensor = checkpoint(self._attend_cast, *call, use_reentrant=False, preserve_rng_state=drops)
        else:
            out = self._attend_cast(*call)
        if self.config.log_memory_usage:
            self._log_memory(out)
        return out

    def _attend_cast(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Mask) -> Tensor:
        low, tensors = self.config.low_precision, (q, k, v)
        if low is None or not all(isinstance(x, Tensor) and x.is_floating_point() for x in tensors):
            return super()._attend(*tensors, is_causal, mask)  # which rejects what are not tensors
        low_q, low_k, low_v = (x if x.dtype == torch.float64 else x.to(low) for x in tensors)
        with without_autocast(q.device):  # whose dtype may be another
            return super()._attend(low_q, low_k, low_v, is_causal, mask).to(q.dtype)

    # A log record is no part of a graph.
    @uncompiled
    def _log_memory(self, out: Tensor) -> None:
        stats, memory = self.memory_pool.get_stats(), device_memory(out.device)
        sizes = [stats[name] for name in ("total_allocated", "cached_bytes", "peak_allocated")]
        sizes.append(None if memory is None else memory.available)
        text = "attention over %s %s on %s: the pool holds %s, %s of it idle, at most %s so far; %s available"
        LOGGER.info(text, tuple(out.shape), out.dtype, out.device, *map(describe_bytes, sizes))

    def _changed(self) -> dict[str, tuple[Any, Any]]:
        config, usual = self.config, RingAttentionConfig()
        changed = {name: (getattr(config, name), getattr(usual, name)) for name in _OWN}
        return {**super()._changed(), "enable_memory_pool": (True, True), **changed}
