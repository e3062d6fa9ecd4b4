"""Fresh memory is like torch.empty, whatever the system says to huge pages."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import memory


@pytest.mark.parametrize("shape", [(3, 5), (1 << 20, 2), (1 << 21, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shape_dtype_and_use(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = memory.empty(shape, dtype, torch.device("cpu"))
    assert (tuple(x.shape), x.dtype, x.device.type) == (shape, dtype, "cpu")
    assert x.is_contiguous()
    assert (x.fill_(2.0) == 2.0).all()


def test_advice_covers_whole_pages_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        memory, "_madvise", lambda start, size, advice: calls.append((start.value, size.value))
    )
    x = memory.empty((1 << 21,), torch.float32, torch.device("cpu"))
    ((start, size),) = calls
    assert x.data_ptr() <= start < start + size <= x.data_ptr() + x.nbytes
    assert x.nbytes - size < 2 * memory.mmap.PAGESIZE
    assert start % memory.mmap.PAGESIZE == size % memory.mmap.PAGESIZE == 0
    memory.empty((1000,), torch.float32, torch.device("cpu"))
    assert len(calls) == 1


def test_systems_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_madvise", None)
    assert memory.empty((1 << 21,), torch.float32, torch.device("cpu")).shape == (1 << 21,)
