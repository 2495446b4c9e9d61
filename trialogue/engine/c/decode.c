/* What a decoding step of a few rows needs most: products with large matrices, and attention of one new token
   in each row, both at the speed at which memory delivers weights, keys and values. */
#include "tiles.h"

#define AT_ONCE 256 /* rows that stay near while the whole matrix passes */

TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8)
TILE(9) TILE(10) TILE(11) TILE(12) TILE(13) TILE(14) TILE(15) TILE(16)

typedef void (*tile)(const unit *, const unit *, size_t, float *, size_t, size_t, int);
static const tile TILES[] = {0,      tile_1, tile_2,  tile_3,  tile_4,  tile_5,  tile_6,  tile_7, tile_8,
                             tile_9, tile_10, tile_11, tile_12, tile_13, tile_14, tile_15, tile_16};

/* How many of the rows that are left make the next tile: as few tiles as can be, of about equal height. */
static size_t next_tile(size_t left)
{
    size_t tiles = (left + ROWS - 1) / ROWS;
    return (left + tiles - 1) / tiles;
}

/* Rows of `width` units, `apart` floats from one to the next, laid side by side tile after tile. */
static void pack(const float *rows, size_t apart, size_t count, size_t width, unit *packed)
{
    for (size_t row = 0, high; row < count; row += high) {
        high = next_tile(count - row);
        for (size_t r = 0; r < high; r++)
            for (size_t k = 0; k < width; k++)
                packed[row * width + k * high + r] = take(rows + (row + r) * apart + k * NUMBERS);
    }
}

/* All packed rows times LANES columns of a matrix. */
static void multiply(const unit *packed, size_t count, size_t width, const unit *matrix, size_t stride,
                     float *output, size_t outputs)
{
    for (size_t row = 0, high; row < count; row += high) {
        high = next_tile(count - row);
        TILES[high](packed + row * width, matrix, stride, output + row * outputs, width, outputs, 0);
    }
}

/* inputs [rows, width] times a matrix in panels [outputs / LANES][width][LANES], width counted in units →
   output [rows, outputs]; only the outputs from `first` on and before `last`, both multiples of LANES, so that
   threads can share the work. 0 when all went well. */
int product(const float *inputs, const unit *panels, float *output, size_t rows, size_t width,
            size_t outputs, size_t first, size_t last)
{
    size_t most = rows < AT_ONCE ? rows : AT_ONCE;
    unit *packed = malloc(most * width * sizeof(unit));
    if (packed == NULL)
        return 1;
    for (size_t row = 0; row < rows; row += AT_ONCE) {
        size_t count = rows - row < AT_ONCE ? rows - row : AT_ONCE;
        pack(inputs + row * width * NUMBERS, width * NUMBERS, count, width, packed);
        for (size_t n = first; n < last; n += LANES)
            multiply(packed, count, width, panels + n * width, LANES, output + row * outputs + n, outputs);
    }
    free(packed);
    return 0;
}

#ifndef PAIRS
/* -- attention ------------------------------------------------------------------------------------------ */

/* A vector turned by n places; clang and gcc each have a way of their own. */
#ifdef __clang__
#if LANES == 16
#define TURN(v, n)                                                                                        \
    __builtin_shufflevector(v, v, n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7, (n + 8) % 16,       \
                            (n + 9) % 16, (n + 10) % 16, (n + 11) % 16, (n + 12) % 16, (n + 13) % 16,     \
                            (n + 14) % 16, (n + 15) % 16)
#else
#define TURN(v, n)                                                                                        \
    __builtin_shufflevector(v, v, n, n + 1, n + 2, n + 3, (n + 4) % 8, (n + 5) % 8, (n + 6) % 8,          \
                            (n + 7) % 8)
#endif
#else
#if LANES == 16
static const whole PLACES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
static const whole PLACES = {0, 1, 2, 3, 4, 5, 6, 7};
#endif
#define TURN(v, n) __builtin_shuffle(v, (PLACES + n) % LANES)
#endif

