/* What Python and the kernels of all instruction sets agree on. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* The columns of the table of jobs, in the order of `plan.runs.Job`, and what else a call holds; `dap_columns` lets
 * Python compare. */
#define JOB_COLUMNS                                                                                         \
  "region stage branch batch head heads head_step kv start step count first_run num_runs causal phantom "  \
  "opens_branch opens_queries opens_keys tiles"
enum {
  REGION, STAGE, BRANCH, BATCH, HEAD, HEADS, HEAD_STEP, KV, START, STEP, COUNT, FIRST_RUN, NUM_RUNS, CAUSAL,
  PHANTOM, OPENS_BRANCH, OPENS_QUERIES, OPENS_KEYS, NUM_COLUMNS
};
enum { RUN_START, RUN_STEP, RUN_COUNT, RUN_MULTIPLICITY, RUN_COLUMNS };

/* All fields have 8 bytes: Python packs them by their number. A tensor (b, n, heads, ...): strides of batch, time and head in elements. */
typedef struct {
  void* data;
  int64_t batch, time, head;
} tensor;

typedef struct {
  tensor q, k, v, out, lse, mask; /* lse float; mask one byte a key, or no data; head is the key head in k, v, mask */
  const int64_t *jobs, *runs, *run_tiles; /* the number of each run's tile, -1 for none; or NULL: no run has one */
  const uint8_t* tiles;                   /* (tiles, queries, keys): whether a query of a job sees a key of a run */
  int64_t tile_size;                      /* queries and keys of a tile; runs with one begin at multiples of it */
  int64_t num_jobs, d, threads, most_rows; /* the most query rows of a job */
  char* scratch;                           /* of all threads, aligned to 64 bytes, `scratch_bytes` for each */
  int64_t scratch_bytes;
  int64_t dtype, out_dtype; /* 0 float32, 1 bfloat16, 2 float16; of out float32 where rows are met more than once */
  double scale;
} call;

/* Some rows of the queries of a job, which one thread attends at a time; or one of the `parts` of their keys. */
typedef struct {
  int64_t job, first, rows, part, parts;
  float* partial; /* of a part: (rows, d + 2), sums, largest score and total */
} task;

typedef struct {
  call a; /* out and lse are those of the forward pass */
  tensor grad_out, grad_lse, dq, dk, dv; /* grad_lse float, or no data */
  int64_t longest;      /* the most keys of a task */
  const int64_t* order; /* the jobs, those of a task next to each other */
  float* sums;          /* (tasks, 2, longest, d) for dk and dv of each task, or NULL: then keys are one task's */
} grad_call;

/* Jobs order[first] to order[end], all of one batch and key head, whose keys lie in [from, to). */
typedef struct {
  int64_t number, first, end, from, to;
} grad_task;

/* One instruction set: bytes of scratch that a thread needs for jobs of so many rows, and the work itself. */
typedef struct {
  size_t (*forward_scratch)(int64_t d, int64_t most_rows);
  size_t (*backward_scratch)(int64_t d, int64_t most_rows, int64_t summed); /* keys whose sums are in it */
  void (*forward)(const call*, const task*, char* scratch);
  void (*join)(const call*, const task*); /* the parts of a job, side by side, after all were attended */
  void (*backward)(const grad_call*, const grad_task*, char* scratch);
  int64_t rows, few; /* most rows of a task of the forward pass, and of one whose keys can be cut into parts */
} kernel;
