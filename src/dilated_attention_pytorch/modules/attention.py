"""Attention modules: the options of a call kept under the documents' names. They hold no parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..checks import (
    check_device,
    check_flags,
    check_float_dtype,
    keyword_names,
    one_dropout,
    refuse_unknown,
)
from ..core import MemoryPool, PatternCache, get_global_memory_pool, get_global_pattern_cache
from ..core.attention_buffer_manager import (
    FRESH,
    LIGHTWEIGHT,
    POOL,
    AttentionBufferManager,
    Settings,
    shared_buffer_manager,
)
from ..core.tracing import remembered
from ..functional import attend, spec_of
from ..ops import check_execution
from ..spec import DilatedSpec, Execution, resolve_branches

Device = torch.device | str | None
Dtype = torch.dtype | None
Mask = Tensor | None
Number = float | None
Branch = Sequence[int] | None  # lengths or rates, one entry a branch
_make_execution = remembered(Execution)


def warn_isolated(owner: object, n: int, longest: int) -> None:
    """Warns, once for each owner and doubling of n, that n tokens do not fit into one segment."""
    seen: set[int] = vars(owner).setdefault("_warned", set())
    if n > longest and n.bit_length() not in seen:
        seen.add(n.bit_length())
        warnings.warn(
            f"{n} tokens exceed the longest segment, {longest}: tokens in different segments, such as "
            f"{longest - 1} and {longest}, never meet. Give max_length={n} or segments that span it; "
            "allow_isolated_segments=True accepts it without this warning",
            stacklevel=2,
        )


class AttentionModule(nn.Module):
    """The options of `DilatedAttention` and what all modules do with them; a subclass gives `_attend`."""

    choice: Any = None  # of a factory: what it chose and why
    spec_options: ClassVar[tuple[str, ...]] = ()  # fields of `DilatedSpec` that are taken by name
    _manager: AttentionBufferManager | None = None  # where memory comes from, instead of the global pool
    _attend: Callable[[Tensor, Tensor, Tensor, bool, Mask], Tensor]

    def __init__(
        self,
        segment_lengths: Branch = None,
        dilation_rates: Branch = None,
        softmax_scale: Number = None,
        attention_dropout: float = 0.0,
        *,
        max_length: int | None = None,
        dropout: Number = None,
        allow_isolated_segments: bool = False,
        enable_memory_pool: bool = False,
        enable_profiling: bool = False,
        lightweight_pool: bool = False,
        use_pattern_cache: bool = True,
        kernel: str = "auto",
        workspace_bytes: int | None = None,
        device: Device = None,
        dtype: Dtype = None,
        **of_spec: Any,
    ) -> None:
        super().__init__()
        refuse_unknown(type(self).__name__, of_spec, self.spec_options, self.option_names())
        branches = resolve_branches(segment_lengths, dilation_rates, max_length)
        dropout_p = one_dropout(attention_dropout, dropout)
        self.spec = DilatedSpec(*branches, scale=softmax_scale, dropout_p=dropout_p, **of_spec)
        self.allow_isolated_segments, self.enable_profiling = allow_isolated_segments, enable_profiling
        self.enable_memory_pool, self.lightweight_pool = enable_memory_pool, lightweight_pool
        self.use_pattern_cache = use_pattern_cache
        flags = [each.name for each in _OPTIONS if isinstance(each.default, bool)]
        check_flags(**{name: getattr(self, name) for name in flags})
        self._warned: set[int] = set()  # of `warn_isolated`, which copies for evaluation share
        self.kernel, self.workspace_bytes, self.dtype = kernel, workspace_bytes, dtype
        check_execution(self._execution)
        self._switch_on()
        # A bool, because torch.compile turns a float it reads from a module into a symbol and compiles twice.
        self._drops = self.spec.dropout_p > 0
        self.device = check_device(device)
        check_float_dtype("dtype", dtype)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, attention_mask: Mask = None
    ) -> Tensor:
        """query (b, n, h, d), key and value (b, n, h_kv, d) -> (b, n, h, d).

        `attention_mask` is (b, n) bool, True where a key may be attended. Tokens in different segments of the
        longest branch never meet: where there are several, a call warns, once for each doubling of n, unless
        the module allows isolated segments. (Compiled code does not warn.)
        """
        self._check_declared(query)
        # Not when compiled: a length that is compared becomes a guard, and each class of lengths a graph.
        if not torch.compiler.is_compiling() and isinstance(query, Tensor) and query.dim() == 4:
            self.warn_isolated(query.shape[1])
        return self._attend(query, key, value, is_causal, attention_mask)

    @classmethod
    def option_names(cls) -> frozenset[str]:
        """The keywords that the class takes."""
        return keyword_names(cls) | {*cls.spec_options}

    @property
    def longest_segment(self) -> int | None:
        """How many tokens the longest branch connects; None where something else than branches does."""
        return max(self.spec.segment_lengths)

    def warn_isolated(self, n: int) -> None:
        """Warns, once for each doubling of n, where segments separate the tokens of a sequence."""
        longest = self.longest_segment
        if longest is not None and not self.allow_isolated_segments:
            warn_isolated(self, n, longest)

    @property
    def is_sharded(self) -> bool:
        """Whether inputs are parts of a sequence that several processes share."""
        return False

    @property
    def _dropout_now(self) -> float:
        return self.spec.dropout_p if self.training and self._drops else 0

    @property
    def _pattern_cache(self) -> PatternCache | None:
        return get_global_pattern_cache() if self.use_pattern_cache else None

    @property
    def _memory_pool(self) -> MemoryPool | None:
        if not self.enable_memory_pool:
            return None
        return get_global_memory_pool() if self._manager is None else self._manager.pool

    @property
    def _memory(self) -> str:
        """The name of where a call's memory comes from, as `Execution` takes it."""
        if self._manager is not None:
            return self._manager.name
        if self.enable_memory_pool:
            return LIGHTWEIGHT if self.lightweight_pool else POOL
        if self.lightweight_pool:
            raise ValueError("lightweight_pool is a way to use the memory pool, got enable_memory_pool=False")
        return FRESH

    @property
    def _execution(self) -> Execution:
        """How the calls of this module run."""
        return _make_execution(self.kernel, self.workspace_bytes, self._memory, self.use_pattern_cache)

    def _switch_on(self) -> None:
        """Tells the shared cache and pool what was asked for, also after unpickling."""
        if not self.enable_profiling:
            return
        sources: tuple[Any, ...] = (self._pattern_cache, self._memory_pool, self._manager)
        profiled = [each for each in sources if each is not None]
        if not profiled:
            raise ValueError("enable_profiling needs a pattern cache or a memory pool, got neither")
        for each in profiled:
            each.enable_profiling = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._switch_on()

    def _check_declared(self, query: Tensor) -> None:
        if not isinstance(query, Tensor):
            return  # the public function rejects it
        if self.dtype is not None and query.dtype != self.dtype:
            raise TypeError(f"this module was made for {self.dtype}, got {query.dtype}")
        if self.device is not None and (
            query.device.type != self.device.type or self.device.index not in (None, query.device.index or 0)
        ):
            raise ValueError(f"this module was made for the device {self.device}, got {query.device}")

    def _changed(self) -> dict[str, tuple[Any, Any]]:
        """(value, default) of options that the representation shows when they differ."""
        spec, own = self.spec, vars(self)
        shown = {name: (getattr(spec, name), getattr(DilatedSpec, name)) for name in self.spec_options}
        shown |= {"softmax_scale": (spec.scale, None), "attention_dropout": (spec.dropout_p, 0.0)}
        return shown | {each.name: (own[each.name], each.default) for each in _OPTIONS if each.name in own}

    def extra_repr(self) -> str:
        spec = self.spec
        text = f"segment_lengths={spec.segment_lengths}, dilation_rates={spec.dilation_rates}"
        changed = ((name, value) for name, (value, default) in self._changed().items() if value != default)
        return text + "".join(f", {name}={value!r}" for name, value in changed)


