/* The entry points: the choice of an instruction set, and threads that share the tasks of a call. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "attend.h"

extern const kernel dap_portable;
#if defined(__x86_64__)
extern const kernel dap_avx2, dap_avx512;
#endif

const char* dap_columns(void) { return JOB_COLUMNS; }

static const kernel* find_kernel(const char** name) {
  const char* asked = getenv("DILATED_ATTENTION_ISA");
#if defined(__x86_64__)
  __builtin_cpu_init();
  const int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const char first = asked && asked[0] == 'a' ? asked[3] : asked ? 'p' : '5';
  if (has_avx512 && first == '5') return *name = "avx512", &dap_avx512;
  if (has_avx2 && first != 'p') return *name = "avx2", &dap_avx2;
#endif
  (void)asked;
  return *name = "portable", &dap_portable;
}
const char* dap_isa(void) {
  const char* name;
  find_kernel(&name);
  return name;
}

#define MOST_THREADS 64

typedef struct {
  const kernel* k;
  const void* call;
  const void* tasks;
  char* scratch;
  long scratch_bytes, num_tasks;
  int is_backward;
  atomic_long next, joined;
} crew;

static void* run_tasks(void* argument) {
  crew* c = argument;
  char* memory = c->scratch + atomic_fetch_add(&c->joined, 1) * c->scratch_bytes;
  for (long i; (i = atomic_fetch_add(&c->next, 1)) < c->num_tasks;) {
    if (c->is_backward)
      c->k->backward(c->call, (const grad_task*)c->tasks + i, memory);
    else
      c->k->forward(c->call, (const task*)c->tasks + i, memory);
  }
  return NULL;
}

/* Threads of this call alone, so that nothing is left running that a fork would miss. */
static void run_crew(crew* c, long threads) {
  pthread_t others[MOST_THREADS];
  int started = 0;
  if (threads > c->num_tasks) threads = c->num_tasks;
  while (started + 1 < threads && started < MOST_THREADS - 1 && !pthread_create(&others[started], NULL, run_tasks, c)) started++;
  run_tasks(c);
  while (started) pthread_join(others[--started], NULL);
}

static int is_small(const call* a) { /* starting a thread would take longer */
  long pairs = 0;
  for (long j = 0; j < a->num_jobs; j++) {
    const int64_t* job = a->jobs + j * NUM_COLUMNS;
    for (long r = 0; r < job[NUM_RUNS]; r++) {
      pairs += job[HEADS] * job[COUNT] * a->runs[(job[FIRST_RUN] + r) * RUN_COLUMNS + RUN_COUNT];
      if (pairs > 1 << 16) return 0;
    }
  }
  return 1;
}

/* Bytes of scratch that each thread needs. */
int64_t dap_forward_scratch(const call* a) {
  const char* name;
  return (find_kernel(&name)->forward_scratch(a) + 63) / 64 * 64;
}
int64_t dap_backward_scratch(const grad_call* g) {
  const char* name;
  return (find_kernel(&name)->backward_scratch(g) + 63) / 64 * 64;
}

/* 0, or 1 if memory ran out: then there are no results. */
int dap_forward(const call* a) {
  const char* name;
  const kernel* k = find_kernel(&name);
  long num = 0;
  for (long j = 0; j < a->num_jobs; j++) {
    const int64_t* job = a->jobs + j * NUM_COLUMNS;
    num += (job[HEADS] * job[COUNT] + k->rows - 1) / k->rows;
  }
  task* tasks = malloc((num + 1) * sizeof(task));
  if (!tasks) return 1;
  /* Later rows first: under a causal cut they have the most keys, and would keep one thread busy at the end. The
   * order changes no result. */
  long at = num;
  for (long j = 0; j < a->num_jobs; j++) {
    const int64_t* job = a->jobs + j * NUM_COLUMNS;
    const long rows = job[HEADS] * job[COUNT], parts = (rows + k->rows - 1) / k->rows;
    for (long i = 0; i < parts; i++) tasks[--at] = (task){j, rows * i / parts, rows * (i + 1) / parts - rows * i / parts};
  }
  crew c = {k, a, tasks, a->scratch, a->scratch_bytes, num, 0, 0, 0};
  run_crew(&c, is_small(a) ? 1 : a->threads);
  free(tasks);
  return 0;
}

/* `bounds` (num + 1): the jobs order[bounds[i]] to order[bounds[i + 1]] are task i. */
int dap_backward(const grad_call* g, const int64_t* bounds, int64_t num) {
  const char* name;
  const kernel* k = find_kernel(&name);
  grad_task* tasks = malloc((num + 1) * sizeof(grad_task));
  if (!tasks) return 1;
  for (long i = 0; i < num; i++) tasks[i] = (grad_task){i, bounds[i], bounds[i + 1]};
  crew c = {k, g, tasks, g->a.scratch, g->a.scratch_bytes, num, 1, 0, 0};
  run_crew(&c, is_small(&g->a) ? 1 : g->a.threads);
  free(tasks);
  return 0;
}
