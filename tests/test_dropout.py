"""Dropout of all functions of attention, and gradients by finite differences, of drawn masks too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch import BlockPattern, Execution, block_sparse_attention, dilated_attention
from support.attentions import (
    BRANCHES,
    CAUSAL,
    EACH,
    Kind,
    N,
    assert_all_close,
    qkv,
    random_pattern,
    with_gradients,
)
from support.executions import dilated
from support.tolerances import assert_close


def drop(attend: Callable[..., Any], *tensors: Tensor, seed: int = 3, **options: Any) -> Any:
    torch.manual_seed(seed)
    return attend(*tensors, **options)


@EACH
@CAUSAL
@pytest.mark.parametrize("workspace_bytes", [1, 2**22])
def test_dropout_acts_on_probabilities(workspace_bytes: int, causal: bool, attend: Kind) -> None:
    p = 0.3
    q, k = (torch.randn(1, N, 4, N, dtype=torch.float64) for _ in range(2))
    v = torch.eye(N, dtype=torch.float64)[None, :, None].repeat(1, 1, 4, 1)  # outputs are probabilities
    if not attend.layouts:  # a key that two branches reach is dropped in each of them
        attend = partial(dilated, segment_lengths=[24], dilation_rates=[1])  # type: ignore[assignment]
    options: Any = {"is_causal": causal, "workspace_bytes": workspace_bytes, "return_lse": True}
    plain, plain_lse = attend(q, k, v, **options)
    dropped, lse = drop(attend, q, k, v, dropout_p=p, **options)
    assert torch.equal(dropped, drop(attend, q, k, v, dropout_p=p, **options)[0])
    assert not torch.equal(dropped, drop(attend, q, k, v, seed=4, dropout_p=p, **options)[0])
    assert_close(lse, plain_lse, torch.float64)
    kept = dropped != 0
    assert_close(dropped[kept], (plain / (1 - p))[kept], torch.float64)
    share = kept.sum().item() / (plain != 0).sum().item()
    assert abs(share - (1 - p)) < 0.05


@EACH
def test_dropout_of_everything_gives_zeros(attend: Kind) -> None:
    tensors = [x.requires_grad_() for x in qkv()]
    out = attend(*tensors, dropout_p=1.0)
    assert not any(x.any() for x in (out, *torch.autograd.grad(out.sum(), tensors)))


def test_dropout_has_the_right_expectation() -> None:
    q, k = (torch.randn(1, 20, 2, 20, dtype=torch.float64) for _ in range(2))
    v = torch.eye(20, dtype=torch.float64)[None, :, None].repeat(1, 1, 2, 1)
    pattern = random_pattern(20, 4, density=0.7)
    plain = block_sparse_attention(q, k, v, pattern)
    draws = [block_sparse_attention(q, k, v, pattern, dropout_p=0.5) for _ in range(400)]
    # The mean of a probability P that is 0 or 2 P, over 400 draws, deviates by P / 20.
    assert ((torch.stack(draws).mean(0) - plain).abs() <= 5 * plain / 20).all()


def test_dropout_draws_anew_for_every_tile_segment_block_and_head() -> None:
    q = torch.zeros(2, 64, 4, 16, dtype=torch.float64)
    v = torch.eye(16, dtype=torch.float64).repeat(4, 1)[None, :, None].expand(2, 64, 4, 16)
    eye = torch.eye(4, dtype=torch.bool)
    patterns = [BlockPattern.from_layout(x, 64, 16) for x in (eye, eye.expand(4, 4, 4), eye.expand(8, 4, 4))]
    functions: list[Any] = [partial(block_sparse_attention, pattern=pattern) for pattern in patterns]
    functions.append(partial(dilated_attention, segment_lengths=[16], dilation_rates=[1]))
    for attend in functions:
        for size in (1, 2**15, 2**25):  # several tiles, and one
            out = attend(q, q, v, dropout_p=0.5, execution=Execution(workspace_bytes=size))
            parts = [part for head in out.transpose(1, 2).flatten(0, 1) for part in head.split(16)]
            assert len({tuple((part != 0).flatten().tolist()) for part in parts}) == len(parts) == 32


@pytest.mark.parametrize("workspace_bytes", [3000, 2**20])
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"tail": "phantom", "head_mixing": "grouped"},
        {"cu_seqlens": torch.tensor([0, 5, 12])},
    ],
    ids=lambda options: ",".join(options),
)
def test_dropout_has_the_gradients_of_its_masks(options: Any, steps: int, workspace_bytes: int) -> None:
    tensors = [torch.randn(1, 12, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    how = {"segment_lengths": [4, 12], "dilation_rates": [1, 2], "dropout_p": 0.4, "steps": steps}
    attention = partial(drop, dilated, **how, workspace_bytes=workspace_bytes, **options)
    assert torch.autograd.gradcheck(attention, tensors, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"detach_mixing": True}, {"is_causal": True}], ids=str)
def test_steps_with_a_dropout_that_drops_nothing(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Tiles are cut as dropout needs them, in both passes, and every probability stays."""
    how: list[Any] = [{}, {"dropout_p": 1e-30, "steps": 5, "workspace_bytes": 2**14}]
    tensors, results = [x.to(dtype).requires_grad_() for x in qkv(96, 6, 6)], []
    for each in how:
        out = dilated(*tensors, **BRANCHES, **options, **each)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    assert_all_close(results, dtype)


