/* The CUDA driver, libcuda, and the library that tells of devices, libnvidia-ml. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ghost.h"

typedef int result;
typedef unsigned long long address;
int ghost_attribute(int attribute);

static char a_context; /* the one context of all devices */

EXPORT result cuInit(unsigned flags) { return SUCCESS; }
EXPORT result cuDriverGetVersion(int *version) { *version = ghost.driver; return SUCCESS; }
EXPORT result cuDeviceGetCount(int *count) { *count = ghost.devices; return SUCCESS; }
EXPORT result cuDeviceGet(int *device, int number) { *device = number; return number < ghost.devices ? SUCCESS : INVALID_DEVICE; }
EXPORT result cuDeviceGetAttribute(int *value, int attribute, int device) {
	*value = ghost_attribute(attribute);
	return SUCCESS;
}
EXPORT result cuDeviceGetName(char *text, int length, int device) {
	snprintf(text, (size_t)length, "%s", ghost.name);
	return SUCCESS;
}
EXPORT result cuDeviceGetUuid(char *uuid, int device) { memset(uuid, device + 1, 16); return SUCCESS; }
EXPORT result cuDeviceGetUuid_v2(char *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
EXPORT result cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = ghost.capacity; return SUCCESS; }
EXPORT result cuDeviceComputeCapability(int *major, int *minor, int device) {
	*major = ghost.major, *minor = ghost.minor;
	return SUCCESS;
}
EXPORT result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0, *active = 1; return SUCCESS; }
EXPORT result cuDevicePrimaryCtxRetain(void **context, int device) { *context = &a_context; return SUCCESS; }
EXPORT result cuCtxGetCurrent(void **context) { *context = &a_context; return SUCCESS; }
EXPORT result cuCtxCreate_v2(void **context, unsigned flags, int device) { *context = &a_context; return SUCCESS; }
EXPORT result cuCtxGetDevice(int *device) { *device = ghost_current; return SUCCESS; }
EXPORT result cuMemGetInfo_v2(size_t *free, size_t *total) {
	*free = ghost_free_bytes(ghost_current), *total = ghost.capacity;
	return SUCCESS;
}

/* Memory */

