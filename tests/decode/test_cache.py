"""`DilatedKVCache` and `attend_last`: equal to the causal forward, bounded, clear about bad input."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from dilated_attention_pytorch import Execution, dilated_attention
from dilated_attention_pytorch.decode import DilatedKVCache, attend_last
from dilated_attention_pytorch.decode.attend import key_runs
from dilated_attention_pytorch.kernels import cpu_flash
from dilated_attention_pytorch.reference import dilated_attention_reference, multiplicity
from dilated_attention_pytorch.spec import DilatedSpec
from support.configurations import segment_and_rate
from support.executions import packed
from support.tolerances import assert_close


@dataclass(frozen=True)
class Stream:
    """A stream of tokens, and how it arrives: for each chunk, how many tokens each row gets."""

    branches: tuple[tuple[int, int], ...]
    chunks: tuple[tuple[int, ...], ...]
    heads: tuple[int, int]
    mixing: str
    offsets: str
    dtype: torch.dtype
    seed: int
    scale: float | None = None
    workspace_bytes: int = 2**20

    @property
    def options(self) -> dict[str, Any]:
        w, r = zip(*self.branches, strict=True)
        return {
            "segment_lengths": w,
            "dilation_rates": r,
            "head_mixing": self.mixing,
            "head_offsets": self.offsets,
            "scale": self.scale,
        }

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

    def cache(self, **options: Any) -> DilatedKVCache:
        return DilatedKVCache(
            **self.options,
            batch_size=len(self.lengths),
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=4,
            execution=Execution(workspace_bytes=self.workspace_bytes),
            **options,
        )


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
    return Stream(
        tuple(branches),
        tuple(chunks),
        (h_kv * group, h_kv),
        draw(st.sampled_from(["all", "grouped"])),
        draw(st.sampled_from(["interleaved", "blocked"])),
        dtype,
        draw(st.integers(0, 2**20)),
        draw(st.sampled_from([None, 0.7])),
        draw(st.sampled_from([1, 2**20])),
    )


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


def expected(stream: Stream, tensors: tuple[Tensor, ...]) -> Tensor:
    """Row by row, the definition over the whole stream; zeros after a row's end."""
    out = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for row, length in enumerate(stream.lengths):
        if length:
            whole = [x[row : row + 1, :length].double() for x in tensors]
            result = dilated_attention_reference(*whole, **stream.options, is_causal=True)
            assert isinstance(result, Tensor)
            out[row, :length] = result[0]
    return out


