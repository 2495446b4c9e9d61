/* A decode step: matmuls with large matrices, attention over the cache, and all layers of a model in one call. It is as
   fast as weights, keys and values can be read from memory. */
#include "rows.h"
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#define ROWS_AT_ONCE 256 /* rows that stay in the CPU's cache while the whole matrix is read */
#define SPAN 64     /* units of a row that are copied at once */
#define BLOCK 16    /* tokens whose attention is computed together */
#define TRIES 20000 /* checks before a waiting part sleeps: about as long as waking up takes */
const size_t most_rows = ROWS_AT_ONCE;

TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8)
TILE(9) TILE(10) TILE(11) TILE(12) TILE(13) TILE(14) TILE(15) TILE(16)

typedef void (*tile)(const unit *, const unit *, size_t, float *, size_t, size_t, int);
static const tile TILES[] = {0,      tile_1, tile_2,  tile_3,  tile_4,  tile_5,  tile_6,  tile_7, tile_8,
                             tile_9, tile_10, tile_11, tile_12, tile_13, tile_14, tile_15, tile_16};

/* Like TILE, but row r begins at rows + r * SPAN. */
#define SPREAD(count)                                                                                     \
    static void spread_##count(const unit *rows, const unit *matrix, size_t stride, float *output,        \
                               size_t width, size_t outputs, int add)                                     \
    {                                                                                                     \
        lanes sums[count];                                                                                \
        EACH(r, count) sums[r] = add ? load(output + r * outputs) : (lanes){0};                           \
        for (size_t k = 0; k < width; k++, matrix += stride) {                                            \
            units line = load_units(matrix);                                                              \
            EACH(r, count) sums[r] = add_product(sums[r], rows[r * SPAN + k], line);                      \
        }                                                                                                 \
        EACH(r, count) store(output + r * outputs, sums[r]);                                              \
    }

SPREAD(1) SPREAD(2) SPREAD(3) SPREAD(4) SPREAD(5) SPREAD(6) SPREAD(7) SPREAD(8)
SPREAD(9) SPREAD(10) SPREAD(11) SPREAD(12) SPREAD(13) SPREAD(14) SPREAD(15) SPREAD(16)

static const tile SPREADS[] = {0,        spread_1,  spread_2,  spread_3,  spread_4,  spread_5,
                               spread_6, spread_7,  spread_8,  spread_9,  spread_10, spread_11,
                               spread_12, spread_13, spread_14, spread_15, spread_16};

/* Like SPREAD, for four vectors of the matrix at once, `panel_stride` units from one to the next: with few rows the
   sums of one vector would wait for each other. */
#define FOUR(count)                                                                                       \
    static void four_##count(const unit *rows, const unit *matrix, size_t stride, size_t panel_stride,           \
                             float *output, size_t width, size_t outputs, int add)                        \
    {                                                                                                     \
        lanes sums[count][4];                                                                             \
        EACH(r, count) EACH(p, 4) sums[r][p] = add ? load(output + r * outputs + p * LANES) : (lanes){0}; \
        for (size_t k = 0; k < width; k++, matrix += stride)                                              \
            EACH(p, 4) {                                                                                  \
                units line = load_units(matrix + p * panel_stride);                                              \
                EACH(r, count) sums[r][p] = add_product(sums[r][p], rows[r * SPAN + k], line);            \
            }                                                                                             \
        EACH(r, count) EACH(p, 4) store(output + r * outputs + p * LANES, sums[r][p]);                    \
    }

FOUR(1) FOUR(2) FOUR(3) FOUR(4)

typedef void (*four)(const unit *, const unit *, size_t, size_t, float *, size_t, size_t, int);
static const four FOURS[] = {0, four_1, four_2, four_3, four_4};

/* Up to ROWS rows, SPAN units from one to the next, times `count` vectors of a matrix, `panel_stride` units from one to
   the next. */
static void multiply_spread(const unit *buffer, size_t height, const unit *matrix, size_t stride, size_t panel_stride,
                            size_t count, float *output, size_t width, size_t outputs, int add)
{
    size_t i = 0;
    for (; height <= 4 && i + 4 <= count; i += 4)
        FOURS[height](buffer, matrix + i * panel_stride, stride, panel_stride, output + i * LANES, width, outputs, add);
    for (; i < count; i++)
        SPREADS[height](buffer, matrix + i * panel_stride, stride, output + i * LANES, width, outputs, add);
}

