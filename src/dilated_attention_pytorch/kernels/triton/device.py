"""The programs that run on a GPU, or in Triton's interpreter: forward, dq, and dk with dv.

A program of the first two takes a block of the query rows of a job and walks its key runs; one of the last
takes a block of the keys of a run and walks the jobs that attend it, so that nothing needs atomics. Rows are
read in place, whatever their distance. Tables hold int32, offsets of rows are of 64 bits, those within a tile
of 32 unless `WIDE`. Strides come in units of `ALIGN` elements: so many can then be loaded at once. Heads of
`D` features are computed in parts of `P0` and `P1` (0: none).
"""

import triton
import triton.language as tl

from ...plan.runs import COLUMN

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEVER = tl.constexpr(float("-inf"))
JOB = tl.constexpr(len(COLUMN))
BATCH, HEAD, HEADS, HEAD_STEP, KV, START, STEP, COUNT, FIRST_RUN, NUM_RUNS, CAUSAL_JOB, NULL_KEYS = (
    tl.constexpr(COLUMN[name])
    for name in (
        "batch",
        "head",
        "heads",
        "head_step",
        "kv",
        "start",
        "step",
        "count",
        "first_run",
        "num_runs",
        "causal",
        "phantom",
    )
)
NUMBERS = (  # of other values, or of the value 1, no other programs are made
    *("first_tile", "n", "h", "seed", "threshold"),
    *(f"{tensor}_{axis}" for tensor in "qkvg" for axis in "bnh"),
)