_OPTIONS = signature(AttentionModule).parameters.values()


class DilatedAttention(AttentionModule):
    """Dilated attention over (b, n, h, d) tensors; see `dilated_attention` for what it computes.

    Args:
        segment_lengths, dilation_rates: one entry a branch; given together, or both left out.
        max_length: the longest sequence, for which `branches_for` gives the branches that are left out.
        softmax_scale: factor of the scores, 1 / sqrt(d) by default.
        attention_dropout: probability to drop an attention weight, in training only; also `dropout`.
        head_mixing, head_offsets, tail, detach_mixing, kernel, workspace_bytes: as in `dilated_attention`.
        enable_memory_pool: scratch and large results come from the global memory pool, and a call that runs
            out of memory frees what is idle and tries again in smaller tiles. See docs/memory.md.
        lightweight_pool: of the pool only what costs next to nothing: scratch is reused, results are fresh.
        enable_profiling: more figures in the statistics of the pattern cache and the pool in use. Both serve
            all modules, and so does this switch.
        allow_isolated_segments: a call with more tokens than the longest segment does not warn; see
            `AttentionModule.forward`.
        use_pattern_cache: plans are kept by shape in the global pattern cache; False plans each call anew.
        device, dtype: what the inputs must have, checked when given. The module has no parameters of its own.
    """

    spec_options = ("head_mixing", "head_offsets", "tail", "detach_mixing")

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Mask) -> Tensor:
        return attend(q, k, v, self._call_spec(is_causal), self._execution, key_mask=mask)[0]

    def _call_spec(self, is_causal: bool) -> DilatedSpec:
        """What a call computes."""
        spec, dropout_p = self.spec, self._dropout_now
        options = (spec.head_mixing, spec.head_offsets, spec.tail, spec.detach_mixing)
        return spec_of(spec.segment_lengths, spec.dilation_rates, is_causal, spec.scale, dropout_p, *options)