/* Height of the next tile: as few tiles as possible, of about equal height. */
static size_t next_tile(size_t left)
{
    size_t tiles = (left + ROWS - 1) / ROWS;
    return (left + tiles - 1) / tiles;
}

/* Interleave rows of `width` units, `row_stride` floats from one to the next, tile by tile. */
static void pack(const float *rows, size_t row_stride, size_t count, size_t width, unit *packed)
{
    unit buffer[SPAN];
    for (size_t row = 0, height; row < count; row += height) {
        height = next_tile(count - row);
        for (size_t r = 0; r < height; r++)
            for (size_t k = 0; k < width; k += SPAN) {
                size_t chunk = width - k < SPAN ? width - k : SPAN;
                to_units(rows + (row + r) * row_stride + k * PER_UNIT, buffer, chunk);
                for (size_t i = 0; i < chunk; i++)
                    packed[row * width + (k + i) * height + r] = buffer[i];
            }
    }
}

/* All packed rows times LANES columns of a matrix; with `add`, added to the output. */
static void multiply(const unit *packed, size_t count, size_t width, const unit *matrix, size_t stride, float *output,
                     size_t outputs, int add)
{
    for (size_t row = 0, height; row < count; row += height) {
        height = next_tile(count - row);
        TILES[height](packed + row * width, matrix, stride, output + row * outputs, width, outputs, add);
    }
}

/* A matrix [outputs, width] to panels [… / LANES][width][LANES], with `width` counted in units and zeros for missing
   outputs; only the panels in [first, last). */
int lay_out(const float *weight, unit *panels, size_t outputs, size_t width, size_t first, size_t last)
{
    unit buffer[LANES][SPAN];
    for (size_t panel = first; panel < last; panel++) {
        size_t left = outputs - panel * LANES < LANES ? outputs - panel * LANES : LANES;
        memset(buffer, 0, sizeof buffer);
        for (size_t k = 0; k < width; k += SPAN) {
            size_t chunk = width - k < SPAN ? width - k : SPAN;
            for (size_t r = 0; r < left; r++)
                to_units(weight + ((panel * LANES + r) * width + k) * PER_UNIT, buffer[r], chunk);
            unit *to = panels + (panel * width + k) * LANES;
            for (size_t i = 0; i < chunk; i++)
                EACH(r, LANES) to[i * LANES + r] = buffer[r][i];
        }
    }
    return 0;
}

/* inputs [rows, width] times a matrix in panels [outputs / LANES][width][LANES], with `width` counted in units →
   output [rows, outputs]; only the outputs in [first, last), both multiples of LANES, so that threads can share the
   work. Returns 0, or 1 without memory. */
int product(const float *inputs, const unit *panels, float *output, size_t rows, size_t width, size_t outputs,
            size_t first, size_t last)
{
    size_t most = rows < ROWS_AT_ONCE ? rows : ROWS_AT_ONCE;
    unit *packed = malloc(most * width * sizeof(unit));
    if (packed == NULL)
        return 1;
    for (size_t row = 0; row < rows; row += ROWS_AT_ONCE) {
        size_t count = rows - row < ROWS_AT_ONCE ? rows - row : ROWS_AT_ONCE;
        pack(inputs + row * width * PER_UNIT, width * PER_UNIT, count, width, packed);
        for (size_t n = first; n < last; n += LANES)
            multiply(packed, count, width, panels + n * width, LANES, output + row * outputs + n, outputs, 0);
    }
    free(packed);
    return 0;
}

/* -- arguments of a step -------------------------------------------------------------------------------- */

/* Where new tokens are. Row r is at places[r] of slots[r] and attends to that slot up to there; rows of one slot are
   consecutive. `order` lists the rows group by group: those of group g, whose prefix has prefix_lengths[g] tokens, are
   at edges[g] … edges[g + 1] - 1. */
typedef struct {
    size_t count, capacity, groups;
    const int64_t *slots, *places, *order, *edges, *prefix_lengths;
} row_list;

/* The cache of one layer, with keys as [… / LANES][width / PER_UNIT][LANES] units and values as [… /
   PER_UNIT][width]: of slots [slots][kv_heads][capacity], and of each group's prefix [kv_heads][PADDED(length)],
   keys before values. */
typedef struct {
    size_t heads, kv_heads, width;
    double scaling;
    unit *keys, *values;
    const unit *const *prefixes;
} kv_cache;

typedef struct {
    const float *weight; /* or NULL */
    double eps;
} norm;

typedef struct {
    const unit *panels;
    const float *bias; /* or NULL */
    size_t width, outputs;
} matrix;

