"""WHO can be compared by name: modules and functions of this library, dense attention, and peers.

An entry makes a candidate for a config and a length. It takes (q, k, v), each (b, n, h, d), or with
projections x (b, n, h d). fkodom's `dilated-attention-pytorch` is not among the peers: it is imported by the
same name as this package, so the two cannot be installed together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import block_sparse, functional, modules, ring
from ...checks import did_you_mean
from ...plan import BlockPattern
from ...reference import block_sparse_attention_reference, dilated_attention_reference
from ...spec import DilatedSpec, Execution, SparsePatternConfig
from .gate import Keys, block_keys, call, dilated_keys

masked_reference: Any = block_sparse_attention_reference
BASELINE = "sdpa"
MAIN = (
    BASELINE,
    "DilatedAttention",
    "ImprovedDilatedAttentionV2",
    "RingDilatedAttentionV2",
    "BlockSparseDilatedAttention",
    "MultiheadDilatedAttention",
)


class CannotRunError(Exception):
    """A candidate turned out not to run here; the message says why."""


@dataclass(frozen=True)
class Config:
    """What candidates are asked for; what one cannot heed is stated beside its figures."""

    h: int
    d: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    dtype: str = "float32"
    is_causal: bool = False
    sparsity: float = 0.1
    block_size: int = 128
    memory: str | None = None  # where calls take it from; None for each module's own way
    use_pattern_cache: bool = True

    @property
    def spec(self) -> DilatedSpec:
        return DilatedSpec(self.segment_lengths, self.dilation_rates, self.is_causal)

    @property
    def branches(self) -> dict[str, Any]:
        return {"segment_lengths": self.segment_lengths, "dilation_rates": self.dilation_rates}

    @property
    def sparse_config(self) -> SparsePatternConfig:
        return SparsePatternConfig("dilated_sparse", self.sparsity, self.block_size)

    def make_pattern(self, n: int) -> BlockPattern:
        """The pattern of block-sparse candidates, built as users build it."""
        options = {"is_causal": self.is_causal, **self.branches}
        return block_sparse.build_block_pattern(self.sparse_config, n, self.h, **options)


class Candidate(NamedTuple):
    """What is measured, and what it should give: for whole tensors in float64, and for a query row.

    `keys` are those that a row meets, None where only whole tensors are known, as with projections.
    """

    attend: Callable[..., Any]
    reference: Callable[..., Any]
    keys: Callable[[int], Keys] | None = None
    module: nn.Module | None = None

    def run(self, inputs: Sequence[Tensor], grad_out: Tensor | None) -> list[Tensor]:
        """out, and the gradients of the inputs and of the weights if it has any."""
        weights = [] if self.module is None else list(self.module.parameters())
        return call(self.attend, inputs, grad_out, weights)


@dataclass(frozen=True)
class Entry:
    """A candidate by name: what it computes, how it is made, and why it cannot run.

    `ignores` says what it cannot heed of the memory and the cache of a config.
    """

    kind: str
    make: Callable[[Config, int], Candidate]
    ignores: str = ""
    projects: bool = False  # takes x, has weights
    is_windowed: bool = False  # takes whole blocks only
    why_not: str | None = None
    why_no_backward: str | None = None

    def reason(self, backward: bool) -> str | None:
        """Why it cannot run here; None if it can."""
        return self.why_not or (self.why_no_backward if backward else None)


FOREIGN = "it has no pool and no pattern cache"


def entry_of(name: str) -> Entry:
    """The entry of a name; a `ValueError` names those that are close."""
    if name in ENTRIES:
        return ENTRIES[name]
    raise ValueError(f"there is no candidate {name!r}.{did_you_mean(name, ENTRIES)} See --list.")


def remarks(name: str, config: Config) -> str:
    """What a reader must know beside a candidate's figures: what it computes, and what it cannot heed."""
    entry = entry_of(name)
    is_asked = config.memory is not None or not config.use_pattern_cache
    words = [f"{entry.kind}, with projections" if entry.projects else entry.kind]
    return "; ".join(words + ([entry.ignores] if entry.ignores and is_asked else []))


def _dilated(config: Config, n: int) -> tuple[Any, Any]:
    """The reference of dilated attention, and the keys of its rows."""
    spec = config.spec
    keys = partial(dilated_keys, spec, config.h, n)
    return lambda q, k, v: dilated_attention_reference(q, k, v, spec), keys


