"""The gate sees wrong answers, and only those."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dilated_attention_pytorch import functional
from dilated_attention_pytorch.bench import gate, run
from dilated_attention_pytorch.bench.cases import SUITES, TimeCase
from dilated_attention_pytorch.bench.child import Measured
from dilated_attention_pytorch.bench.config import Config
from dilated_attention_pytorch.reference import dilated_attention_reference
from support.wrong_answers import WRONG, perturbed

CONFIG = Config(4, 8, (16, 40, 64), (1, 2, 4))
CASE = TimeCase("tiny", CONFIG, ((2, 100), (1, 37)), backward=True, repeats=1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_right_answers_pass(is_causal: bool) -> None:
    case = replace(CASE, config=replace(CONFIG, is_causal=is_causal))
    assert gate.check_case(case) < gate.TOLERANCE


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_are_not_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "dilated_attention", perturbed(functional.dilated_attention, WRONG[name]))
    monkeypatch.setattr(run, "interleave", lambda *_, **__: pytest.fail("a wrong answer was timed"))
    with pytest.raises(gate.WrongAnswerError, match="tiny: the result is off by"):
        run.run_case(CASE)


def test_wrong_answer_in_the_child_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = next(case for case in SUITES["quick"] if case.name == "quick memory")
    measured = Measured(error=0.5, nbytes={"peak_extra": 1, "results": 1})
    monkeypatch.setattr(run, "measure_in_child", lambda *_: measured)
    with pytest.raises(gate.WrongAnswerError, match=r"off by 5\.0e-01"):
        run.run_case(memory)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_agree_with_the_dense_reference(is_causal: bool) -> None:
    config = replace(CONFIG, is_causal=is_causal)
    call = gate.make_call(config, 2, 101, backward=True)
    leaves = [x.double().requires_grad_() for x in (call.q, call.k, call.v)]
    branches = (config.segment_lengths, config.dilation_rates)
    out, lse = dilated_attention_reference(*leaves, *branches, is_causal=is_causal, return_lse=True)
    assert call.grad_out is not None
    gradients = torch.autograd.grad(out, leaves, call.grad_out.double())
    results = gate.Results(out.detach(), lse.detach(), gradients)
    assert gate.rows_error(call, results) < 1e-12


def test_rows_hold_both_ends_and_a_segment_boundary() -> None:
    call = gate.make_call(CONFIG, 1, 100)
    places = {t for _, t in call.rows}
    assert {0, 47, 48, 99} <= places
    assert len(places) <= gate.ROWS_PER_CALL


def test_gradients_come_from_the_chosen_rows_alone() -> None:
    call = gate.make_call(CONFIG, 2, 50, backward=True)
    assert call.grad_out is not None
    outside = call.grad_out.clone()
    for row in call.rows:
        assert outside[row].abs().sum() > 0
        outside[row] = 0.0
    assert not outside.any()
