/* Moves tokens' KV to other places in the pages and turns (rotates) K on the way.
 *
 * In these pages K lies in rows: neighbouring tokens of one dim or, in the tiles that AMX multiplies, neighbouring
 * tokens of two interleaved dims. A row ends with its tile. V lies the other way round: neighbouring dims of one token,
 * or of two interleaved tokens.
 *
 * A turn by one distance combines two rows of K, the dims of a pair, with one cosine and one sine. It computes in
 * float32 and rounds one of the two products, as torch's vectorized addcmul does. Each element is read once and written
 * once.
 *
 * Called through ctypes like copy_runs.c. It needs x86-64 with AVX2, FMA and F16C.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct { /* kvdepot.kvcache.TokenLayout */
    int64_t item_bytes, is_bfloat16, block_stride, heads;
    int64_t k_offset, k_head_stride, k_row_stride, k_dims, k_lanes, k_tile_tokens, k_tile_stride;
    int64_t v_offset, v_head_stride, v_dims, v_lanes, v_group_dims, v_group_stride;
    int64_t pairs, pair_row_stride, member_stride;
} token_layout;

typedef struct { /* neighbouring tokens of one block */
    int64_t from_block, from_offset, to_block, to_offset, length;
} token_slice;

void kvdepot_copy_runs(const uint64_t *, const uint64_t *, const uint64_t *, size_t, int);

#if defined(__x86_64__)
#include <immintrin.h>

#define STEP 16  /* elements of a row that are turned at a time */
#define AHEAD 4  /* rows to prefetch: without it a move takes 1.2 times as long, because it reads two streams in turn */
#define RUNS 64  /* runs of V that are copied at a time */
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

INLINE lane_pair turned(row_pair rows, size_t at, lanes cosine, lanes sine, enum type type)
{
    lanes x = load(rows.from_first + at, type), y = load(rows.from_second + at, type);
    return (lane_pair){{_mm256_fnmadd_ps(y.a, sine.a, _mm256_mul_ps(x.a, cosine.a)),
                        _mm256_fnmadd_ps(y.b, sine.b, _mm256_mul_ps(x.b, cosine.b))},
                       {_mm256_fmadd_ps(x.a, sine.a, _mm256_mul_ps(y.a, cosine.a)),
                        _mm256_fmadd_ps(x.b, sine.b, _mm256_mul_ps(y.b, cosine.b))}};
}

/* Spread the factor of a row's dim, or of its two dims: `load` separates bfloat16s at even and at odd places. */
INLINE lanes spread(const float *factors, int64_t dims)
{
    return (lanes){_mm256_set1_ps(factors[0]), _mm256_set1_ps(factors[dims - 1])};
}

INLINE void store_pair(row_pair rows, size_t at, lane_pair values, enum type type)
{
    store(rows.to_first + at, values.first, type);
    store(rows.to_second + at, values.second, type);
}

