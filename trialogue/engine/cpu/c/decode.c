/* A step of a few new tokens: products with large matrices, attention to what is kept, and all layers of a model in
   one call, at the speed at which memory delivers weights, keys and values. */
#include "rows.h"
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#define AT_ONCE 256 /* rows that stay near while the whole matrix passes */
#define SPAN 64     /* units of a row that are near while lines of a matrix pass */
#define BLOCK 16    /* tokens whose attention is worked on together */
#define TRIES 20000 /* looks at whether all have come before sleeping, about as long as waking up takes */
const size_t most_rows = AT_ONCE;

TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8)
TILE(9) TILE(10) TILE(11) TILE(12) TILE(13) TILE(14) TILE(15) TILE(16)

typedef void (*tile)(const unit *, const unit *, size_t, float *, size_t, size_t, int);
static const tile TILES[] = {0,      tile_1, tile_2,  tile_3,  tile_4,  tile_5,  tile_6,  tile_7, tile_8,
                             tile_9, tile_10, tile_11, tile_12, tile_13, tile_14, tile_15, tile_16};

/* As TILE, but the rows lie SPAN apart, one below the other. */
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

/* The same for four vectors of the matrix at once, `apart` units from one to the next: a few sums alone would wait for
   each other. */
#define FOUR(count)                                                                                       \
    static void four_##count(const unit *rows, const unit *matrix, size_t stride, size_t apart,           \
                             float *output, size_t width, size_t outputs, int add)                        \
    {                                                                                                     \
        lanes sums[count][4];                                                                             \
        EACH(r, count) EACH(p, 4) sums[r][p] = add ? load(output + r * outputs + p * LANES) : (lanes){0}; \
        for (size_t k = 0; k < width; k++, matrix += stride)                                              \
            EACH(p, 4) {                                                                                  \
                units line = load_units(matrix + p * apart);                                              \
                EACH(r, count) sums[r][p] = add_product(sums[r][p], rows[r * SPAN + k], line);            \
            }                                                                                             \
        EACH(r, count) EACH(p, 4) store(output + r * outputs + p * LANES, sums[r][p]);                    \
    }

FOUR(1) FOUR(2) FOUR(3) FOUR(4)

typedef void (*four)(const unit *, const unit *, size_t, size_t, float *, size_t, size_t, int);
static const four FOURS[] = {0, four_1, four_2, four_3, four_4};

/* Up to ROWS rows, SPAN apart, times `count` vectors of a matrix, `apart` units from one to the next. */
static void spread_out(const unit *near, size_t high, const unit *matrix, size_t stride, size_t apart, size_t count,
                       float *output, size_t width, size_t outputs, int add)
{
    size_t i = 0;
    for (; high <= 4 && i + 4 <= count; i += 4)
        FOURS[high](near, matrix + i * apart, stride, apart, output + i * LANES, width, outputs, add);
    for (; i < count; i++)
        SPREADS[high](near, matrix + i * apart, stride, output + i * LANES, width, outputs, add);
}

/* How many of the rows that are left make the next tile: as few tiles as can be, of about equal height. */
static size_t next_tile(size_t left)
{
    size_t tiles = (left + ROWS - 1) / ROWS;
    return (left + tiles - 1) / tiles;
}

/* Rows of `width` units, `apart` floats from one to the next, laid side by side tile after tile. */
static void pack(const float *rows, size_t apart, size_t count, size_t width, unit *packed)
{
    unit near[SPAN];
    for (size_t row = 0, high; row < count; row += high) {
        high = next_tile(count - row);
        for (size_t r = 0; r < high; r++)
            for (size_t k = 0; k < width; k += SPAN) {
                size_t some = width - k < SPAN ? width - k : SPAN;
                to_units(rows + (row + r) * apart + k * NUMBERS, near, some);
                for (size_t i = 0; i < some; i++)
                    packed[row * width + (k + i) * high + r] = near[i];
            }
    }
}

/* All packed rows times LANES columns of a matrix; with `add` to what is there. */
static void multiply(const unit *packed, size_t count, size_t width, const unit *matrix, size_t stride,
                     float *output, size_t outputs, int add)
{
    for (size_t row = 0, high; row < count; row += high) {
        high = next_tile(count - row);
        TILES[high](packed + row * width, matrix, stride, output + row * outputs, width, outputs, add);
    }
}

