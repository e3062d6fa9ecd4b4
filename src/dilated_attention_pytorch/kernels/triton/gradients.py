"""The backward pass: dq of a block of query rows; dk and dv of a block of keys."""

import triton
import triton.language as tl

from .pieces import (
    CAUSAL_JOB,
    COUNT,
    FIRST_RUN,
    HEAD,
    HEAD_STEP,
    HEADS,
    JOB,
    KV,
    LOG2E,
    NEVER,
    NUM_RUNS,
    NUMBERS,
    START,
    STEP,
    hash_keys,
    hash_rows,
    is_kept,
    load_rows,
    open_run,
    place_rows,
    row_at,
    row_step,
    rows_before,
    store_rows,
)

# Lists of arguments are packed.
# fmt: off


@triton.jit
def _fold_dq(
    dq0, dq1, q0, q1, g0, g1, lse2, delta, k_base, v_base, mask_base, k_step, v_step, step, low, high, count,
    last, weight, row_hash, key_start, scale_log2, threshold, gain, CHECK: tl.constexpr, MASKED: tl.constexpr,
    DROPS: tl.constexpr, D: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr
):
    keys = tl.arange(0, BLOCK_N)
    for j in tl.range(low, high, BLOCK_N):
        inside = j + keys < count
        k_at = k_base + j * k_step
        v_at = v_base + j * v_step
        k0 = load_rows(k_at, k_step, keys, inside, 0, P0, D, CHECK, WIDE)
        v0 = load_rows(v_at, v_step, keys, inside, 0, P0, D, CHECK, WIDE)
        scores = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        dp = tl.dot(g0, tl.trans(v0), input_precision=PRECISION)
        if P1 > 0:
            k1 = load_rows(k_at, k_step, keys, inside, P0, P1, D, CHECK, WIDE)
            v1 = load_rows(v_at, v_step, keys, inside, P0, P1, D, CHECK, WIDE)
            scores = tl.dot(q1, tl.trans(k1), scores, input_precision=PRECISION)
            dp = tl.dot(g1, tl.trans(v1), dp, input_precision=PRECISION)
        p = tl.exp2(scores * scale_log2 - (lse2 - weight)[:, None])
        if DROPS:
            key_hash = hash_keys(key_start + j * step + keys * step)
            kept = is_kept(row_hash[:, None], key_hash[None, :], threshold)
            dp = tl.where(kept, dp * gain, 0.0)
        ds = p * (dp - delta[:, None])
        if MASKED:
            is_open = tl.load(mask_base + (j + keys) * step, mask=inside, other=NEVER) == 0.0
            ds = tl.where(is_open[None, :], ds, 0.0)
        if CHECK:
            ds = tl.where((j + keys)[None, :] <= last[:, None], ds, 0.0)
        ds = ds.to(k0.dtype)
        dq0 = tl.dot(ds, k0, dq0, input_precision=PRECISION)
        if P1 > 0:
            dq1 = tl.dot(ds, k1, dq1, input_precision=PRECISION)
    return dq0, dq1


