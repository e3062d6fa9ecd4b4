"""`dilated-attention slide`: embeddings of slides and pictures of attention, from files of tile features."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.host_memory import is_out_of_memory
from ..integrations.gigapath import LongNetViT
from ..integrations.slide_maps import heat_map, write_png
from ..integrations.slides import HDF5, Slide, read_slide, write_embedding
from ..integrations.tile_grid import grid_coords
from .text import Progress, show_seconds

DONE, FAILED = 0, 1
_LAYERS = {"rollout": None, "mean": None, "last": [-1]}


def run(options: Namespace) -> int:
    """Encodes slide after slide; 1 if one of several could not be."""
    todo = [(path, *places(path, options)) for path in options.features]
    if len({out for _, out, _ in todo}) < len(todo):
        raise ValueError("slides must have names of their own, got two files of one name")
    if options.skip_existing:
        todo = [each for each in todo if not each[1].exists()]
    if not todo:
        print("all embeddings are there")
        return DONE
    device = options.device or _default_device()
    how: dict[str, Any] = {"global_pool": True} if options.global_pool else {}
    how |= {"device": device, "dtype": getattr(torch, options.dtype), "arch": options.arch}
    model = LongNetViT.from_pretrained(options.weights, **how)
    failed = 0
    for number, (path, out, picture) in enumerate(todo, 1):
        count = f" ({number} of {len(todo)})" if len(todo) > 1 else ""
        try:
            told = _encode(model, read_slide(path), out, picture, f"{path.stem}{count}", options)
        except (OSError, ValueError, RuntimeError) as error:
            known = isinstance(error, (OSError, ValueError)) or is_out_of_memory(error)
            if not known or len(options.features) == 1:
                raise
            print(f"{path.stem}{count}: error: {error}", file=sys.stderr)
            failed += 1
        else:
            print(f"{path.stem}{count}: {told}", flush=True)
    return FAILED if failed else DONE


def places(path: Path, options: Namespace) -> tuple[Path, Path | None]:
    """Where the embedding and the picture of a slide go; folders for several slides are made."""
    found: list[Any] = []
    for option, given, suffixes in (
        ("--out", options.out, (*HDF5, ".pt", ".npz")),
        ("--heat-map", options.heat_map, (".png",)),
    ):
        if given is None:
            found.append(None)
            continue
        is_file = given.suffix.lower() in suffixes and not given.is_dir()
        if is_file and len(options.features) > 1:
            raise ValueError(f"{option} must be a folder for several slides, got {given}")
        if given.suffix and not is_file and not given.is_dir():
            raise ValueError(f"{option} must be a folder, or end in {', '.join(suffixes)}, got {given}")
        (given.parent if is_file else given).mkdir(parents=True, exist_ok=True)
        found.append(given if is_file else given / f"{path.stem}{suffixes[0]}")
    return found[0], found[1]


def _default_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _encode(
    model: LongNetViT, slide: Slide, out: Path, picture: Path | None, name: str, options: Namespace
) -> str:
    """Writes embedding and picture of a slide, and tells what was done."""
    config, begin = model.config, time.perf_counter()
    width = slide.features.shape[1]
    if width != config.in_chans:
        raise ValueError(
            f"features must have the width {config.in_chans} that the encoder was trained with, that of its "
            f"tile encoder, got {width}"
        )
    tile_size = slide.tile_size if options.tile_size is None else options.tile_size
    if tile_size is None:
        tile_size = float(config.tile_size)
        note = "the file does not tell the side of its tiles; --tile-size says otherwise"
        print(f"{name}: tiles of {tile_size:g} pixels assumed: {note}", file=sys.stderr)
    passes = 1 if picture is None else 2 if options.raw else 3
    bar = Progress(name, config.num_layers * passes)
    # Each layer calls this norm to encode, for its map, and for the map that this is divided by.
    hooks = [layer.self_attn_layer_norm.register_forward_hook(bar.step) for layer in _layers(model)]
    try:
        embedding, weights = _embed(model, slide, tile_size, picture is not None, options)
    finally:
        bar.clear()
        for hook in hooks:
            hook.remove()
    told: dict[str, Any] = {"tile_size": tile_size, "weights": str(options.weights), "dtype": options.dtype}
    held = {"features": embedding, "coords": slide.coords}
    written = [str(out)]
    if picture is not None and weights is not None:
        write_png(picture, heat_map(slide.coords, weights, tile_size))
        held["attention"] = weights
        told["attention_map"] = f"{options.map}{', raw' if options.raw else ''}"
        written.append(str(picture))
    write_embedding(out, held, {**told, "global_pool": config.global_pool})
    seconds = show_seconds(time.perf_counter() - begin)
    return f"{len(slide.features):,} tiles in {seconds} on {model.cls_token.device}, {', '.join(written)}"


@torch.inference_mode()
def _embed(
    model: LongNetViT, slide: Slide, tile_size: float, with_map: bool, options: Namespace
) -> tuple[Tensor, Tensor | None]:
    """The embedding (d,) of a slide, and the weights (n,) of its tiles, in float32 on the CPU."""
    device = model.cls_token.device
    coords = grid_coords(slide.coords, tile_size, model.config.tile_size)
    x = slide.features.to(device).unsqueeze(0), coords.to(device).unsqueeze(0)
    if not with_map:
        return model(*x)[0][0].float().cpu(), None
    how = {"rollout": options.map == "rollout", "relative": not options.raw, "return_embedding": True}
    maps, embedding = model.attention_maps(*x, None, _LAYERS[options.map], **how)
    return embedding[0].float().cpu(), maps.flatten(0, -2).mean(0).float().cpu()


def _layers(model: LongNetViT) -> list[Any]:
    return list(model.encoder.layers)
