/* The native kernel against plain loops in double precision, for processors that have no Python here. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attend.h"

int64_t dap_forward_scratch(int64_t d, int64_t most_rows);
int64_t dap_backward_scratch(int64_t d, int64_t most_rows, int64_t summed);
int dap_forward(const call* a);
void dap_backward(const grad_call* g, const grad_task* tasks, int64_t num);
const char* dap_isa(void);

enum { N = 150, H = 2, MOST_D = 72, SIZE = N * H * MOST_D };
static char scratch[1 << 23] __attribute__((aligned(64)));
static double q[SIZE], k[SIZE], v[SIZE], go[SIZE], glse[N * H], out[SIZE], lse[N * H], dq[SIZE], dk[SIZE], dv[SIZE];
static double worst;

static int random_below(int n) { return rand() / 7 % n; }

/* Multiples of 1/8 below 2 are exact in every format. */
static void fill(double* x, void* narrow, long size, int dtype) {
  for (long i = 0; i < size; i++) {
    x[i] = (random_below(31) - 15) / 8.0;
    const float wide = (float)x[i];
    uint32_t bits;
    memcpy(&bits, &wide, 4);
    if (dtype == 0) ((float*)narrow)[i] = wide;
    if (dtype == 1) ((uint16_t*)narrow)[i] = bits >> 16;
    if (dtype == 2) ((_Float16*)narrow)[i] = (_Float16)wide;
  }
}
static double read_one(const void* x, long i, int dtype) {
  const uint32_t bits = dtype == 1 ? (uint32_t)((const uint16_t*)x)[i] << 16 : 0;
  float wide;
  memcpy(&wide, &bits, 4);
  return dtype == 0 ? ((const float*)x)[i] : dtype == 1 ? wide : (double)((const _Float16*)x)[i];
}
static void compare(const char* what, const double* exact, const void* got, long size, int dtype) {
  /* Gradients are sums over many rows of what half precision has rounded. */
  const double bound = (dtype == 0 ? 1e-5 : dtype == 1 ? 1e-2 : 2e-3) * (dtype && what[0] == 'd' ? 10 : 1);
  for (long i = 0; i < size; i++) {
    const double value = read_one(got, i, dtype), error = value == exact[i] ? 0 : fabs(value - exact[i]) / (1 + fabs(exact[i]));
    if (!(error < bound)) printf("%s[%ld] is %g, not %g\n", what, i, value, exact[i]), exit(1);
    if (dtype == 0 && error > worst) worst = error;
  }
}

