"""The attentions that are compared, for any length, and models that differ in nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import sparse
import torch
from common import REDUCED_LENGTH, Config
from sparse import SparseConfig
from torch import Tensor, nn

from dilated_attention_pytorch import LongNetLM, block_sparse_attention, branches_for, dilated_attention
from dilated_attention_pytorch.cli.bench import gate
from dilated_attention_pytorch.cli.bench.record import Result, Table
from dilated_attention_pytorch.plan.dilated import plan_dilated
from dilated_attention_pytorch.plan.runs import Shape
from dilated_attention_pytorch.reference import dilated_attention_reference
from dilated_attention_pytorch.spec import Branches, DilatedSpec

PATTERNS = {"block-sparse": "dilated_sparse", "window": "local_window"}
WORDS = {
    "dense": "every key",
    "dilated": "the branches of `branches_for`",
    "block-sparse": 'blocks of the pattern "dilated_sparse", about as many pairs as dilated',
    "window": "the nearest blocks, about as many pairs as dilated",
    "isolated": "the first branch of dilated alone, so that tokens of different segments never meet",
}
TRAINED, LONGEST = 8192, 65536  # tokens in the end of training, and in tests
FIRST, BLOCK = 2048, 128  # tokens of the first segment, and of a block
# Of shorter sequences the first segment is this part. They span several segments of all branches but the last
# ones, as long sequences do: models learn to cross their boundaries while sequences are short.
FIRST_PART = 16


def branches_of(attention: str, n: int, num_heads: int) -> Branches:
    """Segment lengths and dilation rates for sequences of n tokens.

    Those of "dilated" are made for sequences of LONGEST and serve all others, but for those shorter than
    TRAINED, for which all segments are shorter by one factor.
    """
    if attention == "dense":
        return (n,), (1,)
    first = FIRST if n >= TRAINED else max(1, n // FIRST_PART)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of positions that no head serves
        lengths, rates = branches_for(first * LONGEST // FIRST, num_heads, first=first)
    return (lengths[:1], rates[:1]) if attention == "isolated" else (lengths, rates)


def sparse_of(attention: str, n: int, config: Config) -> SparseConfig | None:
    """The blocks of an attention that has any: as many pairs as dilated attention has by its definition."""
    if attention not in PATTERNS:
        return None
    branches, h = branches_of("dilated", n, config.h), config.h
    spec = DilatedSpec(*branches, is_causal=True)
    pairs = plan_dilated(spec, Shape(1, n, h, h, config.d), itemsize=4).num_defined_pairs
    share = min(1.0, pairs / (h * n * (n + 1) / 2))
    block = max(8, min(BLOCK, n // 64))
    return SparseConfig(h, config.d, block, PATTERNS[attention], share, *branches, is_causal=True)


def attention_error(attention: str, config: Config) -> float:
    """Error of an attention, in small, against the reference of what it computes; of gradients too."""
    n = (REDUCED_LENGTH + 36) | 1  # past a boundary, so that no branch fits evenly
    blocks = sparse_of(attention, n, config)
    if blocks is not None:
        return sparse.reduced_error(blocks, n, backward=True)
    given = DilatedSpec(*branches_of(attention, n, config.h), is_causal=True)
    reference = partial(dilated_attention_reference, segment_lengths=given)
    inputs, grad_out = gate.make_inputs((1, n, config.h, config.d), backward=True)
    return max(gate.compare(attend(attention, n, config), reference, inputs, grad_out))


def attend(attention: str, n: int, config: Config) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """The attention of q, k, v (b, n, h, d) alone, causal."""
    blocks = sparse_of(attention, n, config)
    if blocks is not None:
        pattern = blocks.make_pattern(n)
        return lambda *qkv: block_sparse_attention(*qkv, pattern, is_causal=True)
    branches = branches_of(attention, n, config.h)
    return lambda *qkv: dilated_attention(*qkv, *branches, is_causal=True)


def attention_settings(attention: str, n: int, config: Config) -> dict[str, Any]:
    """The arguments of a `LongNetLM` that make its attention."""
    lengths, rates = branches_of(attention, n, config.h)
    settings: dict[str, Any] = {"segment_lengths": lengths, "dilation_rates": rates}
    blocks = sparse_of(attention, n, config)
    if blocks is None:
        return settings
    chosen = {
        "pattern_type": blocks.pattern_type,
        "sparsity_ratio": blocks.sparsity_ratio,
        "block_size": blocks.block_size,
    }
    return {**settings, "kind": "block_sparse", "attention_options": {"sparse_config": chosen}}


def reached_from(
    attend: Callable[[Tensor, Tensor, Tensor], Any], positions: Tensor, n: int, h: int
) -> Iterator[Tensor]:
    """(positions, n) bool: whether something at a position can reach each query, through 1, 2, ... layers.

    With equal scores all keys that a query sees have a weight, so that values of 1 show where they came from.
    """
    reached = nn.functional.one_hot(positions, n).bool()
    scores = torch.zeros(1, n, h, len(positions))
    while True:
        values = reached.T[None, :, None].float().expand(-1, -1, h, -1).contiguous()
        reached = reached | (attend(scores, scores, values)[0] > 0).any(1).T
        yield reached


def lacking(results: Sequence[Result], table: Table) -> Table:
    """A table with a row for each case that could not be measured, which says why."""
    empty = [""] * (len(table.head) - 2)
    rows = [[result.name, f"not measured: {result.why_not}", *empty] for result in results if result.why_not]
    return Table(table.head, [*table.rows, *rows])


def make_model(attention: str, n: int, config: Config, seed: int, **sizes: Any) -> LongNetLM:
    """A model for sequences of n tokens, with initial weights that depend on the seed alone."""
    d_model = config.h * config.d
    torch.manual_seed(seed)
    first = LongNetLM(d_model=d_model, nhead=config.h, segment_lengths=(n,), dilation_rates=(1,), **sizes)
    model = LongNetLM(d_model=d_model, nhead=config.h, **attention_settings(attention, n, config), **sizes)
    model.load_state_dict(first.state_dict())  # of some kinds projections are fused and drawn as one
    return model


def for_length(model: LongNetLM, attention: str, n: int, config: Config, **sizes: Any) -> LongNetLM:
    """A model with the same parameters, the very tensors, for sequences of another length."""
    settings = attention_settings(attention, n, config)
    other = LongNetLM(d_model=config.h * config.d, nhead=config.h, **settings, **sizes)
    other.load_state_dict(dict(model.named_parameters()), assign=True)
    return other
