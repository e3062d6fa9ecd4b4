"""Continues a text with a model that `dilated-attention train` made.

    dilated-attention generate run --prompt "def main(" --tokens 300
    dilated-attention generate run --prompt-file start.txt --sample --temperature 0.8 --top-p 0.95 --seed 1

MODEL is the folder of a run, one of its checkpoints, or a folder that `LongNetLM.save_pretrained` wrote.
"""

from __future__ import annotations

import argparse
import codecs
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .text import whole_number

if TYPE_CHECKING:
    from ..modules import LongNetLM

DONE, FAILED = 0, 1
STOPS = {"\\n": b"\n", "\\t": b"\t", "\\0": b"\0"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `generate`."""
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="folder of a run or a model, or a checkpoint")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="to go on from (default: a new line)")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="whose bytes to go on from")
    add("--tokens", type=whole_number, default=200, metavar="N", help="bytes to write (default: %(default)s)")
    add("--sample", action="store_true", help="draw bytes at random instead of the likeliest")
    add("--temperature", type=float, metavar="X", help="of --sample (default: 1)")
    add("--top-k", type=int, metavar="N", help="of --sample: only the likeliest bytes")
    add("--top-p", type=float, metavar="X", help="of --sample: only the likeliest, of this probability")
    add("--seed", type=int, metavar="N", help="of --sample (default: 0)")
    add("--stop", metavar="CHARACTER", help="end after this byte, such as a new line; \\n is understood")
    add("--json", action="store_true", help="write text and figures as JSON to stdout")


def run(options: argparse.Namespace) -> int:
    """Writes the prompt and what follows; 1 if there is no model that can be read."""
    how = _choices(options)
    prompt = options.prompt_file.read_bytes() if options.prompt_file else (options.prompt or "\n").encode()
    if not prompt:
        raise ValueError(f"a prompt must have a byte at least, got the empty {options.prompt_file}")
    from .train.folder import CheckpointError

    try:
        model = _load(options.model)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    if model.config.vocab_size != 256:
        raise ValueError(f"the tokens of the model must be 256 bytes, got {model.config.vocab_size}")
    begin = time.perf_counter()
    written = _write(model, prompt, options, how)
    seconds = time.perf_counter() - begin
    if options.json:
        shown = {"prompt": prompt.decode("utf-8", "replace"), "text": written.decode("utf-8", "replace")}
        print(json.dumps({**shown, "tokens": len(written), "bytes": list(written), "seconds": seconds}))
    return DONE


def _load(path: Path) -> LongNetLM:
    from ..modules import LongNetLM
    from ..modules.pretrained import WEIGHTS_FILE
    from .train.folder import find_checkpoint
    from .train.loop import model_of

    if not path.exists():
        raise ValueError(f"MODEL must be the folder of a run or a model, or a checkpoint, got {path}")
    if (path / WEIGHTS_FILE).is_file():
        return LongNetLM.from_pretrained(path)
    checkpoint, problems = find_checkpoint(path)
    for problem in problems:
        print(f"warning: {problem}; an older checkpoint is used", file=sys.stderr)
    return model_of(checkpoint)


def _choices(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `LongNetLM.stream`; what does not go together is an error."""
    names = ("temperature", "top_k", "top_p", "seed")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if given and not options.sample:
        raise ValueError(f"{', '.join(given)} need --sample, which is not given")
    if options.tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {options.tokens}")
    stop = () if options.stop is None else tuple(STOPS.get(options.stop, options.stop.encode()))
    if options.stop is not None and len(stop) != 1:
        raise ValueError(f"--stop must be one byte, got {options.stop!r}")
    sampling = {"do_sample": True, "seed": 0, **given} if options.sample else {}
    return {"stop_tokens": stop, **sampling}


def _write(model: LongNetLM, prompt: bytes, options: argparse.Namespace, how: dict[str, Any]) -> bytes:
    """The new bytes; without --json they are shown as they come."""
    import torch

    decoder, written = codecs.getincrementaldecoder("utf-8")("replace"), bytearray()

    def show(part: bytes, end: str = "") -> None:  # of a character that takes several bytes, perhaps
        text = decoder.decode(part, final=bool(end)) + end
        if not options.json:
            print(text, end="", flush=True)

    show(prompt)
    for token in model.stream(torch.tensor([list(prompt)]), options.tokens, **how):
        written += bytes(token.tolist())
        show(bytes(token.tolist()))
    show(b"", end="\n")
    return bytes(written)
