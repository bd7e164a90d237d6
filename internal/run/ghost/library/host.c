/* Memory of the host: what the program holds in large blocks, and which line asked for it. So is memory that the program
 * takes of a device without PyTorch, whose record lacks it.
 *
 * Large tensors of the host are never written on the stage, so that their pages are not there to be counted. They are
 * counted here as if each were written: blocks of at least 1 MiB that posix_memalign makes, as PyTorch's allocator of the
 * host does, and pinned memory.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ghost.h"

enum { LARGE = 1 << 20, BUCKETS = 1 << 14, MOST_FRAMES = 48, MOST_TEXT = 16 << 10, MOST_NAME = 4 << 10 };

/* A block, and the line that asked for it. Some of the bytes of a block of the heap are pinned, or all. */
static struct block {
	const void *begin;
	size_t bytes, pinned;
	enum kind kind;
	int holder, is_mapped; /* mapped here, as the heap has no room for it */
	struct block *next;
} *buckets[BUCKETS];

/* Where bytes are: on the host, or on a device. */
static struct account {
	size_t total, peak;
	int is_at_peak; /* nothing was released since the peak, so that what is held now was held then */
} accounts[1 + MOST_DEVICES];

/* A stack of Python, and what it holds in an account, now and when the account held most. */
static struct holder {
	char *stack;
	int account;
	size_t now[KINDS], most[KINDS];
} *holders;
static int holder_count, holder_room;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void lock(void) { pthread_mutex_lock(&mutex); }
static void unlock(void) { pthread_mutex_unlock(&mutex); }
__attribute__((constructor)) static void begin(void) { pthread_atfork(lock, unlock, unlock); }

static unsigned bucket(const void *pointer) {
	return (unsigned)(((uintptr_t)pointer >> 12) * 2654435761u >> 8) % BUCKETS;
}

static struct block **find(const void *pointer) {
	struct block **at = &buckets[bucket(pointer)];
	while (*at && (*at)->begin != pointer) at = &(*at)->next;
	return at;
}

/* keep notes what is held in an account, before some of it is released. */
static void keep(int account) {
	struct account *a = &accounts[account];
	for (int i = 0; a->is_at_peak && i < holder_count; i++)
		if (holders[i].account == account) memcpy(holders[i].most, holders[i].now, sizeof holders[i].now);
	a->is_at_peak = 0;
}

static void grew(struct account *a, size_t bytes) {
	a->total += bytes;
	if (a->total > a->peak) a->peak = a->total, a->is_at_peak = 1;
}

/* Python's frames, if this is a thread of Python. Operations of PyTorch have let the interpreter's lock go. */

static struct python {
	int (*is_initialized)(void), (*ensure)(void), (*line)(void *);
	void (*let_go)(int);
	void *(*state)(void), *(*has_failed)(void), *(*current)(void), *(*caller)(void *), *(*code)(void *), *(*attribute)(void *, const char *);
	void *(*encoded)(void *, const char *, const char *);
	const char *(*bytes)(void *);
	void (*release)(void *), (*clear)(void);
} python;

static int has_python(void) {
	static const char *const names[] = {"Py_IsInitialized", "PyGILState_Ensure", "PyFrame_GetLineNumber",
		"PyGILState_Release", "PyGILState_GetThisThreadState", "PyErr_Occurred", "PyEval_GetFrame", "PyFrame_GetBack",
		"PyFrame_GetCode", "PyObject_GetAttrString", "PyUnicode_AsEncodedString", "PyBytes_AsString",
		"Py_DecRef", "PyErr_Clear"};
	static int is_known, is_complete;
	if (!is_known) {
		void **functions = (void **)&python;
		is_complete = 1;
		for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
			functions[i] = dlsym(RTLD_DEFAULT, names[i]);
			is_complete &= functions[i] != NULL;
		}
		is_known = 1;
	}
	return is_complete;
}

/* write_name writes a name of the code: no tab and no line break, and in UTF-8 where the name of a file is not. */
static void write_name(char *text, size_t room, void *code, const char *which) {
	void *name = python.attribute(code, which), *encoded = name ? python.encoded(name, "utf-8", "backslashreplace") : NULL;
	const char *bytes = encoded ? python.bytes(encoded) : NULL;
	snprintf(text, room, "%s", bytes ? bytes : "?");
	for (char *c = text; *c; c++)
		if ((unsigned char)*c < ' ' || *c == 127) *c = '?';
	if (encoded) python.release(encoded);
	if (name) python.release(name);
	if (python.has_failed()) python.clear();
}

