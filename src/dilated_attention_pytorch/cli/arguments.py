"""The options of commands whose modules import torch: help must not wait for it.

A function a command; its docstring is the description in the help.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path
from typing import Any

from .text import byte_count, int_list, positive_int

DTYPES = ("float32", "bfloat16", "float16", "float64")
PATTERNS = ("dilated_sparse", "local_window", "global_local", "strided", "random", "hierarchical", "adaptive")
NUMBER: dict[str, Any] = {"type": positive_int, "metavar": "N"}


def demo(parser: ArgumentParser) -> None:
    """A first look at the library on this machine, written up as a page of HTML.

    Checks the library against its definition; measures time and memory of dense, dilated and block-sparse
    attention as the length doubles; trains a small language model on the source of Python's own library and
    lets it write. It needs no network and about two and a half minutes on two cores. Ctrl-C ends it early;
    the report then holds what was found until then.

        dilated-attention demo
        dilated-attention demo --seconds 20 --train-seconds 20 --out look.html
    """
    seconds: dict[str, Any] = {"type": float, "default": 60.0, "metavar": "S"}
    parser.add_argument("--seconds", help="time that the measurements may take (default: 60)", **seconds)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--train-seconds", help="time that the training may take; 0 trains nothing (default: 60)", **seconds)
    add("--steps", help="train so many steps, however long they take", **NUMBER)
    report = Path("dilated-attention-demo.html")
    add = parser.add_argument
    add("--out", type=Path, default=report, metavar="FILE", help=f"the report (default: {report})")
    _add_json(parser, "print what was found as JSON; progress goes to standard error")


def doctor(parser: ArgumentParser) -> None:
    """Says what is installed, what this machine offers, which kernels can run here and why others cannot.

    Then checks the library against its definition, forward and gradients. Exit code 1 if a check fails.

        dilated-attention doctor
        dilated-attention doctor --json > facts.json
    """
    _add_json(parser, "print the facts and checks as JSON")


def gpu_check(parser: ArgumentParser) -> None:
    """Checks the kernels of a GPU against the definition, runs them twice for the same bits, and times them.

    Beside PyTorch's dense attention and FlexAttention and, where they are installed, flash-attn and NATTEN.
    The report is meant to be sent back: this project has had no GPU. With TRITON_INTERPRET=1 in the
    environment it rehearses on the CPU, and times nothing. Exit code 1 if a check fails.

        dilated-attention gpu-check --out report.json
        TRITON_INTERPRET=1 dilated-attention gpu-check --quick
    """
    report = Path("dilated-attention-gpu.json")
    add = parser.add_argument
    add("--device", default="cuda", help="(default: cuda)")
    add("--quick", action="store_true", help="a few of the checks, and the shortest length")
    add("--out", type=Path, default=report, metavar="FILE", help=f"the report (default: {report})")


def autotune(parser: ArgumentParser) -> None:
    """Times blocks of the Triton kernel on this GPU around those that are shipped, and stores the best.

    Each candidate must give the answer of the shipped blocks before it is timed; one that cannot run is
    named and left out. Later calls on a GPU of this name use what is stored, as long as neither Triton nor
    the kernel changes: in DILATED_ATTENTION_TUNING if that is set, else in the user's cache. Ctrl-C keeps
    what was found until then. With TRITON_INTERPRET=1 it rehearses on the CPU.

        dilated-attention autotune
        dilated-attention autotune --dtypes bfloat16 --head-dims 64,128 --quick
    """
    add = parser.add_argument
    add("--device", default="cuda", help="(default: cuda)")
    dtypes = "of float16, bfloat16 and float32 (default: all)"
    add("--dtypes", "--dtype", type=_dtype_list, metavar="NAME,...", help=dtypes)
    head_dims = "head sizes (default: 32,64,80,96,128)"
    add("--head-dims", "--head-dim", type=int_list, metavar="D,...", help=head_dims)
    add("--quick", action="store_true", help="the nearest candidates only")


def show(parser: ArgumentParser) -> None:
    """Draws what attends to what, in the terminal or as a picture (--out).

    For dilated attention or for a block pattern (--pattern): offsets of each head, multiplicity (how many
    branches connect a pair), coverage (of the positions that a token may see, the share it reaches in one
    layer) and the receptive field over layers.

        dilated-attention show
        dilated-attention show --length 512 --segments 64,256,512 --rates 1,4,8 --heads 8 --causal --layers 3
        dilated-attention show --length 1024 --pattern local_window --block-size 32 --out window.png
    """
    add = parser.add_argument
    add("--length", "--lengths", default=32, help="positions (default: 32)", **NUMBER)
    _add_branches(parser, "segment lengths (default: 8,32)", "dilation rates (default: 1,4)")
    parser.set_defaults(segments=(8, 32), rates=(1, 4))
    add("--heads", default=4, help="heads (default: 4)", **NUMBER)
    add("--causal", action="store_true", help="no query sees a later key")
    add("--mixing", choices=("all", "grouped"), default="all", help="head_mixing (default: all)")
    add("--offsets", choices=("interleaved", "blocked"), default="interleaved", help="head_offsets")
    add("--layers", default=1, help="what is reached after so many layers (default: 1)", **NUMBER)
    add = parser.add_argument_group("block patterns, instead of dilated attention").add_argument
    add("--pattern", choices=PATTERNS, help="type of the pattern")
    add("--density", type=float, default=0.1, help="share of the blocks that is kept (default: 0.1)")
    add("--block-size", default=4, help="(default: 4)", **NUMBER)
    add("--window", help="window_size, in tokens", **NUMBER)
    add("--global-tokens", help="first tokens, seen by all", **NUMBER)
    add("--seed", type=int, default=0, help="of random patterns (default: 0)")
    add = parser.add_argument_group("output").add_argument
    add("--head", type=int, metavar="H", help="draw this head alone in the terminal")
    add("--out", type=Path, metavar="FILE", help="write a picture, .png or .svg")
    add("--pixels", default=320, help="side of a panel of the picture (default: 320)", **NUMBER)
    _add_json(parser, "print the numbers as JSON, draw nothing in text")


def plan(parser: ArgumentParser) -> None:
    """Proposes settings for sequences of a length, with the costs to expect, the reasons and code to paste.

    Segment lengths and rates by LongNet's geometric rule, kind of module, pool and cache; FLOPs, memory and
    communication. What is predicted is that of attention alone: projections, feed-forward and weights come
    on top.

        dilated-attention plan --length 1M --dtype bfloat16 --causal --memory 8GiB
        dilated-attention plan --length 65536 --heads 16 --head-dim 64 --layers 12 --train
        dilated-attention plan --length 64k --segments 4k,64k --rates 1,8
        dilated-attention plan --length 16M --ranks 64 --dtype bfloat16 --train --memory 16GiB --json
    """
    add = parser.add_argument
    add("--length", "--lengths", required=True, help="tokens: 65536, 64k, 1M", **NUMBER)
    add("--heads", default=8, help="(default: 8)", **NUMBER)
    add("--kv-heads", help="key heads (default: as many)", **NUMBER)
    add("--head-dim", default=64, help="(default: 64)", **NUMBER)
    add("--batch", default=1, help="sequences (default: 1)", **NUMBER)
    add("--layers", default=1, help="(default: 1)", **NUMBER)
    add("--dtype", choices=DTYPES, default="float32", help="(default: float32)")
    add("--train", action="store_true", help="with gradients")
    add("--causal", action="store_true", help="no token sees a later one")
    add("--ranks", default=1, help="processes (default: 1)", **NUMBER)
    memory = "of each rank, as 8GiB (default: what is free here)"
    add("--memory", type=byte_count, metavar="SIZE", help=memory)
    add("--device", default="cpu", help="cpu, cuda, cuda:1, mps (default: cpu)")
    add("--first-segment", help="shortest segment (default: 2048)", **NUMBER)
    growth = "growth of lengths and rates (default: 2 where five branches suffice, else 4)"
    add("--ratio", help=growth, **NUMBER)
    _add_branches(parser, "segment lengths, instead of proposed ones", "dilation rates of --segments")
    _add_json(parser, "print the plan as JSON")


def slide(parser: ArgumentParser) -> None:
    """Embeds slides from the features of their tiles with Prov-GigaPath's slide encoder, on any device.

    Reads HDF5 (.h5) with `features` and `coords` as TRIDENT and CLAM write it, STAMP's `feats`, or the same
    names in .pt, .npz and .zarr; --weights is slide_encoder.pth, a folder, or a repository of the Hugging
    Face Hub. Writes for each slide its embedding, and on request a picture of the attention that its tiles
    get. Slides are encoded one by one; one that does not fit is reported, and the others go on.

        dilated-attention slide features.h5 --weights slide_encoder.pth --out embedding.h5 --heat-map map.png
        dilated-attention slide features/*.h5 --weights slide_encoder.pth --out embeddings --heat-map maps
        dilated-attention slide features.h5 --weights prov-gigapath/prov-gigapath --global-pool --out e.npz
    """
    add = parser.add_argument
    add("features", nargs="+", type=Path, metavar="FEATURES", help="files of tile features, one a slide")
    add(
        "--weights",
        required=True,
        metavar="PATH",
        help="of the slide encoder: file, folder or Hub repository",
    )
    add("--arch", metavar="NAME", help="refuse weights of other sizes, as gigapath_slide_enc12l768d")
    add("--global-pool", action="store_true", help="mean of the tiles, instead of the class token")
    size = "side of a tile in the unit of coords (default: as the file tells, else that of the encoder, 256)"
    add("--tile-size", type=float, metavar="N", help=size)
    add("--device", help="cpu, cuda, cuda:1, mps (default: a GPU if there is one)")
    add(
        "--dtype", choices=DTYPES[:2], default="float32", help="of weights and activations (default: float32)"
    )
    add = parser.add_argument_group("output").add_argument
    files = "file for one slide, folder for several"
    add("--out", type=Path, required=True, metavar="PATH", help=f"embeddings, .h5, .pt or .npz: {files}")
    add("--heat-map", type=Path, metavar="PATH", help=f"pictures of attention, .png: {files}")
    maps = "attention of: all layers, rolled out; the last layer; the mean of layers (default: rollout)"
    add("--map", choices=("rollout", "last", "mean"), default="rollout", help=maps)
    raw = "probabilities as they are; by default over those of a slide of equal tiles, which show the pattern"
    add("--raw", action="store_true", help=raw)
    add("--skip-existing", action="store_true", help="leave out slides whose embedding is there")


def _dtype_list(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in DTYPES[:3]]:
        raise ArgumentTypeError(f"dtypes are of {', '.join(DTYPES[:3])}, got {unknown[0]!r}")
    return names


def _add_branches(parser: ArgumentParser, segments: str, rates: str) -> None:
    parser.add_argument("--segments", type=int_list, metavar="W,...", help=segments)
    parser.add_argument("--rates", type=int_list, metavar="R,...", help=rates)


def _add_json(parser: ArgumentParser, text: str) -> None:
    parser.add_argument("--json", action="store_true", help=text)
