package checkpoint

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// window is how much of a file is written back at a time. It is large beside
// what a disk needs to be busy, and small beside the memory of a host.
const window = 16 << 20

// inFlight is the number of windows that are being written back while others
// are filled. Then the page cache holds a few windows of a checkpoint, and
// never so much that the kernel makes other writers wait for it.
const inFlight = 4

// writeback sends a file to the disk, window by window, as soon as a window is
// full, and then lets the page cache forget it. The parts of a window may be
// written in any order, by several threads at once.
type writeback struct {
	file  *os.File
	size  int64
	left  []atomic.Int64 // bytes of each window that are not written yet
	full  chan int64
	end   sync.Once
	ended sync.WaitGroup

	mutex sync.Mutex
	err   error
}

func newWriteback(file *os.File, size int64) *writeback {
	w := &writeback{file: file, size: size, left: make([]atomic.Int64, (size+window-1)/window), full: make(chan int64, inFlight)}
	for i := range w.left {
		w.left[i].Store(min(window, size-int64(i)*window))
	}
	w.ended.Go(w.run)
	return w
}

// wrote says that a stretch of the file has been written. It waits while too
// much is on its way to the disk.
func (w *writeback) wrote(offset, bytes int64) {
	for end := offset + bytes; offset < end; {
		number := offset / window
		next := min(end, (number+1)*window)
		if w.left[number].Add(offset-next) == 0 {
			w.full <- number
		}
		offset = next
	}
}

// run starts to write back every window that is full, and waits for the oldest
// when there are too many.
func (w *writeback) run() {
	var started []int64
	finish := func() {
		w.note(w.sync(started[0], unix.SYNC_FILE_RANGE_WAIT_BEFORE|unix.SYNC_FILE_RANGE_WRITE|unix.SYNC_FILE_RANGE_WAIT_AFTER))
		w.forget(started[0])
		started = started[1:]
	}
	for number := range w.full {
		w.note(w.sync(number, unix.SYNC_FILE_RANGE_WRITE))
		if started = append(started, number); len(started) > inFlight {
			finish()
		}
	}
	for len(started) > 0 {
		finish()
	}
}

// sync is no more than a beginning: what makes data safe is the fsync of the
// whole file. File systems that have no sync_file_range do without.
func (w *writeback) sync(number int64, flags int) error {
	err := unix.SyncFileRange(int(w.file.Fd()), number*window, min(window, w.size-number*window), flags)
	if err == nil || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ESPIPE) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return fmt.Errorf("sync_file_range: %w", err)
}

// forget is advice, which a file system need not take.
func (w *writeback) forget(number int64) {
	_ = unix.Fadvise(int(w.file.Fd()), number*window, window, unix.FADV_DONTNEED)
}

func (w *writeback) note(err error) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if w.err == nil {
		w.err = err
	}
}

// failed is the first error.
func (w *writeback) failed() error {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return w.err
}

// close waits for all windows that are full.
func (w *writeback) close() error {
	w.end.Do(func() { close(w.full) })
	w.ended.Wait()
	return w.failed()
}
