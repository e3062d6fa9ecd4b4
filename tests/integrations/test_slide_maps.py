"""Attention maps of slides against the dense matrices of the layers, and their pictures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from torch import Tensor

from dilated_attention_pytorch import LongNetViT
from dilated_attention_pytorch.integrations.slide_maps import heat_map, write_png
from integrations.transcription import random_state, slide_shapes
from support.tolerances import TOLERANCES

GRID, TILE = 11, 10
SIZES: dict[str, Any] = {"in_chans": 6, "embed_dim": 12, "depth": 3, "nhead": 3, "dim_feedforward": 20}
SIZES |= {"slide_ngrids": GRID, "tile_size": TILE, "segment_lengths": (16, 70), "dilation_rates": (1, 3)}
DOUBLE = TOLERANCES[torch.float64]


def make_model(**options: Any) -> LongNetViT:
    torch.manual_seed(0)
    model = LongNetViT(**{**SIZES, "dtype": torch.float64, **options}).eval()
    state = random_state(slide_shapes(6, 3, 12, 20))
    for name, parameter in model.state_dict().items():
        if name in state:  # weights of some size, where those of a new model attend evenly
            parameter.copy_(state[name])
    return model


def slides(b: int, n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(b, n, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, GRID * TILE, (b, n, 2), generator=generator)


@torch.no_grad()
def dense(model: LongNetViT, x: Tensor, coords: Tensor, *, blank: bool = False) -> Tensor:
    """Mean over heads of the whole matrix of each layer: (b, layers, 1 + n, 1 + n)."""
    states = model.forward_features(x, coords, all_layer_embed=True)
    found = []
    for layer, state in zip(model.encoder.layers, states[:-1], strict=True):
        normed = layer.self_attn_layer_norm(torch.zeros_like(state) if blank else state)
        found.append(layer.self_attn.attention_rows(normed, range(state.shape[1])).mean(1))
    return torch.stack(found, 1)


def rolled_out(matrices: Tensor) -> Tensor:
    """(b, 1 + n, 1 + n), the product of the layers' matrices, with the identity added and rows of sum 1."""
    product = torch.eye(matrices.shape[-1], dtype=matrices.dtype)
    for matrix in matrices.unbind(1):
        mixed = matrix + torch.eye(matrix.shape[-1], dtype=matrix.dtype)
        product = mixed / mixed.sum(-1, keepdim=True) @ product
    return product


def over_tiles(maps: Tensor) -> Tensor:
    return (maps[..., 1:] / maps[..., 1:].sum(-1, keepdim=True)).nan_to_num()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"global_pool": True},
    {"kind": "improved", "detach_mixing": True},
    {"kind": "ring", "normalize_output": False},
    {"tail": "exact", "head_offsets": "interleaved", "kernel": "eager"},
    {"head_mixing": "grouped", "attention_dropout": 0.5, "enable_memory_pool": True},
]


@pytest.mark.parametrize("n", [1, 15, 131])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: "-".join(each) or "plain")
def test_maps_equal_the_dense_definition(options: dict[str, Any], n: int) -> None:
    model, (x, coords) = make_model(**options), slides(2, n)
    matrices, blank = dense(model, x, coords), dense(model, x, coords, blank=True)
    pooled = model.config.global_pool
    rows = [0, n, 1 + n // 2]

    def pool(each: Tensor) -> Tensor:
        return each[..., 1:, :].mean(-2, keepdim=True) if pooled else each[..., :1, :]

    def ratio(maps: Tensor, alike: Tensor) -> Tensor:
        return over_tiles(torch.where(alike > 0, maps / alike, 0.0))

    both, product, plain = matrices[:, [2, 0]], rolled_out(matrices), rolled_out(blank)
    later = rolled_out(matrices[:, 1:])[:, rows]
    with torch.inference_mode():
        for found, expected in (
            (model.attention_maps(x, coords), over_tiles(pool(matrices))),
            (model.attention_maps(x, coords, rows, [-1, 0]), over_tiles(both[:, :, rows])),
            (model.attention_maps(x, coords, rollout=True), over_tiles(pool(product))),
            (model.attention_maps(x, coords, rows, rollout=True), over_tiles(product[:, rows])),
            (model.attention_maps(x, coords, torch.tensor(rows), [1, 2], rollout=True), over_tiles(later)),
            (model.attention_maps(x, coords, relative=True), ratio(pool(matrices), pool(blank))),
            (
                model.attention_maps(x, coords, rollout=True, relative=True),
                ratio(pool(product), pool(plain)),
            ),
        ):
            assert found.shape == expected.shape
            assert (found - expected).abs().max() < DOUBLE
            assert (found.sum(-1) - (expected.sum(-1) > 0).double()).abs().max() < DOUBLE
        _, embedding = model.attention_maps(x, coords, return_embedding=True)
        assert (embedding - model(x, coords)[0]).abs().max() < DOUBLE


def test_more_rows_than_a_pass_takes_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, coords) = make_model(), slides(1, 40)  # heads have 4 features
    rows = list(range(41))
    whole, rolled = (model.attention_maps(x, coords, rows, rollout=each) for each in (False, True))
    assert (rolled - over_tiles(rolled_out(dense(model, x, coords)))).abs().max() < DOUBLE
    monkeypatch.setattr("dilated_attention_pytorch.integrations.slide_maps._MAP_NUMEL", 1000)
    assert torch.equal(model.attention_maps(x, coords, rows), whole)