/* A matrix [outputs, width] to panels [… / LANES][width][LANES], width counted in units, with nothing where outputs
   are left over; only the panels from `first` on and before `last`. */
int lay_out(const float *weight, unit *panels, size_t outputs, size_t width, size_t first, size_t last)
{
    unit near[LANES][SPAN];
    for (size_t panel = first; panel < last; panel++) {
        size_t left = outputs - panel * LANES < LANES ? outputs - panel * LANES : LANES;
        memset(near, 0, sizeof near);
        for (size_t k = 0; k < width; k += SPAN) {
            size_t some = width - k < SPAN ? width - k : SPAN;
            for (size_t r = 0; r < left; r++)
                to_units(weight + ((panel * LANES + r) * width + k) * NUMBERS, near[r], some);
            unit *to = panels + (panel * width + k) * LANES;
            for (size_t i = 0; i < some; i++)
                EACH(r, LANES) to[i * LANES + r] = near[r][i];
        }
    }
    return 0;
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
            multiply(packed, count, width, panels + n * width, LANES, output + row * outputs + n, outputs, 0);
    }
    free(packed);
    return 0;
}

/* -- what a step is told -------------------------------------------------------------------------------- */

/* Where new tokens lie. Row r is at places[r] of slots[r], and looks at that slot up to there; rows of one slot follow
   each other. `order` are the rows with those side by side that share a prefix: group g, whose prefix has known[g]
   tokens, from edges[g] on and before edges[g + 1]. */
typedef struct {
    size_t rows, capacity, groups;
    const int64_t *slots, *places, *order, *edges, *known;
} spots;

/* What one layer keeps, with keys as [… / LANES][width / NUMBERS][LANES] units and values as [… / NUMBERS][width]: of
   slots [slots][kept][capacity], and of each group's prefix [kept][PADDED(known)], first its keys, then its values. */
typedef struct {
    size_t heads, kept, width;
    double scaling;
    unit *keys, *values;
    const unit *const *prefixes;
} memory;

typedef struct {
    const float *weight; /* or nothing */
    double eps;
} norm;

typedef struct {
    const unit *panels;
    const float *bias; /* or nothing */
    size_t width, outputs;
} matrix;

/* A layer mixes tokens by attention, or by a gated convolution that reaches back over its own inputs, which `inputs`
   holds: [slots][reach - 1 + capacity][width], with `taps` [reach][width]. */
typedef struct {
    norm before, after, query, key;
    matrix into, back, halves, feed;
    memory kept;
    size_t reach;
    const float *taps, *taps_bias;
    float *inputs;
} layer;

typedef struct {
    spots at;
    size_t width, parts;
    const float *cosines, *sines;          /* [rows][width of a head] */
    float *hidden, *joined, *mixed, *fed;  /* rows of hidden states, and of what lies between products */
    float *scratch;                        /* of all parts */
    size_t each;                           /* floats of one part */
    int32_t *arrived;                      /* parts that came to meet, and those that sleep there */
} step;

const size_t bytes_of_a_layer = sizeof(layer), bytes_of_a_step = sizeof(step);

static size_t find_longest(const spots *at)
{
    size_t own = 0;
    for (size_t r = 0; r < at->rows; r++)
        own = (size_t)at->places[r] + 1 > own ? (size_t)at->places[r] + 1 : own;
    return own;
}

static size_t find_known(const spots *at)
{
    size_t known = 0;
    for (size_t g = 0; g < at->groups; g++)
        known = (size_t)at->known[g] > known ? (size_t)at->known[g] : known;
    return known;
}

/* Floats that attention works in. */
size_t room_to_attend(const spots *at, const memory *m)
{
    size_t count = BLOCK * (m->heads / m->kept), room = PADDED(find_known(at)) + PADDED(find_longest(at));
    return count * (3 * m->width + room);
}

/* Rows of one part, whole slots: the first of them in `order`, and past the last one for part + 1. */
static size_t find_edge(const spots *at, size_t part, size_t parts)
{
    size_t edge = at->rows * part / parts;
    while (edge > 0 && edge < at->rows && at->slots[at->order[edge]] == at->slots[at->order[edge - 1]])
        edge++;
    return edge;
}

