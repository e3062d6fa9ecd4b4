"""Embeds a slide of many tiles with Prov-GigaPath's slide encoder, without flash-attn, on any device.

    python examples/encode_slide.py
    python examples/encode_slide.py --weights slide_encoder.pth

The tiles are random, and so are the weights unless a file is given; random ones are written to a temporary
file in Prov-GigaPath's format and read from it. Prints sizes, time, and the peak memory of the process.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch

from dilated_attention_pytorch import LongNetViT


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tiles", type=int, default=10_000, help="tiles of the slide (default: %(default)s)")
    parser.add_argument("--weights", type=Path, help="slide_encoder.pth of Prov-GigaPath")
    parser.add_argument(
        "--depth", type=int, default=12, help="layers of random weights (default: %(default)s)"
    )
    parser.add_argument("--global-pool", action="store_true", help="mean of the tiles, not the class token")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.tiles < 1 or options.depth < 1:
        parser.error(f"--tiles and --depth must be positive, got {options.tiles} and {options.depth}")
    return options


def load(options: argparse.Namespace) -> LongNetViT:
    how = {"global_pool": options.global_pool, "device": options.device}
    if options.weights is not None:
        return LongNetViT.from_pretrained(options.weights, **how)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slide_encoder.pth"
        torch.save({"model": LongNetViT(depth=options.depth).state_dict()}, path)
        return LongNetViT.from_pretrained(path, **how)


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    model = load(options)
    config = model.config
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {config.num_layers} layers")
    print(f"segments {config.segment_lengths}, rates {config.dilation_rates}")

    tiles = torch.randn(1, options.tiles, config.in_chans, device=options.device)
    side = config.slide_ngrids * config.tile_size
    coords = torch.randint(0, side, (1, options.tiles, 2), device=options.device)
    start = time.perf_counter()
    with torch.inference_mode():
        [embedding] = model(tiles, coords)
    values = embedding.float().cpu()  # waits for the device
    seconds = time.perf_counter() - start

    print(f"{options.tiles} tiles in {seconds:.1f} s on {options.device}")
    print(f"embedding {tuple(values.shape)}, norm {values.norm():.3f}")
    print(f"peak memory {peak_memory() / 1e9:.2f} GB")


def peak_memory() -> int:
    """Bytes of this process at their most. getrusage would count what its parent had, if there is /proc."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
