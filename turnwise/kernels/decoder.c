/* What a decoder layer does between its matrix products when it answers, in float32 for a CPU.
 *
 * Each function is one pass over memory. Arrays are dense and row-major, shapes are given in elements. Every output is
 * computed by one thread in one order, so results depend neither on the number of threads nor on the rest of the batch.
 */

#include "scores.h"

void rms_norm(const float *x, const float *weight, float eps, float *out, int64_t num_rows, int64_t dim,
              int64_t max_threads) {
#pragma omp parallel for schedule(static) THREADS(num_rows)
    for (int64_t row = 0; row < num_rows; row++) norm_row(x + row * dim, weight, eps, out + row * dim, dim);
}

/* out [rows, dim] = silu(x[:, :dim]) * x[:, dim:] */
void silu_mul(const float *x, float *out, int64_t num_rows, int64_t dim, int64_t max_threads) {
#pragma omp parallel for schedule(static) THREADS(num_rows)
    for (int64_t row = 0; row < num_rows; row++) {
        const float *gate = x + row * 2 * dim, *up = gate + dim;
        float *to = out + row * dim;
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) {
            vec g = *(const vec *)(gate + i);
            *(vec *)(to + i) = g * sigmoid_of(g) * *(const vec *)(up + i);
        }
        for (; i < dim; i++) to[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    }
}

/* Takes the heads of N tokens apart: queries and keys are normed (Qwen3; where `norms` [heads + kv_heads, head_dim] is given)
 * and rotated by `rotary` [positions, 2, head_dim] (cosines; sines with the sign of their half); queries go to `queries`
 * [N, heads, head_dim], keys and values to (slot, position) of the caches [slots, kv_heads, capacity, head_dim]. */
void place_heads(const float *qkv, const float *norms, float eps, const float *rotary, const int64_t *slots,
                 const int64_t *positions, float *queries, float *keys, float *values, int64_t num_tokens,
                 int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t capacity, int64_t max_threads) {
    int64_t num_rotated = num_heads + num_kv_heads, half = head_dim / 2;
#pragma omp parallel for schedule(static) THREADS(num_tokens)
    for (int64_t token = 0; token < num_tokens; token++) {
        const float *from = qkv + token * (num_rotated + num_kv_heads) * head_dim;
        const float *cosines = rotary + positions[token] * 2 * head_dim, *sines = cosines + head_dim;
        int64_t cached = (slots[token] * num_kv_heads * capacity + positions[token]) * head_dim;
        float normed[head_dim];
        for (int64_t head = 0; head < num_rotated; head++, from += head_dim) {
            const float *x = from;
            if (norms) norm_row(from, norms + head * head_dim, eps, normed, head_dim), x = normed;
            float *to = head < num_heads ? queries + (token * num_heads + head) * head_dim
                                         : keys + cached + (head - num_heads) * capacity * head_dim;
            for (int64_t i = 0; i < half; i++) to[i] = x[i] * cosines[i] + x[i + half] * sines[i];
            for (int64_t i = half; i < head_dim; i++) to[i] = x[i] * cosines[i] + x[i - half] * sines[i];
        }
        for (int64_t head = 0; head < num_kv_heads; head++, from += head_dim)
            memcpy(values + cached + head * capacity * head_dim, from, head_dim * sizeof(float));
    }
}

/* Attention of N tokens over the caches [slots, kv_heads, capacity, head_dim]: each sees the positions of its slot up to its
 * own, those below splits[slot] in slot bases[slot]. `head_dim`, `capacity` and splits are multiples of LANES. Returns 0, or 1
 * where memory was short. */
int attend(const float *queries, const float *keys, const float *values, const int64_t *slots, const int64_t *positions,
           const int64_t *bases, const int64_t *splits, float scale, float *out, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
           int64_t capacity, int64_t max_threads) {
    int64_t shared = num_heads / num_kv_heads;
    int failed = 0;
#pragma omp parallel THREADS(num_tokens *num_kv_heads)
    {
        float *scores = malloc(2 * PADDED(capacity) * sizeof(float));
        if (!scores) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 8)
        for (int64_t unit = 0; unit < num_tokens * num_kv_heads; unit++) {
            if (!scores) continue;
            int64_t token = unit / num_kv_heads, head = unit % num_kv_heads;
            int64_t slot = slots[token], own = (slot * num_kv_heads + head) * capacity * head_dim;
            int64_t base = (bases[slot] * num_kv_heads + head) * capacity * head_dim;
            int64_t first = (token * num_heads + head * shared) * head_dim, num_keys = positions[token] + 1;
            const float *q = queries + first;
            context k = {keys + base, keys + own, splits[slot]}, v = {values + base, values + own, splits[slot]};
#define CALL(dim) attend_queries(q, k, v, scale, scores, out + first, 0, shared, num_keys, dim)
            BY_DIM(head_dim, CALL);
#undef CALL
        }
        free(scores);
    }
    return failed;
}
