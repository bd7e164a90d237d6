package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
)

// Commit makes a checkpoint of the files that all ranks have saved at a step, in one
// instant, and returns its folder. All files must have the identity of the save.
// Commit may be called again: it then returns the existing checkpoint. It removes the
// leftovers of earlier attempts. The ranks in without have no state and save nothing:
// the model has too few parameters for all ranks.
func Commit(directory string, step int64, identity string, without ...int) (string, error) {
	saving, path := filepath.Join(directory, SavingPrefix+folderOf(step)), filepath.Join(directory, folderOf(step))
	switch alone, err := lockFolder(saving, alone); {
	case err == nil:
		defer alone.Close()
	case !errors.Is(err, fs.ErrNotExist):
		return "", Cause(saving, "", err)
	}
	if Exists(filepath.Join(saving, replacedMark)) { // a commit died before it removed this
		if err := discard(saving); err != nil {
			return "", err
		}
	}
	there, err := openFolder(path)
	switch {
	case err == nil && there.common().identity == identity && (identity != "" || !Exists(saving)):
	case Exists(saving):
		if err := writeIndex(saving, identity, without); err != nil {
			return "", err
		}
		if err := replace(saving, path); err != nil {
			return "", fmt.Errorf("%s: %w", path, err)
		}
	case err == nil:
		return "", otherSave(path, there.common().identity, identity)
	default:
		return "", &fault.Input{
			Where: fault.Position{File: directory},
			What:  fmt.Sprintf("nothing was saved here at step %d", step), Err: err,
		}
	}
	// For an existing checkpoint, too: its commit may have died just before this.
	if err := files.SyncFolder(directory); err != nil {
		return "", fmt.Errorf("%s: %w", directory, err)
	}
	return path, sweep(directory, step)
}

// otherSave returns the error for a file of another save than the one to commit.
func otherSave(path, found, expected string) error {
	return fault.File(path).Inputf("this is of save %q, but the commit is of save %q of the same step: another job "+
		"saves in this folder, or has left it here", found, expected).
		WithHint("give each job, and each optimizer of a program, a folder of its own; or remove this if no job " +
			"needs it, and save again")
}

// writeIndex writes the index of the files in a folder, if they are a complete
// checkpoint, and brings their names to the disk.
func writeIndex(folder, identity string, without []int) error {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return err
	}
	x := &index{Schema: IndexSchema, Identity: identity, Without: without}
	var saved []savedFile
	var left []string // by processes that died while they wrote a small file
	for _, e := range entries {
		name := e.Name()
		path := filepath.Join(folder, name)
		switch {
		case manifestName.MatchString(name):
			f, found, err := readManifest(path)
			if err != nil {
				return err
			}
			if f.of().Identity != identity {
				return otherSave(path, f.of().Identity, identity)
			}
			saved = append(saved, f)
			x.Manifests = append(x.Manifests, found)
			x.Bytes += f.size()
		case strings.HasPrefix(name, "."):
			left = append(left, path)
		case strings.HasSuffix(name, dataSuffix) && !Exists(strings.TrimSuffix(path, dataSuffix)+manifestEnd):
			return fault.File(path).Inputf("the checkpoint is not complete: this file was begun and not finished").
				WithHint("save that rank again")
		}
	}
	if len(saved) == 0 {
		return fault.File(folder).Inputf("the checkpoint is not complete: no rank has saved here")
	}
	c, err := assemble(folder, saved, without)
	if err != nil {
		return err
	}
	x.Step, x.World = c.Step(), c.World()
	if of, ok := c.(*Checkpoint); ok {
		x.Algorithm = of.Algorithm().String()
	}
	if want := SavingPrefix + folderOf(x.Step); filepath.Base(folder) != want {
		return Broken(folder, "the files are of step %d", x.Step)
	}
	for _, path := range left {
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	if err := writeSealed(filepath.Join(folder, indexName), x); err != nil {
		return err
	}
	return files.SyncFolder(folder)
}

// replace renames a folder. If an older checkpoint of the same step has that name,
// replace exchanges the two and removes the older.
func replace(folder, path string) error {
	err := os.Rename(folder, path)
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	if !Exists(filepath.Join(path, indexName)) {
		if removeFolder(path) == nil { // it was empty
			return replace(folder, path)
		}
		return fault.Inputf("the checkpoint cannot be put here: a folder of that name exists and is no checkpoint").
			WithHint("move it away and save again; add files of your own to a checkpoint once it is complete")
	}
	// The lock keeps saves away from the older checkpoint once it has the name of the
	// folder in which they write.
	older, err := lockFolder(path, alone)
	if err != nil {
		return err
	}
	defer older.Close()
	err = exchange(folder, path)
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOSYS) { // this file system cannot; NFS is one
		return replaceInTwo(folder, path)
	}
	if err != nil {
		return err
	}
	return discard(folder)
}

// replaceInTwo replaces a folder on a file system that cannot exchange two: for an
// instant there is none. Removing the older takes long, so it is renamed first and has
// no checkpoint's name meanwhile.
func replaceInTwo(folder, path string) error {
	gone, err := putAside(path)
	if err == nil {
		err = os.Rename(folder, path)
	}
	if err != nil {
		return err
	}
	return removeAside(gone)
}

// exchange marks the older of two folders and puts the newer in its place, in one
// instant. A folder of a save that has the mark was exchanged.
func exchange(newer, older string) error {
	mark, err := os.Create(filepath.Join(older, replacedMark))
	if err != nil {
		return err
	}
	if err := errors.Join(mark.Close(), files.SyncFolder(older)); err != nil {
		return err
	}
	return swap(newer, older)
}

// discard removes an exchanged folder. It renames the folder first: half removed and
// without its mark, it would pass for a save.
func discard(folder string) error {
	gone, err := putAside(folder)
	if err != nil {
		return err
	}
	return removeAside(gone)
}

// putAside gives a folder the name of a folder that is being removed.
func putAside(folder string) (gone string, err error) {
	gone = filepath.Join(filepath.Dir(folder), discardedPrefix+strings.TrimPrefix(filepath.Base(folder), SavingPrefix))
	return gone, errors.Join(removeAside(gone), os.Rename(folder, gone))
}

// removeAside removes a folder that was put aside, once its name is on the disk. File systems need not keep the order
// of names in different folders: after a loss of power the folder may have its old name again, which must not stand for
// half of a checkpoint.
func removeAside(gone string) error {
	if !Exists(gone) {
		return nil
	}
	if err := files.SyncFolder(filepath.Dir(gone)); err != nil {
		return err
	}
	return os.RemoveAll(gone)
}

// sweep removes folders that were begun before a step and never became a checkpoint,
// and checkpoints that were replaced.
func sweep(directory string, step int64) error {
	entries, err := os.ReadDir(directory)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), discardedPrefix) || begunBefore(e.Name(), step) {
			if err := os.RemoveAll(filepath.Join(directory, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// begunBefore reports whether an earlier step was saved in a folder.
func begunBefore(name string, step int64) bool {
	name, saving := strings.CutPrefix(name, SavingPrefix)
	number := stepName.FindStringSubmatch(name)
	if !saving || number == nil {
		return false
	}
	n, err := strconv.ParseInt(number[1], 10, 64)
	return err == nil && n < step
}