/* -- attention ------------------------------------------------------------------------------------------ */

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
    float share = 1.0f / add_up(total);
    for (size_t t = 0; t < count; t += LANES)
        store(scores + t, load(scores + t) * share);
}

/* Memory delivers faster what was asked for before it is needed, and by itself looks no further than a page. */
static void fetch(const unit *from, size_t count)
{
    for (size_t i = 0; i < count; i += 64 / sizeof(unit))
        __builtin_prefetch(from + i);
}

/* Adds `count` rows of weights, `room` floats apart, times `length` values of `width` to output [count][width]. */
static void blend(const float *weights, size_t room, size_t count, const unit *values, size_t length,
                  size_t width, float *output)
{
    unit near[ROWS * SPAN];
    length /= NUMBERS;
    for (size_t row = 0, high; row < count; row += high) {
        high = next_tile(count - row);
        for (size_t t = 0; t < length; t += SPAN) {
            size_t some = length - t < SPAN ? length - t : SPAN, next = length - t - some;
            fetch(values + (t + some) * width, (next < SPAN ? next : SPAN) * width);
            for (size_t r = 0; r < high; r++)
                to_units(weights + (row + r) * room + t * NUMBERS, near + r * SPAN, some);
            spread_out(near, high, values + t * width, width, LANES, width / LANES, output + row * width, some, width, 1);
        }
    }
}

/* Scores of `count` queries [count][width] on `length` keys, a multiple of LANES → [count], `room` floats apart. */
static void score(const float *asked, size_t count, const unit *keys, size_t length, size_t width, float *scores,
                  size_t room)
{
    unit near[ROWS * SPAN];
    size_t narrow = width / NUMBERS;
    for (size_t row = 0, high; row < count; row += high) {
        high = next_tile(count - row);
        for (size_t k = 0; k < narrow; k += SPAN) {
            size_t some = narrow - k < SPAN ? narrow - k : SPAN;
            for (size_t r = 0; r < high; r++)
                to_units(asked + (row + r) * width + k * NUMBERS, near + r * SPAN, some);
            spread_out(near, high, keys + k * LANES, LANES, LANES * narrow, length / LANES, scores + row * room, some,
                       room, k > 0);
        }
    }
}

/* Up to BLOCK rows of group g, from `first` on in `order`; queries lie `apart` floats from row to row. */
static void attend_block(const spots *at, const memory *m, size_t g, size_t first, size_t last, const float *query,
                         size_t apart, float *output, float *scratch)
{
    size_t group = m->heads / m->kept, width = m->width, narrow = width / NUMBERS, rows = last - first;
    size_t count = rows * group, known = at->known[g], before = PADDED(known), longest = 0;
    const unit *prefix_keys = m->prefixes[2 * g], *prefix_values = m->prefixes[2 * g + 1];
    for (size_t r = first; r < last; r++) {
        size_t own = at->places[at->order[r]] + 1;
        longest = own > longest ? own : longest;
    }
    size_t room = before + PADDED(longest);
    float *asked = scratch, *said = asked + count * width, *scores = said + count * width;
    unit *packed = (unit *)(scores + count * room);
    for (size_t head = 0; head < m->kept; head++) {
        for (size_t r = 0; r < rows; r++) { /* the queries that share this head, one below the other */
            const float *from = query + at->order[first + r] * apart + head * group * width;
            for (size_t i = 0; i < group * width; i += LANES)
                store(asked + r * group * width + i, load(from + i) * (float)m->scaling);
        }
        if (known) {
            pack(asked, width, count, narrow, packed);
            for (size_t t = 0; t < before; t += LANES)
                multiply(packed, count, narrow, prefix_keys + (head * before + t) * narrow, LANES, scores + t, room, 0);
        }
        for (size_t r = 0; r < rows; r++) {
            size_t row = at->order[first + r], length = at->places[row] + 1, padded = PADDED(length);
            const unit *keys = m->keys + (at->slots[row] * m->kept + head) * at->capacity * narrow;
            float *lines = scores + r * group * room;
            score(asked + r * group * width, group, keys, padded, width, lines + before, room);
            for (size_t q = 0; q < group; q++) {
                for (size_t t = known; t < before; t++)
                    lines[q * room + t] = -1e30f;
                for (size_t t = length; t < padded; t++)
                    lines[q * room + before + t] = -1e30f;
                soften(lines + q * room, before + padded);
            }
        }
        memset(said, 0, count * width * sizeof(float));
        if (known)
            blend(scores, room, count, prefix_values + head * before * narrow, before, width, said);
        for (size_t r = 0; r < rows; r++) {
            size_t row = at->order[first + r];
            blend(scores + r * group * room + before, room, group,
                  m->values + (at->slots[row] * m->kept + head) * at->capacity * narrow,
                  PADDED(at->places[row] + 1), width, said + r * group * width);
            memcpy(output + (row * m->heads + head * group) * width, said + r * group * width,
                   group * width * sizeof(float));
        }
    }
}

