"""Slides: time and memory of Prov-GigaPath's slide encoder, of a heat map, and of torchscale's own code.

TORCHSCALE=path/to/torchscale python benchmarks/slides.py --out benchmarks/results/slides.json
python benchmarks/slides.py --render --update docs/gigapath.md --markers slides

TORCHSCALE is a checkout of https://github.com/microsoft/torchscale, whose LongNet Prov-GigaPath is built on.
It needs einops. Its encoder gets the same weights and tokens, and PyTorch's fused CPU attention in the place
of flash-attn, which has none for CPUs. Without it the rest is measured.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

import common
import torch
from common import FORWARD_OP, Config, Say, main, run_case, show_branches
from torch import Tensor, nn

from dilated_attention_pytorch import LongNetViT
from dilated_attention_pytorch.cli.bench import gate
from dilated_attention_pytorch.cli.bench.gate import WrongAnswerError
from dilated_attention_pytorch.cli.bench.measure import Measured, interleave, measure_in_child, read_status
from dilated_attention_pytorch.cli.bench.record import Figure, Result, Section, Table
from dilated_attention_pytorch.integrations.gigapath import GIGAPATH_RATES, gigapath_segment_lengths

CHECKOUT = "TORCHSCALE"
WHY_NOT = f"{CHECKOUT} names no checkout of torchscale"
TOLERANCE = 1e-4  # of float32 embeddings, from torchscale's
_CHECKED = 96  # tiles whose embedding is compared with that in float64
_COLUMNS = 150  # of the grid of tiles


@dataclass(frozen=True)
class SlideCase:
    """A slide: its embedding, the same with a heat map by rollout, and the embedding by torchscale."""

    name: str
    config: Config
    tiles: int
    embed_dim: int = 768
    depth: int = 12
    in_chans: int = 1536
    memory_target: int | None = None
    repeats: int = 2
    kind: ClassVar[str] = "slide"

    def run(self, say: Say) -> Measured:
        say(f"{self.name}: the embedding, checked, then with a heat map, in processes of their own")
        parts = {name: measure_in_child(measure_slide, self, name == "map") for name in ("encode", "map")}
        found = common.gather(self, parts)
        if why_not_torchscale():
            return found
        say(f"{self.name}: beside torchscale")
        beside = measure_in_child(measure_beside_torchscale, self)
        if beside.error is not None and not beside.error <= TOLERANCE:
            raise WrongAnswerError(f"{self.name}: off torchscale's embedding by {beside.error:.1e}")
        seconds = {**found.seconds, **beside.seconds}
        error = max(found.error or 0.0, beside.error or 0.0)
        return Measured(error, found.counts | beside.counts, seconds, found.why_not or beside.why_not)

    def figures(self, found: Measured) -> list[Figure]:
        """Peaks of whole processes, then times of ours over torchscale's, measured in turn."""
        peaks = [("peak memory", "encode"), ("peak memory with a heat map", "map")]
        memory = [
            Figure(name, found.counts.get(f"peak {part}"), "bytes", self.memory_target)
            for name, part in peaks
        ]
        torchscale = Figure("peak memory of torchscale", found.counts.get("peak torchscale"), "bytes")
        return [*memory, torchscale, *common.time_figures(found, "ours", "torchscale")]


def why_not_torchscale() -> str | None:
    return None if os.environ.get(CHECKOUT) else WHY_NOT


