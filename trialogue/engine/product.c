/* A few rows times a large matrix, at the speed at which memory delivers the matrix.

   The matrix comes in panels of LANES outputs: [outputs / LANES][width][LANES]. A tile keeps its sums in
   registers while it reads one panel from start to end, so that each weight is fetched once for up to ROWS
   rows. */
#include <stddef.h>

#define ROWS 12
#define AHEAD 512 /* floats to be fetched before they are needed */
#define EACH(r, count) _Pragma("GCC unroll 12") for (size_t r = 0; r < count; r++)

typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));

#define TILE(count)                                                                                       \
    static void tile_##count(const float *inputs, const float *panel, float *output, size_t width,       \
                             size_t outputs)                                                              \
    {                                                                                                     \
        lanes sums[count];                                                                                \
        EACH(r, count) sums[r] = (lanes){0};                                                              \
        for (size_t k = 0; k < width; k++, panel += LANES) {                                              \
            lanes weights = *(const lanes *)panel;                                                        \
            __builtin_prefetch(panel + AHEAD);                                                            \
            EACH(r, count) sums[r] += inputs[r * width + k] * weights;                                    \
        }                                                                                                 \
        EACH(r, count) *(lanes *)(output + r * outputs) = sums[r];                                        \
    }

TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)

typedef void (*tile)(const float *, const float *, float *, size_t, size_t);
static const tile TILES[ROWS + 1] = {0,      tile_1, tile_2, tile_3, tile_4,  tile_5,  tile_6,
                                     tile_7, tile_8, tile_9, tile_10, tile_11, tile_12};

/* inputs [rows, width], output [rows, outputs]; only the outputs from `first` on and before `last`, both
   multiples of LANES, so that threads can share the work. */
void product(const float *inputs, const float *panels, float *output, size_t rows, size_t width,
             size_t outputs, size_t first, size_t last)
{
    for (size_t n = first; n < last; n += LANES)
        for (size_t row = 0, left = rows; left > 0;) {
            size_t tiles = (left + ROWS - 1) / ROWS, count = (left + tiles - 1) / tiles;
            TILES[count](inputs + row * width, panels + n * width, output + row * outputs + n, width, outputs);
            row += count;
            left -= count;
        }
}
