"""The forward pass: an online softmax over the key runs of a block of query rows."""

import triton
import triton.language as tl

from .pieces import (
    FIRST_RUN,
    KV,
    LN2,
    LOG2E,
    NEVER,
    NULL_KEYS,
    NUM_RUNS,
    NUMBERS,
    hash_keys,
    hash_rows,
    is_kept,
    load_rows,
    open_run,
    place_rows,
    row_at,
    row_step,
    store_rows,
)

# Lists of arguments are packed.
# fmt: off


@triton.jit
def _fold(
    acc0, acc1, total, top, q0, q1, k_base, v_base, mask_base, k_step, v_step, step, low, high, count, last,
    weight, row_hash, key_start, scale_log2, threshold, gain, CHECK: tl.constexpr, MASKED: tl.constexpr,
    DROPS: tl.constexpr, D: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr
):
    """The online softmax over keys low .. high of a run; CHECK: row i sees those up to last[i]."""
    keys = tl.arange(0, BLOCK_N)
    for j in tl.range(low, high, BLOCK_N):
        inside = j + keys < count
        k_at = k_base + j * k_step
        v_at = v_base + j * v_step
        k0 = load_rows(k_at, k_step, keys, inside, 0, P0, D, CHECK, WIDE)
        scores = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        if P1 > 0:
            k1 = load_rows(k_at, k_step, keys, inside, P0, P1, D, CHECK, WIDE)
            scores = tl.dot(q1, tl.trans(k1), scores, input_precision=PRECISION)
        if CHECK or MASKED:
            scores = scores * scale_log2
            if MASKED:
                is_open = tl.load(mask_base + (j + keys) * step, mask=inside, other=NEVER) == 0.0
                scores = tl.where(is_open[None, :], scores, NEVER)
            if CHECK:
                seen = (j + keys)[None, :] <= last[:, None]
                scores = tl.where(seen, scores, NEVER)
            new_top = tl.maximum(top, tl.max(scores, 1) + weight)
            shift = tl.where(new_top == NEVER, 0.0, new_top)
            p = tl.exp2(scores - (shift - weight)[:, None])
        else:
            new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2 + weight)
            shift = tl.where(new_top == NEVER, 0.0, new_top)
            p = tl.exp2(scores * scale_log2 - (shift - weight)[:, None])
        alpha = tl.exp2(top - shift)
        total = total * alpha + tl.sum(p, 1)
        top = new_top
        if DROPS:
            key_hash = hash_keys(key_start + j * step + keys * step)
            kept = is_kept(row_hash[:, None], key_hash[None, :], threshold)
            p = tl.where(kept, p * gain, 0.0)
        v0 = load_rows(v_at, v_step, keys, inside, 0, P0, D, CHECK, WIDE)
        acc0 = acc0 * alpha[:, None]
        p = p.to(v0.dtype)
        acc0 = tl.dot(p, v0, acc0, input_precision=PRECISION)
        if P1 > 0:
            v1 = load_rows(v_at, v_step, keys, inside, P0, P1, D, CHECK, WIDE)
            acc1 = acc1 * alpha[:, None]
            acc1 = tl.dot(p, v1, acc1, input_precision=PRECISION)
    return acc0, acc1, total, top


@triton.jit
def _is_odd(
    v_base, v_step, low, high, AT: tl.constexpr, PART: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr
):
    """Whether an infinity or NaN is among values low .. high: times 0 they are NaN."""
    keys = tl.arange(0, BLOCK_N)
    found = tl.zeros([BLOCK_N], tl.float32)
    for j in tl.range(low, high, BLOCK_N):
        v = load_rows(v_base + j * v_step, v_step, keys, j + keys < high, AT, PART, D, True, WIDE)
        found += tl.sum(v.to(tl.float32) * 0.0, 1)
    return tl.sum(found, 0) != 0.0


@triton.jit
def _fold_singly(
    acc0, acc1, total, top, q0, q1, k_base, v_base, mask_base, k_step, v_step, step, low, high, last, weight,
    row_hash, key_start, scale_log2, threshold, gain, MASKED: tl.constexpr, DROPS: tl.constexpr,
    D: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr
):
    """`_fold`, key by key: in a product of tiles an infinity or NaN would reach rows that do not see it."""
    columns0 = tl.arange(0, P0)
    columns1 = P0 + tl.arange(0, P1 if P1 > 0 else 16)
    for j in tl.range(low, high):
        k = tl.load(k_base + j * k_step + columns0, mask=columns0 < D, other=0.0).to(tl.float32)
        v = tl.load(v_base + j * v_step + columns0, mask=columns0 < D, other=0.0).to(tl.float32)
        scores = tl.sum(q0.to(tl.float32) * k[None, :], 1)
        if P1 > 0:
            k = tl.load(k_base + j * k_step + columns1, mask=columns1 < D, other=0.0).to(tl.float32)
            scores += tl.sum(q1.to(tl.float32) * k[None, :], 1)
        seen = last >= j
        if MASKED:
            seen &= tl.load(mask_base + j * step) == 0.0
        scores = tl.where(seen, scores * scale_log2 + weight, NEVER)
        new_top = tl.maximum(top, scores)
        shift = tl.where(new_top == NEVER, 0.0, new_top)
        alpha = tl.exp2(top - shift)
        p = tl.exp2(scores - shift)
        total = total * alpha + p
        top = new_top
        if DROPS:
            kept = is_kept(row_hash, hash_keys(key_start + j * step), threshold)
            p = tl.where(kept, p * gain, 0.0)
        acc0 = acc0 * alpha[:, None] + tl.where(seen[:, None], p[:, None] * v[None, :], 0.0)
        if P1 > 0:
            v = tl.load(v_base + j * v_step + columns1, mask=columns1 < D, other=0.0).to(tl.float32)
            acc1 = acc1 * alpha[:, None] + tl.where(seen[:, None], p[:, None] * v[None, :], 0.0)
    return acc0, acc1, total, top


