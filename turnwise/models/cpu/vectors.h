/* Vectors of eight floats, by the extensions that gcc and clang share, and the functions that all kernels need. */

#ifndef TURNWISE_VECTORS_H
#define TURNWISE_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 8
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Rows below which more threads cost more than they save. */
#define FEW 16
/* The number of threads, in functions with an argument `max_threads`. */
#define THREADS(num_rows) num_threads((num_rows) < FEW ? 1 : (int)max_threads)

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

static inline vec splat(float x) { return (vec){x, x, x, x, x, x, x, x}; }

static inline float sum_of(vec x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

/* exp(x) for x <= 0, to 2 units in the last place (the polynomial of Cephes' expf); 0 below -87. */
static inline vec exp_of(vec x) {
    ints is_tiny = x < splat(-87.0f);
    x = (vec)((is_tiny & (ints)splat(-87.0f)) | (~is_tiny & (ints)x));
    vec scaled = x * splat(1.44269504088896341f) - splat(0.5f);
    ints whole = __builtin_convertvector(scaled, ints); /* toward zero, which is up: the nearest integer of x / ln 2 */
    vec n = __builtin_convertvector(whole, vec);
    x -= n * splat(0.693359375f);
    x -= n * splat(-2.12194440e-4f);
    vec y = splat(1.9875691500e-4f);
    y = y * x + splat(1.3981999507e-3f);
    y = y * x + splat(8.3334519073e-3f);
    y = y * x + splat(4.1665795894e-2f);
    y = y * x + splat(1.6666665459e-1f);
    y = y * x + splat(5.0000001201e-1f);
    y = y * x * x + x + splat(1.0f);
    ints power = (whole + 127) << 23;
    return (vec)(~is_tiny & (ints)(y * (vec)power));
}

/* 1 / (1 + exp(-x)) */
static inline vec sigmoid_of(vec x) {
    ints is_negative = x < splat(0);
    vec decay = exp_of((vec)((ints)x | (ints)splat(-0.0f))); /* exp(-|x|) */
    vec top = (vec)((is_negative & (ints)decay) | (~is_negative & (ints)splat(1.0f)));
    return top / (splat(1.0f) + decay);
}

/* The dot product of two rows of `dim` numbers. */
static inline float dot(const float *x, const float *y, int64_t dim) {
    vec sums = splat(0);
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) sums += *(const vec *)(x + i) * *(const vec *)(y + i);
    float total = sum_of(sums);
    for (; i < dim; i++) total += x[i] * y[i];
    return total;
}

/* 1 / sqrt(mean x^2 + eps) */
static inline float inverse_size(const float *x, float eps, int64_t dim) {
    return 1.0f / sqrtf(dot(x, x, dim) / dim + eps);
}

/* x / sqrt(mean x^2 + eps) * weight, for a row of `dim` numbers. */
static inline void norm_row(const float *x, const float *weight, float eps, float *out, int64_t dim) {
    float scale = inverse_size(x, eps, dim);
    for (int64_t i = 0; i < dim; i++) out[i] = x[i] * scale * weight[i];
}

#endif
