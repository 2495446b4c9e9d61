/* Attention of an update: packed tokens attend along their path in a tree of nodes, forward and backward.

   Lanes are queries. Scores are stored as [key][query], the layout that the next matmul reads, and the softmax never
   adds up the lanes of a vector. Keys and values are packed once for all queries that attend to them, each node
   padded to whole tiles. */
#include "tiles.h"
#include <math.h>

#define BLOCK 4 /* tiles of queries that the backward pass computes together */
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

/* Keys [LANES][LANES of queries] times queries [LANES][lanes of a matrix], for `tiles` tiles of queries: the rows are
   LANES / PER_UNIT units apart, the tiles `tile_stride` units. */
static void across(const unit *rows, size_t tile_stride, size_t tiles, const unit *matrix, size_t stride, float *output,
                   size_t outputs)
{
    lanes sums[LANES];
    EACH(r, LANES) sums[r] = load(output + r * outputs);
    for (size_t t = 0; t < tiles; t++, rows += tile_stride)
        for (size_t k = 0; k < LANES / PER_UNIT; k++, matrix += stride) {
            units line = load_units(matrix);
            EACH(r, LANES) sums[r] = add_product(sums[r], rows[r * (LANES / PER_UNIT) + k], line);
        }
    EACH(r, LANES) store(output + r * outputs, sums[r]);
}

/* Arguments of all functions. `starts` and `stops` are the packed ranges of nodes, `places` where their padded ranges
   begin. Node n attends to the nodes path[ends[n - 1]] … path[ends[n] - 1], of which it is the last. */
typedef struct {
    size_t heads, kv_heads, width, nodes, room;
    const int64_t *starts, *stops, *places, *path, *ends;
} tree;

/* Rows of one head of [tokens][heads][width] in the two layouts that matmuls read: `down`, panels of LANES rows as
   [width / PER_UNIT][LANES], and `along`, [rows / PER_UNIT][width]. Rows past `count` are zero. */
static void lay_out(const float *from, size_t row_stride, size_t count, size_t width, float scale, unit *down,
                    unit *along)
{
    float rows[LANES * width];
    for (size_t first = 0; first < count; first += LANES) {
        size_t left = count - first < LANES ? count - first : LANES;
        memset(rows, 0, sizeof rows);
        for (size_t r = 0; r < left; r++)
            for (size_t k = 0; k < width; k++)
                rows[r * width + k] = from[(first + r) * row_stride + k] * scale;
        if (down)
            for (size_t k = 0; k < width / PER_UNIT; k++)
                for (size_t r = 0; r < LANES; r++)
                    down[first * width / PER_UNIT + k * LANES + r] = to_unit(rows + r * width + k * PER_UNIT);
        if (along)
            for (size_t r = 0; r < LANES / PER_UNIT; r++)
                for (size_t k = 0; k < width; k++)
#ifdef PAIRS
                    along[(first / 2 + r) * width + k] = join(rows[2 * r * width + k], rows[(2 * r + 1) * width + k]);
#else
                    along[(first + r) * width + k] = rows[r * width + k];
#endif
    }
}

/* Keys or values of one head, node by node. */
static void lay_out_nodes(const tree *t, const float *from, size_t head, unit *down, unit *along)
{
    for (size_t n = 0; n < t->nodes; n++) {
        size_t place = t->places[n] * t->width / PER_UNIT, row_stride = t->kv_heads * t->width;
        lay_out(from + t->starts[n] * row_stride + head * t->width, row_stride, t->stops[n] - t->starts[n], t->width,
                1.0f, down ? down + place : NULL, along ? along + place : NULL);
    }
}

/* The queries of a node that share a KV head are one below the other, token by token; those of one token are
   consecutive in [tokens][heads][width]. */
