"""The CUDA kernels, called with fake CUDA tensors: real signatures and shapes, no GPU."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dilated_attention_pytorch.kernels import How, cuda

FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


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
    rows, how = 45, How(causal, 0.3)
    with FakeTensorMode(), _Recorder() as recorder:
        q = torch.empty(3, 6, rows, d, dtype=dtype, device="cuda")
        k, v = (torch.empty(3, 2, rows, d, dtype=dtype, device="cuda") for _ in range(2))
        out, lse = cuda.CUDA.forward(q, k, v, how)
        grad_lse = torch.empty(3, 6, rows, device="cuda") if with_lse_grad else None
        dq, dk, dv = cuda.CUDA.backward(torch.empty_like(q), grad_lse, q, k, v, out, lse, how)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert lse.dtype == torch.float32
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    assert {dq.dtype, dk.dtype, dv.dtype} == {dtype}
    assert recorder.names.count(expected) == 1
    assert recorder.names.count(expected + "_backward") == 1 + with_lse_grad


def test_rectangular_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_capability", lambda _: (8, 0))
    for dtype in (torch.float16, torch.float32):
        with FakeTensorMode():
            q = torch.empty(2, 4, 50, 16, dtype=dtype, device="cuda")
            k = torch.empty(2, 4, 70, 16, dtype=dtype, device="cuda")
            out, lse = cuda.CUDA.forward(q, k, k, How(False, 0.3))
            grads = cuda.CUDA.backward(out, None, q, k, k, out, lse, How(False, 0.3))
        assert lse.shape == (2, 4, 50)
        assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]
