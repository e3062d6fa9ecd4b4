"""What all attention modules have in common: memory, caches, statistics, and what inputs must be."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..checks import check_device, check_flags, check_float_dtype, refuse_unknown
from ..core import MemoryPool, PatternCache, get_global_memory_pool, get_global_pattern_cache
from ..core.sources import FRESH, LIGHTWEIGHT, POOL
from ..core.tracing import remembered
from ..ops import check_execution
from ..spec import DilatedSpec, Execution

_Init = TypeVar("_Init", bound=Callable[..., None])
_make_execution = remembered(Execution)


def one_dropout(attention_dropout: float, dropout: float | None) -> float:
    """`dropout` and `attention_dropout` are two names of one option."""
    for value in (attention_dropout, dropout):
        if value is not None and not isinstance(value, (int, float)):
            return value  # for the spec to reject
    if dropout is not None and attention_dropout not in (0.0, dropout):
        raise ValueError(
            "dropout and attention_dropout are one option, got the two values "
            f"{dropout} and {attention_dropout}"
        )
    return attention_dropout if dropout is None else dropout


def warn_isolated(owner: object, n: int, longest: int) -> None:
    """Warns, once for each owner and doubling of n, that n tokens do not fit into one segment."""
    if n <= longest:
        return
    seen: set[int] = vars(owner).setdefault("_warned", set())
    if n.bit_length() not in seen:
        seen.add(n.bit_length())
        warnings.warn(
            f"{n} tokens exceed the longest segment, {longest}: tokens in different segments, such as "
            f"{longest - 1} and {longest}, never meet. Give max_length={n} or segments that span it; "
            "allow_isolated_segments=True accepts it without this warning",
            stacklevel=2,
        )


def keyword_names(made: type) -> frozenset[str]:
    """The keywords of a class, with those of the bases to which its constructors hand on what is left."""
    names: set[str] = set()
    for each in made.__mro__:
        if "__init__" not in vars(each):
            continue
        parameters = inspect.signature(vars(each)["__init__"]).parameters.values()
        names |= {x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)}
        if all(x.kind != x.VAR_KEYWORD for x in parameters):
            break
    return frozenset(names - {"self", "spec"})


def named_options(init: _Init) -> _Init:
    """Refuses keywords that no constructor of a module has in the name of the class that is made."""
    known = tuple(inspect.signature(init).parameters)

    @wraps(init)
    def call(self: AttentionSkin, *args: Any, **given: Any) -> None:
        if unknown := [name for name in given if name not in known]:
            refuse_unknown(type(self).__name__, unknown, self.option_names())
        init(self, *args, **given)

    return call  # type: ignore[return-value]


class AttentionSkin(nn.Module):
    """Keeps the options of an attention call; a subclass gives `_attend`. No maths, no parameters."""

    choice: Any = None  # of a factory: what it chose and why
    workspace_default: int | None = None

    @named_options
    def __init__(
        self,
        spec: DilatedSpec,
        *,
        allow_isolated_segments: bool = False,
        enable_memory_pool: bool = False,
        enable_profiling: bool = False,
        lightweight_pool: bool = False,
        use_pattern_cache: bool = True,
        kernel: str = "auto",
        workspace_bytes: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_flags(
            allow_isolated_segments=allow_isolated_segments,
            enable_memory_pool=enable_memory_pool,
            enable_profiling=enable_profiling,
            lightweight_pool=lightweight_pool,
            use_pattern_cache=use_pattern_cache,
        )
        self.spec = spec
        self.allow_isolated_segments = allow_isolated_segments
        self._warned: set[int] = set()  # of `warn_isolated`, which copies for evaluation share
        self.enable_memory_pool, self.lightweight_pool = enable_memory_pool, lightweight_pool
        self.use_pattern_cache, self.enable_profiling = use_pattern_cache, enable_profiling
        self.kernel = kernel
        self.workspace_bytes = self.workspace_default if workspace_bytes is None else workspace_bytes
        check_execution(self._execution)
        self._profile()
        # A bool, because torch.compile turns a float it reads from a module into a symbol and compiles twice.
        self._drops = spec.dropout_p > 0
        self.device = check_device(device)
        check_float_dtype("dtype", dtype)
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
        return keyword_names(cls)

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

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None
    ) -> Tensor:
        raise NotImplementedError

    @property
    def _dropout_now(self) -> float:
        return self.spec.dropout_p if self.training and self._drops else 0

    @property
    def _pattern_cache(self) -> PatternCache | None:
        return get_global_pattern_cache() if self.use_pattern_cache else None

    @property
    def _memory_pool(self) -> MemoryPool | None:
        return get_global_memory_pool() if self.enable_memory_pool else None

    @property
    def _memory(self) -> str:
        """The name of where a call's memory comes from, as `Execution` takes it."""
        if self.lightweight_pool and not self.enable_memory_pool:
            raise ValueError("lightweight_pool is a way to use the memory pool, got enable_memory_pool=False")
        if not self.enable_memory_pool:
            return FRESH
        return LIGHTWEIGHT if self.lightweight_pool else POOL

    @property
    def _execution(self) -> Execution:
        """How the calls of this module run."""
        return _make_execution(self.kernel, self.workspace_bytes, self._memory, self.use_pattern_cache)

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
            return  # the functional door rejects it
        if self.dtype is not None and query.dtype != self.dtype:
            raise TypeError(f"this module was made for {self.dtype}, got {query.dtype}")
        if self.device is not None and (
            query.device.type != self.device.type or self.device.index not in (None, query.device.index or 0)
        ):
            raise ValueError(f"this module was made for the device {self.device}, got {query.device}")

    def _changed(self) -> dict[str, tuple[Any, Any]]:
        """(value, default) of options that the representation shows when they differ."""
        return {
            "softmax_scale": (self.spec.scale, None),
            "attention_dropout": (self.spec.dropout_p, 0.0),
            "enable_memory_pool": (self.enable_memory_pool, False),
            "lightweight_pool": (self.lightweight_pool, False),
            "use_pattern_cache": (self.use_pattern_cache, True),
            "allow_isolated_segments": (self.allow_isolated_segments, False),
            "kernel": (self.kernel, "auto"),
            "workspace_bytes": (self.workspace_bytes, self.workspace_default),
            "device": (self.device, None),
            "dtype": (self.dtype, None),
        }

    def extra_repr(self) -> str:
        spec = self.spec
        text = f"segment_lengths={spec.segment_lengths}, dilation_rates={spec.dilation_rates}"
        changed = ((name, value) for name, (value, default) in self._changed().items() if value != default)
        return text + "".join(f", {name}={value!r}" for name, value in changed)
