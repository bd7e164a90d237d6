/* The CUDA runtime: libcudart. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ghost.h"

typedef int result;
struct stream {
	int capturing, priority;
	unsigned long long capture;
};
struct dim3 {
	unsigned x, y, z;
};

/* Devices */

/* What a multiprocessor has, by its capability (CUDA's programming guide, technical specifications). Shared memory is KiB. */
static const struct capability { int since, threads, blocks, shared, optin; } capabilities[] = {
	{120, 1536, 24, 100, 99}, {100, 2048, 32, 228, 227}, {90, 2048, 32, 228, 227}, {89, 1536, 24, 100, 99},
	{86, 1536, 16, 100, 99}, {80, 2048, 32, 164, 163}, {75, 1024, 16, 64, 64}, {0, 2048, 32, 96, 96},
};

static const struct capability *of_capability(void) {
	const struct capability *c = capabilities;
	while (c->since > 10 * ghost.major + ghost.minor) c++;
	return c;
}

/* Numbers of cudaDeviceAttr, which CUdevice_attribute shares. What is not here is 0. */
int ghost_attribute(int attribute) {
	switch (attribute) {
	case 1: case 2: case 3: return 1024;   /* MaxThreadsPerBlock, MaxBlockDimX and Y */
	case 4: return 64;                     /* MaxBlockDimZ */
	case 5: return 2147483647;             /* MaxGridDimX */
	case 6: case 7: return 65535;          /* MaxGridDimY and Z */
	case 8: return 48 << 10;               /* MaxSharedMemoryPerBlock */
	case 9: return 64 << 10;               /* TotalConstantMemory */
	case 10: return 32;                    /* WarpSize */
	case 11: return 2147483647;            /* MaxPitch */
	case 12: case 82: return 64 << 10;     /* MaxRegistersPerBlock, and PerMultiprocessor */
	case 13: return 1980000;               /* ClockRate in kHz */
	case 14: return 512;                   /* TextureAlignment */
	case 16: return ghost.processors;      /* MultiProcessorCount */
	case 36: return 2619000;               /* MemoryClockRate in kHz */
	case 37: return 5120;                  /* GlobalMemoryBusWidth */
	case 38: return 50 << 20;              /* L2CacheSize */
	case 39: return of_capability()->threads; /* MaxThreadsPerMultiProcessor */
	case 40: return 3;                     /* AsyncEngineCount */
	case 75: return ghost.major;           /* ComputeCapabilityMajor */
	case 76: return ghost.minor;           /* ComputeCapabilityMinor */
	case 81: return of_capability()->shared << 10; /* MaxSharedMemoryPerMultiprocessor */
	case 97: return of_capability()->optin << 10;  /* MaxSharedMemoryPerBlockOptin */
	case 102: return 1;                    /* VirtualMemoryManagementSupported, of the driver */
	case 106: return of_capability()->blocks; /* MaxBlocksPerMultiprocessor */
	case 111: return 1 << 10;              /* ReservedSharedMemoryPerBlock */
	case 15: case 19: case 31: case 41: case 78: case 79: case 80: case 83: case 89: case 90: case 95: case 99: case 115:
		return 1; /* GpuOverlap, CanMapHostMemory, ConcurrentKernels, UnifiedAddressing, StreamPrioritiesSupported,
		             the L1 caches, ManagedMemory, ConcurrentManagedAccess, ComputePreemptionSupported,
		             CooperativeLaunch, HostRegisterSupported, MemoryPoolsSupported */
	case 120: return ghost.major >= 9;     /* ClusterLaunch */
	}
	return 0;
}

