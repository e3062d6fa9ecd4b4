"""Models in folders: settings as JSON, weights as safetensors; state dicts that fit, or are refused."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..checks import check_device, check_float_dtype
from .attention import Device, Dtype

if TYPE_CHECKING:
    from .longnet_config import StackConfig

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.pth)(?<!\.safetensors)")  # owner/name, not a file of ours
_Model = TypeVar("_Model", bound="PretrainedModel")
_SHOWN = 20  # problems of a state dict


class PretrainedModel(nn.Module):
    """A module that is built from a config alone, and so can be saved and loaded."""

    config_class: ClassVar[type[StackConfig]]
    config: Any

    @classmethod
    def from_config(
        cls: type[_Model], config: StackConfig, *, device: Device = None, dtype: Dtype = None
    ) -> _Model:
        """A new model with the settings `config` and initial weights."""
        if not isinstance(config, cls.config_class):
            rule = f"the config of a {cls.__name__} must be a {cls.config_class.__name__}"
            raise TypeError(f"{rule}, got {type(config).__name__}")
        return cls(**cls._arguments(config), device=device, dtype=dtype)

    @classmethod
    def _arguments(cls, config: StackConfig) -> dict[str, Any]:
        """The arguments of the class that give this config."""
        return {name: value for name, value in config.to_dict().items() if name != "model"}

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes config.json and model.safetensors into `folder`, which is made if need be.

        Files that are there are replaced as a whole or not at all. Needs the package safetensors.
        """
        state, settings = self.state_dict(), self.config.to_json()
        if unready := [name for name, tensor in state.items() if tensor.is_meta]:
            raise ValueError(
                f"a model must have its weights to be saved, got {unready[0]} on the meta device"
            )
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with replacing(path / WEIGHTS_FILE) as weights, replacing(path / CONFIG_FILE) as config:
            write_tensors(weights, state)
            config.write_text(settings, encoding="utf-8")

    @classmethod
    def from_pretrained(
        cls: type[_Model],
        folder: str | os.PathLike[str],
        *,
        device: Device = None,
        dtype: Dtype = None,
        revision: str | None = None,
        **options: Any,
    ) -> _Model:
        """The model that `save_pretrained` wrote into `folder`, in evaluation mode. Needs safetensors.

        Where there is no such folder, "owner/name" is a repository on the Hugging Face Hub, from which
        huggingface_hub downloads the files, at `revision`. `options` are arguments of the class that differ
        from those saved, such as `dropout=0.1`, or `kind="improved"`, whose projections are joined. The
        weights have the dtype of the file, or `dtype`; no second copy of them is made. Keys that are missing,
        unexpected or of another shape are an error that names them.
        """
        path = find_folder(folder, (CONFIG_FILE, WEIGHTS_FILE), revision)
        rule = f"a model's folder must hold {CONFIG_FILE} and {WEIGHTS_FILE}"
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (path / name).is_file():
                raise FileNotFoundError(f"{rule}, got no {path / name}")
        config = cls.config_class.from_json((path / CONFIG_FILE).read_text(encoding="utf-8"))
        weights = path / WEIGHTS_FILE
        state = read_tensors(weights, device=device)
        arguments = {**cls._arguments(config), **options}
        # Many more layers than the file can hold are refused before they are built; few are named one by one.
        for name in ("num_layers", "num_encoder_layers", "num_decoder_layers", "depth"):
            layers = arguments.get(name)
            if isinstance(layers, int) and layers > max(100, len(state)):
                rule = f"{weights} must hold {layers} layers ({name})"
                raise ValueError(f"{rule}, got {len(state)} tensors in all")
        model = cls(**arguments, device="meta")
        assign_tensors(model, state, dtype=dtype, source=str(weights))
        return model.eval()