INLINE void turn_rows(row_pair rows, size_t bytes, size_t ahead, lanes cosines, lanes sines, enum type type)
{
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

/* Move tokens of one tile into one tile. */
INLINE void move_rows(const char *from, char *to, size_t tokens, const token_layout *layout, const float *cosines,
                      const float *sines, enum type type)
{
    int64_t item = layout->item_bytes, dims = layout->k_lanes;
    size_t bytes = tokens * dims * item, ahead = AHEAD * layout->pair_row_stride * item;
    for (int64_t pair = 0; pair < layout->pairs; pair += dims) {
        int64_t first = pair / dims * layout->pair_row_stride * item, second = first + layout->member_stride * item;
        row_pair rows = {from + first, from + second, to + first, to + second};
        turn_rows(rows, bytes, ahead, spread(cosines + pair, dims), spread(sines + pair, dims), type);
    }
    for (int64_t dim = 2 * layout->pairs; from != to && dim < layout->k_dims; dim += dims) {
        int64_t row = dim / dims * layout->k_row_stride * item;
        memcpy(to + row, from + row, bytes);
    }
}

INLINE int64_t in_tile(int64_t token, const token_layout *layout)
{
    int64_t tile = layout->k_tile_tokens;
    return token / tile * layout->k_tile_stride + token % tile * layout->k_lanes;
}

INLINE void move_k(char *pages, const token_slice *slice, const token_layout *layout, const float *cosines,
                   const float *sines, enum type type)
{
    int64_t item = layout->item_bytes, tile = layout->k_tile_tokens, count;
    for (int64_t head = 0; head < layout->heads; head++) {
        int64_t start = layout->k_offset + head * layout->k_head_stride;
        const char *from = pages + (slice->from_block * layout->block_stride + start) * item;
        char *to = pages + (slice->to_block * layout->block_stride + start) * item;
        for (int64_t done = 0; done < slice->length; done += count) {
            int64_t source = slice->from_offset + done, target = slice->to_offset + done;
            count = slice->length - done;
            count = count < tile - source % tile ? count : tile - source % tile;
            count = count < tile - target % tile ? count : tile - target % tile;
            move_rows(from + in_tile(source, layout) * item, to + in_tile(target, layout) * item, count, layout,
                      cosines, sines, type);
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

/* Copy V of neighbouring tokens that lie in pairs. Both places are those of the pairs of the first token; `source` and
 * `target` are the places of the first token in these pairs: 0 or 1. */
TARGET static void copy_pairs(const uint16_t *from, uint16_t *to, int64_t source, int64_t target, int64_t length,
                              int64_t dims)
{
    if (target) { /* the second one of its pair */
        for (int64_t dim = 0; dim < dims; dim++)
            to[2 * dim + 1] = from[2 * dim + source];
        from += 2 * dims * source, to += 2 * dims;
        source = !source;
        length--;
    }
    int64_t whole = length / 2 * 2 * dims; /* elements of whole pairs in the target */
    if (!source)
        memcpy(to, from, whole * sizeof *to);
    else
        for (int64_t pair = 0; pair < whole; pair += 2 * dims)
            for (int64_t dim = 0; dim < 2 * dims; dim += 2) {
                to[pair + dim] = from[pair + dim + 1];
                to[pair + dim + 1] = from[pair + dim + 2 * dims];
            }
    if (length % 2)
        for (int64_t dim = 0; dim < dims; dim++)
            to[whole + 2 * dim] = from[whole + 2 * dim + source];
}

static void copy_v(char *pages, const token_slice *slices, size_t num_slices, const token_layout *layout)
{
    uint64_t sources[RUNS], targets[RUNS], bytes[RUNS];
    size_t count = 0;
    int64_t item = layout->item_bytes, tokens = layout->v_lanes, dims = layout->v_group_dims;
    for (size_t i = 0; i < num_slices; i++)
        for (int64_t head = 0; head < layout->heads; head++)
            for (int64_t group = 0; group < layout->v_dims / dims; group++) {
                const token_slice *slice = &slices[i];
                int64_t start = layout->v_offset + head * layout->v_head_stride + group * layout->v_group_stride;
                int64_t from = slice->from_block * layout->block_stride + start;
                int64_t to = slice->to_block * layout->block_stride + start;
                from += slice->from_offset / tokens * tokens * dims;
                to += slice->to_offset / tokens * tokens * dims;
                if (tokens == 2) {
                    copy_pairs((const uint16_t *)pages + from, (uint16_t *)pages + to, slice->from_offset % 2,
                               slice->to_offset % 2, slice->length, dims);
                    continue;
                }
                sources[count] = (uintptr_t)(pages + from * item);
                targets[count] = (uintptr_t)(pages + to * item);
                bytes[count++] = slice->length * dims * item;
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

/* Move slices in each layer, whose pages begin at `layers[i]`. `cosines` and `sines` have one number for each pair.
 * With `in_place` all slices stay where they are and only turn; otherwise some may, and no target of the others is a
 * source. */
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
