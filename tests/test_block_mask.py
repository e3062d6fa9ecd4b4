"""FlexAttention's `BlockMask` with its `mask_mod` on a CPU, forward and backward, and dilated masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
    noop_mask,
)
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention_pytorch import (
    BlockPattern,
    Execution,
    block_sparse_attention,
    create_dilated_block_mask,
    dilated_attention,
)
from dilated_attention_pytorch.kernels import Request, triton
from dilated_attention_pytorch.plan import Shape, pattern_tables as tiles, plan_blocks
from dilated_attention_pytorch.reference import block_sparse_attention_reference, multiplicity
from dilated_attention_pytorch.ring import attention as ring
from support.executions import FUSED
from support.tolerances import assert_close, assert_same_gradients

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

B, N, H, SIZE = 2, 203, 4, 32  # a length that no block divides
Mod = Callable[..., Tensor]
DOCUMENT = torch.sort(torch.rand(B, N, generator=torch.Generator().manual_seed(1)).mul(5).long()).values
GLOBAL = torch.rand(N, generator=torch.Generator().manual_seed(2)) < 0.05


def causal(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def window(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < 50)


def documents(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return DOCUMENT[b, i] == DOCUMENT[b, j]


# mask_mod, and whether it differs by batch and by head
MODS: dict[str, tuple[Mod, bool, bool]] = {
    "causal": (causal, False, False),
    "sliding window": (window, False, False),
    "prefix LM": (lambda _b, _h, i, j: (i >= j) | (j < 40), False, False),
    "documents": (documents, True, False),
    "causal documents": (lambda b, h, i, j: documents(b, h, i, j) & (i >= j), True, False),
    "a window a head": (lambda _b, h, i, j: (i - j).abs() <= 9 * h, False, True),
    "strides in documents": (lambda b, h, i, j: documents(b, h, i, j) & ((i - j) % (h + 1) == 0), True, True),
    "global tokens": (lambda _b, _h, i, j: GLOBAL[i] | GLOBAL[j] | ((i - j).abs() < 20), False, False),
    "rows without keys": (lambda _b, _h, i, j: (i % 7 > 2) & (j > 150), False, False),
}


@lru_cache(maxsize=32)
def masks(name: str, size: Any = SIZE) -> tuple[BlockMask, Tensor]:
    """A mask, and what it shows as (b x h, n, n)."""
    mod, by_batch, by_head = MODS[name]
    sizes = B if by_batch else None, H if by_head else None
    mask = create_block_mask(mod, *sizes, N, N, device="cpu", BLOCK_SIZE=size)
    return mask, create_mask(mod, B, H, N, N, device="cpu").flatten(0, 1)


def qkv(dtype: torch.dtype = torch.float64, n: int = N) -> list[Tensor]:
    rng = torch.Generator().manual_seed(n)
    return [torch.randn(B, n, h, 8, generator=rng).to(dtype).requires_grad_() for h in (H, 2, 2)]


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [(torch.float64, "auto"), (torch.float64, "eager"), (torch.bfloat16, "auto")]
    + [(torch.float32, kernel) for kernel in FUSED],
)
def test_equals_dense_masked_softmax(name: str, dtype: torch.dtype, kernel: str) -> None:
    mask, dense = masks(name)
    leaves = qkv(dtype)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    options: dict[str, Any] = {"is_causal": kernel == "stock", "scale": 0.4}
    if kernel == "auto":
        options["key_mask"] = torch.rand(B, N, generator=torch.Generator().manual_seed(3)) > 0.2
    out, lse = block_sparse_attention(*leaves, mask, return_lse=True, execution=Execution(kernel), **options)
    expected, expected_lse = block_sparse_attention_reference(*wide, dense, return_lse=True, **options)
    assert_close(out, expected, dtype, "out")
    assert_close(lse, expected_lse, dtype, "lse")
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4)).double()
    for given_out, given_lse in ((out, lse), (expected, expected_lse)):
        loss = (given_out * weight.to(given_out.dtype)).sum()
        if dtype.itemsize > 2:
            loss = loss + torch.where(given_lse.isfinite(), given_lse, 0.0).sin().sum()
        loss.backward()
    for got, want in zip(leaves, wide, strict=True):
        assert got.grad is not None
        assert want.grad is not None
        assert_close(got.grad, want.grad, dtype, "gradient")


@pytest.mark.parametrize("name", MODS)
def test_equals_flex_attention(name: str) -> None:
    mask, _ = masks(name)
    tensors = [x.detach() for x in qkv(torch.float32)]
    heads_first = (x.transpose(1, 2) for x in tensors)
    expected = flex_attention(*heads_first, block_mask=mask, enable_gqa=True).transpose(1, 2)
    assert_close(block_sparse_attention(*tensors, mask), expected.nan_to_num(), torch.float32)


@st.composite
def mods(draw: st.DrawFn) -> tuple[Mod, int, int, int]:
    """A random mask_mod of half-planes, strides and tables, with batches, heads and a length."""
    n, rng = draw(st.integers(1, 150)), torch.Generator().manual_seed(draw(st.integers(0, 99)))
    table = torch.randint(0, draw(st.integers(1, 6)), (3, 2, n), generator=rng)
    a, c, d, period = (draw(st.integers(-3, 3)) for _ in range(4))
    kinds: dict[str, Mod] = {
        "plane": lambda _b, _h, i, j: a * i + c * j + d * n // 4 > 0,
        "stride": lambda _b, h, i, j: (a * i - j + h) % (abs(period) + 1) == 0,
        "table": lambda b, h, i, j: table[b, h, i] == table[b, h, j],
        "all": lambda _b, _h, i, _j: i >= 0,
        "none": lambda _b, _h, i, _j: i < 0,
    }
    first, second = (kinds[draw(st.sampled_from(sorted(kinds)))] for _ in range(2))
    joins = draw(st.booleans())

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x, y = first(b, h, i, j), second(b, h, i, j)
        return x & y if joins else x | y

    return mod, draw(st.sampled_from([1, 3])), draw(st.integers(1, 2)), n


@settings(max_examples=100)
@given(mods(), st.sampled_from([1, 5, 16, 32, (16, 24), (64, 16)]), st.booleans())
def test_patterns_show_what_masks_show(drawn: tuple[Mod, int, int, int], size: Any, is_causal: bool) -> None:
    """Of random mask_mods; engines are compared with the patterns in test_block_exactness.py."""
    mod, b, h, n = drawn
    mask = create_block_mask(mod, b, h, n, n, device="cpu", BLOCK_SIZE=size)
    pattern = BlockPattern.from_block_mask(mask, is_causal=is_causal, num_heads=h)
    expected = create_mask(mod, b, h, n, n, device="cpu").flatten(0, 1)
    expected = expected.tril() if is_causal else expected
    assert torch.equal(pattern.to_dense(), expected)
    assert pattern.num_pairs == int(expected.sum())
    again = BlockPattern.from_block_mask(pattern.to_block_mask(num_heads=h), num_heads=h)
    assert torch.equal(again.to_dense(), expected)
    if pattern.tiles is not None:  # each is used, each once
        assert len(torch.unique(pattern.tiles, dim=0)) == len(pattern.tiles)
        assert set(pattern.tile_of.tolist()) - {-1} == set(range(len(pattern.tiles)))


def test_a_mask_mod_is_evaluated_in_partial_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    evaluate = tiles.evaluate_tiles

    def counted(mod: Mod, blocks: Tensor, *sizes: int) -> tuple[Tensor, Tensor]:
        looked.append(len(blocks))
        return evaluate(mod, blocks, *sizes)

    monkeypatch.setattr("dilated_attention_pytorch.plan.flex.evaluate_tiles", counted)
    monkeypatch.setattr(tiles, "CHUNK", 3 * 16**2)
    mask = create_block_mask(causal, None, None, 256, 256, device="cpu", BLOCK_SIZE=16)
    pattern = BlockPattern.from_block_mask(mask)
    assert looked == [16]  # the diagonal
    assert pattern.tiles is not None
    assert torch.equal(pattern.tiles, torch.ones(1, 16, 16, dtype=torch.bool).tril())
    kept = BlockPattern.from_layout(torch.ones(16, 16, dtype=torch.bool), 256, 16, is_causal=True)
    assert BlockPattern.from_block_mask(mask, is_causal=True).key == kept.key  # no tile is left


def test_work_follows_the_kept_blocks() -> None:
    """A window of two blocks and a half: four blocks a row are scored, of any length; one for its own row."""
    scored = []
    for n in (512, 1024):
        mask = create_block_mask(lambda _b, _h, i, j: (i >= j) & (i - j < 80), 1, 1, n, n, "cpu", 32)
        q = torch.zeros(1, n, 2, 8)
        with FlopCounterMode(display=False) as flops:
            block_sparse_attention(q, q, q, mask)
        blocks = 4 * (n // 32) - 6
        assert flops.get_total_flops() == 2 * 2 * 8 * 2 * blocks * 32 * 32
        pattern = BlockPattern.from_block_mask(mask)
        assert pattern.tiles is not None
        assert len(pattern.tiles) == 3  # the diagonal, and the two blocks that the edge of the window crosses
        plan = plan_blocks(pattern, Shape(1, n, 2, 2, 8), itemsize=4, workspace_bytes=2**20)
        assert plan.num_defined_pairs == 2 * pattern.num_pairs
        scored.append((plan.num_pairs, pattern.num_pairs))
    assert scored[0][0] == 2 * (4 * 16 - 6) * 32 * 32
    assert scored[0][1] == 80 * 512 - 80 * 79 // 2


@pytest.mark.parametrize("kernel", FUSED)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_what_a_mask_hides_may_hold_anything(kernel: str, value: float) -> None:
    """Tokens behind the lengths of sequences, which see nothing and are seen by none."""
    length = torch.tensor([150, 77])
    mask = create_block_mask(
        lambda b, _h, i, j: (i < length[b]) & (j < length[b]) & (i >= j), B, None, N, N, "cpu", SIZE
    )
    hidden = torch.arange(N) >= length[:, None]
    leaves, grad, results = qkv(torch.float32), torch.randn(B, N, H, 8), []
    for filling in (0.0, value):
        filled = [x.detach().masked_fill(hidden[..., None, None], filling).requires_grad_() for x in leaves]
        out, lse = block_sparse_attention(*filled, mask, return_lse=True, execution=Execution(kernel))
        given_grad = grad.masked_fill(hidden[..., None, None], filling)
        results.append([out, lse, *torch.autograd.grad(out, filled, given_grad)])
    out, lse, *gradients = results[0]
    assert not out[hidden].any()
    assert torch.equal(lse == -math.inf, hidden[:, None].expand(B, H, N))
    assert not any(x[hidden].any() for x in gradients)
    for got, want in zip(results[1], results[0], strict=True):
        assert_close(got, want, torch.float32)


@pytest.mark.parametrize(("dropout_p", "is_causal"), [(0.0, True), (0.4, False)])
def test_gradcheck(dropout_p: float, is_causal: bool) -> None:
    mask = create_block_mask(lambda _b, h, i, j: (i + 2 * j + h) % 3 > 0, None, 2, 7, 7, "cpu", 3)
    pattern = BlockPattern.from_block_mask(mask)
    tensors = [torch.randn(1, 7, h, 2, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1)]
    key_mask = torch.tensor([[True, False, True, True, True, False, True]])
    options: Any = {"is_causal": is_causal, "key_mask": key_mask, "dropout_p": dropout_p}

    def attention(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)
        out, lse = block_sparse_attention(*tensors, pattern, return_lse=True, **options)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    assert torch.autograd.gradcheck(attention, tensors)


def test_dropout_drops_what_is_seen() -> None:
    """Values that make the outputs the probabilities themselves."""
    mask, dense = masks("sliding window")
    q, k = (torch.randn(1, N, 1, N, dtype=torch.float64) for _ in range(2))
    v = torch.eye(N, dtype=torch.float64)[None, :, None]
    plain, dropped = (block_sparse_attention(q, k, v, mask, dropout_p=p)[0, :, 0] for p in (0.0, 0.3))
    assert torch.equal(plain != 0, dense[0])
    kept = dropped != 0
    assert_close(dropped[kept], plain[kept] / 0.7, torch.float64)
    assert abs(kept.sum().item() / dense[0].sum().item() - 0.7) < 0.03


def test_masks_by_other_hands() -> None:
    """Entries behind the counts hold anything, columns are as few as needed, full blocks are not named."""
    kept = torch.tensor([[True, False, False], [True, True, False], [False, True, True]])
    counts = kept.sum(-1, dtype=torch.int32)[None, None]
    indices = torch.tensor([[0, 0], [0, 1], [1, 2]], dtype=torch.int32)[None, None]
    mask = BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=8, mask_mod=None, seq_lengths=(20, 20), compute_q_blocks=False
    )
    assert mask.mask_mod is noop_mask
    pattern = BlockPattern.from_block_mask(mask)
    assert pattern.key == BlockPattern.from_layout(kept, 20, 8).key
    with pytest.raises(ValueError, match="24 queries in blocks of 8 are 3 rows, got 2"):
        BlockPattern.from_block_mask(
            BlockMask.from_kv_blocks(
                counts[..., :2], indices[..., :2, :], None, None, 8, None, (24, 24), compute_q_blocks=False
            )
        )


def test_bad_masks_state_rule_and_fact() -> None:
    q = torch.zeros(2, 64, 4, 8)

    def attend(mod: Mod = causal, b: int | None = None, h: int | None = None, n: int = 64) -> None:
        mask = create_block_mask(causal, b, h, n, n, "cpu", 16)
        mask.mask_mod = mod
        block_sparse_attention(q, q, q, mask)

    attend()
    for call, error, message in (
        ({"mod": lambda _b, _h, i, j: i - j}, TypeError, r"one bool for a query and a key, got torch\.int64"),
        ({"mod": lambda _b, _h, i, j: (i > j)[None]}, TypeError, r"got torch\.bool of shape \(1,\)"),
        ({"n": 80}, ValueError, "the pattern is for a length of 80, got tensors of length 64"),
        ({"h": 3}, ValueError, "num_heads must be that of the mask, 3, got 4"),
        ({"b": 3}, ValueError, "a pattern has 1 layout, .* 2 x 4 batches and heads, got 12"),
    ):
        with pytest.raises(error, match=message):
            attend(**call)


def test_what_cannot_take_tiles_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = BlockPattern.from_block_mask(masks("causal")[0])
    with pytest.raises(ValueError, match="a ring takes patterns of whole blocks, got one with 2 tiles"):
        ring._check_fit(pattern, torch.zeros(B, N, H, 8), False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    request = Request(torch.device("cpu"), torch.float32, tiled=True)
    assert triton.why_not(request) == "it takes no mask of pairs, and the pattern has tiles"


# Head 1 sees the second block through a segment that begins and ends inside it.
ONE_INSIDE = {"segment_lengths": [5], "dilation_rates": [5]}


@st.composite
def dilated_masks(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(1, 120))
    branch = st.integers(1, n + 20).flatmap(lambda w: st.tuples(st.just(w), st.integers(1, w)))
    branches = draw(st.lists(branch, max_size=3))
    given: dict[str, Any] = {"n": n, "is_causal": draw(st.booleans()), "num_heads": draw(st.integers(1, 4))}
    given["block_size"] = draw(st.sampled_from([1, 3, 8, 16, 40]))
    if branches:
        given |= dict(zip(("segment_lengths", "dilation_rates"), zip(*branches, strict=True), strict=True))
    if not branches or draw(st.booleans()):
        given["window_size"] = draw(st.integers(1, n + 5))
    return given


@settings(max_examples=80)
@given(dilated_masks())
@example({"n": 16, "is_causal": False, "num_heads": 2, "block_size": 8, **ONE_INSIDE})
def test_dilated_masks_show_the_definition(call: dict[str, Any]) -> None:
    """What the reference counts at least once, and a band; the blocks are those of torch's own builder."""
    n, heads = call["n"], call["num_heads"]
    expected = torch.zeros(heads, n, n, dtype=torch.bool)
    if "segment_lengths" in call:
        expected |= multiplicity(n, heads, call["segment_lengths"], call["dilation_rates"]) > 0
    index = torch.arange(n)
    expected |= (index[:, None] - index).abs() < call.get("window_size", 0)
    expected = expected.tril() if call["is_causal"] else expected
    mask = create_dilated_block_mask(**call)
    assert torch.equal(create_mask(mask.mask_mod, 1, heads, n, n, device="cpu")[0], expected)
    assert torch.equal(BlockPattern.from_block_mask(mask).to_dense().expand(heads, n, n), expected)
    size = call["block_size"]
    other = create_block_mask(mask.mask_mod, None, mask.shape[1], n, n, "cpu", size)
    assert torch.equal(mask.to_dense(), other.to_dense())
    assert torch.equal(mask.kv_num_blocks + mask.full_kv_num_blocks, mask.to_dense().sum(-1))


