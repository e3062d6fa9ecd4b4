/* Blocks of gathered keys and values, and the products of small matrices that both passes are made of. */
#pragma once
#include "attend.h"
#include "simd.h"

#define BLOCK 64 /* keys of a block, a multiple of MR */
#define AHEAD 4  /* keys that are fetched before they are packed */
#define LANES (NV * VL) /* of the widest panel of queries */
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define UNROLL _Pragma("GCC unroll 8")
/* The same code for 1, 2 or 3 vectors of queries, known when it is compiled. */
#define FOR_VECTORS(name, parameters, arguments)                                            \
  static __attribute__((noinline)) void name##_1 parameters { name(1, arguments); }         \
  static __attribute__((noinline)) void name##_2 parameters { name(2, arguments); }         \
  static __attribute__((noinline)) void name##_3 parameters { name(3, arguments); }
#define BY_VECTORS(name, vectors) ((vectors) == 3 ? name##_3 : (vectors) == 2 ? name##_2 : name##_1)
#define ARGUMENTS(...) __VA_ARGS__

INL long round_up(long x, long to) { return (x + to - 1) / to * to; }
INL long width_of(long d) { return round_up(d, VL > MR ? VL : MR); }
/* How many of the vectors that are left go into the next tile: never a lonely one after full ones. */
INL int next_vectors(long left) { return left == 1 ? 1 : left == 2 || left == 4 ? 2 : 3; }

/* acc[MR keys][vectors] = bias + rows . Q^T */
INL void score_tile(const int vectors, const float* restrict q, const float* restrict rows, long width, const float* bias, long d, vf acc[MR][NV]) {
  UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < vectors; j++) acc[i][j] = splat(bias[i]);
#pragma GCC unroll 4
  for (long c = 0; c < d; c++) {
    vf b[NV];
    UNROLL for (int j = 0; j < vectors; j++) b[j] = *(const vf*)(q + (c * vectors + j) * VL);
    UNROLL for (int i = 0; i < MR; i++) {
      const vf a = splat(rows[i * width + c]);
      UNROLL for (int j = 0; j < vectors; j++) acc[i][j] += a * b[j];
    }
  }
}

/* O^T[MR features][vectors] = O^T * shrink + V^T . P */
INL void value_tile(const int vectors, float* restrict out, const float* restrict values, long width, const float* restrict p, long keys, const vf* shrink) {
  vf acc[MR][NV];
  UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < vectors; j++) {
    acc[i][j] = *(vf*)(out + (i * vectors + j) * VL);
    if (shrink) acc[i][j] *= shrink[j];
  }
#pragma GCC unroll 4
  for (long t = 0; t < keys; t++) {
    vf b[NV];
    UNROLL for (int j = 0; j < vectors; j++) b[j] = *(const vf*)(p + (t * vectors + j) * VL);
    UNROLL for (int i = 0; i < MR; i++) {
      const vf a = splat(values[t * width + i]);
      UNROLL for (int j = 0; j < vectors; j++) acc[i][j] += a * b[j];
    }
  }
  UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < vectors; j++) *(vf*)(out + (i * vectors + j) * VL) = acc[i][j];
}

typedef struct {
  float *keys, *values; /* rows of width_of(d) */
  float bias[BLOCK];    /* log2 of the multiplicity; -inf for padding */
  int32_t position[BLOCK]; /* counted from the first query of the job; of a block with a tile the column in it */
  long time[BLOCK], tile_size;
  int is_odd[BLOCK]; /* in a block that is cut: whether something of the key is not finite */
  long num;
  int is_run; /* positions rise: the keys are of one run */
  int is_cut; /* some query of the task may not see some of the keys */
  const uint8_t* tile; /* of the run, or NULL */
} block;

typedef void (*flush)(void* context, block* keys);

INL void empty(block* b) {
  b->num = b->is_cut = 0;
  b->tile = NULL;
  b->is_run = 1;
}

/* Fills the block up to a multiple of MR with keys that nobody sees. */
static void pad(block* b, long d) {
  const long width = width_of(d);
  for (long t = b->num; t < round_up(b->num, MR); t++) {
    memset(b->keys + t * width, 0, width * 4);
    memset(b->values + t * width, 0, width * 4);
    b->bias[t] = -INFINITY;
    b->position[t] = INT32_MAX;
    b->is_odd[t] = 0;
  }
}

/* Whether the query at a position sees a key of a block that is cut; and that for a vector of positions. */
INL int sees_one(const block* b, long t, int32_t position) {
  return b->tile && t < b->num ? b->tile[position * b->tile_size + b->position[t]] : position >= b->position[t];
}
INL vi sees(const block* b, long t, const int32_t* position) {
  vi seen;
  for (int x = 0; x < VL; x++) seen[x] = -sees_one(b, t, position[x]);
  return seen;
}

/* The tile of a block for the queries of a panel: all bits where one sees a key, (keys, lanes). */
static __attribute__((noinline)) void lay_out_tile(const block* b, const int32_t* position, int vectors, long keys, float* seen) {
  for (long t = 0; t < keys; t++)
    for (int j = 0; j < vectors; j++) *(vi*)(seen + (t * vectors + j) * VL) = sees(b, t, position + j * VL);
}

