/* The work of a decoder layer between its matrix products in training: forward and backward, in float32 for a CPU.
 *
 * Gradients of weights are summed over a fixed number of parts in a fixed order, whatever the number of threads.
 */

#include "tokens.h"

#define PARTS 32

/* In all forward functions one thread computes an output, in a fixed order. So it depends neither on the number of threads nor
 * on the other rows. */
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

/* Heads x [N, heads, dim], whose tokens are `stride` numbers apart, normed by weight [dim] unless it's NULL, then rotated by
 * cosines and sines [N, dim] unless those are NULL (Su et al. 2021, halves of a head as pairs). */
void norm_rotate(const float *x, int64_t stride, const float *weight, float eps, const float *cosines, const float *sines,
                 float *out, int64_t num_tokens, int64_t num_heads, int64_t dim, int64_t max_threads) {
    int64_t half = dim / 2;
#pragma omp parallel for schedule(static) THREADS(num_tokens)
    for (int64_t token = 0; token < num_tokens; token++) {
        const float *c = cosines ? cosines + token * dim : 0, *s = cosines ? sines + token * dim : 0;
        for (int64_t head = 0; head < num_heads; head++) {
            const float *from = x + token * stride + head * dim;
            float *to = out + (token * num_heads + head) * dim;
            if (!cosines) {
                norm_row(from, weight, eps, to, dim);
                continue;
            }
            float normed[dim];
            if (weight) norm_row(from, weight, eps, normed, dim), from = normed;
            for (int64_t i = 0; i < half; i++) {
                to[i] = from[i] * c[i] - from[i + half] * s[i];
                to[i + half] = from[i + half] * c[i + half] + from[i] * s[i + half];
            }
        }
    }
}

/* Gradients of norm_rotate: to `x_grad`, laid out like x, and to `weight_grad` [dim] unless it's NULL. Returns 0, or 1 if
 * memory was short. */
int norm_rotate_backward(const float *grad, const float *x, int64_t stride, const float *weight, float eps,
                         const float *cosines, const float *sines, float *x_grad, float *weight_grad, int64_t num_tokens,
                         int64_t num_heads, int64_t dim, int64_t max_threads) {
    int64_t half = dim / 2;
    float *partial = calloc(PARTS * dim, sizeof(float));
    if (!partial) return 1;
#pragma omp parallel for schedule(static) THREADS(num_tokens)
    for (int64_t part = 0; part < PARTS; part++) {
        float *sums = partial + part * dim, turned[dim];
        for (int64_t token = part * num_tokens / PARTS; token < (part + 1) * num_tokens / PARTS; token++) {
            const float *c = cosines ? cosines + token * dim : 0, *s = cosines ? sines + token * dim : 0;
            for (int64_t head = 0; head < num_heads; head++) {
                const float *g = grad + (token * num_heads + head) * dim, *from = x + token * stride + head * dim;
                float *to = x_grad + token * stride + head * dim;
                if (cosines) {
                    float *back = weight ? turned : to;
                    for (int64_t i = 0; i < half; i++) {
                        back[i] = g[i] * c[i] + g[i + half] * s[i + half];
                        back[i + half] = g[i + half] * c[i + half] - g[i] * s[i];
                    }
                    g = back;
                }
                if (!weight) continue;
                float scale = inverse_size(from, eps, dim), weighted[dim];
                for (int64_t i = 0; i < dim; i++) {
                    weighted[i] = g[i] * weight[i];
                }
                for (int64_t i = 0; weight_grad && i < dim; i++) sums[i] += g[i] * from[i] * scale;
                float along = dot(weighted, from, dim) / dim * scale * scale;
                for (int64_t i = 0; i < dim; i++) to[i] = scale * (weighted[i] - from[i] * along);
            }
        }
    }
    for (int64_t i = 0; weight_grad && i < dim; i++) {
        weight_grad[i] = 0;
        for (int64_t part = 0; part < PARTS; part++) weight_grad[i] += partial[part * dim + i];
    }
    free(partial);
    return 0;
}

/* Gradient of silu_mul. In `x` and `x_grad` [rows, 2 dim] the first half of a row is the gate. */
void silu_mul_backward(const float *grad, const float *x, float *x_grad, int64_t num_rows, int64_t dim, int64_t max_threads) {
#pragma omp parallel for schedule(static) THREADS(num_rows)
    for (int64_t row = 0; row < num_rows; row++) {
        const float *from = grad + row * dim, *gate = x + row * 2 * dim, *up = gate + dim;
        float *gate_grad = x_grad + row * 2 * dim, *up_grad = gate_grad + dim;
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) {
            vec g = *(const vec *)(from + i), z = *(const vec *)(gate + i), s = sigmoid_of(z);
            *(vec *)(up_grad + i) = g * z * s;
            *(vec *)(gate_grad + i) = g * *(const vec *)(up + i) * s * (splat(1.0f) + z * (splat(1.0f) - s));
        }
        for (; i < dim; i++) {
            float s = 1.0f / (1.0f + expf(-gate[i]));
            up_grad[i] = from[i] * gate[i] * s;
            gate_grad[i] = from[i] * up[i] * s * (1.0f + gate[i] * (1.0f - s));
        }
    }
}

