/* Logits of an update to log-probabilities and probabilities, one row at a time while it is in the CPU's cache.
   torch makes eight passes through memory. */
#include "tiles.h"
#include <math.h>

typedef uint16_t halves __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(sizeof(uint16_t))));

/* Up to LANES numbers; missing ones are very small. */
static lanes load_some(const float *from, size_t count)
{
    float some[LANES];
    if (count >= LANES)
        return load(from);
    for (size_t lane = 0; lane < LANES; lane++)
        some[lane] = lane < count ? from[lane] : -1e30f;
    return load(some);
}

/* For each row of logits [rows, count] in [first, last): the log-probability of its target, its log-sum-exp and its
   entropy. Overwrites the logits; with `is_kept` by probabilities, which go to `rounded` in bfloat16 if it is not NULL.
   Returns 0. */
int weigh(float *logits, const int64_t *targets, float *logprobs, float *sums, float *entropies, uint16_t *rounded,
          size_t is_kept, size_t count, size_t first, size_t last)
{
    for (size_t row = first; row < last; row++) {
        float *line = logits + row * count, target = line[targets[row]], most, total = 0, mean = 0;
        lanes top = load_some(line, count), all = {0}, weighed = {0};
        for (size_t i = LANES; i < count; i += LANES) {
            lanes some = load_some(line + i, count - i);
            top = select_lanes(some > top, some, top);
        }
        most = top[0];
        for (size_t lane = 1; lane < LANES; lane++)
            most = top[lane] > most ? top[lane] : most;
        for (size_t i = 0; i < count; i += LANES) {
            lanes below = load_some(line + i, count - i) - most, weights = exp_lanes(below);
            all += weights;
            weighed += weights * below;
            if (count - i >= LANES)
                store(line + i, weights);
            else
                for (size_t lane = 0; lane < count - i; lane++)
                    line[i + lane] = weights[lane];
        }
        for (size_t lane = 0; lane < LANES; lane++) {
            total += all[lane];
            mean += weighed[lane];
        }
        sums[row] = most + logf(total);
        logprobs[row] = target - sums[row];
        entropies[row] = logf(total) - mean / total;
        if (!is_kept)
            continue;
        float share = 1.0f / total;
        for (size_t i = 0; i < count; i += LANES) {
            if (count - i < LANES)
                for (size_t lane = i; lane < count; lane++) {
                    line[lane] *= share;
                    if (rounded)
                        rounded[row * count + lane] = to_half(line[lane]);
                }
            else if (rounded) {
                whole bits = to_halves(load(line + i) * share);
                *(halves *)(rounded + row * count + i) = __builtin_convertvector(bits, halves);
            } else
                store(line + i, load(line + i) * share);
        }
    }
    return 0;
}
