"""`DilatedKVCache` and `attend_last`: equal to the causal forward, bounded, clear about bad input."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from dilated_attention_pytorch import Execution, dilated_attention
from dilated_attention_pytorch.decode import DilatedKVCache, attend_last
from dilated_attention_pytorch.kernels import cpu_flash
from dilated_attention_pytorch.reference import dilated_attention_reference
from support.configurations import segment_and_rate
from support.executions import packed
from support.tolerances import assert_close


@dataclass(frozen=True)
class Stream:
    """A stream of tokens, and how it arrives: for each chunk, how many tokens each row gets."""

    options: dict[str, Any]
    chunks: list[tuple[int, ...]]
    heads: tuple[int, int]
    dtype: torch.dtype
    seed: int
    workspace_bytes: int

    @property
    def lengths(self) -> list[int]:
        return [sum(new) for new in zip(*self.chunks, strict=True)]

    def tensors(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(self.seed)
        h, h_kv = self.heads
        shape = len(self.lengths), max(self.lengths)
        return tuple(
            torch.randn(*shape, heads, 4, generator=generator, dtype=torch.float64).to(self.dtype)
            for heads in (h, h_kv, h_kv)
        )

    def cache(self) -> DilatedKVCache:
        sizes = {"num_heads": self.heads[0], "num_kv_heads": self.heads[1], "head_dim": 4}
        execution = Execution(workspace_bytes=self.workspace_bytes)
        return DilatedKVCache(**self.options, **sizes, batch_size=len(self.lengths), execution=execution)


@st.composite
def streams(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> Stream:
    branches = draw(st.lists(segment_and_rate(24, 6), min_size=1, max_size=3))
    h_kv, group = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    b = draw(st.integers(1, 3))
    ragged = draw(st.booleans())
    chunks = []
    for size in draw(st.lists(st.sampled_from([1, 1, 1, 2, 3, 7, 30]), min_size=1, max_size=12)):
        row = st.integers(0, size) if ragged else st.just(size)
        chunks.append(tuple(draw(row) for _ in range(b)))
    if not any(map(sum, zip(*chunks, strict=True))):
        chunks.append((1,) * b)
    options = {
        "segment_lengths": [w for w, _ in branches],
        "dilation_rates": [r for _, r in branches],
        "head_mixing": draw(st.sampled_from(["all", "grouped"])),
        "head_offsets": draw(st.sampled_from(["interleaved", "blocked"])),
        "scale": draw(st.sampled_from([None, 0.7])),
    }
    seed, workspace_bytes = draw(st.integers(0, 2**20)), draw(st.sampled_from([1, 2**20]))
    return Stream(options, chunks, (h_kv * group, h_kv), dtype, seed, workspace_bytes)


def run(cache: DilatedKVCache, tensors: tuple[Tensor, ...], chunks: Any, out: Tensor | None = None) -> Tensor:
    """The attention of tokens that arrive in chunks, each row from where its cache stands."""
    out = torch.zeros(tensors[0].shape, dtype=tensors[0].dtype) if out is None else out
    for news in chunks:
        m = max(news)
        if m == 0:
            continue
        old = cache.lengths
        parts = []
        for x in tensors:
            part = torch.full((x.shape[0], m, *x.shape[2:]), float("nan"), dtype=x.dtype)
            for row, (start, new) in enumerate(zip(old, news, strict=True)):
                part[row, :new] = x[row, start : start + new]
            parts.append(part)
        got = cache.attend(*parts, lengths=None if min(news) == m else list(news))
        for row, (start, new) in enumerate(zip(old, news, strict=True)):
            out[row, start : start + new] = got[row, :new]
            assert not got[row, new:].any()
    return out


def reference(tensors: Any, row: int, times: slice, options: dict[str, Any]) -> Tensor:
    """The definition over some positions of one row."""
    whole = [x[row : row + 1, times].double() for x in tensors]
    return dilated_attention_reference(*whole, **options, is_causal=True)[0]


def expected(stream: Stream, tensors: tuple[Tensor, ...]) -> Tensor:
    """Row by row, the definition over the whole stream; zeros after a row's end."""
    out = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for row, length in enumerate(stream.lengths):
        if length:
            out[row, :length] = reference(tensors, row, slice(length), stream.options)
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@given(st.data())
def test_chunks_equal_the_definition(dtype: torch.dtype, data: st.DataObject) -> None:
    stream = data.draw(streams(dtype))
    tensors, cache = stream.tensors(), stream.cache()
    out = run(cache, tensors, stream.chunks)
    assert (cache.lengths, cache.num_tokens) == (tuple(stream.lengths), max(stream.lengths))
    assert_close(out, expected(stream, tensors), dtype)