/* A layer mixes tokens by attention, or (kernel > 0) by a gated convolution over its own inputs, which are in `inputs`
   [slots][kernel - 1 + capacity][width], with `taps` [kernel][width]. */
typedef struct {
    norm before, after, query, key;
    matrix projection, output, gates, down;
    kv_cache cache;
    size_t kernel;
    const float *taps, *taps_bias;
    float *inputs;
} layer;

typedef struct {
    row_list rows;
    size_t width, parts;
    const float *cosines, *sines;              /* [rows][width of a head] */
    float *hidden, *projected, *mixed, *gated; /* rows of hidden states and of intermediate results */
    float *scratch;                            /* of all parts */
    size_t each;                               /* floats of one part */
    int32_t *arrived;                          /* number of parts that arrived, and of those that sleep */
} step;

const size_t bytes_of_a_layer = sizeof(layer), bytes_of_a_step = sizeof(step);

static size_t find_longest_slot(const row_list *at)
{
    size_t own = 0;
    for (size_t r = 0; r < at->count; r++)
        own = (size_t)at->places[r] + 1 > own ? (size_t)at->places[r] + 1 : own;
    return own;
}

static size_t find_longest_prefix(const row_list *at)
{
    size_t known = 0;
    for (size_t g = 0; g < at->groups; g++)
        known = (size_t)at->prefix_lengths[g] > known ? (size_t)at->prefix_lengths[g] : known;
    return known;
}

/* Floats of scratch memory for attention. */
size_t attention_scratch(const row_list *at, const kv_cache *m)
{
    size_t count = BLOCK * (m->heads / m->kv_heads);
    size_t room = PADDED(find_longest_prefix(at)) + PADDED(find_longest_slot(at));
    return count * (3 * m->width + room);
}

/* First row of a part in `order`; rows of a slot stay in one part. */
static size_t find_edge(const row_list *at, size_t part, size_t parts)
{
    size_t edge = at->count * part / parts;
    while (edge > 0 && edge < at->count && at->slots[at->order[edge]] == at->slots[at->order[edge - 1]])
        edge++;
    return edge;
}

/* -- attention ------------------------------------------------------------------------------------------ */

/* Softmax in place; `count` is a multiple of LANES. */
static void softmax(float *scores, size_t count)
{
    lanes top = load(scores), total = {0};
    for (size_t t = LANES; t < count; t += LANES)
        top = select_lanes(load(scores + t) > top, load(scores + t), top);
    float most = top[0];
    for (size_t lane = 1; lane < LANES; lane++)
        most = top[lane] > most ? top[lane] : most;
    for (size_t t = 0; t < count; t += LANES) {
        lanes weights = exp_lanes(load(scores + t) - most);
        store(scores + t, weights);
        total += weights;
    }
    float share = 1.0f / sum_lanes(total);
    for (size_t t = 0; t < count; t += LANES)
        store(scores + t, load(scores + t) * share);
}

/* Prefetch: the hardware's own prefetching stops at the end of a page. */
static void prefetch(const unit *from, size_t count)
{
    for (size_t i = 0; i < count; i += 64 / sizeof(unit))
        __builtin_prefetch(from + i);
}

/* Add `count` rows of weights, `room` floats from one to the next, times `length` values of `width` to output
   [count][width]. */
static void add_values(const float *weights, size_t room, size_t count, const unit *values, size_t length, size_t width,
                       float *output)
{
    unit buffer[ROWS * SPAN];
    length /= PER_UNIT;
    for (size_t row = 0, height; row < count; row += height) {
        height = next_tile(count - row);
        for (size_t t = 0; t < length; t += SPAN) {
            size_t chunk = length - t < SPAN ? length - t : SPAN, next = length - t - chunk;
            prefetch(values + (t + chunk) * width, (next < SPAN ? next : SPAN) * width);
            for (size_t r = 0; r < height; r++)
                to_units(weights + (row + r) * room + t * PER_UNIT, buffer + r * SPAN, chunk);
            multiply_spread(buffer, height, values + t * width, width, LANES, width / LANES, output + row * width,
                            chunk, width, 1);
        }
    }
}

