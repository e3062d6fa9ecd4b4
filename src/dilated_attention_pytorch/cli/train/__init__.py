"""Trains a byte-level LongNetLM on text files and folders of them.

    dilated-attention train texts/ --out run --steps 2000 --context-length 4096
    dilated-attention train --out run --resume
    torchrun --nproc-per-node 2 --max-restarts 3 -m dilated_attention_pytorch train texts/ --out run

The folder of a run gets config.json, metrics.jsonl and checkpoints/. Ctrl-C and SIGTERM save and end with
exit code 130; --resume goes on and computes, bit for bit, what the run would have computed. Under torchrun
the ranks share the sequences, and after a worker's death all go on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import MISSING, Field, asdict, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from ...checks import parse_json
from ..text import int_list, whole_number
from .config import PRECISIONS, ConfigError, TrainConfig, read_settings

DONE, FAILED, INTERRUPTED = 0, 1, 130
# How the settings are read that are not of a plain type: by name, by the begin of their type, then by type.
_HOW: dict[str, dict[str, Any]] = {
    "segment_lengths": {"type": int_list, "metavar": "W,..."},
    "dilation_rates": {"type": int_list, "metavar": "R,..."},
    "precision": {"choices": PRECISIONS},
    "tuple": {"nargs": "+", "metavar": "TEXT"},
    "Mapping": {"type": parse_json, "metavar": "JSON"},
    "bool": {"action": argparse.BooleanOptionalAction},
    "int": {"type": whole_number, "metavar": "N"},
    "float": {"type": float, "metavar": "X"},
    "str": {"type": str, "metavar": "TEXT"},
}
_FLAGS = {"segment_lengths": "--segments", "dilation_rates": "--rates"}  # as the other commands spell them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `train`: one for each field of `TrainConfig`, and those of the command."""
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of the run")
    parser.add_argument("--config", type=Path, metavar="FILE", help="JSON of settings; flags go before it")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint, or begin if there is none"
    )
    parser.add_argument("--json", action="store_true", help="write a summary as JSON to stdout")
    settings = parser.add_argument_group("settings")
    for each in fields(TrainConfig):
        _add_setting(settings, each)


def _add_setting(group: Any, each: Field[Any]) -> None:
    shown = "" if each.default in (MISSING, (), None, False) else f" (default: {each.default})"
    text = (each.metadata["help"] + shown).replace("%", "%%")
    if each.name == "data":
        group.add_argument("data", nargs="*", metavar="PATH", default=argparse.SUPPRESS, help=text)
        return
    how = _HOW[each.name if each.name in _HOW else str(each.type).split(" ")[0].split("[")[0]]
    flag = _FLAGS.get(each.name, "--" + each.name.replace("_", "-"))
    group.add_argument(flag, dest=each.name, default=argparse.SUPPRESS, help=text, **how)


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
    from .checkpoint import CheckpointError
    from .loop import DivergedError, train
    from .metrics import check_tensorboard

    if config.tensorboard:
        check_tensorboard()
    try:
        summary = train(config, options.out, resume=options.resume)
    except (CheckpointError, DivergedError) as error:
        if is_first:
            print(f"error: {error}", file=sys.stderr)
        return FAILED
    if options.json and is_first:
        print(json.dumps({**asdict(summary), "out": str(options.out)}))
    return INTERRUPTED if summary.is_interrupted else DONE


# Imported where they are first used, so that the flags are listed without torch.
_PLACES = {"train": "loop", "load_model": "loop", "read_metrics": "metrics"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)
