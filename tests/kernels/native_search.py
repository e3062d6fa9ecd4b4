"""A program of test_native.py: random calls of the native kernel, compared with the definition."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from dilated_attention_pytorch import BlockPattern, DilatedSpec, Execution, block_sparse_attention
from dilated_attention_pytorch.functional import attend
from dilated_attention_pytorch.kernels import How, native
from dilated_attention_pytorch.kernels.eager import EAGER_OP
from dilated_attention_pytorch.reference import block_sparse_attention_reference, dilated_attention_reference
from support.tolerances import assert_close

if len(sys.argv) > 1:
    native.LIBRARY = Path(sys.argv[1])
torch.set_num_threads(2)
rng = torch.Generator().manual_seed(0)


def pick(*values: int) -> int:
    return values[int(torch.randint(len(values), (1,), generator=rng))]


for _ in range(40):
    n, d, h_kv = pick(1, 31, 130, 400), pick(1, 7, 24, 64, 72), pick(1, 2)
    h, dtype = h_kv * pick(1, 3), (torch.float32, torch.bfloat16, torch.float16)[pick(0, 0, 1, 2)]
    rates = [pick(1, 2), pick(2, 4), pick(3, 8)]
    lengths = [max(pick(8, 30, 64, 256), rate) for rate in rates]
    tail, is_causal = ("exact", "phantom")[pick(0, 1)], bool(pick(0, 1))
    spec = DilatedSpec(lengths, rates, is_causal, tail=tail)  # type: ignore[arg-type]
    q, k, v = (torch.randn(2, n, heads, d, generator=rng).to(dtype) for heads in (h, h_kv, h_kv))
    mask = None if pick(0, 1) else torch.rand(2, n, generator=rng) > 0.3
    results = []
    for width in (dtype, torch.float64):
        leaves = [x.to(width).requires_grad_() for x in (q, k, v)]
        if width == dtype:
            out, lse = attend(*leaves, spec, Execution("native"), key_mask=mask)
        else:
            out, lse = dilated_attention_reference(*leaves, spec, key_mask=mask, return_lse=True)
        loss = out.double().sum() + torch.where(lse.isfinite(), lse, 0.0).double().sum()
        results.append([out, lse, *torch.autograd.grad(loss, leaves)])
    for got, want in zip(*results, strict=True):
        assert_close(got, want, dtype)
for _ in range(16):  # tiles, in which queries see some of the keys of a block
    n, d, size, h_kv = pick(3, 70, 131), pick(5, 24, 64), pick(1, 9, 32), pick(1, 2)
    h, dtype, blocks = h_kv * pick(1, 3), (torch.float32, torch.bfloat16)[pick(0, 0, 1)], -(-n // size)
    plain = BlockPattern.from_layout(torch.rand(blocks, blocks, generator=rng) < 0.7, n, size)
    tile_of = torch.randint(-1, 2, plain.columns.shape, generator=rng, dtype=torch.int32)
    tiles = torch.rand(2, size, size, generator=rng) < torch.tensor([0.1, 0.6])[:, None, None]
    pattern = BlockPattern(n, size, plain.starts, plain.columns, False, tiles, tile_of)
    options = {"is_causal": bool(pick(0, 1)), "key_mask": None if pick(0, 1) else torch.rand(2, n) > 0.3}
    q, k, v = (torch.randn(2, n, heads, d, generator=rng).to(dtype) for heads in (h, h_kv, h_kv))
    results = []
    for width in (dtype, torch.float64):
        leaves = [x.to(width).requires_grad_() for x in (q, k, v)]
        if width == dtype:
            out = block_sparse_attention(*leaves, pattern, execution=Execution("native"), **options)
        else:
            out = block_sparse_attention_reference(*leaves, pattern.to_dense(), **options)
        results.append([out, *torch.autograd.grad(out.double().square().sum(), leaves)])
    for got, want in zip(*results, strict=True):
        assert_close(got, want, dtype)
for _ in range(40):  # few rows, as decoding has them: keys are split between threads
    h_kv, rows, keys, d = pick(1, 3), pick(1, 2, 5), pick(1, 63, 3000), pick(5, 24, 64, 72, 128)
    h, dtype = h_kv * pick(1, 2), (torch.float32, torch.bfloat16, torch.float16)[pick(0, 0, 1, 2)]
    q = torch.randn(2, h, rows, d, generator=rng).to(dtype)
    k, v = (torch.randn(2, h_kv, 2 * keys, d, generator=rng).to(dtype)[:, :, ::2] for _ in range(2))
    mask = None if pick(0, 1) else torch.rand(2, h_kv, keys, generator=rng) > 0.3
    partial = torch.randn(q.shape, generator=rng), torch.randn(q.shape[:3], generator=rng)
    for extends in (False, True):
        pairs = []
        for op, width in ((native.NATIVE_OP, dtype), (EAGER_OP, torch.float64)):
            given = *(x.to(width) for x in (q, k, v)), How(False, 0.3, mask)
            sums = [x.to(torch.promote_types(width, torch.float32), copy=True) for x in partial]
            pairs.append(sums if extends else op.forward(*given))
            if extends:
                op.extend(*given, *sums)
        for got, want in zip(*pairs, strict=True):
            assert_close(got, want, dtype)
print(native.load_library().dap_isa().decode())  # type: ignore[union-attr]
