"""Prov-GigaPath's slide encoder: its names, sizes and formulas, its file, and slides of different sizes."""

from __future__ import annotations

import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dilated_attention_pytorch.integrations.gigapath import (
    LongNetViT,
    LongNetViTConfig,
    gigapath_segment_lengths,
    load_gigapath_state,
)
from dilated_attention_pytorch.integrations.tile_grid import tile_cells
from integrations.transcription import (
    Settings,
    State,
    position_table,
    random_state,
    slide_encoder,
    slide_shapes,
)

TOLERANCE = 1e-9
GRID, TILE = 11, 10
SMALL = {"in_chans": 6, "embed_dim": 12, "depth": 2, "nhead": 3, "dim_feedforward": 20}
GRIDDED = {"slide_ngrids": GRID, "tile_size": TILE, "segment_lengths": (16, 70), "dilation_rates": (1, 3)}


def small_state() -> dict[str, Tensor]:
    return random_state(slide_shapes(6, 2, 12, 20))


def small_model(state: State | None = None, **options: Any) -> LongNetViT:
    model = LongNetViT(**{**SMALL, **GRIDDED, "dtype": torch.float64, **options}).eval()
    if state is not None:
        load_gigapath_state(model, state)
    return model


def slides(b: int, n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(b, n, 6, dtype=torch.float64), torch.randint(0, GRID * TILE, (b, n, 2))


def how(**options: Any) -> Settings:
    return Settings(**{"heads": 3, "segments": (16, 70), "rates": (1, 3), **options})


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() < TOLERANCE


def transcribed(state: State, x: Tensor, coords: Tensor, settings: Settings, **options: Any) -> list[Tensor]:
    return slide_encoder(state, x, coords, settings, grid=GRID, tile_size=TILE, **options)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 69, 70, 211])
@pytest.mark.parametrize("global_pool", [False, True])
@pytest.mark.parametrize("all_layers", [False, True])
def test_embeddings_equal_the_transcription(n: int, global_pool: bool, all_layers: bool) -> None:
    state, (x, coords) = small_state(), slides(2, n)
    found = small_model(state, global_pool=global_pool)(x, coords, all_layer_embed=all_layers)
    expected = transcribed(state, x, coords, how(), global_pool=global_pool, all_layers=all_layers)
    assert [each.shape for each in found] == [(2, 12)] * (3 if all_layers else 1)
    assert_close(found, expected)


@pytest.mark.parametrize(("n", "nhead"), [(999, 12), (5000, 3)])  # heads that are no multiple of the rates
def test_long_slides_equal_the_transcription(n: int, nhead: int) -> None:
    state, (x, coords) = small_state(), slides(1, n)
    segments, rates = (128, 333, 1250), (1, 5, 16)
    found = small_model(state, nhead=nhead, segment_lengths=segments, dilation_rates=rates)(x, coords)
    assert_close(found, transcribed(state, x, coords, how(heads=nhead, segments=segments, rates=rates)))


@pytest.mark.parametrize("detach_mixing", [False, True])
def test_gradients_equal_those_of_the_transcription(detach_mixing: bool) -> None:
    state, (x, coords) = small_state(), slides(2, 111)
    model = small_model(state, detach_mixing=detach_mixing)
    assert model.config.attention_options["tail"] == "phantom"
    x.requires_grad_()
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in state.items()}
    ours = dict(model.named_parameters())
    [found] = model(x, coords)
    [expected] = transcribed(leaves, x, coords, how(detach_mixing=detach_mixing))
    weight = torch.randn_like(expected)
    got = torch.autograd.grad((found * weight).sum(), [x, *(ours[name] for name in leaves)])
    wanted = torch.autograd.grad((expected * weight).sum(), [x, *leaves.values()])
    for name, a, b in zip(["x", *leaves], got, wanted, strict=True):
        assert (a - b).abs().max() < TOLERANCE * max(1.0, b.abs().max().item()), name


