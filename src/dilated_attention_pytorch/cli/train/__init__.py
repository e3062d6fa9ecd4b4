"""Trains a byte-level LongNetLM on text files and folders of them.

    dilated-attention train texts/ --out run --steps 2000 --context-length 4096
    dilated-attention train --out run --resume
    torchrun --nproc-per-node 2 --max-restarts 3 -m dilated_attention_pytorch train texts/ --out run

The folder of a run gets config.json, metrics.jsonl and checkpoints/. Ctrl-C and SIGTERM save and end with
exit code 130; --resume goes on and computes, bit for bit, what the run would have computed. Under torchrun
the ranks share the sequences, and after a worker's death all go on from the last checkpoint.
"""

# The command and its settings, which need no torch, so that the flags are listed without it.
from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from ...checks import parse_json
from ...spec import branches_for
from ..text import int_list, whole_number

DONE, FAILED, INTERRUPTED = 0, 1, 130
RING_KINDS = ("ring", "block_sparse_ring")
FIRST_SEGMENT, RATIO = 64, 4  # of the branches that nobody named
# What may change when a run goes on: it changes nothing that is computed, but for the order of sums.
CHANGEABLE = {"device", "ring", "shard_parameters", "checkpoint_activations", "checkpoint_every"}
CHANGEABLE |= {"keep_checkpoints", "log_every", "tensorboard"}
MODEL = ["d_model", "nhead", "num_layers", "dim_feedforward", "num_kv_heads", "segment_lengths"]
MODEL += ["dilation_rates", "dropout", "kind", "checkpoint_activations", "attention_options"]
FLAGS = {"segment_lengths": "--segments", "dilation_rates": "--rates"}  # as the other commands spell them
# By the type of a field: what is accepted, what it becomes, how an error names it, and how a flag reads it.
KINDS: dict[str, tuple[Any, Callable[[Any], Any], str, dict[str, Any]]] = {
    "tuple[str, ...]": ((list, tuple), tuple, "a list", {"nargs": "+", "metavar": "TEXT"}),
    "tuple[int, ...]": ((list, tuple), tuple, "a list", {"type": int_list, "metavar": "N,..."}),
    "Mapping[str, Any]": (Mapping, dict, "a mapping", {"type": parse_json, "metavar": "JSON"}),
    "float": ((int, float), float, "of type float", {"type": float, "metavar": "X"}),
    "int": (int, int, "of type int", {"type": whole_number, "metavar": "N"}),
    "str": (str, str, "of type str", {"metavar": "TEXT"}),
    "bool": (bool, bool, "of type bool", {"action": argparse.BooleanOptionalAction}),
}
Rule = tuple[str, Callable[[Any], bool]]  # of values, with its words in an error
SHARE: Rule = ("at least 0 and below 1", lambda x: 0 <= x < 1)
WHOLE: Rule = ("from 0 to 1", lambda x: 0 <= x <= 1)
PRECISION: Rule = ("one of float32, bfloat16", lambda x: x in ("float32", "bfloat16"))


class ConfigError(ValueError):
    """Settings, or data, that no run can have: the message states the rule and the fact."""


def _least(bound: int) -> Rule:
    return f"at least {bound}", lambda x: x >= bound


