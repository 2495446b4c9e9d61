/* Operations on the rows of a layer between matmuls: norms, gates, rotary embeddings. The inputs and outputs of matmuls
   are float32, or bfloat16 with HALVES. */
#include "tiles.h"
#include <math.h>

#ifdef HALVES
typedef uint16_t scalar;
typedef uint16_t scalars __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(sizeof(uint16_t))));
static inline lanes get(const scalar *from)
{
    return (lanes)(__builtin_convertvector(*(const scalars *)from, whole) << 16);
}
static inline void put(scalar *to, lanes values)
{
    *(scalars *)to = __builtin_convertvector(to_halves(values), scalars);
}
static inline float get_one(const scalar *from)
{
    uint32_t bits = (uint32_t)*from << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline void put_one(scalar *to, float value) { *to = (scalar)to_half(value); }
#else
typedef float scalar;
static inline lanes get(const scalar *from) { return load(from); }
static inline void put(scalar *to, lanes values) { store(to, values); }
static inline float get_one(const scalar *from) { return *from; }
static inline void put_one(scalar *to, float value) { *to = value; }
#endif

static inline float sum_lanes(lanes values)
{
    float total = 0;
    for (size_t lane = 0; lane < LANES; lane++)
        total += values[lane];
    return total;
}

/* RMS norm of a row; returns the factor that the row was multiplied by. */
static inline float normalize_row(const float *from, const float *weight, scalar *to, size_t width, float eps)
{
    lanes squares = {0};
    size_t i = 0;
    for (; i + LANES <= width; i += LANES)
        squares += load(from + i) * load(from + i);
    float total = sum_lanes(squares);
    for (; i < width; i++)
        total += from[i] * from[i];
    float scale = 1.0f / sqrtf(total / width + eps);
    for (i = 0; i + LANES <= width; i += LANES)
        put(to + i, load(from + i) * scale * load(weight + i));
    for (; i < width; i++)
        put_one(to + i, from[i] * scale * weight[i]);
    return scale;
}

/* The logistic function. */
static inline lanes sigmoid(lanes x)
{
    lanes weights = exp_lanes(select_lanes(x < 0, x, -x));
    return select_lanes(x < 0, weights, (lanes){0} + 1.0f) / (1.0f + weights);
}

/* silu(gate) * up, one row. */
static inline void gate_row(const scalar *gate, const scalar *up, scalar *to, size_t width)
{
    size_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        lanes x = get(gate + i);
        put(to + i, x * sigmoid(x) * get(up + i));
    }
    for (; i < width; i++) {
        float x = get_one(gate + i);
        put_one(to + i, x / (1.0f + expf(-x)) * get_one(up + i));
    }
}

/* Rotary embedding of one head: x * cos + (x with its halves swapped) * sin. Backward, the sines swap as well. */
static inline void apply_rotary_row(const scalar *from, const float *cosines, const float *sines, scalar *to,
                                    size_t half, int backward)
{
    const float *low = backward ? sines + half : sines, *high = backward ? sines : sines + half;
    size_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        lanes one = get(from + i), other = get(from + half + i);
        put(to + i, one * load(cosines + i) + other * load(low + i));
        put(to + half + i, other * load(cosines + half + i) + one * load(high + i));
    }
    for (; i < half; i++) {
        float one = get_one(from + i), other = get_one(from + half + i);
        put_one(to + i, one * cosines[i] + other * low[i]);
        put_one(to + half + i, other * cosines[half + i] + one * high[i]);
    }
}
