"""Files of slides as TRIDENT, CLAM and STAMP lay them out, and the adapters of docs/gigapath.md."""

from __future__ import annotations

import json
import re
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from torch import Tensor, nn

from dilated_attention_pytorch import LongNetViT
from dilated_attention_pytorch.integrations.slides import read_slide, write_embedding
from dilated_attention_pytorch.integrations.tile_grid import gigapath_segment_lengths, grid_coords
from support.programs import ROOT

N, WIDTH = 23, 6


def arrays(side: int = 512) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    features = generator.standard_normal((N, WIDTH)).astype(np.float32)
    return features, (generator.integers(0, 90, (N, 2)) * side).astype(np.int64)


def trident_file(path: Path, side: int = 512) -> Path:
    """As TRIDENT's `save_h5` and `coords_to_h5` do: growing datasets, attributes at each of them."""
    features, coords = arrays(side)
    told = {"patch_size": 256, "patch_size_level0": side, "level0_magnification": 40, "name": path.stem}
    with h5py.File(path, "w") as file:
        for name, data in (("features", features), ("coords", coords)):
            grows = {"maxshape": (None, *data.shape[1:]), "chunks": (1, *data.shape[1:])}
            file.create_dataset(name, data=data, **grows)
        file["features"].attrs.update({"name": path.stem, "encoder": "gigapath", "extra": json.dumps({})})
        file["coords"].attrs.update({**told, "overlap": 0, "target_magnification": 20})
    return path


def stamp_file(path: Path) -> Path:
    """As `stamp preprocess` does: `feats`, and coordinates in micrometres, which are rounded."""
    features, coords = arrays(256)
    with h5py.File(path, "w") as file:
        file["feats"] = features.astype(np.float16)
        file["coords"] = (coords / 256 * 255.99997).astype(np.float32)
        file.attrs.update({"extractor": "gigapath", "unit": "um", "tile_size_um": 256.0, "tile_size_px": 224})
    return path