/* Attention over packed tokens. The queries of branch b are those of tokens branches[b] to branches[b + 1]. Its path is the
 * tokens paths[ends[b]] to paths[ends[b + 1]], which end with the branch. A query sees the path up to its own token. */

#define BLOCK 4 /* queries whose gradients to keys and values are computed together */

typedef struct {
    const int64_t *branches, *paths, *ends;
    int64_t num_branches, num_heads, num_kv_heads, dim, longest;
} tree;

/* Copies one head of the rows of a path to `to`, padded with rows of zeros to a multiple of LANES. */
static inline void gather(const float *from, const tree *t, int64_t branch, int64_t head, float *to) {
    int64_t length = t->ends[branch + 1] - t->ends[branch];
    const int64_t *path = t->paths + t->ends[branch];
    for (int64_t i = 0; i < length; i++)
        memcpy(to + i * t->dim, from + (path[i] * t->num_kv_heads + head) * t->dim, t->dim * sizeof(float));
    memset(to + length * t->dim, 0, (PADDED(length) - length) * t->dim * sizeof(float));
}

static inline __attribute__((always_inline)) void branch_forward(const float *queries, const float *keys, const float *values,
                                                                 float scale, float *out, float *log_sums, const tree *t,
                                                                 int64_t branch, int64_t head, float *scratch, int64_t dim) {
    int64_t length = t->ends[branch + 1] - t->ends[branch], shared = t->num_heads / t->num_kv_heads;
    int64_t first = t->branches[branch], num_before = length - (t->branches[branch + 1] - first);
    float *k = scratch, *v = k + PADDED(t->longest) * dim, *scores = v + PADDED(t->longest) * dim;
    gather(keys, t, branch, head, k);
    gather(values, t, branch, head, v);
    for (int64_t token = first; token < t->branches[branch + 1]; token++) {
        int64_t num_keys = num_before + token - first + 1;
        int64_t row = token * t->num_heads + head * shared;
        attend_queries(queries + row * dim, all_at(k), all_at(v), scale, scores, out + row * dim, log_sums + row, shared,
                       num_keys, dim);
    }
}

/* Gradients of a block of queries. Those to keys and values are added to `k_grad` and `v_grad` of the path. */
static inline __attribute__((always_inline)) void block_backward(const int64_t *rows, const int64_t *num_keys, int num_rows,
                                                                 const float *grad, const float *queries, const float *out,
                                                                 const float *log_sums, float scale, const float *k,
                                                                 const float *v, float *q_grad, float *k_grad, float *v_grad,
                                                                 float *weights, float *slopes, int64_t stride, int64_t dim) {
    int64_t most = 0;
    for (int j = 0; j < num_rows; j++) most = num_keys[j] > most ? num_keys[j] : most;
    for (int j = 0; j < num_rows; j++) {
        const float *q = queries + rows[j] * dim, *g = grad + rows[j] * dim;
        float *p = weights + j * stride, *ds = slopes + j * stride, along = dot(g, out + rows[j] * dim, dim);
        score(q, all_at(k), scale, p, num_keys[j], dim);
        score(g, all_at(v), 1.0f, ds, num_keys[j], dim);
        for (int64_t key = num_keys[j]; key < PADDED(most); key++) p[key] = -INFINITY, ds[key] = 0;
        for (int64_t key = 0; key < PADDED(most); key += LANES) {
            vec weight = exp_of(*(vec *)(p + key) - splat(log_sums[rows[j]]));
            *(vec *)(p + key) = weight;
            *(vec *)(ds + key) = weight * (*(vec *)(ds + key) - splat(along)) * splat(scale);
        }
        mix(ds, all_at(k), 1.0f, q_grad + rows[j] * dim, num_keys[j], dim);
    }
    for (int64_t key = 0; key < most; key++) {
        float *to_k = k_grad + key * dim, *to_v = v_grad + key * dim;
        for (int64_t d = 0; d < dim; d += LANES) {
            vec sum_k = *(vec *)(to_k + d), sum_v = *(vec *)(to_v + d);
            for (int j = 0; j < num_rows; j++) {
                sum_k += splat(slopes[j * stride + key]) * *(const vec *)(queries + rows[j] * dim + d);
                sum_v += splat(weights[j * stride + key]) * *(const vec *)(grad + rows[j] * dim + d);
            }
            *(vec *)(to_k + d) = sum_k;
            *(vec *)(to_v + d) = sum_v;
        }
    }
}