/* write_frames writes "file\tfunction\tline\n" for each frame, the innermost first, as far as whole lines have room. */
static void write_frames(char *text, size_t room) {
	void *frame = python.has_failed() ? NULL : python.current(), *borrowed = frame;
	size_t length = 0;
	for (int i = 0; frame && i < MOST_FRAMES; i++) {
		void *code = python.code(frame);
		char line[2 * MOST_NAME + 32], *end = line;
		write_name(line, MOST_NAME, code, "co_filename");
		end += strlen(end), *end++ = '\t';
		write_name(end, MOST_NAME, code, "co_name");
		end += strlen(end);
		end += snprintf(end, 32, "\t%d\n", python.line(frame));
		size_t more = (size_t)(end - line);
		if (length + more < room) memcpy(text + length, line, more + 1), length += more;
		python.release(code);
		void *caller = python.caller(frame);
		if (frame != borrowed) python.release(frame);
		frame = caller;
	}
	if (frame && frame != borrowed) python.release(frame);
}

/* holder_of returns the number of a stack in an account. The caller holds the mutex. */
static int holder_of(const char *stack, int account) {
	for (int i = holder_count; i-- > 0;) /* the same line asks again and again */
		if (holders[i].account == account && strcmp(holders[i].stack, stack) == 0) return i;
	if (holder_count == holder_room) {
		int more = holder_room ? 2 * holder_room : 64;
		struct holder *grown = realloc(holders, (size_t)more * sizeof *grown);
		if (!grown) return -1;
		holders = grown, holder_room = more;
	}
	char *copy = strdup(stack);
	if (!copy) return -1;
	holders[holder_count] = (struct holder){.stack = copy, .account = account};
	return holder_count++;
}

int ghost_is_for_torch(void) {
	void *frames[MOST_FRAMES];
	Dl_info in;
	for (int i = backtrace(frames, MOST_FRAMES); i-- > 0;)
		if (dladdr(frames[i], &in) && in.dli_fname && strstr(in.dli_fname, "libc10_cuda")) return 1;
	return 0;
}

void ghost_hold(const void *begin, size_t bytes, enum kind kind, int device) {
	static __thread int is_asking; /* asking Python for its frames may allocate */
	if (is_asking || bytes == 0) return;
	char *text = malloc(MOST_TEXT);
	struct block *made = malloc(sizeof *made);
	if (text && made) {
		is_asking = 1;
		*text = 0;
		if (has_python() && python.is_initialized() && python.state()) {
			int was = python.ensure();
			write_frames(text, MOST_TEXT);
			python.let_go(was);
		}
		is_asking = 0;
		pthread_mutex_lock(&mutex);
		int account = kind == OUTSIDE ? 1 + device : 0, holder = holder_of(text, account);
		if (holder >= 0) {
			*made = (struct block){begin, bytes, 0, kind, holder, 0, buckets[bucket(begin)]};
			__atomic_store_n(&buckets[bucket(begin)], made, __ATOMIC_RELEASE);
			holders[holder].now[kind] += bytes;
			grew(&accounts[account], bytes);
			made = NULL;
		}
		pthread_mutex_unlock(&mutex);
	}
	free(text);
	free(made);
}

size_t ghost_release(const void *begin) {
	if (!__atomic_load_n(&buckets[bucket(begin)], __ATOMIC_ACQUIRE)) return 0; /* as nearly always */
	pthread_mutex_lock(&mutex);
	struct block **at = find(begin), *found = *at;
	if (found) {
		struct holder *holder = &holders[found->holder];
		keep(holder->account);
		holder->now[PINNED] -= found->pinned;
		holder->now[found->kind] -= found->bytes - found->pinned;
		accounts[holder->account].total -= found->bytes;
		*at = found->next;
	}
	pthread_mutex_unlock(&mutex);
	size_t mapped = found && found->is_mapped ? found->bytes : 0;
	free(found);
	return mapped;
}

/* pin says how many bytes of a block of the heap are pinned. Whether there is such a block. */
static int pin(const void *begin, size_t bytes) {
	pthread_mutex_lock(&mutex);
	struct block *found = *find(begin);
	int is_known = found && found->kind == PAGEABLE;
	if (is_known) {
		if (bytes > found->bytes) bytes = found->bytes;
		keep(0);
		struct holder *holder = &holders[found->holder];
		holder->now[PINNED] += bytes - found->pinned;
		holder->now[PAGEABLE] -= bytes - found->pinned;
		found->pinned = bytes;
		accounts[0].is_at_peak = accounts[0].total == accounts[0].peak;
	}
	pthread_mutex_unlock(&mutex);
	return is_known;
}

