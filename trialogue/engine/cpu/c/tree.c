/* Attention of an update: packed tokens look back along their path in a tree of nodes, forward and backward.

   Lanes are queries. Scores then lie as [key][query], which is how the next product wants its rows, and a softmax
   goes from line to line without ever adding up the lanes of a vector. Keys and values are laid out once for all
   queries that look at them, each node padded to whole tiles. */
#include "tiles.h"
#include <math.h>

#define BLOCK 4 /* tiles of queries that are worked on together in the backward pass */
#define CHUNK (4 * LANES) /* and keys */
const size_t queries_of_a_block = BLOCK * LANES;
#define NOTHING -1e30f

#if LANES == 16
TILE(16)
#define SQUARE tile_16
#else
TILE(8)
#define SQUARE tile_8
#endif

/* Keys [LANES][LANES of queries] times queries [LANES][lanes of a matrix], for `tiles` tiles of queries: the
   rows lie one below the other, LANES / NUMBERS units apart, the tiles `apart` units. */
static void across(const unit *rows, size_t apart, size_t tiles, const unit *matrix, size_t stride,
                   float *output, size_t outputs)
{
    lanes sums[LANES];
    EACH(r, LANES) sums[r] = load(output + r * outputs);
    for (size_t t = 0; t < tiles; t++, rows += apart)
        for (size_t k = 0; k < LANES / NUMBERS; k++, matrix += stride) {
            units line = load_units(matrix);
            EACH(r, LANES) sums[r] = add_product(sums[r], rows[r * (LANES / NUMBERS) + k], line);
        }
    EACH(r, LANES) store(output + r * outputs, sums[r]);
}

/* What all functions are told. `starts` and `stops` are the packed ranges of nodes, `places` where their padded
   ranges begin; node n looks at the nodes path[ends[n - 1]] … path[ends[n] - 1], itself last. */
typedef struct {
    size_t heads, kept, width, nodes, room;
    const int64_t *starts, *stops, *places, *path, *ends;
} tree;

/* Rows of one head of [tokens][heads][width] in the two ways products take them: `down`, panels of LANES rows as
   [width / NUMBERS][LANES], and `along`, [rows / NUMBERS][width]; rows past `count` are nothing. */
static void lay_out(const float *from, size_t apart, size_t count, size_t width, float scale, unit *down,
                    unit *along)
{
    float rows[LANES * width];
    for (size_t first = 0; first < count; first += LANES) {
        size_t left = count - first < LANES ? count - first : LANES;
        memset(rows, 0, sizeof rows);
        for (size_t r = 0; r < left; r++)
            for (size_t k = 0; k < width; k++)
                rows[r * width + k] = from[(first + r) * apart + k] * scale;
        if (down)
            for (size_t k = 0; k < width / NUMBERS; k++)
                for (size_t r = 0; r < LANES; r++)
                    down[first * width / NUMBERS + k * LANES + r] = take(rows + r * width + k * NUMBERS);
        if (along)
            for (size_t r = 0; r < LANES / NUMBERS; r++)
                for (size_t k = 0; k < width; k++)
#ifdef PAIRS
                    along[(first / 2 + r) * width + k] = join(rows[2 * r * width + k], rows[(2 * r + 1) * width + k]);
#else
                    along[(first + r) * width + k] = rows[r * width + k];
#endif
    }
}

/* Keys or values of one head, node after node. */
static void lay_out_nodes(const tree *t, const float *from, size_t head, unit *down, unit *along)
{
    for (size_t n = 0; n < t->nodes; n++) {
        size_t place = t->places[n] * t->width / NUMBERS, apart = t->kept * t->width;
        lay_out(from + t->starts[n] * apart + head * t->width, apart, t->stops[n] - t->starts[n], t->width, 1.0f,
                down ? down + place : NULL, along ? along + place : NULL);
    }
}

/* Queries of a node that share a head of keys are one below the other, token after token; those of one token
   lie side by side in [tokens][heads][width]. */
static const float *find_query(const tree *t, const float *from, size_t n, size_t head, size_t row)
{
    size_t group = t->heads / t->kept;
    return from + ((t->starts[n] + row / group) * t->heads + head * group + row % group) * t->width;
}

static void lay_out_queries(const tree *t, const float *from, size_t n, size_t head, size_t row, size_t count,
                            float scale, unit *down, unit *along)
{
    float rows[LANES * t->width];
    for (size_t r = 0; r < count; r++)
        memcpy(rows + r * t->width, find_query(t, from, n, head, row + r), t->width * sizeof(float));
    lay_out(rows, t->width, count, t->width, scale, down, along);
}