EXPORT result cudaGetDeviceCount(int *count) { *count = ghost.devices; return SUCCESS; }
EXPORT result cudaGetDevice(int *device) { *device = ghost_current; return SUCCESS; }
EXPORT result cudaSetDevice(int device) {
	if (device < 0 || device >= ghost.devices) return INVALID_DEVICE;
	ghost_current = device;
	return SUCCESS;
}
EXPORT result cudaDeviceGetAttribute(int *value, int attribute, int device) {
	*value = attribute == 33 ? device + 1 : ghost_attribute(attribute); /* PciBusId */
	return SUCCESS;
}
EXPORT result cudaDriverGetVersion(int *version) { *version = ghost.driver; return SUCCESS; }
EXPORT result cudaRuntimeGetVersion(int *version) { *version = ghost.driver; return SUCCESS; }
EXPORT result cudaMemGetInfo(size_t *free, size_t *total) {
	*free = ghost_free_bytes(ghost_current);
	*total = ghost.capacity;
	return SUCCESS;
}
EXPORT result cudaDeviceGetPCIBusId(char *text, int length, int device) {
	snprintf(text, (size_t)length, "0000:%02X:00.0", device + 1);
	return SUCCESS;
}
EXPORT result cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = device != peer; return SUCCESS; }
EXPORT result cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
	*least = 0, *greatest = -5;
	return SUCCESS;
}

/* cudaDeviceProp begins alike in CUDA 12 and 13, up to maxGridSize. CUDA 12 has the clock in the gap behind it. Both are far
 * below the size of 2,048 bytes. */
struct properties {
	char name[256], uuid[16], luid[8];
	unsigned luid_mask;
	size_t total, shared_per_block;
	int registers_per_block, warp;
	size_t pitch;
	int threads_per_block, block[3], grid[3], clock;
};

static void *common(struct properties *p, int device) {
	snprintf(p->name, sizeof p->name, "%s", ghost.name);
	p->uuid[0] = (char)(device + 1);
	p->total = ghost.capacity;
	p->shared_per_block = (size_t)ghost_attribute(8);
	p->registers_per_block = ghost_attribute(12), p->warp = 32, p->pitch = 2147483647;
	p->threads_per_block = p->block[0] = p->block[1] = 1024, p->block[2] = 64;
	p->grid[0] = 2147483647, p->grid[1] = p->grid[2] = 65535, p->clock = ghost_attribute(13);
	return p + 1;
}

/* CUDA 13: cudaDeviceProp without the members that CUDA 12 had deprecated. */
struct rest13 {
	size_t constant;
	int major, minor;
	size_t texture, texture_pitch;
	int processors, integrated, can_map, textures[39];
	size_t surface;
	int concurrent, ecc, bus, pci, domain, tcc, engines, unified, bus_width, l2, persisting_l2, threads_per_processor,
		priorities, global_l1, local_l1;
	size_t shared_per_processor;
	int registers_per_processor, managed, multi_board, board_group, atomics, pageable, concurrent_managed, preemption,
		registered_pointers, cooperative;
	size_t shared_optin;
	int host_tables, direct_managed, blocks_per_processor, window;
	size_t shared_reserved;
};

EXPORT result cudaGetDeviceProperties(void *properties, int device) {
	if (device < 0 || device >= ghost.devices) return INVALID_DEVICE;
	struct rest13 *r = common(properties, device);
	r->constant = 64 << 10, r->major = ghost.major, r->minor = ghost.minor, r->texture = 512;
	r->processors = ghost.processors, r->can_map = r->concurrent = r->unified = r->priorities = r->managed = 1;
	r->bus = device + 1, r->engines = 3, r->bus_width = 5120, r->l2 = 50 << 20, r->threads_per_processor = ghost_attribute(39);
	r->global_l1 = r->local_l1 = r->concurrent_managed = r->preemption = r->cooperative = 1;
	r->shared_per_processor = (size_t)ghost_attribute(81), r->registers_per_processor = 64 << 10;
	r->shared_optin = (size_t)ghost_attribute(97), r->blocks_per_processor = ghost_attribute(106), r->shared_reserved = 1 << 10;
	return SUCCESS;
}

/* CUDA 12 calls it by this name. */
struct rest12 {
	size_t constant;
	int major, minor;
	size_t texture, texture_pitch;
	int overlap, processors, timeout, integrated, can_map, mode, textures[40];
	size_t surface;
	int concurrent, ecc, bus, pci, domain, tcc, engines, unified, memory_clock, bus_width, l2, persisting_l2,
		threads_per_processor, priorities, global_l1, local_l1;
	size_t shared_per_processor;
	int registers_per_processor, managed, multi_board, board_group, atomics, ratio, pageable, concurrent_managed, preemption,
		registered_pointers, cooperative, cooperative_multi;
	size_t shared_optin;
	int host_tables, direct_managed, blocks_per_processor, window;
	size_t shared_reserved;
};