static const float *find_query(const tree *t, const float *from, size_t n, size_t head, size_t row)
{
    size_t group = t->heads / t->kv_heads;
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

/* Mask the scores of LANES keys that a query may not attend to: past the end of a node, and later ones in the
   query's own node. `key` is the first key's number in its node, `row` the first query's. */
static void mask_scores(float *scores, size_t key, size_t count, int is_own, size_t row, size_t group)
{
    if (key + LANES <= count && (!is_own || key + LANES <= row / group + 1))
        return;
    for (size_t lane = 0; lane < LANES; lane++) {
        size_t own = (row + lane) / group + 1, visible = is_own && own < count ? own : count;
        for (size_t i = 0; i < LANES; i++)
            if (key + i >= visible)
                scores[i * LANES + lane] = NOTHING;
    }
}

/* Number of keys of node m that any query up to `last` of node n attends to. */
static size_t count_keys(const tree *t, size_t n, size_t m, size_t last, size_t group)
{
    size_t count = t->stops[m] - t->starts[m];
    return n == m && last / group + 1 < count ? last / group + 1 : count;
}

/* -- forward -------------------------------------------------------------------------------------------- */

/* LANES queries of node n, from `row` on. */
static void attend_tile(const tree *t, const float *query, const unit *keys, const unit *values, float scale, size_t n,
                        size_t head, size_t row, unit *queries, float *scores, float *output, float *sums)
{
    size_t group = t->heads / t->kv_heads, width = t->width, rows = (t->stops[n] - t->starts[n]) * group;
    size_t count = rows - row < LANES ? rows - row : LANES, total = 0;
    int64_t first = n ? t->ends[n - 1] : 0, last = t->ends[n];
    lay_out_queries(t, query, n, head, row, count, scale, queries, NULL);
    for (int64_t p = first; p < last; p++) {
        size_t m = t->path[p], visible = count_keys(t, n, m, row + count - 1, group);
        for (size_t k = 0; k < visible; k += LANES, total += LANES) {
            SQUARE(keys + (t->places[m] + k) * width / PER_UNIT, queries, LANES, scores + total * LANES,
                   width / PER_UNIT, LANES, 0);
            mask_scores(scores + total * LANES, k, visible, m == n, row, group);
        }
    }
    lanes top = load(scores), sum = {0};
    for (size_t k = 1; k < total; k++) {
        lanes line = load(scores + k * LANES);
        top = select_lanes(line > top, line, top);
    }
    unit *weights = (unit *)scores; /* in place: each score is read before it is overwritten */
    for (size_t k = 0; k < total; k += PER_UNIT) {
        lanes one = exp_lanes(load(scores + k * LANES) - top);
#ifdef PAIRS
        lanes other = exp_lanes(load(scores + (k + 1) * LANES) - top);
        sum += one + other;
        store_units(weights + k / 2 * LANES, join_lanes(one, other));
#else
        sum += one;
        store(weights + k * LANES, one);
#endif
    }
    float result[LANES * width];
    memset(result, 0, sizeof result);
    for (int64_t p = first; p < last; p++) {
        size_t m = t->path[p], visible = PADDED(count_keys(t, n, m, row + count - 1, group));
        for (size_t d = 0; d < width; d += LANES)
            SQUARE(weights, values + t->places[m] * width / PER_UNIT + d, width, result + d, visible / PER_UNIT,
                   width, 1);
        weights += visible / PER_UNIT * LANES;
    }
    for (size_t r = 0; r < count; r++) {
        size_t place = find_query(t, query, n, head, row + r) - query;
        for (size_t d = 0; d < width; d++)
            output[place + d] = result[r * width + d] / sum[r];
        sums[place / width] = top[r] + logf(sum[r]);
    }
}

/* query, output [tokens][heads][width], key, value [tokens][kv_heads][width], sums [tokens][heads]. The work is divided
   into tiles of queries, head by head, node by node; only tiles [first, last). */
int attend_tree(const float *query, const float *key, const float *value, float *output, float *sums,
                const int64_t *starts, const int64_t *stops, const int64_t *places, const int64_t *path,
                const int64_t *ends, size_t heads, size_t kv_heads, size_t width, size_t nodes, size_t room,
                double scale, size_t first, size_t last)
{
    tree t = {heads, kv_heads, width, nodes, room, starts, stops, places, path, ends};
    size_t laid = room * width / PER_UNIT, number = 0;
    unit *keys = malloc((2 * laid + LANES * width) * sizeof(unit) + room * LANES * sizeof(float));
    if (keys == NULL)
        return 1;
    unit *values = keys + laid, *queries = values + laid;
    float *scores = (float *)(queries + LANES * width);
    for (size_t head = 0; head < kv_heads; head++) {
        int is_laid = 0;
        for (size_t n = 0; n < nodes; n++)
            for (size_t row = 0; row < (stops[n] - starts[n]) * (heads / kv_heads); row += LANES, number++) {
                if (number < first || number >= last)
                    continue;
                if (!is_laid) {
                    lay_out_nodes(&t, key, head, keys, NULL);
                    lay_out_nodes(&t, value, head, NULL, values);
                    is_laid = 1;
                }
                attend_tile(&t, query, keys, values, scale, n, head, row, queries, scores, output, sums);
            }
    }
    free(keys);
    return 0;
}

/* -- backward ------------------------------------------------------------------------------------------- */

/* Scratch memory. For a block of queries: both layouts of queries and output gradients, log-sums, and what is
   subtracted from the gradient of each weight. For a chunk of keys: weights and score gradients with queries in
   pairs, and the latter with keys in pairs. */
typedef struct {
    unit *queries, *queries_along, *grad_output, *grad_output_along, *weights, *score_grads, *score_grads_along;
    float *sums, *means, *query_grads;
} work;

/* A tile of scores and the gradients of its weights → weights and score gradients as matmuls read them. */
static void to_score_grads(const float *scores, float *weight_grads, lanes sums, lanes means, unit *weights,
                           unit *score_grads, unit *along)
{
    for (size_t k = 0; k < LANES; k += PER_UNIT) {
        lanes line[PER_UNIT], score_grad[PER_UNIT];
        EACH(i, PER_UNIT) {
            line[i] = exp_lanes(load(scores + (k + i) * LANES) - sums);
            score_grad[i] = line[i] * (load(weight_grads + (k + i) * LANES) - means);
#ifdef PAIRS
            __m256bh one = _mm512_cvtneps_pbh((__m512)line[i]), other = _mm512_cvtneps_pbh((__m512)score_grad[i]);
            memcpy(weights + (k + i) * (LANES / 2), &one, sizeof one);
            memcpy(score_grads + (k + i) * (LANES / 2), &other, sizeof other);
#else
            store(weights + k * LANES, line[i]);
            store(score_grads + k * LANES, score_grad[i]);
#endif
        }
#ifdef PAIRS
        store_units(along + k / 2 * LANES, join_lanes(score_grad[0], score_grad[1]));
#else
        (void)along; /* without pairs one layout is enough */
#endif
    }
}

/* One block of queries of node n, `count` of them from `row` on: the gradients of the queries, and what the block
   adds to those of the keys and values it attends to, [room][width] each. */
static void backpropagate_block(const tree *t, const float *query, const float *output, const float *grad_output,
                                const float *sums, const unit *keys, const unit *keys_along, const unit *values,
                                double scale, size_t n, size_t head, size_t row, size_t count, work *w,
                                float *grad_query, float *key_grads, float *value_grads)
{
    size_t group = t->heads / t->kv_heads, width = t->width, tiles = (count + LANES - 1) / LANES;
    size_t tile = LANES * width / PER_UNIT, square = LANES * LANES / PER_UNIT;
    float scores[LANES * LANES], weight_grads[LANES * LANES];
    for (size_t i = 0; i < tiles; i++) {
        size_t left = count - i * LANES < LANES ? count - i * LANES : LANES;
        lay_out_queries(t, query, n, head, row + i * LANES, left, scale, w->queries + i * tile,
                        w->queries_along + i * tile);
        lay_out_queries(t, grad_output, n, head, row + i * LANES, left, 1.0f, w->grad_output + i * tile,
                        w->grad_output_along + i * tile);
    }
    for (size_t r = 0; r < tiles * LANES; r++) {
        w->sums[r] = -NOTHING; /* missing queries get weights of 0 */
        w->means[r] = 0;
        if (r >= count)
            continue;
        size_t place = find_query(t, query, n, head, row + r) - query;
        float mean = 0;
        for (size_t d = 0; d < width; d++)
            mean += grad_output[place + d] * output[place + d];
        w->sums[r] = sums[place / width];
        w->means[r] = mean;
    }
    memset(w->query_grads, 0, tiles * LANES * width * sizeof(float));
    for (int64_t p = n ? t->ends[n - 1] : 0; p < t->ends[n]; p++) {
        size_t m = t->path[p], visible = count_keys(t, n, m, row + count - 1, group);
        for (size_t begin = 0; begin < visible; begin += CHUNK) {
            size_t panels = PADDED(visible - begin < CHUNK ? visible - begin : CHUNK) / LANES;
            size_t place = t->places[m] + begin;
            for (size_t i = 0; i < tiles; i++)
                for (size_t j = 0; j < panels; j++) {
                    size_t at = (i * (CHUNK / LANES) + j) * square;
                    const unit *panel = keys + (place + j * LANES) * width / PER_UNIT;
                    SQUARE(panel, w->queries + i * tile, LANES, scores, width / PER_UNIT, LANES, 0);
                    mask_scores(scores, begin + j * LANES, visible, m == n, row + i * LANES, group);
                    SQUARE(values + (panel - keys), w->grad_output + i * tile, LANES, weight_grads, width / PER_UNIT,
                           LANES, 0);
                    to_score_grads(scores, weight_grads, load(w->sums + i * LANES), load(w->means + i * LANES),
                                   w->weights + at, w->score_grads + at, w->score_grads_along + at);
                }
            size_t tile_stride = CHUNK / LANES * square;
#ifdef PAIRS
            const unit *score_grads = w->score_grads_along;
#else
            const unit *score_grads = w->score_grads;
#endif
            for (size_t d = 0; d < width; d += LANES) {
                for (size_t i = 0; i < tiles; i++)
                    SQUARE(score_grads + i * tile_stride, keys_along + place * width / PER_UNIT + d, width,
                           w->query_grads + i * LANES * width + d, panels * LANES / PER_UNIT, width, 1);
                for (size_t j = 0; j < panels; j++) {
                    size_t to = (place + j * LANES) * width + d;
                    across(w->score_grads + j * square, tile_stride, tiles, w->queries_along + d, width,
                           key_grads + to, width);
                    across(w->weights + j * square, tile_stride, tiles, w->grad_output_along + d, width,
                           value_grads + to, width);
                }
            }
        }
    }
    for (size_t r = 0; r < count; r++) {
        size_t place = find_query(t, query, n, head, row + r) - query;
        for (size_t d = 0; d < width; d++)
            grad_query[place + d] = w->query_grads[r * width + d] * (float)scale;
    }
}

static void add_grads(const tree *t, const float *gains, size_t head, float *grad)
{
    for (size_t n = 0; n < t->nodes; n++)
        for (int64_t i = 0; i < t->stops[n] - t->starts[n]; i++)
            for (size_t d = 0; d < t->width; d++)
                grad[((t->starts[n] + i) * t->kv_heads + head) * t->width + d] =
                    gains[(t->places[n] + i) * t->width + d];
}

/* Gradients of `attend_tree` by that of its output. The work is divided into blocks of BLOCK tiles. `grad_key` and
   `grad_value` are zero at the start and get what the blocks [first, last) add. */
int backpropagate_tree(const float *query, const float *key, const float *value, const float *output, const float *sums,
                       const float *grad_output, float *grad_query, float *grad_key, float *grad_value,
                       const int64_t *starts, const int64_t *stops, const int64_t *places, const int64_t *path,
                       const int64_t *ends, size_t heads, size_t kv_heads, size_t width, size_t nodes, size_t room,
                       double scale, size_t first, size_t last)
{
    tree t = {heads, kv_heads, width, nodes, room, starts, stops, places, path, ends};
    size_t laid = room * width / PER_UNIT, most = BLOCK * LANES, block = most * width / PER_UNIT, number = 0;
    size_t chunk = most * CHUNK / PER_UNIT;
    unit *space = malloc((3 * laid + 4 * block + 3 * chunk) * sizeof(unit) +
                         (2 * room * width + 2 * most + most * width) * sizeof(float));
    if (space == NULL)
        return 1;
    unit *keys = space, *keys_along = keys + laid, *values = keys_along + laid;
    work w;
    w.queries = values + laid, w.queries_along = w.queries + block;
    w.grad_output = w.queries_along + block, w.grad_output_along = w.grad_output + block;
    w.weights = w.grad_output_along + block, w.score_grads = w.weights + chunk;
    w.score_grads_along = w.score_grads + chunk;
    w.sums = (float *)(w.score_grads_along + chunk), w.means = w.sums + most, w.query_grads = w.means + most;
    float *key_grads = w.query_grads + most * width, *value_grads = key_grads + room * width;
    for (size_t head = 0; head < kv_heads; head++) {
        int is_laid = 0;
        for (size_t n = 0; n < nodes; n++) {
            size_t rows = (stops[n] - starts[n]) * (heads / kv_heads);
            for (size_t row = 0; row < rows; row += most, number++) {
                if (number < first || number >= last)
                    continue;
                if (!is_laid) {
                    lay_out_nodes(&t, key, head, keys, keys_along);
                    lay_out_nodes(&t, value, head, values, NULL);
                    memset(key_grads, 0, 2 * room * width * sizeof(float));
                    is_laid = 1;
                }
                backpropagate_block(&t, query, output, grad_output, sums, keys, keys_along, values, scale, n, head, row,
                                    rows - row < most ? rows - row : most, &w, grad_query, key_grads, value_grads);
            }
        }
        if (is_laid) {
            add_grads(&t, key_grads, head, grad_key);
            add_grads(&t, value_grads, head, grad_value);
        }
    }
    free(space);
    return 0;
}