@given(streams())
def test_chunks_equal_the_definition(stream: Stream) -> None:
    tensors, cache = stream.tensors(), stream.cache()
    out = run(cache, tensors, stream.chunks)
    assert cache.lengths == tuple(stream.lengths)
    assert cache.num_tokens == max(stream.lengths)
    assert_close(out, expected(stream, tensors), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(st.data())
def test_precisions(dtype: torch.dtype, data: st.DataObject) -> None:
    stream = data.draw(streams(dtype))
    tensors = stream.tensors()
    assert_close(run(stream.cache(), tensors, stream.chunks), expected(stream, tensors), dtype)


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
            whole = [x[row : row + 1, start:] for x in tensors]
            result = dilated_attention_reference(*whole, **stream.options, is_causal=True)
            assert isinstance(result, Tensor)
            want[start:] = result[0]
        assert_close(out[row], want[n - m :], torch.float64)


@given(streams())
def test_lanes_hold_every_key_that_is_selected(stream: Stream) -> None:
    """The runs of a branch read the pairs of the definition, and no others."""
    n, (h, h_kv) = 2 * max(w for w, _ in stream.branches), stream.heads
    options = {name: value for name, value in stream.options.items() if name != "scale"}
    spec = DilatedSpec(**options, is_causal=True)
    counts = torch.zeros(h, n, n, dtype=torch.int64)
    for run in key_runs(spec, h, h_kv):
        group = len(run.heads) // len(run.kv_heads)
        assert [head // (h // h_kv) for head in run.heads] == [
            kv for kv in run.kv_heads for _ in range(group)
        ]
        for t in range(n):
            if t % run.window % run.rate == run.offset:
                begin = t // run.window * run.window + run.offset
                rows = run.rows_before(t % run.window + 1)
                for head in run.heads:
                    counts[head, t, begin : begin + rows * run.rate : run.rate] += 1
    assert torch.equal(counts, multiplicity(n, h, **options, is_causal=True))


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


def test_long_streams_of_single_tokens_equal_the_chunked_ones() -> None:
    options: dict[str, Any] = {"segment_lengths": (16, 100), "dilation_rates": (1, 3)}
    tensors = [torch.randn(2, 700, heads, 8, dtype=torch.float64) for heads in (6, 3, 3)]
    sizes: dict[str, Any] = {"batch_size": 2, "num_heads": 6, "num_kv_heads": 3, "head_dim": 8}
    single, chunked = DilatedKVCache(**options, **sizes), DilatedKVCache(**options, **sizes)
    one = torch.cat([single.attend(*(x[:, t : t + 1] for x in tensors)) for t in range(700)], 1)
    many = torch.cat([chunked.attend(*(x[:, t : t + 99] for x in tensors)) for t in range(0, 700, 99)], 1)
    want = dilated_attention(*tensors, **options, is_causal=True)
    assert_close(one, want, torch.float64)
    assert_close(many, want, torch.float64)


def test_reset_begins_a_new_stream_in_the_same_memory() -> None:
    cache = DilatedKVCache([8], [1], batch_size=1, num_kv_heads=2, head_dim=4)
    x = torch.randn(1, 7, 2, 4)
    first, nbytes = cache.attend(x, x, x), cache.nbytes
    cache.reset()
    assert (cache.num_tokens, cache.nbytes) == (0, nbytes)
    assert torch.equal(cache.attend(x, x, x), first)


def test_an_error_appends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DilatedKVCache([8, 32], [1, 2], batch_size=2, num_kv_heads=2, head_dim=4)
    tensors = [torch.randn(2, 60, 2, 4) for _ in range(3)]
    cache.attend(*(x[:, :5] for x in tensors), lengths=[5, 3])
    calls = []
    original = type(cache._stream).attend_many

    def fails_at_the_second_run(*args: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return original(*args)

    monkeypatch.setattr(type(cache._stream), "attend_many", fails_at_the_second_run)
    later = [torch.stack([x[0, 5:35], x[1, 3:33]]) for x in tensors]
    with pytest.raises(MemoryError):
        cache.attend(*later)
    assert cache.lengths == (5, 3)
    out = cache.attend(*later)
    for row, start in enumerate((5, 3)):
        whole = [x[row : row + 1, : start + 30] for x in tensors]
        want = dilated_attention(*whole, [8, 32], [1, 2], is_causal=True)
        assert_close(out[row], want[0, start:], torch.float32)


def test_nan_reaches_the_tokens_that_read_it_and_no_others() -> None:
    options: dict[str, Any] = {"segment_lengths": (8, 16), "dilation_rates": (1, 2)}
    tensors = [torch.randn(1, 40, 2, 4, dtype=torch.float64) for _ in range(3)]
    tensors[1][0, 3, 0], tensors[2][0, 18, 1] = float("nan"), float("nan")
    cache = DilatedKVCache(**options, batch_size=1, num_kv_heads=2, head_dim=4)
    out = torch.cat([cache.attend(*(x[:, t : t + 1] for x in tensors)) for t in range(40)], 1)
    want = dilated_attention(*tensors, **options, is_causal=True)
    assert torch.equal(out.isnan(), want.isnan())
    assert 0 < out.isnan().sum() < out.numel()


def test_device_and_dtype_are_those_of_the_first_tokens() -> None:
    cache = DilatedKVCache([8], [1], batch_size=1, num_kv_heads=2, head_dim=4)
    x = torch.randn(1, 1, 2, 4)
    with torch.inference_mode():
        cache.attend(x, x, x)
    cache.attend(x, x, x)  # memory of inference mode could not be written here
    assert (cache.device, cache.dtype) == (x.device, x.dtype)
    with pytest.raises(TypeError, match=r"this cache holds torch.float32, got torch.float64"):
        cache.attend(*[x.double()] * 3)


@pytest.mark.parametrize("change", ["reorder", "load_state_dict", "deepcopy"])
def test_what_inference_mode_changed_can_be_written_outside_it(change: str) -> None:
    cache = DilatedKVCache([8], [1], batch_size=2, num_kv_heads=2, head_dim=4)
    x = torch.randn(2, 3, 2, 4)
    with torch.inference_mode():
        cache.attend(x, x, x)
        if change == "reorder":
            cache.reorder([1, 0])
        elif change == "load_state_dict":
            cache.load_state_dict(cache.state_dict())
        else:
            cache = copy.deepcopy(cache)
    with torch.no_grad():
        cache.attend(x, x, x)
    assert cache.lengths == (6, 6)


def test_autocast_casts_as_in_the_full_forward() -> None:
    cache = DilatedKVCache([8], [1], batch_size=1, num_kv_heads=2, head_dim=4)
    x = torch.randn(1, 3, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert cache.attend(x, x, x).dtype == torch.bfloat16
    assert cache.dtype == torch.bfloat16


X = torch.randn(2, 3, 4, 8)


def bad_cache(**changes: Any) -> DilatedKVCache:
    arguments: dict[str, Any] = {"batch_size": 2, "num_kv_heads": 4, "head_dim": 8}
    branches = {"segment_lengths": [8], "dilation_rates": [1]}
    return DilatedKVCache(**(branches | arguments | changes))


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
    for index, message in (
        ([0, 2], "between 0 and 1, got 2"),
        ([], "at least one entry, got none"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.reorder(index)
    state = cache.state_dict()
    other = bad_cache(segment_lengths=[16])
    with pytest.raises(ValueError, match=r"the state has the settings .*\[8\].* the cache .*\[16\]"):
        other.load_state_dict(state)
    for bad in ({}, 3):
        with pytest.raises(ValueError, match=r"what DilatedKVCache.state_dict returns"):
            cache.load_state_dict(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the state must hold dense tensors of the shapes"):
        cache.load_state_dict({**state, "runs.0": state["runs.0"][:, :, :, :2]})
    with pytest.raises(TypeError, match=r"this cache holds torch.float32, the state"):
        cache.load_state_dict({**state, "runs.0": state["runs.0"].double()})
    with pytest.raises(ValueError, match="lengths must lie between"):
        cache.load_state_dict({**state, "lengths": [3, -1]})
    run = state["runs.0"]
    for dtype in (torch.int32, torch.complex64, torch.float8_e5m2):
        with pytest.raises(TypeError, match=f"this cache holds one float dtype, the state {dtype} on cpu"):
            bad_cache().load_state_dict({**state, "runs.0": run.to(dtype)})
    for odd in ("x", run.to_sparse(), run.to("meta")):
        with pytest.raises(ValueError, match="must hold dense tensors of the shapes"):
            bad_cache().load_state_dict({**state, "runs.0": odd})
    for name in ("foo", 5, "runs.7"):
        with pytest.raises(ValueError, match=f"what DilatedKVCache.state_dict returns, got .*{name}"):
            bad_cache().load_state_dict({**state, name: run})
    with pytest.raises(TypeError, match="index must be a sequence or tensor of integers, got 3"):
        cache.reorder(3)  # type: ignore[arg-type]
    assert cache.lengths == (3, 3)


def test_attend_last_refuses_more_queries_than_keys() -> None:
    with pytest.raises(ValueError, match="at most as many positions as k and v, got 3 and 2"):
        attend_last(X, X[:, :2], X[:, :2], [8], [1])
    with pytest.raises(ValueError, match="starts must lie between 0 and 3, got 4"):
        attend_last(X, X, X, [8], [1], starts=[0, 4])
