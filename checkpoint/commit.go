package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"plimsoll/fault"
)

// Commit makes the files that all ranks have saved at a step a checkpoint, in
// one instant, and returns its folder. It may be asked for again: a checkpoint
// that is there already is returned. What earlier attempts have left is removed.
func Commit(directory string, step int64) (string, error) {
	saving, path := filepath.Join(directory, savingPrefix+folderOf(step)), filepath.Join(directory, folderOf(step))
	if !exists(saving) {
		if _, err := openFolder(path); err != nil {
			return "", &fault.Input{Where: fault.Position{File: directory}, What: fmt.Sprintf("nothing was saved here at step %d", step), Err: err}
		}
		return path, nil
	}
	if err := writeIndex(saving); err != nil {
		return "", err
	}
	if err := replace(saving, path); err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	if err := syncFolder(directory); err != nil {
		return "", fmt.Errorf("%s: %w", directory, err)
	}
	return path, sweep(directory, step)
}

// writeIndex writes the index of the files that are there, if they are a
// checkpoint, and brings their names to the disk.
func writeIndex(folder string) error {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return err
	}
	x := &index{Schema: IndexSchema}
	var files []*file
	for _, e := range entries {
		name := e.Name()
		path := filepath.Join(folder, name)
		switch {
		case manifestName.MatchString(name):
			f, found, err := readManifest(path)
			if err != nil {
				return err
			}
			files = append(files, f)
			x.Manifests = append(x.Manifests, found)
			x.Bytes += f.manifest.Bytes
		case strings.HasPrefix(name, "."): // of a process that died while it wrote a small file
			if err := os.Remove(path); err != nil {
				return err
			}
		case strings.HasSuffix(name, dataSuffix) && !exists(strings.TrimSuffix(path, dataSuffix)+manifestEnd):
			return &fault.Input{Where: fault.Position{File: path}, What: "the checkpoint is not complete: this file was begun and not finished", Mend: "save that rank again"}
		}
	}
	if len(files) == 0 {
		return &fault.Input{Where: fault.Position{File: folder}, What: "the checkpoint is not complete: no rank has saved here"}
	}
	c, err := assemble(folder, files)
	if err != nil {
		return err
	}
	x.Step, x.World, x.Algorithm = c.step, c.World(), files[0].manifest.Algorithm
	if want := savingPrefix + folderOf(x.Step); filepath.Base(folder) != want {
		return broken(folder, "the files are of step %d", x.Step)
	}
	if err := writeSealed(filepath.Join(folder, indexName), x); err != nil {
		return err
	}
	return syncFolder(folder)
}

// replace puts a folder in a place, in which an older one of the same step may
// be: then the two are exchanged, and the older goes.
func replace(folder, path string) error {
	err := os.Rename(folder, path)
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	err = unix.Renameat2(unix.AT_FDCWD, folder, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) { // not on this file system, as on NFS
		if err := os.RemoveAll(path); err != nil {
			return err
		}
		return os.Rename(folder, path)
	}
	if err != nil {
		return err
	}
	return os.RemoveAll(folder)
}

// sweep removes what was begun before a step and never became a checkpoint.
func sweep(directory string, step int64) error {
	entries, err := os.ReadDir(directory)
	if err != nil {
		return err
	}
	for _, e := range entries {
		name, saving := strings.CutPrefix(e.Name(), savingPrefix)
		number := stepName.FindStringSubmatch(name)
		if !saving || number == nil {
			continue
		}
		if n, err := strconv.ParseInt(number[1], 10, 64); err == nil && n < step {
			if err := os.RemoveAll(filepath.Join(directory, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}
