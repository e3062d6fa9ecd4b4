"""A trainer of `LongNetLM` on the bytes of text files.

    from dilated_attention_pytorch.train import TrainConfig, load_model, read_metrics, train

The names are imported where they are first used, so that the command line can list its flags without torch.
"""

from importlib import import_module
from typing import Any

_PLACES = {"TrainConfig": "config", "read_metrics": "metrics", "train": "loop", "load_model": "loop"}
__all__ = ["TrainConfig", "load_model", "read_metrics", "train"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)