/* One part of all rows: query [rows], `apart` floats from one to the next → output [rows, heads, width]. */
static void attend_part(const spots *at, const memory *m, const float *query, size_t apart, float *output,
                        float *scratch, size_t first, size_t last)
{
    for (size_t g = 0; g < at->groups; g++) {
        size_t begin = at->edges[g], end = at->edges[g + 1];
        begin = begin < first ? first : begin;
        end = end > last ? last : end;
        for (; begin < end; begin += BLOCK) {
            size_t stop = end - begin < BLOCK ? end : begin + BLOCK;
            attend_block(at, m, g, begin, stop, query, apart, output, scratch);
        }
    }
}

/* query [rows, heads, width] → output, of keys and values that are in their places already. */
int attend(const spots *at, const memory *m, const float *query, float *output, float *scratch, size_t each,
           size_t parts, size_t part)
{
    attend_part(at, m, query, m->heads * m->width, output, scratch + part * each, find_edge(at, part, parts),
                find_edge(at, part + 1, parts));
    return 0;
}

/* Put the key and the value of one head into their places. */
static void keep(const memory *m, size_t head, size_t slot, size_t place, size_t capacity, const float *key,
                 const float *value)
{
    size_t width = m->width, narrow = width / NUMBERS, base = (slot * m->kept + head) * capacity * narrow;
    unit *to = m->keys + base + place / LANES * LANES * narrow + place % LANES;
    for (size_t k = 0; k < narrow; k++)
        to[k * LANES] = take(key + k * NUMBERS);
    to = m->values + base + place / NUMBERS * width;
#ifdef PAIRS
    uint16_t *halves = (uint16_t *)to + place % 2;
    for (size_t k = 0; k < width; k++)
        halves[2 * k] = (uint16_t)to_half(value[k]);
#else
    memcpy(to, value, width * sizeof(float));
#endif
}

/* -- layers --------------------------------------------------------------------------------------------- */

/* Sleep for as long as *place is `seen`, or not at all where the system cannot do that. */
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

/* Wait until all parts have come here as often. A part that is late may wait for a core, perhaps for this very one,
   so that the others soon sleep. Whoever comes last sees that somebody does: both sides first write, then read. */