@triton.jit(do_not_specialize=NUMBERS)
def query_gradients(
    Q, K, V, G, OUT, LSE, DLSE, DELTA, DQ, MASK, TILES, JOBS, RUNS, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n,
    v_h, g_b, g_n, g_h, first_tile, n, m, h, mask_b, mask_h, scale, scale_log2, seed, threshold, gain,
    OPENS: tl.constexpr, CARRIES: tl.constexpr, ONE_RUN: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, HAS_DLSE: tl.constexpr, DROPS: tl.constexpr, NEGATES: tl.constexpr,
    ALIGN: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr
):
    """dq of a block of rows, added to what is there if it CARRIES; and delta = rowsum(g * out) - dlse."""
    job, batch, head, position, step, num_rows = place_rows(TILES, JOBS, first_tile)
    rows = tl.arange(0, BLOCK_M)
    inside = rows < num_rows
    wide_step = tl.cast(step, tl.int64)
    q_base = row_at(Q, batch, head, position, q_b, q_n, q_h, ALIGN)
    g_base = row_at(G, batch, head, position, g_b, g_n, g_h, ALIGN)
    q_step = row_step(step, q_n, ALIGN)
    g_step = row_step(step, g_n, ALIGN)
    out_at = ((batch * n + position) * h + head) * D
    out_step = wide_step * h * D
    q0 = load_rows(q_base, q_step, rows, inside, 0, P0, D, True, WIDE)
    g0 = load_rows(g_base, g_step, rows, inside, 0, P0, D, True, WIDE)
    out = load_rows(OUT + out_at, out_step, rows, inside, 0, P0, D, True, WIDE)
    delta = tl.sum(out.to(tl.float32) * g0.to(tl.float32), 1)
    q1 = q0
    g1 = g0
    if P1 > 0:
        q1 = load_rows(q_base, q_step, rows, inside, P0, P1, D, True, WIDE)
        g1 = load_rows(g_base, g_step, rows, inside, P0, P1, D, True, WIDE)
        out = load_rows(OUT + out_at, out_step, rows, inside, P0, P1, D, True, WIDE)
        delta += tl.sum(out.to(tl.float32) * g1.to(tl.float32), 1)
    if NEGATES:
        q0 = -q0
        q1 = -q1
    scalars = (batch * h + head) * n + position + rows * step
    if HAS_DLSE:
        delta = delta - tl.load(DLSE + scalars, mask=inside, other=0.0)
    tl.store(DELTA + scalars, delta, mask=inside)
    lse = tl.load(LSE + scalars, mask=inside, other=float("inf"))
    lse2 = tl.where(lse == NEVER, float("inf"), lse * LOG2E)
    row_hash = rows
    if DROPS:
        row_hash = hash_rows((batch * n + position + rows * wide_step) * h + head, seed)
    dq0 = tl.zeros([BLOCK_M, P0], tl.float32)
    dq1 = tl.zeros([BLOCK_M, P1 if P1 > 0 else 16], tl.float32)
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
        for CHECK in tl.static_range(2):
            dq0, dq1 = _fold_dq(
                dq0, dq1, q0, q1, g0, g1, lse2, delta, k_base, v_base, mask_base, k_step, v_step, key_step,
                by_all if CHECK else 0, by_any if CHECK else by_all, count, last, weight, row_hash, start,
                scale_log2, threshold, gain, CHECK, MASKED, DROPS, D, P0, P1, BLOCK_N, PRECISION, WIDE
            )
    dq0 = dq0 * scale
    dq1 = dq1 * scale
    if CARRIES:
        met = inside & (tl.load(job + OPENS) == 0)
        dq0 += load_rows(DQ + out_at, out_step, rows, met, 0, P0, D, True, WIDE).to(tl.float32)
        if P1 > 0:
            dq1 += load_rows(DQ + out_at, out_step, rows, met, P0, P1, D, True, WIDE).to(tl.float32)
    store_rows(DQ + out_at, out_step, rows, inside, dq0, 0, P0, D, WIDE)
    if P1 > 0:
        store_rows(DQ + out_at, out_step, rows, inside, dq1, P0, P1, D, WIDE)