def _setting(default: Any, text: str, rule: Rule | None = None) -> Any:
    """A field with its help and its rule."""
    return field(default=default, metadata={"help": text, "rule": rule})


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

    d_model: int = _setting(256, "features of a token", _least(1))
    nhead: int = _setting(4, "heads of attention", _least(1))
    num_layers: int = _setting(4, "layers", _least(1))
    dim_feedforward: int = _setting(1024, "features inside feed-forwards", _least(1))
    num_kv_heads: int | None = _setting(None, "heads of keys and values; else nhead")
    segment_lengths: tuple[int, ...] = _setting((), "of the branches; else chosen for the context")
    dilation_rates: tuple[int, ...] = _setting((), "of the branches; else chosen for the context")
    dropout: float = _setting(0.0, "after embeddings, attention and feed-forwards", SHARE)
    kind: str = _setting("ring", "of attention; only rings can share a sequence among ranks")
    attention_options: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={"help": "JSON of other options of attention modules", "rule": None},
    )

    context_length: int = _setting(1024, "bytes of a sequence", _least(2))
    batch_size: int = _setting(8, "sequences of an optimiser step, over all ranks", _least(1))
    accumulation: int = _setting(1, "parts of a batch that are computed one after the other", _least(1))
    steps: int = _setting(1000, "optimiser steps of the whole run", _least(1))
    learning_rate: float = _setting(1e-3, "highest, after the warmup", ("positive", lambda x: x > 0))
    final_share: float = _setting(0.1, "of learning_rate, at the last step", WHOLE)
    warmup_steps: int = _setting(50, "over which the learning rate rises", _least(0))
    weight_decay: float = _setting(0.1, "of AdamW, for matrices only", _least(0))
    beta1: float = _setting(0.9, "of AdamW", SHARE)
    beta2: float = _setting(0.95, "of AdamW", SHARE)
    clip_norm: float = _setting(1.0, "to which longer gradients are cut; 0 cuts none", _least(0))
    precision: str = _setting(
        "float32", "float32 or bfloat16, of activations; parameters stay float32", PRECISION
    )
    checkpoint_activations: bool = _setting(False, "compute layers once more in backward, for less memory")
    seed: int = _setting(0, "of initial weights, order of data and dropout")

    device: str = _setting("auto", "cpu, cuda, mps, ...; auto is cuda if there is one, else cpu")
    ring: int | None = _setting(None, "ranks that share a sequence; all of them by default", _least(1))
    shard_parameters: bool = _setting(True, "with several ranks, each holds a part of the parameters (FSDP2)")
    validate_every: int = _setting(200, "steps between validations; 0 validates at the end only", _least(0))
    validation_windows: int = _setting(16, "sequences of a validation", _least(1))
    checkpoint_every: int = _setting(200, "steps between checkpoints; 0 saves at the end only", _least(0))
    keep_checkpoints: int = _setting(2, "newest checkpoints that are kept, at least 2", _least(2))
    log_every: int = _setting(10, "steps between lines of progress", _least(1))
    tensorboard: bool = _setting(False, "write events for TensorBoard, which must be installed")

    def __post_init__(self) -> None:
        for each in fields(self):
            value, rule = _typed(each.name, getattr(self, each.name), str(each.type)), each.metadata["rule"]
            if rule is not None and value is not None and not rule[1](value):
                raise ConfigError(f"{each.name} must be {rule[0]}, got {value}")
            object.__setattr__(self, each.name, value)
        if not self.segment_lengths and not self.dilation_rates:
            first = max(FIRST_SEGMENT, self.context_length // RATIO**2)
            lengths, rates = branches_for(self.context_length, first=first, ratio=RATIO)
            object.__setattr__(self, "segment_lengths", lengths)
            object.__setattr__(self, "dilation_rates", rates)
        if self.batch_size % self.accumulation:
            numbers = f"{self.batch_size} and {self.accumulation}"
            raise ConfigError(f"accumulation must divide batch_size, got {numbers}")
        if self.ring is not None and self.ring > 1 and self.kind not in RING_KINDS:
            raise ConfigError(f"ring needs a kind of {RING_KINDS}, got ring {self.ring} and {self.kind!r}")

    def model_settings(self) -> dict[str, Any]:
        """The arguments of `LongNetLM`; a token is a byte."""
        return {"vocab_size": 256, **{name: getattr(self, name) for name in MODEL}}

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


def _typed(name: str, value: Any, hint: str) -> Any:
    """`value` as the field's type, by its name, has it; a wrong type is an error."""
    if value is None and hint.endswith("None"):
        return None
    accepted, convert, words, _ = KINDS[hint.removesuffix(" | None")]
    if not isinstance(value, accepted) or (isinstance(value, bool) and accepted is not bool):
        raise ConfigError(f"{name} must be {words}, got {value!r}")
    if convert is tuple:
        item = int if "int" in hint else str
        if odd := [x for x in value if not isinstance(x, item) or isinstance(x, bool)]:
            raise ConfigError(f"{name} must be a list of {item.__name__}, got {odd[0]!r}")
    if convert is float and not math.isfinite(value):
        raise ConfigError(f"{name} must be finite, got {value}")
    return convert(value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `train`: one for each field of `TrainConfig`, and those of the command."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="of the run")
    add("--config", type=Path, metavar="FILE", help="JSON of settings; flags go before it")
    add("--resume", action="store_true", help="go on from the last checkpoint, or begin if there is none")
    add("--json", action="store_true", help="write a summary as JSON to stdout")
    add = parser.add_argument_group("settings").add_argument
    for each in fields(TrainConfig):
        shown = "" if each.default in (MISSING, (), None, False) else f" (default: {each.default})"
        how = {"default": argparse.SUPPRESS, "help": (each.metadata["help"] + shown).replace("%", "%%")}
        if each.name == "data":
            add("data", nargs="*", metavar="PATH", **how)
            continue
        flag = FLAGS.get(each.name, "--" + each.name.replace("_", "-"))
        add(flag, dest=each.name, **how, **KINDS[str(each.type).removesuffix(" | None")][3])


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


def read_config(options: argparse.Namespace) -> TrainConfig:
    """The settings of a command line: flags, then --config, then those of the run that goes on."""
    values: dict[str, Any] = {}
    own = options.out / "config.json"
    if options.resume and own.is_file():
        values |= read_settings(own)
    if options.config is not None:
        values |= read_settings(options.config)
    values |= {each.name: getattr(options, each.name) for each in fields(TrainConfig) if each.name in options}
    config = TrainConfig.from_dict(values, str(options.config or own))
    if not config.data:
        raise ConfigError("data must be text files, or folders of them, to train on, got none")
    return config


def run(options: argparse.Namespace) -> int:
    """Trains; 0 when done, 1 if it failed, 130 after an interruption that was saved."""
    # A restart by torchrun runs the same command: what it left is to go on.
    options.resume = options.resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    config, is_first = read_config(options), os.environ.get("RANK", "0") == "0"
    from .folder import CheckpointError
    from .loop import DivergedError, train

    try:
        summary = train(config, options.out, resume=options.resume)
    except (CheckpointError, DivergedError) as error:
        if is_first:
            print(f"error: {error}", file=sys.stderr)
        return FAILED
    if options.json and is_first:
        print(json.dumps({**asdict(summary), "out": str(options.out)}))
    return INTERRUPTED if summary.is_interrupted else DONE


_PLACES = {"train": "loop", "load_model": "loop", "read_metrics": "folder"}  # imported at their first use


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)