@given(streams(), st.integers(0, 2**20))
def test_reordered_rows_go_on_as_their_sources(stream: Stream, seed: int) -> None:
    half = len(stream.chunks) // 2
    tensors, cache = stream.tensors(), stream.cache()
    out = run(cache, tensors, stream.chunks[:half])
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(len(stream.lengths), (4,), generator=generator)
    cache.reorder(index)
    assert cache.batch_size == 4
    rows = tuple(x[index] for x in tensors)
    chunks = [[news[i] for i in index.tolist()] for news in stream.chunks[half:]]
    assert_close(run(cache, rows, chunks, out[index]), expected(stream, tensors)[index], torch.float64)


@given(streams())
def test_a_restored_cache_goes_on(stream: Stream) -> None:
    half = len(stream.chunks) // 2
    tensors, cache = stream.tensors(), stream.cache()
    out = run(cache, tensors, stream.chunks[:half])
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    restored = stream.cache()
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert restored.lengths == cache.lengths
    assert restored.nbytes <= cache.nbytes
    assert_close(run(restored, tensors, stream.chunks[half:], out), expected(stream, tensors), torch.float64)


@given(streams(), st.data())
def test_attend_last_equals_the_definition(stream: Stream, data: st.DataObject) -> None:
    tensors = stream.tensors()
    b, n = tensors[0].shape[:2]
    m = data.draw(st.integers(1, n))
    starts = data.draw(st.lists(st.integers(0, n), min_size=b, max_size=b))
    q, k, v = tensors
    options = packed({**stream.options, "workspace_bytes": stream.workspace_bytes})
    out = attend_last(q[:, n - m :], k, v, **options, starts=starts)
    for row, start in enumerate(starts):
        want = torch.zeros(n, *q.shape[2:], dtype=torch.float64)
        if start < n:
            want[start:] = reference(tensors, row, slice(start, None), stream.options)
        assert_close(out[row], want[n - m :], torch.float64)


def test_memory_stays_constant_once_the_largest_segment_is_full() -> None:
    cache = DilatedKVCache([64, 256], [1, 4], batch_size=1, num_kv_heads=4, head_dim=2, num_heads=8)
    generator = torch.Generator().manual_seed(0)
    sizes, chunk = set(), 500
    for done in range(0, 100_000, chunk):
        q, k, v = (torch.randn(1, chunk, heads, 2, generator=generator) for heads in (8, 4, 4))
        cache.attend(q, k, v)
        for _ in range(3):
            cache.attend(q[:, :1], k[:, :1], v[:, :1])
        if done >= 256:
            sizes.add(cache.nbytes)
    assert cache.num_tokens == 100_000 + 600
    # Rate 1: 64 rows of 4 heads. Rate 4: heads 0 to 7 have the offsets 0 1, 2 3, 0 1, 2 3, so each key head
    # is kept at two offsets, 64 rows each.
    assert sizes == {2 * 4 * 2 * (64 * 4 + 64 * 4 * 2)}


def small(**changes: Any) -> DilatedKVCache:
    sizes: dict[str, Any] = {"batch_size": 1, "num_kv_heads": 2, "head_dim": 4}
    return DilatedKVCache(**{"segment_lengths": [8], "dilation_rates": [1], **sizes, **changes})


def test_long_streams_of_single_tokens_equal_the_chunked_ones() -> None:
    """Their memory grows twice."""
    options: dict[str, Any] = {"segment_lengths": (16, 300), "dilation_rates": (1, 2)}
    tensors = [torch.randn(2, 700, heads, 4, dtype=torch.float64) for heads in (6, 3, 3)]
    want = dilated_attention(*tensors, **options, is_causal=True)
    for size in (1, 99):
        cache = small(**options, batch_size=2, num_heads=6, num_kv_heads=3)
        parts = [cache.attend(*part) for part in zip(*(x.split(size, 1) for x in tensors), strict=True)]
        assert_close(torch.cat(parts, 1), want, torch.float64)