@pytest.mark.parametrize(
    "kind", ["trident", "stamp", "clam", "clam patches", "batched", ".pt", ".npz", ".NPZ", ".zarr"]
)
def test_layouts_of_the_field_are_read(tmp_path: Path, kind: str) -> None:
    features, coords = arrays()
    path = tmp_path / f"slide.1{kind if kind[0] == '.' else '.h5'}"
    side: float | None = 512.0
    if kind == "trident":
        trident_file(path)
    elif kind == "stamp":
        stamp_file(path)
        side = 256.0
    elif kind == ".zarr":
        zarr.save_group(str(path), features=features, coords=coords)
        zarr.open_group(str(path), mode="r+")["coords"].attrs["patch_size_level0"] = 512
    elif kind in (".npz", ".NPZ"):
        with path.open("wb") as file:
            np.savez(file, features=features, coords=coords, patch_size_level0=512)
    elif kind == ".pt":
        held = {"tile_embeds": torch.from_numpy(features), "coords": torch.from_numpy(coords)}
        torch.save({**held, "patch_size_level0": 512}, path)
    else:
        front = (None,) if kind == "batched" else ()
        with h5py.File(path, "w") as file:
            file["features"], file["coords"] = features[front], coords[front].astype(np.int32)
            if kind == "clam patches":
                file["coords"].attrs.update({"patch_size": 256, "patch_level": 1, "downsample": (2.0, 2.0)})
        side = 512.0 if kind == "clam patches" else None
    slide = read_slide(path)
    assert slide.name == "slide.1"
    assert slide.tile_size == side
    assert (slide.features - torch.from_numpy(features)).abs().max() < 2e-3
    assert slide.features.dtype == (torch.float16 if kind == "stamp" else torch.float32)
    assert torch.equal(grid_coords(slide.coords, side or 512), torch.from_numpy(coords) // 512 * 256)


def test_coordinates_keep_their_cells() -> None:
    coords = torch.tensor([[0, 511], [512, 1023], [51199, 51200]])
    assert torch.equal(grid_coords(coords, 512, 10) // 10, coords // 512)
    assert torch.equal(grid_coords(coords.int(), 512, 10), grid_coords(coords, 512, 10))
    assert grid_coords(torch.tensor([[255.9999, 255.0]]), 256).tolist() == [[256, 0]]
    for size in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="tile_size must be positive, got"):
            grid_coords(coords, size)


FEATURES, COORDS = (torch.from_numpy(each) for each in arrays())
NAN = FEATURES.clone()
NAN[7, 3] = float("nan")


TILES = {"features": FEATURES, "coords": COORDS}


@pytest.mark.parametrize(
    ("message", "held"),
    [
        ("named features or feats or tile_embeds, got coords, x", {"x": 1, "coords": COORDS}),
        (r"must hold coords, .* got features; CLAM's \.pt files lack them", {"features": FEATURES}),
        (r"must hold coords, .* got features; CLAM's \.pt files lack them", FEATURES),
        ("must hold features, .* got nothing", [1]),
        (r"\(n, d\) and \(n, 2\), got \(23, 6\) and \(22, 2\)", {**TILES, "coords": COORDS[1:]}),
        (r"\(n, d\) and \(n, 2\), got \(23,\) and", {**TILES, "features": FEATURES[:, 0]}),
        (r"one tile, got features \(0, 6\)", {"features": FEATURES[:0], "coords": COORDS[:0]}),
        ("must be floating point, got torch.int64", {**TILES, "features": COORDS}),
        (r"features of \S+ must be finite, got NaN or infinity in tile 7", {**TILES, "features": NAN}),
        (r"coords of \S+ must be finite", {**TILES, "coords": COORDS / 0}),
        ("must be arrays of numbers, got 'no'", {**TILES, "features": "no"}),
    ],
)
def test_what_does_not_fit_is_said(tmp_path: Path, message: str, held: Any) -> None:
    torch.save(held, tmp_path / "slide.pt")
    with pytest.raises(ValueError, match=message):
        read_slide(tmp_path / "slide.pt")


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('ran')",)


def test_other_files_are_refused_and_no_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({**TILES, "more": Hostile()}, tmp_path / "a.pt")
    np.savez(tmp_path / "a.npz", features=np.array([Hostile()], dtype=object), coords=COORDS)
    for name in ("b.pt", "b.npz", "b.h5"):
        (tmp_path / name).write_bytes(b"<html>404</html>")
    for number, held in enumerate((b"\x80\x02h\x88", b"\x80\x02M\x00", b"\x80\x02b", b"\x80\x02}]]s")):
        (tmp_path / f"{number}.pt").write_bytes(held)  # what torch.load takes for instructions
    np.savez(tmp_path / "c.npz", features=FEATURES, coords=COORDS)
    (tmp_path / "c.npz").write_bytes((tmp_path / "c.npz").read_bytes()[:-30])  # a download that broke off
    others = ("a.pt", "a.npz", "b.pt", "b.npz", "c.npz", *(f"{number}.pt" for number in range(4)))
    (tmp_path / "b.zarr").mkdir()
    for name, message in (
        *((name, "must hold tensors and plain data only") for name in others),
        ("b.h5", "must be an HDF5 file"),
        ("b.zarr", "must be a zarr group"),
        ("slide.svs", r"must be a file of tile features, \.h5, \.hdf5, \.pt"),
    ):
        with pytest.raises(ValueError, match=message):
            read_slide(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"there is no \S+none\.h5"):
        read_slide(tmp_path / "none.h5")
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file.create_group("features")
        file["coords"] = COORDS.numpy()
    with pytest.raises(ValueError, match=r"must be \(n, d\) and \(n, 2\), got \(0,\)"):
        read_slide(tmp_path / "c.h5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ModuleNotFoundError, match="pip install h5py"):
        read_slide(tmp_path / "c.h5")


@pytest.mark.parametrize("suffix", [".h5", ".pt", ".npz", ".PT", ".NPZ"])
def test_an_embedding_comes_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"
    write_embedding(path, {"features": FEATURES[0], "coords": COORDS}, {"tile_size": 512.0, "weights": "w"})
    if suffix == ".h5":
        with h5py.File(path) as file:
            held: Any = {**{name: file[name][:] for name in file}, **file.attrs}
    else:
        held = torch.load(path, weights_only=True) if suffix.lower() == ".pt" else dict(np.load(path))
    assert (held["tile_size"], str(held["weights"])) == (512.0, "w")
    assert torch.equal(torch.as_tensor(held["features"]), FEATURES[0])
    assert torch.equal(torch.as_tensor(held["coords"]), COORDS)
    with pytest.raises(ValueError, match=r"must be written as \.h5, \.pt or \.npz, got \S+\.csv"):
        write_embedding(tmp_path / "out.csv", {}, {})


# Stand-ins for what the adapters of the page are written against: the calls and names of those packages.


class TridentBaseSlideEncoder(nn.Module):
    """trident.slide_encoder_models.load.BaseSlideEncoder: builds, freezes, and has the model's precision."""

    def __init__(self, freeze: bool = True, **build_kwargs: Any) -> None:
        super().__init__()
        self.enc_name = None
        self.model, self.precision, self.embedding_dim = self._build(**build_kwargs)
        if freeze:
            self.model.requires_grad_(False).eval()

    def _build(self, **build_kwargs: Any) -> Any:
        raise NotImplementedError


def trident_extract(path: Path, slide_encoder: Any, device: str) -> np.ndarray:
    """What `WSI.extract_slide_features` does with a file of patch features."""
    with h5py.File(path) as file:
        coords, features, told = file["coords"][:], file["features"][:], dict(file["coords"].attrs)
    batch = {"features": torch.from_numpy(features).float()[None], "coords": torch.from_numpy(coords)[None]}
    with torch.inference_mode(), torch.autocast(device, enabled=slide_encoder.precision != torch.float32):
        found = slide_encoder({**batch, "attributes": told}, device)
    return found.float().cpu().numpy().squeeze()


class StampEncoder(ABC):
    """stamp.encoding.encoder.Encoder: reads what `stamp preprocess` wrote, and saves an embedding a slide."""

    def __init__(self, model: Any, identifier: str, precision: Any, required_extractor: list[str]) -> None:
        self.model, self.identifier, self.precision = model, identifier, precision
        self.required_extractor = required_extractor

    @abstractmethod
    def _generate_slide_embedding(self, feats: Tensor, device: Any, **kwargs: Any) -> np.ndarray: ...

    @abstractmethod
    def _generate_patient_embedding(self, feats_list: list[Any], device: Any, **options: Any) -> Any: ...

    def encode_slides(self, output_dir: Path, feat_dir: Path, device: str, generate_hash: bool) -> None:
        self.model.to(device).eval()
        with h5py.File(output_dir / f"{self.identifier}-slide-.h5", "w") as out:
            for path in sorted(feat_dir.glob("*.h5")):
                with h5py.File(path) as file:
                    assert file.attrs["extractor"] in self.required_extractor
                    feats = torch.tensor(file["feats"][:], dtype=self.precision)
                    told = {"coords_um": file["coords"][:], "tile_size_um": file.attrs["tile_size_um"]}
                    coords = SimpleNamespace(**told)
                out[path.stem] = self._generate_slide_embedding(feats, device, coords=coords)


class Bounds(dict[str, np.ndarray]):
    """Of a GeoDataFrame: a table with columns by name."""

    def __getitem__(self, names: Any) -> Any:
        return Bounds({name: self.get(name) for name in names})

    def to_numpy(self) -> np.ndarray:
        return np.stack(list(self.values()), 1)


def install(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    for dotted, names in modules.items():
        parts = dotted.split("__")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[".".join(parts)]).update(names)


def adapter(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **names: Any) -> dict[str, Any]:
    """Runs the block of the page for a tool beside the weights that it names; what it defines."""
    page = (ROOT / "docs" / "gigapath.md").read_text()
    block = re.search(rf"^\*\*{tool}\*\*.*?^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert block is not None
    torch.manual_seed(0)
    torch.save({"model": LongNetViT(WIDTH, 32, 12).state_dict()}, tmp_path / "slide_encoder.pth")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "adapter", **names}
    exec(compile(block[1], "gigapath.md", "exec"), namespace)
    return namespace


def own(tmp_path: Path, side: int, **options: Any) -> tuple[LongNetViT, Tensor, Tensor]:
    """The encoder for tiles of a side, as Prov-GigaPath's code divides by it, and its input."""
    options["segment_lengths"] = gigapath_segment_lengths()
    model = LongNetViT.from_pretrained(tmp_path / "slide_encoder.pth", tile_size=side, **options)
    features, coords = arrays(side)
    return model, torch.from_numpy(features)[None], torch.from_numpy(coords)[None]


def test_the_adapter_for_trident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, trident__slide_encoder_models__load={"BaseSlideEncoder": TridentBaseSlideEncoder})
    encoder = adapter("TRIDENT", tmp_path, monkeypatch)["encoder"]
    found = trident_extract(trident_file(tmp_path / "slide.h5"), encoder, "cpu")
    model, *x = own(tmp_path, 512, global_pool=True)
    with torch.inference_mode():
        expected = model(*x, all_layer_embed=True)[11][0]
    assert found.shape == (encoder.embedding_dim,) == (32,)
    assert np.abs(found - expected.numpy()).max() < 1e-5


def test_the_adapter_for_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        monkeypatch,
        stamp__encoding__encoder={"Encoder": StampEncoder},
        stamp__encoding__config={"EncoderName": SimpleNamespace(GIGAPATH="gigapath")},
        stamp__preprocessing__config={"ExtractorName": SimpleNamespace(GIGAPATH="gigapath")},
    )
    encoder = adapter("STAMP", tmp_path, monkeypatch)["encoder"]
    (tmp_path / "feats").mkdir()
    stamp_file(tmp_path / "feats" / "slide.h5")
    encoder.encode_slides(tmp_path, tmp_path / "feats", "cpu", generate_hash=False)
    model, x, coords = own(tmp_path, 256)
    with torch.inference_mode():
        [expected] = model(x.half(), coords)
    with h5py.File(tmp_path / "gigapath-slide-.h5") as file:
        assert np.abs(file["slide"][:] - expected[0].numpy()).max() < 1e-4
    with pytest.raises(NotImplementedError, match="embeds slides"):
        encoder._generate_patient_embedding([], "cpu")


def test_the_adapter_for_lazyslide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features, coords = arrays(512)
    table = SimpleNamespace(X=features, obs={})
    corners = coords.astype(np.float64)
    bounds = Bounds({"minx": corners[:, 0], "miny": corners[:, 1], "maxx": corners[:, 0] + 512})
    wsi = SimpleNamespace(
        tables={"gigapath_tiles": table},
        shapes={"tiles": SimpleNamespace(bounds=bounds)},
        tile_spec=lambda key: SimpleNamespace(base_width=512) if key == "tiles" else None,
    )
    found = adapter("LazySlide", tmp_path, monkeypatch, wsi=wsi)["embedding"]
    model, *x = own(tmp_path, 512, global_pool=True)
    with torch.inference_mode():
        assert (found - model(*x)[0][0]).abs().max() < 1e-5
        maps = model.attention_maps(*x, rollout=True, relative=True)
    assert np.abs(table.obs["attention"] - maps[0, 0].numpy()).max() < 1e-5
