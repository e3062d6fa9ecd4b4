"""Settings of a training run: plain data, from a JSON file and from flags. Nothing here needs torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ...checks import parse_json
from ...spec import branches_for

PRECISIONS = ("float32", "bfloat16")
RING_KINDS = ("ring", "block_sparse_ring")
VOCABULARY = 256  # a token is a byte
FIRST_SEGMENT, STEP = 64, 4
# What may change when a run goes on: it changes nothing that is computed, but for the order of sums.
CHANGEABLE = {"device", "ring", "shard_parameters", "checkpoint_activations", "checkpoint_every"}
CHANGEABLE |= {"keep_checkpoints", "log_every", "tensorboard"}
MODEL = ["d_model", "nhead", "num_layers", "dim_feedforward", "num_kv_heads", "segment_lengths"]
MODEL += ["dilation_rates", "dropout", "kind", "checkpoint_activations", "attention_options"]
# Rules of numbers besides least values, by what their errors say.
RULES: dict[str, Callable[[float], bool]] = {
    "at least 0 and below 1": lambda x: 0 <= x < 1,
    "from 0 to 1": lambda x: 0 <= x <= 1,
    "positive": lambda x: x > 0,
}
SHARE = "at least 0 and below 1"


class ConfigError(ValueError):
    """Settings, or data, that no run can have: the message states the rule and the fact."""


def _setting(default: Any, text: str, rule: int | str | None = None) -> Any:
    """A field with its help, and its least value or one of RULES."""
    metadata = {"help": text, "rule": rule}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of a run; constructing one validates what can be judged without the data and the model.

    Lists may be given for tuples. `segment_lengths` and `dilation_rates` are by default chosen for
    `context_length`: from a dense first segment both grow fourfold until a segment spans the context.
    """

    data: tuple[str, ...] = _setting((), "text files, and folders of them, to train on")
    validation: tuple[str, ...] = _setting((), "files and folders to validate on, instead of a share of data")
    validation_share: float = _setting(0.05, "the last share of the data's bytes, kept for validation", SHARE)
    suffixes: tuple[str, ...] = _setting((), "of the files of folders that are read, such as .txt; else text")

    d_model: int = _setting(256, "features of a token", 1)
    nhead: int = _setting(4, "heads of attention", 1)
    num_layers: int = _setting(4, "layers", 1)
    dim_feedforward: int = _setting(1024, "features inside feed-forwards", 1)
    num_kv_heads: int | None = _setting(None, "heads of keys and values; else nhead")
    segment_lengths: tuple[int, ...] = _setting((), "of the branches; else chosen for the context")
    dilation_rates: tuple[int, ...] = _setting((), "of the branches; else chosen for the context")
    dropout: float = _setting(0.0, "after embeddings, attention and feed-forwards", SHARE)
    kind: str = _setting("ring", "of attention; only rings can share a sequence among ranks")
    attention_options: Mapping[str, Any] = _setting({}, "JSON of other options of the attention modules")

    context_length: int = _setting(1024, "bytes of a sequence", 2)
    batch_size: int = _setting(8, "sequences of an optimiser step, over all ranks", 1)
    accumulation: int = _setting(1, "parts of a batch that are computed one after the other", 1)
    steps: int = _setting(1000, "optimiser steps of the whole run", 1)
    learning_rate: float = _setting(1e-3, "highest, after the warmup", "positive")
    final_share: float = _setting(0.1, "of learning_rate, at the last step", "from 0 to 1")
    warmup_steps: int = _setting(50, "over which the learning rate rises", 0)
    weight_decay: float = _setting(0.1, "of AdamW, for matrices only", 0)
    beta1: float = _setting(0.9, "of AdamW", SHARE)
    beta2: float = _setting(0.95, "of AdamW", SHARE)
    clip_norm: float = _setting(1.0, "to which longer gradients are cut; 0 cuts none", 0)
    precision: str = _setting("float32", "of activations; parameters are float32 always")
    checkpoint_activations: bool = _setting(False, "compute layers once more in backward, for less memory")
    seed: int = _setting(0, "of initial weights, order of data and dropout")

    device: str = _setting("auto", "cpu, cuda, mps, ...; auto is cuda if there is one, else cpu")
    ring: int | None = _setting(None, "ranks that share a sequence; all of them by default", 1)
    shard_parameters: bool = _setting(True, "with several ranks, each holds a part of the parameters (FSDP2)")
    validate_every: int = _setting(200, "steps between validations; 0 validates at the end only", 0)
    validation_windows: int = _setting(16, "sequences of a validation", 1)
    checkpoint_every: int = _setting(200, "steps between checkpoints; 0 saves at the end only", 0)
    keep_checkpoints: int = _setting(2, "newest checkpoints that are kept, at least 2", 2)
    log_every: int = _setting(10, "steps between lines of progress", 1)
    tensorboard: bool = _setting(False, "write events for TensorBoard, which must be installed")

    def __post_init__(self) -> None:
        for each in fields(self):
            value = _typed(each.name, getattr(self, each.name), str(each.type))
            object.__setattr__(self, each.name, value)
            _check_rule(each.name, value, each.metadata["rule"])
        if not self.segment_lengths and not self.dilation_rates:
            lengths, rates = default_branches(self.context_length)
            object.__setattr__(self, "segment_lengths", lengths)
            object.__setattr__(self, "dilation_rates", rates)
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision must be one of {PRECISIONS}, got {self.precision!r}")
        if self.batch_size % self.accumulation:
            numbers = f"{self.batch_size} and {self.accumulation}"
            raise ConfigError(f"accumulation must divide batch_size, got {numbers}")
        if self.ring is not None and self.ring > 1 and self.kind not in RING_KINDS:
            raise ConfigError(f"ring needs a kind of {RING_KINDS}, got ring {self.ring} and {self.kind!r}")

    def model_settings(self) -> dict[str, Any]:
        """The arguments of `LongNetLM`."""
        return {"vocab_size": VOCABULARY, **{name: getattr(self, name) for name in MODEL}}

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "a training config") -> TrainConfig:
        """The config of a mapping; absent fields have their defaults, and unknown keys are an error."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source} must be a JSON object, got {type(values).__name__}")
        if unknown := sorted(set(values) - {each.name for each in fields(cls)}):
            raise ConfigError(f"{source} must hold known settings only, got {', '.join(unknown)}")
        return cls(**values)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a JSON file; they may be a part of all."""
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"a config must be a file that can be read, got {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"a config must be JSON, got {path}, which is not: {error}") from None
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise ConfigError(f"a config must be a JSON object, got {path}, which holds a {kind}")
    return values