def test_the_states_of_all_tiles_are_there_for_the_asking() -> None:
    state, (x, coords) = small_state(), slides(2, 23)
    model = small_model(state)
    states = model.forward_features(x, coords, all_layer_embed=True)
    assert [each.shape for each in states] == [(2, 24, 12)] * 3
    table, cell = position_table(12, GRID, torch.float64), coords // TILE
    tiles = nn.functional.linear(x, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"])
    assert_close([states[0][:, 1:]], [tiles + table[1 + cell[..., 0] * GRID + cell[..., 1]]])
    [last] = model.forward_features(x, coords)
    assert torch.equal(model.norm(last[:, 0]), model(x, coords)[0])


@pytest.mark.parametrize("global_pool", [False, True])
@pytest.mark.parametrize("place", ["right", "left", "anywhere"])
def test_padding_changes_nothing_in_any_row(global_pool: bool, place: str) -> None:
    """Rows differ in how segments clamp and tails fill, so each must be what it is alone."""
    model = small_model(small_state(), global_pool=global_pool)
    x, coords = slides(4, 90)
    counts = [90, 13, 71, 13]
    padding = torch.arange(90) >= torch.tensor(counts)[:, None]
    if place == "left":
        padding = padding.flip(1)
    if place == "anywhere":
        padding = torch.stack([row[torch.randperm(90)] for row in padding])
    x[padding], coords[padding] = math.nan, -7
    x.requires_grad_()
    found = model(x, coords, True, padding)
    assert [each.shape for each in found] == [(4, 12)] * 3
    for row in range(4):
        kept = ~padding[row]
        alone = model(x[row : row + 1, kept], coords[row : row + 1, kept], True)
        assert_close([each[row : row + 1] for each in found], alone)
    [gradient] = torch.autograd.grad(sum(each.square().sum() for each in found), x)
    assert not gradient[padding].any()
    assert gradient[~padding].any()
    alone = model(x[2:3, ~padding[2]], coords[2:3, ~padding[2]], True)
    [wanted] = torch.autograd.grad(sum(each.square().sum() for each in alone), x)
    assert (gradient[2] - wanted[2]).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", ["improved", "ring"])
def test_other_kinds_of_attention_take_the_same_weights(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state, (x, coords) = small_state(), slides(2, 90)
    model = small_model(state, kind=kind)
    assert_close(model(x, coords), transcribed(state, x, coords, how()))
    attention = model.encoder.layers[0].get_submodule("self_attn.attention")
    monkeypatch.setattr(type(attention), "is_sharded", True)
    with pytest.raises(ValueError, match="each process must have whole slides"):
        model(x, coords)


def test_names_shapes_and_count_are_those_of_the_published_models() -> None:
    model = LongNetViT(device="meta")
    assert model.config.segment_lengths == (1024, 5792, 32768, 185363, 1048576)
    assert model.config.dilation_rates == (1, 2, 4, 8, 16)
    assert model.norm.eps == 1e-6
    spec = model.encoder.layers[0].get_submodule("self_attn.attention").spec
    assert (spec.head_offsets, spec.tail, spec.detach_mixing) == ("blocked", "phantom", False)
    for made, channels, depth, width, count in (
        (model, 1536, 12, 768, 86_330_880),
        ("gigapath_slide_enc12l768d", 1536, 12, 768, 86_330_880),
        ("gigapath_slide_enc12l384d", 384, 12, 384, 21_489_408),
        ("gigapath_slide_enc24l1024d", 1536, 24, 1024, None),
        ("gigapath_slide_enc12l1536d", 1536, 12, 1536, None),
    ):
        if isinstance(made, str):
            made = LongNetViT.from_arch(made, device="meta", global_pool=True)
            assert made.config.global_pool
        shapes = {name: tuple(x.shape) for name, x in made.state_dict().items()}
        assert shapes == slide_shapes(channels, depth, width, 4 * width)
        assert made.config.nhead == 16
        assert count in (None, sum(parameter.numel() for parameter in made.parameters()))
    with pytest.raises(ValueError, match=r"arch must be one of .*enc12l384d.*, got 'vit'"):
        LongNetViT.from_arch("vit")


def test_weights_must_be_of_the_architecture_that_is_asked_for(tmp_path: Path) -> None:
    arch = "gigapath_slide_enc12l384d"
    model = LongNetViT.from_arch(arch, dtype=torch.bfloat16).eval()
    path = published(tmp_path, model.state_dict())
    model.save_pretrained(tmp_path / "saved")
    x, coords = torch.randn(1, 5, 384), torch.randint(0, 256000, (1, 5, 2))
    for source in (path, tmp_path / "saved"):
        assert torch.equal(LongNetViT.from_pretrained(source, arch=arch)(x, coords)[0], model(x, coords)[0])
        with pytest.raises(ValueError, match=r"sizes of \w+768d, .*got {'in_chans': 384, 'embed_dim': 384}"):
            LongNetViT.from_pretrained(source, arch="gigapath_slide_enc12l768d")
    with pytest.raises(ValueError, match=r"got {'nhead': 12}"):
        LongNetViT.from_pretrained(path, arch=arch, nhead=12)
    with pytest.raises(ValueError, match="arch must be one of"):
        LongNetViT.from_pretrained(path, arch="vit")


@pytest.mark.parametrize(
    ("size", "tile", "expected"),
    [
        (262144, 256, (1024, 5792, 32768, 185363, 1048576)),
        (65536, 256, (1024, 2896, 8192, 23170, 65536)),
        (100000, 256, (1024, 3444, 11585, 38967, 131072)),  # 390 ** 2 tiles are more than 2 ** 17
        (1024, 256, (1024, 362, 128, 45, 16)),
        (256, 256, (1024, 181, 32, 5, 1)),
    ],
)
def test_segment_lengths_follow_the_size_of_the_slide(size: int, tile: int, expected: Any) -> None:
    assert gigapath_segment_lengths(size, tile) == expected
    if size > tile:
        assert LongNetViT(**SMALL, max_wsi_size=size, tile_size=tile).config.segment_lengths == expected


def test_positions_are_those_of_a_table_of_all_cells() -> None:
    state = {name: torch.zeros_like(tensor) for name, tensor in small_state().items()}
    model = small_model(state)
    rows, columns = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    coords = torch.stack([rows, columns], -1).view(1, -1, 2) * TILE
    offset = torch.rand(coords.shape, dtype=torch.float64) * (TILE - 1e-6)
    table = position_table(12, GRID, torch.float64)
    for places in (coords, coords + TILE - 1, coords + offset, (coords + offset).float()):
        [states, *_] = model.forward_features(torch.zeros(1, GRID * GRID, 6), places, all_layer_embed=True)
        assert (states[0] - table).abs().max() < 1e-14


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32])
def test_narrow_coordinates_have_the_cells_of_wide_ones(dtype: torch.dtype) -> None:
    coords = torch.tensor([[0, 127], [99, 100], [101, 1]])
    for tile_size in (10, 256, 1000):
        cells = tile_cells(coords.to(dtype), tile_size, 300)
        assert cells.dtype == torch.int64
        assert torch.equal(cells, coords // tile_size)
    with pytest.raises(ValueError, match=r"got a tile at \[0, 127\]"):
        tile_cells(coords.to(dtype), 1, 101)


@pytest.mark.parametrize(
    ("place", "shown"),
    [([110, 0], "110, 0"), ([0, 110], "0, 110"), ([-1, 5], "-1, 5"), ([5.0, math.nan], "5.0, nan")],
)
def test_a_tile_outside_the_grid_is_refused(place: list[float], shown: str) -> None:
    x, coords = slides(2, 5)
    coords = coords.double() if any(isinstance(each, float) for each in place) else coords
    coords[1, 3] = torch.tensor(place)
    with pytest.raises(ValueError, match=rf"below .* 11 x 10 = 110, got a tile at \[{re.escape(shown)}\]"):
        small_model()(x, coords)


X, COORDS = slides(2, 5)
PADDING = torch.zeros(2, 5, dtype=torch.bool)
EMPTY = torch.tensor([[False], [True]]).expand(2, 5)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "x must be a tensor, got list", ([], COORDS)),
        (TypeError, "coords must be a tensor, got NoneType", (X, None)),
        (TypeError, "x must be a floating-point tensor, got torch.int64", (X.long(), COORDS)),
        (ValueError, r"in_chans 6 .*, got \(2, 5, 5\)", (X[..., :5], COORDS)),
        (ValueError, r"at least one tile, got \(2, 0, 6\)", (X[:, :0], COORDS[:, :0])),
        (ValueError, r"coords must have the shape \(b, n, 2\)", (X, COORDS[:, :4])),
        (TypeError, "coords must be integers, float32 or float64, got torch.float16", (X, COORDS.half())),
        (TypeError, "coords must be integers, float32 or float64, got torch.bool", (X, COORDS.bool())),
        (ValueError, "coords must be on the device of x, cpu, got meta", (X, COORDS.to("meta"))),
        (ValueError, "padding_mask must be on the device of x", (X, COORDS, False, PADDING.to("meta"))),
        (ValueError, "x must be on the device of the weights", (X.to("meta"), COORDS.to("meta"), False)),
        (TypeError, "all_layer_embed must be a bool", (X, COORDS, 1)),
        (TypeError, "padding_mask must be a bool tensor.*torch.int64", (X, COORDS, False, PADDING.long())),
        (ValueError, r"padding_mask must have the shape \(b, n\)", (X, COORDS, False, PADDING[:1])),
        (ValueError, r"at least one tile, got \[5, 0\]", (X, COORDS, False, EMPTY)),
    ],
)
def test_bad_input_states_rule_and_fact(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=message):
        small_model()(*call)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 6}, "embed_dim must be a multiple of 4, .* got 6"),
        ({"nhead": 5}, "must be a multiple of nhead"),
        ({"segment_lengths": None, "max_wsi_size": 5}, "max_wsi_size must be at least tile_size 10"),
        ({"segment_lengths": None, "max_wsi_size": -5}, "max_wsi_size must be a positive integer, got -5"),
        ({"d_model": 12}, r"by other names, got \['d_model'\]"),
        ({"attention_options": None}, "attention_options must be a mapping, got None"),
        ({"attention_options": None, "kernel": "eager"}, "attention_options must be a mapping, got None"),
        ({"windows": 3}, "windows"),
        ({"max_wsi_size": 500}, "max_wsi_size gives segment_lengths, got both, 500 and segment_lengths="),
        ({"segment_lengths": None}, "must have the same length, got 5 and 2"),
        (
            {"segment_lengths": None, "dilation_rates": None, "tile_size": 256, "max_wsi_size": 256},
            "got rate 8 for a segment of 5",
        ),
    ],
)
def test_settings_that_do_not_fit_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        LongNetViT(**{**SMALL, **GRIDDED, **options})


