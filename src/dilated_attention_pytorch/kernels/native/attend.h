/* What Python and the kernels of all instruction sets agree on. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* The columns of the table of jobs, in the order of `plan.runs.Job`; `dap_columns` lets Python compare. */
#define JOB_COLUMNS                                                                                         \
  "region stage branch batch head heads head_step kv start step count first_run num_runs causal phantom "  \
  "opens_branch opens_queries opens_keys"
enum {
  REGION, STAGE, BRANCH, BATCH, HEAD, HEADS, HEAD_STEP, KV, START, STEP, COUNT, FIRST_RUN, NUM_RUNS, CAUSAL,
  PHANTOM, OPENS_BRANCH, OPENS_QUERIES, OPENS_KEYS, NUM_COLUMNS
};
enum { RUN_START, RUN_STEP, RUN_COUNT, RUN_MULTIPLICITY, RUN_COLUMNS };

/* A tensor (b, n, heads, ...): strides of batch, time and head in elements. */
typedef struct {
  void* data;
  int64_t batch, time, head;
} tensor;

typedef struct {
  tensor q, k, v, out, lse, mask; /* lse float; mask one byte a key, or no data */
  const int64_t *jobs, *runs;
  int64_t num_jobs, d, threads, most_rows; /* the most query rows of a job */
  char* scratch;                           /* of all threads, aligned to 64 bytes, `scratch_bytes` for each */
  int64_t scratch_bytes;
  int32_t dtype; /* 0 float32, 1 bfloat16, 2 float16: these meet each row in one job only */
  float scale;
} call;

/* Some rows of the queries of a job, which one thread attends at a time. */
typedef struct {
  int64_t job, first, rows;
} task;

typedef struct {
  call a; /* out and lse are those of the forward pass */
  tensor grad_out, grad_lse, dq, dk, dv; /* grad_lse float, or no data */
  int64_t n;
  const int64_t* order; /* the jobs, those of a task next to each other */
  float* sums;          /* (tasks, 2, n, d) for dk and dv of each task, or NULL: then a key head is one task's */
} grad_call;

/* Jobs order[first] to order[end], all of one batch and key head. */
typedef struct {
  int64_t number, first, end;
} grad_task;

/* One instruction set: bytes of scratch that a thread needs, and the work itself. */
typedef struct {
  size_t (*forward_scratch)(const call*);
  size_t (*backward_scratch)(const grad_call*);
  void (*forward)(const call*, const task*, char* scratch);
  void (*backward)(const grad_call*, const grad_task*, char* scratch);
  int64_t rows; /* most rows of a task of the forward pass */
} kernel;
