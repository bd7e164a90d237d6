//go:build linux

package watch

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/samples"
)

// What recordings that nobody has asked for take.
const (
	// ringBytes is when a ring is written anew with what its recorder still has in memory.
	ringBytes = 8 << 20
	// keptRings are how many stay in a folder. One that was written to in the last hour may belong to a job that runs.
	keptRings = 8
	ringRests = time.Hour
	ringEnd   = ".jsonl"
	// ringQueue is how many records wait to be written, and ringPatience how long the end of a job waits for them.
	ringQueue    = 4096
	ringPatience = 5 * time.Second
)

// Ring is a file of a recording that nobody has asked for. It has the last samples and marks of a job, so that they
// outlive the job and its recorder, and it does not grow without end. The job never waits for it: a goroutine writes,
// and where the file system stands still, the recording ends.
type Ring struct {
	path     string
	most     int64 // bytes that are appended before the recorder renews the ring
	appended int64
	renewed  atomic.Int64 // bytes of what was written last at once
	work     chan func() error
	ended    chan error // what the goroutine ended with
	to       *os.File   // the goroutine's
}

// NewRing makes a ring in a folder, which it makes, too. Only the user may read them. Of older rings there a few stay.
func NewRing(folder string) (*Ring, error) {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, err
	}
	if err := dropOld(folder, time.Now()); err != nil {
		return nil, err
	}
	now := time.Now().UTC().Format("20060102-150405")
	name := fmt.Sprintf("%s-%s-%d%s", localHost().Name, now, os.Getpid(), ringEnd)
	r := &Ring{path: filepath.Join(folder, name), most: ringBytes, work: make(chan func() error, ringQueue),
		ended: make(chan error, 1)}
	var err error
	if r.to, err = openRing(r.path); err != nil {
		return nil, err
	}
	go r.write()
	return r, nil
}

func openRing(path string) (*os.File, error) {
	file, _, err := files.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	return file, err
}

// write does the work until there is no more, or until some of it fails.
func (r *Ring) write() {
	var err error
	for do := range r.work {
		if err == nil {
			err = do()
		}
	}
	r.ended <- errors.Join(err, r.to.Close())
}

// errRingBehind is the error of a ring whose file system does not keep up.
var errRingBehind = errors.New("the file system of the recording does not answer")

func (r *Ring) queue(do func() error) error {
	select {
	case r.work <- do:
		return nil
	default:
		return errRingBehind
	}
}

// Path is where the recording is.
func (r *Ring) Path() string { return r.path }

// Write appends to the recording, soon.
func (r *Ring) Write(text []byte) (int, error) {
	r.appended += int64(len(text))
	return len(text), r.queue(func() error {
		_, err := r.to.Write(text)
		return err
	})
}

// isFull reports whether the ring is to be renewed. Where a recorder keeps more than a ring has, it is renewed when as
// much was appended.
func (r *Ring) isFull() bool { return r.appended > max(r.most, r.renewed.Load()) }

// renew writes the recording anew, in one piece: whoever reads it finds the one before or this one.
func (r *Ring) renew(records []samples.Record) error {
	r.appended = 0
	return r.queue(func() error {
		beside := r.path + ".new"
		to, err := openRing(beside)
		if err != nil {
			return err
		}
		var text bytes.Buffer
		w := samples.NewWriter(&text)
		for i := range records {
			err = errors.Join(err, w.Write(&records[i]))
		}
		r.renewed.Store(int64(text.Len()))
		if _, failed := to.Write(text.Bytes()); err != nil || failed != nil {
			return errors.Join(err, failed, to.Close())
		}
		r.to.Close()
		r.to = to
		return os.Rename(beside, r.path)
	})
}

// Close ends the recording, which stays where it is.
func (r *Ring) Close() error {
	close(r.work)
	select {
	case err := <-r.ended:
		return err
	case <-time.After(ringPatience):
		return errRingBehind
	}
}

// Remove ends the recording, and leaves nothing of it.
func (r *Ring) Remove() error {
	if err := r.Close(); errors.Is(err, errRingBehind) {
		return err
	}
	return removeRing(r.path)
}

// removeRing removes a ring, and the snapshots that its ranks have written.
func removeRing(path string) error {
	var err error
	for _, s := range samples.SnapshotsOf(path) {
		err = errors.Join(err, os.Remove(s.Path))
	}
	return errors.Join(err, os.Remove(path))
}

// Rings are the recordings in a folder, the newest first.
func Rings(folder string) (paths []string) {
	for _, f := range ringsIn(folder) {
		paths = append(paths, filepath.Join(folder, f.Name()))
	}
	return paths
}

func ringsIn(folder string) (list []fs.FileInfo) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() && filepath.Ext(e.Name()) == ringEnd {
			list = append(list, info)
		}
	}
	slices.SortFunc(list, func(a, b fs.FileInfo) int {
		return cmp.Or(b.ModTime().Compare(a.ModTime()), cmp.Compare(b.Name(), a.Name()))
	})
	return list
}

// dropOld makes room for one ring more.
func dropOld(folder string, now time.Time) error {
	list := ringsIn(folder)
	for _, f := range list[min(keptRings-1, len(list)):] {
		if now.Sub(f.ModTime()) < ringRests {
			continue
		}
		if err := removeRing(filepath.Join(folder, f.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