/* Scores of LANES keys that a query may not look at: those past the end of a node, and in a query's own node those
   that come later. `key` is the first one's number in its node, `row` the first query's. */
static void hide(float *scores, size_t key, size_t count, int is_own, size_t row, size_t group)
{
    if (key + LANES <= count && (!is_own || key + LANES <= row / group + 1))
        return;
    for (size_t lane = 0; lane < LANES; lane++) {
        size_t own = (row + lane) / group + 1, seen = is_own && own < count ? own : count;
        for (size_t i = 0; i < LANES; i++)
            if (key + i >= seen)
                scores[i * LANES + lane] = NOTHING;
    }
}

/* Keys of node m that any of the queries up to `last` of node n may look at. */
static size_t count_keys(const tree *t, size_t n, size_t m, size_t last, size_t group)
{
    size_t count = t->stops[m] - t->starts[m];
    return n == m && last / group + 1 < count ? last / group + 1 : count;
}

/* -- forward -------------------------------------------------------------------------------------------- */

/* LANES queries of node n from `row` on. */
static void attend_tile(const tree *t, const float *query, const unit *keys, const unit *values, float scale,
                        size_t n, size_t head, size_t row, unit *asked, float *scores, float *output, float *sums)
{
    size_t group = t->heads / t->kept, width = t->width, rows = (t->stops[n] - t->starts[n]) * group;
    size_t count = rows - row < LANES ? rows - row : LANES, total = 0;
    int64_t first = n ? t->ends[n - 1] : 0, last = t->ends[n];
    lay_out_queries(t, query, n, head, row, count, scale, asked, NULL);
    for (int64_t p = first; p < last; p++) {
        size_t m = t->path[p], seen = count_keys(t, n, m, row + count - 1, group);
        for (size_t k = 0; k < seen; k += LANES, total += LANES) {
            SQUARE(keys + (t->places[m] + k) * width / NUMBERS, asked, LANES, scores + total * LANES,
                   width / NUMBERS, LANES, 0);
            hide(scores + total * LANES, k, seen, m == n, row, group);
        }
    }
    lanes top = load(scores), sum = {0};
    for (size_t k = 1; k < total; k++) {
        lanes line = load(scores + k * LANES);
        top = choose(line > top, line, top);
    }
    unit *weights = (unit *)scores; /* in place: what is written was read before */
    for (size_t k = 0; k < total; k += NUMBERS) {
        lanes one = power(load(scores + k * LANES) - top);
#ifdef PAIRS
        lanes other = power(load(scores + (k + 1) * LANES) - top);
        sum += one + other;
        store_units(weights + k / 2 * LANES, join_lanes(one, other));
#else
        sum += one;
        store(weights + k * LANES, one);
#endif
    }
    float said[LANES * width];
    memset(said, 0, sizeof said);
    for (int64_t p = first; p < last; p++) {
        size_t m = t->path[p], seen = PADDED(count_keys(t, n, m, row + count - 1, group));
        for (size_t d = 0; d < width; d += LANES)
            SQUARE(weights, values + t->places[m] * width / NUMBERS + d, width, said + d, seen / NUMBERS, width, 1);
        weights += seen / NUMBERS * LANES;
    }
    for (size_t r = 0; r < count; r++) {
        size_t place = find_query(t, query, n, head, row + r) - query;
        for (size_t d = 0; d < width; d++)
            output[place + d] = said[r * width + d] / sum[r];
        sums[place / width] = top[r] + logf(sum[r]);
    }
}

/* query, output [tokens][heads][width], key, value [tokens][kept][width], sums [tokens][heads]. Work is divided
   into tiles of queries, head after head, node after node: only those from `first` on and before `last`. */
int attend_tree(const float *query, const float *key, const float *value, float *output, float *sums,
                const int64_t *starts, const int64_t *stops, const int64_t *places, const int64_t *path,
                const int64_t *ends, size_t heads, size_t kept, size_t width, size_t nodes, size_t room,
                double scale, size_t first, size_t last)
{
    tree t = {heads, kept, width, nodes, room, starts, stops, places, path, ends};
    size_t laid = room * width / NUMBERS, number = 0;
    unit *keys = malloc((2 * laid + LANES * width) * sizeof(unit) + room * LANES * sizeof(float));
    if (keys == NULL)
        return 1;
    unit *values = keys + laid, *asked = values + laid;
    float *scores = (float *)(asked + LANES * width);
    for (size_t head = 0; head < kept; head++) {
        int is_laid = 0;
        for (size_t n = 0; n < nodes; n++)
            for (size_t row = 0; row < (stops[n] - starts[n]) * (heads / kept); row += LANES, number++) {
                if (number < first || number >= last)
                    continue;
                if (!is_laid) {
                    lay_out_nodes(&t, key, head, keys, NULL);
                    lay_out_nodes(&t, value, head, NULL, values);
                    is_laid = 1;
                }
                attend_tile(&t, query, keys, values, scale, n, head, row, asked, scores, output, sums);
            }
    }
    free(keys);
    return 0;
}