static inline __attribute__((always_inline)) void branch_backward(const float *grad, const float *queries, const float *keys,
                                                                  const float *values, const float *out,
                                                                  const float *log_sums, float scale, float *q_grad,
                                                                  float *k_paths, float *v_paths, const tree *t,
                                                                  int64_t branch, int64_t head, float *scratch, int64_t dim) {
    int64_t length = t->ends[branch + 1] - t->ends[branch], shared = t->num_heads / t->num_kv_heads;
    int64_t first = t->branches[branch], num_queries = (t->branches[branch + 1] - first) * shared;
    int64_t num_before = length - num_queries / shared, stride = PADDED(t->longest), size = stride * dim;
    float *k = scratch, *v = k + size, *k_grad = v + size, *v_grad = k_grad + size, *weights = v_grad + size;
    float *slopes = weights + BLOCK * stride;
    gather(keys, t, branch, head, k);
    gather(values, t, branch, head, v);
    memset(k_grad, 0, 2 * size * sizeof(float));
    for (int64_t begin = 0; begin < num_queries; begin += BLOCK) {
        int num_rows = num_queries - begin < BLOCK ? (int)(num_queries - begin) : BLOCK;
        int64_t rows[BLOCK], num_keys[BLOCK];
        for (int j = 0; j < num_rows; j++) {
            int64_t token = (begin + j) / shared;
            rows[j] = (first + token) * t->num_heads + head * shared + (begin + j) % shared;
            num_keys[j] = num_before + token + 1;
        }
        if (num_rows == BLOCK)
            block_backward(rows, num_keys, BLOCK, grad, queries, out, log_sums, scale, k, v, q_grad, k_grad, v_grad, weights,
                           slopes, stride, dim);
        else
            block_backward(rows, num_keys, num_rows, grad, queries, out, log_sums, scale, k, v, q_grad, k_grad, v_grad,
                           weights, slopes, stride, dim);
    }
    for (int64_t i = 0; i < length; i++) {
        int64_t place = ((t->ends[branch] + i) * t->num_kv_heads + head) * dim;
        memcpy(k_paths + place, k_grad + i * dim, dim * sizeof(float));
        memcpy(v_paths + place, v_grad + i * dim, dim * sizeof(float));
    }
}

/* out and log_sums of queries [N, heads, dim] over keys and values [N, kv_heads, dim]; `dim` is a multiple of LANES. Returns
 * 0, or 1 if memory was short. */
int attend_branches(const float *queries, const float *keys, const float *values, const int64_t *branches,
                    const int64_t *paths, const int64_t *ends, float scale, float *out, float *log_sums,
                    int64_t num_branches, int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t longest,
                    int64_t max_threads) {
    tree t = {branches, paths, ends, num_branches, num_heads, num_kv_heads, dim, longest};
    int failed = 0;
#pragma omp parallel num_threads((int)max_threads)
    {
        float *scratch = malloc((2 * dim + 2) * PADDED(longest) * sizeof(float));
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < num_branches * num_kv_heads; unit++) {
            if (!scratch) continue;
#define CALL(size) \
    branch_forward(queries, keys, values, scale, out, log_sums, &t, unit / num_kv_heads, unit % num_kv_heads, scratch, size)
            BY_DIM(dim, CALL);
#undef CALL
        }
        free(scratch);
    }
    return failed;
}

/* Gradients of attend_branches to queries, keys and values. `k_paths` and `v_paths` [sum of path lengths, kv_heads, dim] are
 * scratch memory for the gradients of each path. */
int attend_branches_backward(const float *grad, const float *queries, const float *keys, const float *values,
                             const float *out, const float *log_sums, const int64_t *branches, const int64_t *paths,
                             const int64_t *ends, float scale, float *q_grad, float *k_grad, float *v_grad, float *k_paths,
                             float *v_paths, int64_t num_branches, int64_t num_heads, int64_t num_kv_heads, int64_t dim,
                             int64_t longest, int64_t max_threads) {
    tree t = {branches, paths, ends, num_branches, num_heads, num_kv_heads, dim, longest};
    int failed = 0;
#pragma omp parallel num_threads((int)max_threads)
    {
        float *scratch = malloc((4 * dim + 2 * BLOCK) * PADDED(longest) * sizeof(float));
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < num_branches * num_kv_heads; unit++) {
            if (!scratch) continue;
#define CALL(size)                                                                                                     \
    branch_backward(grad, queries, keys, values, out, log_sums, scale, q_grad, k_paths, v_paths, &t, unit / num_kv_heads, \
                    unit % num_kv_heads, scratch, size)
            BY_DIM(dim, CALL);
#undef CALL
        }
        free(scratch);
#pragma omp for schedule(static)
        for (int64_t head = 0; head < num_kv_heads; head++) {
            for (int64_t place = 0; place < ends[num_branches]; place++) {
                int64_t from = (place * num_kv_heads + head) * dim, to = (paths[place] * num_kv_heads + head) * dim;
                for (int64_t d = 0; d < dim; d++) k_grad[to + d] += k_paths[from + d], v_grad[to + d] += v_paths[from + d];
            }
        }
    }
    return failed;
}
