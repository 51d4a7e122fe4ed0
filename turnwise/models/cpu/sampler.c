/* Draws tokens from softmax distributions. */

#include "vectors.h"

/* Replaces scores [size] by exp(score - maximum) and returns their sum, which isn't finite if a score is NaN or +inf, or all
 * are -inf. */
static double exponentials_of(float *x, int64_t size) {
    int64_t whole = size / LANES * LANES, i;
    vec tops = splat(-INFINITY);
    for (i = 0; i < whole; i += LANES) {
        vec s = *(const vec *)(x + i);
        ints is_higher = s > tops;
        tops = (vec)((is_higher & (ints)s) | (~is_higher & (ints)tops));
    }
    float top = tops[0];
    for (int lane = 1; lane < LANES; lane++) top = tops[lane] > top ? tops[lane] : top;
    for (; i < size; i++) top = x[i] > top ? x[i] : top;
    double total = 0;
    for (i = 0; i < whole; i += LANES) {
        vec e = exp_of(*(const vec *)(x + i) - splat(top));
        *(vec *)(x + i) = e;
        total += sum_of(e);
    }
    for (; i < size; i++) total += x[i] = expf(x[i] - top);
    return total;
}

/* The first index whose cumulative sum exceeds the threshold, which is below the sum of all. Its value is never 0. */
static int64_t place_beyond(const float *x, double threshold, int64_t size) {
    double sum = 0;
    int64_t begin = 0, chosen = 0;
    for (; begin + LANES <= size; begin += LANES) {
        double next = sum + sum_of(*(const vec *)(x + begin));
        if (next > threshold) break;
        sum = next;
    }
    for (int64_t i = begin; i < size && i < begin + LANES; i++) {
        if (x[i] == 0) continue;
        chosen = i;
        sum += x[i];
        if (sum > threshold) break;
    }
    return chosen;
}

static int64_t place_of_greatest(const float *x, int64_t size) {
    int64_t best = 0;
    for (int64_t i = 1; i < size; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* Draws a token from each row of `scores` [rows, size], which is overwritten, and gives its log-probability. If `is_greedy`,
 * it is the best one, with log-probability 0; else the row's uniform number in [0, 1) picks it. Returns 1 if a row has a
 * NaN, a +inf or nothing but -inf, else 0. */
int draw(float *scores, const uint8_t *is_greedy, const float *uniforms, int64_t *tokens, float *log_probs, int64_t num_rows,
         int64_t size, int64_t max_threads) {
    int failed = 0;
#pragma omp parallel for schedule(static) THREADS(num_rows)
    for (int64_t row = 0; row < num_rows; row++) {
        float *x = scores + row * size;
        int64_t best = is_greedy[row] ? place_of_greatest(x, size) : 0;
        double total = exponentials_of(x, size);
        if (!isfinite(total)) {
#pragma omp atomic write
            failed = 1;
        }
        tokens[row] = is_greedy[row] ? best : place_beyond(x, uniforms[row] * total, size);
        log_probs[row] = is_greedy[row] ? 0 : (float)log(x[tokens[row]] / total);
    }
    return failed;
}
