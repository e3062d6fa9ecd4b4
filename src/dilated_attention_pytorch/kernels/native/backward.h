/* Backward pass: P = exp(S - lse) and dS = P * (dO . V^T - delta), from the merged results of the forward pass.
 *
 * A task owns dk and dv of one batch and key head, and dq of the rows of its jobs: no two threads add to one row. */
#pragma once
#include "block.h"

#define GRAD_ROWS 512 /* query rows for which a block of keys is gathered once */

/* Queries side by side, transposed for the scores and by row for the gradients of keys and values. */
typedef struct {
  int vectors, is_odd; /* odd: something in it is not finite */
  long first, rows;
  int32_t earliest, latest;
  float *q, *grad, *dq, *lse, *delta, *q_rows, *grad_rows;
  int32_t* position;
} grad_panel;

typedef struct {
  const grad_call* g;
  float *total_dk, *total_dv; /* of the task, by time from `from` on */
  long step, from;
  grad_panel panels[GRAD_ROWS / VL + 2];
  int num_panels;
  block keys;
  float *p, *ds, *dk, *dv, *row;
} grad_work;

/* out[MR keys][vectors] += A[key][query] . B[query][vectors], for the rows of a panel */
INL void grad_tile(const int vectors, float* restrict out, const float* restrict a, long lanes, long rows, const float* restrict b, long width) {
  vf acc[MR][NV];
  UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < vectors; j++) acc[i][j] = *(vf*)(out + i * width + j * VL);
#pragma GCC unroll 4
  for (long x = 0; x < rows; x++) {
    vf row[NV];
    UNROLL for (int j = 0; j < vectors; j++) row[j] = *(const vf*)(b + x * width + j * VL);
    UNROLL for (int i = 0; i < MR; i++) {
      const vf weight = splat(a[i * lanes + x]);
      UNROLL for (int j = 0; j < vectors; j++) acc[i][j] += weight * row[j];
    }
  }
  UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < vectors; j++) *(vf*)(out + i * width + j * VL) = acc[i][j];
}
INL void grad_tiles(const int vectors, float* out, const float* a, long keys, long lanes, long rows, const float* b, long width) {
  for (long t = 0; t < keys; t += MR) grad_tile(vectors, out + t * width, a + t * lanes, lanes, rows, b, width);
}
FOR_VECTORS(grad_tiles, (float* out, const float* a, long keys, long lanes, long rows, const float* b, long width), ARGUMENTS(out, a, keys, lanes, rows, b, width))

static void add_products(float* out, const float* a, long keys, const grad_panel* p, const float* b, long d) {
  const long width = width_of(d), end = round_up(d, VL);
  for (long c = 0; c < end;) {
    const int vectors = next_vectors((end - c) / VL);
    BY_VECTORS(grad_tiles, vectors)(out + c, a, keys, p->vectors * VL, p->rows, b + c, width);
    c += vectors * VL;
  }
}