enum { WHOLE, BY_POSITION, BY_TILE }; /* how a block of keys is cut for a panel */
/* How many keys of the block the queries of a panel, in so many lanes, meet, and whether some of them see only some. */
static long visible(const block* b, const int32_t* position, long lanes, int32_t earliest, int32_t latest, int* cut) {
  long keys = b->num;
  *cut = WHOLE;
  if (!b->is_cut) return keys;
  if (b->tile) {
    int is_seen = 0;
    for (; keys; keys--) {
      for (long x = 0; x < lanes; x++) is_seen |= sees_one(b, keys - 1, position[x]);
      if (is_seen) break;
    }
    *cut = BY_TILE;
    return keys;
  }
  if (b->is_run)
    while (keys && b->position[keys - 1] > latest) keys--;
  int is_cut = keys < b->num && keys % MR; /* register tiles are whole: the last one holds keys that nobody sees */
  for (long t = 0; t < keys; t++) is_cut |= b->position[t] > earliest;
  *cut = is_cut ? BY_POSITION : WHOLE;
  return keys;
}

static int is_finite(const float* row, long d) {
  vf sum = splat(0);
  long c = 0;
  for (; c + VL <= d; c += VL) sum += load(row + c) * splat(0);
  for (; c < d; c++) sum[0] += row[c] * 0.0f;
  return !any(sum != splat(0));
}

/* Where the key head of a job begins in a tensor of keys. */
INL long keys_of(const int64_t* job, const tensor* x) { return job[BATCH] * x->batch + job[KV] * x->head; }

/* The tile of a run, or NULL. */
INL const uint8_t* tile_of(const call* a, long run) {
  return a->run_tiles && a->run_tiles[run] >= 0 ? a->tiles + a->run_tiles[run] * a->tile_size * a->tile_size : NULL;
}

/* Gathers the keys of a run that the queries at positions up to `latest` see; flushes each block that is full. */
static void add_run(const call* a, block* b, const int64_t* job, const int64_t* run, const uint8_t* tile, int32_t earliest, int32_t latest, flush flush_block, void* context) {
  const long d = a->d, width = width_of(d), step = run[RUN_STEP], first = run[RUN_START] - job[START];
  long count = run[RUN_COUNT];
  int is_cut = tile != NULL;
  if (job[CAUSAL]) {
    if (first > latest) return;
    if ((latest - first) / step + 1 < count) count = (latest - first) / step + 1;
    is_cut |= first + (count - 1) * step > earliest;
  }
  /* What is cut comes run by run: panels then leave out the keys behind them. */
  if (b->num && (is_cut || b->is_cut)) flush_block(context, b);
  if (b->num) b->is_run = 0;
  const float bias = log2f((float)run[RUN_MULTIPLICITY]);
  const long k_at = keys_of(job, &a->k), v_at = keys_of(job, &a->v);
  const uint8_t* mask = a->mask.data ? (const uint8_t*)a->mask.data + keys_of(job, &a->mask) : NULL;
  for (long i = 0; i < count; i++) {
    const long time = run[RUN_START] + i * step;
    if (mask && !mask[time * a->mask.time]) continue;
    if (i + AHEAD < count) {
      fetch_row(a->k.data, k_at + (time + AHEAD * step) * a->k.time, d, a->dtype);
      fetch_row(a->v.data, v_at + (time + AHEAD * step) * a->v.time, d, a->dtype);
    }
    const long t = b->num++;
    float *key = b->keys + t * width, *value = b->values + t * width;
    read_row(key, a->k.data, k_at + time * a->k.time, d, a->dtype);
    read_row(value, a->v.data, v_at + time * a->v.time, d, a->dtype);
    for (long c = d; c < width; c++) key[c] = value[c] = 0;
    b->bias[t] = bias;
    b->position[t] = (int32_t)(tile ? time % a->tile_size : first + i * step);
    b->time[t] = time;
    b->tile = tile;
    b->tile_size = a->tile_size;
    b->is_cut |= is_cut;
    b->is_odd[t] = is_cut && !(is_finite(key, d) && is_finite(value, d));
    if (b->num == BLOCK) flush_block(context, b);
  }
  if (is_cut && b->num) flush_block(context, b);
}

/* Where row i of the queries of a job lies in a tensor; rows of a head follow one another. */
INL long row_of(const int64_t* job, long i, const tensor* x) {
  return job[BATCH] * x->batch + (job[START] + i % job[COUNT] * job[STEP]) * x->time +
         (job[HEAD] + i / job[COUNT] * job[HEAD_STEP]) * x->head;
}
INL int32_t position_of(const int64_t* job, long i) { return (int32_t)(i % job[COUNT] * job[STEP]); }

/* The first and the last position of some rows. */
INL void extent(const int64_t* job, long first, long rows, int32_t* earliest, int32_t* latest) {
  *earliest = INT32_MAX;
  *latest = 0;
  for (long i = first; i < first + rows; i++) {
    const int32_t position = position_of(job, i);
    *earliest = position < *earliest ? position : *earliest;
    *latest = position > *latest ? position : *latest;
  }
}

/* Pieces of a thread's scratch, aligned for vectors. */
INL float* take(float** next, long floats) {
  float* found = *next;
  *next += round_up(floats, 16);
  return found;
}
