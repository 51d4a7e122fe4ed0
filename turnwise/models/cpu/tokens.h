/* The work of a decoder layer on one token between its matrix products. */

#ifndef TURNWISE_TOKENS_H
#define TURNWISE_TOKENS_H

#include "scores.h"

/* Caches of keys and values [slots, kv_heads, capacity, head_dim], and the settings of attention over them. A slot reads its
 * positions below splits[slot] from slot bases[slot]. `head_dim`, `capacity` and splits are multiples of LANES. */
typedef struct {
    float *keys, *values;
    const int64_t *bases, *splits;
    int64_t num_heads, num_kv_heads, head_dim, capacity;
    float scale, eps;
} attention;

/* to [dim] = silu(x[:dim]) * x[dim:] */
static inline void gate_row(const float *x, float *to, int64_t dim) {
    const float *gate = x, *up = x + dim;
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
        vec g = *(const vec *)(gate + i);
        *(vec *)(to + i) = g * sigmoid_of(g) * *(const vec *)(up + i);
    }
    for (; i < dim; i++) to[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

/* Splits the heads of a token: queries and keys are normed if `norms` [heads + kv_heads, head_dim] is given (Qwen3) and rotated
 * by `rotary` [positions, 2, head_dim] (cosines; sines with the sign of their half); queries go to `queries`
 * [heads, head_dim], keys and values to (slot, position) of the caches. */
static inline void place_token(const float *qkv, const float *norms, const float *rotary, int64_t slot, int64_t position,
                               float *queries, const attention *a) {
    int64_t dim = a->head_dim, half = dim / 2;
    int64_t cached = (slot * a->num_kv_heads * a->capacity + position) * dim;
    const float *cosines = rotary + position * 2 * dim, *sines = cosines + dim;
    float normed[dim];
    for (int64_t head = 0; head < a->num_heads + a->num_kv_heads; head++, qkv += dim) {
        const float *x = qkv;
        if (norms) norm_row(qkv, norms + head * dim, a->eps, normed, dim), x = normed;
        float *to = head < a->num_heads ? queries + head * dim
                                        : a->keys + cached + (head - a->num_heads) * a->capacity * dim;
        for (int64_t i = 0; i < half; i++) to[i] = x[i] * cosines[i] + x[i + half] * sines[i];
        for (int64_t i = half; i < dim; i++) to[i] = x[i] * cosines[i] + x[i - half] * sines[i];
    }
    for (int64_t head = 0; head < a->num_kv_heads; head++, qkv += dim)
        memcpy(a->values + cached + head * a->capacity * dim, qkv, dim * sizeof(float));
}

/* Attention of those queries of a token that share key head `head`, at the start of `queries` and `out`. They see the positions
 * of the slot up to the token's own. `scores` has room for two rows of PADDED(capacity). */
static inline void attend_token(const float *queries, int64_t slot, int64_t position, int64_t head, float *out, float *scores,
                                const attention *a) {
    int64_t dim = a->head_dim, shared = a->num_heads / a->num_kv_heads, split = a->splits[slot];
    int64_t own = (slot * a->num_kv_heads + head) * a->capacity * dim;
    int64_t base = (a->bases[slot] * a->num_kv_heads + head) * a->capacity * dim;
    context k = {a->keys + base, a->keys + own, split}, v = {a->values + base, a->values + own, split};
#define CALL(dim) attend_queries(queries, k, v, a->scale, scores, out, 0, shared, position + 1, dim)
    BY_DIM(dim, CALL);
#undef CALL
}

#endif
