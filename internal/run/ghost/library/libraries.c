/* Libraries of operations: cuBLAS, cuBLASLt, cuDNN and NCCL. Workspaces that they ask the caller for are none: what a
 * release takes is measured elsewhere. Those that a program gives to cuBLAS of its own accord are noted.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ghost.h"

typedef int result;

#define MAKES(name) \
	EXPORT result name(void **made) { \
		*made = ghost_handle(); \
		return SUCCESS; \
	}
#define FREES(name) \
	EXPORT result name(void *made) { \
		free(made); \
		return SUCCESS; \
	}
#define NO_BYTES(name, ...) \
	EXPORT result name(__VA_ARGS__, size_t *bytes) { \
		*bytes = 0; \
		return SUCCESS; \
	}

/* cuBLAS */

MAKES(cublasCreate_v2)
FREES(cublasDestroy_v2)
MAKES(cublasLtCreate)
FREES(cublasLtDestroy)
MAKES(cublasLtMatmulDescCreate)
FREES(cublasLtMatmulDescDestroy)
MAKES(cublasLtMatrixLayoutCreate)
FREES(cublasLtMatrixLayoutDestroy)
MAKES(cublasLtMatmulPreferenceCreate)
FREES(cublasLtMatmulPreferenceDestroy)
EXPORT result cublasGetVersion_v2(void *handle, int *version) { *version = ghost.driver / 1000 * 10000; return SUCCESS; }
EXPORT result cublasGetProperty(int type, int *value) { *value = type == 0 ? ghost.driver / 1000 : 0; return SUCCESS; }
EXPORT size_t cublasLtGetVersion(void) { return (size_t)(ghost.driver / 1000 * 10000); }
EXPORT size_t cublasLtGetCudartVersion(void) { return (size_t)ghost.driver; }
EXPORT result cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return SUCCESS; }
EXPORT result cublasGetMathMode(void *handle, int *mode) { *mode = 0; return SUCCESS; }
EXPORT result cublasGetStream_v2(void *handle, void **stream) { *stream = NULL; return SUCCESS; }

/* cublasLtMatmulHeuristicResult_t */
struct heuristic {
	uint64_t algorithm[8];
	size_t workspace;
	int state;
	float waves;
	int reserved[4];
};
EXPORT result cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
	int most, struct heuristic *found, int *count) {
	*found = (struct heuristic){.waves = 1};
	*count = 1;
	return SUCCESS;
}

/* The workspaces of calls, and when they were made: an address is that of a workspace for a while. */
enum { MOST_WORKSPACES = 1 << 18 };
static struct workspace {
	const void *begin;
	size_t bytes;
	long long time; /* in microseconds */
} workspaces[MOST_WORKSPACES];
static int workspace_count;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static result works_in(const void *begin, size_t bytes) {
	struct timespec time;
	if (!begin || !bytes) return SUCCESS;
	pthread_mutex_lock(&mutex);
	clock_gettime(CLOCK_REALTIME, &time);
	if (workspace_count < MOST_WORKSPACES)
		workspaces[workspace_count++] =
			(struct workspace){begin, bytes, 1000000LL * time.tv_sec + time.tv_nsec / 1000};
	pthread_mutex_unlock(&mutex);
	return SUCCESS;
}
EXPORT result cublasSetWorkspace_v2(void *handle, void *workspace, size_t bytes) { return works_in(workspace, bytes); }
EXPORT result cublasLtMatmul(void *handle, void *operation, const void *alpha, const void *a, void *of_a, const void *b, void *of_b,
	const void *beta, const void *c, void *of_c, void *d, void *of_d, const void *algorithm, void *workspace, size_t bytes,
	void *stream) {
	return works_in(workspace, bytes);
}
/* A workspace that cuBLAS was given; 0 behind the last. */
EXPORT int plimsoll_ghost_workspace(int number, const void **begin, size_t *bytes, long long *time) {
	if (number >= workspace_count) return 0;
	*begin = workspaces[number].begin, *bytes = workspaces[number].bytes, *time = workspaces[number].time;
	return 1;
}

