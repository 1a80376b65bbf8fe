/* Copies runs as copy_runs.c does, and makes the XXH3-128 checksum of every extent on the way.
 *
 * A checksum made afterwards reads the pool again, from memory. Here each register that is stored is summed first. XXH3
 * works through blocks of 1,024 bytes in order, but only its last step with each block depends on the blocks before it:
 * the sum over a block does not. So four runs are copied and summed side by side, and the sums of their blocks are
 * taken in order afterwards (docs/performance.md).
 *
 * The algorithm, its constants and the secret are those for inputs of more than 240 bytes and seed 0 of
 * https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define STREAMS 4
/* Bytes that one stream copies at a time. Pages of 32 KiB to 1 MiB have .92 to .97 of a copy without sums, and with 256
 * bytes .86 to .90 (Intel Xeon). */
#define STEP 128
#define BLOCK 1024 /* bytes between two scrambles of the accumulators */
/* The sums of a slice are kept until they are taken. A run up to the first size is one slice: four slices of one run
 * side by side had .65 of a large memcpy, four runs of 64 KiB 1.17 (AMD EPYC). A longer one is cut into slices whose sums
 * stay in the second cache: runs of 1 MiB then have .95 of a copy without sums, and as one slice .90 (Intel Xeon). */
#define LARGEST_SLICE (512 << 10)
#define SLICE (64 << 10)
#define STRIPE 64
#define DIGEST 16
/* Bytes that are prefetched ahead of the copy, because sums take so many instructions that the processor sees few loads
 * ahead. */
#define AHEAD 1024

#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL

#define AVX2 __attribute__((target("avx2")))

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
static const uint8_t *const SCRAMBLE = SECRET + sizeof SECRET - STRIPE;

typedef struct {
    __m256i low, high;
} lanes; /* eight numbers of 64 bits */

typedef struct {
    char *target;
    const char *source;
    size_t bytes;
} run;

/* Slices that are copied side by side, and the sums of their blocks. */
typedef struct {
    run slices[STREAMS];
    int count;
    lanes sums[STREAMS][LARGEST_SLICE / BLOCK];
} group;

/* The checksum in progress, the next block to take, and the extents to come. */
typedef struct {
    lanes total;
    const group *group;
    int slice;               /* of the group */
    size_t block;            /* of the slice */
    size_t blocks_left;      /* of this extent */
    const uint64_t *extents; /* sizes in bytes, of this extent and those after it */
    uint8_t *digests;        /* of the same extents */
} checksum;

AVX2 static inline __m256i load(const void *from)
{
    return _mm256_loadu_si256((const __m256i *)from);
}

AVX2 static inline __m256i sum_half(__m256i sum, __m256i data, const uint8_t *secret)
{
    __m256i mixed = _mm256_xor_si256(data, load(secret));
    sum = _mm256_add_epi64(sum, _mm256_shuffle_epi32(data, 0x4E)); /* neighbours swapped */
    return _mm256_add_epi64(sum, _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32)));
}

AVX2 static inline lanes sum_stripe(lanes sum, const char *source, const uint8_t *secret)
{
    return (lanes){sum_half(sum.low, load(source), secret), sum_half(sum.high, load(source + 32), secret + 32)};
}

/* Copy STEP bytes, of which the first is byte `at` of its block, add them to the block's sum, and prefetch the STEP bytes
 * at `ahead`. */
AVX2 static inline lanes copy_step(lanes sum, char *target, const char *source, size_t at, const char *ahead)
{
    for (size_t i = 0; i < STEP; i += STRIPE) {
        const uint8_t *secret = SECRET + (at + i) / STRIPE * 8;
        __m256i low = load(source + i), high = load(source + i + 32);
        _mm_prefetch(ahead + i, _MM_HINT_T0);
        _mm256_stream_si256((__m256i *)(target + i), low);
        _mm256_stream_si256((__m256i *)(target + i + 32), high);
        sum = (lanes){sum_half(sum.low, low, secret), sum_half(sum.high, high, secret + 32)};
    }
    return sum;
}

