/* Vectors of floats: the compiler's vector extensions, and intrinsics where those have no word for a thing. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INL static inline __attribute__((always_inline))
#if defined(__AVX512F__)
#include <immintrin.h>
#define VL 16 /* lanes of a vector */
#define MR 8  /* rows of a register tile */
#elif defined(__AVX2__)
#include <immintrin.h>
#define VL 8
#define MR 4
#else
#define VL 4
#define MR 8
#endif
#define NV 3 /* most vectors of a register tile */

typedef float vf __attribute__((vector_size(VL * 4), aligned(VL * 4)));
typedef float vf_any __attribute__((vector_size(VL * 4), aligned(4)));
typedef int32_t vi __attribute__((vector_size(VL * 4), aligned(VL * 4)));

INL vf splat(float x) {
#if defined(__AVX512F__)
  return (vf)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (vf)_mm256_set1_ps(x);
#else
  return x - (vf){0};
#endif
}
INL vi splat_int(int32_t x) { return x - (vi){0}; }
INL vf load(const float* p) { return (vf) * (const vf_any*)p; }
INL void store(float* p, vf x) { *(vf_any*)p = x; }
INL vf choose(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
INL vf larger(vf a, vf b) { /* b if one of them is NaN */
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return choose(a > b, a, b);
#endif
}
INL float sum_of(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#elif defined(__AVX2__)
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
#else
  return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}
INL float max_of(vf x) {
  float found = x[0];
  for (int i = 1; i < VL; i++) found = x[i] > found ? x[i] : found;
  return found;
}
/* The sum over c < d of a[c] * b[c]. */
INL float dot(const float* a, const float* b, long d) {
  vf even = splat(0), odd = splat(0);
  long c = 0;
  for (; c + 2 * VL <= d; c += 2 * VL) {
    even += load(a + c) * load(b + c);
    odd += load(a + c + VL) * load(b + c + VL);
  }
  if (c + VL <= d) even += load(a + c) * load(b + c), c += VL;
  float sum = sum_of(even + odd);
  for (; c < d; c++) sum += a[c] * b[c];
  return sum;
}
INL int any(vi mask) {
  int found = 0;
  for (int x = 0; x < VL; x++) found |= mask[x];
  return found;
}

/* 2^x with a relative error of 1.6e-7; 0 for x <= -127, NaN for NaN. x <= 0 up to rounding. */
INL vf exp2_of(vf x) {
  x = larger(splat(-127.0f), x);
  const vf z = x + splat(12582912.0f), f = x - (z - splat(12582912.0f)); /* 1.5 * 2^23 rounds to integers */
  vf p = splat(1.3264726900e-03f);
  p = p * f + splat(9.6715126606e-03f);
  p = p * f + splat(5.5507337442e-02f);
  p = p * f + splat(2.4022242085e-01f);
  p = p * f + splat(6.9314697760e-01f);
  p = p * f + splat(1.0f);
  return (vf)((vi)p + ((vi)z << 23));
}

#if defined(__AVX2__)
INL void transpose_8x8(__m256 a[8]) {
  __m256 b[8];
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    b[i] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x20);
    b[i + 4] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x31);
  }
  memcpy(a, b, sizeof b);
}
#endif
/* to[c * step + x] = rows[x][c] * factor for VL rows and c < d */
INL void pack_transposed(float* restrict to, long step, const float* const rows[VL], long d, float factor) {
  long c = 0;
#if defined(__AVX2__)
  for (; c + 8 <= d; c += 8)
    for (int x = 0; x < VL; x += 8) {
      __m256 a[8];
      for (int i = 0; i < 8; i++) a[i] = _mm256_mul_ps(_mm256_loadu_ps(rows[x + i] + c), _mm256_set1_ps(factor));
      transpose_8x8(a);
      for (int i = 0; i < 8; i++) _mm256_storeu_ps(to + (c + i) * step + x, a[i]);
    }
#endif
  for (; c < d; c++)
    for (int x = 0; x < VL; x++) to[c * step + x] = rows[x][c] * factor;
}
/* rows[x][c] = from[c * step + x] * factors[x] */
INL void unpack_transposed(float* const rows[VL], const float* restrict from, long step, long d, const float* factors) {
  long c = 0;
#if defined(__AVX2__)
  for (; c + 8 <= d; c += 8)
    for (int x = 0; x < VL; x += 8) {
      __m256 a[8];
      for (int i = 0; i < 8; i++) a[i] = _mm256_mul_ps(_mm256_loadu_ps(from + (c + i) * step + x), _mm256_loadu_ps(factors + x));
      transpose_8x8(a);
      for (int i = 0; i < 8; i++) _mm256_storeu_ps(rows[x + i] + c, a[i]);
    }
#endif
  for (; c < d; c++)
    for (int x = 0; x < VL; x++) rows[x][c] = from[c * step + x] * factors[x];
}

/* Rows of float32 (0), bfloat16 (1) or float16 (2). */
INL void read_row(float* restrict to, const void* base, long at, long d, int dtype) {
  long i = 0;
  if (dtype == 0) {
    const float* from = (const float*)base + at;
    for (; i + VL <= d; i += VL) store(to + i, load(from + i));
    for (; i < d; i++) to[i] = from[i];
    return;
  }
  const uint16_t* from = (const uint16_t*)base + at;
  if (dtype == 1) {
#if defined(__AVX2__)
    for (; i + 8 <= d; i += 8) {
      const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from + i)));
      _mm256_storeu_ps(to + i, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
    }
#endif
    for (; i < d; i++) {
      const uint32_t bits = (uint32_t)from[i] << 16;
      memcpy(to + i, &bits, 4);
    }
    return;
  }
#if defined(__F16C__)
  for (; i + 8 <= d; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
  for (; i < d; i++) to[i] = _cvtsh_ss(from[i]);
#else
  for (; i < d; i++) {
    const uint32_t sign = (uint32_t)(from[i] & 0x8000) << 16, rest = from[i] & 0x7fff;
    float value;
    uint32_t bits = rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : (rest << 13) + 0x38000000;
    memcpy(&value, &bits, 4);
    if (rest < 0x400) value = (float)rest * 5.9604644775390625e-8f; /* subnormal */
    memcpy(&bits, &value, 4);
    bits |= sign;
    memcpy(to + i, &bits, 4);
  }
#endif
}
INL uint16_t to_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INL uint16_t to_float16(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, 0);
#else
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00; /* rounds beyond the largest */
  if (bits < 0x38800000) {                      /* subnormal: multiples of 2^-24, to even */
    float value;
    memcpy(&value, &bits, 4);
    return sign | (uint16_t)lrintf(value * 16777216.0f);
  }
  return sign | (uint16_t)((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13);
#endif
}
INL void write_row(void* base, long at, const float* from, long d, int dtype) {
  if (dtype == 0)
    memcpy((float*)base + at, from, d * 4);
  else
    for (long i = 0; i < d; i++) ((uint16_t*)base + at)[i] = dtype == 1 ? to_bfloat16(from[i]) : to_float16(from[i]);
}
INL void fetch_row(const void* base, long at, long d, int dtype) {
  const long size = dtype ? 2 : 4;
  for (long i = 0; i < d * size; i += 64) __builtin_prefetch((const char*)base + at * size + i, 0, 2);
}
