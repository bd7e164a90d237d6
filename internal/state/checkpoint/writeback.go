package checkpoint

import (
	"context"
	"os"
	"sync"
)

// window is how much of a file is written back at a time. It is large beside
// what a disk needs to be busy, and small beside the memory of a host.
const window = 16 << 20

// inFlight is the number of windows that are being written back while others
// are filled.
const inFlight = 4

// lead is how many windows a file may be ahead of the disk while no step waits for it:
// the windows that are being written back, and those that are filled meanwhile. Every
// stream fills one.
const lead = 8

// spare is memory that steps, which must not wait, may fill with bytes that the disk
// does not have yet, beyond the lead of each file. A process has one spare: all files
// share the spare memory of the host.
type spare struct {
	mutex   sync.Mutex // also guards the counts of all files
	changed sync.Cond
	bytes   int64
	used    int64
}

func newSpare(bytes int64) *spare {
	s := &spare{bytes: bytes}
	s.changed.L = &s.mutex
	return s
}

// set sets how much there is now.
func (s *spare) set(bytes int64) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.bytes = bytes
	s.changed.Broadcast()
}

// disk is where a file is written back to.
type disk interface {
	// start begins to write a range back.
	start(offset, bytes int64) error
	// finish returns when the range is there. It may let the page cache forget it.
	finish(offset, bytes int64, forget bool) error
}

// writeback sends a file to the disk, window by window, as soon as a window is
// full, and then lets the page cache forget it. The parts of a window may be
// written in any order, by several threads at once.
//
// The page cache keeps the old state for the disk: a write copies it. A writer waits
// for the disk only if memory is short.
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
	held    int64   // bytes in the page cache that may not be on the disk yet
	waiting int     // threads that wait for less to be held
	closed  bool
	err     error // the first
}

// progress is how far a window is.
type progress struct {
	left  int64 // bytes that are not written yet
	dirty int64 // bytes that are written, and are not being written back
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

// extent returns the size of a window.
func (w *writeback) extent(number int64) int64 { return min(w.window, w.size-number*w.window) }

// progress returns the bytes that were written plus the bytes that have come to the
// disk.
func (w *writeback) progress() int64 {
	w.spare.mutex.Lock()
	defer w.spare.mutex.Unlock()
	written := w.size - w.left
	return written + written - w.held
}

// pace waits until the file is less than its lead ahead of the disk.
func (w *writeback) pace(ctx context.Context) error {
	return w.paceUnless(ctx, func() bool { return false })
}

// paceUnless is pace for a writer that may not wait when it is hurried. The caller wakes it then.
func (w *writeback) paceUnless(ctx context.Context, hurried func() bool) error {
	defer context.AfterFunc(ctx, w.wake)()
	w.spare.mutex.Lock()
	defer w.spare.mutex.Unlock()
	w.wait(func() bool { return w.held < w.lead || ctx.Err() != nil || hurried() })
	return ctx.Err()
}

// take must be called before bytes are written. It waits while the file has its lead
// and the spare memory is used up.
func (w *writeback) take(bytes int64) {
	w.spare.mutex.Lock()
	defer w.spare.mutex.Unlock()
	w.wait(func() bool { return w.held < w.lead || w.spare.used < w.spare.bytes })
	w.hold(bytes)
}

// wait waits until less is held. It returns at once if the file has failed.
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

// hold counts bytes that come into the page cache, or leave it.
func (w *writeback) hold(bytes int64) {
	before := max(0, w.held-w.lead)
	w.held += bytes
	w.spare.used += max(0, w.held-w.lead) - before
	if bytes < 0 {
		w.spare.changed.Broadcast()
	}
}

// wrote notes that a range of the file has been written.
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

// sent are the dirty bytes of a window that are on their way to the disk.
type sent struct{ number, bytes int64 }

// run writes windows back. It waits for the oldest window if too many are under way, or
// if there is nothing else to do.
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

// next returns a window to write back. It prefers a full one. If a writer waits and all
// full windows are on the disk, it returns any window with dirty bytes. If idle, it
// waits for a window. Once the file is closed, there are no more.
func (w *writeback) next(idle bool) (next sent, more bool) {
	w.spare.mutex.Lock()
	defer w.spare.mutex.Unlock()
	for w.err == nil {
		if len(w.full) > 0 {
			number := w.full[0]
			w.full = w.full[1:]
			if w.windows[number].dirty > 0 { // 0 if all of it was sent while a writer waited
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

// hurried reports whether writers fill the page cache as fast as they can. Forgetting
// takes the same locks as they do, and can be done when the file is complete.
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

// fail gives the file up if there is an error.
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

// failed returns the first error.
func (w *writeback) failed() error {
	w.spare.mutex.Lock()
	defer w.spare.mutex.Unlock()
	return w.err
}

// close waits for all full windows. Nothing may be written any more.
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
	return startWriting(f.File, offset, bytes)
}

// finish advises the kernel to forget; a file system may ignore that.
func (f fileOnDisk) finish(offset, bytes int64, isOver bool) error {
	err := awaitWriting(f.File, offset, bytes)
	if isOver {
		forget(f.File, offset, bytes)
	}
	return err
}
