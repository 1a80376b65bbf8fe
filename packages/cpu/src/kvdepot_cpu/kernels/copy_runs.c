/* Copies runs of bytes between host memories, with stores that bypass the caches.
 *
 * A plain store first reads the line that it overwrites; memcpy avoids that only for copies of many megabytes, and pages
 * of a KV cache are smaller. Built as a plain shared library and called through ctypes, so the GIL is released for the
 * whole batch and no Python header is needed. On other machines than x86-64 it is a loop of memcpy.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SMALLEST_STREAMED 4096 /* shorter runs are not worth a partial line at each end */

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx2"))) static void stream_avx2(char *target, const char *source, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(source + at));
        __m256i b = _mm256_loadu_si256((const __m256i *)(source + at + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(source + at + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(source + at + 96));
        _mm256_stream_si256((__m256i *)(target + at), a);
        _mm256_stream_si256((__m256i *)(target + at + 32), b);
        _mm256_stream_si256((__m256i *)(target + at + 64), c);
        _mm256_stream_si256((__m256i *)(target + at + 96), d);
    }
}

static void stream_sse2(char *target, const char *source, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)(source + at));
        __m128i b = _mm_loadu_si128((const __m128i *)(source + at + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(source + at + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(source + at + 48));
        _mm_stream_si128((__m128i *)(target + at), a);
        _mm_stream_si128((__m128i *)(target + at + 16), b);
        _mm_stream_si128((__m128i *)(target + at + 32), c);
        _mm_stream_si128((__m128i *)(target + at + 48), d);
    }
}

static void copy_streamed(char *target, const char *source, size_t bytes, int has_avx2)
{
    size_t head = -(uintptr_t)target & 127;
    memcpy(target, source, head);
    size_t body = (bytes - head) & ~(size_t)127;
    if (has_avx2)
        stream_avx2(target + head, source + head, body);
    else
        stream_sse2(target + head, source + head, body);
    memcpy(target + head + body, source + head + body, bytes - head - body);
}
#endif

/* Copy `count` runs of `bytes[i]` bytes from `sources[i]` to `targets[i]`; no two targets overlap. With `streamed` the
 * targets are not left in the caches. When it returns, the bytes are visible to every process. */
void kvdepot_copy_runs(const uint64_t *sources, const uint64_t *targets, const uint64_t *bytes, size_t count,
                       int streamed)
{
#if defined(__x86_64__)
    int has_avx2 = __builtin_cpu_supports("avx2");
    for (size_t i = 0; i < count; i++) {
        if (streamed && bytes[i] >= SMALLEST_STREAMED)
            copy_streamed((char *)(uintptr_t)targets[i], (const char *)(uintptr_t)sources[i], bytes[i], has_avx2);
        else
            memcpy((char *)(uintptr_t)targets[i], (const char *)(uintptr_t)sources[i], bytes[i]);
    }
    _mm_sfence();
#else
    (void)streamed;
    for (size_t i = 0; i < count; i++)
        memcpy((char *)(uintptr_t)targets[i], (const char *)(uintptr_t)sources[i], bytes[i]);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}