void ghost_pin(const void *begin, size_t bytes) {
	if (!pin(begin, bytes)) ghost_hold(begin, bytes, PINNED, 0);
}

void ghost_unpin(const void *begin) {
	if (!pin(begin, 0)) ghost_release(begin);
}

/* The heap */

enum { PAGE_SIZE = 4096 };

/* map takes addresses for a block of more bytes than this host has. Its pages are never written. Returns an error. */
static int map(void **pointer, size_t bytes) {
	void *begin = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (begin == MAP_FAILED) return ENOMEM;
	ghost_hold(begin, bytes, PAGEABLE, 0);
	pthread_mutex_lock(&mutex);
	struct block *found = *find(begin);
	if (found) found->is_mapped = 1;
	pthread_mutex_unlock(&mutex);
	if (!found) { /* free would not know it */
		munmap(begin, bytes);
		return ENOMEM;
	}
	*pointer = begin;
	return 0;
}

EXPORT int posix_memalign(void **pointer, size_t alignment, size_t bytes) {
	static int (*really)(void **, size_t, size_t);
	if (!really) really = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
	int failed = really(pointer, alignment, bytes);
	if (failed == ENOMEM && bytes >= LARGE && alignment <= PAGE_SIZE) return map(pointer, bytes);
	if (!failed && bytes >= LARGE) ghost_hold(*pointer, bytes, PAGEABLE, 0);
	return failed;
}

EXPORT void free(void *pointer) {
	static void (*really)(void *);
	static __thread int is_looking;
	if (!pointer || is_looking) return;
	if (!really) {
		is_looking = 1;
		really = (void (*)(void *))dlsym(RTLD_NEXT, "free");
		is_looking = 0;
	}
	size_t mapped = ghost_release(pointer);
	if (mapped) munmap(pointer, mapped);
	else really(pointer);
}

/* Pages that are there */

size_t ghost_resident(const void *begin, size_t bytes) {
	static __thread unsigned char pages[1 << 16];
	size_t page = (size_t)sysconf(_SC_PAGESIZE), resident = 0;
	uintptr_t at = ((uintptr_t)begin + page - 1) & ~(page - 1), end = ((uintptr_t)begin + bytes) & ~(page - 1);
	while (at < end) {
		size_t count = (end - at) / page;
		if (count > sizeof pages) count = sizeof pages;
		if (mincore((void *)at, count * page, pages) == 0)
			for (size_t i = 0; i < count; i++) resident += pages[i] & 1;
		at += count * page;
	}
	return resident * page;
}

/* What the program's Python asks. */

/* The number of a stack from 0 on, its frames, where it holds memory (-1: the host, or a device), and what it held of each kind
 * when most was held there since the last restart. 0 behind the last one. */
EXPORT int plimsoll_ghost_holder(int number, const char **stack, int *device, size_t held[KINDS]) {
	pthread_mutex_lock(&mutex);
	int is_known = number < holder_count;
	if (is_known) {
		struct holder *holder = &holders[number];
		keep(holder->account);
		*stack = holder->stack, *device = holder->account - 1;
		memcpy(held, holder->most, sizeof holder->most);
	}
	pthread_mutex_unlock(&mutex);
	return is_known;
}
EXPORT void plimsoll_ghost_restart(void) {
	pthread_mutex_lock(&mutex);
	for (struct account *a = accounts; a < accounts + 1 + MOST_DEVICES; a++) a->peak = a->total, a->is_at_peak = 1;
	pthread_mutex_unlock(&mutex);
}
/* The number of the stack that asked for a block which begins at an address; -1 if none did. */
EXPORT int plimsoll_ghost_holder_of(const void *begin) {
	pthread_mutex_lock(&mutex);
	struct block *found = *find(begin);
	int number = found ? found->holder : -1;
	pthread_mutex_unlock(&mutex);
	return number;
}
/* Bytes that are resident of memory which is counted elsewhere: devices', pinned, and large blocks. */
EXPORT size_t plimsoll_ghost_resident(void) {
	size_t resident = ghost_ranges_resident();
	pthread_mutex_lock(&mutex);
	for (int i = 0; i < BUCKETS; i++)
		for (struct block *b = buckets[i]; b; b = b->next)
			if (b->kind == PAGEABLE && !b->pinned) resident += ghost_resident(b->begin, b->bytes);
	pthread_mutex_unlock(&mutex);
	return resident;
}
