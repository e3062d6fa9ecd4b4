"""Settings of a training run: plain data, from a JSON file and from flags. Nothing here needs torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from ..checks import parse_json
from ..spec import branches_for

PRECISIONS = ("float32", "bfloat16")
RING_KINDS = ("ring", "block_sparse_ring")
VOCABULARY = 256  # a token is a byte
FIRST_SEGMENT, STEP = 64, 4
# What may change when a run goes on: it changes nothing that is computed, but for the order of sums.
CHANGEABLE = (
    "device",
    "ring",
    "shard_parameters",
    "checkpoint_activations",
    "checkpoint_every",
    "keep_checkpoints",
    "log_every",
    "tensorboard",
)


class ConfigError(ValueError):
    """Settings, or data, that no run can have: the message states the rule and the fact."""


def _setting(default: Any, text: str) -> Any:
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of a run; constructing one validates what can be judged without the data and the model.

    Lists may be given for tuples. `segment_lengths` and `dilation_rates` are by default chosen for
    `context_length`: from a dense first segment both grow fourfold until a segment spans the context.
    """

    data: tuple[str, ...] = _setting((), "text files, and folders of them, to train on")
    validation: tuple[str, ...] = _setting((), "files and folders to validate on, instead of a share of data")
    validation_share: float = _setting(0.05, "the last share of the data's bytes, kept for validation")
    suffixes: tuple[str, ...] = _setting((), "of the files of folders that are read, such as .txt; else text")

    d_model: int = _setting(256, "features of a token")
    nhead: int = _setting(4, "heads of attention")
    num_layers: int = _setting(4, "layers")
    dim_feedforward: int = _setting(1024, "features inside feed-forwards")
    num_kv_heads: int | None = _setting(None, "heads of keys and values; else nhead")
    segment_lengths: tuple[int, ...] = _setting((), "of the branches; else chosen for the context")
    dilation_rates: tuple[int, ...] = _setting((), "of the branches; else chosen for the context")
    dropout: float = _setting(0.0, "after embeddings, attention and feed-forwards")
    kind: str = _setting("ring", "of attention; only rings can share a sequence among ranks")
    attention_options: Mapping[str, Any] = _setting({}, "JSON of other options of the attention modules")

    context_length: int = _setting(1024, "bytes of a sequence")
    batch_size: int = _setting(8, "sequences of an optimiser step, over all ranks")
    accumulation: int = _setting(1, "parts of a batch that are computed one after the other")
    steps: int = _setting(1000, "optimiser steps of the whole run")
    learning_rate: float = _setting(1e-3, "highest, after the warmup")
    final_share: float = _setting(0.1, "of learning_rate, at the last step")
    warmup_steps: int = _setting(50, "over which the learning rate rises")
    weight_decay: float = _setting(0.1, "of AdamW, for matrices only")
    beta1: float = _setting(0.9, "of AdamW")
    beta2: float = _setting(0.95, "of AdamW")
    clip_norm: float = _setting(1.0, "to which longer gradients are cut; 0 cuts none")
    precision: str = _setting("float32", "of activations; parameters are float32 always")
    checkpoint_activations: bool = _setting(False, "compute layers once more in backward, for less memory")
    seed: int = _setting(0, "of initial weights, order of data and dropout")

    device: str = _setting("auto", "cpu, cuda, mps, ...; auto is cuda if there is one, else cpu")
    ring: int | None = _setting(None, "ranks that share a sequence; all of them by default")
    shard_parameters: bool = _setting(True, "with several ranks, each holds a part of the parameters (FSDP2)")
    validate_every: int = _setting(200, "steps between validations; 0 validates at the end only")
    validation_windows: int = _setting(16, "sequences of a validation")
    checkpoint_every: int = _setting(200, "steps between checkpoints; 0 saves at the end only")
    keep_checkpoints: int = _setting(2, "newest checkpoints that are kept, at least 2")
    log_every: int = _setting(10, "steps between lines of progress")
    tensorboard: bool = _setting(False, "write events for TensorBoard, which must be installed")

    def __post_init__(self) -> None:
        hints = get_type_hints(TrainConfig)
        for each in fields(self):
            object.__setattr__(self, each.name, _typed(each.name, getattr(self, each.name), hints[each.name]))
        if not self.segment_lengths and not self.dilation_rates:
            lengths, rates = default_branches(self.context_length)
            object.__setattr__(self, "segment_lengths", lengths)
            object.__setattr__(self, "dilation_rates", rates)
        self._check_numbers()
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision must be one of {PRECISIONS}, got {self.precision!r}")
        if self.batch_size % self.accumulation:
            numbers = f"{self.batch_size} and {self.accumulation}"
            raise ConfigError(f"accumulation must divide batch_size, got {numbers}")
        if self.ring is not None and self.ring > 1 and self.kind not in RING_KINDS:
            raise ConfigError(f"ring needs a kind of {RING_KINDS}, got ring {self.ring} and {self.kind!r}")

    def _check_numbers(self) -> None:
        least = dict.fromkeys(("d_model", "nhead", "num_layers", "dim_feedforward", "batch_size"), 1)
        least |= dict.fromkeys(("accumulation", "steps", "validation_windows", "log_every"), 1)
        least |= dict.fromkeys(("warmup_steps", "weight_decay", "clip_norm", "validate_every"), 0)
        least |= {"context_length": 2, "checkpoint_every": 0, "keep_checkpoints": 2, "ring": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} must be at least {low}, got {value}")
        for name in ("validation_share", "dropout", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if not 0 <= self.final_share <= 1:
            raise ConfigError(f"final_share must be from 0 to 1, got {self.final_share}")
        if self.learning_rate <= 0:
            raise ConfigError(f"learning_rate must be positive, got {self.learning_rate}")

    def model_settings(self) -> dict[str, Any]:
        """The arguments of `LongNetLM`."""
        names = ["d_model", "nhead", "num_layers", "dim_feedforward", "num_kv_heads", "segment_lengths"]
        names += ["dilation_rates", "dropout", "kind", "checkpoint_activations", "attention_options"]
        return {"vocab_size": VOCABULARY, **{name: getattr(self, name) for name in names}}

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON has them: lists for tuples."""
        return {x.name: _listed(getattr(self, x.name)) for x in fields(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "a training config") -> TrainConfig:
        """The config of a mapping; absent fields have their defaults, and unknown keys are an error."""
        names = [each.name for each in fields(cls)]
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source} must be a JSON object, got {type(values).__name__}")
        if unknown := sorted(set(values) - set(names)):
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
        raise ConfigError(
            f"a config must be a JSON object, got {path}, which holds a {type(values).__name__}"
        )
    return values


def changed_settings(before: TrainConfig, after: TrainConfig) -> list[str]:
    """`name: old, new` of the settings that a run must not change when it goes on."""
    return [
        f"{x.name}: {getattr(before, x.name)!r}, now {getattr(after, x.name)!r}"
        for x in fields(TrainConfig)
        if x.name not in CHANGEABLE and getattr(before, x.name) != getattr(after, x.name)
    ]


def default_branches(context_length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Segment lengths and rates of LongNet's geometric rule, from a sixteenth of the context, at least 64."""
    return branches_for(context_length, first=max(FIRST_SEGMENT, context_length // STEP**2), ratio=STEP)


def _listed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _listed(each) for name, each in value.items()}
    return [_listed(each) for each in value] if isinstance(value, (tuple, list)) else value


def _typed(name: str, value: Any, hint: Any) -> Any:
    """`value` as the field's type has it; a wrong type is an error."""
    text = str(hint).replace("<class '", "").replace("'>", "")
    if "Mapping" in text:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be a mapping, got {value!r}")
        return dict(value)
    if "tuple" in text:
        kind = int if "int" in text else str
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            raise ConfigError(f"{name} must be a list, got {value!r}")
        if odd := [x for x in value if not isinstance(x, kind) or isinstance(x, bool)]:
            raise ConfigError(f"{name} must be a list of {kind.__name__}, got {odd[0]!r}")
        return tuple(value)
    if value is None and "None" in text:
        return None
    kinds: dict[str, Any] = {
        "float": (int, float),
        "int": (int,),
        "str": (str,),
        "bool": (bool,),
    }
    first = text.split(" | ")[0]
    if not isinstance(value, kinds[first]) or (isinstance(value, bool) and first != "bool"):
        raise ConfigError(f"{name} must be of type {first}, got {value!r}")
    if first == "float":
        if not math.isfinite(value):
            raise ConfigError(f"{name} must be finite, got {value}")
        return float(value)
    return value