EXPORT result cuMemAlloc_v2(address *pointer, size_t bytes) {
	*pointer = (address)ghost_allocate(ON_DEVICE, ghost_current, bytes);
	return *pointer ? SUCCESS : OUT_OF_MEMORY;
}
EXPORT result cuMemAllocManaged(address *pointer, size_t bytes, unsigned flags) {
	*pointer = (address)ghost_allocate(MANAGED, ghost_current, bytes);
	return *pointer ? SUCCESS : OUT_OF_MEMORY;
}
EXPORT result cuMemAllocPitch_v2(address *pointer, size_t *pitch, size_t width, size_t height, unsigned element) {
	*pitch = ghost_pitch(width);
	return cuMemAlloc_v2(pointer, *pitch * height);
}
EXPORT result cuMemAllocAsync(address *pointer, size_t bytes, void *stream) { return cuMemAlloc_v2(pointer, bytes); }
EXPORT result cuMemAllocFromPoolAsync(address *pointer, size_t bytes, void *pool, void *stream) {
	return cuMemAlloc_v2(pointer, bytes);
}
EXPORT result cuMemFreeAsync(address pointer, void *stream) { ghost_free((void *)pointer); return SUCCESS; }
EXPORT result cuMemFree_v2(address pointer) { ghost_free((void *)pointer); return SUCCESS; }
EXPORT result cuMemAllocHost_v2(void **pointer, size_t bytes) {
	*pointer = ghost_allocate(ON_HOST, ghost_current, bytes);
	return *pointer ? SUCCESS : OUT_OF_MEMORY;
}
EXPORT result cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) { return cuMemAllocHost_v2(pointer, bytes); }
EXPORT result cuMemFreeHost(void *pointer) { ghost_free(pointer); return SUCCESS; }
EXPORT result cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned flags) { ghost_register(pointer, bytes); return SUCCESS; }
EXPORT result cuMemHostUnregister(void *pointer) { ghost_unregister(pointer); return SUCCESS; }
EXPORT result cuMemHostGetDevicePointer_v2(address *device, void *host, unsigned flags) { *device = (address)host; return SUCCESS; }
EXPORT result cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *stream) {
	return ghost_copy((void *)to, from, bytes);
}
EXPORT result cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *stream) {
	return ghost_copy(to, (const void *)from, bytes);
}
EXPORT result cuMemcpyDtoDAsync_v2(address to, address from, size_t bytes, void *stream) {
	return ghost_copy((void *)to, (const void *)from, bytes);
}
EXPORT result cuMemcpyAsync(address to, address from, size_t bytes, void *stream) {
	return ghost_copy((void *)to, (const void *)from, bytes);
}
EXPORT result cuMemsetD8Async(address to, unsigned char value, size_t n, void *stream) {
	return ghost_set((void *)to, value, n, 1);
}
EXPORT result cuMemsetD16Async(address to, unsigned short value, size_t n, void *stream) {
	return ghost_set((void *)to, value, 2 * n, 2);
}
EXPORT result cuMemsetD32Async(address to, unsigned value, size_t n, void *stream) {
	return ghost_set((void *)to, (int)value, 4 * n, 4);
}
EXPORT result cuPointerGetAttribute(void *value, int attribute, address pointer) {
	struct range range = ghost_find((void *)pointer);
	switch (attribute) { /* of CUpointer_attribute */
	case 2: *(unsigned *)value = range.place == ON_DEVICE || range.place == MANAGED ? 2 : 1; return SUCCESS; /* MEMORY_TYPE */
	case 3: case 4: *(address *)value = pointer; return SUCCESS;                   /* DEVICE_POINTER, HOST_POINTER */
	case 8: *(unsigned *)value = range.place == MANAGED; return SUCCESS;           /* IS_MANAGED */
	case 9: *(int *)value = range.device; return SUCCESS;                          /* DEVICE_ORDINAL */
	}
	memset(value, 0, 4);
	return SUCCESS;
}

/* Memory that is mapped piece by piece: expandable segments. The first members of CUmemAllocationProp. */
struct properties {
	int type, handles, place, device;
};
struct physical {
	size_t bytes;
	int device;
};
EXPORT result cuMemGetAllocationGranularity(size_t *bytes, const struct properties *p, int of) { *bytes = PAGE; return SUCCESS; }
EXPORT result cuMemAddressReserve(address *pointer, size_t bytes, size_t alignment, address hint, unsigned long long flags) {
	*pointer = (address)ghost_reserve(bytes, ghost_current);
	return *pointer ? SUCCESS : OUT_OF_MEMORY;
}
EXPORT result cuMemCreate(struct physical **handle, size_t bytes, const struct properties *p, unsigned long long flags) {
	int device = p->place == 1 ? p->device : -1; /* 1: CU_MEM_LOCATION_TYPE_DEVICE */
	if (device >= 0 && !ghost_take(device, bytes)) return OUT_OF_MEMORY;
	*handle = malloc(sizeof **handle);
	**handle = (struct physical){bytes, device};
	if (device >= 0 && !ghost_is_for_torch()) ghost_hold(*handle, bytes, OUTSIDE, device);
	return SUCCESS;
}
EXPORT result cuMemRelease(struct physical *handle) {
	if (handle->device >= 0) ghost_give_back(handle->device, handle->bytes);
	ghost_release(handle);
	free(handle);
	return SUCCESS;
}
EXPORT result cuMemMap(address pointer, size_t bytes, size_t offset, void *handle, unsigned long long flags) {
	ghost_open((void *)pointer, bytes, 1);
	return SUCCESS;
}
EXPORT result cuMemUnmap(address pointer, size_t bytes) {
	ghost_open((void *)pointer, bytes, 0);
	return SUCCESS;
}

