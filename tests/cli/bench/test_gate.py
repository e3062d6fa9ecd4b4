"""The gate sees wrong answers, and only those: of calls, of chosen rows, of every candidate."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch import block_sparse, functional
from dilated_attention_pytorch.cli.bench import gate
from dilated_attention_pytorch.cli.bench.candidates import ENTRIES, Config
from dilated_attention_pytorch.cli.bench.cases import Case, check_candidate
from dilated_attention_pytorch.cli.bench.gate import WrongAnswerError
from dilated_attention_pytorch.modules.attention import AttentionModule
from dilated_attention_pytorch.reference import block_sparse_attention_reference, dilated_attention_reference
from dilated_attention_pytorch.spec import DilatedSpec
from support.wrong_answers import WRONG, perturbed

CONFIG = Config(4, 8, (16, 40, 64), (1, 2, 4), sparsity=0.5, block_size=8)
BRANCHES = CONFIG.segment_lengths, CONFIG.dilation_rates
OWN = [name for name, entry in ENTRIES.items() if not entry.reason(True)]


def attend(*qkv: Tensor, return_lse: bool = True) -> Any:
    return functional.dilated_attention(*qkv, *BRANCHES, return_lse=return_lse)


def reference(*qkv: Tensor) -> Any:
    return dilated_attention_reference(*qkv, *BRANCHES, return_lse=True)


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, -math.inf], [1.0, -math.inf], 0.0),
        ([1.5, -math.inf], [1.0, -math.inf], 0.5),
        ([1.0, math.inf], [1.0, -math.inf], math.inf),
        ([1.0, -9.0], [1.0, -math.inf], math.inf),
        ([1.0, -math.inf], [1.0, -9.0], math.inf),
        ([math.nan, -math.inf], [1.0, -math.inf], math.inf),
        ([5.0, 3.0], [4.0, 3.0], 0.25),
    ],
)
def test_errors_are_absolute_or_relative_and_infinities_the_same(
    actual: list[float], expected: list[float], error: float
) -> None:
    assert gate.largest_error(torch.tensor(actual), torch.tensor(expected).double()) == error


def test_right_answers_pass_and_wrong_ones_do_not() -> None:
    inputs, grad_out = gate.make_inputs((2, 101, 4, 8), backward=True)
    error = max(gate.compare(attend, reference, inputs, grad_out))
    assert gate.accept("tiny", error) == error < 2e-5
    for change in WRONG.values():
        wrong = partial(perturbed(attend, change), return_lse=True)
        error = max(gate.compare(wrong, reference, inputs, grad_out))
        with pytest.raises(WrongAnswerError, match="tiny: the result is off by"):
            gate.accept("tiny", error)
    assert gate.accept("tiny", 2e-2, "bfloat16") == 2e-2
    with pytest.raises(WrongAnswerError, match="more than 3e-02"):
        gate.accept("tiny", 4e-2, "bfloat16")


def test_rows_hold_both_ends_and_a_segment_boundary_and_alone_make_gradients() -> None:
    rows = gate.choose_rows(16, 100)
    assert {0, 47, 48, 99} <= set(rows)
    assert len(rows) <= gate.ROWS
    _, grad_out = gate.make_inputs((2, 100, 4, 8), backward=True, rows=rows)
    assert grad_out is not None
    assert grad_out[1, rows].abs().sum((1, 2)).all()
    grad_out[1, rows] = 0.0
    assert not grad_out.any()


def block_pattern(is_causal: bool) -> block_sparse.BlockPattern:
    layout = torch.rand(4, 13, 13, generator=torch.Generator().manual_seed(0)) < 0.5
    return block_sparse.BlockPattern.from_layout(
        layout | torch.eye(13, dtype=torch.bool), 101, 8, is_causal=is_causal
    )


@pytest.mark.parametrize("rates", [(1, 2, 4), (2, 4, 8), None])  # at the second some rows meet no key
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_agree_with_the_dense_reference(is_causal: bool, rates: tuple[int, ...] | None) -> None:
    rows = [0, 1, 2, 3, 7, 8, 47, 48, 50, 100]
    if rates is None:
        pattern = block_pattern(is_causal)
        exact = partial(block_sparse_attention_reference, mask=pattern.to_dense(), is_causal=is_causal)
        keys: Any = partial(gate.block_keys, pattern, 4)
    else:
        spec = DilatedSpec(BRANCHES[0], rates, is_causal)
        exact = partial(dilated_attention_reference, segment_lengths=spec)
        keys = partial(gate.dilated_keys, spec, 4, 101)
    inputs, grad_out = gate.make_inputs((2, 101, 4, 8), "float64", backward=True, rows=rows)
    results = gate.call(partial(exact, return_lse=True), inputs, grad_out)
    met = {t: keys(t) for t in rows}
    assert gate.compare_rows(inputs, grad_out, results, met, has_lse=True) < 1e-12


@pytest.mark.parametrize("name", ["sdpa", "DilatedAttention", "BlockSparseDilatedAttention"])
def test_rows_at_full_length_find_what_differs(name: str) -> None:
    entry, rows = ENTRIES[name], [0, 63, 200]
    config = replace(CONFIG, segment_lengths=(64, 256), dilation_rates=(1, 2))
    inputs, grad_out = gate.make_inputs((2, 512, 4, 8), backward=True, rows=rows)
    candidate = entry.make(config, 512)
    right = candidate.run(inputs, grad_out)
    assert candidate.keys is not None
    keys = {t: candidate.keys(t) for t in rows}
    error_of = partial(gate.compare_rows, inputs, grad_out, rows=keys)
    assert error_of(right) < 2e-5
    for which in range(len(right)):
        wrong = [x.clone() for x in right]
        wrong[which][1, 63] += 1e-3
        assert error_of(wrong) > 1e-4, which
        for value in (1.0, math.nan):  # of a sequence without rows
            wrong[which][0, 400] = value
            assert which == 0 or error_of(wrong) >= 1.0


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", OWN)
def test_candidate_is_right(name: str, causal: bool) -> None:
    case = Case("tiny", replace(CONFIG, is_causal=causal), 256, (name,), b=2, backward=True)
    assert check_candidate(case, name) < 2e-5


@pytest.mark.parametrize("wrong", [wrong for wrong in WRONG if wrong != "lse"])  # modules return no lse
@pytest.mark.parametrize("name", ["DilatedAttention", "BlockSparseDilatedAttention"])
def test_gate_catches_a_wrong_candidate(wrong: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: AttentionModule, *args: Any, **options: Any) -> Tensor:
        out = right(self, *args, **options)
        return WRONG[wrong](out, out)[0]

    right = AttentionModule.forward
    monkeypatch.setattr(AttentionModule, "forward", forward)
    with pytest.raises(WrongAnswerError, match=f"tiny, {name}: the result is off"):
        check_candidate(Case("tiny", CONFIG, 256, (name,), backward=True), name)
