"""Models in folders: settings as JSON, weights as safetensors. What does not fit is refused."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from ..checks import check_float_dtype
from .longnet_config import StackConfig
from .multihead import MultiheadModule
from .state_dicts import check_fit, read_tensors, replacing, write_tensors
from .transformer import Device, Dtype

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.pth)(?<!\.safetensors)")  # owner/name, not a file of ours
_Model = TypeVar("_Model", bound="PretrainedModel")


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
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (path / name).is_file():
                raise FileNotFoundError(
                    f"a model's folder must hold {CONFIG_FILE} and {WEIGHTS_FILE}, got no {path / name}"
                )
        config = cls.config_class.from_json((path / CONFIG_FILE).read_text(encoding="utf-8"))
        weights = path / WEIGHTS_FILE
        state = read_tensors(weights, device=device)
        arguments = {**cls._arguments(config), **options}
        # Many more layers than the file can hold are refused before they are built; few are named one by one.
        for name in ("num_layers", "num_encoder_layers", "num_decoder_layers", "depth"):
            layers = arguments.get(name)
            if isinstance(layers, int) and layers > max(100, len(state)):
                raise ValueError(
                    f"{weights} must hold {layers} layers ({name}), got {len(state)} tensors in all"
                )
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
        if isinstance(module, MultiheadModule):
            module.regroup(state, f"{path}." if path else "")
    check_fit(model.state_dict(), state, copies=False, source=source)
    fitting = {name: x.to(dtype or x.dtype) if x.is_floating_point() else x for name, x in state.items()}
    model.load_state_dict(fitting, strict=True, assign=True)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{source} must hold all tensors of the model, got no {name}, which is not saved"
            )