/* cuDNN */

MAKES(cudnnCreate)
FREES(cudnnDestroy)
MAKES(cudnnCreateTensorDescriptor)
FREES(cudnnDestroyTensorDescriptor)
MAKES(cudnnCreateFilterDescriptor)
FREES(cudnnDestroyFilterDescriptor)
MAKES(cudnnCreateConvolutionDescriptor)
FREES(cudnnDestroyConvolutionDescriptor)
MAKES(cudnnCreateDropoutDescriptor)
FREES(cudnnDestroyDropoutDescriptor)
MAKES(cudnnCreateActivationDescriptor)
FREES(cudnnDestroyActivationDescriptor)
MAKES(cudnnCreateRNNDescriptor)
FREES(cudnnDestroyRNNDescriptor)
MAKES(cudnnCreateRNNDataDescriptor)
FREES(cudnnDestroyRNNDataDescriptor)
MAKES(cudnnCreatePoolingDescriptor)
MAKES(cudnnCreateCTCLossDescriptor)
FREES(cudnnDestroyCTCLossDescriptor)
MAKES(cudnnCreateSpatialTransformerDescriptor)
FREES(cudnnDestroySpatialTransformerDescriptor)
EXPORT result cudnnGetStream(void *handle, void **stream) { *stream = NULL; return SUCCESS; }
EXPORT size_t cudnnGetVersion(void) { return 92600; }
EXPORT size_t cudnnGetCudartVersion(void) { return (size_t)ghost.driver; }
EXPORT result cudnnGetProperty(int type, int *value) { *value = type == 0 ? 9 : type == 1 ? 26 : 0; return SUCCESS; }
EXPORT const char *cudnnGetErrorString(int status) { return "an error of a device that is not there"; }

/* cudnnConvolutionFwdAlgoPerf_t, and those of the backward passes. */
struct algorithm {
	int number, status;
	float time;
	size_t memory;
	int deterministic, math, reserved[3];
};
static result algorithms(int *count, struct algorithm *found) {
	*found = (struct algorithm){.number = 1, .deterministic = 1, .math = 1};
	*count = 1;
	return SUCCESS;
}
#define CHOOSES(name) \
	EXPORT result name##_v7(void *h, void *a, void *b, void *c, void *d, int n, int *count, struct algorithm *found) { \
		return algorithms(count, found); \
	}
CHOOSES(cudnnGetConvolutionForwardAlgorithm)
CHOOSES(cudnnGetConvolutionBackwardDataAlgorithm)
CHOOSES(cudnnGetConvolutionBackwardFilterAlgorithm)
#define TRIES(name) \
	EXPORT result name(void *h, void *a, void *x, void *b, void *y, void *c, void *d, void *z, int n, int *count, \
		struct algorithm *found, void *workspace, size_t bytes) { \
		return algorithms(count, found); \
	}
TRIES(cudnnFindConvolutionForwardAlgorithmEx)
TRIES(cudnnFindConvolutionBackwardDataAlgorithmEx)
TRIES(cudnnFindConvolutionBackwardFilterAlgorithmEx)
NO_BYTES(cudnnGetConvolutionForwardWorkspaceSize, void *h, void *a, void *b, void *c, void *d, int n)
NO_BYTES(cudnnGetConvolutionBackwardDataWorkspaceSize, void *h, void *a, void *b, void *c, void *d, int n)
NO_BYTES(cudnnGetConvolutionBackwardFilterWorkspaceSize, void *h, void *a, void *b, void *c, void *d, int n)
NO_BYTES(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, void *h, int m, int o, void *x, void *z, void *y, void *b, void *a)
NO_BYTES(cudnnGetBatchNormalizationBackwardExWorkspaceSize, void *h, int m, int o, void *x, void *y, void *dy, void *dz, void *dx,
	void *b, void *a)
NO_BYTES(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, void *h, int m, int o, void *a, void *x)
EXPORT result cudnnDropoutGetStatesSize(void *handle, size_t *bytes) { *bytes = 1 << 20; return SUCCESS; }

