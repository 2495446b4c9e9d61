/* Operations between the matmuls of a layer, forward and backward: norms, gates, rotary embeddings, each in one pass
   over its rows. The inputs and outputs of matmuls are float32, or bfloat16 with HALVES; hidden states and
   everything computed here are float32. Only rows [first, last) are touched, so that threads can share the work. */
#include "rows.h"

/* RMS norm of inputs [rows, width] with a weight [width]; `scales` [rows] gets the factor of each row. */
int normalize(const float *inputs, const float *weight, scalar *output, float *scales, size_t width, double eps,
              size_t first, size_t last)
{
    for (size_t row = first; row < last; row++)
        scales[row] = normalize_row(inputs + row * width, weight, output + row * width, width, eps);
    return 0;
}

/* Gradients of `normalize` by that of its output, `grad_output` [rows, width]: `grad` of the inputs, and what these
   rows add to `grad_weight`. Computes the norm again, into `output`. */
int backpropagate_norm(const float *inputs, const float *weight, const float *scales, const scalar *grad_output,
                       scalar *output, float *grad, float *grad_weight, size_t width, size_t first, size_t last)
{
    for (size_t row = first; row < last; row++) {
        const float *from = inputs + row * width;
        const scalar *grad_row = grad_output + row * width;
        scalar *normed = output + row * width;
        float *to = grad + row * width, scale = scales[row];
        lanes sum = {0};
        size_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            lanes x = load(from + i), d = get(grad_row + i), w = load(weight + i), plain = x * scale;
            sum += d * w * x;
            store(grad_weight + i, load(grad_weight + i) + d * plain);
            put(normed + i, plain * w);
        }
        float total = sum_lanes(sum);
        for (; i < width; i++) {
            float plain = from[i] * scale, d = get_one(grad_row + i);
            total += d * weight[i] * from[i];
            grad_weight[i] += d * plain;
            put_one(normed + i, plain * weight[i]);
        }
        float mean = total * scale * scale / width;
        for (i = 0; i + LANES <= width; i += LANES)
            store(to + i, scale * (get(grad_row + i) * load(weight + i) - mean * load(from + i)));
        for (; i < width; i++)
            to[i] = scale * (get_one(grad_row + i) * weight[i] - mean * from[i]);
    }
    return 0;
}

/* silu(gate) * up: gate and up side by side [rows, 2 * width] → [rows, width]. */
int gate(const scalar *both, scalar *output, size_t width, size_t first, size_t last)
{
    for (size_t row = first; row < last; row++)
        gate_row(both + row * 2 * width, both + (row * 2 + 1) * width, output + row * width, width);
    return 0;
}

/* Gradient of `gate` by that of its output, `grad_output` [rows, width]. Computes the output again, too. */
int backpropagate_gate(const scalar *both, const scalar *grad_output, scalar *output, scalar *grad, size_t width,
                       size_t first, size_t last)
{
    for (size_t row = first; row < last; row++) {
        const scalar *one = both + row * 2 * width, *other = one + width, *grad_row = grad_output + row * width;
        scalar *gated = output + row * width, *to = grad + row * 2 * width;
        size_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            lanes x = get(one + i), y = get(other + i), d = get(grad_row + i), share = sigmoid(x), open = x * share;
            put(gated + i, open * y);
            put(to + i, d * y * (share + open * (1.0f - share)));
            put(to + width + i, d * open);
        }
        for (; i < width; i++) {
            float x = get_one(one + i), y = get_one(other + i), d = get_one(grad_row + i);
            float share = 1.0f / (1.0f + expf(-x)), open = x * share;
            put_one(gated + i, open * y);
            put_one(to + i, d * y * (share + open * (1.0f - share)));
            put_one(to + width + i, d * open);
        }
    }
    return 0;
}

/* Split `qkv` [rows, heads + 2 * kv_heads, width] into queries, keys and values, and apply rotary embeddings to
   queries and keys. `cosines` and `sines` are [rows, width]; the sines of the first half are negated. */
int apply_rotary(const scalar *qkv, const float *cosines, const float *sines, scalar *query, scalar *key, scalar *value,
                 size_t heads, size_t kv_heads, size_t width, size_t first, size_t last)
{
    for (size_t row = first; row < last; row++) {
        const scalar *from = qkv + row * (heads + 2 * kv_heads) * width;
        const float *cosine = cosines + row * width, *sine = sines + row * width;
        for (size_t head = 0; head < heads; head++, from += width)
            apply_rotary_row(from, cosine, sine, query + (row * heads + head) * width, width / 2, 0);
        for (size_t head = 0; head < kv_heads; head++, from += width)
            apply_rotary_row(from, cosine, sine, key + (row * kv_heads + head) * width, width / 2, 0);
        memcpy(value + row * kv_heads * width, from, kv_heads * width * sizeof(scalar));
    }
    return 0;
}

/* Gradient of `qkv` by those of queries, keys and values. */
int backpropagate_rotary(const scalar *query, const scalar *key, const scalar *value, const float *cosines,
                         const float *sines, scalar *qkv, size_t heads, size_t kv_heads, size_t width, size_t first,
                         size_t last)
{
    for (size_t row = first; row < last; row++) {
        scalar *to = qkv + row * (heads + 2 * kv_heads) * width;
        const float *cosine = cosines + row * width, *sine = sines + row * width;
        for (size_t head = 0; head < heads; head++, to += width)
            apply_rotary_row(query + (row * heads + head) * width, cosine, sine, to, width / 2, 1);
        for (size_t head = 0; head < kv_heads; head++, to += width)
            apply_rotary_row(key + (row * kv_heads + head) * width, cosine, sine, to, width / 2, 1);
        memcpy(to, value + row * kv_heads * width, kv_heads * width * sizeof(scalar));
    }
    return 0;
}