def published(folder: Path, state: State, name: str = "slide_encoder.pth") -> Path:
    """A file as Prov-GigaPath publishes it."""
    torch.save({"model": dict(state)}, folder / name)
    return folder / name


def test_the_published_file_loads_by_file_and_by_folder(tmp_path: Path) -> None:
    state, (x, coords) = small_state(), slides(2, 50)
    path = published(tmp_path, state)
    (tmp_path / "config.json").write_text('{"architecture": "that of the tile encoder beside it"}')
    [expected] = small_model(state, global_pool=True)(x, coords)
    for source in (path, str(tmp_path)):
        model = LongNetViT.from_pretrained(source, nhead=3, global_pool=True, **GRIDDED)
        assert not model.training
        assert model.config.dim_feedforward == 20
        assert torch.equal(model(x, coords)[0], expected)
    single = LongNetViT.from_pretrained(path, nhead=3, dtype=torch.float32, **GRIDDED)
    assert {parameter.dtype for parameter in single.parameters()} == {torch.float32}


def test_a_saved_model_comes_back_with_its_settings(tmp_path: Path) -> None:
    x, coords = slides(2, 50)
    exact = small_model(tail="exact", kind="improved")  # a model may attend otherwise than the published one
    exact.save_pretrained(tmp_path / "exact")
    assert_close(LongNetViT.from_pretrained(tmp_path / "exact")(x, coords), exact(x, coords))
    model = small_model(small_state(), global_pool=True, detach_mixing=True, kernel="eager")
    model.save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "model.safetensors"):
        again = LongNetViT.from_pretrained(source)
        assert again.config == model.config
        assert torch.equal(again(x, coords)[0], model(x, coords)[0])
    other = LongNetViT.from_pretrained(tmp_path, global_pool=False, checkpoint_activations=True)
    assert other.config.checkpoint_activations
    assert other.config.attention_options == model.config.attention_options
    assert torch.equal(other(x, coords)[0], small_model(model.state_dict(), kernel="eager")(x, coords)[0])
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["model"] == "LongNetViT"
    assert settings["segment_lengths"] == [16, 70]
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"got no \S+config\.json"):
        LongNetViT.from_pretrained(tmp_path)
    told = {"nhead": 3, "global_pool": True, "kernel": "eager", **GRIDDED}
    bare = LongNetViT.from_pretrained(tmp_path / "model.safetensors", **told)
    assert torch.equal(bare(x, coords)[0], model(x, coords)[0])


