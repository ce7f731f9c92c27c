/* The CUDA runtime of a card that computes nothing, for LD_PRELOAD.
 *
 * Functions that hand something back are here. build.py adds those that torch calls besides, each
 * returning 0. A kernel "runs" by not being run. Memory of the card is the host's, zeros at first,
 * so that copies are real and an index that a kernel would have computed is 0. */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "card.h"

#define PAGE 4096

cudaError_t cudaGetDeviceCount(int *n) { *n = 1; return 0; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return 0; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? 0 : cudaErrorInvalidDevice; }
cudaError_t cudaDriverGetVersion(int *v) { *v = CARD_VERSION; return 0; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = CARD_VERSION; return 0; }
const char *cudaGetErrorName(cudaError_t e) {
    static char text[32];
    snprintf(text, sizeof text, "error %d of the stub", e);
    return text;
}
const char *cudaGetErrorString(cudaError_t e) { return cudaGetErrorName(e); }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, CARD_NAME);
    p->totalGlobalMem = CARD_BYTES;
    p->major = card_attribute(75);
    p->minor = card_attribute(76);
    p->multiProcessorCount = card_attribute(16);
    p->warpSize = card_attribute(10);
    p->maxThreadsPerBlock = card_attribute(1);
    p->maxThreadsPerMultiProcessor = card_attribute(39);
    p->sharedMemPerBlock = card_attribute(8);
    p->sharedMemPerBlockOptin = card_attribute(97);
    p->sharedMemPerMultiprocessor = card_attribute(81);
    p->regsPerBlock = card_attribute(12);
    p->regsPerMultiprocessor = card_attribute(82);
    p->l2CacheSize = card_attribute(38);
    p->memoryBusWidth = card_attribute(37);
    for (int i = 0; i < 3; i++) {
        p->maxThreadsDim[i] = i < 2 ? 1024 : 64;
        p->maxGridSize[i] = i ? 65535 : 2147483647;
    }
    return 0;
}

cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr attribute, int device) {
    *v = card_attribute(attribute);
    return 0;
}
cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) {
    snprintf(id, size, "0000:01:00.0");
    return 0;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) {
    *least = 0, *most = -5;
    return 0;
}

/* Memory: a page before each block says how long it is. */
cudaError_t cudaMalloc(void **p, size_t bytes) {
    char *whole = mmap(0, bytes + PAGE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (whole == MAP_FAILED) return cudaErrorMemoryAllocation;
    *(size_t *)whole = bytes + PAGE;
    *p = whole + PAGE;
    return 0;
}
cudaError_t cudaFree(void *p) {
    char *whole = (char *)p - PAGE;
    return p && munmap(whole, *(size_t *)whole) ? cudaErrorInvalidValue : 0;
}
cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t s) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeHost(void *p) { return cudaFree(p); }
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *total = CARD_BYTES, *available = CARD_BYTES - ((size_t)1 << 30);
    return 0;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    memmove(to, from, bytes);
    return 0;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s) {
    return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemset(void *p, int value, size_t bytes) { memset(p, value, bytes); return 0; }
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s) {
    return cudaMemset(p, value, bytes);
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a); /* memory that CUDA does not know: not pinned */
    return 0;
}

/* Streams and events: all is done when it is asked for. */
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
    static size_t count = 0x1000;
    *s = (cudaStream_t)count++;
    return 0;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) {
    return cudaStreamCreateWithPriority(s, flags, 0);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return 0;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    return 0;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
    static size_t count = 0x9000;
    *e = (cudaEvent_t)count++;
    return 0;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 1; return 0; }

/* Kernels. */
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return 0;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *function) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = card_attribute(1);
    a->numRegs = 32;
    a->binaryVersion = a->ptxVersion = 90; /* memory-efficient attention asks */
    return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *function, int threads,
                                                          size_t shared) {
    *n = 2;
    return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *function,
                                                                   int threads, size_t shared,
                                                                   unsigned flags) {
    *n = 2;
    return 0;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
    *function = driver ? dlsym(driver, name) : 0;
    if (found)
        *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return 0;
}
