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
#define MANY_TASKS 64   /* from so many on, none is cut into parts */
#define LEAST_KEYS 1024 /* of a part */

typedef struct {
  const kernel* k;
  const void* call;
  const void* tasks;
  char* scratch;
  long scratch_bytes, num_tasks;
  int is_backward;
  atomic_long next, joined;
} crew;

static void run_tasks(void* argument) {
  crew* c = argument;
  char* memory = NULL;
  for (long i; (i = atomic_fetch_add(&c->next, 1)) < c->num_tasks;) {
    if (!memory) memory = c->scratch + atomic_fetch_add(&c->joined, 1) * c->scratch_bytes;
    if (c->is_backward)
      c->k->backward(c->call, (const grad_task*)c->tasks + i, memory);
    else
      c->k->forward(c->call, (const task*)c->tasks + i, memory);
  }
}
static void* run_thread(void* argument) {
  run_tasks(argument);
  return NULL;
}

/* PyTorch's own threads, if it has GNU's OpenMP: its GOMP_parallel. They are awake, and not more than the cores. */
typedef void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
static parallel pool;
static void forget_pool(void) { pool = NULL; } /* a fork leaves its threads behind */
void dap_use_pool(parallel found) {
  if (!pool) pthread_atfork(NULL, NULL, forget_pool);
  pool = found;
}

static void run_crew(crew* c, long threads) {
  pthread_t others[MOST_THREADS];
  int started = 0;
  if (threads > 1 && pool) {
    pool(run_tasks, c, (unsigned)threads, 0); /* of another number it would end threads and start new ones */
    return;
  }
  if (threads > c->num_tasks) threads = c->num_tasks;
  /* Threads of this call alone, so that nothing is left running that a fork would miss. */
  while (started + 1 < threads && started < MOST_THREADS - 1 && !pthread_create(&others[started], NULL, run_thread, c)) started++;
  run_tasks(c);
  while (started) pthread_join(others[--started], NULL);
}

static int is_small(const call* a) { /* waking a thread would take longer */
  long pairs = 0;
  for (long j = 0; j < a->num_jobs; j++) {
    const int64_t* job = a->jobs + j * NUM_COLUMNS;
    for (long r = 0; r < job[NUM_RUNS]; r++) {
      const int64_t rows = job[HEADS] * job[COUNT]; /* a key is gathered whatever the number of rows */
      pairs += (rows < 16 ? 16 : rows) * a->runs[(job[FIRST_RUN] + r) * RUN_COLUMNS + RUN_COUNT];
      if (pairs > (pool ? 1 << 14 : 1 << 16)) return 0;
    }
  }
  return 1;
}

/* Bytes of scratch that each thread needs. */
int64_t dap_forward_scratch(int64_t d, int64_t most_rows) {
  const char* name;
  return (find_kernel(&name)->forward_scratch(d, most_rows) + 63) / 64 * 64;
}
int64_t dap_backward_scratch(int64_t d, int64_t most_rows, int64_t summed) {
  const char* name;
  return (find_kernel(&name)->backward_scratch(d, most_rows, summed) + 63) / 64 * 64;
}

/* Into how many parts the keys of a job are cut where there are few tasks: the same for any number of threads. */
static long num_parts(const call* a, const kernel* k, const int64_t* job, long num_tasks) {
  long keys = 0;
  if (a->run_tiles || job[HEADS] * job[COUNT] > k->few || num_tasks >= MANY_TASKS) return 1;
  for (long r = 0; r < job[NUM_RUNS]; r++) keys += a->runs[(job[FIRST_RUN] + r) * RUN_COLUMNS + RUN_COUNT];
  const long parts = keys / LEAST_KEYS, most = MANY_TASKS / num_tasks;
  return parts > most ? most : parts > 1 ? parts : 1;
}

/* 0, or 1 if memory ran out: then there are no results. */
int dap_forward(const call* a) {
  const char* name;
  const kernel* k = find_kernel(&name);
  long num_tasks = 0, num = 0, num_floats = 0;
  for (long j = 0; j < a->num_jobs; j++) num_tasks += (a->jobs[j * NUM_COLUMNS + HEADS] * a->jobs[j * NUM_COLUMNS + COUNT] + k->rows - 1) / k->rows;
  for (long j = 0; j < a->num_jobs; j++) {
    const int64_t* job = a->jobs + j * NUM_COLUMNS;
    const long rows = job[HEADS] * job[COUNT], parts = num_parts(a, k, job, num_tasks);
    num += parts > 1 ? parts : (rows + k->rows - 1) / k->rows;
    if (parts > 1) num_floats += parts * rows * (a->d + 2);
  }
  task* tasks = malloc((num + 1) * sizeof(task) + num_floats * sizeof(float));
  if (!tasks) return 1;
  /* Later rows first: under a causal cut they have the most keys, and would keep one thread busy at the end. The
   * order changes no result. */
  long at = num;
  float* partial = (float*)(tasks + num + 1);
  for (long j = 0; j < a->num_jobs; j++) {
    const int64_t* job = a->jobs + j * NUM_COLUMNS;
    const long rows = job[HEADS] * job[COUNT], cuts = (rows + k->rows - 1) / k->rows, parts = num_parts(a, k, job, num_tasks);
    at -= parts > 1 ? parts : cuts;
    for (long i = 0; i < parts && parts > 1; i++, partial += rows * (a->d + 2)) tasks[at + i] = (task){j, 0, rows, i, parts, partial};
    for (long i = 0; i < cuts && parts == 1; i++)
      tasks[at + cuts - 1 - i] = (task){j, rows * i / cuts, rows * (i + 1) / cuts - rows * i / cuts, 0, 1, NULL};
  }
  crew c = {k, a, tasks, a->scratch, a->scratch_bytes, num, 0, 0, 0};
  run_crew(&c, is_small(a) ? 1 : a->threads);
  for (long i = 0; i < num; i += tasks[i].parts)
    if (tasks[i].parts > 1) k->join(a, tasks + i);
  free(tasks);
  return 0;
}

void dap_backward(const grad_call* g, const grad_task* tasks, int64_t num) {
  const char* name;
  crew c = {find_kernel(&name), g, tasks, g->a.scratch, g->a.scratch_bytes, num, 1, 0, 0};
  run_crew(&c, is_small(&g->a) ? 1 : g->a.threads);
}
