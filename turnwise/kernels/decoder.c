/* What a decoder layer does between its matrix products, in float32 for a CPU: each function one pass over memory.
 *
 * Compiled by build.py when it's first needed. Arrays are dense and row-major, shapes are given in elements. Every output
 * is computed by one thread in one order, so results don't depend on the number of threads or on the rest of the batch.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 8
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Rows below which starting other threads costs more than they save. */
#define FEW 16
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

/* x / sqrt(mean x^2 + eps) * weight over rows of `dim` numbers. */
static inline void norm_row(const float *x, const float *weight, float eps, float *out, int64_t dim) {
    vec squares = splat(0);
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) squares += *(const vec *)(x + i) * *(const vec *)(x + i);
    float total = sum_of(squares);
    for (; i < dim; i++) total += x[i] * x[i];
    float scale = 1.0f / sqrtf(total / dim + eps);
    for (i = 0; i < dim; i++) out[i] = x[i] * scale * weight[i];
}

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
            ints is_negative = g < splat(0);
            vec decay = exp_of((vec)((ints)g | (ints)splat(-0.0f))); /* exp(-|g|) */
            vec top = (vec)((is_negative & (ints)decay) | (~is_negative & (ints)splat(1.0f)));
            *(vec *)(to + i) = g * top / (splat(1.0f) + decay) * *(const vec *)(up + i);
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

/* Scores to weights, not yet divided by their sum, which is returned. Those beyond the last key become 0. */
static inline float exponentials(float *scores, int64_t num_keys) {
    int64_t padded = (num_keys + LANES - 1) / LANES * LANES;
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
    return sum_of(sum);
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

static inline __attribute__((always_inline)) void attend_heads(const float *queries, const float *keys, const float *values,
                                                               float scale, float *scores, float *out, int64_t num_queries,
                                                               int64_t num_keys, int64_t dim) {
    for (int64_t q = 0; q < num_queries; q++) {
        score(queries + q * dim, keys, scale, scores, num_keys, dim);
        float total = exponentials(scores, num_keys);
        mix(scores, values, total, out + q * dim, num_keys, dim);
    }
}

/* Attention of N tokens over the caches [slots, kv_heads, capacity, head_dim]: each sees the positions of its slot up to its
 * own. `head_dim` is a multiple of LANES and `capacity` of LANES too. Returns 0, or 1 where memory was short. */
int attend(const float *queries, const float *keys, const float *values, const int64_t *slots, const int64_t *positions,
           float scale, float *out, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
           int64_t capacity, int64_t max_threads) {
    int64_t shared = num_heads / num_kv_heads;
    int failed = 0;
#pragma omp parallel THREADS(num_tokens *num_kv_heads)
    {
        float *scores = malloc((capacity + LANES) * sizeof(float));
        if (!scores) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 8)
        for (int64_t unit = 0; unit < num_tokens * num_kv_heads; unit++) {
            if (!scores) continue;
            int64_t token = unit / num_kv_heads, head = unit % num_kv_heads;
            int64_t cached = (slots[token] * num_kv_heads + head) * capacity * head_dim;
            int64_t first = (token * num_heads + head * shared) * head_dim, num_keys = positions[token] + 1;
            const float *q = queries + first, *k = keys + cached, *v = values + cached;
            if (head_dim == 32)
                attend_heads(q, k, v, scale, scores, out + first, shared, num_keys, 32);
            else if (head_dim == 64)
                attend_heads(q, k, v, scale, scores, out + first, shared, num_keys, 64);
            else if (head_dim == 128)
                attend_heads(q, k, v, scale, scores, out + first, shared, num_keys, 128);
            else
                attend_heads(q, k, v, scale, scores, out + first, shared, num_keys, head_dim);
        }
        free(scores);
    }
    return failed;
}