/* cuDNN's graphs. Every engine works and none has a workspace. Numbers are those of cudnnBackendAttributeType_t. */
EXPORT result cudnnBackendCreateDescriptor(int type, int **made) {
	*made = ghost_handle();
	**made = type;
	return SUCCESS;
}
FREES(cudnnBackendDestroyDescriptor)
EXPORT result cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t wanted, int64_t *count, void *value) {
	enum { HANDLE = 0, DATA_TYPE = 1, BOOLEAN = 2, INT64 = 3, FLOAT = 4, DOUBLE = 5, VOID_POINTER = 6, KNOB = 11,
		DESCRIPTOR = 15, NUMERICAL_NOTE = 19, INT32 = 23, CHAR = 24 };
	/* Engines have no knobs and notes: CUDNN_ATTR_ENGINE_KNOB_INFO, NUMERICAL_NOTE and BEHAVIOR_NOTE. */
	int none = name == 1302 || name == 1303 || name == 1305 || type == KNOB || type == NUMERICAL_NOTE;
	if (count) *count = !none;
	if (!value || wanted < 1 || none || type == DESCRIPTOR) return SUCCESS;
	size_t width = type == HANDLE || type == INT64 || type == DOUBLE || type == VOID_POINTER ? 8
		: type == BOOLEAN || type == CHAR ? 1 : 4;
	memset(value, 0, width);
	return SUCCESS;
}

/* NVRTC: nothing is compiled. */

EXPORT result nvrtcVersion(int *major, int *minor) {
	*major = ghost.driver / 1000, *minor = ghost.driver % 1000 / 10;
	return SUCCESS;
}
EXPORT const char *nvrtcGetErrorString(int error) { return "an error of a device that is not there"; }
EXPORT result nvrtcCreateProgram(void **made, const char *source, const char *name, int n, const char *const *headers,
	const char *const *names) {
	*made = ghost_handle();
	return SUCCESS;
}
EXPORT result nvrtcDestroyProgram(void **program) {
	free(*program);
	*program = NULL;
	return SUCCESS;
}
EXPORT result nvrtcCompileProgram(void *program, int n, const char *const *options) { return SUCCESS; }
EXPORT result nvrtcAddNameExpression(void *program, const char *name) { return SUCCESS; }
EXPORT result nvrtcGetLoweredName(void *program, const char *name, const char **lowered) { *lowered = name; return SUCCESS; }
#define EMPTY(what) \
	EXPORT result nvrtcGet##what##Size(void *program, size_t *bytes) { *bytes = 1; return SUCCESS; } \
	EXPORT result nvrtcGet##what(void *program, char *text) { *text = 0; return SUCCESS; }
EMPTY(PTX)
EMPTY(CUBIN)
EMPTY(LTOIR)
EMPTY(ProgramLog)

/* NCCL: every rank has the values of this one. */

struct communicator {
	int ranks, rank, device;
};
struct identity {
	char bytes[128];
};
static size_t width(int type) {
	static const unsigned char widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* of ncclDataType_t */
	return type >= 0 && type < (int)sizeof widths ? widths[type] : 4;
}
static result joined(void **made, int ranks, int rank) {
	struct communicator *c = ghost_handle();
	*c = (struct communicator){ranks, rank, ghost_current};
	*made = c;
	return SUCCESS;
}
EXPORT result ncclGetVersion(int *version) { *version = 22700; return SUCCESS; }
EXPORT result ncclGetUniqueId(struct identity *identity) { memset(identity, 7, sizeof *identity); return SUCCESS; }
EXPORT const char *ncclGetErrorString(int error) { return "an error of a device that is not there"; }
EXPORT const char *ncclGetLastError(void *communicator) { return ""; }
EXPORT result ncclCommInitRank(void **made, int ranks, struct identity identity, int rank) { return joined(made, ranks, rank); }
EXPORT result ncclCommInitRankConfig(void **made, int ranks, struct identity identity, int rank, void *settings) {
	return joined(made, ranks, rank);
}
EXPORT result ncclCommInitRankScalable(void **made, int ranks, int rank, int count, void *identities, void *settings) {
	return joined(made, ranks, rank);
}
/* The ranks of the next communicator that is split from another, and this one's place among them: the program's Python
 * tells them, as NCCL would ask the other ranks.
 */