EXPORT result cudaGetDeviceProperties_v2(void *properties, int device) {
	if (device < 0 || device >= ghost.devices) return INVALID_DEVICE;
	struct rest12 *r = common(properties, device);
	r->constant = 64 << 10, r->major = ghost.major, r->minor = ghost.minor;
	r->texture = 512, r->processors = ghost.processors, r->overlap = r->can_map = r->concurrent = r->unified = 1;
	r->priorities = r->managed = r->global_l1 = r->local_l1 = r->concurrent_managed = r->preemption = r->cooperative = 1;
	r->bus = device + 1, r->engines = 3, r->memory_clock = ghost_attribute(36), r->bus_width = 5120, r->l2 = 50 << 20;
	r->threads_per_processor = ghost_attribute(39), r->shared_per_processor = (size_t)ghost_attribute(81);
	r->registers_per_processor = 64 << 10, r->shared_optin = (size_t)ghost_attribute(97);
	r->blocks_per_processor = ghost_attribute(106), r->shared_reserved = 1 << 10;
	return SUCCESS;
}

/* Errors */

static __thread int last_error;

static result fail(int error) { return last_error = error; }

EXPORT result cudaGetLastError(void) {
	int error = last_error;
	last_error = SUCCESS;
	return error;
}
EXPORT result cudaPeekAtLastError(void) { return last_error; }
EXPORT const char *cudaGetErrorString(int error) {
	return error == OUT_OF_MEMORY ? "out of memory" : error == SUCCESS ? "no error" : "an error of a device that is not there";
}
EXPORT const char *cudaGetErrorName(int error) {
	return error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : error == SUCCESS ? "cudaSuccess" : "cudaErrorUnknown";
}

/* Memory */

static result allocate(void **pointer, enum place place, size_t bytes) {
	*pointer = bytes ? ghost_allocate(place, ghost_current, bytes) : NULL;
	return *pointer || !bytes ? SUCCESS : fail(OUT_OF_MEMORY);
}

EXPORT result cudaMalloc(void **pointer, size_t bytes) { return allocate(pointer, ON_DEVICE, bytes); }
EXPORT result cudaMallocManaged(void **pointer, size_t bytes, unsigned flags) { return allocate(pointer, MANAGED, bytes); }
EXPORT result cudaMallocAsync(void **pointer, size_t bytes, void *stream) { return allocate(pointer, ON_DEVICE, bytes); }
EXPORT result cudaMallocFromPoolAsync(void **pointer, size_t bytes, void *pool, void *stream) {
	return allocate(pointer, ON_DEVICE, bytes);
}
EXPORT result cudaMallocPitch(void **pointer, size_t *pitch, size_t width, size_t height) {
	*pitch = ghost_pitch(width);
	return allocate(pointer, ON_DEVICE, *pitch * height);
}
EXPORT result cudaMallocHost(void **pointer, size_t bytes) { return allocate(pointer, ON_HOST, bytes); }
EXPORT result cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) { return allocate(pointer, ON_HOST, bytes); }
EXPORT result cudaFree(void *pointer) { ghost_free(pointer); return ghost_wait(); }
EXPORT result cudaFreeAsync(void *pointer, void *stream) { ghost_free(pointer); return SUCCESS; }
EXPORT result cudaFreeHost(void *pointer) { ghost_free(pointer); return SUCCESS; }
EXPORT result cudaHostRegister(void *pointer, size_t bytes, unsigned flags) { ghost_register(pointer, bytes); return SUCCESS; }
EXPORT result cudaHostUnregister(void *pointer) { ghost_unregister(pointer); return SUCCESS; }
EXPORT result cudaHostGetDevicePointer(void **device, void *host, unsigned flags) { *device = host; return SUCCESS; }