@triton.jit
def _load(
    base,
    step,
    rows,
    inside,
    AT: tl.constexpr,
    PART: tl.constexpr,
    D: tl.constexpr,
    CHECK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Features AT, AT + 1, ... of rows that are `step` elements apart; zeros where there are none."""
    pointers = base + _offsets(step, rows, AT, PART, WIDE)
    if CHECK:
        if AT + PART <= D:
            return tl.load(pointers, mask=inside[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=inside[:, None] & _features(AT, PART, D), other=0.0)
    else:
        if AT + PART <= D:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=_features(AT, PART, D), other=0.0)


@triton.jit
def _store(
    base,
    step,
    rows,
    inside,
    x,
    AT: tl.constexpr,
    PART: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
):
    kept = inside[:, None] & _features(AT, PART, D)
    tl.store(base + _offsets(step, rows, AT, PART, WIDE), x.to(base.dtype.element_ty), mask=kept)


@triton.jit
def _offsets(step, rows, AT: tl.constexpr, PART: tl.constexpr, WIDE: tl.constexpr):
    columns = AT + tl.arange(0, PART)
    if WIDE:
        return rows[:, None] * tl.cast(step, tl.int64) + columns[None, :]
    else:
        return rows[:, None] * tl.cast(step, tl.int32) + columns[None, :]


@triton.jit
def _features(AT: tl.constexpr, PART: tl.constexpr, D: tl.constexpr):
    return (AT + tl.arange(0, PART) < D)[None, :]


@triton.jit
def _mix(x):
    """SplitMix64, as in the eager kernel."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _row_hash(number, seed):
    return _mix(tl.cast(number + tl.cast(seed, tl.int64), tl.uint64))


@triton.jit
def _key_hash(number):
    return _mix(tl.cast(~tl.cast(number, tl.int64), tl.uint64))


@triton.jit
def _is_kept(bits, threshold):
    """Whether dropout keeps the pairs of a row and a key whose hashes add up to `bits`, in all passes alike."""
    bits = (bits ^ (bits >> 31)) * 0xBF58476D1CE4E5B9
    return tl.cast(bits >> 33, tl.int64) >= tl.cast(threshold, tl.int64)


@triton.jit
def _rows_before(position, start, step, count):
    """How many rows of a run lie before a position."""
    return tl.minimum(tl.maximum(position - start + step - 1, 0) // step, count)


@triton.jit
def _fold(
    acc0,
    acc1,
    total,
    top,
    q0,
    q1,
    k_base,
    v_base,
    mask_base,
    k_step,
    v_step,
    step,
    low,
    high,
    count,
    last,
    weight,
    row_hash,
    key_start,
    scale_log2,
    threshold,
    gain,
    CHECK: tl.constexpr,
    MASKED: tl.constexpr,
    DROPS: tl.constexpr,
    D: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The online softmax over keys low .. high of a run; CHECK: row i sees those up to last[i]."""
    keys = tl.arange(0, BLOCK_N)
    k_at = k_base + low * k_step
    v_at = v_base + low * v_step
    for j in tl.range(low, high, BLOCK_N):
        inside = j + keys < count
        k0 = _load(k_at, k_step, keys, inside, 0, P0, D, CHECK, WIDE)
        scores = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        if P1 > 0:
            k1 = _load(k_at, k_step, keys, inside, P0, P1, D, CHECK, WIDE)
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
            bits = row_hash[:, None] + _key_hash(key_start + (j + keys) * step)[None, :]
            kept = _is_kept(bits, threshold)
            p = tl.where(kept, p * gain, 0.0)
        v0 = _load(v_at, v_step, keys, inside, 0, P0, D, CHECK, WIDE)
        acc0 = acc0 * alpha[:, None]
        p = p.to(v0.dtype)
        acc0 = tl.dot(p, v0, acc0, input_precision=PRECISION)
        if P1 > 0:
            v1 = _load(v_at, v_step, keys, inside, P0, P1, D, CHECK, WIDE)
            acc1 = acc1 * alpha[:, None]
            acc1 = tl.dot(p, v1, acc1, input_precision=PRECISION)
        k_at += BLOCK_N * k_step
        v_at += BLOCK_N * v_step
    return acc0, acc1, total, top


@triton.jit
def _is_odd(
    v_base,
    v_step,
    low,
    high,
    AT: tl.constexpr,
    PART: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Whether an infinity or NaN is among values low .. high: times 0 they are NaN."""
    keys = tl.arange(0, BLOCK_N)
    found = tl.zeros([BLOCK_N], tl.float32)
    for j in tl.range(low, high, BLOCK_N):
        v = _load(v_base + j * v_step, v_step, keys, j + keys < high, AT, PART, D, True, WIDE)
        found += tl.sum(v.to(tl.float32) * 0.0, 1)
    return tl.sum(found, 0) != 0.0


@triton.jit
def _fold_singly(
    acc0,
    acc1,
    total,
    top,
    q0,
    q1,
    k_base,
    v_base,
    mask_base,
    k_step,
    v_step,
    step,
    low,
    high,
    last,
    weight,
    row_hash,
    key_start,
    scale_log2,
    threshold,
    gain,
    MASKED: tl.constexpr,
    DROPS: tl.constexpr,
    D: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
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
            p = tl.where(_is_kept(row_hash + _key_hash(key_start + j * step), threshold), p * gain, 0.0)
        acc0 = acc0 * alpha[:, None] + tl.where(seen[:, None], p[:, None] * v[None, :], 0.0)
        if P1 > 0:
            v = tl.load(v_base + j * v_step + columns1, mask=columns1 < D, other=0.0).to(tl.float32)
            acc1 = acc1 * alpha[:, None] + tl.where(seen[:, None], p[:, None] * v[None, :], 0.0)
    return acc0, acc1, total, top


@triton.jit(do_not_specialize=NUMBERS)
def attend(
    Q,
    K,
    V,
    OUT,
    LSE,
    MASK,
    TILES,
    JOBS,
    RUNS,
    q_b,
    q_n,
    q_h,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    first_tile,
    n,
    h,
    scale_log2,
    seed,
    threshold,
    gain,
    OPENS: tl.constexpr,
    CARRIES: tl.constexpr,
    ONE_RUN: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    PHANTOM: tl.constexpr,
    DROPS: tl.constexpr,
    NEGATES: tl.constexpr,
    ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    D: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out and lse of a block of rows; where they go on, CARRIES, with what the column OPENS does not begin."""
    tile = TILES + (first_tile + tl.program_id(0)) * 3
    job = JOBS + tl.load(tile) * JOB
    row0 = tl.load(tile + 2)
    batch = tl.cast(tl.load(job + BATCH), tl.int64)
    head = tl.cast(tl.load(job + HEAD) + tl.load(tile + 1) * tl.load(job + HEAD_STEP), tl.int64)
    step = tl.load(job + STEP)
    position = tl.load(job + START) + row0 * step
    num_rows = tl.load(job + COUNT) - row0
    rows = tl.arange(0, BLOCK_M)
    inside = rows < num_rows
    wide_step = tl.cast(step, tl.int64)
    q_base = Q + batch * (q_b * ALIGN) + head * (q_h * ALIGN) + position * tl.cast(q_n * ALIGN, tl.int64)
    q_step = wide_step * (q_n * ALIGN)
    q0 = _load(q_base, q_step, rows, inside, 0, P0, D, True, WIDE)
    q1 = q0
    if P1 > 0:
        q1 = _load(q_base, q_step, rows, inside, P0, P1, D, True, WIDE)
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
        acc0 = _load(out_base, out_step, rows, met, 0, P0, D, True, WIDE).to(tl.float32)
        if P1 > 0:
            acc1 = _load(out_base, out_step, rows, met, P0, P1, D, True, WIDE).to(tl.float32)
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
        row_hash = _row_hash((batch * n + position + rows * wide_step) * h + head, seed)
    kv = tl.cast(tl.load(job + KV), tl.int64)
    k_head = K + batch * (k_b * ALIGN) + kv * (k_h * ALIGN)
    v_head = V + batch * (v_b * ALIGN) + kv * (v_h * ALIGN)
    run = RUNS + tl.load(job + FIRST_RUN) * 4
    is_causal = tl.load(job + CAUSAL_JOB) != 0
    final = position + (tl.minimum(num_rows, BLOCK_M) - 1) * step
    for _ in tl.range(0, 1 if ONE_RUN else tl.load(job + NUM_RUNS)):
        start = tl.load(run)
        key_step = tl.load(run + 1)
        count = tl.load(run + 2)
        weight = tl.log2(tl.load(run + 3).to(tl.float32))
        run += 4
        by_all = count  # keys that all rows see, and that any row sees
        by_any = count
        last = tl.zeros([BLOCK_M], tl.int32) + (count - 1)
        if CAUSAL:
            if is_causal:
                by_all = _rows_before(position + 1, start, key_step, count)
                by_any = _rows_before(final + 1, start, key_step, count)
                last = _rows_before(position + rows * step + 1, start, key_step, count) - 1
        by_all = by_all // BLOCK_N * BLOCK_N
        k_base = k_head + start * tl.cast(k_n * ALIGN, tl.int64)
        v_base = v_head + start * tl.cast(v_n * ALIGN, tl.int64)
        k_step = tl.cast(key_step, tl.int64) * (k_n * ALIGN)
        v_step = tl.cast(key_step, tl.int64) * (v_n * ALIGN)
        mask_base = MASK + batch * n + start
        even = by_any
        if CAUSAL:
            is_odd = _is_odd(v_base, v_step, by_all, by_any, 0, P0, D, BLOCK_N, WIDE)
            if P1 > 0:
                is_odd |= _is_odd(v_base, v_step, by_all, by_any, P0, P1, D, BLOCK_N, WIDE)
            even = tl.where(is_odd, by_all, by_any)
        for CHECK in tl.static_range(2):
            acc0, acc1, total, top = _fold(
                acc0,
                acc1,
                total,
                top,
                q0,
                q1,
                k_base,
                v_base,
                mask_base,
                k_step,
                v_step,
                key_step,
                by_all if CHECK else 0,
                even if CHECK else by_all,
                count,
                last,
                weight,
                row_hash,
                start,
                scale_log2,
                threshold,
                gain,
                CHECK,
                MASKED,
                DROPS,
                D,
                P0,
                P1,
                BLOCK_N,
                PRECISION,
                WIDE,
            )
        if CAUSAL:
            acc0, acc1, total, top = _fold_singly(
                acc0,
                acc1,
                total,
                top,
                q0,
                q1,
                k_base,
                v_base,
                mask_base,
                k_step,
                v_step,
                key_step,
                even,
                by_any,
                last,
                weight,
                row_hash,
                start,
                scale_log2,
                threshold,
                gain,
                MASKED,
                DROPS,
                D,
                P0,
                P1,
            )
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    tl.store(lse_pointers, tl.where(is_empty, NEVER, (top + tl.log2(total)) * LN2), mask=inside)
    _store(out_base, out_step, rows, inside, acc0 / total[:, None], 0, P0, D, WIDE)
    if P1 > 0:
        _store(out_base, out_step, rows, inside, acc1 / total[:, None], P0, P1, D, WIDE)


@triton.jit
def _fold_dq(
    dq0,
    dq1,
    q0,
    q1,
    g0,
    g1,
    lse2,
    delta,
    k_base,
    v_base,
    mask_base,
    k_step,
    v_step,
    step,
    low,
    high,
    count,
    last,
    weight,
    row_hash,
    key_start,
    scale_log2,
    threshold,
    gain,
    CHECK: tl.constexpr,
    MASKED: tl.constexpr,
    DROPS: tl.constexpr,
    D: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    keys = tl.arange(0, BLOCK_N)
    for j in tl.range(low, high, BLOCK_N):
        inside = j + keys < count
        k_at = k_base + j * k_step
        v_at = v_base + j * v_step
        k0 = _load(k_at, k_step, keys, inside, 0, P0, D, CHECK, WIDE)
        v0 = _load(v_at, v_step, keys, inside, 0, P0, D, CHECK, WIDE)
        scores = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        dp = tl.dot(g0, tl.trans(v0), input_precision=PRECISION)
        if P1 > 0:
            k1 = _load(k_at, k_step, keys, inside, P0, P1, D, CHECK, WIDE)
            v1 = _load(v_at, v_step, keys, inside, P0, P1, D, CHECK, WIDE)
            scores = tl.dot(q1, tl.trans(k1), scores, input_precision=PRECISION)
            dp = tl.dot(g1, tl.trans(v1), dp, input_precision=PRECISION)
        p = tl.exp2(scores * scale_log2 - (lse2 - weight)[:, None])
        if DROPS:
            bits = row_hash[:, None] + _key_hash(key_start + (j + keys) * step)[None, :]
            kept = _is_kept(bits, threshold)
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
    Q,
    K,
    V,
    G,
    OUT,
    LSE,
    DLSE,
    DELTA,
    DQ,
    MASK,
    TILES,
    JOBS,
    RUNS,
    q_b,
    q_n,
    q_h,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    g_b,
    g_n,
    g_h,
    first_tile,
    n,
    h,
    scale,
    scale_log2,
    seed,
    threshold,
    gain,
    OPENS: tl.constexpr,
    CARRIES: tl.constexpr,
    ONE_RUN: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    DROPS: tl.constexpr,
    NEGATES: tl.constexpr,
    ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    D: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq of a block of rows, added to what is there if it CARRIES; and delta = rowsum(g * out) - dlse."""
    tile = TILES + (first_tile + tl.program_id(0)) * 3
    job = JOBS + tl.load(tile) * JOB
    row0 = tl.load(tile + 2)
    batch = tl.cast(tl.load(job + BATCH), tl.int64)
    head = tl.cast(tl.load(job + HEAD) + tl.load(tile + 1) * tl.load(job + HEAD_STEP), tl.int64)
    step = tl.load(job + STEP)
    position = tl.load(job + START) + row0 * step
    num_rows = tl.load(job + COUNT) - row0
    rows = tl.arange(0, BLOCK_M)
    inside = rows < num_rows
    wide_step = tl.cast(step, tl.int64)
    q_base = Q + batch * (q_b * ALIGN) + head * (q_h * ALIGN) + position * tl.cast(q_n * ALIGN, tl.int64)
    g_base = G + batch * (g_b * ALIGN) + head * (g_h * ALIGN) + position * tl.cast(g_n * ALIGN, tl.int64)
    q_step = wide_step * (q_n * ALIGN)
    g_step = wide_step * (g_n * ALIGN)
    out_at = ((batch * n + position) * h + head) * D
    out_step = wide_step * h * D
    q0 = _load(q_base, q_step, rows, inside, 0, P0, D, True, WIDE)
    g0 = _load(g_base, g_step, rows, inside, 0, P0, D, True, WIDE)
    out = _load(OUT + out_at, out_step, rows, inside, 0, P0, D, True, WIDE)
    delta = tl.sum(out.to(tl.float32) * g0.to(tl.float32), 1)
    q1 = q0
    g1 = g0
    if P1 > 0:
        q1 = _load(q_base, q_step, rows, inside, P0, P1, D, True, WIDE)
        g1 = _load(g_base, g_step, rows, inside, P0, P1, D, True, WIDE)
        out = _load(OUT + out_at, out_step, rows, inside, P0, P1, D, True, WIDE)
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
        row_hash = _row_hash((batch * n + position + rows * wide_step) * h + head, seed)
    dq0 = tl.zeros([BLOCK_M, P0], tl.float32)
    dq1 = tl.zeros([BLOCK_M, P1 if P1 > 0 else 16], tl.float32)
    kv = tl.cast(tl.load(job + KV), tl.int64)
    k_head = K + batch * (k_b * ALIGN) + kv * (k_h * ALIGN)
    v_head = V + batch * (v_b * ALIGN) + kv * (v_h * ALIGN)
    run = RUNS + tl.load(job + FIRST_RUN) * 4
    is_causal = tl.load(job + CAUSAL_JOB) != 0
    final = position + (tl.minimum(num_rows, BLOCK_M) - 1) * step
    for _ in tl.range(0, 1 if ONE_RUN else tl.load(job + NUM_RUNS)):
        start = tl.load(run)
        key_step = tl.load(run + 1)
        count = tl.load(run + 2)
        weight = tl.log2(tl.load(run + 3).to(tl.float32))
        run += 4
        by_all = count
        by_any = count
        last = tl.zeros([BLOCK_M], tl.int32) + (count - 1)
        if CAUSAL:
            if is_causal:
                by_all = _rows_before(position + 1, start, key_step, count)
                by_any = _rows_before(final + 1, start, key_step, count)
                last = _rows_before(position + rows * step + 1, start, key_step, count) - 1
        by_all = by_all // BLOCK_N * BLOCK_N
        k_base = k_head + start * tl.cast(k_n * ALIGN, tl.int64)
        v_base = v_head + start * tl.cast(v_n * ALIGN, tl.int64)
        k_step = tl.cast(key_step, tl.int64) * (k_n * ALIGN)
        v_step = tl.cast(key_step, tl.int64) * (v_n * ALIGN)
        mask_base = MASK + batch * n + start
        for CHECK in tl.static_range(2):
            dq0, dq1 = _fold_dq(
                dq0,
                dq1,
                q0,
                q1,
                g0,
                g1,
                lse2,
                delta,
                k_base,
                v_base,
                mask_base,
                k_step,
                v_step,
                key_step,
                by_all if CHECK else 0,
                by_any if CHECK else by_all,
                count,
                last,
                weight,
                row_hash,
                start,
                scale_log2,
                threshold,
                gain,
                CHECK,
                MASKED,
                DROPS,
                D,
                P0,
                P1,
                BLOCK_N,
                PRECISION,
                WIDE,
            )
    dq0 = dq0 * scale
    dq1 = dq1 * scale
    if CARRIES:
        met = inside & (tl.load(job + OPENS) == 0)
        dq0 += _load(DQ + out_at, out_step, rows, met, 0, P0, D, True, WIDE).to(tl.float32)
        if P1 > 0:
            dq1 += _load(DQ + out_at, out_step, rows, met, P0, P1, D, True, WIDE).to(tl.float32)
    _store(DQ + out_at, out_step, rows, inside, dq0, 0, P0, D, WIDE)
    if P1 > 0:
        _store(DQ + out_at, out_step, rows, inside, dq1, P0, P1, D, WIDE)


@triton.jit
def _fold_dkdv(
    dk0,
    dk1,
    dv0,
    dv1,
    k0,
    k1,
    v0,
    v1,
    q_base,
    g_base,
    lse_base,
    delta_base,
    q_step,
    g_step,
    step,
    low,
    high,
    skip_from,
    skip,
    count,
    first,
    weight,
    key_hash,
    row_number,
    h,
    seed,
    scale_log2,
    threshold,
    gain,
    CHECK: tl.constexpr,
    DROPS: tl.constexpr,
    NEGATES: tl.constexpr,
    D: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Query rows low .. high, without `skip` of them from `skip_from` on; CHECK: key i is seen from first[i] on."""
    rows = tl.arange(0, BLOCK_M)
    for i in tl.range(low, high, BLOCK_M):
        at = i
        if CHECK:
            at = tl.where(i >= skip_from, i + skip, i)
        inside = at + rows < count
        q_at = q_base + at * q_step
        g_at = g_base + at * g_step
        q0 = _load(q_at, q_step, rows, inside, 0, P0, D, CHECK, WIDE)
        g0 = _load(g_at, g_step, rows, inside, 0, P0, D, CHECK, WIDE)
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
            q1 = _load(q_at, q_step, rows, inside, P0, P1, D, CHECK, WIDE)
            g1 = _load(g_at, g_step, rows, inside, P0, P1, D, CHECK, WIDE)
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
            kept = _is_kept(key_hash[:, None] + _row_hash(number, seed)[None, :], threshold)
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
    Q,
    K,
    V,
    G,
    LSE,
    DELTA,
    DK,
    DV,
    MASK,
    TILES,
    KEYS,
    VISITS,
    JOBS,
    q_b,
    q_n,
    q_h,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    g_b,
    g_n,
    g_h,
    first_tile,
    n,
    h,
    h_kv,
    scale,
    scale_log2,
    seed,
    threshold,
    gain,
    CARRIES: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    DROPS: tl.constexpr,
    NEGATES: tl.constexpr,
    ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    D: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv of a block of the keys of a run, from all jobs of a branch that attend it.

    KEYS: batch, key head, start, step, count, first visit, number of visits, opens; VISITS: job, multiplicity.
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
    k_base = K + batch * (k_b * ALIGN) + kv * (k_h * ALIGN) + key_start * tl.cast(k_n * ALIGN, tl.int64)
    v_base = V + batch * (v_b * ALIGN) + kv * (v_h * ALIGN) + key_start * tl.cast(v_n * ALIGN, tl.int64)
    k_step = tl.cast(key_step, tl.int64) * (k_n * ALIGN)
    v_step = tl.cast(key_step, tl.int64) * (v_n * ALIGN)
    k0 = _load(k_base, k_step, keys, inside, 0, P0, D, True, WIDE)
    v0 = _load(v_base, v_step, keys, inside, 0, P0, D, True, WIDE)
    k1 = k0
    v1 = v0
    dk0 = tl.zeros([BLOCK_N, P0], tl.float32)
    dv0 = tl.zeros([BLOCK_N, P0], tl.float32)
    dk1 = tl.zeros([BLOCK_N, P1 if P1 > 0 else 16], tl.float32)
    dv1 = tl.zeros([BLOCK_N, P1 if P1 > 0 else 16], tl.float32)
    if P1 > 0:
        k1 = _load(k_base, k_step, keys, inside, P0, P1, D, True, WIDE)
        v1 = _load(v_base, v_step, keys, inside, P0, P1, D, True, WIDE)
    key_hash = keys
    if DROPS:
        key_hash = _key_hash(positions)
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
        if CAUSAL:
            if tl.load(job + CAUSAL_JOB) != 0:
                low = _rows_before(key_start, start, step, count)
                full = _rows_before(key_start + (num_keys - 1) * key_step, start, step, count)
                first = _rows_before(positions, start, step, count)
        # Whole tiles of rows that see all keys lie between two ranges that need a check.
        full = tl.minimum(low + (full - low + BLOCK_M - 1) // BLOCK_M * BLOCK_M, count)
        skip = (count - full) // BLOCK_M * BLOCK_M
        wide_step = tl.cast(step, tl.int64)
        q_step = wide_step * (q_n * ALIGN)
        g_step = wide_step * (g_n * ALIGN)
        for number in tl.range(0, tl.load(job + HEADS)):
            head = tl.cast(tl.load(job + HEAD) + number * tl.load(job + HEAD_STEP), tl.int64)
            q_base = Q + batch * (q_b * ALIGN) + head * (q_h * ALIGN) + start * tl.cast(q_n * ALIGN, tl.int64)
            g_base = G + batch * (g_b * ALIGN) + head * (g_h * ALIGN) + start * tl.cast(g_n * ALIGN, tl.int64)
            scalars = (batch * h + head) * n + start
            row_number = (batch * n + start) * h + head
            for CHECK in tl.static_range(2):
                dk0, dk1, dv0, dv1 = _fold_dkdv(
                    dk0,
                    dk1,
                    dv0,
                    dv1,
                    k0,
                    k1,
                    v0,
                    v1,
                    q_base,
                    g_base,
                    LSE + scalars,
                    DELTA + scalars,
                    q_step,
                    g_step,
                    step,
                    low if CHECK else full,
                    count - skip if CHECK else full + skip,
                    full,
                    skip,
                    count,
                    first,
                    weight,
                    key_hash,
                    row_number,
                    h,
                    seed,
                    scale_log2,
                    threshold,
                    gain,
                    CHECK,
                    DROPS,
                    NEGATES,
                    D,
                    P0,
                    P1,
                    BLOCK_M,
                    PRECISION,
                    WIDE,
                )
    dk0 = dk0 * scale
    dk1 = dk1 * scale
    at = ((batch * n + key_start) * h_kv + kv) * D
    out_step = tl.cast(key_step, tl.int64) * h_kv * D
    if MASKED:
        is_open = tl.load(MASK + batch * n + positions, mask=inside, other=NEVER) == 0.0
        dk0 = tl.where(is_open[:, None], dk0, 0.0)
        dv0 = tl.where(is_open[:, None], dv0, 0.0)
        dk1 = tl.where(is_open[:, None], dk1, 0.0)
        dv1 = tl.where(is_open[:, None], dv1, 0.0)
    if CARRIES:
        met = inside & (tl.load(owner + 7) == 0)
        dk0 += _load(DK + at, out_step, keys, met, 0, P0, D, True, WIDE).to(tl.float32)
        dv0 += _load(DV + at, out_step, keys, met, 0, P0, D, True, WIDE).to(tl.float32)
        if P1 > 0:
            dk1 += _load(DK + at, out_step, keys, met, P0, P1, D, True, WIDE).to(tl.float32)
            dv1 += _load(DV + at, out_step, keys, met, P0, P1, D, True, WIDE).to(tl.float32)
    _store(DK + at, out_step, keys, inside, dk0, 0, P0, D, WIDE)
    _store(DV + at, out_step, keys, inside, dv0, 0, P0, D, WIDE)
    if P1 > 0:
        _store(DK + at, out_step, keys, inside, dk1, P0, P1, D, WIDE)
        _store(DV + at, out_step, keys, inside, dv1, P0, P1, D, WIDE)
