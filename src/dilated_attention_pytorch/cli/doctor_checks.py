"""A few seconds of proof: the library on this machine against its definition, for all that can run here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import block_sparse, functional
from ..bench.exactness import TOLERANCE, Check, run_checks
from ..bench.gate import TOLERANCES
from ..kernels import Request, kernels_for
from ..reference import block_sparse_attention_reference, dilated_attention_reference
from ..spec import Execution, SparsePatternConfig

LENGTH, HEADS, HEAD_DIM, BLOCK = 151, 4, 16, 16
BRANCHES = ((16, 64), (1, 4))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def verdicts() -> Iterator[Check]:
    """Options against the definition, then each kernel in each dtype, pooled memory and block patterns."""
    yield from run_checks()
    for device in devices():
        for kernel in kernels_for(device):
            for dtype in dtypes_of(device):
                if kernel.why_not(Request(device, dtype)) is None:
                    yield check_call(
                        f"{kernel.name}, {name_of(dtype)} on {device}", device, dtype, kernel.name
                    )
    yield check_call("pooled memory", torch.device("cpu"), torch.float32, "auto", memory="pool")
    yield check_blocks()


def devices() -> list[torch.device]:
    """The devices of this machine that torch can use: cpu, every CUDA device, mps."""
    found = [torch.device("cpu")]
    found += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [*found, torch.device("mps")] if torch.backends.mps.is_available() else found


def dtypes_of(device: torch.device) -> tuple[torch.dtype, ...]:
    """Apple's GPUs have no float64."""
    return DTYPES[1:] if device.type == "mps" else DTYPES


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_call(
    title: str, device: torch.device, dtype: torch.dtype, kernel: str, *, memory: str = "fresh"
) -> Check:
    """Dilated attention by a kernel, against the definition in float64 of the same inputs."""
    tensors = _inputs(dtype)
    options: dict[str, Any] = {"is_causal": True}
    expected = _with_gradients(dilated_attention_reference, tensors, torch.float64, *BRANCHES, **options)
    here = tuple(x.to(device) for x in tensors)
    options["execution"] = Execution(kernel, memory=memory)
    actual = _with_gradients(functional.dilated_attention, here, dtype, *BRANCHES, **options)
    return _judge(title, actual, expected, TOLERANCES.get(name_of(dtype), TOLERANCE))


def check_blocks() -> Check:
    """Block-sparse attention against the dense masked softmax of its pattern."""
    config = SparsePatternConfig("local_window", 0.4, BLOCK)
    pattern = block_sparse.build_block_pattern(config, LENGTH, HEADS, is_causal=True)
    tensors = _inputs(torch.float64)
    attend = (block_sparse.block_sparse_attention, block_sparse_attention_reference)
    masks = (pattern, pattern.to_dense())
    actual, expected = (
        _with_gradients(function, tensors, torch.float64, mask, is_causal=True)
        for function, mask in zip(attend, masks, strict=True)
    )
    return _judge("block-sparse pattern", actual, expected, TOLERANCE)


def _inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of out, on the cpu."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, LENGTH, HEADS, HEAD_DIM)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4))


def _with_gradients(
    function: Any, tensors: tuple[Tensor, ...], dtype: torch.dtype, *arguments: Any, **options: Any
) -> tuple[Tensor, ...]:
    q, k, v = leaves = [x.detach().to(dtype).requires_grad_() for x in tensors[:3]]
    out = function(q, k, v, *arguments, **options)
    return out, *torch.autograd.grad(out, leaves, tensors[3].to(dtype))


def _judge(title: str, actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> Check:
    """Errors absolute below 1 and relative above."""
    pairs = zip(actual, expected, strict=True)
    errors = [((a.cpu().double() - b).abs() / b.abs().clamp(min=1.0)).max().item() for a, b in pairs]
    # torch's max keeps a NaN where Python's may lose it, and a NaN passes no check
    return Check(title, errors[0], torch.tensor(errors[1:]).max().item(), tolerance)