/* cudaPointerAttributes; types are 0 unregistered, 1 host, 2 device, 3 managed. */
struct pointer_attributes {
	int type, device;
	void *on_device, *on_host;
};
EXPORT result cudaPointerGetAttributes(struct pointer_attributes *a, const void *pointer) {
	struct range range = ghost_find(pointer);
	*a = (struct pointer_attributes){0, -1, NULL, (void *)pointer};
	if (range.place == ON_DEVICE) *a = (struct pointer_attributes){2, range.device, (void *)pointer, NULL};
	if (range.place == ON_HOST) *a = (struct pointer_attributes){1, range.device, (void *)pointer, (void *)pointer};
	if (range.place == MANAGED) *a = (struct pointer_attributes){3, range.device, (void *)pointer, (void *)pointer};
	return SUCCESS;
}

EXPORT result cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
	ghost_wait();
	return ghost_copy(to, from, bytes);
}
EXPORT result cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
	return ghost_copy(to, from, bytes);
}
EXPORT result cudaMemcpyPeerAsync(void *to, int device, const void *from, int source, size_t bytes, void *stream) {
	return ghost_copy(to, from, bytes);
}
EXPORT result cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
	int kind, void *stream) {
	for (size_t row = 0; width * height <= ghost.copied && row < height; row++)
		ghost_copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
	return SUCCESS;
}
EXPORT result cudaMemset(void *to, int value, size_t bytes) { return ghost_set(to, value, bytes, 1); }
EXPORT result cudaMemsetAsync(void *to, int value, size_t bytes, void *stream) { return ghost_set(to, value, bytes, 1); }
EXPORT result cudaGetSymbolAddress(void **address, const void *symbol) {
	static char symbols[1 << 20];
	*address = symbols;
	return SUCCESS;
}
EXPORT result cudaGetSymbolSize(size_t *bytes, const void *symbol) { *bytes = 1 << 20; return SUCCESS; }
EXPORT result cudaDeviceGetDefaultMemPool(void **pool, int device) { *pool = ghost_handle(); return SUCCESS; }
EXPORT result cudaMemPoolCreate(void **pool, const void *properties) { *pool = ghost_handle(); return SUCCESS; }
EXPORT result cudaMemPoolGetAttribute(void *pool, int attribute, void *value) { memset(value, 0, 8); return SUCCESS; }

/* Streams */

static result make_stream(struct stream **stream, int priority) {
	*stream = ghost_handle();
	(*stream)->priority = priority;
	return SUCCESS;
}
EXPORT result cudaStreamCreate(struct stream **stream) { return make_stream(stream, 0); }
EXPORT result cudaStreamCreateWithFlags(struct stream **stream, unsigned flags) { return make_stream(stream, 0); }
EXPORT result cudaStreamCreateWithPriority(struct stream **stream, unsigned flags, int priority) {
	return make_stream(stream, priority);
}
EXPORT result cudaStreamGetPriority(struct stream *stream, int *priority) {
	*priority = (uintptr_t)stream > 2 ? stream->priority : 0;
	return SUCCESS;
}
EXPORT result cudaStreamAddCallback(void *stream, void (*call)(void *, int, void *), void *data, unsigned flags) {
	call(stream, SUCCESS, data);
	return SUCCESS;
}
EXPORT result cudaLaunchHostFunc(void *stream, void (*call)(void *), void *data) {
	call(data);
	return SUCCESS;
}

/* Graphs: what a stream captures is made at once, and its launches do nothing. */

static unsigned long long captures;

static int is_capturing(struct stream *stream) { return (uintptr_t)stream > 2 && stream->capturing; }

EXPORT result cudaStreamBeginCapture(struct stream *stream, int mode) {
	stream->capturing = 1, stream->capture = ++captures;
	return SUCCESS;
}
EXPORT result cudaStreamEndCapture(struct stream *stream, void **graph) {
	stream->capturing = 0, *graph = ghost_handle();
	return SUCCESS;
}
EXPORT result cudaStreamIsCapturing(struct stream *stream, int *status) { *status = is_capturing(stream); return SUCCESS; }
static result capture(struct stream *stream, int *status, unsigned long long *id) {
	*status = is_capturing(stream);
	if (id) *id = *status ? stream->capture : 0;
	return SUCCESS;
}
EXPORT result cudaStreamGetCaptureInfo_v2(struct stream *stream, int *status, unsigned long long *id, void **graph,
	const void **nodes, size_t *count) {
	if (count) *count = 0;
	return capture(stream, status, id);
}
EXPORT result cudaStreamGetCaptureInfo(struct stream *stream, int *status, unsigned long long *id, void **graph,
	const void **nodes, const void **edges, size_t *count) { /* CUDA 12 gives the first three alone */
	if (ghost.driver >= 13000 && count) *count = 0;
	return capture(stream, status, id);
}
EXPORT result cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags) {
	*executable = ghost_handle();
	return SUCCESS;
}
EXPORT result cudaGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
	*executable = ghost_handle();
	return SUCCESS;
}
EXPORT result cudaGraphCreate(void **graph, unsigned flags) { *graph = ghost_handle(); return SUCCESS; }
EXPORT result cudaGraphGetNodes(void *graph, void **nodes, size_t *count) { *count = 0; return SUCCESS; }
EXPORT result cudaGraphLaunch(void *executable, void *stream) { return ghost_launched(); }