/* P, dS and dQ of a panel and the first `keys` keys of the block; a tile is laid out in `p` */
INL void differentiate(const int vectors, const grad_work* w, const grad_panel* p, long keys, int cut) {
  const block* b = &w->keys;
  const long d = w->g->a.d, width = width_of(d);
  vf lse[NV], delta[NV];
  for (int j = 0; j < vectors; j++) lse[j] = *(vf*)(p->lse + j * VL), delta[j] = *(vf*)(p->delta + j * VL);
  for (long t = 0; t < keys; t += MR) {
    vf acc[MR][NV];
    score_tile(vectors, p->q, b->keys + t * width, width, b->bias + t, d, acc);
    if (cut == BY_POSITION)
      for (int i = 0; i < MR; i++)
        for (int j = 0; j < vectors; j++)
          acc[i][j] = choose(*(const vi*)(p->position + j * VL) >= splat_int(b->position[t + i]), acc[i][j], splat(-INFINITY));
    if (cut == BY_TILE)
      for (int i = 0; i < MR; i++)
        for (int j = 0; j < vectors; j++)
          acc[i][j] = choose(*(const vi*)(w->p + ((t + i) * vectors + j) * VL), acc[i][j], splat(-INFINITY));
    UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < vectors; j++)
      *(vf*)(w->p + ((t + i) * vectors + j) * VL) = exp2_of(acc[i][j] - lse[j]);
  }
  static const float zeros[MR];
  for (long t = 0; t < keys; t += MR) {
    vf acc[MR][NV];
    score_tile(vectors, p->grad, b->values + t * width, width, zeros, d, acc);
    UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < vectors; j++) {
      const long at = ((t + i) * vectors + j) * VL;
      const vf prob = *(vf*)(w->p + at), ds = prob * (acc[i][j] - delta[j]);
      *(vf*)(w->ds + at) = cut ? choose(prob != splat(0), ds, splat(0)) : ds; /* what is hidden may overflow */
    }
  }
  for (long c = 0; c < d; c += MR) value_tile(vectors, p->dq + c * vectors * VL, b->keys + c, width, w->ds, keys, NULL);
}
FOR_VECTORS(differentiate, (const grad_work* w, const grad_panel* p, long keys, int cut), ARGUMENTS(w, p, keys, cut))

/* The same pair by pair, where a value that is not finite must not reach, times 0, what it does not concern. */
static void differentiate_pairs(const grad_work* w, const grad_panel* p, long keys) {
  const block* b = &w->keys;
  const long d = w->g->a.d, width = width_of(d), lanes = p->vectors * VL;
  for (long x = 0; x < p->rows; x++)
    for (long t = 0; t < keys; t++) {
      if (!sees_one(b, t, p->position[x])) continue;
      float score = b->bias[t], dp = 0;
      for (long c = 0; c < d; c++) {
        score += p->q[c * lanes + x] * b->keys[t * width + c];
        dp += p->grad[c * lanes + x] * b->values[t * width + c];
      }
      const float prob = exp2f(score - p->lse[x]), ds = prob * (dp - p->delta[x]);
      for (long c = 0; c < d; c++) {
        p->dq[c * lanes + x] += ds * b->keys[t * width + c];
        w->dk[t * width + c] += ds * p->q_rows[x * width + c];
        w->dv[t * width + c] += prob * p->grad_rows[x * width + c];
      }
    }
}

static void add_scaled(float* restrict to, const float* restrict from, long d, float factor) {
  long c = 0;
  for (; c + VL <= d; c += VL) store(to + c, load(to + c) + load(from + c) * splat(factor));
  for (; c < d; c++) to[c] += from[c] * factor;
}

/* All panels meet the keys of the block, whose gradients are added to those of the task. */
static void flush_backward(void* context, block* b) {
  grad_work* w = context;
  const long d = w->g->a.d, width = width_of(d);
  int has_odd = 0;
  pad(b, d);
  for (long t = 0; t < b->num; t++) has_odd |= b->is_odd[t];
  memset(w->dk, 0, round_up(b->num, MR) * width * 4);
  memset(w->dv, 0, round_up(b->num, MR) * width * 4);
  for (int i = 0; i < w->num_panels; i++) {
    const grad_panel* p = w->panels + i;
    int cut;
    long keys = visible(b, p->position, p->vectors * VL, p->earliest, p->latest, &cut);
    if (!keys) continue;
    if (cut && (has_odd || p->is_odd)) {
      differentiate_pairs(w, p, keys);
      continue;
    }
    keys = round_up(keys, MR);
    if (cut == BY_TILE) lay_out_tile(b, p->position, p->vectors, keys, w->p);
    BY_VECTORS(differentiate, p->vectors)(w, p, keys, cut);
    add_products(w->dv, w->p, keys, p, p->grad_rows, d);
    add_products(w->dk, w->ds, keys, p, p->q_rows, d);
  }
  for (long t = 0; t < b->num; t++) {
    add_scaled(w->total_dk + (b->time[t] - w->from) * w->step, w->dk + t * width, d, (float)w->g->a.scale);
    add_scaled(w->total_dv + (b->time[t] - w->from) * w->step, w->dv + t * width, d, 1);
  }
  empty(b);
}

