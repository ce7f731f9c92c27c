/* libcuda.so.1 of a card that computes nothing: what torch and Triton look up in it.
 *
 * Functions that hand something back are here. build.py adds the others, each returning 0. */
#include <cuda.h>
#include <string.h>

#include "card.h"

CUresult cuGetErrorString(CUresult e, const char **text) { *text = "the stub"; return 0; }
CUresult cuGetErrorName(CUresult e, const char **text) { *text = "CUDA_STUB"; return 0; }
CUresult cuDriverGetVersion(int *v) { *v = CARD_VERSION; return 0; }
CUresult cuDeviceGetCount(int *n) { *n = 1; return 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = 0; return 0; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute attribute, CUdevice device) {
    *v = card_attribute(attribute);
    return 0;
}
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; return 0; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return 0; }
CUresult cuCtxGetLimit(size_t *v, CUlimit limit) { *v = 1 << 20; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice device) { return cuCtxGetCurrent(c); }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0, *active = 1;
    return 0;
}
CUresult cuModuleLoad(CUmodule *m, const char *file) { *m = (CUmodule)2; return 0; }
CUresult cuModuleLoadData(CUmodule *m, const void *image) { *m = (CUmodule)2; return 0; }
CUresult cuModuleLoadDataEx(CUmodule *m, const void *image, unsigned n, CUjit_option *options,
                            void **values) {
    return cuModuleLoadData(m, image);
}
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
    *f = (CUfunction)3;
    return 0;
}
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute attribute, CUfunction f) {
    *v = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32
         : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return 0;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int threads,
                                                     size_t shared) {
    *n = 2;
    return 0;
}
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *config) {
    *n = 1;
    return 0;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr p) {
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)data = p;
    return 0;
}
