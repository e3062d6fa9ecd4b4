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
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..checks import parse_json
from ..flags import int_list, whole_number
from .config import PRECISIONS, ConfigError, TrainConfig, read_settings

if TYPE_CHECKING:
    from .loop import Run, Summary
    from .metrics import Metrics

DONE, FAILED, INTERRUPTED = 0, 1, 130
CONFIG_FILE = "config.json"
_CHOICES = {"precision": PRECISIONS}
_KINDS: dict[str, tuple[Any, str]] = {"int": (whole_number, "N"), "float": (float, "X"), "str": (str, "TEXT")}
# As the other commands spell them: lists of numbers with commas.
_FLAGS = {"segment_lengths": ("--segments", "W,..."), "dilation_rates": ("--rates", "R,...")}


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
    flag, text, hint = "--" + each.name.replace("_", "-"), each.metadata["help"], str(each.type)
    shown = "" if each.default in (MISSING, (), None, False) else f" (default: {each.default})"
    how: dict[str, Any] = {"default": argparse.SUPPRESS, "help": (text + shown).replace("%", "%%")}
    if each.name == "data":
        group.add_argument("data", nargs="*", metavar="PATH", **how)
    elif hint == "bool":
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **how)
    elif "Mapping" in hint:
        group.add_argument(flag, type=parse_json, metavar="JSON", **how)
    elif each.name in _FLAGS:
        flag, name = _FLAGS[each.name]
        group.add_argument(flag, dest=each.name, type=int_list, metavar=name, **how)
    elif "tuple" in hint:
        group.add_argument(flag, nargs="+", metavar="TEXT", **how)
    elif each.name in _CHOICES:
        group.add_argument(flag, choices=_CHOICES[each.name], **how)
    else:
        kind, name = _KINDS[hint.split(" | ")[0]]
        group.add_argument(flag, type=kind, metavar=name, **how)


def read_config(options: argparse.Namespace) -> TrainConfig:
    """The settings of a command line: flags, then --config, then those of the run that goes on."""
    values: dict[str, Any] = {}
    own = options.out / CONFIG_FILE
    if options.resume and own.is_file():
        values |= read_settings(own)
    if options.config is not None:
        values |= read_settings(options.config)
    given = vars(options)
    values |= {each.name: given[each.name] for each in fields(TrainConfig) if each.name in given}
    source = str(options.config or own)
    config = TrainConfig.from_dict(values, source)
    if not config.data:
        raise ConfigError("data must be text files, or folders of them, to train on, got none")
    return config


def run(options: argparse.Namespace) -> int:
    """Trains; 0 when done, 1 if it failed, 130 after an interruption that was saved."""
    # A restart by torchrun runs the same command: what it left is to go on.
    options.resume = options.resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    config = read_config(options)
    from .checkpoint import CheckpointError
    from .loop import DivergedError
    from .metrics import check_tensorboard

    if config.tensorboard:
        check_tensorboard()
    try:
        summary = train(config, options.out, resume=options.resume)
    except (CheckpointError, DivergedError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return FAILED
    if options.json and os.environ.get("RANK", "0") == "0":
        print(json.dumps({**asdict(summary), "out": str(options.out)}))
    return INTERRUPTED if summary.is_interrupted else DONE


def train(
    config: TrainConfig, folder: Path, *, resume: bool = False, progress: IO[str] | None = None
) -> Summary:
    """Trains in `folder` until the last step or a signal; under torchrun all ranks call it.

    Without `resume` the folder must not hold a run. Lines of progress go to `progress`, by default to stderr.
    """
    from .loop import Run
    from .metrics import Metrics
    from .ranks import join_ranks
    from .signals import StopWish

    with StopWish() as stop, join_ranks(config) as ranks:
        _check_folder(folder, resume)
        own = Run(config, folder, ranks)
        problems = own.resume() if resume else []
        folder.mkdir(parents=True, exist_ok=True)  # not before all is well: a refused run leaves nothing
        metrics = Metrics(folder, config, own.step, progress) if ranks.is_first else None
        try:
            if metrics is not None:
                _write_config(folder, config)
                _greet(own, metrics, problems)
            summary = own.train(stop, metrics)
            if metrics is not None:
                _say_goodbye(summary, metrics, folder)
            return summary
        finally:
            if metrics is not None:
                metrics.close()
            del own  # before the group of the ranks


def _check_folder(folder: Path, resume: bool) -> None:
    from .checkpoint import CHECKPOINTS, named_checkpoints

    if not resume and named_checkpoints(folder / CHECKPOINTS):
        raise ConfigError(f"out must be the folder of a new run unless --resume goes on, got {folder}")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"out must be a folder, got the file {folder}")


def _write_config(folder: Path, config: TrainConfig) -> None:
    temporary = folder / f".{CONFIG_FILE}.partial"
    temporary.write_text(config.to_json(), encoding="utf-8")
    os.replace(temporary, folder / CONFIG_FILE)


def _greet(own: Run, metrics: Metrics, problems: list[str]) -> None:
    for problem in problems:
        metrics.say(f"warning: {problem}; it was set aside, and an older checkpoint is used")
    ranks, sizes = own.ranks, (len(own.train_data), len(own.validation_data))
    parameters = sum(x.numel() for x in own.state.model.parameters())
    where = f"{ranks.device.type}"
    if ranks.size > 1:
        where += f", {ranks.size} ranks in {ranks.num_rings} ring(s) of {ranks.ring_size}"
    metrics.say(f"{parameters:,} parameters on {where}; {sizes[0]:,} bytes, {sizes[1]:,} to validate")
    metrics.say(f"from step {own.step} of {own.config.steps}" if own.step else f"{own.config.steps} steps")


def _say_goodbye(summary: Summary, metrics: Metrics, folder: Path) -> None:
    if summary.is_interrupted:
        metrics.say(f"interrupted and saved after step {summary.step}; --resume goes on")
    else:
        metrics.say(f"done: {summary.steps} steps, saved in {folder}")
