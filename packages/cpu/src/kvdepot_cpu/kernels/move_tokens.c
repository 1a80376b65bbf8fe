/* Moves tokens' KV to other places in the pages and turns K on its way. In these pages K has its tokens innermost.
 *
 * A turn by one distance combines two rows of K, the dims of a pair, with one cosine and one sine: in float32, with one
 * product rounded and the other not, as torch's vectorized addcmul does it. Each element is read once and written once.
 *
 * Called through ctypes like copy_runs.c. It needs x86-64 with AVX2, FMA and F16C.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct { /* kvdepot.kvcache.TokenLayout */
    int64_t item_bytes, is_bfloat16, block_stride, heads;
    int64_t k_offset, k_head_stride, k_dim_stride, k_dims;
    int64_t v_offset, v_head_stride, v_dims;
    int64_t pairs, pair_stride, member_stride;
} token_layout;

typedef struct { /* neighbouring tokens of one block */
    int64_t from_block, from_offset, to_block, to_offset, length;
} token_slice;

void kvdepot_copy_runs(const uint64_t *, const uint64_t *, const uint64_t *, size_t, int);

#if defined(__x86_64__)
#include <immintrin.h>

#define STEP 16  /* elements of a row that are turned at a time */
#define AHEAD 4  /* rows: without prefetching a move takes 1.2 times as long, because two streams are read in turns */
#define RUNS 64  /* of V that are copied at a time */
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE TARGET __attribute__((always_inline)) static inline

enum type { BFLOAT16, FLOAT16, FLOAT32 };

typedef struct { /* STEP elements, in the order that `load` finds cheapest */
    __m256 a, b;
} lanes;