/* Queries 0, step, ... of both heads, which share a key head, and two runs of keys. */
static void check(int d, int dtype, int causal, int phantom, int masked, int step, int rows) {
  static char narrow[9][SIZE * 4];
  static float out_lse[N * H], narrow_glse[N * H];
  uint8_t mask[N];
  const int64_t runs[] = {1, 2, 60, 1, 0, 3, 50, 3};
  const int64_t job[] = {0, 0, 0, 0, 0, H, 1, 0, 0, step, rows, 0, 2, causal, phantom, 1, 1, 1};
  fill(q, narrow[0], N * H * d, dtype);
  fill(k, narrow[1], N * d, dtype);
  fill(v, narrow[2], N * d, dtype);
  fill(go, narrow[3], N * H * d, dtype);
  fill(glse, narrow_glse, N * H, 0);
  for (int i = 0; i < N; i++) mask[i] = !masked || random_below(3);
  memset(narrow[4], 0, sizeof narrow - 4 * sizeof narrow[0]);
  for (int i = 0; i < N * H; i++) out_lse[i] = -INFINITY;
  const tensor queries = {0, N * H * d, H * d, d}, keys = {0, N * d, d, d}, sums = {0, N * H, H, 1};
#define AT(which, memory) (tensor){memory, which.batch, which.time, which.head}
  grad_call g = {.a = {.q = AT(queries, narrow[0]), .k = AT(keys, narrow[1]), .v = AT(keys, narrow[2]), .out = AT(queries, narrow[4]),
                       .lse = AT(sums, out_lse), .mask = {mask, N, 1, 0}, .jobs = job, .runs = runs, .num_jobs = 1, .d = d, .threads = 2,
                       .most_rows = H * rows, .scratch = scratch, .dtype = dtype, .out_dtype = dtype, .scale = 0.3},
                 .grad_out = AT(queries, narrow[3]), .grad_lse = AT(sums, narrow_glse), .dq = AT(queries, narrow[5]),
                 .dk = AT(keys, narrow[6]), .dv = AT(keys, narrow[7]), .longest = N};
  g.a.scratch_bytes = dap_forward_scratch(d, H * rows);
  if (dap_forward(&g.a)) exit(2);
  const int64_t order[] = {0};
  const grad_task task = {0, 0, 1, 0, N};
  g.order = order;
  g.a.scratch_bytes = dap_backward_scratch(d, H * rows, dtype ? N : 0);
  dap_backward(&g, &task, 1);

  memset(out, 0, sizeof out), memset(dq, 0, sizeof dq), memset(dk, 0, sizeof dk), memset(dv, 0, sizeof dv);
  for (int i = 0; i < N * H; i++) lse[i] = -INFINITY;
  for (int h = 0; h < H; h++)
    for (int row = 0; row < rows; row++) {
      const int time = row * step;
      const double *query = q + (time * H + h) * d, *grad = go + (time * H + h) * d;
      double scores[N], weights[N], total = phantom, delta = -glse[time * H + h], *sum = out + (time * H + h) * d;
      memset(weights, 0, sizeof weights);
      for (int r = 0; r < 2; r++)
        for (int i = 0; i < runs[4 * r + 2]; i++) {
          const int key = runs[4 * r] + i * runs[4 * r + 1];
          if (!mask[key] || (causal && key > time)) continue;
          weights[key] += runs[4 * r + 3];
        }
      for (int key = 0; key < N; key++) {
        scores[key] = 0;
        for (int c = 0; c < d; c++) scores[key] += 0.3 * query[c] * k[key * d + c];
        total += weights[key] * exp(scores[key]);
      }
      if (total == 0) continue;
      lse[time * H + h] = log(total);
      for (int key = 0; key < N; key++)
        for (int c = 0; c < d; c++) sum[c] += weights[key] * exp(scores[key]) / total * v[key * d + c];
      for (int c = 0; c < d; c++) delta += grad[c] * sum[c];
      for (int key = 0; key < N; key++) {
        const double p = weights[key] * exp(scores[key]) / total;
        double dp = 0;
        for (int c = 0; c < d; c++) dp += grad[c] * v[key * d + c];
        for (int c = 0; c < d; c++) {
          dq[(time * H + h) * d + c] += 0.3 * p * (dp - delta) * k[key * d + c];
          dk[key * d + c] += 0.3 * p * (dp - delta) * query[c];
          dv[key * d + c] += p * grad[c];
        }
      }
    }
  compare("lse", lse, out_lse, N * H, 0);
  compare("out", out, narrow[4], N * H * d, dtype);
  compare("dq", dq, narrow[5], N * H * d, dtype);
  compare("dk", dk, narrow[6], N * d, dtype);
  compare("dv", dv, narrow[7], N * d, dtype);
}

int main(int num_arguments, char** arguments) {
  const int sizes[] = {1, 7, 24, 64, 72}, num = num_arguments > 1 ? atoi(arguments[1]) : 400;
  for (int i = 0; i < num; i++) {
    const int step = 1 + random_below(3), rows = i % 4 ? 1 + random_below(N / step) : 1 + random_below(3);
    check(sizes[random_below(5)], random_below(3), i % 2, random_below(2) * 5, random_below(2), step, rows);
  }
  printf("%s %.1e\n", dap_isa(), worst);
  return 0;
}