/* -- backward ------------------------------------------------------------------------------------------- */

/* What is at hand of a block of queries: both layouts of queries and of the gradient that comes in, log-sums, and
   what is subtracted from the gradient of each weight. Then of a chunk of keys: weights and the gradients of
   scores with queries in pairs, and the latter with keys in pairs. */
typedef struct {
    unit *asked, *asked_along, *pull, *pull_along, *weights, *slopes, *slopes_along;
    float *sums, *means, *gained;
} work;

/* A tile of scores and one of the weights' gradients → weights and gradients of scores as products take them. */
static void to_slopes(const float *scores, float *drawn, lanes sums, lanes means, unit *weights, unit *slopes,
                      unit *along)
{
    for (size_t k = 0; k < LANES; k += NUMBERS) {
        lanes line[NUMBERS], slope[NUMBERS];
        EACH(i, NUMBERS) {
            line[i] = power(load(scores + (k + i) * LANES) - sums);
            slope[i] = line[i] * (load(drawn + (k + i) * LANES) - means);
#ifdef PAIRS
            __m256bh one = _mm512_cvtneps_pbh((__m512)line[i]), other = _mm512_cvtneps_pbh((__m512)slope[i]);
            memcpy(weights + (k + i) * (LANES / 2), &one, sizeof one);
            memcpy(slopes + (k + i) * (LANES / 2), &other, sizeof other);
#else
            store(weights + k * LANES, line[i]);
            store(slopes + k * LANES, slope[i]);
#endif
        }
#ifdef PAIRS
        store_units(along + k / 2 * LANES, join_lanes(slope[0], slope[1]));
#else
        (void)along; /* one layout serves both */
#endif
    }
}

/* One block of queries of node n, `count` of them from `row` on: gradients towards its queries, and what it adds
   to those towards the keys and values it looks at, [room][width] each. */
static void backpropagate_block(const tree *t, const float *query, const float *output, const float *pull,
                                const float *sums, const unit *keys, const unit *keys_along, const unit *values,
                                double scale, size_t n, size_t head, size_t row, size_t count, work *w,
                                float *grad_query, float *key_gains, float *value_gains)
{
    size_t group = t->heads / t->kept, width = t->width, tiles = (count + LANES - 1) / LANES;
    size_t tile = LANES * width / NUMBERS, square = LANES * LANES / NUMBERS;
    float scores[LANES * LANES], drawn[LANES * LANES];
    for (size_t i = 0; i < tiles; i++) {
        size_t left = count - i * LANES < LANES ? count - i * LANES : LANES;
        lay_out_queries(t, query, n, head, row + i * LANES, left, scale, w->asked + i * tile,
                        w->asked_along + i * tile);
        lay_out_queries(t, pull, n, head, row + i * LANES, left, 1.0f, w->pull + i * tile, w->pull_along + i * tile);
    }
    for (size_t r = 0; r < tiles * LANES; r++) {
        w->sums[r] = -NOTHING; /* queries that are not there have weights of nothing */
        w->means[r] = 0;
        if (r >= count)
            continue;
        size_t place = find_query(t, query, n, head, row + r) - query;
        float mean = 0;
        for (size_t d = 0; d < width; d++)
            mean += pull[place + d] * output[place + d];
        w->sums[r] = sums[place / width];
        w->means[r] = mean;
    }
    memset(w->gained, 0, tiles * LANES * width * sizeof(float));
    for (int64_t p = n ? t->ends[n - 1] : 0; p < t->ends[n]; p++) {
        size_t m = t->path[p], seen = count_keys(t, n, m, row + count - 1, group);
        for (size_t begin = 0; begin < seen; begin += CHUNK) {
            size_t panels = PADDED(seen - begin < CHUNK ? seen - begin : CHUNK) / LANES;
            size_t place = t->places[m] + begin;
            for (size_t i = 0; i < tiles; i++)
                for (size_t j = 0; j < panels; j++) {
                    size_t at = (i * (CHUNK / LANES) + j) * square;
                    const unit *panel = keys + (place + j * LANES) * width / NUMBERS;
                    SQUARE(panel, w->asked + i * tile, LANES, scores, width / NUMBERS, LANES, 0);
                    hide(scores, begin + j * LANES, seen, m == n, row + i * LANES, group);
                    SQUARE(values + (panel - keys), w->pull + i * tile, LANES, drawn, width / NUMBERS, LANES, 0);
                    to_slopes(scores, drawn, load(w->sums + i * LANES), load(w->means + i * LANES), w->weights + at,
                              w->slopes + at, w->slopes_along + at);
                }
            size_t apart = CHUNK / LANES * square;
#ifdef PAIRS
            const unit *slopes = w->slopes_along;
#else
            const unit *slopes = w->slopes;
#endif
            for (size_t d = 0; d < width; d += LANES) {
                for (size_t i = 0; i < tiles; i++)
                    SQUARE(slopes + i * apart, keys_along + place * width / NUMBERS + d, width,
                           w->gained + i * LANES * width + d, panels * LANES / NUMBERS, width, 1);
                for (size_t j = 0; j < panels; j++) {
                    size_t to = (place + j * LANES) * width + d;
                    across(w->slopes + j * square, apart, tiles, w->asked_along + d, width, key_gains + to, width);
                    across(w->weights + j * square, apart, tiles, w->pull_along + d, width, value_gains + to, width);
                }
            }
        }
    }
    for (size_t r = 0; r < count; r++) {
        size_t place = find_query(t, query, n, head, row + r) - query;
        for (size_t d = 0; d < width; d++)
            grad_query[place + d] = w->gained[r * width + d] * (float)scale;
    }
}