static void meet(const step *s, size_t *times)
{
    if (s->parts == 1)
        return;
    int32_t *arrived = s->arrived, *asleep = s->arrived + 1, seen, wanted = (int32_t)(++*times * s->parts);
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

/* This part's columns of packed rows times a matrix, with its bias: [first, last) is its share of `outputs`. */
static void multiply_columns(const step *s, const unit *packed, const matrix *m, size_t first, size_t last,
                             float *output, int add)
{
    size_t rows = s->at.rows, width = m->width / NUMBERS;
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

/* Every part lays out all rows for itself, which is sooner done than waited for. */
static void pack_normed(const step *s, const norm *n, float *row, unit *packed)
{
    size_t width = s->width, narrow = width / NUMBERS;
    for (size_t first = 0, high; first < s->at.rows; first += high) {
        high = next_tile(s->at.rows - first);
        for (size_t r = 0; r < high; r++)
            normalize_row(s->hidden + (first + r) * width, n->weight, row + r * width, width, n->eps);
        pack(row, width, high, narrow, packed + first * narrow);
    }
}

/* Turn and keep what this part's rows say of themselves, then let them look back. */
static void look_back(const layer *l, const step *s, size_t first, size_t last, float *scratch)
{
    const memory *m = &l->kept;
    size_t width = m->width, apart = (m->heads + 2 * m->kept) * width;
    for (size_t i = first; i < last; i++) {
        size_t row = s->at.order[i];
        float *joined = s->joined + row * apart;
        for (size_t head = 0; head < m->heads + m->kept; head++) {
            float turned[width], *from = joined + head * width;
            const norm *n = head < m->heads ? &l->query : &l->key;
            if (n->weight)
                normalize_row(from, n->weight, from, width, n->eps);
            turn(from, s->cosines + row * width, s->sines + row * width, turned, width / 2, 0);
            memcpy(from, turned, sizeof turned);
        }
        for (size_t head = 0; head < m->kept; head++)
            keep(m, head, s->at.slots[row], s->at.places[row], s->at.capacity, joined + (m->heads + head) * width,
                 joined + (m->heads + m->kept + head) * width);
    }
    attend_part(&s->at, m, s->joined, apart, s->mixed, scratch, first, last);
}

/* What LFM2 has in place of attention: three gates side by side. */
static void convolve(const layer *l, const step *s, size_t first, size_t last)
{
    size_t width = s->width, length = l->reach - 1 + s->at.capacity;
    for (size_t i = first; i < last; i++) {
        size_t row = s->at.order[i];
        const float *gates = s->joined + row * 3 * width;
        float *inputs = l->inputs + (s->at.slots[row] * length + s->at.places[row]) * width;
        for (size_t k = 0; k < width; k += LANES) {
            store(inputs + (l->reach - 1) * width + k, load(gates + k) * load(gates + 2 * width + k));
            lanes sum = l->taps_bias ? load(l->taps_bias + k) : (lanes){0};
            for (size_t j = 0; j < l->reach; j++)
                sum += load(l->taps + j * width + k) * load(inputs + j * width + k);
            store(s->mixed + row * width + k, load(gates + width + k) * sum);
        }
    }
}

static size_t find_widest(const layer *layers, size_t count, const step *s)
{
    size_t widest = s->width;
    for (const layer *l = layers; l < layers + count; l++) {
        widest = l->back.width > widest ? l->back.width : widest;
        widest = l->feed.width > widest ? l->feed.width : widest;
    }
    return widest;
}

/* Floats that one part works in: packed rows, a tile of them, and attention. */
size_t room_of_a_part(const layer *layers, size_t count, const step *s)
{
    size_t room = 0;
    for (const layer *l = layers; l < layers + count; l++) {
        size_t needed = l->reach ? 0 : room_to_attend(&s->at, &l->kept);
        room = needed > room ? needed : room;
    }
    return s->at.rows * find_widest(layers, count, s) + ROWS * s->width + room;
}

/* Hidden states through all layers, by as many callers as there are parts. */
int advance(const layer *layers, size_t count, const step *s, size_t part)
{
    size_t rows = s->at.rows, times = 0, widest = find_widest(layers, count, s);
    size_t first = find_edge(&s->at, part, s->parts), last = find_edge(&s->at, part + 1, s->parts);
    unit *packed = (unit *)(s->scratch + part * s->each);
    float *some = s->scratch + part * s->each + rows * widest, *scratch = some + ROWS * s->width;
    for (const layer *l = layers; l < layers + count; l++) {
        pack_normed(s, &l->before, some, packed);
        share_columns(s, packed, &l->into, part, s->joined, 0);
        meet(s, &times);
        if (l->reach)
            convolve(l, s, first, last);
        else
            look_back(l, s, first, last, scratch);
        meet(s, &times);
        pack(s->mixed, l->back.width, rows, l->back.width / NUMBERS, packed);
        share_columns(s, packed, &l->back, part, s->hidden, 1);
        meet(s, &times);
        pack_normed(s, &l->after, some, packed);
        size_t width = l->feed.width, panels = width / LANES;
        size_t begin = panels * part / s->parts * LANES, end = panels * (part + 1) / s->parts * LANES;
        multiply_columns(s, packed, &l->halves, begin, end, s->joined, 0);
        multiply_columns(s, packed, &l->halves, width + begin, width + end, s->joined, 0);
        for (size_t r = 0; r < rows; r++)
            gate_row(s->joined + r * 2 * width + begin, s->joined + (r * 2 + 1) * width + begin,
                     s->fed + r * width + begin, end - begin);
        meet(s, &times);
        pack(s->fed, width, rows, width / NUMBERS, packed);
        share_columns(s, packed, &l->feed, part, s->hidden, 1);
        meet(s, &times);
    }
    return 0;
}