def make_slide(case: SlideCase) -> tuple[LongNetViT, Tensor, Tensor]:
    """An encoder, whose attention is less even than that of initial weights, and a slide."""
    config = case.config
    torch.manual_seed(0)
    model = LongNetViT(
        *(case.in_chans, case.embed_dim, case.depth, config.h),
        segment_lengths=config.segment_lengths,
        dilation_rates=config.dilation_rates,
    ).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(3.0 if "q_proj.weight" in name else 1.0)
    cells = torch.arange(case.tiles)
    coords = torch.stack([cells % _COLUMNS, cells // _COLUMNS], 1) * model.config.tile_size
    return model, torch.randn(1, case.tiles, case.in_chans), coords[None]


@torch.inference_mode()
def measure_slide(case: SlideCase, with_map: bool) -> Measured:
    """Peak memory of the whole process, library, weights, tiles and all, and the time of one run."""
    model, tiles, coords = make_slide(case)

    def encode() -> Tensor:
        if not with_map:
            return model(tiles, coords)[0]
        how = {"rollout": True, "relative": True, "return_embedding": True}
        return model.attention_maps(tiles, coords, **how)[1]

    found, _, seconds = common.measure_once(encode)
    counts = {"peak": read_status("VmHWM"), "parameters": sum(x.numel() for x in model.parameters())}
    del found
    some = tiles[:, :_CHECKED], coords[:, :_CHECKED]
    actual = model(*some)[0]
    expected = model.double()(some[0].double(), some[1])[0]
    return Measured(gate.largest_error(actual, expected), counts, {"slide": (seconds,)})


class Torchscale(nn.Module):
    """torchscale's encoder with the weights of `LongNetViT.encoder`, in its place."""

    is_sharded = False

    def __init__(self, model: LongNetViT) -> None:
        super().__init__()
        sys.path.insert(0, os.environ[CHECKOUT])
        for name, names in {
            "fairscale.nn": ("checkpoint_wrapper", "wrap"),
            "timm.models.layers": ("drop_path",),
        }.items():
            stand_in(name, names)  # of training alone
        config = model.config
        sizes = {"encoder_embed_dim": config.d_model, "encoder_ffn_embed_dim": config.dim_feedforward}
        sizes |= {"encoder_layers": config.num_layers, "encoder_attention_heads": config.nhead}
        branches = {
            "segment_length": list(config.segment_lengths),
            "dilated_ratio": list(config.dilation_rates),
        }
        settings = import_module("torchscale.architecture.config").EncoderConfig(
            **sizes, **{name: str(each) for name, each in branches.items()}, flash_attention=True
        )
        import_module("torchscale.component.multihead_attention").flash_attn_func = stock_attention
        self.encoder = import_module("torchscale.model.longnet").LongNetEncoder(settings).eval()
        self.encoder.load_state_dict(model.encoder.state_dict(), assign=True)

    def forward(self, tokens: Tensor, return_all: bool = False) -> Tensor:
        out: Tensor = self.encoder(src_tokens=None, token_embeddings=tokens)["encoder_out"]
        return out


def stand_in(name: str, names: Sequence[str]) -> None:
    """A module of that name, where none is installed, whose names hold nothing."""
    try:
        import_module(name)
    except ImportError:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            sys.modules.setdefault(path, types.ModuleType(path))
        vars(sys.modules[name]).update(dict.fromkeys(names))


def stock_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    bias: None = None,
    scale: None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """flash-attn's function, by PyTorch's op: out (b, n, h, d) and lse (b, h, n)."""
    out, lse = FORWARD_OP(*(x.transpose(1, 2) for x in (q, k, v)), dropout, causal)
    return out.transpose(1, 2), lse


@torch.inference_mode()
def measure_beside_torchscale(case: SlideCase) -> Measured:
    """Both in turn, after the peak memory of torchscale alone; the difference of their embeddings."""
    model, tiles, coords = make_slide(case)
    theirs = LongNetViT.from_config(model.config, device="meta")
    theirs.load_state_dict(model.state_dict(), assign=True)
    theirs.encoder = Torchscale(model)
    theirs.eval()
    expected = theirs(tiles, coords)[0]
    counts = {"peak torchscale": read_status("VmHWM")}
    error = gate.largest_error(model(tiles, coords)[0], expected)
    candidates = {name: lambda m=m: m(tiles, coords) for name, m in (("ours", model), ("torchscale", theirs))}
    return Measured(error, counts, interleave(candidates, case.repeats, warmup=0))


_SLIDE = Config(16, 48, gigapath_segment_lengths(), GIGAPATH_RATES)
CASES = (SlideCase("slide of 20,000 tiles", _SLIDE, 20_000, memory_target=5 * 2**29),)
QUICK = (SlideCase("quick slide", Config(4, 8, (16, 32, 64, 128, 256), GIGAPATH_RATES), 300, 32, 2, 24),)


def describe(case: dict[str, Any]) -> str:
    config = case["config"]
    sizes = f"{case['tiles']:,} tiles, {case['depth']} layers, width {case['embed_dim']}"
    return f"{sizes}, h = {config['h']}, d = {config['d']}, {show_branches(config)}"


def slide_table(results: Sequence[Result]) -> Table:
    rows = []
    for result in results:
        peak, with_map, theirs, ratio, _ = result.figures
        seconds = {name: result.timing(name) for name in ("slide encode", "slide map", "ours", "torchscale")}
        shown = {name: f"{each.minimum:.1f}" if each else "" for name, each in seconds.items()}
        rows += [
            [f"{result.name}, embedding", shown["slide encode"], *result.shown(peak), shown["ours"]],
            [f"{result.name}, with a heat map", shown["slide map"], *result.shown(with_map), ""],
        ]
        note = result.notes.get("torchscale", theirs.number)
        rows.append([f"{result.name}, torchscale", "", note, "", shown["torchscale"]])
        if ratio.value is not None:
            rows.append([f"{result.name}, time over torchscale's", "", "", "", ratio.number])
    return Table(["case", "s", "peak memory", "target", "s, in turn"], rows)


def run(case: SlideCase, say: Say) -> Result:
    why_not = why_not_torchscale()
    result = run_case(case, say)
    return replace(result, notes={"torchscale": f"not measured: {why_not}"}) if why_not else result


TITLE = "**Slides**: memory of the whole process, and the shortest times"
SECTIONS = {"slide": Section(TITLE, slide_table, describe, has_spread=False)}

if __name__ == "__main__":
    sys.exit(main("slides"))