def test_a_file_that_does_not_fit_is_refused_with_the_fact(tmp_path: Path) -> None:
    state, lost = small_state(), FileNotFoundError
    path = published(tmp_path, state)
    small_model(state).save_pretrained(tmp_path / "saved")
    (tmp_path / "empty").mkdir()
    short = published(tmp_path, {name: x for name, x in state.items() if name != "norm.bias"}, "short.pth")
    other = published(tmp_path, {"norm.bias": torch.zeros(2)}, "other.pth")
    meta = "device must be one with memory to load weights, got meta"
    for source, options, error, message in (
        (path, {"embed_dim": 24}, ValueError, r"cls_token must be \(1, 1, 24\), got \(1, 1, 12\)"),
        (path, {"depth": 1}, ValueError, r"encoder\.layers\.1\.\S+ is unexpected"),
        (path, {"device": "meta"}, ValueError, meta),
        (tmp_path / "saved", {"device": "meta"}, ValueError, meta),
        (short, {}, ValueError, r"norm\.bias is missing"),
        (other, {}, ValueError, r"slide encoder with a matrix patch_embed\.proj\.weight, got none"),
        (tmp_path / "absent.pth", {}, lost, r"or slide_encoder\.pth, got no file \S+absent\.pth"),
        (tmp_path / "empty", {}, lost, r"got no file \S+empty/slide_encoder\.pth"),
    ):
        with pytest.raises(error, match=message):
            LongNetViT.from_pretrained(source, nhead=3, **options)


