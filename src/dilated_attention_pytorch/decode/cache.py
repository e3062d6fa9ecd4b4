"""`DilatedKVCache`: the keys and values that later tokens can still select, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checks import (
    autocast_inputs,
    check_device,
    check_float_dtype,
    check_new_tokens,
    check_positive_int,
    float_dtypes,
    named_keywords,
    whole_numbers,
)
from ..core.tracing import uncompiled
from ..ops import without_autocast
from ..spec import DilatedSpec, Execution, HeadMixing, HeadOffsets
from .attend import KeyRun, Stream, alike_rows, check_decoding

_LEAST_ROWS = 64  # of a run's first memory


class DilatedKVCache:
    """Keys and values of a stream of tokens, for causal dilated attention of each new one.

    A token of branch (w, r) reads at most w / r keys of a head, those of its own segment. So the cache holds
    one segment of each branch, however long the stream: `sum(w / r)` keys and values for each head with an
    offset of its own. Heads that share keys (grouped-query attention) need up to r times that. Memory is
    taken as tokens arrive, at most twice what they need, and never more than whole segments need.

        cache = DilatedKVCache([2048, 8192], [1, 4], batch_size=1, num_kv_heads=8, head_dim=64)
        out = cache.attend(q, k, v)              # the prompt, (1, m, 8, 64), at once or in chunks
        out = cache.attend(q_new, k_new, v_new)  # one token, (1, 1, 8, 64)

    equals the rows of `dilated_attention(..., is_causal=True)` over the whole stream. There is no gradient,
    dropout or mask: rows of different lengths are given by `lengths`. Not thread-safe.

    Args:
        segment_lengths, dilation_rates, scale, head_mixing, head_offsets, execution: as in
            `dilated_attention`; memory is fresh.
        batch_size: rows, each a stream of its own.
        num_kv_heads, head_dim: of keys and values; num_heads of queries, num_kv_heads by default.
        device, dtype: of the tokens; those of the first tokens by default.
    """

    @named_keywords
    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        batch_size: int,
        num_kv_heads: int,
        head_dim: int,
        num_heads: int | None = None,
        scale: float | None = None,
        head_mixing: HeadMixing = "all",
        head_offsets: HeadOffsets = "interleaved",
        execution: Execution | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        branches = segment_lengths, dilation_rates
        spec = DilatedSpec(*branches, True, scale, head_mixing=head_mixing, head_offsets=head_offsets)
        num_heads = num_kv_heads if num_heads is None else num_heads
        sizes = {"batch_size": batch_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, size in (sizes | {"num_heads": num_heads}).items():
            check_positive_int(name, size, bits=28)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, got {num_kv_heads} and {num_heads}")
        execution = check_decoding("DilatedKVCache", execution)
        check_float_dtype("dtype", dtype)
        self.spec, self.head_dim, self.device, self.dtype = spec, head_dim, check_device(device), dtype
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self._stream = Stream(spec, num_heads, num_kv_heads, execution)
        self._lengths = [0] * batch_size
        self._buffers: dict[KeyRun, Tensor] = {}  # (key and value, b, kv heads, rows, d)

    @property
    def batch_size(self) -> int:
        """Rows of the stream."""
        return len(self._lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens so far, of each row."""
        return tuple(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, of the longest row."""
        return max(self._lengths)

    @property
    def nbytes(self) -> int:
        """What the keys and values held here take."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @uncompiled
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, lengths: Sequence[int] | Tensor | None = None
    ) -> Tensor:
        """Appends the next m tokens of each row and returns their causal attention.

        Args:
            q: (b, m, h, d).
            k, v: (b, m, h_kv, d).
            lengths: (b,) integers, how many of the m tokens are real in each row. They come first; the others
                are not appended, and their rows of the result are zeros.

        Returns:
            (b, m, h, d) in the dtype of q. If it raises, nothing was appended.
        """
        q, k, v = autocast_inputs(q, k, v)
        check_new_tokens("DilatedKVCache.attend", q, k, v)
        self._check_fit(q, k)
        b, m = q.shape[:2]
        news = whole_numbers("lengths", [m] * b if lengths is None else lengths, b, m)
        alike = list(alike_rows(list(zip(self._lengths, news, strict=True))))
        with torch.no_grad(), without_autocast(q.device):
            self._reserve(news, q.device, q.dtype)
            if len(alike) == 1 and news[0] == m:
                out = self._attend_alike(slice(None), self._lengths[0], q, k, v)
            else:
                out = torch.zeros_like(q, memory_format=torch.contiguous_format)
                for rows, (start, new) in alike:
                    if new:
                        out[rows, :new] = self._attend_alike(rows, start, *(x[rows, :new] for x in (q, k, v)))
            # Once all have attended: an error leaves the past whole.
            for rows, (start, new) in alike:
                if new > 1:
                    self._append(rows, start, k[rows, :new], v[rows, :new])
        self._lengths = [old + new for old, new in zip(self._lengths, news, strict=True)]
        self.device, self.dtype = q.device, q.dtype
        return out

    def reset(self) -> None:
        """Begins again at position 0. Memory is kept for the next stream."""
        self._lengths = [0] * self.batch_size

    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Row i becomes what row index[i] was, as beam search asks; the number of rows may change."""
        rows = whole_numbers("index", index, None, self.batch_size - 1)
        index_of = torch.tensor(rows, device="cpu")
        self._buffers = {run: x.index_select(1, index_of.to(x.device)) for run, x in self._buffers.items()}
        self._lengths = [self._lengths[row] for row in rows]

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain data for `load_state_dict`; `torch.load(weights_only=True)` reads them."""
        state: dict[str, Any] = {"settings": self._settings(), "lengths": list(self._lengths)}
        for i, run in enumerate(self._stream.runs):
            if rows := _rows_held(run, self._lengths):
                state[f"runs.{i}"] = self._buffers[run][:, :, :, :rows].clone()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state of a cache with the same settings; nothing changes unless all of it fits."""
        names = {"settings", "lengths", *(f"runs.{i}" for i in range(len(self._stream.runs)))}
        if not isinstance(state, Mapping) or not {"settings", "lengths"} <= state.keys() <= names:
            got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"state must be what DilatedKVCache.state_dict returns, got {got}")
        if state["settings"] != self._settings():
            raise ValueError(f"the state has the settings {state['settings']}, the cache {self._settings()}")
        lengths = whole_numbers("lengths", state["lengths"], self.batch_size, 2**62)
        expected = {
            f"runs.{i}": (2, self.batch_size, len(run.kv_heads), rows, self.head_dim)
            for i, run in enumerate(self._stream.runs)
            if (rows := _rows_held(run, lengths))
        }
        held = {name: state[name] for name in sorted(state.keys() - {"settings", "lengths"})}
        shapes = {name: tuple(x.shape) if _is_dense(x) else type(x).__name__ for name, x in held.items()}
        if shapes != expected:
            raise ValueError(f"the state must hold dense tensors of the shapes {expected}, got {shapes}")
        places = {(x.device, x.dtype) for x in held.values()}
        device, dtype = next(iter(places), (self.device, self.dtype))
        if len(places) > 1 or self.dtype not in (None, dtype) or dtype not in (None, *float_dtypes()):
            found = " and ".join(sorted(f"{dtype} on {device}" for device, dtype in places))
            raise TypeError(f"this cache holds {self.dtype or 'one float dtype'}, the state {found}")
        runs, device = self._stream.runs, self.device or device
        copies = {runs[int(name[5:])]: x.detach().to(device, copy=True) for name, x in held.items()}
        self._buffers, self._lengths = copies, lengths
        self.device, self.dtype = device, dtype

    def _settings(self) -> dict[str, Any]:
        names = ("scale", "head_mixing", "head_offsets"), ("num_heads", "num_kv_heads", "head_dim")
        lists = {name: list(getattr(self.spec, name)) for name in ("segment_lengths", "dilation_rates")}
        options = {name: getattr(self.spec, name) for name in names[0]}
        return lists | options | {name: getattr(self, name) for name in names[1]}

    def _check_fit(self, q: Tensor, k: Tensor) -> None:
        expected = self.batch_size, self.num_heads, self.num_kv_heads, self.head_dim
        got = q.shape[0], q.shape[2], k.shape[2], q.shape[3]
        if got != expected:
            names = "batch_size, num_heads, num_kv_heads and head_dim"
            raise ValueError(f"tokens must have the cache's {names} {expected}, got {got}")
        if k.shape[1] != q.shape[1]:
            raise ValueError(f"q, k and v must have as many new tokens, got {q.shape[1]} and {k.shape[1]}")
        if self.dtype not in (None, q.dtype):
            raise TypeError(f"this cache holds {self.dtype}, got {q.dtype}")
        device = self.device or q.device
        if device.type != q.device.type or device.index not in (None, q.device.index):
            raise ValueError(f"this cache is on {device}, got tokens on {q.device}")

    def _attend_alike(self, rows: slice, start: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of rows that are all at position `start`, with as many new tokens."""
        past = partial(self._held_rows, rows)
        if q.shape[1] > 1:
            return self._stream.attend_many(q, k, v, start, past)
        self._append(rows, start, k, v)
        return self._stream.attend_one(q, start, past)

    def _held_rows(self, batch: slice, run: KeyRun, first: int, count: int) -> tuple[Tensor, Tensor]:
        buffer, times = self._buffers[run], slice(first, first + count)
        return buffer[0, batch, :, times], buffer[1, batch, :, times]

    def _append(self, rows: slice, start: int, k: Tensor, v: Tensor) -> None:
        """Keeps what the tokens after these can select; an earlier segment is overwritten."""
        end = start + k.shape[1]
        if end - start == 1:
            token = torch.stack((k, v))[:, :, 0]
            for run in self._stream.selected(start):
                self._buffers[run][:, rows, :, start % run.window // run.rate] = token[:, :, run.key_index]
            return
        for run in self._stream.runs:
            segment = _last_segment(run, start, end)
            first, after = (run.rows_before(max(time, segment) - segment) for time in (start, end))
            if first == after:
                continue
            begin = segment + run.offset + first * run.rate - start
            for held, new in zip(self._buffers[run], (k, v), strict=True):
                chosen = new[:, begin :: run.rate][:, : after - first, run.key_index]
                held[rows, :, first:after] = chosen.transpose(1, 2)

    def _reserve(self, news: list[int], device: torch.device, dtype: torch.dtype) -> None:
        """Memory for the rows that these tokens add, doubled when it must grow."""
        if not torch.is_inference_mode_enabled():  # what was made in that mode could not be written to
            for run, x in self._buffers.items():
                if x.is_inference():
                    self._buffers[run] = x.clone()
        ends = {(old, old + new) for old, new in zip(self._lengths, news, strict=True) if new}
        runs: Iterable[KeyRun] = self._stream.runs
        if max(news) == 1:
            runs = {run for old, _ in ends for run in self._stream.selected(old)}
        for run in runs:
            rows = max((run.rows_before(end - _last_segment(run, old, end)) for old, end in ends), default=0)
            buffer = self._buffers.get(run)
            held = 0 if buffer is None else buffer.shape[3]
            if rows <= held:
                continue
            rows = min(run.rows_before(run.window), max(rows, 2 * held, _LEAST_ROWS))
            shape = (2, self.batch_size, len(run.kv_heads), rows, self.head_dim)
            with torch.inference_mode(False):
                grown = torch.empty(shape, dtype=dtype, device=device)
            if buffer is not None:
                grown[:, :, :, :held] = buffer
            self._buffers[run] = grown


def _rows_held(run: KeyRun, lengths: list[int]) -> int:
    """Rows of a run that the next token of some row could read."""
    return max(run.rows_before(length % run.window) for length in lengths)


def _is_dense(x: object) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested and not x.is_meta


def _last_segment(run: KeyRun, start: int, end: int) -> int:
    """Where the segment begins of which tokens [start, end) are kept.

    It is that of the next token; a single token reads its own key from the cache too.
    """
    last = end - 1 if end - start == 1 else end
    return last // run.window * run.window
