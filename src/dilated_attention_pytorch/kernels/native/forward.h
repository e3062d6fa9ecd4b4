/* Forward pass: each query row of a job meets all its keys in one online softmax.
 *
 * Scores are kept transposed (keys x queries): queries fill the lanes, so that the softmax needs no shuffles, and
 * keys and values are read by broadcast from rows that were gathered in whatever step they lie. */
#pragma once
#include "block.h"

#define ROWS 512 /* query rows for which a block of keys is gathered once */

/* Queries side by side in `vectors` vectors. */
typedef struct {
  int vectors;
  long first, rows;             /* rows of the job */
  int32_t earliest, latest;     /* positions of them */
  float *q, *out, *top, *total; /* transposed queries and sums; largest score and sum of each lane */
  int32_t* position;            /* of each lane */
} panel;

typedef struct {
  const call* a;
  panel panels[ROWS / VL + 2];
  int num_panels;
  block keys;
  float *scores, *row, *odd_values;
} work;

/* A panel meets the first `keys` keys of the block; `is_cut`: only those at or before each query's position. */
INL void meet(const int vectors, const work* w, const panel* p, long keys, int is_cut) {
  const block* b = &w->keys;
  const vf none = splat(-INFINITY);
  const long d = w->a->d, width = width_of(d);
  vf best[NV], top[NV], total[NV], shrink[NV];
  for (int j = 0; j < vectors; j++) best[j] = none;
  for (long t = 0; t < keys; t += MR) {
    vf acc[MR][NV];
    score_tile(vectors, p->q, b->keys + t * width, width, b->bias + t, d, acc);
    if (is_cut)
      for (int i = 0; i < MR; i++)
        for (int j = 0; j < vectors; j++)
          acc[i][j] = choose(*(const vi*)(p->position + j * VL) >= splat_int(b->position[t + i]), acc[i][j], none);
    UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < vectors; j++) {
      *(vf*)(w->scores + ((t + i) * vectors + j) * VL) = acc[i][j];
      best[j] = larger(best[j], acc[i][j]);
    }
  }
  int rises = 0;
  for (int j = 0; j < vectors; j++) {
    const vf old = *(vf*)(p->top + j * VL);
    vf now = larger(old, best[j]);
    rises |= any(now > old);
    now = larger(now, splat(-3.4e38f)); /* a row that has seen no key yet: -inf - -inf would be NaN */
    top[j] = now;
    shrink[j] = exp2_of(old - now);
    total[j] = *(vf*)(p->total + j * VL) * shrink[j];
    *(vf*)(p->top + j * VL) = now;
  }
  UNROLL for (int j = 0; j < vectors; j++) {
    vf even = total[j], odd = splat(0);
    float* s = w->scores + j * VL;
    for (long t = 0; t < keys; t += 2, s += 2 * vectors * VL) {
      const vf a = exp2_of(*(vf*)s - top[j]), b = exp2_of(*(vf*)(s + vectors * VL) - top[j]);
      *(vf*)s = a;
      *(vf*)(s + vectors * VL) = b;
      even += a;
      odd += b;
    }
    *(vf*)(p->total + j * VL) = even + odd;
  }
  for (long c = 0; c < d; c += MR)
    value_tile(vectors, p->out + c * vectors * VL, b->values + c, width, w->scores, keys, rises ? shrink : NULL);
}
FOR_VECTORS(meet, (const work* w, const panel* p, long keys, int is_cut), ARGUMENTS(w, p, keys, is_cut))

/* Values that are not finite: times 0 they would spoil the queries that do not see them. */
static void add_odd_values(const work* w, const panel* p, long keys) {
  const block* b = &w->keys;
  const long d = w->a->d;
  for (long t = 0; t < keys; t++)
    for (long c = 0; c < d && b->is_odd[t]; c++)
      for (int j = 0; j < p->vectors; j++) {
        vf* out = (vf*)(p->out + (c * p->vectors + j) * VL);
        const vf sum = *out + splat(w->odd_values[t * d + c]) * *(vf*)(w->scores + (t * p->vectors + j) * VL);
        *out = choose(*(const vi*)(p->position + j * VL) >= splat_int(b->position[t]), sum, *out);
      }
}

static void flush_forward(void* context, block* b) {
  work* w = context;
  const long d = w->a->d;
  int has_odd = 0;
  pad(b, d);
  for (long t = 0; t < b->num; t++)
    if (b->is_odd[t]) {
      has_odd = 1;
      memcpy(w->odd_values + t * d, b->values + t * width_of(d), d * 4);
      memset(b->values + t * width_of(d), 0, d * 4);
    }
  for (int i = 0; i < w->num_panels; i++) {
    const panel* p = w->panels + i;
    int is_cut;
    const long keys = visible(b, p->earliest, p->latest, &is_cut);
    if (!keys) continue;
    BY_VECTORS(meet, p->vectors)(w, p, round_up(keys, MR), is_cut);
    if (has_odd) add_odd_values(w, p, keys);
  }
  empty(b);
}

