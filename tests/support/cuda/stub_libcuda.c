/* A libcuda.so.1 without a device for the real cuda-bindings. It writes each call to stderr as C received it.

   Calls that wait or that move memory sleep for 0.3 s, so that a test can see whether the GIL is held meanwhile. A copy
   of 13 bytes returns a code that no binding knows. Compiled with BYTES_PER_SECOND, it is a silent device whose copies
   take as long as a link of that speed, for `benchmarks/devices/interpreter_lock.py`. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdint.h>
#include <stddef.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef int Result;
typedef unsigned long long Address;
typedef struct {
    unsigned char bytes[64];
} Handle;

#ifdef BYTES_PER_SECOND
#define SAY(...) ((void)0)
#else
#define SAY(...) (fprintf(stderr, "stub: " __VA_ARGS__), fputc('\n', stderr))
#endif
#define CONTEXT ((void *)0x7001)
#define OPENED 0x7f0000200000ULL
#define UNKNOWN_CODE 99999

/* Defines both names of a call that has a second version. */
#define ALIAS(name, ...) Result name##_v2 __VA_ARGS__ __attribute__((alias(#name)));

#ifdef BYTES_PER_SECOND
static double copied, recorded[1 << 16]; /* when the copies end that were queued so far, and at each event */
static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}
static void linger(void) {}
static void copy(size_t size) { copied = (copied > now() ? copied : now()) + size / (double)BYTES_PER_SECOND; }
static void record(void *event) { recorded[(uintptr_t)event % (1 << 16)] = copied; }
static void await(void *event) {
    double rest = recorded[(uintptr_t)event % (1 << 16)] - now();
    if (rest > 0) usleep(rest * 1e6);
}
#else
static void linger(void) { usleep(300000); }
static void copy(size_t size) { (void)size; }
static void record(void *event) { (void)event; }
static void await(void *event) { (void)event, linger(); }
#endif
static Result not_supported(void) { return 801; }

