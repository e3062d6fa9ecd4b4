"""`LongNetViT`, Prov-GigaPath's slide encoder: a LongNet encoder over tiles of a slide, and its weights."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..attention_maps import row_index
from ..checks import check_device, check_flags, check_float_dtype, one_of
from ..modules.attention import Device, Dtype
from ..modules.call_checks import explain_mismatch
from ..modules.longnet import LongNetEncoder
from ..modules.longnet_config import StackConfig
from ..modules.pretrained import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    LoadReport,
    PretrainedModel,
    assign_tensors,
    copy_state,
    find_folder,
)
from .slide_maps import encode_with_maps, layer_numbers, maps_one_by_one
from .tile_grid import (
    ARCHITECTURES,
    cell_embeddings,
    check_arch,
    check_tiles,
    gigapath_segment_lengths,
    tile_cells,
)
from .torchscale import Tensors, plain_names, read_checkpoint, split_torchscale_state, unwrap_state

GIGAPATH_FILE = "slide_encoder.pth"
GIGAPATH_RATES = (1, 2, 4, 8, 16)
_HUB_PREFIX = "hf_hub:"  # of timm's names of repositories, which Prov-GigaPath's code takes

_Model = TypeVar("_Model", bound="LongNetViT")


@dataclass(frozen=True, kw_only=True, eq=False)
class LongNetViTConfig(StackConfig):
    """Settings of `LongNetViT`: of the layers, their number, and of the tiles; by default Prov-GigaPath's."""

    other_names: ClassVar[tuple[str, ...]] = ("embed_dim", "depth", "max_wsi_size")

    nhead: int = 16
    num_layers: int = 12
    dropout: float = 0.25
    drop_path_rate: float = 0.1
    in_chans: int = 1536
    slide_ngrids: int = 1000
    tile_size: int = 256
    global_pool: bool = False

    def __post_init__(self) -> None:
        if self.segment_lengths is None and self.max_length is None:
            object.__setattr__(self, "segment_lengths", gigapath_segment_lengths(tile_size=self.tile_size))
        if self.segment_lengths is not None and self.dilation_rates is None:
            object.__setattr__(self, "dilation_rates", GIGAPATH_RATES)
        super().__post_init__()
        if self.d_model % 4:
            rule = "embed_dim must be a multiple of 4, for sines and cosines of both coordinates of a tile"
            raise ValueError(f"{rule}, got {self.d_model}")