/* Scores of `count` queries [count][width] on `length` keys, a multiple of LANES; `room` floats from row to row. */
static void compute_scores(const float *queries, size_t count, const unit *keys, size_t length, size_t width,
                           float *scores, size_t room)
{
    unit buffer[ROWS * SPAN];
    size_t narrow = width / PER_UNIT;
    for (size_t row = 0, height; row < count; row += height) {
        height = next_tile(count - row);
        for (size_t k = 0; k < narrow; k += SPAN) {
            size_t chunk = narrow - k < SPAN ? narrow - k : SPAN;
            for (size_t r = 0; r < height; r++)
                to_units(queries + (row + r) * width + k * PER_UNIT, buffer + r * SPAN, chunk);
            multiply_spread(buffer, height, keys + k * LANES, LANES, LANES * narrow, length / LANES,
                            scores + row * room, chunk, room, k > 0);
        }
    }
}

/* Attention of the rows order[first] … order[last - 1], at most BLOCK, of group g. `row_stride`: floats from one row's
   queries to the next. */
static void attend_block(const row_list *at, const kv_cache *m, size_t g, size_t first, size_t last, const float *query,
                         size_t row_stride, float *output, float *scratch)
{
    size_t group = m->heads / m->kv_heads, width = m->width, narrow = width / PER_UNIT, rows = last - first;
    size_t count = rows * group, known = at->prefix_lengths[g], before = PADDED(known), longest = 0;
    const unit *prefix_keys = m->prefixes[2 * g], *prefix_values = m->prefixes[2 * g + 1];
    for (size_t r = first; r < last; r++) {
        size_t own = at->places[at->order[r]] + 1;
        longest = own > longest ? own : longest;
    }
    size_t room = before + PADDED(longest);
    float *queries = scratch, *result = queries + count * width, *scores = result + count * width;
    unit *packed = (unit *)(scores + count * room);
    for (size_t head = 0; head < m->kv_heads; head++) {
        for (size_t r = 0; r < rows; r++) { /* the queries that share this KV head, one below the other */
            const float *from = query + at->order[first + r] * row_stride + head * group * width;
            for (size_t i = 0; i < group * width; i += LANES)
                store(queries + r * group * width + i, load(from + i) * (float)m->scaling);
        }
        if (known) {
            pack(queries, width, count, narrow, packed);
            for (size_t t = 0; t < before; t += LANES)
                multiply(packed, count, narrow, prefix_keys + (head * before + t) * narrow, LANES, scores + t, room, 0);
        }
        for (size_t r = 0; r < rows; r++) {
            size_t row = at->order[first + r], length = at->places[row] + 1, padded = PADDED(length);
            const unit *keys = m->keys + (at->slots[row] * m->kv_heads + head) * at->capacity * narrow;
            float *lines = scores + r * group * room;
            compute_scores(queries + r * group * width, group, keys, padded, width, lines + before, room);
            for (size_t q = 0; q < group; q++) {
                for (size_t t = known; t < before; t++)
                    lines[q * room + t] = -1e30f;
                for (size_t t = length; t < padded; t++)
                    lines[q * room + before + t] = -1e30f;
                softmax(lines + q * room, before + padded);
            }
        }
        memset(result, 0, count * width * sizeof(float));
        if (known)
            add_values(scores, room, count, prefix_values + head * before * narrow, before, width, result);
        for (size_t r = 0; r < rows; r++) {
            size_t row = at->order[first + r];
            add_values(scores + r * group * room + before, room, group,
                  m->values + (at->slots[row] * m->kv_heads + head) * at->capacity * narrow,
                  PADDED(at->places[row] + 1), width, result + r * group * width);
            memcpy(output + (row * m->heads + head * group) * width, result + r * group * width,
                   group * width * sizeof(float));
        }
    }
}

/* Attention of one part of the rows: query [rows], `row_stride` floats from one to the next → output [rows, heads,
   width]. */
static void attend_part(const row_list *at, const kv_cache *m, const float *query, size_t row_stride, float *output,
                        float *scratch, size_t first, size_t last)
{
    for (size_t g = 0; g < at->groups; g++) {
        size_t begin = at->edges[g], end = at->edges[g + 1];
        begin = begin < first ? first : begin;
        end = end > last ? last : end;
        for (; begin < end; begin += BLOCK) {
            size_t stop = end - begin < BLOCK ? end : begin + BLOCK;
            attend_block(at, m, g, begin, stop, query, row_stride, output, scratch);
        }
    }
}

/* query [rows, heads, width] → output; the keys and values of the rows are already in the cache. */
int attend(const row_list *at, const kv_cache *m, const float *query, float *output, float *scratch, size_t each,
           size_t parts, size_t part)
{
    attend_part(at, m, query, m->heads * m->width, output, scratch + part * each, find_edge(at, part, parts),
                find_edge(at, part + 1, parts));
    return 0;
}

