"""WHAT quality costs: a small model trained with dense, dilated and block-sparse attention. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from .config import Config

ATTENTIONS = ("dense", "dilated", "block-sparse")


@dataclass(frozen=True)
class QualityCase:
    """Bits per byte on held-out text, and training time, of models that differ in their attention alone.

    `config` is the dilated attention; the block-sparse one keeps `kept` of the causal blocks, near and
    at the start ("global_local"). The text is the source of Python's standard library.
    """

    name: str
    config: Config
    n: int
    kept: float
    steps: int
    layers: int = 4
    batch_tokens: int = 8192  # of a step, whatever the context
    dim_feedforward: int = 512
    learning_rate: float = 2e-3
    block_size: int = 128
    validation_tokens: int = 2**17
    quality_target: float | None = None
    time_target: float | None = None
    repeats: int = 1


_SHORT = Config(4, 32, (256, 1024), (1, 4), is_causal=True)
_LONG = Config(4, 32, (1024, 4096, 8192), (1, 4, 8), is_causal=True)
_QUICK = Config(2, 16, (32, 128), (1, 4), is_causal=True)

QUALITY_SUITE = (
    QualityCase("context 1024", _SHORT, 1024, 0.3, 200),
    QualityCase("context 8192", _LONG, 8192, 0.17, 200, quality_target=1.02, time_target=1.0),
)
QUALITY_QUICK = (
    QualityCase("quick quality", _QUICK, 128, 0.5, 3, 1, 512, 32, block_size=16, validation_tokens=512),
)


def describe_quality(case: QualityCase) -> str:
    """The sizes of a case in a few words."""
    config = case.config
    branches = ", ".join(f"({w}, {r})" for w, r in config.spec.branches)
    model = f"{case.layers} layers, h = {config.h}, d = {config.d}, feed-forward {case.dim_feedforward}"
    blocks = f"{case.kept:g} of the blocks of {case.block_size}"
    return f"{model}, {case.steps} steps of {case.batch_tokens} bytes; branches {branches}; {blocks}"


def quality_target(case: QualityCase) -> str:
    if case.quality_target is None:
        return ""
    return f"  [targets: bits {case.quality_target}, time {case.time_target}]"