def test_reset_begins_a_new_stream_in_the_same_memory() -> None:
    cache, x = small(), torch.randn(1, 7, 2, 4)
    first, nbytes = cache.attend(x, x, x), cache.nbytes
    cache.reset()
    assert (cache.num_tokens, cache.nbytes) == (0, nbytes)
    assert torch.equal(cache.attend(x, x, x), first)


def test_an_error_appends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    branches = {"segment_lengths": [8, 32], "dilation_rates": [1, 2]}
    cache, tensors = small(**branches, batch_size=2), [torch.randn(2, 60, 2, 4) for _ in range(3)]
    cache.attend(*(x[:, :5] for x in tensors), lengths=[5, 3])
    later = [torch.stack([x[0, 5:35], x[1, 3:33]]) for x in tensors]
    fails_at_the_second_row = Mock(side_effect=[torch.zeros(1, 30, 2, 4), MemoryError])
    with monkeypatch.context() as patch:
        patch.setattr(type(cache._stream), "attend_many", fails_at_the_second_row)
        with pytest.raises(MemoryError):
            cache.attend(*later)
    assert cache.lengths == (5, 3)
    out = cache.attend(*later)
    for row, start in enumerate((5, 3)):
        want = reference(tensors, row, slice(start + 30), branches)
        assert_close(out[row], want[start:], torch.float32)


def test_nan_reaches_the_tokens_that_read_it_and_no_others() -> None:
    options: dict[str, Any] = {"segment_lengths": (8, 16), "dilation_rates": (1, 2)}
    tensors = [torch.randn(1, 40, 2, 4, dtype=torch.float64) for _ in range(3)]
    tensors[1][0, 3, 0], tensors[2][0, 18, 1] = float("nan"), float("nan")
    cache = small(**options)
    out = torch.cat([cache.attend(*(x[:, t : t + 1] for x in tensors)) for t in range(40)], 1)
    want = dilated_attention(*tensors, **options, is_causal=True)
    assert torch.equal(out.isnan(), want.isnan())
    assert 0 < out.isnan().sum() < out.numel()


