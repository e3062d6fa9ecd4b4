"""The FlexAttention path: its numbers in small on the CPU, its conditions, and that CUDA calls take it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

from dilated_attention_pytorch import (
    BlockPattern,
    Execution,
    SparsePatternConfig,
    block_sparse,
    block_sparse_attention,
)
from dilated_attention_pytorch.ops import block_spec, write_recipe
from dilated_attention_pytorch.plan.flex import flex_block_sparse, why_not_flex
from support.tolerances import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("n", "size", "layouts"), [(200, 32, 4), (192, 64, 1), (130, 64, 8), (5, 8, 1)])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_the_engine(n: int, size: int, layouts: int, is_causal: bool, padded: bool) -> None:
    torch.manual_seed(n)
    blocks = -(-n // size)
    layout = torch.rand(layouts, blocks, blocks) < 0.5
    pattern = BlockPattern.from_layout(layout, n, size, is_causal=is_causal)
    q, k, v = (torch.randn(2, n, h, 16) for h in (4, 2, 2))
    mask = torch.rand(2, n) > 0.3 if padded else None
    out, lse = flex_block_sparse(q, k, v, pattern, scale=0.25, key_mask=mask)
    expected, expected_lse = block_sparse_attention(
        q, k, v, pattern, is_causal=is_causal, scale=0.25, key_mask=mask, return_lse=True
    )
    block_mask = pattern.to_block_mask(num_heads=4)
    assert torch.equal(block_mask.to_dense().bool().flatten(0, 1), pattern.to_layout())
    assert BlockPattern.from_block_mask(block_mask, is_causal=is_causal).key == pattern.key
    assert out.is_contiguous()
    assert_close(out, expected, torch.float32)
    assert_close(lse, expected_lse, torch.float32)


def pattern_of(blocks: int = 4, size: int = 128) -> BlockPattern:
    ones = torch.ones(blocks, dtype=torch.int64)
    return BlockPattern.from_counts(blocks * size, size, ones, torch.arange(blocks), is_causal=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"device": "cpu"}, "used on cuda, and the tensors are on cpu"),
        ({"dtype": torch.float64}, "no float64"),
        ({"dropout_p": 0.1}, "no dropout"),
        ({"size": 64}, "multiples of 128, and the pattern's are 64"),
        ({"d": 8}, "16 features or more, and a head has 8"),
        ({"blocks": 4097}, "4097 x 4097 blocks"),
    ],
)
def test_says_why_it_cannot_run(change: dict[str, Any], reason: str | None) -> None:
    call: dict[str, Any] = {"device": "cuda", "dtype": torch.float16, "dropout_p": 0.0, "size": 128, "d": 64}
    call |= {"blocks": 4} | change
    pattern = pattern_of(call["blocks"], call["size"])
    with FakeTensorMode():
        q = torch.empty(1, pattern.n, 2, call["d"], dtype=call["dtype"], device=call["device"])
    said = why_not_flex(q, pattern, call["dropout_p"])
    assert (said is None) == (reason is None)
    assert reason is None or reason in str(said)


@pytest.mark.parametrize("by_recipe", [False, True])
def test_cuda_calls_take_it(by_recipe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fake tensors on a cuda device: the call arrives with the pattern, and its result is returned."""
    arrived: list[BlockPattern] = []

    def stand_in(q: Tensor, k: Tensor, v: Tensor, pattern: BlockPattern, **_: Any) -> tuple[Tensor, Tensor]:
        arrived.append(pattern)
        return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1])

    monkeypatch.setattr(block_sparse, "flex_block_sparse", stand_in)
    pattern: Any = pattern_of()
    if by_recipe:
        pattern = write_recipe(SparsePatternConfig("local_window", 0.25), ())
    with FakeTensorMode():
        q = torch.empty(1, 512, 2, 64, dtype=torch.float16, device="cuda")
    out, _ = block_sparse.attend_blocks(
        q, q, q, pattern, block_spec(True, None, 0), Execution(use_pattern_cache=False)
    )
    assert (out.device.type, out.shape) == ("cuda", q.shape)
    assert len(arrived) == 1
    assert arrived[0].is_causal


def make_mask(b: int | None = None, h: int | None = None, keys: int = 96) -> Any:
    return create_block_mask(lambda _b, _h, i, j: i >= j, b, h, 96, keys, device="cpu", BLOCK_SIZE=16)


@pytest.mark.parametrize(
    ("mask", "num_heads", "error", "message"),
    [
        (torch.ones(3, 3), None, TypeError, "mask must be a FlexAttention BlockMask, got Tensor"),
        (None, None, TypeError, "mask must be a FlexAttention BlockMask, got NoneType"),
        (make_mask(keys=64), None, ValueError, r"as many queries as keys, .* lengths \(96, 64\)"),
        (make_mask(b=2), None, ValueError, "a mask of 2 batches for all heads needs num_heads"),
        (make_mask(h=3), 2, ValueError, "num_heads must be that of the mask, 3, got 2"),
    ],
)
def test_masks_that_are_no_pattern(
    mask: Any, num_heads: int | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        BlockPattern.from_block_mask(mask, num_heads=num_heads)


def test_a_key_mask_lies_where_the_mask_is_made() -> None:
    pattern = BlockPattern.from_layout(torch.ones(2, 4, 4) > 0, 64, 16)
    seen = torch.rand(2, 64) > 0.3
    assert (
        pattern.to_block_mask("cpu:0", num_heads=2, key_mask=seen).shape[-1] == 64
    )  # an index changes nothing
    with pytest.raises(ValueError, match="on the device of the mask, meta, got cpu"):
        pattern.to_block_mask("meta", num_heads=2, key_mask=seen)
    with pytest.raises(ValueError, match=r"shape \(b, n\) with n = 64, got \(2, 63\)"):
        pattern.to_block_mask(num_heads=2, key_mask=seen[:, 1:])