def find_folder(
    folder: str | os.PathLike[str],
    files: Sequence[str],
    revision: str | None = None,
    needed: Sequence[str] | None = None,
) -> Path:
    """A path that exists, or else the downloaded `files` of the repository on the Hugging Face Hub.

    Where they cannot be downloaded, the error has the command that gets `needed`, by default all of them.
    """
    path = Path(folder)
    if path.exists() or not (isinstance(folder, str) and _HUB_ID.fullmatch(folder)):
        if revision is not None:
            raise ValueError(f"revision must be that of a repository on the Hub, got {revision!r} of {path}")
        return path
    rule = f"{folder!r} must be a folder, or a repository on the Hugging Face Hub"
    command = f"hf download {folder} {' '.join(files if needed is None else needed)}"
    command += f"{f' --revision {revision}' if revision else ''} --local-dir {path.name}"
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise FileNotFoundError(
            f"{rule}, got no such folder, and no huggingface_hub, which would download it: "
            f"`pip install huggingface_hub && {command}`, then load the folder {path.name}"
        ) from error
    try:  # as one commit has them
        return Path(snapshot_download(folder, revision=revision, allow_patterns=list(files)))
    except OSError as error:
        raise FileNotFoundError(
            f"{rule}, got no such folder, and from the Hub: {error}. By hand: `{command}`, after "
            "`hf auth login` where access must be granted"
        ) from error


def assign_tensors(
    model: nn.Module, state: MutableMapping[str, Tensor], *, dtype: Dtype = None, source: str = "the state"
) -> None:
    """Makes the tensors of `state` the parameters and buffers of `model`, whose own may be without memory.

    Everything must fit: the names, and the shapes. Floating-point tensors are converted to `dtype` if given.
    Projections of another kind are joined or parted, in `state` itself, so that they are not held twice.
    """
    check_float_dtype("dtype", dtype)
    for path, module in model.named_modules():
        if (regroup := getattr(module, "regroup", None)) is not None:  # a `MultiheadModule`
            regroup(state, f"{path}." if path else "")
    check_fit(model.state_dict(), state, copies=False, source=source)
    fitting = {name: x.to(dtype or x.dtype) if x.is_floating_point() else x for name, x in state.items()}
    model.load_state_dict(fitting, strict=True, assign=True)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            rule = f"{source} must hold all tensors of the model"
            raise ValueError(f"{rule}, got no {name}, which is not saved")


@dataclass(frozen=True)
class LoadReport:
    """What became of the names of a state dict."""

    missing: tuple[str, ...] = ()  # parameters and buffers that it lacks; they keep their values
    unexpected: tuple[str, ...] = ()  # names that the module has no place for
    dropped: tuple[str, ...] = ()  # names that carry nothing new, such as constants that were checked
    outside: tuple[str, ...] = ()  # names without the prefix, hence of something else


def check_state(state: Mapping[str, Tensor]) -> None:
    if not isinstance(state, Mapping) or not all(isinstance(x, Tensor) for x in state.values()):
        raise TypeError(f"state must be a state dict of tensors, got {type(state).__name__}")
    if odd := [name for name in state if not isinstance(name, str)]:
        raise TypeError(f"state must have strings as names, got {odd[0]!r}")


def check_fit(
    own: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    *,
    strict: bool = True,
    copies: bool = True,
    source: str = "the state dict",
    hint: str = "",
) -> LoadReport:
    """Raises unless `state` has a tensor of the same shape and kind for each of `own`, and no others.

    Args:
        strict: False takes missing and unexpected names, which the report holds.
        copies: `own` are to be written to, hence must have memory; else they are to be replaced.
        source, hint: begin and end of the message.
    """
    report = LoadReport(tuple(x for x in own if x not in state), tuple(x for x in state if x not in own))
    problems = []
    if strict:
        problems += [f"{name} is missing" for name in report.missing]
        problems += [f"{name} is unexpected" for name in report.unexpected]
    for name in [x for x in own if x in state]:
        tensor, given = own[name], state[name]
        if given.shape != tensor.shape:
            problems.append(f"{name} must be {tuple(tensor.shape)}, got {tuple(given.shape)}")
        elif given.is_floating_point() != tensor.is_floating_point():
            problems.append(f"{name} must be like {tensor.dtype}, got {given.dtype}")
        elif copies and tensor.is_meta:
            problems.append(f"{name} must have memory to be copied to, got the meta device")
        elif given.is_meta:
            problems.append(f"{name} must have values, got a tensor on the meta device")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(f"{source} does not fit: {'; '.join(problems[:_SHOWN])}{more}{hint}")
    return report