def test_rows_that_no_branch_selects_stay_zero() -> None:
    model, (x, coords) = make_model(segment_lengths=(70,), dilation_rates=(3,)), slides(1, 8)
    maps = model.attention_maps(x, coords, range(9))
    assert not maps.isnan().any()
    each = model.encoder.layers[0].self_attn.attention_rows(torch.zeros(1, 9, 12).double(), range(9))
    assert torch.equal(maps.sum(-1)[0, 0] > 0, each.mean(1)[0, :, 1:].sum(-1) > 0)


@pytest.mark.parametrize("global_pool", [False, True])
@pytest.mark.parametrize("rollout", [False, True])
def test_padding_gets_nothing_and_changes_nothing(global_pool: bool, rollout: bool) -> None:
    model, (x, coords) = make_model(global_pool=global_pool), slides(3, 30)
    padding = torch.zeros(3, 30, dtype=torch.bool)
    padding[1, 3:20], padding[2, :29] = True, True
    x[padding], coords[padding] = math.nan, -1
    how: dict[str, Any] = {"rollout": rollout, "relative": True}
    found, embedding = model.attention_maps(x, coords, padding_mask=padding, return_embedding=True, **how)
    assert not found.movedim(-1, 1)[padding].any()
    for row in range(3):
        kept = ~padding[row]
        alone = model.attention_maps(x[row : row + 1, kept], coords[row : row + 1, kept], **how)
        assert (found[row : row + 1][..., kept] - alone).abs().max() < DOUBLE
    assert (embedding - model(x, coords, padding_mask=padding)[0]).abs().max() < DOUBLE
    chosen = model.attention_maps(x, coords, [30, 0], padding_mask=padding, rollout=rollout)
    alone = model.attention_maps(x[1:2, ~padding[1]], coords[1:2, ~padding[1]], [13, 0], rollout=rollout)
    assert (chosen[1:2][..., ~padding[1]] - alone).abs().max() < DOUBLE
    with pytest.raises(ValueError, match=r"rows must be tiles of each slide, got \[5\], padding in slide 1"):
        model.attention_maps(x, coords, [0, 5], padding_mask=padding)


def test_low_precision_stays_close_and_nothing_requires_a_gradient() -> None:
    x, coords = slides(1, 90)
    state = make_model().state_dict()
    expected = make_model().attention_maps(x, coords, rollout=True)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        model = make_model(dtype=dtype)
        model.load_state_dict(state)
        maps = model.attention_maps(x, coords, rollout=True)
        assert maps.dtype == torch.float32
        assert not maps.requires_grad
        assert (maps - expected).abs().max() < limit * expected.max()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (model.attention_maps(x, coords, [0]) - model.attention_maps(x, coords)).abs().max() == 0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, r"rows must lie between 0 and n - 1 = 5, got 6", {"rows": [6]}),
        (ValueError, r"rows must be a non-empty list of integers, got \[\]", {"rows": []}),
        (ValueError, r"layers must be .* between -3 and 2, got \[3\]", {"layers": [3]}),
        (ValueError, r"layers must be a non-empty list of integers .*, got \[\]", {"layers": []}),
        (ValueError, r"layers must be a non-empty list of integers .*, got 1", {"layers": 1}),
        (TypeError, "rollout must be a bool", {"rollout": 1}),
        (TypeError, "relative must be a bool", {"relative": None}),
    ],
)
def test_bad_choices_state_rule_and_fact(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=message):
        make_model().attention_maps(*slides(1, 5), **call)


