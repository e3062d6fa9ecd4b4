"""The CUDA kernels, and the public API, called with fake CUDA tensors: real signatures and shapes, no GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dilated_attention_pytorch import BlockPattern, DilatedSpec
from dilated_attention_pytorch.core.workspace import Workspace
from dilated_attention_pytorch.kernels import (
    Attended,
    How,
    Inputs,
    Merged,
    Request,
    choose_kernel,
    cuda,
    stock,
    triton,
)
from dilated_attention_pytorch.kernels.eager import EAGER_OP
from dilated_attention_pytorch.plan import Pass, Shape, plan_blocks, plan_dilated
from support.configurations import Configuration, configurations

STRIDED = EAGER_OP._replace(reads_strides=True)
FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


class _Launches(TorchDispatchMode):
    """Counts what would be launched, and the bytes that it reads and writes, on a device that is not here."""

    NO_WORK = frozenset({"as_strided", "view", "slice", "transpose", "unsqueeze", "detach", "empty"})

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        results = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, results))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.device.type in ("meta", "cuda")]
        if tensors and name not in self.NO_WORK:
            self.bytes += sum(x.nbytes for x in tensors)
            self.names.append(name)
        return results


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_lse_grad", [False, True])
@pytest.mark.parametrize(
    ("capability", "dtype", "d", "expected"),
    [
        ((8, 0), torch.float16, 64, FLASH),
        ((9, 0), torch.bfloat16, 40, FLASH),
        ((9, 0), torch.bfloat16, 37, FLASH),
        ((8, 0), torch.float16, 320, EFFICIENT),
        ((7, 5), torch.float16, 64, EFFICIENT),
        ((8, 6), torch.float32, 64, EFFICIENT),
        ((6, 1), torch.float32, 1, EFFICIENT),
    ],
)
def test_ops_take_the_calls_and_return_the_contract_shapes(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    d: int,
    expected: str,
    with_lse_grad: bool,
    causal: bool,
) -> None:
    monkeypatch.setattr(cuda, "_capability", lambda _: capability)
    rows, keys, how = 45, 45 if causal else 70, How(causal, 0.3)
    with FakeTensorMode(), _Launches() as launches:
        q = torch.empty(3, 6, rows, d, dtype=dtype, device="cuda")
        k, v = (torch.empty(3, 2, keys, d, dtype=dtype, device="cuda") for _ in range(2))
        out, lse = cuda.CUDA.forward(q, k, v, how)
        grad_lse = torch.empty(3, 6, rows, device="cuda") if with_lse_grad else None
        dq, dk, dv = cuda.CUDA.backward(Attended(q, k, v, out, lse, torch.empty_like(q), grad_lse, how))
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert lse.dtype == torch.float32
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    assert {dq.dtype, dk.dtype, dv.dtype} == {dtype}
    assert launches.names.count(expected) == 1
    assert launches.names.count(expected + "_backward") == 1 + with_lse_grad


GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>)
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_the_public_api_on_a_gpu_called_compiled_and_exported(tmp_path: Path) -> None:
    torch_folder, source = Path(torch.__file__).parent, tmp_path / "guard.cpp"
    source.write_text(GUARD)
    library = tmp_path / "guard.so"
    flags = [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10"]
    subprocess.run(
        ["g++", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library), *flags], check=True
    )
    program = Path(__file__).with_name("fake_gpu.py")
    command = [sys.executable, str(program), str(library)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    assert {"dilated_attention", "LongNet()", "LongNetLM()"} < set(result.stdout.split())


def count_launches(direction: Pass, workspace_bytes: int) -> _Launches:
    shape, spec = Shape(1, 32768, 16, 16, 64), DilatedSpec((2048, 8192, 32768), (1, 4, 16))
    plan = plan_dilated(spec, shape, itemsize=2, workspace_bytes=workspace_bytes, direction=direction)
    half: dict[str, Any] = {"dtype": torch.float16, "device": "meta"}
    q, k, v, out, g = (torch.empty(1, 32768, 16, 64, **half) for _ in range(5))
    inputs = Inputs(q, k, v, None, 0.125, 0.0, 0, Workspace())
    with _Launches() as launches:
        if direction == "forward":
            stock.forward(cuda.CUDA, plan, inputs)
        else:
            lse = torch.empty(1, 16, 32768, device="meta")
            stock.backward(cuda.CUDA, plan, inputs, Merged(out, lse, g, None))
    return launches


def test_rows_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied is out and lse: 1.2 and 2.9 GB are moved, where packed rows took 2.0 and 4.2."""
    monkeypatch.setattr(cuda, "_capability", lambda _: (9, 0))
    forward, backward = (count_launches(x, 2**31) for x in ("forward", "backward"))
    assert forward.names.count(FLASH) == backward.names.count(FLASH + "_backward") == 6
    assert (forward.names.count("copy_"), forward.names.count("lerp_")) == (3, 5)
    assert (len(forward.names), len(backward.names)) == (39, 45)
    assert (forward.bytes, backward.bytes) < (1.2e9, 2.9e9)