@torch.no_grad()
def copy_state(module: nn.Module, state: Mapping[str, Tensor], *, strict: bool, hint: str = "") -> LoadReport:
    """Copies tensors into the parameters and buffers of the same names, keeping their dtypes and devices.

    What does not fit is an error, but for names without `strict`; then nothing is copied.
    """
    own = module.state_dict()
    report = check_fit(own, state, strict=strict, hint=hint)
    for name, tensor in own.items():
        if name in state:
            tensor.copy_(state[name])
    return report


def regroup_projections(
    state: MutableMapping[str, Any],
    prefix: str,
    *,
    fused: bool,
    sizes: Sequence[int] = (),
    kinds: Sequence[str] = ("weight", "bias"),
) -> None:
    """Joins the input projections at `prefix` in a state dict, or parts them by `sizes`: kinds differ there.

    Those of `nn.MultiheadAttention` get our names. What is incomplete, there twice or has other sizes stays
    as it is, for `load_state_dict` to name.
    """
    for kind in kinds:
        joint, parts = f"{prefix}qkv_proj.{kind}", [f"{prefix}{x}_proj.{kind}" for x in "qkv"]
        theirs = [f"{prefix}in_proj_{kind}", *(f"{prefix}{x}_proj_{kind}" for x in "qkv")]
        for name, ours in zip(theirs, (joint, *parts), strict=True):
            if name in state and ours not in state and (ours != joint or _rows(state[name]) == sum(sizes)):
                state[ours] = state.pop(name)
        if fused and joint not in state and all(name in state for name in parts):
            state[joint] = torch.cat([state.pop(name) for name in parts])
        elif not fused and _rows(state.get(joint)) == sum(sizes) and not state.keys() & set(parts):
            state.update(zip(parts, torch.split(state.pop(joint), list(sizes)), strict=True))


def load_torch_weights(module: nn.Module, out_proj: nn.Linear, state: Mapping[str, Tensor]) -> None:
    """Copies the state dict of an `nn.MultiheadAttention` into a module that has its projections."""
    check_state(state)
    theirs: dict[str, Tensor] = {}
    for kind, x in out_proj.named_parameters():
        joint = x[:1].expand(3 * len(x), *x.shape[1:])  # a view of that shape
        is_joint = kind == "bias" or "in_proj_weight" in state
        theirs |= {f"in_proj_{kind}": joint} if is_joint else {f"{y}_proj_weight": x for y in "qkv"}
        theirs[f"out_proj.{kind}"] = x
    check_fit(theirs, state)
    module.load_state_dict(dict(state), strict=False)


def _rows(x: Any) -> int | None:
    return len(x) if isinstance(x, Tensor) and x.dim() else None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file of `tensors`. One that stands under several names is written several times."""
    from safetensors.torch import save_file

    copies: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().contiguous()
        # The format refuses tensors that share memory.
        shares = plain.untyped_storage().data_ptr() in places
        copies[name] = plain.clone() if shares else plain
        places.add(copies[name].untyped_storage().data_ptr())
    save_file(copies, path, metadata={"format": "pt"})


def read_tensors(path: Path, *, device: Device = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on `device` (the CPU by default)."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_has_memory(device)
    try:
        return dict(load_file(path, device=str(torch.device("cpu" if device is None else device))))
    except SafetensorError as error:
        raise ValueError(f"{path} must be a safetensors file, got one that is not: {error}") from error


def check_has_memory(device: Device) -> None:
    if (place := check_device(device)) is not None and place.type == "meta":
        raise ValueError("device must be one with memory to load weights, got meta")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, which takes its place if the block ends well and is deleted if not."""
    # Not a temporary file of the system: those are private, while this one is to have the usual mode.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield temporary
        with open(temporary, "r+b") as written:  # Windows flushes only what is open for writing
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
