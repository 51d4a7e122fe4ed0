/* What a decoder layer does between its matrix products when it answers, in float32 for a CPU.
 *
 * Each function is one pass over memory. Arrays are dense and row-major, shapes are given in elements. Every output is
 * computed by one thread in one order, so results depend neither on the number of threads nor on the rest of the batch.
 */

#include "tokens.h"

void rms_norm(const float *x, const float *weight, float eps, float *out, int64_t num_rows, int64_t dim,
              int64_t max_threads) {
#pragma omp parallel for schedule(static) THREADS(num_rows)
    for (int64_t row = 0; row < num_rows; row++) norm_row(x + row * dim, weight, eps, out + row * dim, dim);
}

/* out [rows, dim] = silu(x[:, :dim]) * x[:, dim:] */
void silu_mul(const float *x, float *out, int64_t num_rows, int64_t dim, int64_t max_threads) {
#pragma omp parallel for schedule(static) THREADS(num_rows)
    for (int64_t row = 0; row < num_rows; row++) gate_row(x + row * 2 * dim, out + row * dim, dim);
}

/* `place_token` for each of N tokens: `qkv` [N, (heads + 2 kv_heads) head_dim], `queries` [N, heads, head_dim]. */
void place_heads(const float *qkv, const float *norms, float eps, const float *rotary, const int64_t *slots,
                 const int64_t *positions, float *queries, float *keys, float *values, int64_t num_tokens,
                 int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t capacity, int64_t max_threads) {
    attention a = {keys, values, 0, 0, num_heads, num_kv_heads, head_dim, capacity, 0, eps};
#pragma omp parallel for schedule(static) THREADS(num_tokens)
    for (int64_t token = 0; token < num_tokens; token++)
        place_token(qkv + token * (num_heads + 2 * num_kv_heads) * head_dim, norms, rotary, slots[token], positions[token],
                    queries + token * num_heads * head_dim, &a);
}

/* `attend_token` for each of N tokens: `queries` and `out` [N, heads, head_dim]. Returns 0, or 1 where memory was short. */
int attend(const float *queries, float *keys, float *values, const int64_t *slots, const int64_t *positions,
           const int64_t *bases, const int64_t *splits, float scale, float *out, int64_t num_tokens, int64_t num_heads,
           int64_t num_kv_heads, int64_t head_dim, int64_t capacity, int64_t max_threads) {
    attention a = {keys, values, bases, splits, num_heads, num_kv_heads, head_dim, capacity, scale, 0};
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
            int64_t token = unit / num_kv_heads, head = unit % num_kv_heads;
            int64_t first = (token * num_heads + head * (num_heads / num_kv_heads)) * head_dim;
            if (scores) attend_token(queries + first, slots[token], positions[token], head, out + first, scores, &a);
        }
        free(scores);
    }
    return failed;
}
