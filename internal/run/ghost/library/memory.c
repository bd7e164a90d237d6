/* Address space, and how many bytes of each device are taken. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ghost.h"

struct settings ghost = {
	.devices = 1, .capacity = (size_t)80 << 30, .copied = 1 << 20, .major = 9, .processors = 132, .driver = 13020,
	.name = "NVIDIA H100 80GB HBM3",
};
__thread int ghost_current;

/* Ranges are appended: addresses only grow, so they are in order. */
static struct range *ranges;
static size_t count, room;
static char *next, *end;
static size_t taken[MOST_DEVICES];
static unsigned long launches;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

enum { SPAN_BITS = 47 }; /* of addresses, which are never used again */

static size_t number(const char *name, size_t otherwise) {
	const char *text = getenv(name);
	return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

__attribute__((constructor)) static void begin(void) {
	ghost.devices = (int)number("PLIMSOLL_GHOST_DEVICES", 1);
	if (ghost.devices > MOST_DEVICES) ghost.devices = MOST_DEVICES;
	ghost.capacity = number("PLIMSOLL_GHOST_CAPACITY", ghost.capacity);
	ghost.context = number("PLIMSOLL_GHOST_CONTEXT", 0);
	ghost.copied = number("PLIMSOLL_GHOST_COPIED", ghost.copied);
	ghost.major = (int)number("PLIMSOLL_GHOST_MAJOR", 9);
	ghost.minor = (int)number("PLIMSOLL_GHOST_MINOR", 0);
	ghost.processors = (int)number("PLIMSOLL_GHOST_PROCESSORS", 132);
	ghost.is_early = (int)number("PLIMSOLL_GHOST_EARLY", 0);
	ghost.driver = (int)number("PLIMSOLL_GHOST_DRIVER", 13020);
	if (getenv("PLIMSOLL_GHOST_NAME")) ghost.name = getenv("PLIMSOLL_GHOST_NAME");
}

/* claim takes addresses. The caller holds the mutex. */
static char *claim(size_t bytes) {
	size_t span = (size_t)1 << SPAN_BITS;
	bytes = (bytes + PAGE - 1) & ~(size_t)(PAGE - 1);
	if (!next) {
		void *all = MAP_FAILED;
		while (span > (size_t)1 << 36 && all == MAP_FAILED) { /* ulimit -v may allow less */
			span >>= 1;
			all = mmap(NULL, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		}
		if (all == MAP_FAILED) return NULL;
		next = (char *)(((uintptr_t)all + PAGE - 1) & ~(uintptr_t)(PAGE - 1));
		end = (char *)all + span;
	}
	if ((size_t)(end - next) < bytes) return NULL;
	next += bytes;
	return next - bytes;
}

static struct range *find(const void *pointer) {
	size_t low = 0, high = count;
	while (low < high) { /* the last range that begins at the pointer or before */
		size_t middle = (low + high) / 2;
		if (ranges[middle].begin <= (const char *)pointer) low = middle + 1;
		else high = middle;
	}
	if (low == 0) return NULL;
	struct range *found = &ranges[low - 1];
	return (const char *)pointer < found->begin + found->bytes ? found : NULL;
}

static int append(struct range added) {
	if (count == room) {
		size_t more = room ? 2 * room : 1024;
		struct range *grown = realloc(ranges, more * sizeof *grown);
		if (!grown) return 0;
		ranges = grown, room = more;
	}
	size_t at = count++;
	for (; at > 0 && ranges[at - 1].begin > added.begin; at--) ranges[at] = ranges[at - 1]; /* of the program's memory */
	ranges[at] = added;
	return 1;
}

static size_t left(int device) {
	size_t all = taken[device] + ghost.context;
	return all < ghost.capacity ? ghost.capacity - all : 0;
}

int ghost_take(int device, size_t bytes) {
	pthread_mutex_lock(&mutex);
	int fits = bytes <= left(device);
	if (fits) taken[device] += bytes;
	pthread_mutex_unlock(&mutex);
	return fits;
}

void ghost_give_back(int device, size_t bytes) {
	pthread_mutex_lock(&mutex);
	taken[device] -= bytes;
	pthread_mutex_unlock(&mutex);
}

size_t ghost_free_bytes(int device) {
	pthread_mutex_lock(&mutex);
	size_t bytes = left(device);
	pthread_mutex_unlock(&mutex);
	return bytes;
}

void *ghost_allocate(enum place place, int device, size_t bytes) {
	if (place == ON_DEVICE && !ghost_take(device, bytes)) return NULL;
	pthread_mutex_lock(&mutex);
	char *begin = claim(bytes ? bytes : 1);
	if (begin && mprotect(begin, bytes ? bytes : 1, PROT_READ | PROT_WRITE)) begin = NULL;
	if (begin && !append((struct range){begin, bytes ? bytes : 1, device, place})) begin = NULL;
	pthread_mutex_unlock(&mutex);
	if (!begin && place == ON_DEVICE) ghost_give_back(device, bytes);
	if (begin && place == ON_HOST) ghost_hold(begin, bytes, PINNED, device);
	if (begin && place == MANAGED) ghost_hold(begin, bytes, BY_DRIVER, device);
	if (begin && place == ON_DEVICE && !ghost_is_for_torch()) ghost_hold(begin, bytes, OUTSIDE, device);
	return begin;
}

void ghost_free(void *pointer) {
	ghost_release(pointer);
	pthread_mutex_lock(&mutex);
	struct range *found = find(pointer);
	if (found && found->begin == pointer) {
		if (found->place == ON_DEVICE) taken[found->device] -= found->bytes;
		ghost_open(found->begin, found->bytes, 0);
		found->bytes = 0;
	}
	pthread_mutex_unlock(&mutex);
}

struct range ghost_find(const void *pointer) {
	pthread_mutex_lock(&mutex);
	struct range *found = find(pointer);
	struct range range = found ? *found : (struct range){0};
	pthread_mutex_unlock(&mutex);
	return range;
}

void *ghost_reserve(size_t bytes, int device) {
	pthread_mutex_lock(&mutex);
	char *begin = claim(bytes);
	if (begin && !append((struct range){begin, bytes, device, ON_DEVICE})) begin = NULL;
	pthread_mutex_unlock(&mutex);
	return begin;
}

void ghost_open(void *begin, size_t bytes, int readable) {
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	bytes = (bytes + page - 1) & ~(page - 1);
	if (!readable) madvise(begin, bytes, MADV_DONTNEED);
	mprotect(begin, bytes, readable ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void ghost_register(void *begin, size_t bytes) {
	ghost_pin(begin, bytes);
	pthread_mutex_lock(&mutex);
	append((struct range){begin, bytes, 0, ON_HOST});
	pthread_mutex_unlock(&mutex);
}

void ghost_unregister(void *begin) {
	ghost_unpin(begin);
	pthread_mutex_lock(&mutex);
	struct range *found = find(begin);
	if (found && found->begin == begin) {
		size_t at = (size_t)(found - ranges);
		memmove(found, found + 1, (--count - at) * sizeof *found);
	}
	pthread_mutex_unlock(&mutex);
}

size_t ghost_ranges_resident(void) {
	size_t resident = 0;
	pthread_mutex_lock(&mutex);
	for (size_t i = 0; i < count; i++) resident += ghost_resident(ranges[i].begin, ranges[i].bytes);
	pthread_mutex_unlock(&mutex);
	return resident;
}

int ghost_copy(void *to, const void *from, size_t bytes) {
	if (bytes && bytes <= ghost.copied) memmove(to, from, bytes);
	return SUCCESS;
}

int ghost_set(void *to, int value, size_t bytes, size_t width) {
	if (bytes > ghost.copied) return SUCCESS;
	for (size_t at = 0; at + width <= bytes; at += width) memcpy((char *)to + at, &value, width);
	return SUCCESS;
}

void *ghost_handle(void) { return calloc(1, 4096); }

int ghost_launched(void) {
	__atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED);
	return SUCCESS;
}

unsigned long ghost_launches(void) { return __atomic_load_n(&launches, __ATOMIC_RELAXED); }