class LongNetViT(PretrainedModel):
    """Embeds a slide from the embeddings and the places of its tiles: Prov-GigaPath's slide encoder.

    Tiles are projected to embed_dim, get the sine-cosine embedding of their place, and follow a class token
    through `encoder`, a `LongNetEncoder`. The names of the weights are those of Prov-GigaPath's checkpoint,
    and the defaults its sizes. No table of positions is held, and any device serves.

    Args:
        in_chans: features of a tile's embedding.
        embed_dim, depth, nhead: width, layers and heads of the encoder; embed_dim is a multiple of 4.
        dim_feedforward: hidden features of each layer, 4 * embed_dim by default.
        slide_ngrids, tile_size: a slide is a grid of slide_ngrids x slide_ngrids tiles of tile_size pixels.
        max_wsi_size: pixels along a side of the largest slide, 262144 by default, which gives segment_lengths
            by `gigapath_segment_lengths`; so either the one or the other.
        global_pool: embed a slide by the mean of its tiles instead of the class token.
        settings: the other fields of `LongNetViTConfig`, and options of `DilatedAttention`, of which
            `head_offsets="blocked"` and `tail="phantom"` are set, as the checkpoint needs them.
            `detach_mixing=True` gives the gradients of torchscale, which takes the weights that mix branches
            as constants; by default gradients are the true ones.
    """

    config_class = LongNetViTConfig

    def __init__(
        self,
        in_chans: int = 1536,
        embed_dim: int = 768,
        depth: int = 12,
        nhead: int = 16,
        *,
        max_wsi_size: int | None = None,
        device: Device = None,
        dtype: Dtype = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if twice := sorted({"d_model", "num_layers"} & settings.keys()):
            raise TypeError(f"options must not repeat embed_dim and depth by other names, got {twice}")
        if settings.get("dim_feedforward") is None:
            settings["dim_feedforward"] = 4 * embed_dim
        if max_wsi_size is not None:
            names = ("segment_lengths", "max_length")
            if both := " ".join(f"{x}={settings[x]}" for x in names if settings.get(x) is not None):
                raise ValueError(f"max_wsi_size gives segment_lengths, got both, {max_wsi_size} and {both}")
            tile_size = settings.get("tile_size", LongNetViTConfig.tile_size)
            settings["segment_lengths"] = gigapath_segment_lengths(max_wsi_size, tile_size)
        settings |= {"in_chans": in_chans, "d_model": embed_dim, "num_layers": depth, "nhead": nhead}
        given = settings.pop("attention_options", {})
        if isinstance(given, Mapping):  # else the config refuses it
            given = {"head_offsets": "blocked", "tail": "phantom", **given}
        self.config = LongNetViTConfig.of(**settings, attention_options=given)
        check_device(device)
        check_float_dtype("dtype", dtype)
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.patch_embed = nn.Sequential(OrderedDict(proj=nn.Linear(in_chans, embed_dim, **placed)))
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **placed))
        self.dropout = nn.Dropout(self.config.dropout)
        self.encoder = LongNetEncoder(num_layers=depth, **self.config.stack_options(), **placed)
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6, **placed)
        self._initialise_own()

    @classmethod
    def from_arch(cls: type[_Model], arch: str, **options: Any) -> _Model:
        """A new model of the sizes that Prov-GigaPath gives a name, with initial weights.

        `gigapath_slide_enc12l768d` is Prov-GigaPath's, `gigapath_slide_enc12l384d` that of GigaPath-Flash;
        `ARCHITECTURES` holds all. `options` are arguments of the class.
        """
        one_of("arch", arch, tuple(ARCHITECTURES))
        return cls(**{**ARCHITECTURES[arch], **options})

    def reset_parameters(self) -> None:
        """Initialises all weights anew, as after `.to_empty()` of a model made on the meta device."""
        self.encoder.reset_parameters()
        self._initialise_own()

    @torch.no_grad()
    def _initialise_own(self) -> None:
        nn.init.xavier_uniform_(self.patch_embed.get_parameter("proj.weight"))
        nn.init.zeros_(self.patch_embed.get_parameter("proj.bias"))
        nn.init.normal_(self.cls_token, std=0.02)
        self.norm.reset_parameters()

    def forward(
        self, x: Tensor, coords: Tensor, all_layer_embed: bool = False, padding_mask: Tensor | None = None
    ) -> list[Tensor]:
        """Tiles (b, n, in_chans) at coords (b, n, 2) -> [embedding (b, embed_dim)] of each slide.

        Args:
            x: embeddings of tiles, floating point, converted to the dtype of the weights.
            coords: pixels of a corner of each tile, integers, float32 or float64, in a cell of the grid.
            all_layer_embed: return the embeddings of the encoder's input and of all depth layers. These are
                taken before the encoder's last norm, as in Prov-GigaPath: the last is not that of False.
            padding_mask: (b, n) bool, True where there is no tile. What is there is not read, so each slide
                has the embedding that it has alone; only slides of one number of tiles run together.
        """
        if padding_mask is None:
            return [self._pool(state) for state in self.forward_features(x, coords, all_layer_embed)]
        self._check(x, coords, padding_mask)
        check_flags(all_layer_embed=all_layer_embed)
        kept = ~padding_mask
        counts = kept.sum(1).tolist()
        groups = [[row for row, each in enumerate(counts) if each == count] for count in sorted(set(counts))]
        found = []
        for rows in groups:
            tiles, places = (each[rows][kept[rows]] for each in (x, coords))
            tiles, places = (each.view(len(rows), -1, each.shape[-1]) for each in (tiles, places))
            found.append(self.forward(tiles, places, all_layer_embed))
        order = torch.tensor([row for rows in groups for row in rows], device=x.device).argsort()
        return [torch.cat(states)[order] for states in zip(*found, strict=True)]

    def forward_features(self, x: Tensor, coords: Tensor, all_layer_embed: bool = False) -> list[Tensor]:
        """The states (b, 1 + n, embed_dim) of class token and tiles that `forward` takes its embeddings from.

        They lack the last `norm`. There is no padding here: give slides of one number of tiles.
        """
        self._check(x, coords, None)
        check_flags(all_layer_embed=all_layer_embed)
        out = self.encoder(self._tokens(x, coords), return_all=all_layer_embed)
        states: list[Tensor] = out[1] if all_layer_embed else [out]
        return states

    @torch.no_grad()
    def attention_maps(
        self,
        tiles: Tensor,
        coords: Tensor,
        rows: Sequence[int] | Tensor | None = None,
        layers: Sequence[int] | None = None,
        *,
        rollout: bool = False,
        relative: bool = False,
        padding_mask: Tensor | None = None,
        return_embedding: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """How much tokens attend to each tile, mean over heads: (b, layers, rows, n), or (b, rows, n).

        Each map is normalised over the tiles of its slide: it sums to 1, and is 0 at padding. Memory grows
        with n, never with n x n. It is no input of a loss: there is no gradient.

        Args:
            tiles, coords, padding_mask: as in `forward`.
            rows: positions of tokens: 0 is the class token, 1 + i is tile i. By default what the embedding is
                made of: the class token or, with global_pool, the mean over all tiles, one row of maps.
            layers: numbers of layers, negative ones from the last; all by default.
            rollout: one map through the chosen layers, (b, rows, n), by attention rollout (arXiv:2005.00928):
                `e @ M_last @ ... @ M_first`, where e is 1 at the row, or 1 / n at each tile for the mean, and
                M is the mean over heads of a layer's probabilities plus the identity, each row divided by its
                sum. Each layer costs a training step of its attention, and its input is kept.
            relative: divide each map by that of tokens that are all zero, and normalise again. The class
                token sees its own segments more than those beyond them; this leaves what the tiles add.
            return_embedding: also the embedding (b, embed_dim) that `forward` gives, from the same pass.
        """
        self._check(tiles, coords, padding_mask)
        check_flags(rollout=rollout, relative=relative, return_embedding=return_embedding)
        chosen = layer_numbers(layers, self.config.num_layers)
        rows = [0] if rows is None and not self.config.global_pool else rows
        index = None if rows is None else row_index(rows, 1 + tiles.shape[1], tiles.device)
        if padding_mask is None:
            how = (index, chosen, rollout, relative)
            maps, states = encode_with_maps(self.encoder, self._tokens(tiles, coords), *how)
            embedding = self._pool(states)
        else:
            alone = partial(self.attention_maps, layers=layers, rollout=rollout, relative=relative)
            maps, embedding = maps_one_by_one(alone, tiles, coords, index, ~padding_mask)
        return (maps, embedding) if return_embedding else maps

    @classmethod
    def _arguments(cls, config: StackConfig) -> dict[str, Any]:
        settings = super()._arguments(config)
        return {"embed_dim": settings.pop("d_model"), "depth": settings.pop("num_layers"), **settings}

    @classmethod
    def from_pretrained(
        cls: type[_Model],
        folder: str | os.PathLike[str],
        *,
        device: Device = None,
        dtype: Dtype = None,
        revision: str | None = None,
        arch: str | None = None,
        **options: Any,
    ) -> _Model:
        """The model of a folder, a file or a repository of the Hub, in evaluation mode.

        `folder` is one of `save_pretrained`, or its model.safetensors; or with Prov-GigaPath's names and no
        settings, one that holds slide_encoder.pth, or a file: .safetensors, or of torch.save with a state
        dict, also under "model". Without settings the sizes are read from the weights, but for the number of
        heads (16 unless given). With `arch`, a name that `from_arch` takes, they must be those of that name.
        Repositories of the Hub, also with timm's prefix "hf_hub:", `device`, `dtype`, `revision` and
        `options` are as in the other models.
        """
        folder = folder.removeprefix(_HUB_PREFIX) if isinstance(folder, str) else folder
        files = (GIGAPATH_FILE, CONFIG_FILE, WEIGHTS_FILE)
        path = find_folder(folder, files, revision, needed=files[:1])
        if path.name == WEIGHTS_FILE and (path.parent / CONFIG_FILE).is_file():
            path = path.parent
        if (path / WEIGHTS_FILE).is_file():
            model = super().from_pretrained(path, device=device, dtype=dtype, **options)
            check_arch(arch, cls._arguments(model.config), source=str(path))
            return model
        path = path / GIGAPATH_FILE if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(
                f"a slide encoder must be a file, or a folder that holds {CONFIG_FILE} and {WEIGHTS_FILE}, "
                f"or {GIGAPATH_FILE}, got no file {path}"
            )
        named, _ = plain_names(read_checkpoint(path, device=device))
        sizes = slide_sizes(named, source=str(path))
        check_arch(arch, {**sizes, **options}, source=str(path))
        model = cls(**{**sizes, **options}, device="meta")
        state, _ = split_slide_state(model.encoder, named)
        assign_tensors(model, state, dtype=dtype, source=str(path))
        return model.eval()

    def _pool(self, state: Tensor) -> Tensor:
        pooled: Tensor = self.norm(state[:, 1:].mean(1) if self.config.global_pool else state[:, 0])
        return pooled

    def _tokens(self, x: Tensor, coords: Tensor) -> Tensor:
        """The input (b, 1 + n, embed_dim) of the first layer."""
        config, cls_token = self.config, self.cls_token
        try:
            tiles = self.patch_embed(x.to(cls_token.dtype))
        except RuntimeError:
            explain_mismatch(cls_token, "the weights", x=x.to(cls_token.dtype))
            raise
        cells = tile_cells(coords, config.tile_size, config.slide_ngrids)
        tiles = tiles + cell_embeddings(cells, config.d_model, config.slide_ngrids, cls_token.dtype)
        tokens: Tensor = self.dropout(torch.cat([cls_token.expand(len(x), -1, -1), tiles], 1))
        return tokens

    def _check(self, x: Tensor, coords: Tensor, padding_mask: Tensor | None) -> None:
        check_tiles(x, coords, padding_mask, self.config.in_chans)
        if self.encoder.is_sharded:
            rule = "each process must have whole slides, which start with a class token"
            raise ValueError(f"{rule}, got attention over a sequence that several processes share")


def load_gigapath_state(
    model: LongNetViT, state: Mapping[str, Any], *, prefix: str = "", strict: bool = True
) -> LoadReport:
    """Copies the weights of a Prov-GigaPath slide encoder into `model`, and reports on the names.

    `state` is a state dict with Prov-GigaPath's names, or a dict that holds one under "model", as its file
    does. `prefix` and `strict` are those of `load_torchscale_state`; in a classifier of its fine-tuning code
    names start with "slide_encoder.". The table `pos_embed`, which is computed here, is dropped.
    """
    if not isinstance(model, LongNetViT):
        raise TypeError(f"model must be a LongNetViT, got {type(model).__name__}")
    check_flags(strict=strict)
    named, outside = plain_names(unwrap_state(state, source="state"), prefix)
    found, dropped = split_slide_state(model.encoder, named)
    return replace(copy_state(model, found, strict=strict), dropped=dropped, outside=outside)


def split_slide_state(encoder: LongNetEncoder, named: Tensors) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Tensors of Prov-GigaPath by our names, and the names of what is computed or checked here."""
    inside, outside = plain_names(named, "encoder.")
    layers, constants = split_torchscale_state(encoder, inside)
    state = {name: named[name] for name in outside} | {f"encoder.{name}": x for name, x in layers.items()}
    table = () if state.pop("pos_embed", None) is None else ("pos_embed",)
    return state, (*table, *(f"encoder.{name}" for name in constants))


def slide_sizes(state: Tensors, *, source: str) -> dict[str, int]:
    """The arguments of `LongNetViT` that the shapes of a state dict tell."""
    for name in ("patch_embed.proj.weight", "encoder.layers.0.ffn.fc1.weight"):
        if name not in state or state[name].dim() != 2:
            got = f"one of {tuple(state[name].shape)}" if name in state else "none"
            raise ValueError(f"{source} must hold a slide encoder with a matrix {name}, got {got}")
    embed_dim, in_chans = state["patch_embed.proj.weight"].shape
    layers = {found[1] for name in state if (found := re.match(r"encoder\.layers\.(\d+)\.", name))}
    sizes = {"in_chans": in_chans, "embed_dim": embed_dim, "depth": len(layers)}
    return {**sizes, "dim_feedforward": len(state["encoder.layers.0.ffn.fc1.weight"])}