def test_one_branch_is_dilated_attention() -> None:
    for heads, is_causal in ((6, False), (6, True)):
        tensors = [torch.randn(2, 150, h, 8, dtype=torch.float64, requires_grad=True) for h in (heads, 2, 2)]
        mask = create_dilated_block_mask(150, [64], [4], num_heads=heads, block_size=16, is_causal=is_causal)
        out = block_sparse_attention(*tensors, mask)
        expected = dilated_attention(*tensors, [64], [4], is_causal=is_causal)
        assert_close(out, expected, torch.float64)
        assert_same_gradients(out, expected, tensors, torch.float64)


def test_dilated_masks_of_long_sequences_are_made_of_blocks() -> None:
    """2^20 positions in 256 blocks: an n x n mask would take a terabyte."""
    n, size = 2**20, 4096
    mask = create_dilated_block_mask(
        n, [2**16, 2**18], [1, 8], window_size=1000, block_size=size, num_heads=2, is_causal=True
    )
    assert mask.shape == (1, 2, n, n)
    assert int(mask.full_kv_num_blocks.sum()) == 2 * 16 * (16 * 15 // 2)  # below the diagonal of segments
    in_long = 4 * (64 * 65 // 2) - 16 * (16 * 15 // 2)  # of the longer segments, without those
    between = 3  # the band reaches from each of these into the one before
    assert int(mask.kv_num_blocks.sum()) == 2 * (in_long + between)


def test_masks_need_something_to_show() -> None:
    with pytest.raises(ValueError, match="a mask needs branches, a window_size or both, got neither"):
        create_dilated_block_mask(64)
    with pytest.raises(TypeError, match="dilation_rates"):
        create_dilated_block_mask(64, [16])