class Hostile:
    """What runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('ran')",)


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    path = tmp_path / "slide_encoder.pth"
    torch.save({"model": small_state(), "args": Hostile()}, path)
    random = torch.randint(256, (200,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    noise, plain = bytes(random.tolist()), path.read_bytes()
    texts = (b"", b"hello, world\n", b"import torch\n", b"<html>\n<body>404</body>")
    pickles = (b"\x80\x02h\x88", b"\x80\x02M\x00", b"\x80\x02b", b"\x80\x02}]]s")
    for content in (plain, pickle.dumps(Hostile(), 2), *texts, *pickles, noise, b"\x80\x02" + noise):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="tensors and plain data only"):
            LongNetViT.from_pretrained(path)
    for held, got in (([1], "a list"), ({"epoch": 3}, "'epoch': a int"), ({}, "{}")):
        torch.save(held, path)
        with pytest.raises(ValueError, match=f"must be a state dict, or hold one .*got {re.escape(got)}"):
            LongNetViT.from_pretrained(path)


def test_loading_into_a_model_reports_names(tmp_path: Path) -> None:
    state = small_state()
    held = {f"slide_encoder.{name}": tensor for name, tensor in state.items()}
    held |= {"slide_encoder.pos_embed": torch.zeros(1, 3, 12), "classifier.0.weight": torch.zeros(2, 12)}
    model = small_model()
    report = load_gigapath_state(model, {"model": held, "epoch": 3}, prefix="slide_encoder.")
    assert report.missing == report.unexpected == ()
    assert report.dropped == ("pos_embed",)
    assert report.outside == ("classifier.0.weight",)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())

    short = {name: tensor for name, tensor in state.items() if name != "cls_token"}
    with pytest.raises(ValueError, match="cls_token is missing; odd is unexpected"):
        load_gigapath_state(model, {**short, "odd": torch.zeros(1)})
    report = load_gigapath_state(model, {**short, "odd": torch.zeros(1)}, strict=False)
    assert (report.missing, report.unexpected) == (("cls_token",), ("odd",))
    with pytest.raises(ValueError, match=r"cls_token must be \(1, 1, 12\), got \(12,\)"):
        load_gigapath_state(model, {**state, "cls_token": torch.zeros(12)}, strict=False)
    with pytest.raises(TypeError, match="model must be a LongNetViT, got Linear"):
        load_gigapath_state(nn.Linear(1, 1), state)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state must be a state dict, or hold one"):
        load_gigapath_state(model, {"epoch": 3})


@pytest.mark.parametrize("kind", ["standard", "improved"])
def test_a_file_and_a_state_dict_are_read_alike(tmp_path: Path, kind: str) -> None:
    state = small_state()
    held = {f"module.{name}": tensor for name, tensor in state.items()}
    held |= {"module.pos_embed": torch.zeros(1, 3, 12), "module.encoder.version": torch.ones(1)}
    copied = small_model(kind=kind)
    assert load_gigapath_state(copied, held).dropped == ("pos_embed", "encoder.version")
    path = published(tmp_path, held)
    read = LongNetViT.from_pretrained(path, nhead=3, kind=kind, **GRIDDED)
    assert read.state_dict().keys() == copied.state_dict().keys()
    assert all(torch.equal(x, copied.state_dict()[name]) for name, x in read.state_dict().items())
    for wrong, options, message in (
        ({}, {"tail": "exact"}, r"need .*tail='phantom', got tail='exact'"),
        ({"encoder.layers.0.moe_layer.gate.wg.weight": torch.zeros(1)}, {}, "mixture of experts"),
        ({"odd": torch.zeros(1)}, {}, "odd is unexpected$"),
        ({"norm.bias": torch.zeros(12)}, {}, r"got norm\.bias twice$"),
    ):
        path = published(tmp_path, {**held, **wrong})
        with pytest.raises(ValueError, match=message):
            LongNetViT.from_pretrained(path, nhead=3, kind=kind, **{**GRIDDED, **options})
        with pytest.raises(ValueError, match=message):
            load_gigapath_state(small_model(kind=kind, **options), {**held, **wrong})


def test_training_drops_and_evaluation_does_not() -> None:
    model, (x, coords) = small_model(small_state(), dropout=0.5, drop_path_rate=0.0), slides(1, 20)
    assert torch.equal(model(x, coords)[0], model(x, coords)[0])
    model.train()
    [states, *_] = model.forward_features(x, coords, all_layer_embed=True)
    dropped = (states == 0).double().mean().item()  # of the input of the first layer
    assert 0.3 < dropped < 0.7
    model(x, coords)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_half_precision_and_autocast_stay_close() -> None:
    state, (x, coords) = small_state(), slides(2, 90)
    [expected] = small_model(state)(x, coords)
    single = small_model(state, dtype=torch.float32)
    assert (single(x.half(), coords)[0] - expected).abs().max() < 0.02  # tile encoders give half precision
    with torch.autocast("cpu", dtype=torch.bfloat16):
        [found] = single(x.float(), coords)
    assert (found - expected).abs().max() < 0.1
    half = small_model(state, dtype=torch.bfloat16)
    assert half(x, coords)[0].dtype == torch.bfloat16
    assert (half(x, coords)[0] - expected).abs().max() < 0.2


def test_a_model_without_memory_gets_it_and_is_initialised() -> None:
    with torch.device("meta"):
        model = LongNetViT(**SMALL, **GRIDDED)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, math.nan)
    model.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    x, coords = slides(1, 9)
    assert model.eval()(x, coords)[0].isfinite().all()
    assert 0.005 < model.cls_token.std() < 0.05


def test_config_is_that_of_a_slide_encoder() -> None:
    model = small_model()
    assert LongNetViTConfig.from_json(model.config.to_json()) == model.config
    assert LongNetViT.from_config(model.config).config == model.config
    with pytest.raises(ValueError, match=r"got \['windows'\]"):
        LongNetViTConfig.from_dict({**model.config.to_dict(), "windows": 3})
    with pytest.raises(TypeError, match="must be a LongNetViTConfig, got dict"):
        LongNetViT.from_config({})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="global_pool must be a bool"):
        LongNetViTConfig(global_pool=1)  # type: ignore[arg-type]


def test_the_full_model_loads_a_file_that_it_saved(tmp_path: Path) -> None:
    model = LongNetViT(dtype=torch.bfloat16).eval()
    published(tmp_path, model.state_dict())
    again = LongNetViT.from_pretrained(tmp_path)
    assert sum(parameter.numel() for parameter in again.parameters()) == 86_330_880
    assert again.config == model.config
    x, coords = torch.randn(1, 5, 1536), torch.randint(0, 256000, (1, 5, 2))
    assert torch.equal(again(x, coords)[0], model(x, coords)[0])