class ImprovedDilatedAttention(DilatedAttention):
    """`DilatedAttention` under the name `dropout` for its dropout option. It computes the same."""

    def __init__(
        self,
        segment_lengths: Branch = None,
        dilation_rates: Branch = None,
        dropout: Number = None,
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
        segment_lengths: Branch = None,
        dilation_rates: Branch = None,
        dropout: Number = None,
        *,
        enable_buffer_manager: bool = True,
        enable_buffer_reuse: bool = True,
        enable_preallocation: bool = False,
        buffer_manager: AttentionBufferManager | None = None,
        **options: Any,
    ) -> None:
        asked = {"enable_buffer_reuse": enable_buffer_reuse, "enable_preallocation": enable_preallocation}
        others = ("lightweight_pool", "enable_profiling", "enable_memory_pool")  # in the order of `Settings`
        asked |= {name: options.get(name, False) for name in others}
        check_flags(enable_buffer_manager=enable_buffer_manager, **asked)
        if buffer_manager is not None and not isinstance(buffer_manager, AttentionBufferManager):
            kind = type(buffer_manager).__name__
            raise TypeError(f"buffer_manager must be an AttentionBufferManager, got {kind}")
        is_asked = buffer_manager is not None or enable_preallocation or not enable_buffer_reuse
        if is_asked and not enable_buffer_manager:
            rule = "buffer_manager, enable_buffer_reuse=False and enable_preallocation=True"
            raise ValueError(f"{rule} are for a buffer manager, got enable_buffer_manager=False")
        if buffer_manager is not None:  # profiling is turned on in any manager
            given = zip(asked.items(), Settings(), buffer_manager.settings, strict=False)
            differ = {name: value for (name, value), usual, has in given if usual != value != has}
            if got := ", ".join(f"{x}={differ[x]}" for x in differ if x != "enable_profiling"):
                raise ValueError(f"the settings of a buffer_manager are its own, got {got} against them")
        elif enable_buffer_manager:
            buffer_manager = shared_buffer_manager(Settings(*asked.values()))
        object.__setattr__(self, "_manager", buffer_manager)  # which the checks of other options read
        super().__init__(segment_lengths, dilation_rates, dropout, **options)

    @property
    def buffer_manager(self) -> AttentionBufferManager | None:
        """Where scratch and large results come from; None with enable_buffer_manager=False."""
        return self._manager

    def get_buffer_stats(self) -> dict[str, Any]:
        """The statistics of the buffer manager; empty without one."""
        return {} if self._manager is None else self._manager.get_stats()

    def cleanup_buffers(self) -> None:
        """Frees all idle buffers of the manager, also those of other modules that share it."""
        if self._manager is not None:
            self._manager.clear_cache()
