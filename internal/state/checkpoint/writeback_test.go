//go:build linux

package checkpoint

import (
	"errors"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"plimsoll/internal/state/checkpoint/shardtest"
)

// stuckDisk brings nothing to the disk until it is released. It may fail then.
type stuckDisk struct {
	free chan struct{}
	once sync.Once
	err  error
}

func newStuckDisk(t *testing.T) *stuckDisk {
	d := &stuckDisk{free: make(chan struct{})}
	t.Cleanup(d.letGo)
	return d
}

func (d *stuckDisk) letGo() { d.once.Do(func() { close(d.free) }) }

func (d *stuckDisk) start(int64, int64) error { return nil }

func (d *stuckDisk) finish(int64, int64, bool) error {
	<-d.free
	return d.err
}

// stuckSave begins to save a shard to a stuck disk, with a given spare memory. The state
// has dozens of windows.
func stuckSave(t *testing.T, directory string, s Shard, spare int64) (*writer, *stuckDisk, *Saving) {
	w := newTestWriter(t, directory, s)
	disk := newStuckDisk(t)
	writeBackTo(t, w, disk, 32<<10, newSpare(spare))
	return w, disk, w.save(s.State)
}

// writeBackTo gives a writer another disk.
func writeBackTo(f shardtest.Failer, w *writer, disk disk, window int64, spare *spare) {
	if err := w.back.close(); err != nil {
		f.Fatalf("%v", err)
	}
	w.back = newWriteback(disk, w.manifest.Bytes, window, spare)
	w.back.take(w.manifest.Header)
	w.back.wrote(0, w.manifest.Header)
}

// ends waits for a step that must not wait for a disk.
func ends(t *testing.T, s Shard) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		s.State.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("the step waits for the disk")
	}
}

// stalls waits until a step waits for the disk, and returns the bytes held then.
func stalls(t *testing.T, w *writer, s Shard) int64 {
	t.Helper()
	for {
		w.back.spare.mutex.Lock()
		held, waiting := w.back.held, w.back.waiting
		w.back.spare.mutex.Unlock()
		if waiting >= len(s.State.Config().CPUs) {
			return held
		}
		if s.State.Steps() != w.manifest.Step {
			t.Fatal("the step did not wait")
		}
		runtime.Gosched()
	}
}

func underway(x *Saving) bool {
	select {
	case <-x.done:
		return false
	default:
		return true
	}
}

// TestStepsDoNotWaitForTheDisk while there is spare memory. They wait when it is used up,
// not before.
func TestStepsDoNotWaitForTheDisk(t *testing.T) {
	cuts := shardtest.CutModel(largerModel, shardtest.Alike(shardtest.SplitFormat.Moments))
	loaded := newJob(t, shardtest.SplitFormat, 256, cuts)
	for name, spare := range map[string]int64{"memory to spare": 1 << 40, "some": 256 << 10, "none": 0} {
		t.Run(name, func(t *testing.T) {
			directory := t.TempDir()
			s := newJob(t, shardtest.SplitFormat, 256, cuts)[0]
			train(t, []Shard{s}, 1, 1)
			want := bytesOfState(s)
			w, disk, saving := stuckSave(t, directory, s, spare)
			begin(t, s, 1)
			if spare < w.manifest.Bytes {
				held, most := stalls(t, w, s), w.back.lead+spare
				const chunks = 3 * 4 * 256 // of the workers and the saver, which may all have seen the last room
				if held < most || held >= most+chunks {
					t.Errorf("%d bytes are held, expected %d to %d", held, most, most+chunks)
				}
			} else {
				ends(t, s)
				begin(t, s, 1)
				ends(t, s)
			}
			if !underway(saving) {
				t.Error("the save did not wait for the disk")
			}
			disk.letGo()
			ends(t, s)
			if err := saving.Wait(); err != nil {
				t.Fatal(err)
			}
			if w.back.held != 0 || w.back.spare.used != 0 {
				t.Errorf("in the end %d bytes are held, %d of what is to spare", w.back.held, w.back.spare.used)
			}
			path, err := Commit(directory, saving.Step(), "")
			if err != nil {
				t.Fatal(err)
			}
			load(t, path, loaded)
			shardtest.EqualState(t, bytesOfState(loaded[0]), want)
		})
	}
}

// TestStepsOutliveTheDisk: a step that waits for a disk goes on when the disk
// fails, and so does one whose worker finds it full.
func TestStepsOutliveTheDisk(t *testing.T) {
	broken := errors.New("the disk is broken")
	for name, fails := range map[string]func(*writer, *stuckDisk){
		"while it waits": func(_ *writer, d *stuckDisk) { d.err = broken },
		"at once": func(w *writer, _ *stuckDisk) {
			if err := w.file.Close(); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			directory := t.TempDir()
			s := newJob(t, shardtest.SplitFormat, 256,
				shardtest.CutModel(largerModel, shardtest.Alike(shardtest.SplitFormat.Moments)))[0]
			train(t, []Shard{s}, 1, 1)
			w, disk, saving := stuckSave(t, directory, s, 0)
			begin(t, s, 1)
			stalls(t, w, s)
			fails(w, disk)
			disk.letGo()
			ends(t, s)
			if err := saving.Wait(); !errors.Is(err, broken) && !errors.Is(err, os.ErrClosed) {
				t.Errorf("%v, want what is wrong with the disk", err)
			}
			if got := filesOf(t, directory); len(got) != 0 {
				t.Errorf("a save that failed has left %s", strings.Join(got, " "))
			}
			step(t, s, 1)
		})
	}
}

// TestFilesShareWhatIsToSpare: each file has its own lead. Beyond the leads, files share
// the spare memory.
func TestFilesShareWhatIsToSpare(t *testing.T) {
	const size = 4 << 10
	shared := newSpare(3 * size)
	disk := newStuckDisk(t)
	a, b := newWriteback(disk, 100*size, size, shared), newWriteback(disk, 100*size, size, shared)
	write := func(w *writeback, from, end int64) {
		for at := from * size; at < end*size; at += size {
			w.take(size)
			w.wrote(at, size)
		}
	}
	write(a, 0, lead+3) // which is all
	write(b, 0, lead)
	more := make(chan struct{})
	go func() {
		write(b, lead, lead+1)
		close(more)
	}()
	for waiting := 0; waiting == 0; runtime.Gosched() {
		shared.mutex.Lock()
		waiting = b.waiting
		shared.mutex.Unlock()
		select {
		case <-more:
			t.Fatal("more was taken than there is to spare")
		default:
		}
	}
	disk.letGo()
	<-more
	for _, w := range []*writeback{a, b} {
		if err := w.close(); err != nil {
			t.Error(err)
		}
	}
	if shared.used != 0 {
		t.Errorf("%d bytes are used in the end", shared.used)
	}
}