static void add_gains(const tree *t, const float *gains, size_t head, float *grad)
{
    for (size_t n = 0; n < t->nodes; n++)
        for (int64_t i = 0; i < t->stops[n] - t->starts[n]; i++)
            for (size_t d = 0; d < t->width; d++)
                grad[((t->starts[n] + i) * t->kept + head) * t->width + d] =
                    gains[(t->places[n] + i) * t->width + d];
}

/* Of what `attend_tree` was given and gave, and `pull`, the gradient of its output. Work is divided into blocks of
   BLOCK tiles; `grad_key` and `grad_value` begin with nothing and get what the blocks from `first` on and before
   `last` add. */
int backpropagate_tree(const float *query, const float *key, const float *value, const float *output,
                       const float *sums, const float *pull, float *grad_query, float *grad_key,
                       float *grad_value, const int64_t *starts, const int64_t *stops, const int64_t *places,
                       const int64_t *path, const int64_t *ends, size_t heads, size_t kept, size_t width,
                       size_t nodes, size_t room, double scale, size_t first, size_t last)
{
    tree t = {heads, kept, width, nodes, room, starts, stops, places, path, ends};
    size_t laid = room * width / NUMBERS, most = BLOCK * LANES, block = most * width / NUMBERS, number = 0;
    size_t chunk = most * CHUNK / NUMBERS;
    unit *space = malloc((3 * laid + 4 * block + 3 * chunk) * sizeof(unit) +
                         (2 * room * width + 2 * most + most * width) * sizeof(float));
    if (space == NULL)
        return 1;
    unit *keys = space, *keys_along = keys + laid, *values = keys_along + laid;
    work w;
    w.asked = values + laid, w.asked_along = w.asked + block;
    w.pull = w.asked_along + block, w.pull_along = w.pull + block;
    w.weights = w.pull_along + block, w.slopes = w.weights + chunk, w.slopes_along = w.slopes + chunk;
    w.sums = (float *)(w.slopes_along + chunk), w.means = w.sums + most, w.gained = w.means + most;
    float *key_gains = w.gained + most * width, *value_gains = key_gains + room * width;
    for (size_t head = 0; head < kept; head++) {
        int is_laid = 0;
        for (size_t n = 0; n < nodes; n++) {
            size_t rows = (stops[n] - starts[n]) * (heads / kept);
            for (size_t row = 0; row < rows; row += most, number++) {
                if (number < first || number >= last)
                    continue;
                if (!is_laid) {
                    lay_out_nodes(&t, key, head, keys, keys_along);
                    lay_out_nodes(&t, value, head, values, NULL);
                    memset(key_gains, 0, 2 * room * width * sizeof(float));
                    is_laid = 1;
                }
                backpropagate_block(&t, query, output, pull, sums, keys, keys_along, values, scale, n, head, row,
                                    rows - row < most ? rows - row : most, &w, grad_query, key_gains, value_gains);
            }
        }
        if (is_laid) {
            add_gains(&t, key_gains, head, grad_key);
            add_gains(&t, value_gains, head, grad_value);
        }
    }
    free(space);
    return 0;
}
