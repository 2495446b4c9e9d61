/* Vectors of the machine, and tiles: a few rows times one vector of columns, with all sums in registers. Larger
   matmuls are made of tiles. With PAIRS the inputs are bfloat16, two to a unit; sums are float32 either way. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#define ROWS 16
#else
#define LANES 8
#define ROWS 12
#endif
#define EACH(r, count) _Pragma("GCC unroll 16") for (size_t r = 0; r < count; r++)
#define PADDED(count) (((count) + LANES - 1) / LANES * LANES)

const size_t lanes_of_a_vector = LANES;
typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));
typedef int whole __attribute__((vector_size(LANES * sizeof(int)), aligned(sizeof(int))));

static inline lanes load(const float *from) { return *(const lanes *)from; }
static inline void store(float *to, lanes values) { *(lanes *)to = values; }

static inline lanes select_lanes(whole where, lanes one, lanes other)
{
    return (lanes)((where & (whole)one) | (~where & (whole)other));
}

/* exp for numbers up to 0: two to the whole part, a polynomial for the rest. Below -87 the result is 0, because
   denormal numbers slow down all arithmetic. */
static inline lanes exp_lanes(lanes x)
{
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    lanes given = x;
    x = select_lanes(x < -87.0f, (lanes){0} - 87.0f, x);
    lanes shifted = x * 1.44269504f + round, n = shifted - round;
    lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes p = 1.3888889e-3f * r + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    lanes found = (lanes)(((whole)p + ((whole)shifted << 23)) & ~(given < -87.0f));
    return select_lanes(given != given, given, found); /* NaN propagates */
}

/* To bfloat16, rounded to nearest even; NaN stays NaN. */
static inline uint32_t to_half(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return number != number ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static inline whole to_halves(lanes numbers)
{
    whole bits = (whole)numbers, none = numbers != numbers;
    return (none & 0x7fc0) | (~none & ((bits + 0x7fff + (bits >> 16 & 1)) >> 16 & 0xffff));
}

/* -- units: what one step of a matmul takes from each row and each lane --------------------------------- */

#ifdef PAIRS
#ifndef __AVX512BF16__
#error "this processor does not multiply bfloat16"
#endif
#include <immintrin.h>
#define PER_UNIT 2
typedef uint32_t unit;
typedef whole units;
static inline unit join(float first, float second) { return to_half(first) | to_half(second) << 16; }
static inline units join_lanes(lanes first, lanes second) { return to_halves(first) | to_halves(second) << 16; }
static inline lanes add_product(lanes sum, unit row, units line)
{
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)row), (__m512bh)line);
}
#else
#define PER_UNIT 1
typedef float unit;
typedef lanes units;
static inline lanes add_product(lanes sum, unit row, units line) { return sum + row * line; }
#endif
/* The next unit of a row. */
static inline unit to_unit(const float *from)
{
#ifdef PAIRS
    return join(from[0], from[1]);
#else
    return *from;
#endif
}
static inline units load_units(const unit *from) { return *(const units *)from; }
static inline void store_units(unit *to, units values) { *(units *)to = values; }

/* The next `count` units of a row. */
static inline void to_units(const float *from, unit *to, size_t count)
{
#ifdef PAIRS
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)load(from + 2 * i + LANES), (__m512)load(from + 2 * i));
        memcpy(to + i, &pairs, sizeof pairs);
    }
    for (; i < count; i++)
        to[i] = to_unit(from + 2 * i);
#else
    memcpy(to, from, count * sizeof(unit));
#endif
}

/* -- tiles ---------------------------------------------------------------------------------------------- */

/* The sums stay in registers while `width` lines of the matrix are read, `stride` units apart, so that each line is
   read once for all rows. The rows are interleaved, [width][count]. With `add` the sums are added to the output. */
#define TILE(count)                                                                                       \
    static void tile_##count(const unit *rows, const unit *matrix, size_t stride, float *output,          \
                             size_t width, size_t outputs, int add)                                       \
    {                                                                                                     \
        lanes sums[count];                                                                                \
        EACH(r, count) sums[r] = add ? load(output + r * outputs) : (lanes){0};                           \
        for (size_t k = 0; k < width; k++, matrix += stride, rows += count) {                             \
            units line = load_units(matrix);                                                              \
            EACH(r, count) sums[r] = add_product(sums[r], rows[r], line);                                 \
        }                                                                                                 \
        EACH(r, count) store(output + r * outputs, sums[r]);                                              \
    }
