"""What the programs for a GPU, or for Triton's interpreter, have in common.

A program of the forward pass or of dq takes a block of the query rows of a job and walks its key runs; one
of dk and dv takes a block of the keys of a run and walks the jobs that attend it, so that nothing needs
atomics. Rows are read in place, whatever their distance. Tables hold int32; offsets of rows are of 64 bits,
those within a tile of 32 unless `WIDE`. Strides come in units of `ALIGN` elements: so many can then be loaded
at once. Heads of `D` features are computed in parts of `P0` and `P1` (0: none).
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
        *("batch", "head", "heads", "head_step", "kv", "start", "step", "count"),
        *("first_run", "num_runs", "causal", "phantom"),
    )
)
NUMBERS = (  # of other values, or of the value 1, no other programs are made
    *("first_tile", "n", "m", "h", "h_kv", "mask_b", "mask_h", "seed", "threshold"),
    *(f"{tensor}_{axis}" for tensor in "qkvg" for axis in "bnh"),
)

# Lists of arguments are packed.
# fmt: off


@triton.jit
def load_rows(
    base, step, rows, inside, AT: tl.constexpr, PART: tl.constexpr, D: tl.constexpr, CHECK: tl.constexpr,
    WIDE: tl.constexpr
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
def store_rows(
    base, step, rows, inside, x, AT: tl.constexpr, PART: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr
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
def hash_rows(number, seed):
    return tl.cast(_mix(tl.cast(number + tl.cast(seed, tl.int64), tl.uint64)) >> 32, tl.uint32) | 1


@triton.jit
def hash_keys(number):
    """In 32 bits, as many as a GPU multiplies at once: every tile of keys is hashed again."""
    x = tl.cast(number, tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return (x ^ (x >> 16)) | 1


@triton.jit
def is_kept(row_hash, key_hash, threshold):
    """Whether dropout keeps a pair of a row and a key, in all passes alike, and as the eager kernel does."""
    return row_hash * key_hash >= tl.cast(threshold, tl.uint32) * 2


@triton.jit
def rows_before(position, start, step, count):
    """How many rows of a run lie before a position."""
    return tl.minimum(tl.maximum(position - start + step - 1, 0) // step, count)


@triton.jit
def row_at(x, batch, head, row, b, n, h, ALIGN: tl.constexpr):
    """Where a row begins."""
    offset = batch * tl.cast(b, tl.int64) + head * tl.cast(h, tl.int64) + row * tl.cast(n, tl.int64)
    return x + offset * ALIGN


@triton.jit
def row_step(step, n, ALIGN: tl.constexpr):
    """How many elements further the next row of a run begins."""
    return step * tl.cast(n, tl.int64) * ALIGN


@triton.jit
def place_rows(TILES, JOBS, first_tile):
    """The job and the rows of a program: batch, head, position of the first row, step, number of rows."""
    tile = TILES + (first_tile + tl.program_id(0)) * 3
    job = JOBS + tl.load(tile) * JOB
    row = tl.load(tile + 2)
    batch = tl.cast(tl.load(job + BATCH), tl.int64)
    head = tl.cast(tl.load(job + HEAD) + tl.load(tile + 1) * tl.load(job + HEAD_STEP), tl.int64)
    step = tl.load(job + STEP)
    return job, batch, head, tl.load(job + START) + row * step, step, tl.load(job + COUNT) - row


@triton.jit
def open_run(
    run, job, position, step, num_rows, batch, kv, m, K, V, MASK, k_b, k_n, k_h, v_b, v_n, v_h, mask_b,
    mask_h, CAUSAL: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """A run of keys, what rows see of it, and where its keys, values and mask begin.

    First start, step, count and log2 of its multiplicity; then how many keys all rows see, in whole tiles,
    how many any row sees, and the last one of each row.
    Runs of step 1 may be longer than the `m` keys that there are: a table then serves many numbers of keys.
    """
    start = tl.load(run)
    key_step = tl.load(run + 1)
    count = tl.minimum(tl.load(run + 2), tl.maximum(m - start, 0))
    weight = tl.log2(tl.load(run + 3).to(tl.float32))
    by_all = count
    by_any = count
    last = tl.zeros([BLOCK_M], tl.int32) + (count - 1)
    if CAUSAL:  # noqa: SIM102, the one is known when it is compiled
        if tl.load(job + CAUSAL_JOB) != 0:
            final = position + (tl.minimum(num_rows, BLOCK_M) - 1) * step
            by_all = rows_before(position + 1, start, key_step, count)
            by_any = rows_before(final + 1, start, key_step, count)
            last = rows_before(position + tl.arange(0, BLOCK_M) * step + 1, start, key_step, count) - 1
    k_base = row_at(K, batch, kv, start, k_b, k_n, k_h, ALIGN)
    v_base = row_at(V, batch, kv, start, v_b, v_n, v_h, ALIGN)
    k_step = row_step(key_step, k_n, ALIGN)
    v_step = row_step(key_step, v_n, ALIGN)
    by_all = by_all // BLOCK_N * BLOCK_N
    mask_base = MASK + batch * mask_b + kv * mask_h + start
    return start, key_step, count, weight, by_all, by_any, last, k_base, v_base, k_step, v_step, mask_base