CHANGES: list[Callable[[DilatedKVCache], DilatedKVCache | None]] = [
    lambda cache: cache,
    lambda cache: cache.reorder([0]),
    lambda cache: cache.load_state_dict(cache.state_dict()),
    copy.deepcopy,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_inference_mode_made_can_be_written_outside_it(change: Any) -> None:
    cache, x = small(), torch.randn(1, 3, 2, 4)
    with torch.inference_mode():
        cache.attend(x, x, x)
        cache = change(cache) or cache
    cache.attend(x, x, x)
    assert (cache.lengths, cache.device, cache.dtype) == ((6,), x.device, x.dtype)


def test_autocast_casts_as_in_the_full_forward() -> None:
    cache, x = small(), torch.randn(1, 3, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert cache.attend(x, x, x).dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"this cache holds torch.bfloat16, got torch.float64"):
        cache.attend(*[x.double()] * 3)


X = torch.randn(2, 3, 4, 8)


def bad_cache(**changes: Any) -> DilatedKVCache:
    return small(**{"batch_size": 2, "num_kv_heads": 4, "head_dim": 8, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be a positive integer, got 0"),
        ({"head_dim": 2.0}, ValueError, "head_dim must be a positive integer, got 2.0"),
        ({"num_heads": 6}, ValueError, "num_kv_heads must divide num_heads, got 4 and 6"),
        ({"dilation_rates": [1, 2]}, ValueError, "same length, got 1 and 2"),
        ({"dtype": torch.int32}, TypeError, "dtype must be a floating-point torch.dtype"),
        ({"kernel": "eager"}, TypeError, "has no 'kernel'; execution=Execution\\(kernel=...\\) is meant"),
        ({"execution": "fast"}, TypeError, "execution must be an Execution or None, got str"),
        ({"execution": Execution(memory="pool")}, ValueError, "takes fresh memory, got .*'pool'"),
    ],
)
def test_bad_settings(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bad_cache(**changes)


@pytest.mark.parametrize(
    ("tensors", "options", "error", "message"),
    [
        ((X, X, 3), {}, TypeError, "v must be a tensor, got int"),
        ((X[:1], X[:1], X[:1]), {}, ValueError, r"head_dim \(2, 4, 4, 8\), got \(1, 4, 4, 8\)"),
        ((X[:, :2], X, X), {}, ValueError, "q, k and v must have as many new tokens, got 2 and 3"),
        ((X, X, X[:, :2]), {}, ValueError, "k and v must have the shape"),
        ((X[:, :0], X[:, :0], X[:, :0]), {}, ValueError, "q must have at least one position"),
        ((X, X, X), {"lengths": [1]}, ValueError, "one entry for each of the 2 rows, got 1"),
        ((X, X, X), {"lengths": [1, 4]}, ValueError, "lengths must lie between 0 and 3, got 4"),
        ((X, X, X), {"lengths": [1, 1.0]}, TypeError, "lengths must hold integers, got 1.0"),
        ((X, X, X), {"lengths": torch.ones(2)}, TypeError, "lengths must hold integers, got torch.float32"),
        ((X.to("meta"),) * 3, {}, ValueError, "needs tensors with values, got the meta device"),
        ((X.clone().requires_grad_(), X, X), {}, ValueError, "has no gradient: call it under torch.no_grad"),
    ],
)
def test_bad_tokens(tensors: Any, options: Any, error: type[Exception], message: str) -> None:
    cache = bad_cache()
    with pytest.raises(error, match=message):
        cache.attend(*tensors, **options)
    assert cache.lengths == (0, 0)


def test_a_call_that_fails_fixes_neither_device_nor_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_flash, "_DTYPES", ())
    cache = bad_cache(execution=Execution("stock"))
    with pytest.raises(ValueError, match="kernel 'stock' cannot run this call"):
        cache.attend(X, X, X)
    assert (cache.device, cache.dtype) == (None, None)


def test_bad_reordering_and_states() -> None:
    cache = bad_cache()
    cache.attend(X, X, X)
    state = cache.state_dict()
    run, is_state = state["runs.0"], "what DilatedKVCache.state_dict returns"
    for index, error, message in (
        ([0, 2], ValueError, "between 0 and 1, got 2"),
        ([], ValueError, "at least one entry, got none"),
        (3, TypeError, "index must be a sequence or tensor of integers, got 3"),
    ):
        with pytest.raises(error, match=message):
            cache.reorder(index)
    for bad, error, message in (
        ({}, ValueError, is_state),
        (3, ValueError, is_state),
        *(({**state, name: run}, ValueError, f"{is_state}, got .*{name}") for name in ("foo", 5, "runs.7")),
        ({**state, "lengths": [3, -1]}, ValueError, "lengths must lie between"),
        *(
            ({**state, "runs.0": odd}, ValueError, "must hold dense tensors of the shapes")
            for odd in ("x", run[:, :, :, :2], run.to_sparse(), run.to("meta"))
        ),
        ({**state, "runs.0": run.double()}, TypeError, "this cache holds torch.float32, the state"),
    ):
        with pytest.raises(error, match=message):
            cache.load_state_dict(bad)
    for dtype in (torch.int32, torch.complex64, torch.float8_e5m2):
        with pytest.raises(TypeError, match=f"this cache holds one float dtype, the state {dtype} on cpu"):
            bad_cache().load_state_dict({**state, "runs.0": run.to(dtype)})
    with pytest.raises(ValueError, match=r"the state has the settings .*\[8\].* the cache .*\[16\]"):
        bad_cache(segment_lengths=[16]).load_state_dict(state)
    assert cache.lengths == (3, 3)


@pytest.mark.parametrize(
    ("keys", "options", "message"),
    [
        (X[:, :2], {}, "at most as many positions as k and v, got 3 and 2"),
        (X, {"starts": [0, 4]}, "starts must lie between 0 and 3, got 4"),
    ],
)
def test_attend_last_refuses_more_queries_than_keys(keys: Tensor, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend_last(X, keys, keys, [8], [1], **options)
