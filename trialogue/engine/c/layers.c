/* What lies between the products of layers, forward and backward: norms, gates, rotations, each in one pass over its
   rows. Products give and take float32, or bfloat16 with HALVES; hidden states and all that is computed here
   are float32. Only rows from `first` on and before `last` are touched, so that threads can share the work. */
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

/* inputs [rows, width] divided by the root of their mean square, times a weight [width]; `scales` [rows] are what they
   were multiplied by. */
int normalize(const float *inputs, const float *weight, number *output, float *scales, size_t width, double eps,
              size_t first, size_t last)
{
    for (size_t row = first; row < last; row++) {
        const float *from = inputs + row * width;
        number *to = output + row * width;
        lanes squares = {0};
        size_t i = 0;
        for (; i + LANES <= width; i += LANES)
            squares += load(from + i) * load(from + i);
        float total = add_up(squares);
        for (; i < width; i++)
            total += from[i] * from[i];
        float scale = scales[row] = 1.0f / sqrtf(total / width + (float)eps);
        for (i = 0; i + LANES <= width; i += LANES)
            put(to + i, load(from + i) * scale * load(weight + i));
        for (; i < width; i++)
            put_one(to + i, from[i] * scale * weight[i]);
    }
    return 0;
}

/* Of what `normalize` was given and gave, and `pull` [rows, width], the gradient of its output: that of the inputs, and
   what these rows add to that of the weight. `output` is made once more. */
int backpropagate_norm(const float *inputs, const float *weight, const float *scales, const number *pull,
                       number *output, float *grad, float *gained, size_t width, size_t first, size_t last)
{
    for (size_t row = first; row < last; row++) {
        const float *from = inputs + row * width;
        const number *drawn = pull + row * width;
        number *again = output + row * width;
        float *to = grad + row * width, scale = scales[row];
        lanes sum = {0};
        size_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            lanes x = load(from + i), d = get(drawn + i), w = load(weight + i), plain = x * scale;
            sum += d * w * x;
            store(gained + i, load(gained + i) + d * plain);
            put(again + i, plain * w);
        }
        float total = add_up(sum);
        for (; i < width; i++) {
            float plain = from[i] * scale, d = get_one(drawn + i);
            total += d * weight[i] * from[i];
            gained[i] += d * plain;
            put_one(again + i, plain * weight[i]);
        }
        float mean = total * scale * scale / width;
        for (i = 0; i + LANES <= width; i += LANES)
            store(to + i, scale * (get(drawn + i) * load(weight + i) - mean * load(from + i)));
        for (; i < width; i++)
            to[i] = scale * (get_one(drawn + i) * weight[i] - mean * from[i]);
    }
    return 0;
}

/* The logistic function. */
static inline lanes squash(lanes x)
{
    lanes weights = power(choose(x < 0, x, -x));
    return choose(x < 0, weights, (lanes){0} + 1.0f) / (1.0f + weights);
}

/* Both halves of a feed-forward layer [rows, 2 * width] → [rows, width]: the first, times its own logistic function,
   times the second. */
int gate(const number *both, number *output, size_t width, size_t first, size_t last)
{
    for (size_t row = first; row < last; row++) {
        const number *one = both + row * 2 * width, *other = one + width;
        number *to = output + row * width;
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
    return 0;
}

/* Of what `gate` was given and `pull` [rows, width], the gradient of its output: that of both halves. `output` is made
   once more. */
int backpropagate_gate(const number *both, const number *pull, number *output, number *grad, size_t width,
                       size_t first, size_t last)
{
    for (size_t row = first; row < last; row++) {
        const number *one = both + row * 2 * width, *other = one + width, *drawn = pull + row * width;
        number *again = output + row * width, *to = grad + row * 2 * width;
        size_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            lanes x = get(one + i), y = get(other + i), d = get(drawn + i), share = squash(x), open = x * share;
            put(again + i, open * y);
            put(to + i, d * y * (share + open * (1.0f - share)));
            put(to + width + i, d * open);
        }
        for (; i < width; i++) {
            float x = get_one(one + i), y = get_one(other + i), d = get_one(drawn + i);
            float share = 1.0f / (1.0f + expf(-x)), open = x * share;
            put_one(again + i, open * y);
            put_one(to + i, d * y * (share + open * (1.0f - share)));
            put_one(to + width + i, d * open);
        }
    }
    return 0;
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

/* Queries, keys and values of each token, side by side in `joined` [rows, heads + 2 * kept, width], and apart. Queries
   and keys are turned by angles [rows, width], of which the sines of the first half are negated already. */
int turn_apart(const number *joined, const float *cosines, const float *sines, number *query, number *key,
               number *value, size_t heads, size_t kept, size_t width, size_t first, size_t last)
{
    for (size_t row = first; row < last; row++) {
        const number *from = joined + row * (heads + 2 * kept) * width;
        const float *cosine = cosines + row * width, *sine = sines + row * width;
        for (size_t head = 0; head < heads; head++, from += width)
            turn(from, cosine, sine, query + (row * heads + head) * width, width / 2, 0);
        for (size_t head = 0; head < kept; head++, from += width)
            turn(from, cosine, sine, key + (row * kept + head) * width, width / 2, 0);
        memcpy(value + row * kept * width, from, kept * width * sizeof(number));
    }
    return 0;
}

/* The way back: gradients of the three → that of what was joined. */
int turn_back(const number *query, const number *key, const number *value, const float *cosines, const float *sines,
              number *joined, size_t heads, size_t kept, size_t width, size_t first, size_t last)
{
    for (size_t row = first; row < last; row++) {
        number *to = joined + row * (heads + 2 * kept) * width;
        const float *cosine = cosines + row * width, *sine = sines + row * width;
        for (size_t head = 0; head < heads; head++, to += width)
            turn(query + (row * heads + head) * width, cosine, sine, to, width / 2, 1);
        for (size_t head = 0; head < kept; head++, to += width)
            turn(key + (row * kept + head) * width, cosine, sine, to, width / 2, 1);
        memcpy(to, value + row * kept * width, kept * width * sizeof(number));
    }
    return 0;
}
