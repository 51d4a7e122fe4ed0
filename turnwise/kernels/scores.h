/* One query over the keys and values of its context, which lie one after another. */

#ifndef TURNWISE_SCORES_H
#define TURNWISE_SCORES_H

#include "vectors.h"

#define PADDED(num_keys) (((num_keys) + LANES - 1) / LANES * LANES)

/* Sums over lanes of eight vectors, as one. */
static inline vec sums_of(const vec *x) {
#define PAIRS(a, b) (SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15))
#define QUADS(a, b) (SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15))
    vec low = QUADS(PAIRS(x[0], x[1]), PAIRS(x[2], x[3])), high = QUADS(PAIRS(x[4], x[5]), PAIRS(x[6], x[7]));
    return SHUFFLE(low, high, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
}

/* Scores of `num_keys` keys, rounded up to LANES, for one query. Keys beyond the last one are read and overwritten later. */
static inline __attribute__((always_inline)) void score(const float *query, const float *keys, float scale, float *scores,
                                                        int64_t num_keys, int64_t dim) {
    for (int64_t key = 0; key < num_keys; key += LANES) {
        vec partial[LANES];
        for (int i = 0; i < LANES; i++) {
            const float *k = keys + (key + i) * dim;
            vec sum = splat(0);
            for (int64_t d = 0; d < dim; d += LANES) sum += *(const vec *)(query + d) * *(const vec *)(k + d);
            partial[i] = sum;
        }
        *(vec *)(scores + key) = sums_of(partial) * splat(scale);
    }
}

/* Scores to weights, not yet divided by their sum, which is returned. Those beyond the last key become 0. `log_sum`, unless
 * NULL, gets the logarithm of the sum of the scores' exponentials. */
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

#define WIDTH 4 /* vectors of a head that are mixed together, in registers */

/* out = weights . values / total */
static inline __attribute__((always_inline)) void mix(const float *weights, const float *values, float total, float *out,
                                                      int64_t num_keys, int64_t dim) {
    for (int64_t begin = 0; begin < dim; begin += WIDTH * LANES) {
        int width = dim - begin < WIDTH * LANES ? (int)((dim - begin) / LANES) : WIDTH;
        vec even[WIDTH] = {splat(0)}, odd[WIDTH] = {splat(0)};
        int64_t key = 0;
        if (width == WIDTH) {
            for (; key + 2 <= num_keys; key += 2) {
                const float *v = values + key * dim + begin;
                vec first = splat(weights[key]), second = splat(weights[key + 1]);
                for (int i = 0; i < WIDTH; i++) {
                    even[i] += first * *(const vec *)(v + i * LANES);
                    odd[i] += second * *(const vec *)(v + dim + i * LANES);
                }
            }
        }
        for (; key < num_keys; key++)
            for (int i = 0; i < width; i++)
                even[i] += splat(weights[key]) * *(const vec *)(values + key * dim + begin + i * LANES);
        for (int i = 0; i < width; i++) *(vec *)(out + begin + i * LANES) = (even[i] + odd[i]) / splat(total);
    }
}

#endif