@triton.jit(do_not_specialize=NUMBERS)
def attend(
    Q, K, V, OUT, LSE, MASK, TILES, JOBS, RUNS, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, first_tile, n, m,
    h, mask_b, mask_h, scale_log2, seed, threshold, gain, OPENS: tl.constexpr, CARRIES: tl.constexpr,
    ONE_RUN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PHANTOM: tl.constexpr,
    DROPS: tl.constexpr, NEGATES: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr
):
    """out and lse of a block of rows; CARRIES: some go on, where the column OPENS of their job is 0."""
    job, batch, head, position, step, num_rows = place_rows(TILES, JOBS, first_tile)
    rows = tl.arange(0, BLOCK_M)
    inside = rows < num_rows
    wide_step = tl.cast(step, tl.int64)
    q_base = row_at(Q, batch, head, position, q_b, q_n, q_h, ALIGN)
    q_step = row_step(step, q_n, ALIGN)
    q0 = load_rows(q_base, q_step, rows, inside, 0, P0, D, True, WIDE)
    q1 = q0
    if P1 > 0:
        q1 = load_rows(q_base, q_step, rows, inside, P0, P1, D, True, WIDE)
    if NEGATES:
        q0 = -q0
        q1 = -q1
    out_base = OUT + ((batch * n + position) * h + head) * D
    out_step = wide_step * h * D
    lse_pointers = LSE + (batch * h + head) * n + position + rows * step
    top = tl.full([BLOCK_M], NEVER, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc0 = tl.zeros([BLOCK_M, P0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, P1 if P1 > 0 else 16], tl.float32)
    if CARRIES:
        # The rows have an output already: the sum of keys whose weights add up to exp(lse).
        met = inside & (tl.load(job + OPENS) == 0)
        top = tl.load(lse_pointers, mask=met, other=NEVER) * LOG2E
        total = tl.where(top == NEVER, 0.0, 1.0)
        acc0 = load_rows(out_base, out_step, rows, met, 0, P0, D, True, WIDE).to(tl.float32)
        if P1 > 0:
            acc1 = load_rows(out_base, out_step, rows, met, P0, P1, D, True, WIDE).to(tl.float32)
    if PHANTOM:
        number = tl.load(job + NULL_KEYS).to(tl.float32)
        new_top = tl.where(number > 0.0, tl.maximum(top, 0.0), top)
        shift = tl.where(new_top == NEVER, 0.0, new_top)
        alpha = tl.exp2(top - shift)
        total = total * alpha + number * tl.exp2(-shift)
        acc0 = acc0 * alpha[:, None]
        acc1 = acc1 * alpha[:, None]
        top = new_top
    row_hash = rows
    if DROPS:
        row_hash = hash_rows((batch * n + position + rows * wide_step) * h + head, seed)
    kv = tl.cast(tl.load(job + KV), tl.int64)
    run = RUNS + tl.load(job + FIRST_RUN) * 4
    for _ in tl.range(0, 1 if ONE_RUN else tl.load(job + NUM_RUNS)):
        (
            start, key_step, count, weight, by_all, by_any, last, k_base, v_base, k_step, v_step, mask_base
        ) = open_run(
            run, job, position, step, num_rows, batch, kv, m, K, V, MASK, k_b, k_n, k_h, v_b, v_n, v_h,
            mask_b, mask_h, CAUSAL, ALIGN, BLOCK_M, BLOCK_N
        )
        run += 4
        even = by_any
        if CAUSAL:
            is_odd = _is_odd(v_base, v_step, by_all, by_any, 0, P0, D, BLOCK_N, WIDE)
            if P1 > 0:
                is_odd |= _is_odd(v_base, v_step, by_all, by_any, P0, P1, D, BLOCK_N, WIDE)
            even = tl.where(is_odd, by_all, by_any)
        for CHECK in tl.static_range(2):
            acc0, acc1, total, top = _fold(
                acc0, acc1, total, top, q0, q1, k_base, v_base, mask_base, k_step, v_step, key_step,
                by_all if CHECK else 0, even if CHECK else by_all, count, last, weight, row_hash, start,
                scale_log2, threshold, gain, CHECK, MASKED, DROPS, D, P0, P1, BLOCK_N, PRECISION, WIDE
            )
        if CAUSAL:
            acc0, acc1, total, top = _fold_singly(
                acc0, acc1, total, top, q0, q1, k_base, v_base, mask_base, k_step, v_step, key_step, even,
                by_any, last, weight, row_hash, start, scale_log2, threshold, gain, MASKED, DROPS, D, P0, P1
            )
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    tl.store(lse_pointers, tl.where(is_empty, NEVER, (top + tl.log2(total)) * LN2), mask=inside)
    store_rows(out_base, out_step, rows, inside, acc0 / total[:, None], 0, P0, D, WIDE)
    if P1 > 0:
        store_rows(out_base, out_step, rows, inside, acc1 / total[:, None], P0, P1, D, WIDE)
