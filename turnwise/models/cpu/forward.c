/* A whole forward pass over packed tokens, products included, in float32 for a CPU.
 *
 * One thread takes a block of rows through half a layer, so that the block stays in the caches of its core. Threads wait for
 * each other after each half, since all keys and values of a layer must be there before a token attends to them.
 */

#include "products.h"
#include "tokens.h"

#define BLOCK 32 /* most rows of a block: their widest activations and a panel of weights fit into the L2 cache */

typedef struct {
    const float *input_norm, *head_norms, *post_norm;
    linear qkv, output, gate_up, down;
    float *keys, *values;
    int64_t capacity;
} layer;

typedef struct {
    const layer *layers;
    const float *embedding, *rotary, *final_norm;
    linear lm_head;
    const int64_t *bases, *splits;
    int64_t num_layers, num_heads, num_kv_heads, head_dim;
    float scale, eps;
} decoder;

typedef struct {
    const int64_t *token_ids, *slots, *positions, *last_tokens;
    int64_t num_tokens, num_last;
} step;

static int64_t most(int64_t x, int64_t y) { return x > y ? x : y; }

#define LITTLE 12000000 /* multiplications below which more threads cost more than they save */

static int64_t num_weights(const decoder *d) {
    int64_t sum = 0;
    for (const layer *l = d->layers; l < d->layers + d->num_layers; l++)
        sum += l->qkv.inputs * l->qkv.outputs + l->output.inputs * l->output.outputs + l->gate_up.inputs * l->gate_up.outputs +
               l->down.inputs * l->down.outputs;
    return sum;
}

/* The floats of workspace that a thread needs for a block. */
static int64_t block_size(const decoder *d) {
    int64_t row = 0, capacity = 0;
    for (const layer *l = d->layers; l < d->layers + d->num_layers; l++) {
        int64_t inputs = most(l->qkv.inputs, l->output.inputs) + l->qkv.inputs, outputs = most(l->qkv.outputs, l->gate_up.outputs);
        row = most(row, inputs + outputs + l->down.inputs);
        capacity = most(capacity, l->capacity);
    }
    return BLOCK * row + 2 * PADDED(capacity);
}

/* Computes queries, keys and values of the rows from `first` on. */
static void place_rows(const decoder *d, const layer *l, const attention *a, const step *s, const float *hidden, int64_t first,
                       int64_t num_rows, float *queries, float *scratch) {
    int64_t size = l->qkv.inputs;
    float *normed = scratch, *qkv = normed + BLOCK * size;
    for (int64_t row = 0; row < num_rows; row++)
        norm_row(hidden + (first + row) * size, l->input_norm, d->eps, normed + row * size, size);
    multiply(normed, num_rows, l->qkv, qkv, 0);
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t token = first + row;
        place_token(qkv + row * l->qkv.outputs, l->head_norms, d->rotary, s->slots[token], s->positions[token],
                    queries + token * l->output.inputs, a);
    }
}

/* Attention and MLP of the rows from `first` on. Row i is token tokens[i] (last layer, with logits), or i if that is NULL. */
static void finish_rows(const decoder *d, const layer *l, const attention *a, const step *s, float *hidden,
                        const int64_t *tokens, int64_t first, int64_t num_rows, const float *queries, float *logits,
                        float *scratch) {
    int64_t size = l->qkv.inputs, heads = l->output.inputs, shared = d->num_heads / d->num_kv_heads * d->head_dim;
    float *mixed = scratch, *rows = mixed + BLOCK * most(size, heads), *gates = rows + BLOCK * size;
    float *gated = gates + BLOCK * most(l->qkv.outputs, l->gate_up.outputs), *scores = gated + BLOCK * l->down.inputs;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t token = tokens ? tokens[first + row] : first + row;
        for (int64_t head = 0; head < d->num_kv_heads; head++)
            attend_token(queries + token * heads + head * shared, s->slots[token], s->positions[token], head,
                         mixed + row * heads + head * shared, scores, a);
        memcpy(rows + row * size, hidden + token * size, size * sizeof(float));
    }
    multiply(mixed, num_rows, l->output, rows, 1);
    for (int64_t row = 0; row < num_rows; row++)
        norm_row(rows + row * size, l->post_norm, d->eps, mixed + row * size, size);
    multiply(mixed, num_rows, l->gate_up, gates, 0);
    for (int64_t row = 0; row < num_rows; row++)
        gate_row(gates + row * l->gate_up.outputs, gated + row * l->down.inputs, l->down.inputs);
    multiply(gated, num_rows, l->down, rows, 1);
    if (!tokens) {
        memcpy(hidden + first * size, rows, num_rows * size * sizeof(float));
        return;
    }
    for (int64_t row = 0; row < num_rows; row++)
        norm_row(rows + row * size, d->final_norm, d->eps, mixed + row * size, size);
    multiply(mixed, num_rows, d->lm_head, logits + first * d->lm_head.outputs, 0);
}

/* Logits [num_last, vocabulary] after the tokens `last_tokens`. `workspace` has room for `workspace_size` floats. */
void forward(const decoder *d, const step *s, float *workspace, float *logits, int64_t max_threads) {
    int64_t size = d->layers->qkv.inputs, heads = d->layers->output.inputs, num_tokens = s->num_tokens;
    int64_t num_threads = num_tokens * num_weights(d) < LITTLE ? 1 : most(1, max_threads);
    int64_t block = (num_tokens + num_threads - 1) / num_threads, last_block = (s->num_last + num_threads - 1) / num_threads;
    block = block < BLOCK ? block : BLOCK;
    last_block = most(1, last_block < BLOCK ? last_block : BLOCK);
    float *hidden = workspace, *queries = hidden + num_tokens * size, *rest = queries + num_tokens * heads;
    int64_t thread_size = block_size(d), num_taken = 0;
#pragma omp parallel num_threads(num_threads)
    {
        int64_t number;
#pragma omp atomic capture
        number = num_taken++;
        float *scratch = rest + number * thread_size;
#pragma omp for schedule(static)
        for (int64_t token = 0; token < num_tokens; token++)
            memcpy(hidden + token * size, d->embedding + s->token_ids[token] * size, size * sizeof(float));
        for (const layer *l = d->layers; l < d->layers + d->num_layers; l++) {
            attention a = {l->keys,         l->values,   d->bases,    d->splits, d->num_heads,
                           d->num_kv_heads, d->head_dim, l->capacity, d->scale,  d->eps};
            int is_last = l == d->layers + d->num_layers - 1;
            int64_t num_rows = is_last ? s->num_last : num_tokens, rows = is_last ? last_block : block;
#pragma omp for schedule(dynamic, 1)
            for (int64_t first = 0; first < num_tokens; first += block)
                place_rows(d, l, &a, s, hidden, first, first + block < num_tokens ? block : num_tokens - first, queries,
                           scratch);
#pragma omp for schedule(dynamic, 1)
            for (int64_t first = 0; first < num_rows; first += rows)
                finish_rows(d, l, &a, s, hidden, is_last ? s->last_tokens : 0, first,
                            first + rows < num_rows ? rows : num_rows - first, queries, logits, scratch);
        }
    }
}

/* The floats of workspace that `forward` needs for so many tokens and threads. */
int64_t workspace_size(const decoder *d, int64_t num_tokens, int64_t max_threads) {
    int64_t shared = num_tokens * (d->layers->qkv.inputs + d->layers->output.inputs);
    return shared + most(1, max_threads) * block_size(d);
}
