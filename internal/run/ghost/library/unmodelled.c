/* All other functions of CUDA's libraries, by name. They answer success, write nothing and are counted: a program that
 * calls one may be misled, and its plan says so.
 */
#include "ghost.h"

enum numbers {
#define NAME(name) NUMBER_##name,
#include "names.h"
#undef NAME
	NAMES
};

static unsigned long called[NAMES];
static const char *const names[NAMES] = {
#define NAME(name) #name,
#include "names.h"
#undef NAME
};

int ghost_unmodelled(int number, const char *name) {
	__atomic_add_fetch(&called[number], 1, __ATOMIC_RELAXED);
	return SUCCESS;
}

#define NAME(name) \
	EXPORT __attribute__((weak)) int name(void) { return ghost_unmodelled(NUMBER_##name, #name); }
#include "names.h"
#undef NAME

/* The name of a function that was called without a model, and how often; NULL behind the last number. */
EXPORT const char *plimsoll_ghost_unmodelled(int number, unsigned long *calls) {
	if (number >= NAMES) return 0;
	*calls = called[number];
	return names[number];
}

static const char *estimated[64];

void ghost_estimate(const char *what) {
	for (int i = 0; i < 63; i++) {
		if (estimated[i] == what) return;
		if (!estimated[i]) {
			estimated[i] = what;
			return;
		}
	}
}

/* What has a size that is an estimate; NULL behind the last number. */
EXPORT const char *plimsoll_ghost_estimate(int number) { return estimated[number]; }
