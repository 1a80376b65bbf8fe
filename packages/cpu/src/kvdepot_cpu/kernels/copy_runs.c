/* Copies runs of bytes between host memories with stores that bypass the caches, four runs side by side. A run is a
 * page, or one row of a page whose rows lie apart.
 *
 * A plain store first reads the line that it overwrites. memcpy avoids that only for copies of many megabytes, and
 * pages of a KV cache are smaller. One stream of bypassing stores does not fill the memory system of every processor
 * (0.5 of a large memcpy on an Intel Xeon with AMX); four streams do, on all that were measured (docs/performance.md).
 *
 * Built as a plain shared library and called through ctypes: the GIL is released for the whole batch, and no Python
 * header is needed. Without AVX2 it is a loop of memcpy.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define STREAMS 4
/* Shorter runs are not worth a partial line at each end. Streaming against memcpy on an Intel Xeon, targets aligned and
 * not: runs of 2 KiB take .5 to .8 of memcpy's time, of 1 KiB .7 to .9, of 512 bytes .9 to 1.4. */
#define SMALLEST_STREAMED 1024
#define SMALLEST_SPLIT 65536   /* a run without three others is cut into four parts from here on */
/* Runs up to this size end before the processor begins to fetch ahead, so the next four are prefetched while four are
 * copied. Every other row of 2 KiB: .54 of a large memcpy without, .70 with it; pages of 32 KiB: 1.80 and 1.26
 * (AMD EPYC). They are fetched into the second cache: the rows of four pages lie at multiples of 4 KiB, so in the first
 * one they share sets. That is 1.01 to 1.12 times as fast (Intel Xeon). */
#define LARGEST_FETCHED 8192
/* Targets are aligned to a line, because plain stores write what lies outside whole lines, and read these lines first.
 * torch's large tensors begin 64 bytes behind a page. Aligned to 128 bytes instead, rows of 1 KiB had a line at each end
 * by plain stores, and took 1.2 to 1.6 times as long (AMD EPYC). */
#define LINE 64
#define STEP (2 * LINE)        /* bytes that one stream copies at a time */
/* Pages begin at multiples of 4 KiB, and lines with equal last 12 bits of their addresses share a set of the first
 * cache. So each stream is this far ahead of the one before it: pages of 32 KiB then reach 1.80 of a large memcpy
 * instead of .67 (AMD EPYC). */
#define SKEW 256

typedef struct {
    char *target;
    const char *source;
    size_t bytes;
} run;

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))

AVX2 static inline void stream_line(char *target, const char *source)
{
    __m256i a = _mm256_loadu_si256((const __m256i *)source);
    __m256i b = _mm256_loadu_si256((const __m256i *)(source + 32));
    _mm256_stream_si256((__m256i *)target, a);
    _mm256_stream_si256((__m256i *)(target + 32), b);
}

/* Copy the first bytes of a run by memcpy, so that the rest of its target is aligned to LINE. */
static void align(run *r)
{
    size_t head = -(uintptr_t)r->target & (LINE - 1);
    if (head == 0)
        return;
    memcpy(r->target, r->source, head);
    *r = (run){r->target + head, r->source + head, r->bytes - head};
}

AVX2 static void copy_one(run r)
{
    align(&r);
    size_t body = r.bytes & ~(size_t)(LINE - 1);
    for (size_t at = 0; at < body; at += LINE)
        stream_line(r.target + at, r.source + at);
    memcpy(r.target + body, r.source + body, r.bytes - body);
}

/* Copy four runs side by side as far as the shortest reaches, then the rest of each. `next` are the sources of the four
 * after them, NULL for none. */
AVX2 static void copy_four(run *runs, const uint64_t *next)
{
    size_t body = SIZE_MAX;
    for (int i = 0; i < STREAMS; i++) {
        align(&runs[i]);
        if (runs[i].bytes < body)
            body = runs[i].bytes;
    }
    body &= ~(size_t)(STEP - 1);
    if (body > LARGEST_FETCHED)
        next = NULL;
    for (size_t step = 0; step < body; step += STEP)
        for (int i = 0; i < STREAMS; i++) {
            size_t at = step + i * SKEW;
            if (at >= body)
                at -= body;
            if (next) {
                _mm_prefetch((const char *)(uintptr_t)next[i] + at, _MM_HINT_T1);
                _mm_prefetch((const char *)(uintptr_t)next[i] + at + LINE, _MM_HINT_T1);
            }
            stream_line(runs[i].target + at, runs[i].source + at);
            stream_line(runs[i].target + at + LINE, runs[i].source + at + LINE);
        }
    for (int i = 0; i < STREAMS; i++)
        if (runs[i].bytes > body)
            copy_one((run){runs[i].target + body, runs[i].source + body, runs[i].bytes - body});
}