@pytest.mark.parametrize("steps", [1, 4])
def test_dropout_does_not_depend_on_how_the_work_is_cut(steps: int) -> None:
    attend = partial(dilated, segment_lengths=[16, 64], dilation_rates=[1, 2], dropout_p=0.4, steps=steps)
    tensors, results = qkv(64), []
    for size in (1, 2**10, 2**14, None):
        torch.manual_seed(3)
        results.append(with_gradients(attend, tensors, workspace_bytes=size))
    assert_all_close(results, torch.float64)


def test_dropout_under_autocast_keeps_its_rate() -> None:
    x = torch.randn(1, 256, 2, 16).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = dilated_attention(x, x, x, [256], [1], dropout_p=1e-30)
    assert_close(out, dilated_attention(x, x, x, [256], [1]), torch.bfloat16)


SHOWN = torch.tensor([[True, False, True, True, True, False, True]])


def check_gradients(attend: Callable[..., Any], heads: tuple[int, int], d: int, **options: Any) -> None:
    """With dropout the gradients are those of the drawn mask."""
    shapes = [(1, 7, h, d) for h in (heads[0], heads[1], heads[1])]
    tensors = [torch.randn(x, dtype=torch.float64, requires_grad=True) for x in shapes]

    def attention(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = drop(attend, *tensors, return_lse=True, **options)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    assert torch.autograd.gradcheck(attention, tensors)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "head_offsets": "blocked"},
        {"tail": "phantom"},
        {"head_mixing": "grouped"},
        {"key_mask": SHOWN},
        {"cu_seqlens": torch.tensor([0, 2, 7])},
        {"dropout_p": 0.4},
    ],
    ids=str,
)
def test_gradcheck(options: dict[str, Any]) -> None:
    attend = partial(dilated_attention, segment_lengths=[3, 7], dilation_rates=[1, 2])
    check_gradients(attend, (4, 2), 3, **options)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("workspace_bytes", [1, 600, 2**22])
@CAUSAL
@pytest.mark.parametrize("layouts", [1, 2])
def test_gradcheck_of_blocks(layouts: int, causal: bool, workspace_bytes: int, dropout_p: float) -> None:
    attend = partial(block_sparse_attention, pattern=random_pattern(7, 3, layouts, density=0.6))
    given: Any = {"is_causal": causal, "key_mask": SHOWN, "dropout_p": dropout_p}
    check_gradients(attend, (2, 1), 2, execution=Execution(workspace_bytes=workspace_bytes), **given)