static void open_grad_panel(grad_work* w, const int64_t* job, grad_panel* p) {
  const call* a = &w->g->a;
  const long d = a->d, width = width_of(d), lanes = p->vectors * VL;
  memset(p->dq, 0, lanes * round_up(d, MR) * 4);
  memset(p->q_rows, 0, lanes * width * 4);
  memset(p->grad_rows, 0, lanes * width * 4);
  p->is_odd = 0;
  for (long x0 = 0; x0 < lanes; x0 += VL) {
    const float *queries[VL], *grads[VL];
    for (long x = x0; x < x0 + VL; x++) {
      float *q = p->q_rows + x * width, *grad = p->grad_rows + x * width;
      queries[x - x0] = q;
      grads[x - x0] = grad;
      p->lse[x] = INFINITY; /* a probability of 0: lanes without a query, queries without a key */
      p->delta[x] = 0;
      p->position[x] = p->latest;
      if (x >= p->rows) continue;
      const long i = p->first + x;
      read_row(q, a->q.data, row_of(job, i, &a->q), d, a->dtype);
      read_row(grad, w->g->grad_out.data, row_of(job, i, &w->g->grad_out), d, a->dtype);
      read_row(w->row, a->out.data, row_of(job, i, &a->out), d, a->out_dtype);
      float delta = dot(grad, w->row, d);
      if (w->g->grad_lse.data) delta -= ((const float*)w->g->grad_lse.data)[row_of(job, i, &w->g->grad_lse)];
      const float lse = ((const float*)a->lse.data)[row_of(job, i, &a->lse)];
      if (lse != -INFINITY) p->lse[x] = lse * LOG2_E;
      p->delta[x] = delta;
      p->position[x] = position_of(job, i);
      p->is_odd |= !is_finite(q, d) || !is_finite(grad, d) || isnan(lse) || !isfinite(delta);
    }
    pack_transposed(p->q + x0, lanes, queries, d, (float)a->scale * LOG2_E);
    pack_transposed(p->grad + x0, lanes, grads, d, 1);
  }
}

static void close_grad_panel(grad_work* w, const int64_t* job, const grad_panel* p) {
  const long d = w->g->a.d, width = width_of(d), lanes = p->vectors * VL;
  float factors[VL];
  for (int x = 0; x < VL; x++) factors[x] = (float)w->g->a.scale;
  for (long x0 = 0; x0 < p->rows; x0 += VL) {
    float* rows[VL]; /* the queries are not needed any more */
    for (long x = 0; x < VL; x++) rows[x] = p->q_rows + (x0 + x) * width;
    unpack_transposed(rows, p->dq + x0, lanes, d, factors);
    for (long x = x0; x < x0 + VL && x < p->rows; x++) {
      const long at = row_of(job, p->first + x, &w->g->dq);
      if (!job[OPENS_QUERIES]) add_scaled(rows[x - x0], (const float*)w->g->dq.data + at, d, 1);
      write_row(w->g->dq.data, at, rows[x - x0], d, w->g->a.dtype);
    }
  }
}

