/* Attention of one query, or two at once, over the keys and values of a context, which lie in one block of memory or in two. */

#ifndef TURNWISE_SCORES_H
#define TURNWISE_SCORES_H

#include "vectors.h"

#define PADDED(num_keys) (((num_keys) + LANES - 1) / LANES * LANES)

/* The rows of a context: row i is at base + i * dim if i < split (a multiple of LANES), else at own + i * dim. */
typedef struct {
    const float *base, *own;
    int64_t split;
} context;

static inline context all_at(const float *place) { return (context){place, place, 0}; }

static inline const float *row_of(context c, int64_t index, int64_t dim) { return (index < c.split ? c.base : c.own) + index * dim; }

/* One vector with the sums over the lanes of eight vectors. */
static inline vec sums_of(const vec *x) {
#define PAIRS(a, b) (SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15))
#define QUADS(a, b) (SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15))
    vec low = QUADS(PAIRS(x[0], x[1]), PAIRS(x[2], x[3])), high = QUADS(PAIRS(x[4], x[5]), PAIRS(x[6], x[7]));
    return SHUFFLE(low, high, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
}

/* Scores of one query over `num_keys` keys, rounded up to LANES. Scores beyond the last key are meaningless. */
static inline __attribute__((always_inline)) void score(const float *query, context keys, float scale, float *scores,
                                                        int64_t num_keys, int64_t dim) {
    for (int64_t key = 0; key < num_keys; key += LANES) {
        const float *block = row_of(keys, key, dim);
        vec partial[LANES];
        for (int i = 0; i < LANES; i++) {
            const float *k = block + i * dim;
            vec sum = splat(0);
            for (int64_t d = 0; d < dim; d += LANES) sum += *(const vec *)(query + d) * *(const vec *)(k + d);
            partial[i] = sum;
        }
        *(vec *)(scores + key) = sums_of(partial) * splat(scale);
    }
}

/* Replaces scores by exp(score - maximum), or 0 beyond the last key, and returns the sum. `log_sum`, unless NULL, gets the
 * logsumexp of the scores. */
static inline float exponentials(float *scores, int64_t num_keys, float *log_sum) {
    int64_t padded = PADDED(num_keys);
    for (int64_t key = num_keys; key < padded; key++) scores[key] = -INFINITY;
    vec tops = *(const vec *)scores;
    for (int64_t key = LANES; key < padded; key += LANES) {
        vec s = *(const vec *)(scores + key);
        ints is_higher = s > tops;
        tops = (vec)((is_higher & (ints)s) | (~is_higher & (ints)tops));
    }
    float top = tops[0];
    for (int i = 1; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
    vec sum = splat(0);
    for (int64_t key = 0; key < padded; key += LANES) {
        vec e = exp_of(*(const vec *)(scores + key) - splat(top));
        *(vec *)(scores + key) = e;
        sum += e;
    }
    float total = sum_of(sum);
    if (log_sum) *log_sum = top + logf(total);
    return total;
}

#define WIDTH 4 /* vectors of a head that are summed together, in registers */

/* out = weights . values / total */
static inline __attribute__((always_inline)) void mix(const float *weights, context values, float total, float *out,
                                                      int64_t num_keys, int64_t dim) {
    for (int64_t begin = 0; begin < dim; begin += WIDTH * LANES) {
        int width = dim - begin < WIDTH * LANES ? (int)((dim - begin) / LANES) : WIDTH;
        vec even[WIDTH] = {splat(0)}, odd[WIDTH] = {splat(0)};
        int64_t key = 0;
        if (width == WIDTH) {
            for (; key + 2 <= num_keys; key += 2) {
                const float *v = row_of(values, key, dim) + begin;
                vec first = splat(weights[key]), second = splat(weights[key + 1]);
                for (int i = 0; i < WIDTH; i++) {
                    even[i] += first * *(const vec *)(v + i * LANES);
                    odd[i] += second * *(const vec *)(v + dim + i * LANES);
                }
            }
        }
        for (; key < num_keys; key++)
            for (int i = 0; i < width; i++)
                even[i] += splat(weights[key]) * *(const vec *)(row_of(values, key, dim) + begin + i * LANES);
        for (int i = 0; i < width; i++) *(vec *)(out + begin + i * LANES) = (even[i] + odd[i]) / splat(total);
    }
}

/* `score` for two queries at once, which reads the keys from memory once; `mix_pair` does so for `mix`. */
static inline __attribute__((always_inline)) void score_pair(const float *query, context keys, float scale,
                                                             float *scores, int64_t stride, int64_t num_keys, int64_t dim) {
    for (int64_t key = 0; key < num_keys; key += LANES) {
        const float *block = row_of(keys, key, dim);
        vec first[LANES], second[LANES];
        for (int i = 0; i < LANES; i++) {
            const float *k = block + i * dim;
            vec sum = splat(0), other = splat(0);
            for (int64_t d = 0; d < dim; d += LANES) {
                vec part = *(const vec *)(k + d);
                sum += *(const vec *)(query + d) * part;
                other += *(const vec *)(query + dim + d) * part;
            }
            first[i] = sum;
            second[i] = other;
        }
        *(vec *)(scores + key) = sums_of(first) * splat(scale);
        *(vec *)(scores + stride + key) = sums_of(second) * splat(scale);
    }
}

static inline __attribute__((always_inline)) void mix_pair(const float *weights, int64_t stride, context values,
                                                           const float *totals, float *out, int64_t num_keys, int64_t dim) {
    for (int64_t begin = 0; begin < dim; begin += WIDTH * LANES) {
        int width = dim - begin < WIDTH * LANES ? (int)((dim - begin) / LANES) : WIDTH;
        vec first[WIDTH] = {splat(0)}, second[WIDTH] = {splat(0)};
        if (width == WIDTH)
            for (int64_t key = 0; key < num_keys; key++) {
                vec one = splat(weights[key]), other = splat(weights[stride + key]);
                for (int i = 0; i < WIDTH; i++) {
                    vec part = *(const vec *)(row_of(values, key, dim) + begin + i * LANES);
                    first[i] += one * part;
                    second[i] += other * part;
                }
            }
        else
            for (int64_t key = 0; key < num_keys; key++)
                for (int i = 0; i < width; i++) {
                    vec part = *(const vec *)(row_of(values, key, dim) + begin + i * LANES);
                    first[i] += splat(weights[key]) * part;
                    second[i] += splat(weights[stride + key]) * part;
                }
        for (int i = 0; i < width; i++) {
            *(vec *)(out + begin + i * LANES) = first[i] / splat(totals[0]);
            *(vec *)(out + dim + begin + i * LANES) = second[i] / splat(totals[1]);
        }
    }
}

/* Attention of queries [num_queries, dim] over the same keys. `scores` has room for two rows of PADDED(num_keys); `log_sums`
 * [num_queries] may be NULL. */
static inline __attribute__((always_inline)) void attend_queries(const float *queries, context keys, context values,
                                                                 float scale, float *scores, float *out, float *log_sums,
                                                                 int64_t num_queries, int64_t num_keys, int64_t dim) {
    int64_t stride = PADDED(num_keys), q = 0;
    for (; q + 2 <= num_queries; q += 2) {
        float totals[2];
        score_pair(queries + q * dim, keys, scale, scores, stride, num_keys, dim);
        for (int i = 0; i < 2; i++)
            totals[i] = exponentials(scores + i * stride, num_keys, log_sums ? log_sums + q + i : 0);
        mix_pair(scores, stride, values, totals, out + q * dim, num_keys, dim);
    }
    if (q < num_queries) {
        score(queries + q * dim, keys, scale, scores, num_keys, dim);
        float total = exponentials(scores, num_keys, log_sums ? log_sums + q : 0);
        mix(scores, values, total, out + q * dim, num_keys, dim);
    }
}

/* Calls with the head size as a constant if it is a usual one. */
#define BY_DIM(dim, call)               \
    if ((dim) == 32) call(32);          \
    else if ((dim) == 64) call(64);     \
    else if ((dim) == 128) call(128);   \
    else call(dim)

#endif