/* Kernels of Triton and of libraries that bring their own */

EXPORT result cuModuleLoad(void **module, const char *file) { *module = ghost_handle(); return SUCCESS; }
EXPORT result cuModuleLoadData(void **module, const void *image) { *module = ghost_handle(); return SUCCESS; }
EXPORT result cuModuleLoadDataEx(void **module, const void *image, unsigned n, int *options, void **values) {
	*module = ghost_handle();
	return SUCCESS;
}
EXPORT result cuModuleGetFunction(void **function, void *module, const char *name) { *function = ghost_handle(); return SUCCESS; }
EXPORT result cuLibraryLoadData(void **library) { *library = ghost_handle(); return SUCCESS; }
EXPORT result cuLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = ghost_handle(); return SUCCESS; }
EXPORT result cuKernelGetFunction(void **function, void *kernel) { *function = kernel; return SUCCESS; }
EXPORT result cuFuncGetAttribute(int *value, int attribute, void *function) {
	*value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; /* MAX_THREADS_PER_BLOCK, NUM_REGS */
	return SUCCESS;
}
EXPORT result cuLaunchKernel(void *function) { return ghost_launched(); }
EXPORT result cuLaunchKernelEx(const void *configuration) { return ghost_launched(); }
EXPORT result cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
	*blocks = threads > 64 ? 2048 / threads : 32;
	return SUCCESS;
}
EXPORT result cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *configuration) { *clusters = 8; return SUCCESS; }
EXPORT result cuStreamGetCtx(void *stream, void **context) { *context = &a_context; return SUCCESS; }

EXPORT result cuGetErrorString(int error, const char **text) {
	*text = error == OUT_OF_MEMORY ? "out of memory" : "an error of a device that is not there";
	return SUCCESS;
}
EXPORT result cuGetErrorName(int error, const char **text) {
	*text = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
	return SUCCESS;
}

static int nothing(void) { return SUCCESS; }

/* A later version of a function has a suffix, which the caller leaves out. */
void *ghost_entry(const char *name) {
	static const char *const suffixes[] = {"_v3", "_v2", ""};
	char full[256];
	for (unsigned i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
		snprintf(full, sizeof full, "%s%s", name, suffixes[i]);
		void *function = dlsym(RTLD_DEFAULT, full);
		if (function) return function;
	}
	return (void *)nothing;
}
EXPORT result cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
	*function = ghost_entry(name);
	return SUCCESS;
}
EXPORT result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *found) {
	if (found) *found = 0;
	return cuGetProcAddress(name, function, version, flags);
}

/* NVML: devices have handles from 1 on. */

EXPORT result nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)ghost.devices; return SUCCESS; }
EXPORT result nvmlDeviceGetHandleByIndex_v2(unsigned number, void **device) { *device = (void *)(uintptr_t)(number + 1); return SUCCESS; }
EXPORT result nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { *device = (void *)1; return SUCCESS; }
EXPORT result nvmlDeviceGetName(void *device, char *text, unsigned length) {
	snprintf(text, length, "%s", ghost.name);
	return SUCCESS;
}
/* nvmlMemory_t */
struct memory {
	unsigned long long total, free, used;
};
EXPORT result nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
	size_t left = ghost_free_bytes((int)(uintptr_t)device - 1);
	*memory = (struct memory){ghost.capacity, left, ghost.capacity - left};
	return SUCCESS;
}
EXPORT result nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) { *count = 0; return SUCCESS; }
EXPORT result nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *processes) { *count = 0; return SUCCESS; }
EXPORT result nvmlSystemGetCudaDriverVersion(int *version) { *version = ghost.driver; return SUCCESS; }
EXPORT result nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = ghost.driver; return SUCCESS; }
EXPORT const char *nvmlErrorString(int error) { return "an error of a device that is not there"; }
