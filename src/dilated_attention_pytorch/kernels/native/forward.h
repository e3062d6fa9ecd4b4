/* Forward pass: each query row of a job meets all its keys in one online softmax.
 *
 * Scores are kept transposed (keys x queries): queries fill the lanes, so that the softmax needs no shuffles, and
 * keys and values are read by broadcast from rows that were gathered in whatever step they lie. */
#pragma once
#include "block.h"

#define ROWS 512     /* query rows for which a block of keys is gathered once */
#define FEW (VL / 2) /* rows that are attended one by one: a vector of them would be mostly empty */

/* Queries side by side in `vectors` vectors; with no vectors they are a few rows, not transposed. */
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

/* A panel meets the first `keys` keys of the block, each query those that it sees; a tile is laid out in `scores`. */
INL void meet(const int vectors, const work* w, const panel* p, long keys, int cut) {
  const block* b = &w->keys;
  const vf none = splat(-INFINITY);
  const long d = w->a->d, width = width_of(d);
  vf best[NV], top[NV], total[NV], shrink[NV];
  for (int j = 0; j < vectors; j++) best[j] = none;
  for (long t = 0; t < keys; t += MR) {
    vf acc[MR][NV];
    score_tile(vectors, p->q, b->keys + t * width, width, b->bias + t, d, acc);
    if (cut == BY_POSITION)
      for (int i = 0; i < MR; i++)
        for (int j = 0; j < vectors; j++)
          acc[i][j] = choose(*(const vi*)(p->position + j * VL) >= splat_int(b->position[t + i]), acc[i][j], none);
    if (cut == BY_TILE)
      for (int i = 0; i < MR; i++)
        for (int j = 0; j < vectors; j++) acc[i][j] = choose(*(const vi*)(w->scores + ((t + i) * vectors + j) * VL), acc[i][j], none);
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
FOR_VECTORS(meet, (const work* w, const panel* p, long keys, int cut), ARGUMENTS(w, p, keys, cut))

/* Some keys of one run, where they lie or, in half precision, widened. */
typedef struct {
  const float *keys[BLOCK], *values[BLOCK];
  int32_t position[BLOCK];
  long num;
  float bias;
} row_block;

/* A few rows meet the keys one row at a time: features fill the lanes, and nothing is packed. */
INL void meet_rows(const long d, const work* w, const panel* p, const row_block* b) {
  const long width = width_of(d), whole = d / VL * VL;
  for (long x = 0; x < p->rows; x++) {
    const float* q = p->q + x * width;
    float* out = p->out + x * width;
    long keys = b->num; /* positions rise */
    while (keys && b->position[keys - 1] > p->position[x]) keys--;
    if (!keys) continue;
    vf best = splat(-INFINITY), sum = splat(0);
    for (long t = 0; t < keys; t++) w->scores[t] = b->bias + dot(q, b->keys[t], d);
    for (long t = keys; t < round_up(keys, VL); t++) w->scores[t] = -INFINITY;
    for (long t = 0; t < keys; t += VL) best = larger(best, *(vf*)(w->scores + t));
    const float old = p->top[x], now = fmaxf(fmaxf(old, max_of(best)), -3.4e38f);
    const vf top = splat(now), shrink = exp2_of(splat(old - now));
    for (long t = 0; t < keys; t += VL) sum += *(vf*)(w->scores + t) = exp2_of(*(vf*)(w->scores + t) - top);
    p->top[x] = now;
    p->total[x] = p->total[x] * shrink[0] + sum_of(sum);
    for (long c = 0; c < whole; c += 4 * VL) {
      vf acc[4];
      const int num = whole - c < 4 * VL ? (int)(whole - c) / VL : 4;
      for (int j = 0; j < num; j++) acc[j] = *(vf*)(out + c + j * VL) * shrink;
      for (long t = 0; t < keys; t++) {
        const vf weight = splat(w->scores[t]);
        for (int j = 0; j < num; j++) acc[j] += weight * load(b->values[t] + c + j * VL);
      }
      for (int j = 0; j < num; j++) *(vf*)(out + c + j * VL) = acc[j];
    }
    for (long c = whole; c < d; c++) {
      out[c] *= shrink[0];
      for (long t = 0; t < keys; t++) out[c] += w->scores[t] * b->values[t][c];
    }
  }
}

/* The same code for the usual head sizes, known when it is compiled. */
static void meet_row_block(const work* w, const panel* p, row_block* b) {
  const long d = w->a->d;
  d == 64 ? meet_rows(64, w, p, b) : d == 128 ? meet_rows(128, w, p, b) : meet_rows(d, w, p, b);
  b->num = 0;
}

/* The keys of a run that some of the few rows of a task see. */
static void meet_run(const work* w, const int64_t* job, const int64_t* run) {
  const call* a = w->a;
  const panel* p = w->panels;
  const long d = a->d, width = width_of(d), step = run[RUN_STEP], first = run[RUN_START] - job[START];
  const long k_at = keys_of(job, &a->k), v_at = keys_of(job, &a->v);
  const uint8_t* mask = a->mask.data ? (const uint8_t*)a->mask.data + keys_of(job, &a->mask) : NULL;
  row_block b = {.num = 0, .bias = log2f((float)run[RUN_MULTIPLICITY])};
  for (long i = 0; i < run[RUN_COUNT]; i++) {
    const long time = run[RUN_START] + i * step, t = b.num;
    const int is_seen = !mask || mask[time * a->mask.time];
    if (job[CAUSAL] && first + i * step > p->latest) break;
    if (is_seen) {
      b.keys[t] = (const float*)a->k.data + k_at + time * a->k.time;
      b.values[t] = (const float*)a->v.data + v_at + time * a->v.time;
      if (a->dtype) {
        read_row(w->keys.keys + t * width, a->k.data, k_at + time * a->k.time, d, a->dtype);
        read_row(w->keys.values + t * width, a->v.data, v_at + time * a->v.time, d, a->dtype);
        b.keys[t] = w->keys.keys + t * width;
        b.values[t] = w->keys.values + t * width;
      } else if (step > 1 && i + AHEAD < run[RUN_COUNT]) {
        fetch_row(a->k.data, k_at + (time + AHEAD * step) * a->k.time, d, 0);
        fetch_row(a->v.data, v_at + (time + AHEAD * step) * a->v.time, d, 0);
      }
      b.position[t] = job[CAUSAL] ? (int32_t)(first + i * step) : 0;
      b.num++;
    }
    if (b.num == BLOCK) meet_row_block(w, p, &b);
  }
  meet_row_block(w, p, &b);
}

/* Values that are not finite: times 0 they would spoil the queries that do not see them. */
static void add_odd_values(const work* w, const panel* p, long keys) {
  const block* b = &w->keys;
  const long d = w->a->d;
  for (long t = 0; t < keys; t++)
    for (long c = 0; c < d && b->is_odd[t]; c++)
      for (int j = 0; j < p->vectors; j++) {
        vf* out = (vf*)(p->out + (c * p->vectors + j) * VL);
        const vf sum = *out + splat(w->odd_values[t * d + c]) * *(vf*)(w->scores + (t * p->vectors + j) * VL);
        *out = choose(sees(b, t, p->position + j * VL), sum, *out);
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
    int cut;
    const long keys = visible(b, p->position, p->vectors * VL, p->earliest, p->latest, &cut);
    if (!keys) continue;
    if (cut == BY_TILE) lay_out_tile(b, p->position, p->vectors, round_up(keys, MR), w->scores);
    BY_VECTORS(meet, p->vectors)(w, p, round_up(keys, MR), cut);
    if (has_odd) add_odd_values(w, p, keys);
  }
  empty(b);
}

/* A query into `row`, and the state of its softmax, which may go on from earlier keys; out[c * step] are the sums. */
static void open_lane(const call* a, const int64_t* job, const panel* p, long x, float* row, float* out, long step, int is_first) {
  const long d = a->d, i = p->first + x;
  const float phantom = is_first ? (float)job[PHANTOM] : 0;
  p->top[x] = phantom ? 0 : -INFINITY; /* phantom keys have the score 0 */
  p->total[x] = phantom;
  p->position[x] = p->latest; /* also of lanes without a query: they must not cut a block */
  if (x >= p->rows) {
    memset(row, 0, d * 4);
    return;
  }
  read_row(row, a->q.data, row_of(job, i, &a->q), d, a->dtype);
  p->position[x] = position_of(job, i);
  if (job[OPENS_QUERIES] || !is_first) return;
  const float lse = ((const float*)a->lse.data)[row_of(job, i, &a->lse)];
  if (lse == -INFINITY) return;
  const float share = lse * LOG2_E;
  p->total[x] = phantom && share < 0 ? phantom + exp2f(share) : 1 + phantom * exp2f(-share);
  p->top[x] = phantom && share < 0 ? 0 : share;
  const float weight = p->top[x] == share ? 1 : exp2f(share);
  const float* before = (const float*)a->out.data + row_of(job, i, &a->out);
  for (long c = 0; c < d; c++) out[c * step] = before[c] * weight;
}

static void open_panel(work* w, const int64_t* job, panel* p, int is_first) {
  const call* a = w->a;
  const long d = a->d, lanes = p->vectors * VL, width = width_of(d);
  if (!lanes) {
    memset(p->out, 0, p->rows * width * 4);
    for (long x = 0; x < p->rows; x++) {
      float* row = p->q + x * width;
      open_lane(a, job, p, x, row, p->out + x * width, 1, is_first);
      for (long c = 0; c < d; c++) row[c] *= (float)a->scale * LOG2_E;
    }
    return;
  }
  memset(p->out, 0, lanes * round_up(d, MR) * 4);
  for (long x0 = 0; x0 < lanes; x0 += VL) {
    const float* rows[VL];
    for (long x = x0; x < x0 + VL; x++) {
      float* row = w->row + (x - x0) * d;
      rows[x - x0] = row;
      open_lane(a, job, p, x, row, p->out + x, lanes, is_first);
    }
    pack_transposed(p->q + x0, lanes, rows, d, (float)a->scale * LOG2_E);
  }
}

INL float factor_of(float total) { return total == 0 ? 0 : 1 / total; }
static void write_lse(const call* a, const int64_t* job, long i, float top, float total) {
  ((float*)a->lse.data)[row_of(job, i, &a->lse)] = total == 0 ? -INFINITY : (top + log2f(total)) * LN_2;
}
static void write_sums(const call* a, const int64_t* job, long i, float* sums, float top, float total) {
  const float factor = factor_of(total);
  for (long c = 0; c < a->d; c++) sums[c] *= factor;
  write_lse(a, job, i, top, total);
  write_row(a->out.data, row_of(job, i, &a->out), sums, a->d, a->out_dtype);
}

static void close_panel(work* w, const int64_t* job, const panel* p, float* partial) {
  const call* a = w->a;
  const long d = a->d, lanes = p->vectors * VL, width = width_of(d);
  for (long x = 0; x < p->rows && !lanes; x++, partial += partial ? d + 2 : 0) {
    if (partial) {
      memcpy(partial, p->out + x * width, d * 4);
      partial[d] = p->top[x];
      partial[d + 1] = p->total[x];
    } else
      write_sums(a, job, p->first + x, p->out + x * width, p->top[x], p->total[x]);
  }
  for (long x0 = 0; x0 < p->rows && lanes; x0 += VL) {
    float* rows[VL];
    float factors[VL];
    for (long x = x0; x < x0 + VL; x++) {
      rows[x - x0] = w->row + (x - x0) * d;
      factors[x - x0] = factor_of(p->total[x]);
      if (x < p->rows) write_lse(a, job, p->first + x, p->top[x], p->total[x]);
    }
    unpack_transposed(rows, p->out + x0, lanes, d, factors);
    for (long x = x0; x < x0 + VL && x < p->rows; x++)
      write_row(a->out.data, row_of(job, p->first + x, &a->out), rows[x - x0], d, a->out_dtype);
  }
}

static void join(const call* a, const task* t) {
  const long d = a->d;
  for (long x = 0; x < t->rows; x++) {
    float* sums = t->partial + x * (d + 2);
    for (long i = 1; i < t->parts; i++) {
      const float* more = t[i].partial + x * (d + 2);
      const float top = fmaxf(fmaxf(sums[d], more[d]), -3.4e38f), weight = exp2f(sums[d] - top), share = exp2f(more[d] - top);
      for (long c = 0; c < d; c++) sums[c] = sums[c] * weight + more[c] * share;
      sums[d] = top;
      sums[d + 1] = sums[d + 1] * weight + more[d + 1] * share;
    }
    write_sums(a, a->jobs + t->job * NUM_COLUMNS, t->first + x, sums, sums[d], sums[d + 1]);
  }
}

static void forward(const call* a, const task* t, char* memory) {
  const long d = a->d;
  const int64_t* job = a->jobs + t->job * NUM_COLUMNS;
  const int is_few = t->rows <= FEW && !a->run_tiles;
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
    p->vectors = is_few ? 0 : next_vectors((t->rows - done + VL - 1) / VL);
    const long lanes = p->vectors ? p->vectors * VL : t->rows;
    p->first = t->first + done;
    p->rows = t->rows - done < lanes ? t->rows - done : lanes;
    p->q = take(&next, lanes * width_of(d));
    p->out = take(&next, lanes * width_of(d));
    p->top = take(&next, lanes);
    p->total = take(&next, lanes);
    p->position = (int32_t*)take(&next, lanes);
    extent(job, p->first, p->rows, &p->earliest, &p->latest);
    open_panel(w, job, p, t->part == 0);
    done += p->rows;
  }
  int32_t earliest, latest;
  extent(job, t->first, t->rows, &earliest, &latest);
  for (long i = 0; i < job[NUM_RUNS]; i++) {
    int64_t run[RUN_COLUMNS];
    memcpy(run, a->runs + (job[FIRST_RUN] + i) * RUN_COLUMNS, sizeof run);
    const int64_t first = run[RUN_COUNT] * t->part / t->parts;
    run[RUN_START] += first * run[RUN_STEP];
    run[RUN_COUNT] = run[RUN_COUNT] * (t->part + 1) / t->parts - first;
    if (is_few)
      meet_run(w, job, run);
    else if (run[RUN_COUNT])
      add_run(a, &w->keys, job, run, tile_of(a, job[FIRST_RUN] + i), earliest, latest, flush_forward, w);
  }
  if (w->keys.num) flush_forward(w, &w->keys);
  for (int i = 0; i < w->num_panels; i++) close_panel(w, job, w->panels + i, t->partial);
}

static size_t forward_scratch(int64_t d, int64_t most_rows) {
  const long rows = most_rows < ROWS ? most_rows : ROWS;
  const long lanes = round_up(rows, VL) + VL, slack = 16 * (5 + 5 * (ROWS / VL + 2));
  const long floats = BLOCK * (2 * width_of(d) + LANES + d) + VL * d + lanes * (2 * width_of(d) + 3) + slack;
  return round_up(sizeof(work), 64) + 4 * floats;
}
