"""The choice of a kernel: ordered, with reasons, never a silent fallback."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import dilated_attention
from dilated_attention_pytorch.kernels import KERNELS, Request, choose_kernel, cuda

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_capability", lambda _: (7, 5))


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (Request(CPU, torch.float32), "cpu_flash"),
        (Request(CPU, torch.bfloat16, masked=True), "cpu_flash"),
        (Request(CPU, torch.float64), "cpu_flash"),
        (Request(CPU, torch.float32, dropout=True), "eager"),
        (Request(GPU, torch.float16), "cuda"),
        (Request(GPU, torch.float32), "cuda"),
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
        (Request(CPU, torch.float32), "cuda", "runs on cuda, and the tensors are on cpu"),
        (Request(GPU, torch.float32), "cpu_flash", "runs on cpu, and the tensors are on cuda"),
        (Request(CPU, torch.float32, dropout=True), "cpu_flash", "no dropout"),
        (Request(GPU, torch.bfloat16), "cuda", "compute capability 8.0, and this device has 7.5"),
        (Request(GPU, torch.float64), "cuda", "float64"),
        (Request(GPU, torch.float16, masked=True), "cuda", "takes no mask"),
        (Request(GPU, torch.float16, dropout=True), "cuda", "dropout"),
        (Request(GPU, torch.float16, scale=-1.0), "cuda", "needs a positive scale, and got -1.0"),
    ],
)
def test_a_named_kernel_says_why_it_cannot_run(request_: Request, name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        choose_kernel(request_, name)


def test_the_last_kernel_always_runs() -> None:
    assert KERNELS[-1].why_not(Request(torch.device("xpu"), torch.float64, True, True)) is None


def test_the_public_door_passes_the_choice_on() -> None:
    x = torch.randn(1, 8, 2, 4)
    with pytest.raises(ValueError, match="kernel 'cuda' cannot run this call"):
        dilated_attention(x, x, x, [4], [1], kernel="cuda")
    with pytest.raises(
        ValueError, match="kernel must be one of 'auto', 'cuda', 'cpu_flash', 'eager', got 'fast'"
    ):
        dilated_attention(x, x, x, [4], [1], kernel="fast")
    with pytest.raises(ValueError, match="no dropout"):
        dilated_attention(x, x, x, [4], [1], kernel="cpu_flash", dropout_p=0.1)
