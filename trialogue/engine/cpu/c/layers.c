/* What lies between the products of layers, forward and backward: norms, gates, rotations, each in one pass over its
   rows. Products give and take float32, or bfloat16 with HALVES; hidden states and all that is computed here
   are float32. Only rows from `first` on and before `last` are touched, so that threads can share the work. */
#include "rows.h"

/* inputs [rows, width] divided by the root of their mean square, times a weight [width]; `scales` [rows] are what they
   were multiplied by. */
int normalize(const float *inputs, const float *weight, number *output, float *scales, size_t width, double eps,
              size_t first, size_t last)
{
    for (size_t row = first; row < last; row++)
        scales[row] = normalize_row(inputs + row * width, weight, output + row * width, width, eps);
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

/* Both halves of a feed-forward layer [rows, 2 * width] → [rows, width]: the first, times its own logistic function,
   times the second. */
int gate(const number *both, number *output, size_t width, size_t first, size_t last)
{
    for (size_t row = first; row < last; row++)
        gate_row(both + row * 2 * width, both + (row * 2 + 1) * width, output + row * width, width);
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