def changed_settings(before: TrainConfig, after: TrainConfig) -> list[str]:
    """`name: old, new` of the settings that a run must not change when it goes on."""
    names = [x.name for x in fields(TrainConfig) if x.name not in CHANGEABLE]
    pairs = [(name, getattr(before, name), getattr(after, name)) for name in names]
    return [f"{name}: {old!r}, now {new!r}" for name, old, new in pairs if old != new]


def default_branches(context_length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Segment lengths and rates of LongNet's geometric rule, from a sixteenth of the context, at least 64."""
    return branches_for(context_length, first=max(FIRST_SEGMENT, context_length // STEP**2), ratio=STEP)


def _check_rule(name: str, value: Any, rule: int | str | None) -> None:
    if isinstance(rule, int) and value is not None and value < rule:
        raise ConfigError(f"{name} must be at least {rule}, got {value}")
    if isinstance(rule, str) and not RULES[rule](value):
        raise ConfigError(f"{name} must be {rule}, got {value}")


def _typed(name: str, value: Any, hint: str) -> Any:
    """`value` as the field's type, by its name, has it; a wrong type is an error."""
    kinds: dict[str, Any] = {"float": (int, float), "int": int, "str": str, "bool": bool}
    if hint.startswith("Mapping"):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be a mapping, got {value!r}")
        return dict(value)
    if hint.startswith("tuple"):
        kind = int if "int" in hint else str
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{name} must be a list, got {value!r}")
        if odd := [x for x in value if not isinstance(x, kind) or isinstance(x, bool)]:
            raise ConfigError(f"{name} must be a list of {kind.__name__}, got {odd[0]!r}")
        return tuple(value)
    if value is None and hint.endswith("None"):
        return None
    first = hint.partition(" | ")[0]
    if not isinstance(value, kinds[first]) or (isinstance(value, bool) and first != "bool"):
        raise ConfigError(f"{name} must be of type {first}, got {value!r}")
    if first == "float" and not math.isfinite(value):
        raise ConfigError(f"{name} must be finite, got {value}")
    return float(value) if first == "float" else value
