/* What is done to the rows of a layer between its products: norms, gates, rotations. Numbers that products give and
   take are float32, or bfloat16 with HALVES. */
#include "tiles.h"
#include <math.h>

#ifdef HALVES
typedef uint16_t number;
typedef uint16_t numbers __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(sizeof(uint16_t))));
static inline lanes get(const number *from)
{
    return (lanes)(__builtin_convertvector(*(const numbers *)from, whole) << 16);
}
static inline void put(number *to, lanes values) { *(numbers *)to = __builtin_convertvector(to_halves(values), numbers); }
static inline float get_one(const number *from)
{
    uint32_t bits = (uint32_t)*from << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline void put_one(number *to, float value) { *to = (number)to_half(value); }
#else
typedef float number;
static inline lanes get(const number *from) { return load(from); }
static inline void put(number *to, lanes values) { store(to, values); }
static inline float get_one(const number *from) { return *from; }
static inline void put_one(number *to, float value) { *to = value; }
#endif

static inline float add_up(lanes values)
{
    float total = 0;
    for (size_t lane = 0; lane < LANES; lane++)
        total += values[lane];
    return total;
}

/* A row divided by the root of its mean square, times a weight; returns what it was multiplied by. */
static inline float normalize_row(const float *from, const float *weight, number *to, size_t width, float eps)
{
    lanes squares = {0};
    size_t i = 0;
    for (; i + LANES <= width; i += LANES)
        squares += load(from + i) * load(from + i);
    float total = add_up(squares);
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
static inline lanes squash(lanes x)
{
    lanes weights = power(choose(x < 0, x, -x));
    return choose(x < 0, weights, (lanes){0} + 1.0f) / (1.0f + weights);
}

/* One half of a feed-forward layer, times its own logistic function, times the other half. */
static inline void gate_row(const number *one, const number *other, number *to, size_t width)
{
    size_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        lanes x = get(one + i);
        put(to + i, x * squash(x) * get(other + i));
    }
    for (; i < width; i++) {
        float x = get_one(one + i);
        put_one(to + i, x / (1.0f + expf(-x)) * get_one(other + i));
    }
}

/* One head by its angles: x * cos + (x with its halves exchanged) * sin; backward the sines change places, too. */
static inline void turn(const number *from, const float *cosines, const float *sines, number *to, size_t half, int back)
{
    const float *low = back ? sines + half : sines, *high = back ? sines : sines + half;
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
