"""A program of test_cuda.py: the public API on a GPU that is not here, with fake tensors.

python fake_gpu.py LIBRARY      a library that makes torch's CPU build take CUDA for a device

Called, compiled and exported, everything gives results of the shapes and dtypes of the CPU, on the GPU.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1]))

import dilated_attention_pytorch as package
from dilated_attention_pytorch import modules
from support.public_calls import FUNCTIONS, MODEL, MODELS, MODULES, TOKENS, Named, made

CALLED = ("dilated_attention", "ring_dilated_attention", "block_sparse_attention")
NOT_TRACED = ("ring_dilated_attention",)  # processes exchange what no graph holds
NOT_CALLED = ("LongNetViT()",)  # it looks at coordinates, which fake tensors do not have
NOT_FAKED = ("BlockSparseAdaptiveDilatedAttention()",)  # its blocks depend on what the tensors hold


class Call(nn.Module):
    """A function as a module, for export."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__()
        self.function, self.options = function, options

    def forward(self, **tensors: Tensor) -> Any:
        return self.function(**tensors, **self.options)


def calls() -> Iterator[tuple[str, Callable[[], nn.Module], dict[str, Any]]]:
    """Name, what makes a module, and the tensors that it takes."""
    language = made({"vocab_size": 7, "num_layers": 1, **MODEL}, {"tokens": TOKENS})
    for name, entry in {**FUNCTIONS, **MODULES, **MODELS, "LongNetLM()": language}.items():
        if (
            not isinstance(entry, Named)
            or name in NOT_FAKED
            or (entry.settings is None and name not in CALLED)
        ):
            continue
        named = name.partition("(")[0]
        found: Any = next(getattr(room, named) for room in (package, modules) if hasattr(room, named))
        tensors = {key: x for key, x in entry.valid.items() if isinstance(x, Tensor)}
        rest = {key: x for key, x in entry.valid.items() if key not in tensors}
        if entry.settings is None:
            yield name, lambda found=found, rest=rest: Call(found, rest), tensors
        else:
            yield name, lambda found=found, entry=entry: found(**entry.settings).eval(), tensors


def facts(results: Any, device: str) -> list[Any]:
    found = [x for x in tree_leaves(results) if isinstance(x, Tensor)]
    assert found
    assert all(x.device.type == device for x in found), [x.device for x in found]
    return [(x.shape, x.dtype) for x in found]


def check(name: str, make: Callable[[], nn.Module], tensors: dict[str, Tensor]) -> None:
    expected = facts(make()(**tensors), "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        module, inputs = make(), {key: torch.empty(x.shape, dtype=x.dtype) for key, x in tensors.items()}
        if name not in NOT_CALLED:
            assert facts(module(**inputs), "cuda") == expected
        if name not in NOT_TRACED:
            exported = torch.export.export(module, (), inputs)
            results = [x.meta["val"] for x in exported.graph.output_node().args[0] if x is not None]
            assert facts(results, "cuda") == expected
            torch._dynamo.reset()
            compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
            assert facts(compiled(**inputs), "cuda") == expected


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    ctypes.CDLL(sys.argv[1])
    torch.set_grad_enabled(False)  # the gradients of fake tensors ask for a device that is there
    # Compilers cannot look into this method of a subclass, which fake tensors have.
    Tensor.unflatten = lambda x, dim, sizes: torch.unflatten(x, dim, sizes)  # type: ignore[method-assign]
    for name, make, tensors in calls():
        check(name, make, tensors)
        print(name)
