"""Forecasts of time: what they must be by the way the kernel works, and how they order configurations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dilated_attention_pytorch.cli.forecast import KEY_BLOCK, NATIVE, Call, computed_pairs, relative_time
from dilated_attention_pytorch.plan import Shape
from dilated_attention_pytorch.spec import DilatedSpec, branches_for
from support.executions import FUSED


def forecast(
    n: int, *branches: tuple[int, ...], causal: bool = False, train: bool = False, d: int = 64
) -> float:
    spec = DilatedSpec(*branches, is_causal=causal)
    found = relative_time(Call(Shape(1, n, 8, 8, d), torch.float32, spec, train))
    assert found is not None
    return found


@pytest.mark.parametrize("queries", [1, 31, 500, 512, 513, 767, 1024, 5000])
def test_causal_pairs_are_whole_blocks_of_keys(queries: int) -> None:
    pairs = computed_pairs(queries, queries, is_causal=True)
    assert queries * (queries + 1) // 2 <= pairs <= queries * queries
    if queries <= KEY_BLOCK:
        assert pairs == queries * queries
    else:
        assert pairs <= queries * (queries + KEY_BLOCK + 256) // 2
    assert computed_pairs(queries, 7, is_causal=False) == 7 * queries
    # Two blocks of 256 queries see 512 keys, the other two all 1024.
    assert computed_pairs(1024, 1024, is_causal=True) == 512 * 512 + 512 * 1024


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("no_native")
def test_dense_attention_as_one_segment_costs_little_more(causal: bool, train: bool) -> None:
    assert 1.0 < forecast(16384, (16384,), (1,), causal=causal, train=train) < 1.05


@pytest.mark.skipif("native" not in FUSED, reason="there is no C compiler")
def test_the_native_kernel_scores_each_key_once() -> None:
    dense = forecast(16384, (16384,), (1,))
    assert dense == pytest.approx(1 / NATIVE, rel=0.01)
    # Of a segment of 2048 and every second key of 4096: the second branch's keys outside of the segment.
    nested = forecast(16384, (2048, 4096), (1, 2))
    assert nested == pytest.approx(dense * (2048 + 512) / 16384, rel=0.01)


@pytest.mark.usefixtures("no_native")
def test_what_saves_more_is_forecast_to() -> None:
    times = [forecast(n, *branches_for(n, first=2048, ratio=4)) for n in (4096, 16384, 65536)]
    assert times == sorted(times, reverse=True)
    assert forecast(16384, (1024, 4096, 16384), (1, 4, 16)) < forecast(16384, (4096, 16384), (1, 4))
    # What does not shrink with the head weighs more in small ones, dense and dilated alike.
    wide, narrow = (forecast(8192, (64, 256), (1, 4), d=d) for d in (128, 16))
    share = (64 + 256 / 16) / 8192  # of the pairs
    assert share < narrow < wide


def test_nothing_is_told_of_other_devices() -> None:
    call = Call(Shape(1, 4096, 8, 8, 64), torch.bfloat16, DilatedSpec((2048,), (1,)))
    assert relative_time(call) is not None
    assert relative_time(replace(call, device=torch.device("cuda"))) is None
    assert relative_time(replace(call, dtype=torch.float16)) is None