def _blocks(config: Config, n: int) -> tuple[Any, Any]:
    """The same of block-sparse attention; its pattern is built when it is asked for."""
    pattern = cache(lambda: config.make_pattern(n))

    def reference(*qkv: Tensor) -> Any:
        return masked_reference(*qkv, pattern().to_dense(), is_causal=config.is_causal)

    return reference, lambda t: block_keys(pattern(), config.h, t)


def _adaptive(module: Any, config: Config, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The reference over the blocks that an adaptive module chooses, with its scores among q and k."""
    is_causal = config.is_causal
    inputs = (x.detach().to(getattr(torch, config.dtype)) for x in (q, k))
    mask = module.choose(*module.features(*inputs, is_causal), is_causal).to_dense()
    prepared = copy.deepcopy(module).double()._prepare(q, k, is_causal, None)
    wide = F.pad(v, (0, prepared.key.shape[-1] - v.shape[-1]))
    options = {"is_causal": is_causal, "scale": prepared.scale}
    return masked_reference(prepared.query, prepared.key, wide, mask, **options)[..., : v.shape[-1]]


def _projected(module: nn.Module, inner: Callable[..., Any], is_causal: bool, x: Tensor) -> Any:
    """The module in float64, with a reference as its attention."""
    exact: Any = copy.deepcopy(module).double()
    exact.attention.forward = lambda q, k, v, **_: inner(q, k, v)
    return exact(x, is_causal=is_causal)[0]


def _make_module(name: str, kind: str, projects: bool, config: Config, n: int) -> Candidate:
    options: dict[str, Any] = {"use_pattern_cache": config.use_pattern_cache}
    if config.memory in ("pool", "lightweight"):
        options |= {"enable_memory_pool": True, "lightweight_pool": config.memory == "lightweight"}
    elif config.memory == "fresh" and name == "ImprovedDilatedAttentionV2":
        options["enable_buffer_manager"] = False
    if kind != "dilated":
        options["sparse_config"] = replace(config.sparse_config, pattern_type=PATTERNS[kind])
    if kind == "adaptive":
        options |= {"num_heads": config.h, "head_dim": config.d}
    if projects:
        sizes = {"embed_dim": config.h * config.d, "num_heads": config.h}
        options |= {**sizes, "dtype": getattr(torch, config.dtype)}
    torch.manual_seed(0)  # of weights
    module = getattr(modules, name)(**config.branches, **options).eval()

    def attend(*tensors: Tensor) -> Any:
        found = module(*tensors, is_causal=config.is_causal)
        return found[0] if projects else found

    if kind == "adaptive":
        return Candidate(attend, partial(_adaptive, module, config), None, module)
    reference, keys = DEFINITIONS[kind](config, n)
    if projects:
        reference, keys = partial(_projected, module, reference, config.is_causal), None
    return Candidate(attend, reference, keys, module)


def _module(name: str, kind: str, projects: bool = False, ignores: str = "") -> Entry:
    return Entry(kind, partial(_make_module, name, kind, projects), ignores, projects)


def _function(kind: str, where: Any, name: str) -> Entry:
    """A function of this library."""

    def make(config: Config, n: int) -> Candidate:
        how = Execution(memory=config.memory or "fresh", use_pattern_cache=config.use_pattern_cache)
        options: dict[str, Any] = {"is_causal": config.is_causal, "execution": how}
        options |= config.branches if kind == "dilated" else {"pattern": config.make_pattern(n)}
        return Candidate(partial(getattr(where, name), **options), *DEFINITIONS[kind](config, n))

    return Entry(kind, make)


def _by_head(attend: Callable[..., Any]) -> Callable[..., Tensor]:
    """An attention over (b, h, n, d) as one over (b, n, h, d)."""

    def transposed(*tensors: Tensor) -> Tensor:
        out: Tensor = attend(*(x.transpose(1, 2) for x in tensors))
        return out.transpose(1, 2)

    return transposed


def _make_sdpa(config: Config, n: int) -> Candidate:
    dense = replace(config, segment_lengths=(n,), dilation_rates=(1,))
    attend = partial(F.scaled_dot_product_attention, is_causal=config.is_causal)
    return Candidate(_by_head(attend), *_dilated(dense, n))


def _make_flex(config: Config, n: int) -> Candidate:
    """torch's compiled FlexAttention over the blocks of the block-sparse modules."""
    from torch.nn.attention.flex_attention import flex_attention

    mask = config.make_pattern(n).to_block_mask("cpu", num_heads=config.h)
    compiled: Any = torch.compile(flex_attention)

    def attend(*tensors: Tensor) -> Any:
        try:
            return compiled(*tensors, block_mask=mask)
        except RuntimeError as error:  # what torch.compile raises, as without a C++ compiler
            first = str(error).strip().partition("\n")[0]
            raise CannotRunError(f"torch.compile of it failed: {first}") from error

    return Candidate(_by_head(attend), *_blocks(config, n))


def _make_local(config: Config, n: int) -> Candidate:
    """`LocalAttention` of lucidrains: each window sees itself, the one before and, not causal, the next."""
    if over := n % config.block_size:
        window = f"multiples of its window of {config.block_size}"
        raise CannotRunError(f"it takes {window}, and {over} of {n} are over")
    # Without `dim` it has no position embedding.
    made = import_module("local_attention").LocalAttention
    attend = made(config.block_size, causal=config.is_causal, look_backward=1)
    mask = window_mask(n, config.block_size, config.is_causal)
    return Candidate(_by_head(attend), lambda q, k, v: masked_reference(q, k, v, mask))


def window_mask(n: int, window: int, is_causal: bool) -> Tensor:
    """(1, n, n) bool: what local attention lets each query see."""
    index = torch.arange(n)
    ahead = index // window - (index // window)[:, None]
    seen = ahead.abs() <= 1
    return (seen & (index <= index[:, None]) if is_causal else seen)[None]


DEFINITIONS = {"dilated": _dilated, "block-sparse": _blocks}
PATTERNS: dict[str, Any] = {"block-sparse": "dilated_sparse", "adaptive": "adaptive"}


def _missing(package: str, otherwise: str | None = None) -> str | None:
    return otherwise if find_spec(package.replace("-", "_")) else f"the package {package} is not installed"


# By name what a module computes, whether it has projections, and what it cannot heed.
MODULES: dict[str, tuple[Any, ...]] = {
    "DilatedAttention": ("dilated",),
    "ImprovedDilatedAttention": ("dilated",),
    "ImprovedDilatedAttentionV2": ("dilated",),
    "RingDilatedAttentionV2": ("dilated",),
    "RingDilatedAttentionV3": ("dilated",),
    "RingDilatedAttentionProduction": ("dilated", False, "its memory is always pooled"),
    "BlockSparseDilatedAttention": ("block-sparse",),
    "BlockSparseRingDilatedAttention": ("block-sparse",),
    "BlockSparseAdaptiveDilatedAttention": ("adaptive", False, "it has no pattern cache"),
    "MultiheadDilatedAttention": ("dilated", True),
    "ImprovedMultiheadDilatedAttention": ("dilated", True),
    "RingMultiheadDilatedAttention": ("dilated", True),
    "BlockSparseMultiheadDilatedAttention": ("block-sparse", True),
    "BlockSparseRingMultiheadDilatedAttention": ("block-sparse", True),
}
_NO_FLEX_BACKWARD = "FlexAttention has no backward pass on the CPU"
_NEEDS_CUDA = "its dilated attention calls flash-attn or xformers on CUDA, and the CPU is measured here"
ENTRIES: dict[str, Entry] = {
    BASELINE: Entry("dense", _make_sdpa, FOREIGN),
    "dilated_attention": _function("dilated", functional, "dilated_attention"),
    "ring_dilated_attention": _function("dilated", ring, "ring_dilated_attention"),
    "block_sparse_attention": _function("block-sparse", block_sparse, "block_sparse_attention"),
    "ring_block_sparse_attention": _function("block-sparse", ring, "ring_block_sparse_attention"),
    **{name: _module(name, *how) for name, how in MODULES.items()},
    "flex_attention": Entry("block-sparse", _make_flex, FOREIGN, why_no_backward=_NO_FLEX_BACKWARD),
    "local_attention": Entry("local", _make_local, FOREIGN, False, True, _missing("local-attention")),
    # Never made.
    "torchscale": Entry("dilated", _make_sdpa, FOREIGN, why_not=_missing("torchscale", _NEEDS_CUDA)),
}