static float sum(lanes v)
{
#if LANES == 16
    v += TURN(v, 8);
#endif
    v += TURN(v, 4);
    v += TURN(v, 2);
    v += TURN(v, 1);
    return v[0];
}

/* Scores to weights that add up to 1; `count` is a multiple of LANES. */
static void soften(float *scores, size_t count)
{
    lanes top = load(scores), total = {0};
    for (size_t t = LANES; t < count; t += LANES)
        top = choose(load(scores + t) > top, load(scores + t), top);
    float most = top[0];
    for (size_t lane = 1; lane < LANES; lane++)
        most = top[lane] > most ? top[lane] : most;
    for (size_t t = 0; t < count; t += LANES) {
        lanes weights = power(load(scores + t) - most);
        store(scores + t, weights);
        total += weights;
    }
    float share = 1.0f / sum(total);
    for (size_t t = 0; t < count; t += LANES)
        store(scores + t, load(scores + t) * share);
}

/* One new token in each row looks at a prefix that all rows share and at what is kept in the row's own slot.

   query, output  [rows, heads, width], scaled; the queries of `heads / kept` neighbours share a head of keys
   turned         [kept, width, PADDED(known)], the prefix's keys; shared [kept, known, width], its values
   keys, values   [slots, kept, capacity, width]; row r looks at the first lengths[r] places of slots[r]

   width is a multiple of LANES. Only the rows from `first` on and before `last`. 0 when all went well. */
int attend(const float *query, const float *turned, const float *shared, const float *keys,
           const float *values, const int64_t *slots, const int64_t *lengths, float *output, size_t heads,
           size_t kept, size_t width, size_t known, size_t capacity, size_t first, size_t last)
{
    size_t group = heads / kept, rows = last - first, count = rows * group, own = 1;
    for (size_t r = first; r < last; r++)
        own = (size_t)lengths[r] > own ? (size_t)lengths[r] : own;
    size_t before = PADDED(known), room = before + PADDED(own), longest = known > own ? known : own;
    float *space = malloc(count * (2 * width + room + (width > longest ? width : longest)) * sizeof(float));
    if (space == NULL)
        return 1;
    float *asked = space, *said = asked + count * width, *scores = said + count * width;
    float *packed = scores + count * room;
    for (size_t head = 0; head < kept; head++) {
        for (size_t r = 0; r < rows; r++) /* the queries that share this head, one below the other */
            for (size_t i = 0; i < group * width; i++)
                asked[r * group * width + i] = query[((first + r) * heads + head * group) * width + i];
        if (known) {
            pack(asked, width, count, width, packed);
            for (size_t t = 0; t < before; t += LANES)
                multiply(packed, count, width, turned + head * width * before + t, before, scores + t, room);
        }
        for (size_t q = 0; q < count; q++) {
            size_t row = first + q / group, length = lengths[row];
            const float *looked = keys + ((size_t)slots[row] * kept + head) * capacity * width;
            float *line = scores + q * room;
            for (size_t t = known; t < before; t++)
                line[t] = -1e30f;
            for (size_t t = 0; t < PADDED(length); t++) {
                lanes alike = {0};
                for (size_t k = 0; k < width && t < length; k += LANES)
                    alike += load(asked + q * width + k) * load(looked + t * width + k);
                line[before + t] = t < length ? sum(alike) : -1e30f;
            }
            soften(line, before + PADDED(length));
        }
        if (known) {
            pack(scores, room, count, known, packed);
            for (size_t k = 0; k < width; k += LANES)
                multiply(packed, count, known, shared + head * known * width + k, width, said + k, width);
        }
        for (size_t r = 0; r < rows; r++) {
            size_t row = first + r, length = lengths[row];
            const float *looked = values + ((size_t)slots[row] * kept + head) * capacity * width;
            float *answer = output + (row * heads + head * group) * width;
            pack(scores + r * group * room + before, room, group, length, packed);
            for (size_t k = 0; k < width; k += LANES)
                multiply(packed, group, length, looked + k, width, answer + k, width);
            for (size_t i = 0; known && i < group * width; i++)
                answer[i] += said[r * group * width + i];
        }
    }
    free(space);
    return 0;
}
#endif
