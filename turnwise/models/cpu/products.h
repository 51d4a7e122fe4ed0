/* Products with weights that are laid out in panels. */

#ifndef TURNWISE_PRODUCTS_H
#define TURNWISE_PRODUCTS_H

#include "vectors.h"

#define WIDE 16 /* outputs per panel */
#ifdef __AVX512F__
#define TALL 8 /* rows that are computed together, in registers */
#define REGISTER 16 /* floats per vector register: compilers keep wider vectors in memory */
#else
#define TALL 6
#define REGISTER LANES
#endif
#define HALVES (WIDE / REGISTER)
typedef float wide __attribute__((vector_size(4 * REGISTER), aligned(4), may_alias));

/* out = weight x + bias, with `weight` [outputs, inputs] in `panels` [outputs / WIDE, inputs, WIDE], padded with zeros; `bias`
 * may be NULL. */
typedef struct {
    const float *panels, *bias;
    int64_t inputs, outputs;
} linear;

/* Rows of `x` times a panel. Each output is summed in the order of the inputs, however many rows there are. */
static inline __attribute__((always_inline)) void tile(const float *x, int64_t inputs, const float *panel, const float *bias,
                                                       float *out, int64_t stride, int64_t num_columns, int adds,
                                                       const int num_rows) {
    wide sums[TALL][HALVES];
    for (int i = 0; i < num_rows; i++)
        for (int half = 0; half < HALVES; half++) sums[i][half] = (wide){0};
    for (int64_t k = 0; k < inputs; k++) {
        const wide *weights = (const wide *)(panel + k * WIDE);
        for (int i = 0; i < num_rows; i++)
            for (int half = 0; half < HALVES; half++) sums[i][half] += x[i * inputs + k] * weights[half];
    }
    for (int i = 0; i < num_rows; i++) {
        float *to = out + i * stride;
        if (num_columns == WIDE && !bias) {
            for (int half = 0; half < HALVES; half++) {
                wide *place = (wide *)(to + half * REGISTER);
                if (adds) sums[i][half] += *place;
                *place = sums[i][half];
            }
        } else {
            for (int64_t j = 0; j < num_columns; j++) {
                float sum = sums[i][j / REGISTER][j % REGISTER] + (bias ? bias[j] : 0);
                to[j] = adds ? to[j] + sum : sum;
            }
        }
    }
}

/* out [rows, outputs] from `x` [rows, inputs]; with `adds` the product is added to `out`. */
static void multiply(const float *x, int64_t num_rows, linear l, float *out, int adds) {
    for (int64_t first = 0; first < l.outputs; first += WIDE) {
        const float *panel = l.panels + first * l.inputs, *bias = l.bias ? l.bias + first : 0;
        int64_t num_columns = l.outputs - first < WIDE ? l.outputs - first : WIDE;
        for (int64_t row = 0; row < num_rows; row += TALL) {
            const float *from = x + row * l.inputs;
            float *to = out + row * l.outputs + first;
#define CASE(n)                                                                    \
    case n:                                                                        \
        tile(from, l.inputs, panel, bias, to, l.outputs, num_columns, adds, n);    \
        break
            switch (num_rows - row < TALL ? num_rows - row : TALL) {
                CASE(1);
                CASE(2);
                CASE(3);
                CASE(4);
                CASE(5);
                CASE(6);
#if TALL == 8
                CASE(7);
                CASE(8);
#endif
            }
#undef CASE
        }
    }
}

#endif
