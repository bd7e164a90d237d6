package checkpoint

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
)

// A broken-off save leaves its files behind, with all the room that they take. A later
// commit removes them. If a later save has no room either, no commit comes: then that
// save removes the leftovers that its own rank may remove.
//
// It removes files of its own rank and part in folders of other steps: a rank that
// begins a save has given up its save before, which it has not committed. It also
// removes files of a job of another size, as a save does in its own folder.
//
// It does not touch a folder in which a process writes a file or makes a checkpoint. It
// tells by flock, so only if the file system has it. It does not touch a folder that
// holds a complete checkpoint, nor any file that no save has written.

// Leftover is a file or folder that a broken-off save or commit has left.
type Leftover struct {
	Path  string
	Bytes ledger.Bytes
}

// clearing lets one rank of this process at a time clear a folder. The next rank finds
// the room that the one before has freed.
var clearing sync.Mutex

// rankFile is the name of a file of a shard: without suffix, and the size of its job.
var rankFile = lazyregexp.New(`^\.?(rank-\d{5,7}-of-(\d{5,7})-[a-zA-Z0-9._-]{1,64})(\.safetensors|\.json\d*)$`)

// isFull reports whether a save has failed for want of room.
func isFull(err error) bool {
	var full *DoesNotFit
	return errors.As(err, &full) || errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// withRoom calls begin. If there is no room, it removes leftovers of broken-off
// saves, tries again, and returns the leftovers.
func withRoom[W any](directory string, of owner, begin func() (W, error)) (W, []Leftover, error) {
	w, err := begin()
	if !isFull(err) {
		return w, nil, err
	}
	clearing.Lock()
	defer clearing.Unlock()
	removed := clearLeftovers(directory, of)
	w, err = begin()
	var full *DoesNotFit
	if errors.As(err, &full) {
		full.Removed, full.Left = removed, leftovers(directory, of.step)
	}
	return w, removed, err
}

// leftovers returns the leftovers of other steps than the one that is being saved.
func leftovers(directory string, step int64) []Leftover {
	entries, err := os.ReadDir(directory)
	if err != nil {
		return nil // the save reports the error
	}
	var left []Leftover
	for _, e := range entries {
		isLeft := strings.HasPrefix(e.Name(), SavingPrefix) || strings.HasPrefix(e.Name(), discardedPrefix)
		if path := filepath.Join(directory, e.Name()); isLeft && e.IsDir() && e.Name() != SavingPrefix+folderOf(step) {
			left = append(left, Leftover{path, sizeOf(path)})
		}
	}
	return left
}

// sizeOf returns the room that the files in a folder, or one file, take.
func sizeOf(path string) ledger.Bytes {
	var bytes ledger.Bytes
	_ = filepath.WalkDir(path, func(name string, _ fs.DirEntry, err error) error {
		if err == nil {
			bytes += sizeOnDisk(name)
		}
		return nil
	})
	return bytes
}

// clearLeftovers removes the leftovers that it may remove, and returns them.
func clearLeftovers(directory string, of owner) []Leftover {
	var removed []Leftover
	for _, l := range leftovers(directory, of.step) {
		name := filepath.Base(l.Path)
		if step, discarded := strings.CutPrefix(name, discardedPrefix); discarded {
			// It was replaced if another checkpoint has its place.
			if Exists(filepath.Join(directory, step, indexName)) && os.RemoveAll(l.Path) == nil {
				removed = append(removed, l)
			}
			continue
		}
		if stepName.MatchString(strings.TrimPrefix(name, SavingPrefix)) {
			removed = append(removed, clearFolder(l, of)...)
		}
	}
	return removed
}

// clearFolder removes the files that it may remove from a folder of another step.
func clearFolder(l Leftover, of owner) []Leftover {
	folder, err := lockFolder(l.Path, alone|atOnce)
	if err != nil {
		return nil // a file is being begun there, or a checkpoint made
	}
	defer folder.Close()
	if Exists(filepath.Join(l.Path, replacedMark)) { // its commit died then: another has its place
		if discard(l.Path) != nil {
			return nil
		}
		return []Leftover{l}
	}
	entries, err := os.ReadDir(l.Path)
	if err != nil || Exists(filepath.Join(l.Path, indexName)) { // a complete checkpoint without its name
		return nil
	}
	var ours []string
	for _, e := range entries {
		path := filepath.Join(l.Path, e.Name())
		if strings.HasSuffix(e.Name(), dataSuffix) && !(e.Type().IsRegular() && isFree(path)) {
			return nil // a save is under way
		}
		if e.Type().IsRegular() && isLeftBy(e.Name(), of) {
			ours = append(ours, path)
		}
	}
	var removed []Leftover
	for _, path := range ours {
		gone := Leftover{path, sizeOf(path)}
		if os.Remove(path) == nil && strings.HasSuffix(path, dataSuffix) {
			removed = append(removed, gone)
		}
	}
	_ = os.Remove(l.Path) // succeeds if nothing else is in it
	return removed
}

// isLeftBy reports whether a file is of an earlier save of this rank and part, or of a
// job of another size.
func isLeftBy(name string, of owner) bool {
	parts := rankFile.FindStringSubmatch(name)
	if parts == nil {
		return false
	}
	world, err := strconv.Atoi(parts[2])
	return err == nil && (world != of.world || parts[1] == fileName(of.rank, of.world, of.part))
}

// isFree reports whether no process writes a file, as far as its file system can tell.
func isFree(path string) bool {
	file, _, err := files.OpenFile(path, os.O_WRONLY|noLink, 0)
	if err != nil {
		return false
	}
	defer file.Close()
	for err = syscall.EINTR; errors.Is(err, syscall.EINTR); {
		err = flock(file, alone|atOnce)
	}
	return err == nil
}