@settings(max_examples=50)
@given(configurations(max_n=60))
def test_rows_in_place_give_what_packed_rows_give(config: Configuration) -> None:
    inputs, found = Inputs(*config.tensors(torch.float64), None, 0.3, 0.0, 0, Workspace()), []
    how: dict[str, Any] = {"itemsize": 8, "docs": config.docs, "workspace_bytes": config.workspace_bytes}
    for op in (EAGER_OP, STRIDED):
        plan = plan_dilated(config.spec, config.shape, **how)
        out, lse = stock.forward(op, plan, inputs)
        rng = torch.Generator().manual_seed(0)
        g, grad_lse = (torch.randn(x.shape, generator=rng, dtype=x.dtype) for x in (out, lse))
        plan = plan_dilated(config.spec, config.shape, direction="backward", **how)
        merged = Merged(out, lse, g, torch.where(lse.isfinite(), grad_lse, 0.0))
        found.append([out, lse, *stock.backward(op, plan, inputs, merged)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-12)


def test_blocks_give_the_same_to_an_op_that_reads_rows_in_place() -> None:
    layout = torch.rand(4, 9, 9, generator=torch.Generator().manual_seed(0)) > 0.5
    pattern = BlockPattern.from_layout(layout, 70, 8)
    q, k, v = (torch.randn(2, 70, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    plan = plan_blocks(pattern, Shape(2, 70, 4, 2, 8), itemsize=8, workspace_bytes=2**20)
    inputs = Inputs(q, k, v, None, 0.3, 0.0, 0, Workspace())
    packed, read = (stock.forward(op, plan, inputs) for op in (EAGER_OP, STRIDED))
    torch.testing.assert_close(read, packed)


def test_another_flash_attention_is_taken_where_rows_have_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "is_installed", lambda: True)
    active: list[str | None] = [None]
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active[0])
    capability = [(9, 0)]
    monkeypatch.setattr(cuda, "_capability", lambda _: capability[0])

    def chosen(keys: int, dtype: torch.dtype = torch.bfloat16, **facts: Any) -> str:
        request = Request(torch.device("cuda"), dtype, rows=10_000, pairs=10_000 * keys, **facts)
        return choose_kernel(request).name

    assert chosen(8192) == "triton"  # torch's own is not faster
    active[0] = "FA3"
    assert [chosen(keys) for keys in (256, 512, 2048, 8192)] == ["triton", "triton", "stock", "stock"]
    assert chosen(8192, torch.float32) == chosen(8192, masked=True) == chosen(0) == "triton"
    capability[0] = (8, 0)
    assert chosen(8192) == "triton"
    capability[0], active[0] = (10, 0), "FA4"
    assert chosen(8192) == "stock"
    named = choose_kernel(Request(torch.device("cuda"), torch.bfloat16, rows=1, pairs=8192), "triton")
    assert named.name == "triton"