INLINE lanes load(const char *from, enum type type)
{
    if (type == FLOAT32)
        return (lanes){_mm256_loadu_ps((const float *)from), _mm256_loadu_ps((const float *)from + 8)};
    __m256i halves = _mm256_loadu_si256((const __m256i *)from);
    if (type == FLOAT16)
        return (lanes){_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                       _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
    return (lanes){_mm256_castsi256_ps(_mm256_slli_epi32(halves, 16)),
                   _mm256_castsi256_ps(_mm256_and_si256(halves, _mm256_set1_epi32(-65536)))};
}

/* Round to the nearest bfloat16, ties to even, in the upper halves. */
INLINE __m256i rounded(__m256 values)
{
    __m256i bits = _mm256_castps_si256(values);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i result = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(result, _mm256_set1_epi32(0x7FC00000), is_nan);
}

INLINE void store(char *to, lanes values, enum type type)
{
    if (type == FLOAT32) {
        _mm256_storeu_ps((float *)to, values.a);
        _mm256_storeu_ps((float *)to + 8, values.b);
        return;
    }
    __m256i halves;
    if (type == FLOAT16)
        halves = _mm256_set_m128i(_mm256_cvtps_ph(values.b, _MM_FROUND_TO_NEAREST_INT),
                                  _mm256_cvtps_ph(values.a, _MM_FROUND_TO_NEAREST_INT));
    else
        halves = _mm256_blend_epi16(_mm256_srli_epi32(rounded(values.a), 16), rounded(values.b), 0xAA);
    _mm256_storeu_si256((__m256i *)to, halves);
}

typedef struct { /* the rows of a pair of dims: where they come from, and where they go */
    const char *from_first, *from_second;
    char *to_first, *to_second;
} row_pair;

typedef struct {
    lanes first, second;
} lane_pair;

INLINE lane_pair turned(row_pair rows, size_t at, __m256 cosine, __m256 sine, enum type type)
{
    lanes x = load(rows.from_first + at, type), y = load(rows.from_second + at, type);
    return (lane_pair){{_mm256_fnmadd_ps(y.a, sine, _mm256_mul_ps(x.a, cosine)),
                        _mm256_fnmadd_ps(y.b, sine, _mm256_mul_ps(x.b, cosine))},
                       {_mm256_fmadd_ps(x.a, sine, _mm256_mul_ps(y.a, cosine)),
                        _mm256_fmadd_ps(x.b, sine, _mm256_mul_ps(y.b, cosine))}};
}

INLINE void store_pair(row_pair rows, size_t at, lane_pair values, enum type type)
{
    store(rows.to_first + at, values.first, type);
    store(rows.to_second + at, values.second, type);
}

INLINE void turn_rows(row_pair rows, size_t bytes, size_t ahead, float cosine, float sine, enum type type)
{
    __m256 cosines = _mm256_set1_ps(cosine), sines = _mm256_set1_ps(sine);
    size_t step = type == FLOAT32 ? STEP * 4 : STEP * 2;
    if (bytes < step) { /* by way of buffers */
        char first[STEP * 4] = {0}, second[STEP * 4] = {0};
        row_pair buffers = {first, second, first, second};
        memcpy(first, rows.from_first, bytes);
        memcpy(second, rows.from_second, bytes);
        store_pair(buffers, 0, turned(buffers, 0, cosines, sines, type), type);
        memcpy(rows.to_first, first, bytes);
        memcpy(rows.to_second, second, bytes);
        return;
    }
    for (size_t at = 0; at < bytes; at += 64) {
        _mm_prefetch(rows.from_first + at + ahead, _MM_HINT_T0);
        _mm_prefetch(rows.from_second + at + ahead, _MM_HINT_T0);
    }
    /* The last step overlaps the one before, so it is read before anything is written in place. */
    lane_pair last = turned(rows, bytes - step, cosines, sines, type);
    for (size_t at = 0; at + step <= bytes; at += step)
        store_pair(rows, at, turned(rows, at, cosines, sines, type), type);
    store_pair(rows, bytes - step, last, type);
}

INLINE void move_k(char *pages, const token_slice *slice, const token_layout *layout, const float *cosines,
                   const float *sines, enum type type)
{
    int64_t item = layout->item_bytes;
    const char *from = pages + (slice->from_block * layout->block_stride + layout->k_offset + slice->from_offset) * item;
    char *to = pages + (slice->to_block * layout->block_stride + layout->k_offset + slice->to_offset) * item;
    size_t bytes = slice->length * item, ahead = AHEAD * layout->pair_stride * item;
    for (int64_t head = 0; head < layout->heads; head++) {
        int64_t start = head * layout->k_head_stride * item;
        for (int64_t pair = 0; pair < layout->pairs; pair++) {
            int64_t first = start + pair * layout->pair_stride * item, second = first + layout->member_stride * item;
            row_pair rows = {from + first, from + second, to + first, to + second};
            turn_rows(rows, bytes, ahead, cosines[pair], sines[pair], type);
        }
        for (int64_t dim = 2 * layout->pairs; from != to && dim < layout->k_dims; dim++) {
            int64_t row = start + dim * layout->k_dim_stride * item;
            memcpy(to + row, from + row, bytes);
        }
    }
}

#define MOVE_K(name, type)                                                                                             \
    TARGET static void name(char *pages, const token_slice *slice, const token_layout *layout, const float *cosines,   \
                            const float *sines)                                                                        \
    {                                                                                                                  \
        move_k(pages, slice, layout, cosines, sines, type);                                                            \
    }
MOVE_K(move_k_of_bfloat16, BFLOAT16)
MOVE_K(move_k_of_float16, FLOAT16)
MOVE_K(move_k_of_float32, FLOAT32)

static void copy_v(char *pages, const token_slice *slices, size_t num_slices, const token_layout *layout)
{
    uint64_t sources[RUNS], targets[RUNS], bytes[RUNS];
    size_t count = 0;
    for (size_t i = 0; i < num_slices; i++)
        for (int64_t head = 0; head < layout->heads; head++) {
            const token_slice *slice = &slices[i];
            int64_t start = layout->v_offset + head * layout->v_head_stride;
            int64_t from = slice->from_block * layout->block_stride + start + slice->from_offset * layout->v_dims;
            int64_t to = slice->to_block * layout->block_stride + start + slice->to_offset * layout->v_dims;
            sources[count] = (uintptr_t)(pages + from * layout->item_bytes);
            targets[count] = (uintptr_t)(pages + to * layout->item_bytes);
            bytes[count++] = slice->length * layout->v_dims * layout->item_bytes;
            if (count == RUNS) {
                kvdepot_copy_runs(sources, targets, bytes, count, 1);
                count = 0;
            }
        }
    kvdepot_copy_runs(sources, targets, bytes, count, 1);
}
#endif

/* Return whether this processor can move tokens. */
int kvdepot_can_move_tokens(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return 0;
#endif
}

/* Move slices in each layer, whose pages begin at `layers[i]`. `cosines` and `sines` have one number for each pair. With
 * `in_place` the slices stay where they are and only turn; otherwise no target is a source. */
void kvdepot_move_tokens(const uint64_t *layers, size_t num_layers, const token_slice *slices, size_t num_slices,
                         const token_layout *layout, const float *cosines, const float *sines, int in_place)
{
#if defined(__x86_64__)
    void (*move)(char *, const token_slice *, const token_layout *, const float *, const float *) =
        layout->is_bfloat16 ? move_k_of_bfloat16 : layout->item_bytes == 2 ? move_k_of_float16 : move_k_of_float32;
    for (size_t layer = 0; layer < num_layers; layer++) {
        char *pages = (char *)(uintptr_t)layers[layer];
        for (size_t i = 0; i < num_slices; i++)
            move(pages, &slices[i], layout, cosines, sines);
        if (!in_place)
            copy_v(pages, slices, num_slices, layout);
    }
#else
    (void)layers, (void)num_layers, (void)slices, (void)num_slices, (void)layout, (void)cosines, (void)sines;
    (void)in_place;
#endif
}