/* Kernels */

static __thread struct call {
	struct dim3 grid, block;
	size_t shared;
	void *stream;
} calls[64];
static __thread int depth;

EXPORT unsigned __cudaPushCallConfiguration(struct dim3 grid, struct dim3 block, size_t shared, void *stream) {
	if (depth < 64) calls[depth] = (struct call){grid, block, shared, stream};
	depth++;
	return SUCCESS;
}
EXPORT result __cudaPopCallConfiguration(struct dim3 *grid, struct dim3 *block, size_t *shared, void **stream) {
	if (depth > 0) depth--;
	struct call c = calls[depth < 64 ? depth : 63];
	*grid = c.grid, *block = c.block, *shared = c.shared, *stream = c.stream;
	return SUCCESS;
}
EXPORT void **__cudaRegisterFatBinary(void *binary) {
	static void *registered[4];
	return registered;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {}
EXPORT void __cudaUnregisterFatBinary(void **handle) {}
EXPORT void __cudaRegisterFunction(void **handle, const char *function, char *device, const char *name, int limit, void *tid,
	void *bid, void *block, void *grid, int *warp) {}
EXPORT void __cudaRegisterVar(void **handle, char *variable, char *address, const char *name, int external, size_t bytes,
	int constant, int global) {}
EXPORT char __cudaInitModule(void **handle) { return 1; }
EXPORT result __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return SUCCESS; }
EXPORT result __cudaLaunchKernel(void *kernel, struct dim3 grid, struct dim3 block, void **arguments, size_t shared,
	void *stream) {
	return ghost_launched();
}
EXPORT result cudaLaunchKernel(const void *kernel, struct dim3 grid, struct dim3 block, void **arguments, size_t shared,
	void *stream) {
	return ghost_launched();
}
EXPORT result cudaLaunchKernelExC(const void *configuration, const void *kernel, void **arguments) { return ghost_launched(); }
EXPORT result cudaLaunchCooperativeKernel(const void *kernel, struct dim3 grid, struct dim3 block, void **arguments,
	size_t shared, void *stream) {
	return ghost_launched();
}

/* The beginning of cudaFuncAttributes. */
struct function_attributes {
	size_t shared, constant, local;
	int threads, registers, ptx, binary;
};
/* compiled returns the newest architecture that wheels of PyTorch have code for, and this device runs. */
static int compiled(void) {
	static const int all[] = {120, 100, 90, 86, 80, 75, 70, 60};
	for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
		if (all[i] <= 10 * ghost.major + ghost.minor) return all[i];
	return 50;
}
EXPORT result cudaFuncGetAttributes(struct function_attributes *a, const void *kernel) {
	memset(a, 0, sizeof *a);
	a->threads = 1024, a->registers = 32, a->ptx = a->binary = compiled();
	return SUCCESS;
}
EXPORT result cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) {
	*blocks = threads > 64 ? 2048 / threads : 32;
	return SUCCESS;
}
EXPORT result cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
	size_t shared, unsigned flags) {
	return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared);
}
EXPORT result cudaOccupancyMaxPotentialBlockSize(int *grid, int *block) {
	*grid = ghost.processors, *block = 1024;
	return SUCCESS;
}

EXPORT result cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *found) {
	*function = ghost_entry(name);
	if (found) *found = 0;
	return SUCCESS;
}
EXPORT result cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
	int *found) {
	return cudaGetDriverEntryPoint(name, function, flags, found);
}
