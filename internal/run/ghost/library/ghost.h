/* A GPU that is not there: what CUDA's libraries answer to a program, without a device.
 *
 * A program that was built for CUDA loads this library before CUDA's own. Device memory is address space: it is counted,
 * and an allocation beyond the capacity fails as it does on the device. Kernels do nothing. Copies of little are made, so
 * that sizes and positions keep their values. Functions that are not modelled answer success, and are counted by name.
 *
 * No header of CUDA is included: programs of CUDA 12 and 13 load the same library. Structures and numbers that both agree
 * on are declared where they are used, with the name that CUDA gives them.
 */
#ifndef GHOST_H
#define GHOST_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

enum { MOST_DEVICES = 64, PAGE = 2 << 20 };

/* Results that runtime and driver have in common. */
enum { SUCCESS = 0, OUT_OF_MEMORY = 2, INVALID_VALUE = 1, INVALID_DEVICE = 101 };

/* What the environment says of the devices. */
struct settings {
	int devices;
	size_t capacity;    /* bytes of a device */
	size_t context;     /* bytes that are taken before the first allocation */
	size_t copied;      /* the most bytes of a copy that is made */
	int major, minor;   /* compute capability */
	int processors;     /* streaming multiprocessors */
	int is_early;       /* work is done at once */
	int driver;         /* version of the driver, as cuDriverGetVersion has it */
	const char *name;
};
extern struct settings ghost;

/* The device of this thread. */
extern __thread int ghost_current;

/* What a range of addresses is. */
enum place { NOWHERE, ON_DEVICE, ON_HOST, MANAGED };
struct range {
	char *begin;
	size_t bytes; /* 0: it was given back */
	int device;
	enum place place;
};

/* ghost_allocate takes bytes of a device, of pinned host memory, or of managed memory, which the driver moves between the
 * two. Returns NULL if the device has too little left. */
void *ghost_allocate(enum place place, int device, size_t bytes);
/* ghost_free gives back what ghost_allocate returned. It ignores other pointers. */
void ghost_free(void *pointer);
/* ghost_pitch returns the bytes of a row of so many in memory of two dimensions: a multiple of 512, as TextureAlignment says. */
static inline size_t ghost_pitch(size_t width) { return (width + 511) & ~(size_t)511; }
/* ghost_find returns the range of an address. Its place is NOWHERE for memory of the program. */
struct range ghost_find(const void *pointer);
/* ghost_take and ghost_give_back count bytes of a device that have no addresses yet. */
int ghost_take(int device, size_t bytes);
void ghost_give_back(int device, size_t bytes);
size_t ghost_free_bytes(int device);
/* ghost_reserve takes addresses alone, and ghost_open makes some of them readable, or unreadable and empty again. */
void *ghost_reserve(size_t bytes, int device);
void ghost_open(void *begin, size_t bytes, int readable);
/* ghost_register notes host memory of the program that is pinned from now on, or no longer. */
void ghost_register(void *begin, size_t bytes);
void ghost_unregister(void *begin);

/* What is counted by the line that asked for it: memory of the host, and of a device outside of PyTorch's allocator. */
enum kind { PAGEABLE, PINNED, BY_DRIVER, OUTSIDE, KINDS };
/* ghost_hold counts a block, and ghost_release the end of one; it ignores other pointers. It returns the bytes that are to be
 * unmapped, of a block that the heap has no room for. */
void ghost_hold(const void *begin, size_t bytes, enum kind kind, int device);
size_t ghost_release(const void *begin);
/* ghost_pin counts a block of the program as pinned, and ghost_unpin as pageable again. */
void ghost_pin(const void *begin, size_t bytes);
void ghost_unpin(const void *begin);
/* ghost_is_for_torch is whether PyTorch's allocator of device memory has called: its own record has the bytes. */
int ghost_is_for_torch(void);
/* ghost_resident returns the bytes of whole pages that are in memory, and ghost_ranges_resident those of devices and pinned
 * memory. */
size_t ghost_resident(const void *begin, size_t bytes);
size_t ghost_ranges_resident(void);

/* ghost_copy makes a copy if it is small. */
int ghost_copy(void *to, const void *from, size_t bytes);
int ghost_set(void *to, int value, size_t bytes, size_t width);

/* ghost_handle makes an object that a program only passes on. */
void *ghost_handle(void);

/* ghost_launched counts a kernel, and ghost_launches returns how many there were. */
int ghost_launched(void);
unsigned long ghost_launches(void);
/* ghost_wait has all events be ready that were recorded. */
int ghost_wait(void);

/* ghost_unmodelled counts a call of a function that has no model. */
int ghost_unmodelled(int number, const char *name);

/* ghost_estimate notes a size that is an estimate, once. The text stays. */
void ghost_estimate(const char *what);

/* ghost_entry returns the function of a name: this library's, or one that does nothing. */
void *ghost_entry(const char *name);

#endif
