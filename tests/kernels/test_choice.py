"""The choice of a kernel: ordered, with reasons, never a silent fallback."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import Execution, dilated_attention
from dilated_attention_pytorch.kernels import Request, choose_kernel, cuda, kernels_for
from support.executions import FUSED

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_capability", lambda _: (7, 5))


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (Request(CPU, torch.float32), FUSED[0]),
        (Request(CPU, torch.bfloat16, masked=True), FUSED[0]),
        (Request(CPU, torch.float64), "stock"),
        (Request(CPU, torch.float32, dropout=True), "eager"),
        (Request(GPU, torch.float16), "stock"),
        (Request(GPU, torch.float32), "stock"),
        (Request(GPU, torch.bfloat16), "eager"),
        (Request(GPU, torch.float64), "eager"),
        (Request(GPU, torch.float32, masked=True), "eager"),
        (Request(torch.device("mps"), torch.float32), "eager"),
    ],
)
def test_auto_takes_the_first_that_can_run(request_: Request, name: str) -> None:
    assert choose_kernel(request_).name == name


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize(
    ("request_", "name", "reason"),
    [
        (Request(torch.device("mps"), torch.float32), "stock", "cpu and cuda, and the tensors are on mps"),
        (Request(CPU, torch.float32, dropout=True), "stock", "no dropout"),
        (Request(GPU, torch.bfloat16), "stock", "compute capability 8.0, and this device has 7.5"),
        (Request(GPU, torch.float64), "stock", "float64"),
        (Request(GPU, torch.float16, masked=True), "stock", "takes no mask"),
        (Request(GPU, torch.float16, dropout=True), "stock", "dropout"),
        (Request(GPU, torch.float16, scale=-1.0), "stock", "needs a positive scale, and got -1.0"),
    ],
)
def test_a_named_kernel_says_why_it_cannot_run(request_: Request, name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        choose_kernel(request_, name)


def test_the_last_kernel_always_runs() -> None:
    xpu = torch.device("xpu")
    assert kernels_for(xpu)[-1].why_not(Request(xpu, torch.float64, True, True)) is None


def test_the_public_function_passes_the_choice_on() -> None:
    x = torch.randn(1, 8, 2, 4)
    with pytest.raises(ValueError, match="kernel 'stock' cannot run this call: it has no dropout"):
        dilated_attention(x, x, x, [4], [1], execution=Execution("stock"), dropout_p=0.1)
    for unknown in ("cuda", "cpu_flash", "fast"):
        with pytest.raises(
            ValueError, match=f"one of 'auto', 'native', 'triton', 'stock', 'eager', got '{unknown}'"
        ):
            Execution(unknown)