static void copy_split(run r)
{
    size_t part = r.bytes / STREAMS & ~(size_t)4095;
    run parts[STREAMS];
    for (int i = 0; i < STREAMS; i++)
        parts[i] = (run){r.target + i * part, r.source + i * part, i < STREAMS - 1 ? part : r.bytes - i * part};
    copy_four(parts, NULL);
}

static int can_stream(void)
{
    return __builtin_cpu_supports("avx2");
}

/* Copy at most four runs of at least SMALLEST_STREAMED bytes; `next` as in `copy_four`. */
static void stream(run *runs, int count, const uint64_t *next)
{
    if (count == STREAMS)
        copy_four(runs, next);
    else
        while (count-- > 0)
            (runs[count].bytes >= SMALLEST_SPLIT ? copy_split : copy_one)(runs[count]);
}

static void finish(void)
{
    _mm_sfence();
}
#else
static int can_stream(void)
{
    return 0;
}

static void stream(run *runs, int count, const uint64_t *next)
{
    (void)runs, (void)count, (void)next;
}

static void finish(void)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
#endif

/* Copy `count` runs of `bytes[i]` bytes from `sources[i]` to `targets[i]`; no two targets overlap. With `streamed` the
 * targets are not left in the caches. When it returns, the bytes are visible to every process. */
void kvdepot_copy_runs(const uint64_t *sources, const uint64_t *targets, const uint64_t *bytes, size_t count,
                       int streamed)
{
    streamed = streamed && can_stream();
    run waiting[STREAMS];
    int num_waiting = 0;
    for (size_t i = 0; i < count; i++) {
        run r = {(char *)(uintptr_t)targets[i], (const char *)(uintptr_t)sources[i], bytes[i]};
        if (!streamed || r.bytes < SMALLEST_STREAMED) {
            memcpy(r.target, r.source, r.bytes);
            continue;
        }
        waiting[num_waiting++] = r;
        if (num_waiting == STREAMS) {
            stream(waiting, STREAMS, i + STREAMS < count ? sources + i + 1 : NULL);
            num_waiting = 0;
        }
    }
    stream(waiting, num_waiting, NULL);
    finish();
}

/* Copy `count` pages of `num_rows` rows each, as runs: row `r` of page `i` has `bytes[i]` bytes, and goes from
 * `sources[i] + r * source_steps[i]` to `targets[i] + r * target_steps[i]`. Four pages are copied side by side, row
 * after row: one page at a time reaches .74 of memcpy, four reach 1.0 (AMD EPYC). */
void kvdepot_copy_rows(const uint64_t *sources, const uint64_t *targets, const uint64_t *bytes, size_t count,
                       const uint64_t *source_steps, const uint64_t *target_steps, size_t num_rows, int streamed)
{
    streamed = streamed && can_stream();
    for (size_t first = 0; first < count; first += STREAMS) {
        size_t end = count - first < STREAMS ? count : first + STREAMS;
        for (size_t row = 0; row < num_rows; row++) {
            run waiting[STREAMS];
            uint64_t next[STREAMS];
            int num_waiting = 0;
            for (size_t i = first; i < end; i++) {
                run r = {(char *)(uintptr_t)(targets[i] + row * target_steps[i]),
                         (const char *)(uintptr_t)(sources[i] + row * source_steps[i]), bytes[i]};
                if (!streamed || r.bytes < SMALLEST_STREAMED) {
                    memcpy(r.target, r.source, r.bytes);
                    continue;
                }
                next[num_waiting] = row + 1 < num_rows ? (uintptr_t)r.source + source_steps[i]
                                                       : sources[i + STREAMS < count ? i + STREAMS : i];
                waiting[num_waiting++] = r;
            }
            stream(waiting, num_waiting, next);
        }
    }
    finish();
}
