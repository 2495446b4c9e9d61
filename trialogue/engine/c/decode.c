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

/* A vector whose lane i is the sum of vector i: pairs are added half by half, so that no lane works for nothing. */
static lanes add_up(lanes *v)
{
#ifdef __clang__
    lanes sums = {0};
    for (size_t i = 0; i < LANES; i++)
        sums[i] = sum(v[i]);
    return sums;
#else
#define HALVE(h)                                                                                          \
    EACH(i, h) v[i] = __builtin_shuffle(v[i], v[i + h], PLACES + (PLACES & h) * (LANES / h)) +            \
                      __builtin_shuffle(v[i], v[i + h], (PLACES ^ h) + (PLACES & h) * (LANES / h));
#if LANES == 16
    HALVE(8)
#endif
    HALVE(4)
    HALVE(2)
    HALVE(1)
    return v[0];
#endif
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

/* Memory delivers faster what was asked for before it is needed, and by itself looks no further than a page. */
static void fetch(const float *from, size_t count)
{
    for (size_t i = 0; i < count; i += 16)
        __builtin_prefetch(from + i);
}

/* Scores of `count` queries [count][width] on `length` keys [length][width] → [count][room]; those past the end, up
   to a whole vector, are as good as nothing. */
static void score(const float *asked, size_t count, const float *keys, size_t length, size_t width, float *scores,
                  size_t room)
{
    for (size_t t = 0; t < length; t += LANES) {
        size_t left = length - t < LANES ? length - t : LANES;
        fetch(keys + (t + left) * width, length - t - left < LANES ? (length - t - left) * width : LANES * width);
        for (size_t q = 0; q < count; q++) {
            lanes alike[LANES];
            for (size_t i = 0; i < LANES; i++) {
                alike[i] = (lanes){0};
                for (size_t k = 0; k < width && i < left; k += LANES)
                    alike[i] += load(asked + q * width + k) * load(keys + (t + i) * width + k);
            }
            store(scores + q * room + t, add_up(alike));
        }
    }
    for (size_t q = 0; q < count; q++)
        for (size_t t = length; t < PADDED(length); t++)
            scores[q * room + t] = -1e30f;
}

/* As TILE, but the rows lie SPAN apart, one below the other. */
#define SPAN 64
#define SPREAD(count)                                                                                     \
    static void spread_##count(const float *rows, const float *matrix, size_t stride, float *output,      \
                               size_t width)                                                              \
    {                                                                                                     \
        lanes sums[count];                                                                                \
        EACH(r, count) sums[r] = load(output + r * stride);                                               \
        for (size_t k = 0; k < width; k++, matrix += stride) {                                            \
            lanes line = load(matrix);                                                                    \
            EACH(r, count) sums[r] += rows[r * SPAN + k] * line;                                          \
        }                                                                                                 \
        EACH(r, count) store(output + r * stride, sums[r]);                                               \
    }

SPREAD(1) SPREAD(2) SPREAD(3) SPREAD(4) SPREAD(5) SPREAD(6) SPREAD(7) SPREAD(8)
SPREAD(9) SPREAD(10) SPREAD(11) SPREAD(12) SPREAD(13) SPREAD(14) SPREAD(15) SPREAD(16)

typedef void (*spread)(const float *, const float *, size_t, float *, size_t);
static const spread SPREADS[] = {0,        spread_1,  spread_2,  spread_3,  spread_4,  spread_5,
                                 spread_6, spread_7,  spread_8,  spread_9,  spread_10, spread_11,
                                 spread_12, spread_13, spread_14, spread_15, spread_16};

/* Adds `count` rows of weights, `room` floats apart, times values [length][width] to output [count][width]. */
static void blend(const float *weights, size_t room, size_t count, const float *values, size_t length,
                  size_t width, float *output)
{
    float near[ROWS * SPAN];
    for (size_t row = 0, high; row < count; row += high) {
        high = next_tile(count - row);
        for (size_t t = 0; t < length; t += SPAN) {
            size_t some = length - t < SPAN ? length - t : SPAN, next = length - t - some;
            fetch(values + (t + some) * width, (next < SPAN ? next : SPAN) * width);
            for (size_t r = 0; r < high; r++)
                memcpy(near + r * SPAN, weights + (row + r) * room + t, some * sizeof(float));
            for (size_t k = 0; k < width; k += LANES)
                SPREADS[high](near, values + t * width + k, width, output + row * width + k, some);
        }
    }
}

/* One new token in each row looks at a prefix that all rows share and at what is kept in the row's own slot.

   query, output  [rows, heads, width], scaled; the queries of `heads / kept` neighbours share a head of keys
   turned         [kept, PADDED(known) / LANES, width, LANES], the prefix's keys; shared [kept, known, width], its
                  values
   keys, values   [slots, kept, capacity, width]; row r looks at the first lengths[r] places of slots[r]

   width is a multiple of LANES. Only the rows from `first` on and before `last`. 0 when all went well. */
int attend(const float *query, const float *turned, const float *shared, const float *keys,
           const float *values, const int64_t *slots, const int64_t *lengths, float *output, size_t heads,
           size_t kept, size_t width, size_t known, size_t capacity, size_t first, size_t last)
{
    size_t group = heads / kept, rows = last - first, count = rows * group, own = 1;
    for (size_t r = first; r < last; r++)
        own = (size_t)lengths[r] > own ? (size_t)lengths[r] : own;
    size_t before = PADDED(known), room = before + PADDED(own);
    float *space = malloc(count * (3 * width + room) * sizeof(float));
    if (space == NULL)
        return 1;
    float *asked = space, *packed = asked + count * width, *said = packed + count * width;
    float *scores = said + count * width;
    for (size_t head = 0; head < kept; head++) {
        for (size_t r = 0; r < rows; r++) /* the queries that share this head, one below the other */
            memcpy(asked + r * group * width, query + ((first + r) * heads + head * group) * width,
                   group * width * sizeof(float));
        if (known) {
            pack(asked, width, count, width, packed);
            for (size_t t = 0; t < before; t += LANES)
                multiply(packed, count, width, turned + (head * before + t) * width, LANES, scores + t, room);
        }
        for (size_t r = 0; r < rows; r++) {
            size_t place = ((size_t)slots[first + r] * kept + head) * capacity * width, length = lengths[first + r];
            float *lines = scores + r * group * room;
            score(asked + r * group * width, group, keys + place, length, width, lines + before, room);
            fetch(values + place, (length < SPAN ? length : SPAN) * width);
            for (size_t q = 0; q < group; q++) {
                for (size_t t = known; t < before; t++)
                    lines[q * room + t] = -1e30f;
                soften(lines + q * room, before + PADDED(length));
            }
        }
        memset(said, 0, count * width * sizeof(float));
        if (known)
            blend(scores, room, count, shared + head * known * width, known, width, said);
        for (size_t r = 0; r < rows; r++) {
            size_t row = first + r;
            blend(scores + r * group * room + before, room, group,
                  values + ((size_t)slots[row] * kept + head) * capacity * width, lengths[row], width,
                  said + r * group * width);
            memcpy(output + (row * heads + head * group) * width, said + r * group * width,
                   group * width * sizeof(float));
        }
    }
    free(space);
    return 0;
}
#endif
