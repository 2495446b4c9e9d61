/* Vectors of the machine, and tiles: a few rows times a few lanes of a matrix, with all sums in registers. What is
   large is made of tiles. Compiled with PAIRS, the numbers that are multiplied are bfloat16, two
   to a unit; sums are float32 either way. */
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

static inline lanes choose(whole where, lanes one, lanes other)
{
    return (lanes)((where & (whole)one) | (~where & (whole)other));
}

/* e to the power of numbers up to 0: two to the whole part, a polynomial for the rest. Below -87 it is
   nothing: numbers too small to be written as others slow everything down that they meet. */
static inline lanes power(lanes x)
{
    const float round = 12582912.0f; /* 1.5 * 2^23: what is added to it loses its fraction */
    lanes given = x;
    x = choose(x < -87.0f, (lanes){0} - 87.0f, x);
    lanes shifted = x * 1.44269504f + round, n = shifted - round;
    lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes p = 1.3888889e-3f * r + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    lanes found = (lanes)(((whole)p + ((whole)shifted << 23)) & ~(given < -87.0f));
    return choose(given != given, given, found); /* what is no number stays none */
}

/* To bfloat16: the nearest, of two the even one; what is no number stays none. */
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

/* -- units: what one step of a product takes from each row and each lane -------------------------------- */

#ifdef PAIRS
#ifndef __AVX512BF16__
#error "this processor does not multiply bfloat16"
#endif
#include <immintrin.h>
#define NUMBERS 2
typedef uint32_t unit;
typedef whole units;
static inline unit join(float first, float second) { return to_half(first) | to_half(second) << 16; }
static inline units join_lanes(lanes first, lanes second) { return to_halves(first) | to_halves(second) << 16; }
static inline lanes add_product(lanes sum, unit row, units line)
{
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)row), (__m512bh)line);
}
#else
#define NUMBERS 1
typedef float unit;
typedef lanes units;
static inline lanes add_product(lanes sum, unit row, units line) { return sum + row * line; }
#endif
/* The next unit of a row. */
static inline unit take(const float *from)
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
        to[i] = take(from + 2 * i);
#else
    memcpy(to, from, count * sizeof(unit));
#endif
}

/* -- tiles ---------------------------------------------------------------------------------------------- */

/* Sums stay in registers while `width` lines of the matrix pass, `stride` units apart, so that each is
   fetched once for all rows. The rows lie side by side, [width][count]: one address leads through all. With
   `add` the sums are added to what is there. */
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
