"""A program of test_triton.py: the kernels in Triton's interpreter, compared with the definition.

TRITON_INTERPRET=1 python triton_search.py PART PARTS      every PARTS-th call, from number PART on
"""

from __future__ import annotations

import math
import sys
import tempfile
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from dilated_attention_pytorch import (
    BlockPattern,
    DilatedKVCache,
    DilatedSpec,
    Execution,
    block_sparse_attention,
    dilated_attention,
)
from dilated_attention_pytorch.functional import attend
from dilated_attention_pytorch.kernels import Attended, How, triton
from dilated_attention_pytorch.kernels.eager import EAGER_OP
from dilated_attention_pytorch.reference import (
    block_sparse_attention_reference,
    dilated_attention_reference,
    multiplicity,
)
from ring.calls import check_kernel
from support.ranks import run_ranks

TRITON = Execution("triton")
NAMES = ("out", "lse", "dq", "dk", "dv")
DILATED, BLOCKS = 50, 12
BRANCHES = (
    ((33, 80), (1, 3)),
    ((64,), (2,)),
    ((40, 64, 70), (1, 2, 5)),
    ((32, 64), (1, 1)),
    ((50, 25), (4, 3)),
)


def pick(number: int, values: tuple[Any, ...], place: int) -> Any:
    """One of the values; over the calls every pair of options meets."""
    return values[(number // place + number) % len(values)]


def surrounded(*shape: int, rng: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Random numbers between rows, heads and features that are NaN."""
    b, n, h, d = shape
    x = torch.full((b, n + 3, h + 1, d + 8), math.nan, dtype=dtype)[:, 2:-1, :h, :d]
    return x.copy_(torch.randn(shape, generator=rng, dtype=torch.float64))


Tensors, Weights = tuple[Tensor, ...], tuple[Tensor, Tensor]


def inputs(
    b: int, n: int, heads: tuple[int, int], d: int, dtype: torch.dtype, rng: torch.Generator
) -> tuple[Tensors, Weights]:
    """q, k and v, and the weights of out and lse in the loss."""
    *tensors, weight = (
        surrounded(b, n, h, d, rng=rng, dtype=dtype) for h in (heads[0], heads[1], heads[1], heads[0])
    )
    return tuple(tensors), (weight, torch.randn(b, heads[0], n, generator=rng, dtype=torch.float64))


def results(
    attention: Callable[..., Any], tensors: Tensors, weights: Weights, *args: Any, **given: Any
) -> list[Tensor]:
    """out, lse and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = attention(*leaves, *args, **given)
    grads = [weights[0].to(out.dtype), torch.where(lse.isfinite(), weights[1], 0.0).to(lse.dtype)]
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, grads)]


def compare(number: int, got: list[Tensor], want: list[Tensor], floor: list[float] | None) -> None:
    """float32 is exact to 5e-6 of the largest value, half precision near what its rounding leaves."""
    for i, (name, x, y) in enumerate(zip(NAMES, got, want, strict=True)):
        finite = y.isfinite()
        assert torch.equal(x.isfinite(), finite), (number, name)
        error = (x.double() - y)[finite]
        if not error.numel():
            continue
        if floor is None or name == "lse":
            relative = float(error.abs().max()) / max(1.0, float(y[finite].abs().max()))
            assert relative < 5e-6, (number, name, relative)
            worst["float32"] = max(worst["float32"], relative)
        else:
            relative = float(error.square().mean().sqrt() / max(1e-30, y[finite].square().mean().sqrt()))
            assert relative < 1.5 * floor[i] + 1e-6, (number, name, relative, floor[i])
            worst["half over floor"] = max(worst["half over floor"], relative / max(1e-6, floor[i]))


worst = {"float32": 0.0, "half over floor": 0.0}


def rounding_floor(
    tensors: Tensors, weights: Weights, want: list[Tensor], counts: Tensor, scale: float
) -> list[float]:
    """The relative errors of a kernel that rounds only the factors of its products and its results."""
    dtype, h = tensors[0].dtype, tensors[0].shape[2]

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    q, k, v, g = (x.double().transpose(1, 2) for x in (*tensors, weights[0]))
    k, v = (x.repeat_interleave(h // x.shape[1], 1) for x in (k, v))
    lse = want[1].masked_fill(want[1] == -math.inf, math.inf).unsqueeze(-1)
    p = counts * torch.exp(q @ k.transpose(-1, -2) * scale - lse)
    out = rounded(rounded(p) @ v)
    delta = (g * out).sum(-1, keepdim=True) - torch.where(want[1].isfinite(), weights[1], 0.0).unsqueeze(-1)
    ds = rounded(p * (g @ v.transpose(-1, -2) - delta))
    dk, dv = ds.transpose(-1, -2) @ q * scale, rounded(p).transpose(-1, -2) @ g
    h_kv = tensors[1].shape[2]
    found = [out, want[1], rounded(ds @ k * scale)]
    found += [rounded(x.unflatten(1, (h_kv, -1)).sum(2)) for x in (dk, dv)]
    floors = []
    for x, y in zip(found, want, strict=True):
        y = y if y.dim() == 3 else y.transpose(1, 2)
        finite = y.isfinite()
        error, size = ((x - y)[finite], y[finite]) if finite.any() else (torch.zeros(1), torch.ones(1))
        floors.append(float(error.square().mean().sqrt() / max(1e-30, float(size.square().mean().sqrt()))))
    return floors


def dilated(number: int) -> None:
    rng = torch.Generator().manual_seed(number)
    dtype = pick(number, (torch.float32, torch.float32, torch.float16), 1)
    heads, h_kv = pick(number, ((2, 2), (4, 2), (3, 1), (5, 5)), 3)
    d = pick(number, (24, 40, 16, 72, 7, 64, 96, 33), 2)
    n = pick(number, (70, 45, 1, 33, 64), 5)
    branches = pick(number, BRANCHES, 7)
    packed = number % 5 == 4
    options: dict[str, Any] = {
        "is_causal": pick(number, (False, True), 2),
        "scale": pick(number, (None, None, 0.3, -0.4, 0.0), 3),
        "head_mixing": pick(number, ("all", "all", "grouped"), 5),
        "head_offsets": pick(number, ("interleaved", "blocked"), 3),
        "tail": pick(number, ("exact", "phantom", "exact"), 7),
        "detach_mixing": dtype == torch.float32 and number % 7 == 3,
    }
    b = 1 if packed else 2
    call: dict[str, Any] = {}
    if number % 4 == 1:
        call["key_mask"] = torch.rand(b, n, generator=rng) > 0.4
    if packed:
        call["cu_seqlens"] = torch.tensor([0, n // 3, n // 3, n])
    tensors, weights = inputs(b, n, (heads, h_kv), d, dtype, rng)
    spec = DilatedSpec(*branches, **options)
    got = results(attend, tensors, weights, spec, TRITON, **call)
    wide = tuple(x.double() for x in tensors)
    want = results(dilated_attention_reference, wide, weights, spec, return_lse=True, **call)
    floor = None
    if dtype == torch.float16:
        kept = {x: options[x] for x in ("is_causal", "head_mixing", "head_offsets")}
        counts = multiplicity(n, heads, *branches, cu_seqlens=call.get("cu_seqlens"), **kept)[None]
        if "key_mask" in call:
            counts = counts * call["key_mask"][:, None, None]
        floor = rounding_floor(tensors, weights, want, counts, spec.scale_for(d))
    compare(number, got, want, floor)


def blocks(number: int) -> None:
    rng = torch.Generator().manual_seed(number)
    n, size = pick(number, ((70, 16), (64, 32), (96, 48)), 1)
    heads, h_kv = pick(number, ((2, 1), (3, 3)), 2)
    rows, layouts = -(-n // size), pick(number, (1, heads, 2 * heads), 1)
    layout = torch.rand(layouts, rows, rows, generator=rng) > 0.4
    layout[:, rows // 2] = number % 3 > 0  # a row of blocks that keeps none, or all
    pattern = BlockPattern.from_layout(layout, n, size)
    causal = bool(number % 2)
    call = {"key_mask": torch.rand(2, n, generator=rng) > 0.3} if number % 3 == 1 else {}
    tensors, weights = inputs(2, n, (heads, h_kv), 24, torch.float32, rng)
    how: dict[str, Any] = {"is_causal": causal, "return_lse": True, **call}
    got = results(block_sparse_attention, tensors, weights, pattern, execution=TRITON, **how)
    wide = tuple(x.double() for x in tensors)
    want = results(block_sparse_attention_reference, wide, weights, pattern.to_dense(), **how)
    compare(number, got, want, None)


def dropout(_: int) -> None:
    """The same pairs as in the eager kernel are dropped, in both passes."""
    branches: dict[str, Any] = {"segment_lengths": (32, 64), "dilation_rates": (1, 3), "is_causal": True}
    found = []
    for kernel in ("eager", "triton"):
        rng = torch.Generator().manual_seed(3)
        q, k, v = (torch.randn(2, 45, h, 40, generator=rng).requires_grad_() for h in (4, 2, 2))
        torch.manual_seed(0)
        out = dilated_attention(q, k, v, **branches, dropout_p=0.4, execution=Execution(kernel))
        found.append([out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def spoilt(number: int) -> None:
    """NaN and infinity reach the outputs that depend on them, and no others."""
    causal, which, bad = bool(number % 2), "qkv"[number // 2 % 3], (math.nan, math.inf)[number // 6 % 2]
    branches: dict[str, Any] = {"segment_lengths": (10, 16, 64), "dilation_rates": (1, 2, 4)}
    rng = torch.Generator().manual_seed(1)
    tensors = {x: torch.randn(1, 37, 4, 20, generator=rng) for x in "qkv"}
    clean = dilated_attention(*tensors.values(), **branches, is_causal=causal)
    tensors[which][0, 20, 3] = bad
    out = dilated_attention(*tensors.values(), **branches, is_causal=causal, execution=TRITON)
    reached = torch.zeros(37, 4, dtype=torch.bool)
    meets = multiplicity(37, 4, **branches, is_causal=causal)[3, :, 20] > 0
    reached[:, 3] = torch.arange(37) == 20 if which == "q" else meets
    is_odd = ~out[0].isfinite().all(-1)
    if which == "k" and bad == math.inf:  # a score of -inf is a weight of 0
        reached &= is_odd
    assert torch.equal(is_odd, reached), number
    torch.testing.assert_close(out[0][~reached], clean[0][~reached], atol=1e-5, rtol=1e-5)


def brain_floats(_: int) -> None:
    q, k, v = (torch.randn(1, 40, 2, 24, generator=torch.Generator().manual_seed(i)) for i in range(3))
    tensors = tuple(x.bfloat16() for x in (q, k, v))
    weights = torch.randn(1, 40, 2, 24), torch.zeros(1, 2, 40)
    spec = DilatedSpec((16, 40), (1, 2), True)
    got = results(attend, tensors, weights, spec, TRITON)
    wide = tuple(x.double() for x in tensors)
    want = results(dilated_attention_reference, wide, weights, spec, return_lse=True)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, atol=3e-2, rtol=3e-2)


def far_apart(number: int) -> None:
    """Rows further apart than 32 bits can tell, in memory that is mapped where it is touched."""
    time = (2**26, 64)[number % 2]  # elements between rows: a tile, or a batch, spans more than 2**31
    sizes = (2, 36, 2, 16), (2**31 + 2**10 if number % 2 else 2**9, time, 16, 1)
    size, tensors = 1 + sum((x - 1) * step for x, step in zip(*sizes, strict=True)), []
    for seed in range(3):
        with tempfile.NamedTemporaryFile() as file:  # sparse: what is not written takes no room
            x = torch.from_file(file.name, shared=True, size=size, dtype=torch.float16).as_strided(*sizes)
        tensors.append(x.copy_(torch.randn(sizes[0], generator=torch.Generator().manual_seed(seed))))
    out = dilated_attention(*tensors, (36,), (1,), is_causal=True, execution=TRITON)
    want = dilated_attention(*(x.double() for x in tensors), (36,), (1,), is_causal=True)
    torch.testing.assert_close(out.double(), want, atol=4e-3, rtol=4e-3)


def packed_rows(number: int) -> None:
    """The op of packed rows: few rows over keys that are split, masks by key head, causal rows."""
    b, h, h_kv, n, m, causal, masked = (
        (1, 4, 2, 1, 1100, False, False),
        (2, 4, 2, 5, 600, False, True),
        (3, 4, 2, 37, 37, True, False),
    )[number]
    rng = torch.Generator().manual_seed(number)
    q, g = (torch.randn(b, h, n, 40, generator=rng) for _ in range(2))
    k, v = (torch.randn(b, h_kv, m, 40, generator=rng) for _ in range(2))
    mask = torch.rand(b, h_kv, m, generator=rng) > 0.5 if masked else None
    if mask is not None:
        mask[0, 0], k[0, 0, 1] = False, math.nan  # rows that see nothing, and a hidden NaN
    found = []
    for op, dtype in ((triton.TRITON_OP, torch.float32), (EAGER_OP, torch.float64)):
        how, tensors = How(causal, -0.3, mask), [x.to(dtype) for x in (q, k, v)]
        if mask is not None and dtype == torch.float64:
            tensors[1].masked_fill_(~mask.unsqueeze(-1), 0.0)
        out, lse = op.forward(*tensors, how)
        weights = torch.randn(lse.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
        lse_or_inf = lse.masked_fill(lse == -math.inf, math.inf)
        grads = op.backward(Attended(*tensors, out, lse_or_inf, g.to(dtype), weights, how))
        found.append([out, lse, *grads])
    compare(number, *found, None)


def decoding(number: int) -> None:
    """A prompt, more tokens at once and single ones through a cache, in float32 and float16."""
    dtype, heads = ((torch.float32, (4, 2)), (torch.float16, (3, 3)))[number]
    rng, n = torch.Generator().manual_seed(number), 45
    q, k, v = (torch.randn(2, n, h, 24, generator=rng).to(dtype) for h in (heads[0], heads[1], heads[1]))
    branches: dict[str, Any] = {"segment_lengths": (8, 24), "dilation_rates": (1, 3)}
    given: dict[str, Any] = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 24}
    given |= {"batch_size": 2, "dtype": dtype, "execution": TRITON}
    cache, found = DilatedKVCache(**branches, **given), []
    with torch.no_grad():
        for first, end in ((0, 30), (30, 41), (41, 42), (42, 43), (43, 44), (44, 45)):
            found.append(cache.attend(*(x[:, first:end] for x in (q, k, v))))
        want = dilated_attention_reference(*(x.double() for x in (q, k, v)), **branches, is_causal=True)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(torch.cat(found, 1).double(), want, atol=tolerance, rtol=tolerance)


def ring(_: int) -> None:
    """Two ranks with this kernel against one process without it."""
    run_ranks(2, check_kernel, "triton")


CALLS = [
    *((dilated, i) for i in range(DILATED)),
    *((blocks, i) for i in range(BLOCKS)),
    *((spoilt, i) for i in (0, 1, 3, 4, 5, 9, 11)),
    *((far_apart, i) for i in range(2)),
    (dropout, 0),
    (brain_floats, 0),
    *((packed_rows, i) for i in range(3)),
    *((decoding, i) for i in range(2)),
    (ring, 0),
]

if __name__ == "__main__":
    part, parts = map(int, sys.argv[1:])
    warnings.simplefilter("ignore")  # NumPy's, of infinities
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # which fills memory that nothing has written with NaN
    for call, number in islice(CALLS, part, None, parts):
        call(number)
    print(worst)
