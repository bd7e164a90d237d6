//go:build linux

package foreign

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/files"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
)

// onDisk is what a host would find after it has lost its power: of every file and folder, what toDisk has brought there
// last.
type onDisk struct {
	sync.Mutex
	found []broughtToDisk
}

type broughtToDisk struct {
	info    fs.FileInfo
	size    int64
	changed time.Time
	names   []string // of a folder
}

// watchDisk notes what is brought to the disk until the end of the test.
func watchDisk(t *testing.T) *onDisk {
	t.Helper()
	d, sync := &onDisk{}, files.ToDisk
	t.Cleanup(func() { files.ToDisk = sync })
	files.ToDisk = func(file *os.File) error {
		info, err := file.Stat()
		if err != nil {
			return err
		}
		now := broughtToDisk{info: info, size: info.Size(), changed: info.ModTime()}
		if info.IsDir() {
			now.names = namesIn(file.Name())
		}
		d.Lock()
		d.found = append(d.found, now)
		d.Unlock()
		return sync(file)
	}
	return d
}

func namesIn(folder string) (names []string) {
	entries, _ := os.ReadDir(folder)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// holds checks that all below a folder is on the disk as it is. A file that files.Replace or files.NewPending has
// written is there before it has its name.
func (d *onDisk) holds(t *testing.T, folder string) {
	t.Helper()
	err := filepath.WalkDir(folder, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		var last *broughtToDisk
		for i := range d.found {
			if os.SameFile(d.found[i].info, info) {
				last = &d.found[i]
			}
		}
		atOnce := strings.Contains(filepath.Ext(path), "json") || strings.HasPrefix(e.Name(), "latest") ||
			filepath.Ext(path) == ".torch"
		switch {
		case !e.IsDir() && atOnce:
		case last == nil:
			t.Errorf("%s was never brought to the disk", path)
		case e.IsDir() && !slices.Equal(last.names, namesIn(path)):
			t.Errorf("%s has %q on the disk, and is to have %q", path, last.names, namesIn(path))
		case !e.IsDir() && (last.size != info.Size() || !last.changed.Equal(info.ModTime())):
			t.Errorf("%s has changed since it was brought to the disk", path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestAllIsOnTheDisk: what the program has said to be saved or converted is still there when the host loses its power.
func TestAllIsOnTheDisk(t *testing.T) {
	d := watchDisk(t)
	job := newJob(t, shardtest.Format(kernel.Adam, kernel.FP32, kernel.MomentsFP32, dtype.BF16), 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 9000))
	train(t, job, 1, 1)
	directory := t.TempDir()
	in := func(name string) string { return filepath.Join(directory, name) }
	for _, name := range []string{"saved", "torch", "universal", "dcp"} {
		if err := os.Mkdir(in(name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	path := save(t, in("saved"), job, "")
	d.holds(t, in("saved"))
	save(t, in("saved"), job, "") // takes the place of the first
	d.holds(t, in("saved"))
	c, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, write := range map[string]func(to string) error{
		"torch":     func(to string) error { return WriteTorch(t.Context(), c, filepath.Join(to, "state.torch"), nil) },
		"universal": func(to string) error { return WriteUniversal(t.Context(), c, to, nil) },
		"dcp":       func(to string) error { return WriteDistributed(t.Context(), c, filepath.Join(to, "out"), nil) },
	} {
		if err := write(in(name)); err != nil {
			t.Fatal(err)
		}
		d.holds(t, in(name))
	}
}

// TestFilledTemplatesAreOnTheDisk: what is written in the copy of a template's file is there, too.
func TestFilledTemplatesAreOnTheDisk(t *testing.T) {
	d, folder := watchDisk(t), t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "numbers"), make([]byte, 8), 0o600); err != nil {
		t.Fatal(err)
	}
	o := &overwriter{folder: folder, open: map[string]*os.File{}}
	file, err := o.file(filepath.Join("template", "numbers"))
	if err == nil {
		_, err = file.WriteAt([]byte{1}, 3)
	}
	if err := errors.Join(err, o.finish(), files.SyncFolder(folder)); err != nil {
		t.Fatal(err)
	}
	d.holds(t, folder)
}

// TestDiskThatFails: a call that could not bring a file or folder to the disk says so.
func TestDiskThatFails(t *testing.T) {
	sync, failure := files.ToDisk, errors.New("the disk has failed")
	t.Cleanup(func() { files.ToDisk = sync })
	job := newJob(t, shardtest.Format(kernel.Adam, kernel.FP32, kernel.MomentsFP32, dtype.BF16), 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32)))
	train(t, job, 1, 1)
	var c *checkpoint.Checkpoint
	for name, write := range map[string]func(to string) error{
		"saved": func(to string) error {
			saving, err := checkpoint.Save(to, job[0], nil)
			if err == nil {
				err = saving.Wait()
			}
			if err == nil {
				_, err = checkpoint.Commit(to, 1, "")
			}
			return err
		},
		"torch":     func(to string) error { return WriteTorch(t.Context(), c, filepath.Join(to, "state.torch"), nil) },
		"universal": func(to string) error { return WriteUniversal(t.Context(), c, to, nil) },
		"dcp":       func(to string) error { return WriteDistributed(t.Context(), c, filepath.Join(to, "out"), nil) },
	} {
		var err error
		if c, err = checkpoint.Open(save(t, t.TempDir(), job, "")); err != nil {
			t.Fatal(err)
		}
		for failing, failed := 1, true; failed; failing++ {
			failed = false
			calls := 0
			files.ToDisk = func(file *os.File) error {
				if calls++; calls == failing {
					failed = true
					return failure
				}
				return sync(file)
			}
			if err := write(t.TempDir()); failed != errors.Is(err, failure) {
				t.Errorf("%s: call %d has failed: %v, and the error is %v", name, failing, failed, err)
			}
		}
		files.ToDisk = sync
	}
}
