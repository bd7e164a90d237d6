package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// window is how much of a file is written back at a time. It is large beside
// what a disk needs to be busy, and small beside the memory of a host.
const window = 16 << 20

// inFlight is the number of windows that are being written back while others
// are filled.
const inFlight = 4

// lead is how many windows a file that nobody waits for is ahead of the disk:
// those that are being written back, and those that are filled meanwhile, of
// which every stream has one.
const lead = 8

// spare is memory that those who cannot wait may fill with what the disk does
// not have yet, beyond the lead of each file. A process has one: what the host
// has to spare is there once for all files.
type spare struct {
	mutex   sync.Mutex // also of what files keep account of
	changed sync.Cond
	bytes   int64
	used    int64
}

func newSpare(bytes int64) *spare {
	s := &spare{bytes: bytes}
	s.changed.L = &s.mutex
	return s
}

// set says how much there is now.
func (s *spare) set(bytes int64) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.bytes = bytes
	s.changed.Broadcast()
}

// disk is where a file is written back to.
type disk interface {
	// start begins to write a stretch back.
	start(offset, bytes int64) error
	// finish returns when it is there, and may let the page cache forget it.
	finish(offset, bytes int64, forget bool) error
}

// writeback sends a file to the disk, window by window, as soon as a window is
// full, and then lets the page cache forget it. The parts of a window may be
// written in any order, by several threads at once.
//
// The page cache is what keeps the state as it was for the disk: to write is to
// copy, and whoever writes waits for the disk only where memory is short.
type writeback struct {
	disk   disk
	size   int64
	window int64
	lead   int64 // bytes
	spare  *spare
	ended  sync.WaitGroup

	// With the mutex of spare.
	windows []progress
	left    int64   // bytes that are not written yet
	full    []int64 // numbers of windows that can be written back
	held    int64   // bytes in the page cache that are not known to be on the disk
	waiting int     // threads, for less to be held
	closed  bool
	err     error // the first
}

// progress is how far a window is.
type progress struct {
	left  int64 // bytes that are not written yet
	dirty int64 // bytes that are, and are not being written back
}

func newWriteback(disk disk, size, window int64, spare *spare) *writeback {
	w := &writeback{
		disk: disk, size: size, window: window, lead: lead * window, spare: spare,
		left: size, windows: make([]progress, (size+window-1)/window),
	}
	for number := range w.windows {
		w.windows[number].left = w.extent(int64(number))
	}
	w.ended.Go(w.run)
	return w
}

// extent is the size of a window.
func (w *writeback) extent(number int64) int64 { return min(w.window, w.size-number*w.window) }

// progress is the number of bytes that were written, and of those that have come to
// the disk, added up.
func (w *writeback) progress() int64 {
	w.spare.mutex.Lock()
	defer w.spare.mutex.Unlock()
	written := w.size - w.left
	return written + written - w.held
}

// pace waits until the file is less than its lead ahead of the disk.
func (w *writeback) pace(ctx context.Context) error {
	defer context.AfterFunc(ctx, w.wake)()
	w.spare.mutex.Lock()
	defer w.spare.mutex.Unlock()
	w.wait(func() bool { return w.held < w.lead || ctx.Err() != nil })
	return ctx.Err()
}

// take is called before bytes are written. It waits while the file has its lead
// and there is no memory to spare.
func (w *writeback) take(bytes int64) {
	w.spare.mutex.Lock()
	defer w.spare.mutex.Unlock()
	w.wait(func() bool { return w.held < w.lead || w.spare.used < w.spare.bytes })
	w.hold(bytes)
}

// wait waits for less to be held. Nobody waits for what has failed.
func (w *writeback) wait(enough func() bool) {
	if w.err != nil || enough() {
		return
	}
	w.waiting++
	w.spare.changed.Broadcast()
	for w.err == nil && !enough() {
		w.spare.changed.Wait()
	}
	w.waiting--
}

// hold keeps account of bytes that come into the page cache, or leave it.
func (w *writeback) hold(bytes int64) {
	before := max(0, w.held-w.lead)
	w.held += bytes
	w.spare.used += max(0, w.held-w.lead) - before
	if bytes < 0 {
		w.spare.changed.Broadcast()
	}
}

// wrote says that a stretch of the file has been written.
func (w *writeback) wrote(offset, bytes int64) {
	w.spare.mutex.Lock()
	defer w.spare.mutex.Unlock()
	for end := offset + bytes; offset < end; {
		number := offset / w.window
		next := min(end, (number+1)*w.window)
		p := &w.windows[number]
		w.left -= next - offset
		p.left -= next - offset
		p.dirty += next - offset
		if p.left == 0 {
			w.full = append(w.full, number)
		}
		if p.left == 0 || w.waiting > 0 {
			w.spare.changed.Broadcast()
		}
		offset = next
	}
}