Result cuInit(unsigned flags) { return SAY("cuInit %u", flags), 0; }
Result cuDriverGetVersion(int *version) { return *version = 13000, 0; }
Result cuDeviceGet(int *device, int ordinal) { return *device = ordinal, SAY("cuDeviceGet %d", ordinal), 0; }
Result cuDeviceGetName(char *name, int size, int device) { return snprintf(name, size, "STUB %d", device), 0; }
Result cuDeviceGetUuid(unsigned char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = i + device;
    return 0;
}
ALIAS(cuDeviceGetUuid, (unsigned char *, int))
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    return *value = attribute == 75 ? 9 : attribute == 76 ? 0 : -1, 0;
}
Result cuDevicePrimaryCtxRetain(void **context, int device) { return *context = CONTEXT, 0; }
Result cuDevicePrimaryCtxRelease(int device) { return SAY("cuDevicePrimaryCtxRelease %d", device), 0; }
ALIAS(cuDevicePrimaryCtxRelease, (int))
Result cuCtxPushCurrent(void *context) { return context == CONTEXT ? 0 : 201; }
ALIAS(cuCtxPushCurrent, (void *))
Result cuCtxPopCurrent(void **context) { return *context = CONTEXT, 0; }
ALIAS(cuCtxPopCurrent, (void **))
Result cuThreadExchangeStreamCaptureMode(int *mode) {
    static __thread int current = 0;
    int before = current;
    SAY("capture mode %d -> %d", before, *mode);
    return current = *mode, *mode = before, 0;
}
Result cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }
Result cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    static uintptr_t next = 0x100;
    return *stream = (void *)next++, SAY("stream flags %u priority %d", flags, priority), 0;
}
Result cuStreamDestroy(void *stream) { return SAY("cuStreamDestroy %p", stream), 0; }
ALIAS(cuStreamDestroy, (void *))
Result cuStreamSynchronize(void *stream) { return 0; }
Result cuStreamIsCapturing(void *stream, int *status) { return *status = 0, SAY("is capturing %p", stream), 0; }
Result cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    return SAY("wait stream %p event %p flags %u", stream, event, flags), 0;
}
Result cuEventCreate(void **event, unsigned flags) {
    static uintptr_t next = 0x200;
    return *event = (void *)next++, SAY("event flags %u", flags), 0;
}
Result cuEventRecord(void *event, void *stream) {
    return record(event), SAY("record event %p stream %p", event, stream), 0;
}
Result cuEventSynchronize(void *event) { return await(event), SAY("synchronize event %p", event), 0; }
Result cuEventDestroy(void *event) { return 0; }
ALIAS(cuEventDestroy, (void *))
Result cuPointerGetAttribute(void *value, int attribute, Address address) {
    return *(unsigned char *)value = 1, SAY("pointer attribute %d of %llx", attribute, address), 0;
}
Result cuMemGetAddressRange(Address *base, size_t *size, Address address) {
    return *base = address & ~0x1fffffULL, *size = 1 << 21, 0;
}
ALIAS(cuMemGetAddressRange, (Address *, size_t *, Address))
Result cuIpcGetMemHandle(Handle *handle, Address address) {
    for (int i = 0; i < 64; i++) handle->bytes[i] = i;
    return SAY("handle of %llx", address), 0;
}
Result cuIpcOpenMemHandle(Address *address, Handle handle, unsigned flags) {
    linger();
    return *address = OPENED, SAY("open %d to %d flags %u", handle.bytes[0], handle.bytes[63], flags), 0;
}
ALIAS(cuIpcOpenMemHandle, (Address *, Handle, unsigned))
Result cuMemHostRegister(void *start, size_t size, unsigned flags) {
    return linger(), SAY("register %p %zu flags %u", start, size, flags), 0;
}
ALIAS(cuMemHostRegister, (void *, size_t, unsigned))
Result cuMemHostUnregister(void *start) { return SAY("unregister %p", start), 0; }
Result cuMemHostGetDevicePointer(Address *address, void *host, unsigned flags) {
    return *address = (Address)host + 1, 0;
}
ALIAS(cuMemHostGetDevicePointer, (Address *, void *, unsigned))
Result cuMemAlloc(Address *address, size_t size) { return *address = OPENED, SAY("allocate %zu", size), 0; }
ALIAS(cuMemAlloc, (Address *, size_t))
Result cuMemFree(Address address) { return SAY("free %llx", address), 0; }
ALIAS(cuMemFree, (Address))
Result cuModuleLoadData(void **module, const void *image) {
    return *module = (void *)0x300, SAY("load %.4s|", (const char *)image), 0;
}
Result cuModuleGetFunction(void **function, void *module, const char *name) {
    return *function = (void *)0x400, SAY("function %p %s", module, name), 0;
}
Result cuModuleUnload(void *module) { return SAY("unload %p", module), 0; }
Result cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *stream, void **parameters, void **extra) {
    SAY("launch %p grid %u,%u,%u block %u,%u,%u shared %u stream %p of %llx,%u,%llx extra %d", function, gx, gy, gz, bx,
        by, bz, shared, stream, *(Address *)parameters[0], *(unsigned *)parameters[1], *(Address *)parameters[2],
        extra != NULL);
    return 0;
}
Result cuMemcpyDtoHAsync(void *target, Address source, size_t size, void *stream) {
    return SAY("to host %p from %llx %zu stream %p", target, source, size, stream), 0;
}
ALIAS(cuMemcpyDtoHAsync, (void *, Address, size_t, void *))
Result cuMemcpyHtoDAsync(Address target, void *source, size_t size, void *stream) {
    linger();
    return SAY("to device %llx from %p %zu stream %p", target, source, size, stream), size == 13 ? UNKNOWN_CODE : 0;
}
ALIAS(cuMemcpyHtoDAsync, (Address, void *, size_t, void *))
Result cuMemcpyBatchAsync(Address *targets, Address *sources, size_t *sizes, size_t count, unsigned *attributes,
                          size_t *firsts, size_t num_attributes, size_t *failed, void *stream) {
    linger();
    for (size_t i = 0; i < count; i++) copy(sizes[i]), SAY("run %llx from %llx %zu", targets[i], sources[i], sizes[i]);
    SAY("batch order %u flags %u first %zu of %zu stream %p", attributes[0], attributes[5], firsts[0], num_attributes,
        stream);
    if (sizes[0] == 13) return *failed = 0, UNKNOWN_CODE;
    return 0;
}

Result cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags, int *status) {
    char second[256];
    Dl_info info;
    dladdr((void *)cuInit, &info);
    void *self = dlopen(info.dli_fname, RTLD_LAZY);
    *address = NULL;
    if (!strcmp(name, "cuMemcpyBatchAsync")) {
        SAY("look up %s %d", name, version);
    } else {
        snprintf(second, sizeof second, "%s_v2", name);
        *address = dlsym(self, second);
    }
    if (!*address) *address = dlsym(self, name);
    if (!*address) *address = (void *)not_supported;
    if (status) *status = 0;
    return 0;
}
Result cuGetProcAddress(const char *name, void **address, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, address, version, flags, NULL);
}
