package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Saving is a save of a shard that is under way.
type Saving struct {
	step    int64
	removed []Leftover
	back    *writeback
	cancel  context.CancelFunc
	done    chan struct{}
	err     error
}

// Save begins to write a shard as it is now, or this replica's share of it, and
// returns. No step may be under way. Later steps do not change what is written. The
// training document is the caller's own: [Checkpoint.Load] returns it.
//
// Save first checks that the directory exists, can be written to and has enough room.
// If it has too little, Save removes leftovers of broken-off saves before it gives up.
func Save(directory string, s Shard, training jsontext.Value) (*Saving, error) {
	whole, err := layoutOf(s)
	if err != nil {
		return nil, err
	}
	l, first, err := whole.share(s.Replica, s.Replicas)
	if err != nil {
		return nil, err
	}
	if training, err = checkTraining(training); err != nil {
		return nil, err
	}
	s.ownSteps = ownSteps(s)
	w, removed, err := withRoom(directory, s.owner(s.State.Steps()), func() (*writer, error) {
		return newWriter(directory, s, l, s.State.Steps(), training)
	})
	if err != nil {
		return nil, err
	}
	measureSpare()
	w.first = first
	x := w.save(s.State)
	x.removed = removed
	return x, nil
}

// checkTraining refuses a document that would make the manifest unreadable.
func checkTraining(training jsontext.Value) (jsontext.Value, error) {
	if len(training) == 0 {
		return nil, nil
	}
	if !training.IsValid() {
		return nil, fmt.Errorf("the training document is not valid JSON: %.40q", training)
	}
	return training, nil
}

// measureSpare measures the memory that steps may fill while files are written.
func measureSpare() {
	var bytes ledger.Bytes
	if root, _, err := host.Root(""); err == nil {
		bytes = host.SparePageCache(root)
	}
	pageCache.set(int64(bytes))
}

// save begins to write a shard, or the share of it that the file is for.
func (w *writer) save(state *engine.Shard) *Saving {
	ctx, cancel := context.WithCancel(context.Background())
	x := w.begun(w.manifest.Step, cancel)
	snapshot := state.Snapshot(func(at shard.Chunk, chunk kernel.Chunk) error {
		first := at.First - w.first
		if !w.layout.Range().Contains(first) {
			return nil // another replica writes it
		}
		return w.write(first, chunk)
	})
	go x.run(w.dataFile, func() error { return snapshot.Run(ctx, w.back.pace) })
	return x
}

// begun returns a save that can be cancelled.
func (w *dataFile) begun(step int64, cancel context.CancelFunc) *Saving {
	return &Saving{step: step, back: w.back, cancel: cancel, done: make(chan struct{})}
}

// run writes the data, and then finishes the file or discards it.
func (x *Saving) run(w *dataFile, write func() error) {
	defer close(x.done)
	defer x.cancel()
	err := write()
	if err == nil {
		err = w.finish()
	}
	if err != nil {
		x.err = errors.Join(err, w.discard())
	}
}

// Step returns the step whose state is written.
func (x *Saving) Step() int64 { return x.step }

// Removed returns the leftovers of broken-off saves that this save has removed to have
// room.
func (x *Saving) Removed() []Leftover { return x.removed }

// Wait returns when the shard is on the disk, or has failed to get there. After a
// failure no file of it is left.
func (x *Saving) Wait() error {
	<-x.done
	return x.err
}

// Done returns a channel that is closed when Wait would return at once.
func (x *Saving) Done() <-chan struct{} { return x.done }

// Progress returns a number that grows while the file is written and while it comes to
// the disk.
func (x *Saving) Progress() int64 { return x.back.progress() }

// Cancel gives the save up. Wait returns soon.
func (x *Saving) Cancel() { x.cancel() }

// layoutOf returns the layout of a shard in memory.
func layoutOf(s Shard) (*layout, error) {
	if err := validateName(s.Rank, s.World, s.Part); err != nil {
		return nil, err
	}
	config := s.State.Config()
	if config.Format != s.Format {
		return nil, fmt.Errorf("rank %d, part %s: the state is held as %v, expected %v",
			s.Rank, s.Part, config.Format, s.Format)
	}
	l, err := newLayout(config.Layout, s.Pieces)
	if err != nil {
		return nil, fmt.Errorf("rank %d, part %s: %w", s.Rank, s.Part, err)
	}
	return l, nil
}

// savingFolder makes and locks the folder in which all ranks write. It removes files
// that a job of another size has left there, and the mark of a replaced checkpoint.
// Until the folder is closed, no commit makes a checkpoint of it: a file that is begun
// there later would be part of that checkpoint.
func savingFolder(directory string, step int64, world int) (*os.File, error) {
	info, err := os.Stat(directory)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fault.File(directory).Inputf("the folder for checkpoints does not exist").
			WithHint("make it: mkdir -p " + directory)
	case err != nil:
		return nil, Cause(directory, "", err)
	case !info.IsDir():
		return nil, fault.File(directory).Inputf("this is a file, expected a folder for checkpoints")
	case step < 0 || step > maxStep:
		return nil, fmt.Errorf("step %d, expected 0 to %d", step, int64(maxStep))
	}
	path := filepath.Join(directory, SavingPrefix+folderOf(step))
	var folder *os.File
	err = fs.ErrNotExist
	for tries := 0; errors.Is(err, fs.ErrNotExist) && tries < 100; tries++ { // a commit may rename it
		if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, Cause(directory, "checkpoints cannot be saved here", err)
		}
		folder, err = lockFolder(path, together)
	}
	if err != nil {
		return nil, Cause(path, "", err)
	}
	if err := removeOthers(path, world); err != nil {
		return nil, errors.Join(err, folder.Close())
	}
	return folder, nil
}

// removeOthers removes the files that a job of another size has left.
func removeOthers(folder string, world int) error {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return Cause(folder, "", err)
	}
	for _, e := range entries {
		otherJob := strings.HasPrefix(e.Name(), "rank-") && !strings.Contains(e.Name(), fmt.Sprintf("-of-%05d-", world))
		if otherJob || e.Name() == replacedMark {
			if err := os.Remove(filepath.Join(folder, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return Cause(folder, "the files left here by another job cannot be removed", err)
			}
		}
	}
	return nil
}
