"""The sweep over the families of transformers, for a few of them, and its record in the documentation."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers_sweep
from tiny_models import families, tiny_config
from transformers_sweep import BEGIN as FAMILIES_BEGIN, END as FAMILIES_END

from dilated_attention_pytorch.integrations.transformers import use_dilated_attention
from support.programs import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")


READS_ITS_MASK = "no padding: dilated attention cannot honour a model that reads its attention mask itself"


@pytest.mark.parametrize(
    ("name", "outcome", "reason"),
    [
        # no is_causal, and a mask that is not
        *((name, "equal", "") for name in ("align_text_model", "clap_text_model", "splinter")),
        (
            "aimv2_text_model",
            "equal",
            "",
        ),  # is_causal is False, the mask is causal where there is padding
        ("phi4_multimodal_vision", "equal", ""),  # is_causal is True, and the mask is not
        *((name, "refused", READS_ITS_MASK) for name in ("deepseek_v32", "glm_moe_dsa", "axk2")),
    ],
)
def test_masks_tell_causality_and_are_not_read(name: str, outcome: str, reason: str) -> None:
    result = transformers_sweep.check_family(families([name])[name])
    assert (result["outcome"], result["reason"]) == (outcome, reason)
    assert outcome == "refused" or "no padding" in result["errors"]


def test_pooling_at_padding_is_that_of_eager_attention() -> None:
    config_class, model_class = families(["pe_audio_encoder"])["pe_audio_encoder"]
    config = tiny_config(config_class)
    config.initializer_range, config._attn_implementation = 0.3, "eager"
    torch.manual_seed(0)
    model = model_class(config).eval()
    padding = torch.ones(2, 512 * 20, dtype=torch.bool)
    padding[0, : 512 * 8] = False  # PE-Audio's class token counts as padding with the place that follows it
    inputs = {"input_values": torch.randn(2, 1, 512 * 20), "padding_mask": padding}
    expected = model(**inputs).pooler_output
    use_dilated_attention(model, transformers_sweep.FULL)
    torch.testing.assert_close(model(**inputs).pooler_output, expected, rtol=0, atol=1e-4)
    gradients = []
    for name in ("eager", "dilated"):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(**inputs).pooler_output.square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert transformers_sweep.relative_error(gradients[1], gradients[0]) < 1e-4


def test_command_writes_a_record_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, record = tmp_path / "page.md", tmp_path / "record.json"
    page.write_text(f"before\n{FAMILIES_BEGIN}\n{FAMILIES_END}\nafter\n")
    options = ["--family", "llama", "--family", "bart", "--record", str(record), "--update", str(page)]
    assert transformers_sweep.main(options) == 0
    results = json.loads(record.read_text())["families"]
    assert {name: result["outcome"] for name, result in results.items()} == {
        "llama": "equal",
        "bart": "refused",
    }
    assert set(results["llama"]["errors"]) == {"no padding", "right padding", "left padding"}
    assert "| has no cross attention | bart |" in page.read_text()
    assert "[2/2] bart: refused" in capsys.readouterr().err


def test_page_shows_the_record() -> None:
    record = json.loads(transformers_sweep.RECORD.read_text())
    page = (ROOT / "docs" / "huggingface.md").read_text()
    shown = page.partition(FAMILIES_BEGIN)[2].partition(FAMILIES_END)[0].strip()
    assert shown == transformers_sweep.render(record)
    outcomes = Counter(result["outcome"] for result in record["families"].values())
    assert outcomes["equal"] >= 60
    assert not outcomes["differs"] + outcomes["crashes"]
