/* cuSPARSE and cuSOLVER: objects that are only passed on, and buffers that operations ask for. These are none: what a release
 * takes is measured elsewhere. Every argument that is passed over has eight bytes, whatever its type.
 */
#include "ghost.h"

typedef int result;

#define MAKES(name) \
	EXPORT result name(void **made) { \
		*made = ghost_handle(); \
		return SUCCESS; \
	}
MAKES(cusparseCreate)
MAKES(cusparseCreateBsrsm2Info)
MAKES(cusparseCreateBsrsv2Info)
MAKES(cusparseCreateCoo)
MAKES(cusparseCreateCsr)
MAKES(cusparseCreateDnMat)
MAKES(cusparseCreateDnVec)
MAKES(cusparseCreateMatDescr)
MAKES(cusparseSpGEMM_createDescr)
MAKES(cusparseSpSM_createDescr)
MAKES(cusparseSpSV_createDescr)
MAKES(cusolverDnCreate)
MAKES(cusolverDnCreateGesvdjInfo)
MAKES(cusolverDnCreateParams)

/* P passes over arguments. */
#define P5 void *a, void *b, void *c, void *d, void *e
#define P10 P5, void *f, void *g, void *h, void *i, void *j
#define NO_BUFFER(name, type, ...) \
	EXPORT result name(__VA_ARGS__, type *bytes) { \
		*bytes = 0; \
		return SUCCESS; \
	}
NO_BUFFER(cusparseSpMM_bufferSize, size_t, P10)
NO_BUFFER(cusparseSDDMM_bufferSize, size_t, P10)
NO_BUFFER(cusparseSpMV_bufferSize, size_t, P5, void *f, void *g, void *h, void *i)
NO_BUFFER(cusparseSpSV_bufferSize, size_t, P5, void *f, void *g, void *h, void *i)
NO_BUFFER(cusparseSpSM_bufferSize, size_t, P10, void *k)
NO_BUFFER(cusparseSpGEMM_workEstimation, size_t, P10, void *k)
NO_BUFFER(cusparseSpGEMM_compute, size_t, P10, void *k)
NO_BUFFER(cusparseXcoosort_bufferSizeExt, size_t, P5, void *f)
NO_BUFFER(cusparseXcsrsort_bufferSizeExt, size_t, P5, void *f)

#define EACH_TYPE(name, ...) \
	NO_BUFFER(cusolverDnS##name##_bufferSize, int, __VA_ARGS__) \
	NO_BUFFER(cusolverDnD##name##_bufferSize, int, __VA_ARGS__) \
	NO_BUFFER(cusolverDnC##name##_bufferSize, int, __VA_ARGS__) \
	NO_BUFFER(cusolverDnZ##name##_bufferSize, int, __VA_ARGS__)
#define EACH_REAL(name, ...) \
	NO_BUFFER(cusolverDnS##name##_bufferSize, int, __VA_ARGS__) \
	NO_BUFFER(cusolverDnD##name##_bufferSize, int, __VA_ARGS__)
#define EACH_COMPLEX(name, ...) \
	NO_BUFFER(cusolverDnC##name##_bufferSize, int, __VA_ARGS__) \
	NO_BUFFER(cusolverDnZ##name##_bufferSize, int, __VA_ARGS__)
EACH_TYPE(geqrf, P5)
EACH_TYPE(getrf, P5)
EACH_TYPE(potrf, P5)
EACH_TYPE(sytrf, void *a, void *b, void *c, void *d)
EACH_TYPE(gesvd, void *a, void *b, void *c)
EACH_TYPE(gesvdj, P10, void *k, void *l)
EACH_TYPE(gesvdjBatched, P10, void *k)
EACH_TYPE(gesvdaStridedBatched, P10, void *k, void *l, void *m, void *n, void *o, void *p)
EACH_REAL(syevd, P5, void *f, void *g)
EACH_REAL(syevj, P5, void *f, void *g)
EACH_REAL(syevjBatched, P5, void *f, void *g)
EACH_REAL(orgqr, P5, void *f, void *g)
EACH_REAL(ormqr, P10, void *k)
EACH_COMPLEX(heevd, P5, void *f, void *g)
EACH_COMPLEX(heevj, P5, void *f, void *g)
EACH_COMPLEX(heevjBatched, P5, void *f, void *g)
EACH_COMPLEX(ungqr, P5, void *f, void *g)
EACH_COMPLEX(unmqr, P10, void *k)

/* The newer functions ask for memory of the host, too. */
#define NO_BUFFERS(name, ...) \
	EXPORT result name(__VA_ARGS__, size_t *bytes, size_t *of_host) { \
		*bytes = *of_host = 0; \
		return SUCCESS; \
	}
NO_BUFFERS(cusolverDnXgeqrf_bufferSize, P10)
NO_BUFFERS(cusolverDnXpotrf_bufferSize, P5, void *f, void *g, void *h)
NO_BUFFERS(cusolverDnXsyevd_bufferSize, P10, void *k)