static struct {
	int ranks, rank;
} next_split;
EXPORT void plimsoll_ghost_splits(int ranks, int rank) { next_split.ranks = ranks, next_split.rank = rank; }
EXPORT result ncclCommSplit(struct communicator *of, int color, int key, void **made, void *settings) {
	*made = NULL;
	if (color < 0) return SUCCESS; /* NCCL_SPLIT_NOCOLOR: another rank's group */
	return next_split.ranks ? joined(made, next_split.ranks, next_split.rank) : joined(made, of->ranks, of->rank);
}
EXPORT result ncclCommCount(struct communicator *c, int *ranks) { *ranks = c->ranks; return SUCCESS; }
EXPORT result ncclCommUserRank(struct communicator *c, int *rank) { *rank = c->rank; return SUCCESS; }
EXPORT result ncclCommCuDevice(struct communicator *c, int *device) { *device = c->device; return SUCCESS; }
EXPORT result ncclCommGetAsyncError(void *communicator, int *error) { *error = SUCCESS; return SUCCESS; }
EXPORT result ncclAllGather(const void *from, char *to, size_t count, int type, struct communicator *c, void *stream) {
	size_t bytes = count * width(type);
	for (int rank = 0; bytes * (size_t)c->ranks <= ghost.copied && rank < c->ranks; rank++)
		ghost_copy(to + (size_t)rank * bytes, from, bytes);
	return SUCCESS;
}
EXPORT result ncclReduceScatter(const char *from, void *to, size_t count, int type, int how, struct communicator *c, void *stream) {
	size_t bytes = count * width(type);
	return bytes * (size_t)c->ranks <= ghost.copied ? ghost_copy(to, from + (size_t)c->rank * bytes, bytes) : SUCCESS;
}
EXPORT result ncclAllReduce(const void *from, void *to, size_t count, int type, int how, void *c, void *stream) {
	return ghost_copy(to, from, count * width(type));
}
/* A gathering of several sizes is a group of broadcasts, one from each rank: what this rank sends is what it hears. */
enum { MOST_HEARD = 4096 };
static __thread struct heard {
	void *to;
	size_t bytes;
} heard[MOST_HEARD];
static __thread int groups, heard_count;
static __thread const void *sent;
static __thread size_t sent_bytes;

EXPORT result ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct communicator *c, void *stream) {
	size_t bytes = count * width(type);
	ghost_copy(to, from, bytes);
	if (root == c->rank) sent = from, sent_bytes = bytes;
	else if (groups && heard_count < MOST_HEARD) heard[heard_count++] = (struct heard){to, bytes};
	return SUCCESS;
}
EXPORT result ncclBcast(void *buffer, size_t count, int type, int root, struct communicator *c, void *stream) {
	return ncclBroadcast(buffer, buffer, count, type, root, c, stream);
}
EXPORT result ncclGroupStart(void) {
	if (groups++ == 0) heard_count = 0, sent = NULL;
	return SUCCESS;
}
EXPORT result ncclGroupEnd(void) {
	if (groups > 0) groups--;
	for (int i = 0; groups == 0 && sent && i < heard_count; i++)
		ghost_copy(heard[i].to, sent, heard[i].bytes < sent_bytes ? heard[i].bytes : sent_bytes);
	return SUCCESS;
}
EXPORT result ncclReduce(const void *from, void *to, size_t count, int type, int how, int root, void *c, void *stream) {
	return ghost_copy(to, from, count * width(type));
}
EXPORT result ncclMemAlloc(void **pointer, size_t bytes) {
	*pointer = ghost_allocate(ON_DEVICE, ghost_current, bytes);
	return *pointer ? SUCCESS : 1; /* ncclUnhandledCudaError */
}
EXPORT result ncclMemFree(void *pointer) { ghost_free(pointer); return SUCCESS; }
