"""The suite of slides: what it says without torchscale, and that it refuses other results beside it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import slides
import torch
from torch import Tensor, nn

from dilated_attention_pytorch.cli.bench.gate import WrongAnswerError
from integrations.transcription import Settings, stack

[CASE] = slides.QUICK


class Encoder(nn.Module):
    """torchscale's `LongNetEncoder` as the suite calls it, by its formulas."""

    error = 0.0

    def __init__(self, settings: Any) -> None:
        super().__init__()
        assert settings.flash_attention
        branches = (eval(settings.segment_length), eval(settings.dilated_ratio))
        self.how, self.state = Settings(settings.encoder_attention_heads, *branches), {}

    def load_state_dict(self, state: dict[str, Tensor], assign: bool = False) -> None:
        self.state = state

    def forward(self, src_tokens: None, token_embeddings: Tensor) -> dict[str, Tensor]:
        out = stack(self.state, "", token_embeddings, self.how)
        out[..., 0] += self.error
        return {"encoder_out": out}


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures in this process, beside modules that stand for torchscale's."""
    monkeypatch.setattr(slides, "measure_in_child", lambda measure, *arguments: measure(*arguments))
    monkeypatch.setenv("TORCHSCALE", "somewhere")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, names in {
        "torchscale.architecture.config": {"EncoderConfig": SimpleNamespace},
        "torchscale.component.multihead_attention": {"flash_attn_func": None},
        "torchscale.model.longnet": {"LongNetEncoder": Encoder},
        "fairscale.nn": {},
        "timm.models.layers": {},
    }.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
        vars(sys.modules[name]).update(names)


def silent(text: str) -> None:
    """Where progress goes here."""


def test_torchscale_is_measured_where_it_is(checkout: None, monkeypatch: pytest.MonkeyPatch) -> None:
    result = slides.run(CASE, silent)
    assert result.error is not None
    assert result.error < 2e-5
    assert {"slide encode", "slide map", "ours", "torchscale"} == set(result.seconds)
    assert len(result.seconds["ours"]) == len(result.seconds["torchscale"]) == CASE.repeats
    assert all(figure.value is not None for figure in result.figures)
    assert sys.modules["torchscale.component.multihead_attention"].flash_attn_func is slides.stock_attention
    monkeypatch.setattr(Encoder, "error", 1e-3)
    with pytest.raises(WrongAnswerError, match="quick slide: off torchscale's embedding by"):
        slides.run(CASE, silent)


def test_without_torchscale_the_table_says_so(checkout: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHSCALE")
    result = slides.run(CASE, silent)
    assert result.why_not is None
    assert [figure.value is None for figure in result.figures] == [False, False, True, True, True]
    assert "not measured: TORCHSCALE names no checkout of torchscale" in str(slides.slide_table([result]))


def test_the_stock_op_stands_for_flash_attn() -> None:
    q, k, v = torch.randn(3, 2, 9, 4, 8).unbind(0)
    out, lse = slides.stock_attention(q, k, v)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
    assert (lse - scores.logsumexp(-1)).abs().max() < 1e-5
    assert (out - torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)).abs().max() < 1e-5