/* Write the key and the value of one head into the cache. */
static void store_key_value(const kv_cache *m, size_t head, size_t slot, size_t place, size_t capacity,
                            const float *key, const float *value)
{
    size_t width = m->width, narrow = width / PER_UNIT, base = (slot * m->kv_heads + head) * capacity * narrow;
    unit *to = m->keys + base + place / LANES * LANES * narrow + place % LANES;
    for (size_t k = 0; k < narrow; k++)
        to[k * LANES] = to_unit(key + k * PER_UNIT);
    to = m->values + base + place / PER_UNIT * width;
#ifdef PAIRS
    uint16_t *halves = (uint16_t *)to + place % 2;
    for (size_t k = 0; k < width; k++)
        halves[2 * k] = (uint16_t)to_half(value[k]);
#else
    memcpy(to, value, width * sizeof(float));
#endif
}

/* -- layers --------------------------------------------------------------------------------------------- */

/* Sleep while *place is `seen`; on other systems than Linux just yield. */
static void sleep_on(int32_t *place, int32_t seen)
{
#ifdef __linux__
    syscall(SYS_futex, place, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
    sched_yield();
#endif
}

static void wake_all(int32_t *place)
{
#ifdef __linux__
    syscall(SYS_futex, place, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#endif
}

/* A barrier of all parts. A late part may be waiting for a core, perhaps for this one, so the others soon sleep. The
   last one must see the sleepers: both sides write first and read second. */
static void wait_for_all(const step *s, size_t *rounds)
{
    if (s->parts == 1)
        return;
    int32_t *arrived = s->arrived, *asleep = s->arrived + 1, seen, wanted = (int32_t)(++*rounds * s->parts);
    if (__atomic_add_fetch(arrived, 1, __ATOMIC_SEQ_CST) == wanted) {
        if (__atomic_load_n(asleep, __ATOMIC_SEQ_CST))
            wake_all(arrived);
        return;
    }
    for (size_t tries = 0; tries < TRIES; tries++)
        if (__atomic_load_n(arrived, __ATOMIC_ACQUIRE) >= wanted)
            return;
    __atomic_add_fetch(asleep, 1, __ATOMIC_SEQ_CST);
    while ((seen = __atomic_load_n(arrived, __ATOMIC_SEQ_CST)) < wanted)
        sleep_on(arrived, seen);
    __atomic_sub_fetch(asleep, 1, __ATOMIC_SEQ_CST);
}

/* Outputs [first, last) of packed rows times a matrix, with its bias. */
static void multiply_columns(const step *s, const unit *packed, const matrix *m, size_t first, size_t last,
                             float *output, int add)
{
    size_t rows = s->rows.count, width = m->width / PER_UNIT;
    for (size_t n = first; n < last; n += LANES) {
        multiply(packed, rows, width, m->panels + n * width, LANES, output + n, m->outputs, add);
        if (m->bias)
            for (size_t r = 0; r < rows; r++)
                store(output + r * m->outputs + n, load(output + r * m->outputs + n) + load(m->bias + n));
    }
}

static void share_columns(const step *s, const unit *packed, const matrix *m, size_t part, float *output, int add)
{
    size_t panels = m->outputs / LANES;
    multiply_columns(s, packed, m, panels * part / s->parts * LANES, panels * (part + 1) / s->parts * LANES, output,
                     add);
}

/* Normalize and pack all rows. Every part does this for itself, which is faster than waiting for another one. */
static void pack_normed(const step *s, const norm *n, float *row, unit *packed)
{
    size_t width = s->width, narrow = width / PER_UNIT;
    for (size_t first = 0, height; first < s->rows.count; first += height) {
        height = next_tile(s->rows.count - first);
        for (size_t r = 0; r < height; r++)
            normalize_row(s->hidden + (first + r) * width, n->weight, row + r * width, width, n->eps);
        pack(row, width, height, narrow, packed + first * narrow);
    }
}

/* Apply norms and rotary embeddings to this part's queries and keys, write keys and values into the cache, attend. */
static void attend_layer(const layer *l, const step *s, size_t first, size_t last, float *scratch)
{
    const kv_cache *m = &l->cache;
    size_t width = m->width, row_stride = (m->heads + 2 * m->kv_heads) * width;
    for (size_t i = first; i < last; i++) {
        size_t row = s->rows.order[i];
        float *projected = s->projected + row * row_stride;
        for (size_t head = 0; head < m->heads + m->kv_heads; head++) {
            float turned[width], *from = projected + head * width;
            const norm *n = head < m->heads ? &l->query : &l->key;
            if (n->weight)
                normalize_row(from, n->weight, from, width, n->eps);
            apply_rotary_row(from, s->cosines + row * width, s->sines + row * width, turned, width / 2, 0);
            memcpy(from, turned, sizeof turned);
        }
        for (size_t head = 0; head < m->kv_heads; head++)
            store_key_value(m, head, s->rows.slots[row], s->rows.places[row], s->rows.capacity,
                            projected + (m->heads + head) * width, projected + (m->heads + m->kv_heads + head) * width);
    }
    attend_part(&s->rows, m, s->projected, row_stride, s->mixed, scratch, first, last);
}

/* LFM2's gated short convolution: input gate, output gate and values are side by side. */
static void convolve(const layer *l, const step *s, size_t first, size_t last)
{
    size_t width = s->width, length = l->kernel - 1 + s->rows.capacity;
    for (size_t i = first; i < last; i++) {
        size_t row = s->rows.order[i];
        const float *gates = s->projected + row * 3 * width;
        float *inputs = l->inputs + (s->rows.slots[row] * length + s->rows.places[row]) * width;
        for (size_t k = 0; k < width; k += LANES) {
            store(inputs + (l->kernel - 1) * width + k, load(gates + k) * load(gates + 2 * width + k));
            lanes sum = l->taps_bias ? load(l->taps_bias + k) : (lanes){0};
            for (size_t j = 0; j < l->kernel; j++)
                sum += load(l->taps + j * width + k) * load(inputs + j * width + k);
            store(s->mixed + row * width + k, load(gates + width + k) * sum);
        }
    }
}

static size_t find_widest(const layer *layers, size_t count, const step *s)
{
    size_t widest = s->width;
    for (const layer *l = layers; l < layers + count; l++) {
        widest = l->output.width > widest ? l->output.width : widest;
        widest = l->down.width > widest ? l->down.width : widest;
    }
    return widest;
}

/* Floats of scratch memory for one part: packed rows, a tile of them, and attention. */
size_t step_scratch(const layer *layers, size_t count, const step *s)
{
    size_t room = 0;
    for (const layer *l = layers; l < layers + count; l++) {
        size_t needed = l->kernel ? 0 : attention_scratch(&s->rows, &l->cache);
        room = needed > room ? needed : room;
    }
    return s->rows.count * find_widest(layers, count, s) + ROWS * s->width + room;
}

/* Hidden states through all layers; called once for each part, at the same time. */
int advance(const layer *layers, size_t count, const step *s, size_t part)
{
    size_t rows = s->rows.count, rounds = 0, widest = find_widest(layers, count, s);
    size_t first = find_edge(&s->rows, part, s->parts), last = find_edge(&s->rows, part + 1, s->parts);
    unit *packed = (unit *)(s->scratch + part * s->each);
    float *chunk = s->scratch + part * s->each + rows * widest, *scratch = chunk + ROWS * s->width;
    for (const layer *l = layers; l < layers + count; l++) {
        pack_normed(s, &l->before, chunk, packed);
        share_columns(s, packed, &l->projection, part, s->projected, 0);
        wait_for_all(s, &rounds);
        if (l->kernel)
            convolve(l, s, first, last);
        else
            attend_layer(l, s, first, last, scratch);
        wait_for_all(s, &rounds);
        pack(s->mixed, l->output.width, rows, l->output.width / PER_UNIT, packed);
        share_columns(s, packed, &l->output, part, s->hidden, 1);
        wait_for_all(s, &rounds);
        pack_normed(s, &l->after, chunk, packed);
        size_t width = l->down.width, panels = width / LANES;
        size_t begin = panels * part / s->parts * LANES, end = panels * (part + 1) / s->parts * LANES;
        multiply_columns(s, packed, &l->gates, begin, end, s->projected, 0);
        multiply_columns(s, packed, &l->gates, width + begin, width + end, s->projected, 0);
        for (size_t r = 0; r < rows; r++)
            gate_row(s->projected + r * 2 * width + begin, s->projected + (r * 2 + 1) * width + begin,
                     s->gated + r * width + begin, end - begin);
        wait_for_all(s, &rounds);
        pack(s->gated, width, rows, width / PER_UNIT, packed);
        share_columns(s, packed, &l->down, part, s->hidden, 1);
        wait_for_all(s, &rounds);
    }
    return 0;
}
