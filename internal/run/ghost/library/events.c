/* Events: work is done when the program waits for it, or when a device could be no further behind. PyTorch asks events
 * whether memory that another stream uses may be taken again. A device is anywhere between the two ends: as late as here, or
 * done at once.
 */
#include <stdlib.h>

#include "ghost.h"

enum {
	NOT_READY = 600,
	QUEUED = 1024, /* launches that a device queues before the program must wait */
	PATIENCE = 1 << 14 /* answers to a program that does nothing but ask */
};

struct event {
	unsigned long number, launch;
	unsigned asked;
};
static unsigned long recorded, finished; /* numbers of events */
static unsigned long waits;
static __thread int is_working; /* this thread gives the device work: a watchdog does not */

static unsigned long now(const unsigned long *counter) { return __atomic_load_n(counter, __ATOMIC_RELAXED); }

/* finish says that the work before an event is done. */
static int finish(unsigned long number) {
	if (number > now(&finished)) __atomic_store_n(&finished, number, __ATOMIC_RELAXED);
	return SUCCESS;
}

int ghost_wait(void) { return finish(now(&recorded)); }

EXPORT int cudaEventCreate(struct event **event) { *event = ghost_handle(); return SUCCESS; }
EXPORT int cudaEventCreateWithFlags(struct event **event, unsigned flags) { *event = ghost_handle(); return SUCCESS; }
EXPORT int cudaEventDestroy(struct event *event) { free(event); return SUCCESS; }
EXPORT int cudaEventElapsedTime(float *milliseconds, void *from, void *to) { *milliseconds = 1; return SUCCESS; }
EXPORT int cudaEventElapsedTime_v2(float *milliseconds, void *from, void *to) { *milliseconds = 1; return SUCCESS; }

EXPORT int cudaEventRecord(struct event *event, void *stream) {
	is_working = 1;
	*event = (struct event){__atomic_add_fetch(&recorded, 1, __ATOMIC_RELAXED), ghost_launches(), 0};
	return SUCCESS;
}
EXPORT int cudaEventRecordWithFlags(struct event *event, void *stream, unsigned flags) {
	return cudaEventRecord(event, stream);
}
EXPORT int cudaEventQuery(struct event *event) {
	if (ghost.is_early || !is_working || event->number <= now(&finished) || ghost_launches() - event->launch > QUEUED
		|| ++event->asked > PATIENCE)
		return SUCCESS;
	__atomic_add_fetch(&waits, 1, __ATOMIC_RELAXED);
	return NOT_READY;
}
EXPORT int cudaEventSynchronize(struct event *event) { return finish(event->number); }
EXPORT int cudaStreamSynchronize(void *stream) { return ghost_wait(); }
EXPORT int cudaDeviceSynchronize(void) { return ghost_wait(); }

/* How often an event was not ready. */
EXPORT unsigned long plimsoll_ghost_waits(void) { return now(&waits); }
