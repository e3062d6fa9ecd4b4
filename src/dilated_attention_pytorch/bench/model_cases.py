"""WHAT is measured of models: steps of decoding, a training step, a slide. Plain data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from ..integrations.gigapath import GIGAPATH_RATES, gigapath_segment_lengths
from .config import Config

GIGABYTE = 10**9


@dataclass(frozen=True)
class DecodeCase:
    """Time of a decoding step late in a stream over that of an early one, and the memory of the cache.

    Segments are filled differently at `early` and `late`, and a step costs what it reads. So there is a third
    position besides, after `late`, at which they are filled as they are at `early`.
    """

    name: str
    config: Config
    early: int
    late: int
    steps: int = 32  # timed together
    target: float | None = None
    repeats: int = 9

    @property
    def positions(self) -> dict[str, int]:
        period = max(self.config.segment_lengths)
        alike = self.early + -(-(self.late - self.early) // period) * period
        return {"early": self.early, "late": self.late, "alike": alike}


@dataclass(frozen=True)
class TrainCase:
    """Peak memory of a training step of a language model, with activation checkpointing and without."""

    name: str
    config: Config
    n: int
    layers: int
    vocab_size: int = 256
    dim_feedforward: int = 3072
    repeats: int = 1


@dataclass(frozen=True)
class SlideCase:
    """Peak memory of a process that encodes a slide with the configuration of Prov-GigaPath's encoder."""

    name: str
    config: Config
    tiles: int
    embed_dim: int = 768
    depth: int = 12
    memory_target: int | None = None
    repeats: int = 1


ModelCase = DecodeCase | TrainCase | SlideCase
MODEL_KINDS: dict[str, type[ModelCase]] = {"decode": DecodeCase, "train": TrainCase, "slide": SlideCase}

_DECODE = Config(8, 64, (2048, 4096, 8192, 16384), (1, 2, 4, 8), is_causal=True)
_TRAIN = Config(4, 64, (2048, 4096, 8192), (1, 2, 4), is_causal=True)
_SLIDE = Config(16, 48, gigapath_segment_lengths(), GIGAPATH_RATES)
_QUICK = Config(4, 16, (32, 64, 128), (1, 2, 4), is_causal=True)
_QUICK_SLIDE = Config(4, 16, (16, 32, 64, 128, 256), (1, 2, 4, 8, 16))

MODEL_SUITE: tuple[ModelCase, ...] = (
    DecodeCase("decoding step", _DECODE, 20_000, 1_000_000, target=1.15),
    TrainCase("training step, 12 layers", _TRAIN, 32768, 12),
    SlideCase("slide of 10,000 tiles", _SLIDE, 10_000, memory_target=4 * GIGABYTE),
)
MODEL_QUICK: tuple[ModelCase, ...] = (
    DecodeCase("quick decoding", _QUICK, 200, 3000, steps=4, repeats=3),
    TrainCase("quick training", _QUICK, 2048, 2),
    SlideCase("quick slide", _QUICK_SLIDE, 500, 64, 2),
)


def describe_model(case: ModelCase) -> str:
    """The sizes of a case in a few words."""
    config = case.config
    branches = ", ".join(f"({w}, {r})" for w, r in config.spec.branches)
    what = f"h = {config.h}, d = {config.d}, branches {branches}"
    match case:
        case DecodeCase():
            return f"positions {', '.join(f'{p:,}' for p in case.positions.values())}, b = 1, {what}"
        case TrainCase():
            widths = f"width {config.h * config.d}, feed-forward {case.dim_feedforward}"
            return f"n = {case.n}, {case.layers} layers, {widths}, {what}"
        case SlideCase():
            return f"{case.tiles:,} tiles, {case.depth} layers, width {case.embed_dim}, {what}"


def model_target(case: ModelCase) -> str:
    match case:
        case DecodeCase():
            return "" if case.target is None else f"  [target: {case.target}]"
        case SlideCase():
            return "" if case.memory_target is None else f"  [target: {case.memory_target / GIGABYTE:g} GB]"
        case TrainCase():
            return ""