AVX2 static inline __m256i scramble(__m256i total, const uint8_t *secret)
{
    __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    total = _mm256_xor_si256(total, _mm256_srli_epi64(total, 47));
    total = _mm256_xor_si256(total, load(secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(total, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(total, prime), _mm256_slli_epi64(high, 32));
}

static uint64_t read64(const uint8_t *from)
{
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static void finish(const uint64_t *total, const uint8_t *secret, uint64_t start, uint8_t *digest)
{
    for (int i = 0; i < 4; i++) {
        unsigned __int128 product = (unsigned __int128)(total[2 * i] ^ read64(secret + 16 * i)) *
                                    (total[2 * i + 1] ^ read64(secret + 16 * i + 8));
        start += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    start ^= start >> 37;
    start *= 0x165667919E3779F9ULL;
    start = __builtin_bswap64(start ^ (start >> 32));
    memcpy(digest, &start, sizeof start);
}

AVX2 static void begin(checksum *c)
{
    c->total.low = _mm256_set_epi64x((long long)PRIME64_3, (long long)PRIME64_2, (long long)PRIME64_1, PRIME32_3);
    c->total.high = _mm256_set_epi64x(PRIME32_1, (long long)PRIME64_5, PRIME32_2, (long long)PRIME64_4);
    c->blocks_left = *c->extents / BLOCK;
}

/* Sum the last block of an extent, whose last stripe has a secret of its own, and write the digest. */
AVX2 static void end(checksum *c, const char *block)
{
    for (int i = 0; i < BLOCK / STRIPE - 1; i++)
        c->total = sum_stripe(c->total, block + i * STRIPE, SECRET + 8 * i);
    c->total = sum_stripe(c->total, block + BLOCK - STRIPE, SCRAMBLE - 7);
    uint64_t total[8];
    memcpy(total, &c->total, sizeof total);
    finish(total, SCRAMBLE - 11, ~(*c->extents * PRIME64_2), c->digests);
    finish(total, SECRET + 11, *c->extents * PRIME64_1, c->digests + DIGEST / 2);
    c->extents++;
    c->digests += DIGEST;
}

/* Take the sums of at most `limit` blocks of the group. */
AVX2 static void take(checksum *c, size_t limit)
{
    for (; limit > 0 && c->slice < c->group->count; limit--) {
        const run *slice = &c->group->slices[c->slice];
        const lanes *sum = &c->group->sums[c->slice][c->block];
        size_t at = c->block++ * BLOCK;
        if (c->blocks_left == 0)
            begin(c);
        if (--c->blocks_left == 0) {
            end(c, slice->source + at);
        } else {
            c->total.low = scramble(_mm256_add_epi64(c->total.low, sum->low), SCRAMBLE);
            c->total.high = scramble(_mm256_add_epi64(c->total.high, sum->high), SCRAMBLE + 32);
        }
        if (at + BLOCK == slice->bytes) {
            c->slice++;
            c->block = 0;
        }
    }
}

/* Copy the slices of a group side by side as far as the shortest reaches, then the rest of each. Prefetch the `next` group
 * at the end. Meanwhile take the group before: each block waits for the one before it, and the copy fills these waits
 * (.90 and .95 of a large memcpy if the blocks are taken after and during a copy, Intel Xeon). */
AVX2 static void copy_group(group *g, const group *next, checksum *c)
{
    run *slices = g->slices;
    size_t body = g->count == STREAMS ? SIZE_MAX : 0;
    for (int i = 0; i < g->count; i++)
        if (slices[i].bytes < body)
            body = slices[i].bytes;
    const lanes zero = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (size_t at = 0; at < body; at += BLOCK) {
        lanes sum[STREAMS] = {zero, zero, zero, zero};
        const char *ahead[STREAMS];
        for (int i = 0; i < STREAMS; i++)
            ahead[i] = at + AHEAD < body ? slices[i].source + at + AHEAD
                       : i < next->count ? next->slices[i].source + (at + AHEAD - body)
                                         : slices[i].source + at; /* nothing */
        for (size_t step = 0; step < BLOCK; step += STEP)
            for (int i = 0; i < STREAMS; i++)
                sum[i] = copy_step(sum[i], slices[i].target + at + step, slices[i].source + at + step, step,
                                   ahead[i] + step);
        for (int i = 0; i < STREAMS; i++)
            g->sums[i][at / BLOCK] = sum[i];
        take(c, STREAMS);
    }
    for (int i = 0; i < g->count; i++)
        for (size_t at = body; at < slices[i].bytes; at += BLOCK) {
            const char *source = slices[i].source + at;
            lanes sum = zero;
            for (size_t step = 0; step < BLOCK; step += STEP)
                sum = copy_step(sum, slices[i].target + at + step, source + step, step, source + step);
            g->sums[i][at / BLOCK] = sum;
        }
    take(c, SIZE_MAX);
    c->group = g;
    c->slice = 0;
}

/* Copy the group before number `filled` of the ring, and empty the group after it. */
AVX2 static void advance(group *ring, size_t filled, checksum *c)
{
    copy_group(&ring[(filled + 2) % 3], &ring[filled % 3], c);
    ring[(filled + 1) % 3].count = 0;
}
#endif

/* Copy `count` runs that fill `num_extents` extents one after the other, and write the digest of each extent, 16 bytes, to
 * `digests`. `extents` are the sizes of the extents in bytes.
 *
 * Return 1 when the bytes are visible to every process. Return 0 and copy nothing if a run or an extent is not whole
 * blocks of 1,024 bytes, a target is not aligned to 32 bytes, the runs have more or fewer bytes than the extents, memory
 * is short, or the processor lacks AVX2. */
int kvdepot_copy_and_sum(const uint64_t *sources, const uint64_t *targets, const uint64_t *bytes, size_t count,
                         const uint64_t *extents, size_t num_extents, uint8_t *digests)
{
#if defined(__x86_64__)
    uint64_t left = 0;
    if (!__builtin_cpu_supports("avx2"))
        return 0;
    for (size_t i = 0; i < num_extents; i++) {
        if (extents[i] == 0 || extents[i] % BLOCK)
            return 0;
        left += extents[i];
    }
    for (size_t i = 0; i < count; i++) {
        if (bytes[i] % BLOCK || targets[i] % sizeof(__m256i))
            return 0;
        left -= bytes[i];
    }
    if (left != 0)
        return 0;
    /* One is filled, the one before it is copied, and the one before that is taken. Too large for some threads' stacks. */
    group *ring = aligned_alloc(sizeof(__m256i), 3 * sizeof *ring);
    if (ring == NULL)
        return 0;
    ring[0].count = ring[2].count = 0;
    size_t filled = 0;
    checksum c = {.group = &ring[2], .extents = extents, .digests = digests};
    for (size_t i = 0; i < count; i++) {
        size_t slice = bytes[i] <= LARGEST_SLICE ? LARGEST_SLICE : SLICE;
        for (size_t at = 0; at < bytes[i]; at += slice) {
            group *g = &ring[filled % 3];
            g->slices[g->count++] = (run){(char *)(uintptr_t)targets[i] + at, (const char *)(uintptr_t)sources[i] + at,
                                          bytes[i] - at < slice ? bytes[i] - at : slice};
            if (g->count == STREAMS)
                advance(ring, filled++, &c);
        }
    }
    advance(ring, filled++, &c);
    advance(ring, filled, &c);
    take(&c, SIZE_MAX);
    free(ring);
    _mm_sfence();
    return 1;
#else
    (void)sources, (void)targets, (void)bytes, (void)count, (void)extents, (void)num_extents, (void)digests;
    return 0;
#endif
}