def test_sums_take_weights_of_the_rows() -> None:
    attention = make_model().encoder.layers[0].self_attn
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    for weights in (torch.ones(2, 9), torch.ones(2, 1, 8), torch.ones(1, 1, 9), [1.0]):
        with pytest.raises(ValueError, match=r"weights must have the shape \(b, r, n\)"):
            attention.attention_sums(x, weights)
    with pytest.raises(TypeError, match="residual must be a bool"):
        attention.attention_sums(x, torch.ones(2, 1, 9), residual=1)


def decode_png(path: Path) -> Tensor:
    """Pixels of what `write_png` writes, by another program."""
    return (torch.from_numpy(imread(path)) * 255).round().to(torch.uint8)


def test_heat_map_puts_each_tile_into_its_cell(tmp_path: Path) -> None:
    coords = torch.tensor([[512, 256], [512, 257], [1024, 768], [800, 256]])
    weights = torch.tensor([0.5, 0.1, 0.4, 0.0])
    image = heat_map(coords, weights, 256, pixels=1)
    assert image.dtype == torch.uint8
    assert image.shape == (3, 3, 3)  # cells (2, 1), (4, 3) and (3, 1)
    shown = [[0, 0], [0, 1], [2, 2]]
    white = (image == 255).all(-1)
    assert white.sum() == 6
    assert not any(white[y, x] for y, x in shown)
    assert image[0, 1].tolist() == [22, 26, 78]  # no weight
    brightness = image.double().sum(-1)
    assert brightness[2, 2] > brightness[0, 0] > brightness[0, 1]  # 0.4, the mean of 0.5 and 0.1, 0
    large = heat_map(coords, weights, 256, pixels=32)
    assert large.shape == (30, 30, 3)
    assert torch.equal(large[5::10, 5::10], image)
    even = heat_map(coords[[0, 2, 3]], torch.full((3,), 7.0), 256)
    assert len({tuple(each) for each in even[~(even == 255).all(-1)].tolist()}) == 1
    assert even[0, 0].tolist() == [116, 33, 129]  # the uniform share is a quarter of the last colour
    assert heat_map(coords, torch.zeros(4), 256).max() == 255
    write_png(tmp_path / "map.png", large)
    assert torch.equal(decode_png(tmp_path / "map.png"), large)
    image = heat_map(torch.randint(0, 5000, (60, 2)), torch.rand(60), 256.0, pixels=100)
    write_png(tmp_path / "map.png", image)
    assert torch.equal(decode_png(tmp_path / "map.png"), image)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (r"shapes \(n, 2\) and \(n,\), got \(3, 2\) and \(2,\)", (torch.ones(3, 2), torch.ones(2), 1)),
        (r"got \(0, 2\) and \(0,\)", (torch.ones(0, 2), torch.ones(0), 1)),
        ("finite and not negative, got -1.0 to 1.0", (torch.ones(2, 2), torch.tensor([1.0, -1.0]), 1)),
        ("finite and not negative, got nan", (torch.ones(1, 2), torch.tensor([math.nan]), 1)),
        ("tile_size must be positive and coords finite, got 0", (torch.ones(1, 2), torch.ones(1), 0)),
        ("at most 67108864 cells of tile_size", (torch.tensor([[0, 0], [10**6, 10**6]]), torch.ones(2), 1)),
    ],
)
def test_bad_pictures_state_rule_and_fact(message: str, call: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        heat_map(*call)
    with pytest.raises(ValueError, match=r"image must be uint8 .*, got torch.float32 \(2, 2\)"):
        write_png(tmp_path / "map.png", torch.ones(2, 2))