static void differentiate_job(grad_work* w, const int64_t* job, long first, long rows, float* next) {
  const call* a = &w->g->a;
  const long d = a->d;
  w->num_panels = 0;
  for (long done = 0; done < rows; w->num_panels++) {
    grad_panel* p = w->panels + w->num_panels;
    p->vectors = next_vectors((rows - done + VL - 1) / VL);
    const long lanes = p->vectors * VL;
    p->first = first + done;
    p->rows = rows - done < lanes ? rows - done : lanes;
    p->q = take(&next, lanes * d);
    p->grad = take(&next, lanes * d);
    p->dq = take(&next, lanes * round_up(d, MR));
    p->lse = take(&next, lanes);
    p->delta = take(&next, lanes);
    p->q_rows = take(&next, lanes * width_of(d));
    p->grad_rows = take(&next, lanes * width_of(d));
    p->position = (int32_t*)take(&next, lanes);
    extent(job, p->first, p->rows, &p->earliest, &p->latest);
    open_grad_panel(w, job, p);
    done += p->rows;
  }
  int32_t earliest, latest;
  extent(job, first, rows, &earliest, &latest);
  for (long i = job[FIRST_RUN]; i < job[FIRST_RUN] + job[NUM_RUNS]; i++)
    add_run(a, &w->keys, job, a->runs + i * RUN_COLUMNS, tile_of(a, i), earliest, latest, flush_backward, w);
  if (w->keys.num) flush_backward(w, &w->keys);
  for (int i = 0; i < w->num_panels; i++) close_grad_panel(w, job, w->panels + i);
}

static void backward(const grad_call* g, const grad_task* t, char* memory) {
  const long d = g->a.d, n = t->to - t->from;
  grad_work* w = (grad_work*)memory;
  float* next = (float*)(memory + round_up(sizeof(grad_work), 64));
  w->g = g;
  w->keys.keys = take(&next, BLOCK * width_of(d));
  w->keys.values = take(&next, BLOCK * width_of(d));
  w->p = take(&next, BLOCK * LANES);
  w->ds = take(&next, BLOCK * LANES);
  w->dk = take(&next, BLOCK * width_of(d));
  w->dv = take(&next, BLOCK * width_of(d));
  w->row = take(&next, d);
  empty(&w->keys);
  const int64_t* job = g->a.jobs + g->order[t->first] * NUM_COLUMNS;
  const long at_k = keys_of(job, &g->dk) + t->from * g->dk.time, at_v = keys_of(job, &g->dv) + t->from * g->dv.time;
  /* Sums are kept where they belong, in memory of the caller's, or here. */
  w->step = d;
  w->from = t->from;
  if (g->sums) {
    w->total_dk = g->sums + t->number * 2 * g->longest * d;
    w->total_dv = w->total_dk + g->longest * d;
  } else if (g->a.dtype) {
    w->total_dk = take(&next, n * d);
    w->total_dv = take(&next, n * d);
  } else {
    w->total_dk = (float*)g->dk.data + at_k;
    w->total_dv = (float*)g->dv.data + at_v;
    w->step = g->dk.time;
  }
  for (long time = 0; time < n; time++) {
    memset(w->total_dk + time * w->step, 0, d * 4);
    memset(w->total_dv + time * w->step, 0, d * 4);
  }
  for (long j = t->first; j < t->end; j++) {
    job = g->a.jobs + g->order[j] * NUM_COLUMNS;
    const long rows = job[HEADS] * job[COUNT], parts = (rows + GRAD_ROWS - 1) / GRAD_ROWS;
    for (long i = 0; i < parts; i++) differentiate_job(w, job, rows * i / parts, rows * (i + 1) / parts - rows * i / parts, next);
  }
  if (!g->sums && g->a.dtype)
    for (long time = 0; time < n; time++) {
      write_row(g->dk.data, at_k + time * g->dk.time, w->total_dk + time * d, d, g->a.dtype);
      write_row(g->dv.data, at_v + time * g->dv.time, w->total_dv + time * d, d, g->a.dtype);
    }
}

static size_t backward_scratch(int64_t d, int64_t most_rows, int64_t summed) {
  const long rows = most_rows < GRAD_ROWS ? most_rows : GRAD_ROWS;
  const long width = width_of(d), lanes = round_up(rows, VL) + VL, slack = 16 * (9 + 8 * (GRAD_ROWS / VL + 2));
  const long floats = BLOCK * (4 * width + 2 * LANES) + d + lanes * (2 * d + round_up(d, MR) + 2 * width + 3) + slack;
  return round_up(sizeof(grad_work), 64) + 4 * (floats + 2 * summed * d);
}