// sent is what was dirty of a window, and is on its way to the disk.
type sent struct{ number, bytes int64 }

// run writes windows back, and waits for the oldest when there are too many, or
// nothing else to do.
func (w *writeback) run() {
	var underway []sent
	for {
		next, more := w.next(len(underway) == 0)
		if next.bytes > 0 {
			w.fail(w.disk.start(next.number*w.window, w.extent(next.number)))
			underway = append(underway, next)
		}
		switch {
		case len(underway) > inFlight || next.bytes == 0 && len(underway) > 0:
			oldest := underway[0]
			underway = underway[1:]
			w.fail(w.disk.finish(oldest.number*w.window, w.extent(oldest.number), !w.hurried()))
			w.release(oldest.bytes)
		case !more:
			return
		}
	}
}

// next is a window to write back: a full one or, when somebody waits and all
// that were full are on the disk, any that has something. Where nothing is
// underway it waits for one. There are no more once the file is closed.
func (w *writeback) next(idle bool) (next sent, more bool) {
	w.spare.mutex.Lock()
	defer w.spare.mutex.Unlock()
	for w.err == nil {
		if len(w.full) > 0 {
			number := w.full[0]
			w.full = w.full[1:]
			if w.windows[number].dirty > 0 { // not when somebody waited before it was full, and it was empty then
				return w.send(number), true
			}
			continue
		}
		if idle && w.waiting > 0 {
			for number := range w.windows {
				if w.windows[number].dirty > 0 {
					return w.send(int64(number)), true
				}
			}
		}
		if !idle || w.closed {
			break
		}
		w.spare.changed.Wait()
	}
	return sent{}, !w.closed && w.err == nil
}

// hurried says that others fill the page cache as fast as they can. Forgetting
// takes the locks that they take, and it can be done when the file is whole.
func (w *writeback) hurried() bool {
	w.spare.mutex.Lock()
	defer w.spare.mutex.Unlock()
	return w.held >= w.lead && w.left > 0 && w.waiting == 0
}

func (w *writeback) send(number int64) sent {
	p := &w.windows[number]
	s := sent{number, p.dirty}
	p.dirty = 0
	return s
}

func (w *writeback) release(bytes int64) {
	w.spare.mutex.Lock()
	defer w.spare.mutex.Unlock()
	w.hold(-bytes)
}

func (w *writeback) wake() {
	w.spare.mutex.Lock()
	defer w.spare.mutex.Unlock()
	w.spare.changed.Broadcast()
}

// fail gives the file up, if there is an error.
func (w *writeback) fail(err error) {
	if err == nil {
		return
	}
	w.spare.mutex.Lock()
	defer w.spare.mutex.Unlock()
	if w.err == nil {
		w.err = err
	}
	w.spare.changed.Broadcast()
}

// failed is the first error.
func (w *writeback) failed() error {
	w.spare.mutex.Lock()
	defer w.spare.mutex.Unlock()
	return w.err
}

// close waits for all windows that are full. Nobody writes any more.
func (w *writeback) close() error {
	w.spare.mutex.Lock()
	w.closed = true
	w.spare.changed.Broadcast()
	w.spare.mutex.Unlock()
	w.ended.Wait()
	w.release(w.held)
	return w.failed()
}

// fileOnDisk is the disk of a file.
type fileOnDisk struct{ *os.File }

func (f fileOnDisk) start(offset, bytes int64) error {
	return f.sync(offset, bytes, unix.SYNC_FILE_RANGE_WRITE)
}

// finish forgets by advice, which a file system need not take.
func (f fileOnDisk) finish(offset, bytes int64, forget bool) error {
	err := f.sync(offset, bytes, unix.SYNC_FILE_RANGE_WAIT_BEFORE|unix.SYNC_FILE_RANGE_WRITE|unix.SYNC_FILE_RANGE_WAIT_AFTER)
	if forget {
		_ = unix.Fadvise(int(f.Fd()), offset, bytes, unix.FADV_DONTNEED)
	}
	return err
}

// sync is no more than a beginning: what makes data safe is the fsync of the
// whole file. File systems that have no sync_file_range do without.
func (f fileOnDisk) sync(offset, bytes int64, flags int) error {
	err := unix.SyncFileRange(int(f.Fd()), offset, bytes, flags)
	if err == nil || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ESPIPE) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return fmt.Errorf("sync_file_range: %w", err)
}
