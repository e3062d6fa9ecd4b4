"""Finds the command that is asked for, runs it, and turns what goes wrong into a sentence and an exit code.

Imports no torch: help and usage errors answer at once. A command is a module of this package with
`run(options) -> int`, imported when it is asked for. Its options are described by the function of its name in
`arguments.py` or, where the module itself needs no torch, by its own `add_arguments(parser)`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from .. import __version__
from ..checks import close_names
from . import arguments as described

PROGRAM = "dilated-attention"
FAILED, USAGE, INTERRUPTED = 1, 2, 130
TRACEBACK = "DILATED_ATTENTION_TRACEBACK"  # set in the environment, errors keep where they came from
COMMANDS = {
    "demo": "check, measure and train on this machine, and write a report of it",
    "doctor": "what is installed, what can run here, and a check against the definition",
    "gpu-check": "check, repeat and time the kernels of a GPU, and write a report of it",
    "autotune": "time blocks of the Triton kernel on this GPU, and store the best",
    "show": "draw what attends to what, with coverage and receptive field",
    "plan": "propose settings for a length, with memory, FLOPs, reasons and code",
    "bench": "compare modules by name, measure time, memory and limits",
    "train": "train a byte-level language model on text files",
    "generate": "continue a text with a trained model",
    "hub-kernel": "write this package as a repository for Hugging Face's kernels",
    "slide": "embed slides from tile features, and paint where attention goes",
}
# The extra that installs a package which is imported where it is used.
EXTRAS = {
    "h5py": "slides",
    "matplotlib": "charts",
    "safetensors": "pretrained",
    "tensorboard": "train",
    "transformers": "transformers",
    "zarr": "zarr",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default that of this process, and returns its exit code.

    0 done, 1 failed, 2 used wrongly (as SystemExit, where a parser finds it), 130 interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in COMMANDS:
        return _without_command(given)
    try:
        return _run(given[0], given[1:])
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, as in `... | head`
        _silence_stdout()
        return FAILED
    except (ImportError, MemoryError, OSError, RuntimeError, ValueError) as error:
        message, code = _explain(error)
        if message is None or os.environ.get(TRACEBACK):
            raise
        print(f"{PROGRAM} {given[0]}: error: {message}", file=sys.stderr)
        return code


def run_program(arguments: Sequence[str] | None = None) -> NoReturn:
    """The program: runs a command line, by default that of this process, and ends it with the exit code."""
    code = main(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
    if code == INTERRUPTED:
        sys.stderr.flush()
        os._exit(code)  # a thread may be deep in a kernel, and Ctrl-C asked not to wait for it
    sys.exit(code)


def _run(name: str, arguments: Sequence[str]) -> int:
    parser = make_parser(name)
    _refuse_unknown_options(parser, arguments)
    options, left = parser.parse_known_args(arguments)
    if left:
        commas = "; lists are written with commas, as 64,256" if re.match(r"\d", left[0]) else ""
        parser.error(f"unrecognized arguments: {' '.join(left)}{commas}")
    # Imports torch through the package, which keeps it from remarking that NumPy is missing.
    _ = importlib.import_module(__package__.rpartition(".")[0]).core
    code: int = _import(name).run(options)
    return code


def make_parser(name: str) -> argparse.ArgumentParser:
    """The parser of a command, with its description."""
    add_arguments = getattr(described, name.replace("-", "_"), None)
    text = inspect.getdoc(add_arguments)
    if add_arguments is None:
        module = _import(name)
        add_arguments, text = module.add_arguments, module.__doc__
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser)
    return parser


def _refuse_unknown_options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Before the parser, which would first complain of the option that is missing for a misspelled one."""
    known = parser._option_string_actions
    for word in arguments:
        if word == "--":
            return
        name = word.partition("=")[0]
        if re.fullmatch(r"--?[A-Za-z]\S*", word) and name not in known:
            last = name.replace("_", "-").rpartition("-")[2]  # --dilation-rates is likely meant as --rates
            by_word = {option.lstrip("-"): option for option in known}
            close = [*close_names(name.lstrip("-"), by_word), *({last} & set(by_word))]
            hint = f"did you mean {by_word[close[0]]}?" if close else "see --help"
            parser.error(f"unknown option {name}; {hint}")


def _import(command: str) -> ModuleType:
    return importlib.import_module(f".{command.replace('-', '_')}", __package__)


def _without_command(given: Sequence[str]) -> int:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [--help] [--version] <command> ...",
        description="Attention over sequences too long for dense attention.",
        epilog=f"commands:\n{listed}\n\n`{PROGRAM} <command> --help` explains a command.\n"
        "exit codes: 0 done, 1 failed, 2 used wrongly, 130 interrupted.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    options, _ = parser.parse_known_args(given)
    if options.command is None:
        if given:
            parser.error(f"{given[0]} is no option, and a command is missing; see --help")
        parser.print_help(sys.stderr)
        return USAGE
    if options.command in COMMANDS:
        parser.error(f"{given[0]} is no option of {PROGRAM}; options of a command come after it")
    close = close_names(options.command, COMMANDS)
    hint = f" Did you mean {close[0]}?" if close else ""
    parser.error(f"there is no command {options.command!r}.{hint} There are {', '.join(COMMANDS)}.")


def _explain(error: Exception) -> tuple[str | None, int]:
    """What to tell the user, and the exit code; None for what no user can have caused: it keeps its trace."""
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or "").partition(".")[0]
        if missing in EXTRAS:
            return f'{missing} is not installed; pip install "{PROGRAM}[{EXTRAS[missing]}]" brings it', FAILED
        return (f"{missing} is not installed" if missing == "torch" else None), FAILED
    if isinstance(error, ValueError):  # the library's way to refuse an argument: the rule and the fact
        return str(error), USAGE
    if isinstance(error, OSError):
        return str(error), FAILED
    from ..core.host_memory import is_out_of_memory

    if is_out_of_memory(error):
        return f"out of memory: {str(error).partition(chr(10))[0]}", FAILED
    return None, FAILED


def _silence_stdout() -> None:
    """Lets the interpreter flush into nowhere at exit, where it would complain about the closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
