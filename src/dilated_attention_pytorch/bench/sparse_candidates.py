"""WHO competes in block-sparse attention: the public function, dense attention, and the bare kernel."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as torch_functional

from .. import block_sparse, modules
from ..plan import BlockPattern
from .candidates import Candidate
from .module_cases import ModuleConfig
from .sparse_cases import SparseConfig, SparseEntry, SparseTimeCase

FORWARD_OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD_OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def entry_config(config: SparseConfig, entry: SparseEntry) -> SparseConfig:
    """The config of a case with the pattern of one of its entries."""
    return replace(config, pattern_type=entry.pattern_type, sparsity_ratio=entry.sparsity_ratio)


def make_pattern(config: SparseConfig | ModuleConfig, n: int) -> BlockPattern:
    """The pattern of a config, built as users build it."""
    return block_sparse.build_block_pattern(
        config.sparse_config,
        n,
        config.h,
        is_causal=config.is_causal,
        segment_lengths=config.segment_lengths,
        dilation_rates=config.dilation_rates,
    )


def attend_sparse(
    config: SparseConfig, q: Tensor, k: Tensor, v: Tensor, pattern: BlockPattern
) -> tuple[Tensor, Tensor]:
    """out and lse of the library under test: the one call that is checked and measured."""
    return block_sparse.block_sparse_attention(q, k, v, pattern, is_causal=config.is_causal, return_lse=True)


def make_module(config: SparseConfig, name: str) -> torch.nn.Module:
    """A block-sparse module by its name in `modules`."""
    module: torch.nn.Module = getattr(modules, name)(
        config.segment_lengths, config.dilation_rates, sparse_config=config.sparse_config
    )
    return module.eval()


def time_candidates(case: SparseTimeCase, patterns: dict[str, BlockPattern]) -> dict[str, Candidate]:
    """All of a case by name: "dense", "bare", and block-sparse attention with each of the patterns."""
    config = case.config
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, config.dtype)
    tensors = [torch.randn(1, case.n, config.h, config.d, generator=generator, dtype=dtype) for _ in range(4)]
    candidates: dict[str, Candidate] = {
        "dense": _dense(case, tensors),
        "bare": _bare(case, tensors),
    }
    for name, pattern in patterns.items():
        candidates[name] = _sparse(case, tensors, pattern)
    return candidates


def _sparse(case: SparseTimeCase, tensors: list[Tensor], pattern: BlockPattern) -> Candidate:
    def run() -> None:
        q, k, v = leaves = [x.detach().requires_grad_(case.backward) for x in tensors[:3]]
        out, _ = attend_sparse(case.config, q, k, v, pattern)
        if case.backward:
            torch.autograd.grad(out, leaves, tensors[3])

    return run


def _dense(case: SparseTimeCase, tensors: list[Tensor]) -> Candidate:
    """PyTorch's own attention over everything, on contiguous tensors of the layout that it prefers."""
    by_head = [x.transpose(1, 2).contiguous() for x in tensors]

    def run() -> None:
        q, k, v = leaves = [x.detach().requires_grad_(case.backward) for x in by_head[:3]]
        out = torch_functional.scaled_dot_product_attention(q, k, v, is_causal=case.config.is_causal)
        if case.backward:
            torch.autograd.grad(out, leaves, by_head[3])

    return run


def _bare(case: SparseTimeCase, tensors: list[Tensor]) -> Candidate:
    """The flash kernel alone, dense over contiguous (1, h, bare_n, d), out and lse ready for the backward."""
    q, k, v, grad_out = (x[:, : case.bare_n].transpose(1, 2).contiguous() for x in tensors)
    out, lse = FORWARD_OP(q, k, v)

    def run() -> None:
        FORWARD_OP(q, k, v)
        if case.backward:
            BACKWARD_OP(grad_out, q, k, v, out, lse, 0.0, False)

    return run


def count_sparse_flops(case: SparseTimeCase, patterns: dict[str, BlockPattern]) -> dict[str, int]:
    """Operations of the matrix products of each candidate: 2 a pair and feature in forward, 5 in backward."""
    h, n = case.config.h, case.n
    pairs = {
        "dense": h * (n * (n + 1) // 2 if case.config.is_causal else n * n),
        "bare": h * min(case.bare_n, n) ** 2,
        **{name: h * pattern.num_pairs // len(pattern) for name, pattern in patterns.items()},
    }
    each = 2 * (7 if case.backward else 2) * case.config.d
    return {name: each * number for name, number in pairs.items()}
