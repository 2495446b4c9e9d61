/* What lies between the products of a layer, for the few rows of a decoding step: each is a handful of operations for
   torch, and each of those takes longer to begin than to do. */
#include "tiles.h"
#include <math.h>

/* inputs [rows, width] divided by the root of their mean square, times a weight [width]. */
int normalize(const float *inputs, const float *weight, float *output, size_t rows, size_t width, double eps)
{
    for (size_t row = 0; row < rows; row++, inputs += width, output += width) {
        lanes squares = {0};
        float total = 0;
        size_t i = 0;
        for (; i + LANES <= width; i += LANES)
            squares += load(inputs + i) * load(inputs + i);
        for (size_t lane = 0; lane < LANES; lane++)
            total += squares[lane];
        for (; i < width; i++)
            total += inputs[i] * inputs[i];
        float scale = 1.0f / sqrtf(total / width + (float)eps);
        for (i = 0; i < width; i++)
            output[i] = inputs[i] * scale * weight[i];
    }
    return 0;
}

/* Both halves of a feed-forward layer [rows, 2 * width] → [rows, width]: the first, times its own logistic function,
   times the second. */
int gate(const float *both, float *output, size_t rows, size_t width)
{
    for (size_t row = 0; row < rows; row++, both += 2 * width, output += width) {
        size_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            lanes x = load(both + i), weights = power(choose(x < 0, x, -x));
            lanes share = choose(x < 0, weights, (lanes){0} + 1.0f) / (1.0f + weights);
            store(output + i, x * share * load(both + width + i));
        }
        for (; i < width; i++)
            output[i] = both[i] / (1.0f + expf(-both[i])) * both[width + i];
    }
    return 0;
}

/* Turns the first `heads` heads of each row [heads and others, width] by its angles [rows, width], of which the sines
   of the first half are negated already → [rows, heads, width]. */
int rotate(const float *inputs, const float *cosines, const float *sines, float *output, size_t rows, size_t apart,
           size_t heads, size_t width)
{
    size_t half = width / 2;
    for (size_t row = 0; row < rows; row++, inputs += apart, cosines += width, sines += width)
        for (size_t head = 0; head < heads; head++, output += width) {
            const float *from = inputs + head * width;
            for (size_t i = 0; i < half; i++) {
                output[i] = from[i] * cosines[i] + from[i + half] * sines[i];
                output[i + half] = from[i + half] * cosines[i + half] + from[i] * sines[i + half];
            }
        }
    return 0;
}