@triton.jit
def _fold_dkdv(
    dk0, dk1, dv0, dv1, k0, k1, v0, v1, q_base, g_base, lse_base, delta_base, q_step, g_step, step, low, high,
    skip_from, skip, count, first, weight, key_hash, row_number, h, seed, scale_log2, threshold, gain,
    CHECK: tl.constexpr, DROPS: tl.constexpr, NEGATES: tl.constexpr, D: tl.constexpr, P0: tl.constexpr,
    P1: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr
):
    """Query rows low .. high, `skip` of them from `skip_from` on left out; key i is seen from first[i] on."""
    rows = tl.arange(0, BLOCK_M)
    for i in tl.range(low, high, BLOCK_M):
        at = i
        if CHECK:
            at = tl.where(i >= skip_from, i + skip, i)
        inside = at + rows < count
        q_at = q_base + at * q_step
        g_at = g_base + at * g_step
        q0 = load_rows(q_at, q_step, rows, inside, 0, P0, D, CHECK, WIDE)
        g0 = load_rows(g_at, g_step, rows, inside, 0, P0, D, CHECK, WIDE)
        if CHECK:
            lse = tl.load(lse_base + (at + rows) * step, mask=inside, other=float("inf"))
            delta = tl.load(delta_base + (at + rows) * step, mask=inside, other=0.0)
        else:
            lse = tl.load(lse_base + (at + rows) * step)
            delta = tl.load(delta_base + (at + rows) * step)
        lse2 = tl.where(lse == NEVER, float("inf"), lse * LOG2E)
        if NEGATES:
            q0 = -q0
        scores = tl.dot(k0, tl.trans(q0), input_precision=PRECISION)
        dp = tl.dot(v0, tl.trans(g0), input_precision=PRECISION)
        if P1 > 0:
            q1 = load_rows(q_at, q_step, rows, inside, P0, P1, D, CHECK, WIDE)
            g1 = load_rows(g_at, g_step, rows, inside, P0, P1, D, CHECK, WIDE)
            if NEGATES:
                q1 = -q1
            scores = tl.dot(k1, tl.trans(q1), scores, input_precision=PRECISION)
            dp = tl.dot(v1, tl.trans(g1), dp, input_precision=PRECISION)
        p = tl.exp2(scores * scale_log2 - (lse2 - weight)[None, :])
        if CHECK:
            seen = (at + rows)[None, :] >= first[:, None]
            p = tl.where(seen, p, 0.0)
        used = p
        if DROPS:
            number = row_number + (at + rows) * tl.cast(step, tl.int64) * h
            kept = is_kept(hash_rows(number, seed)[None, :], key_hash[:, None], threshold)
            used = tl.where(kept, p * gain, 0.0)
            dp = tl.where(kept, dp * gain, 0.0)
        used = used.to(g0.dtype)
        dv0 = tl.dot(used, g0, dv0, input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        if CHECK:
            ds = tl.where(seen, ds, 0.0)
        ds = ds.to(q0.dtype)
        dk0 = tl.dot(ds, q0, dk0, input_precision=PRECISION)
        if P1 > 0:
            dv1 = tl.dot(used, g1, dv1, input_precision=PRECISION)
            dk1 = tl.dot(ds, q1, dk1, input_precision=PRECISION)
    return dk0, dk1, dv0, dv1


@triton.jit(do_not_specialize=NUMBERS)
def key_gradients(
    Q, K, V, G, LSE, DELTA, DK, DV, MASK, TILES, KEYS, VISITS, JOBS, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n,
    v_h, g_b, g_n, g_h, first_tile, n, m, h, h_kv, mask_b, mask_h, scale, scale_log2, seed, threshold, gain,
    CARRIES: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr,
    NEGATES: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr, P0: tl.constexpr,
    P1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr
):
    """dk and dv of a block of the keys of a run, from all jobs of a branch that attend it.

    KEYS: batch, key head, start, step, count, first visit, visits, opens. VISITS: job, multiplicity.
    """
    tile = TILES + (first_tile + tl.program_id(0)) * 2
    owner = KEYS + tl.load(tile) * 8
    key0 = tl.load(tile + 1)
    batch = tl.cast(tl.load(owner), tl.int64)
    kv = tl.cast(tl.load(owner + 1), tl.int64)
    key_step = tl.load(owner + 3)
    key_start = tl.load(owner + 2) + key0 * key_step
    num_keys = tl.minimum(tl.load(owner + 4) - key0, BLOCK_N)
    keys = tl.arange(0, BLOCK_N)
    inside = keys < num_keys
    positions = key_start + keys * key_step
    k_base = row_at(K, batch, kv, key_start, k_b, k_n, k_h, ALIGN)
    v_base = row_at(V, batch, kv, key_start, v_b, v_n, v_h, ALIGN)
    k_step = row_step(key_step, k_n, ALIGN)
    v_step = row_step(key_step, v_n, ALIGN)
    k0 = load_rows(k_base, k_step, keys, inside, 0, P0, D, True, WIDE)
    v0 = load_rows(v_base, v_step, keys, inside, 0, P0, D, True, WIDE)
    k1 = k0
    v1 = v0
    dk0 = tl.zeros([BLOCK_N, P0], tl.float32)
    dv0 = tl.zeros([BLOCK_N, P0], tl.float32)
    dk1 = tl.zeros([BLOCK_N, P1 if P1 > 0 else 16], tl.float32)
    dv1 = tl.zeros([BLOCK_N, P1 if P1 > 0 else 16], tl.float32)
    if P1 > 0:
        k1 = load_rows(k_base, k_step, keys, inside, P0, P1, D, True, WIDE)
        v1 = load_rows(v_base, v_step, keys, inside, P0, P1, D, True, WIDE)
    key_hash = keys
    if DROPS:
        key_hash = hash_keys(positions)
    visit = VISITS + tl.load(owner + 5) * 2
    for _ in tl.range(0, tl.load(owner + 6)):
        job = JOBS + tl.load(visit) * JOB
        weight = tl.log2(tl.load(visit + 1).to(tl.float32))
        visit += 2
        start = tl.load(job + START)
        step = tl.load(job + STEP)
        count = tl.load(job + COUNT)
        low = 0  # the first row that sees any of the keys, and the first that sees all of them
        full = 0
        first = tl.zeros([BLOCK_N], tl.int32)
        if CAUSAL:  # noqa: SIM102, the one is known when it is compiled
            if tl.load(job + CAUSAL_JOB) != 0:
                low = rows_before(key_start, start, step, count)
                full = rows_before(key_start + (num_keys - 1) * key_step, start, step, count)
                first = rows_before(positions, start, step, count)
        # Whole tiles of rows that see all keys lie between two ranges that need a check.
        full = tl.minimum(low + (full - low + BLOCK_M - 1) // BLOCK_M * BLOCK_M, count)
        skip = (count - full) // BLOCK_M * BLOCK_M
        q_step = row_step(step, q_n, ALIGN)
        g_step = row_step(step, g_n, ALIGN)
        for number in tl.range(0, tl.load(job + HEADS)):
            head = tl.cast(tl.load(job + HEAD) + number * tl.load(job + HEAD_STEP), tl.int64)
            q_base = row_at(Q, batch, head, start, q_b, q_n, q_h, ALIGN)
            g_base = row_at(G, batch, head, start, g_b, g_n, g_h, ALIGN)
            scalars = (batch * h + head) * n + start
            row_number = (batch * n + start) * h + head
            for CHECK in tl.static_range(2):
                dk0, dk1, dv0, dv1 = _fold_dkdv(
                    dk0, dk1, dv0, dv1, k0, k1, v0, v1, q_base, g_base, LSE + scalars, DELTA + scalars,
                    q_step, g_step, step, low if CHECK else full, count - skip if CHECK else full + skip,
                    full, skip, count, first, weight, key_hash, row_number, h, seed, scale_log2, threshold,
                    gain, CHECK, DROPS, NEGATES, D, P0, P1, BLOCK_M, PRECISION, WIDE
                )
    dk0 = dk0 * scale
    dk1 = dk1 * scale
    at = ((batch * m + key_start) * h_kv + kv) * D
    out_step = tl.cast(key_step, tl.int64) * h_kv * D
    if MASKED:
        is_open = tl.load(MASK + batch * mask_b + kv * mask_h + positions, mask=inside, other=NEVER) == 0.0
        dk0 = tl.where(is_open[:, None], dk0, 0.0)
        dv0 = tl.where(is_open[:, None], dv0, 0.0)
        dk1 = tl.where(is_open[:, None], dk1, 0.0)
        dv1 = tl.where(is_open[:, None], dv1, 0.0)
    if CARRIES:
        met = inside & (tl.load(owner + 7) == 0)
        dk0 += load_rows(DK + at, out_step, keys, met, 0, P0, D, True, WIDE).to(tl.float32)
        dv0 += load_rows(DV + at, out_step, keys, met, 0, P0, D, True, WIDE).to(tl.float32)
        if P1 > 0:
            dk1 += load_rows(DK + at, out_step, keys, met, P0, P1, D, True, WIDE).to(tl.float32)
            dv1 += load_rows(DV + at, out_step, keys, met, P0, P1, D, True, WIDE).to(tl.float32)
    store_rows(DK + at, out_step, keys, inside, dk0, 0, P0, D, WIDE)
    store_rows(DV + at, out_step, keys, inside, dv0, 0, P0, D, WIDE)
    if P1 > 0:
        store_rows(DK + at, out_step, keys, inside, dk1, P0, P1, D, WIDE)
        store_rows(DV + at, out_step, keys, inside, dv1, P0, P1, D, WIDE)