/* Queries and, where the softmax goes on, its state. */
static void open_panel(work* w, const int64_t* job, panel* p) {
  const call* a = w->a;
  const long d = a->d, lanes = p->vectors * VL;
  memset(p->out, 0, lanes * round_up(d, MR) * 4);
  for (long x0 = 0; x0 < lanes; x0 += VL) {
    const float* rows[VL];
    for (long x = x0; x < x0 + VL; x++) {
      float* row = w->row + (x - x0) * d;
      rows[x - x0] = row;
      p->top[x] = job[PHANTOM] ? 0 : -INFINITY; /* phantom keys have the score 0 */
      p->total[x] = (float)job[PHANTOM];
      p->position[x] = p->latest; /* also of lanes without a query: they must not cut a block */
      if (x >= p->rows) {
        memset(row, 0, d * 4);
        continue;
      }
      const long i = p->first + x;
      read_row(row, a->q.data, row_of(job, i, &a->q), d, a->dtype);
      p->position[x] = position_of(job, i);
      if (job[OPENS_QUERIES]) continue;
      const float lse = ((const float*)a->lse.data)[row_of(job, i, &a->lse)];
      if (lse == -INFINITY) continue;
      const float share = lse * LOG2_E;
      p->total[x] = job[PHANTOM] && share < 0 ? p->total[x] + exp2f(share) : 1 + (float)job[PHANTOM] * exp2f(-share);
      p->top[x] = job[PHANTOM] && share < 0 ? 0 : share;
      const float weight = p->top[x] == share ? 1 : exp2f(share);
      const float* out = (const float*)a->out.data + row_of(job, i, &a->out);
      for (long c = 0; c < d; c++) p->out[c * lanes + x] = out[c] * weight;
    }
    pack_transposed(p->q + x0, lanes, rows, d, a->scale * LOG2_E);
  }
}

static void close_panel(work* w, const int64_t* job, const panel* p) {
  const call* a = w->a;
  const long d = a->d, lanes = p->vectors * VL;
  for (long x0 = 0; x0 < p->rows; x0 += VL) {
    float* rows[VL];
    float factors[VL];
    for (long x = x0; x < x0 + VL; x++) {
      const float total = p->total[x];
      rows[x - x0] = w->row + (x - x0) * d;
      factors[x - x0] = total == 0 ? 0 : 1 / total;
      if (x < p->rows)
        ((float*)a->lse.data)[row_of(job, p->first + x, &a->lse)] = total == 0 ? -INFINITY : (p->top[x] + log2f(total)) * LN_2;
    }
    unpack_transposed(rows, p->out + x0, lanes, d, factors);
    for (long x = x0; x < x0 + VL && x < p->rows; x++)
      write_row(a->out.data, row_of(job, p->first + x, &a->out), rows[x - x0], d, a->dtype);
  }
}

static void forward(const call* a, const task* t, char* memory) {
  const long d = a->d;
  const int64_t* job = a->jobs + t->job * NUM_COLUMNS;
  work* w = (work*)memory;
  float* next = (float*)(memory + round_up(sizeof(work), 64));
  w->a = a;
  w->keys.keys = take(&next, BLOCK * width_of(d));
  w->keys.values = take(&next, BLOCK * width_of(d));
  w->scores = take(&next, BLOCK * LANES);
  w->row = take(&next, VL * d);
  w->odd_values = take(&next, BLOCK * d);
  w->num_panels = 0;
  empty(&w->keys);
  for (long done = 0; done < t->rows; w->num_panels++) {
    panel* p = w->panels + w->num_panels;
    p->vectors = next_vectors((t->rows - done + VL - 1) / VL);
    const long lanes = p->vectors * VL;
    p->first = t->first + done;
    p->rows = t->rows - done < lanes ? t->rows - done : lanes;
    p->q = take(&next, lanes * d);
    p->out = take(&next, lanes * round_up(d, MR));
    p->top = take(&next, lanes);
    p->total = take(&next, lanes);
    p->position = (int32_t*)take(&next, lanes);
    extent(job, p->first, p->rows, &p->earliest, &p->latest);
    open_panel(w, job, p);
    done += p->rows;
  }
  int32_t earliest, latest;
  extent(job, t->first, t->rows, &earliest, &latest);
  for (long i = 0; i < job[NUM_RUNS]; i++)
    add_run(a, &w->keys, job, a->runs + (job[FIRST_RUN] + i) * RUN_COLUMNS, earliest, latest, flush_forward, w);
  if (w->keys.num) flush_forward(w, &w->keys);
  for (int i = 0; i < w->num_panels; i++) close_panel(w, job, w->panels + i);
}

static size_t forward_scratch(const call* a) {
  const long rows = a->most_rows < ROWS ? a->most_rows : ROWS;
  const long d = a->d, lanes = round_up(rows, VL) + VL, slack = 16 * (5 + 5 * (ROWS / VL + 2));
  const long floats = BLOCK * (2 * width_of(d) + LANES + d) + VL * d + lanes * (d + round_up(d, MR) + 3) + slack;
  return round_up(sizeof(work), 64) + 4 * floats;
}
