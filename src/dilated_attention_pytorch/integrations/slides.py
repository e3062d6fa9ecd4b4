"""Files of slides: tile features and coordinates as TRIDENT, CLAM and STAMP write them, and embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from torch import Tensor

from ..modules.pretrained import replacing
from .torchscale import UNREADABLE

FEATURES = ("features", "feats", "tile_embeds")  # of TRIDENT and CLAM, of STAMP, of Prov-GigaPath's pipeline
HDF5 = (".h5", ".hdf5")
_BROKEN: tuple[type[Exception], ...] = (OSError, BadZipFile, *UNREADABLE)
SUFFIXES = (*HDF5, ".pt", ".pth", ".npz", ".zarr")


@dataclass(frozen=True)
class Slide:
    """Features (n, d) and coordinates (n, 2) of a slide's tiles.

    `tile_size` is the side of a tile in the unit of `coords`, None if the file does not tell; `attributes`
    is all that it tells besides.
    """

    name: str
    features: Tensor
    coords: Tensor
    tile_size: float | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)


def read_slide(path: str | Path) -> Slide:
    """Reads tile features and coordinates; the suffix decides between HDF5, zarr, `.pt` and `.npz`.

    Features are found by a name of `FEATURES`, coordinates as `coords`, of the shapes (n, d) and (n, 2), or
    with a 1 in front. The size of tiles is told by attributes of `coords` or of the file: `patch_size_level0`
    (TRIDENT), `tile_size_um`, or `tile_size` where `unit` is "um" (STAMP), `patch_size` with `downsample`
    (CLAM's patches); in `.pt` and `.npz` by entries of these names. No code of a file runs.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path} must be a file of tile features, {', '.join(SUFFIXES)}")
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    with _opened(path) as (held, attributes):
        name = next((name for name in FEATURES if name in held), None)
        names = ", ".join(sorted(map(str, held))) or "nothing"
        if name is None:
            raise ValueError(f"{path} must hold features, named {' or '.join(FEATURES)}, got {names}")
        if "coords" not in held:
            hint = (
                "; CLAM's .pt files lack them, its .h5 files have them"
                if path.suffix.lower() == ".pt"
                else ""
            )
            raise ValueError(f"{path} must hold coords, the places of its tiles, got {names}{hint}")
        features, coords = _tensor(held[name]), _tensor(held["coords"])
    features, coords = (x.squeeze(0) if x.dim() == 3 else x for x in (features, coords))
    _check(path, features, coords)
    return Slide(path.stem, features, coords, _tile_size(attributes), attributes)


def _check(path: Path, features: Tensor, coords: Tensor) -> None:
    if features.dim() != 2 or coords.shape != (len(features), 2):
        shapes = f"{tuple(features.shape)} and {tuple(coords.shape)}"
        raise ValueError(f"features and coords of {path} must be (n, d) and (n, 2), got {shapes}")
    if not features.numel():
        raise ValueError(f"{path} must have at least one tile, got features {tuple(features.shape)}")
    if not features.is_floating_point():
        raise ValueError(f"features of {path} must be floating point, got {features.dtype}")
    for name, x in (("features", features), ("coords", coords)):
        if not (finite := x.isfinite()).all():
            tile = int((~finite).any(1).nonzero()[0])
            raise ValueError(f"{name} of {path} must be finite, got NaN or infinity in tile {tile}")


def _tile_size(told: Mapping[str, Any]) -> float | None:
    for name in ("patch_size_level0", "tile_size_um", *(("tile_size",) if told.get("unit") == "um" else ())):
        if name in told:
            return float(told[name])
    if "patch_size" in told and "downsample" in told:
        return float(told["patch_size"]) * float(_tensor(told["downsample"]).max())
    return None


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    """What a file holds by name, and its attributes, while it is open."""
    kind = path.suffix.lower()
    if kind in (".pt", ".pth", ".npz"):
        held = _load(path)
        yield held, {name: x for name, x in held.items() if name not in (*FEATURES, "coords")}
        return
    package = _need("h5py" if kind in HDF5 else "zarr")
    try:
        file = package.File(path, "r") if kind in HDF5 else package.open_group(str(path), mode="r")
    except (OSError, ValueError) as error:
        what = "an HDF5 file" if kind in HDF5 else "a zarr group"
        raise ValueError(f"{path} must be {what}, got: {error}") from error
    with file if kind in HDF5 else nullcontext():
        yield file, dict(file.attrs) | (dict(file["coords"].attrs) if "coords" in file else {})


def _load(path: Path) -> Mapping[str, Any]:
    """The dict in a file of torch.save or numpy.savez."""
    try:
        if path.suffix.lower() == ".npz":
            with open(path, "rb") as opened, _need("numpy").load(opened, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        held = torch.load(path, map_location="cpu", weights_only=True)
    except _BROKEN as error:
        raise ValueError(f"{path} must hold tensors and plain data only, got: {error!r}") from error
    if isinstance(held, Mapping):
        return held
    return {"features": held} if isinstance(held, Tensor) else {}


def _tensor(x: Any) -> Tensor:
    try:
        return x if isinstance(x, Tensor) else torch.as_tensor(x[...] if hasattr(x, "shape") else x)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"features and coords must be arrays of numbers, got {x!r}") from error


def _need(package: str) -> Any:
    """Imports a package that this one does not require."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        advice = f"such files are read and written by {package}: pip install {package}"
        raise ModuleNotFoundError(advice, name=package) from error


def write_embedding(path: Path, arrays: Mapping[str, Tensor], told: Mapping[str, Any]) -> None:
    """Writes tensors and facts of a slide by name: HDF5 with attributes, or by suffix `.pt` or `.npz`.

    The embedding is `features` (d,), as in TRIDENT's slide features. A file that is there is replaced.
    """
    kind = path.suffix.lower()
    if kind not in (*HDF5, ".pt", ".npz"):
        raise ValueError(f"an embedding must be written as .h5, .pt or .npz, got {path}")
    held = {name: x.cpu() for name, x in arrays.items()}
    with replacing(path) as new:
        if kind == ".pt":
            torch.save({**held, **told}, new)
        elif kind == ".npz":
            with open(new, "wb") as file:
                _need("numpy").savez(file, **{name: x.numpy() for name, x in held.items()}, **told)
        else:
            with _need("h5py").File(new, "w") as file:
                for name, x in held.items():
                    file.create_dataset(name, data=x.numpy())
                file.attrs.update(told)
