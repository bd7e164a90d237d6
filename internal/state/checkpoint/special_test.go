//go:build linux

package checkpoint

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/state/checkpoint/shardtest"
)

// eachSpecial replaces a file by each kind of file that is no document, tries, and puts
// the file back. Some kinds may be left out.
func eachSpecial(t *testing.T, path string, try func() error, without ...string) {
	t.Helper()
	kept := filepath.Join(t.TempDir(), "kept")
	if err := os.Rename(path, kept); err != nil {
		t.Fatal(err)
	}
	for kind, make := range filestest.Special {
		if slices.Contains(without, kind) {
			continue
		}
		if err := make(path); err != nil {
			t.Fatal(err)
		}
		err := try()
		var input *fault.Input
		if !errors.As(err, &input) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s is %s: %v", filepath.Base(path), kind, err)
		}
		for _, made := range []string{path, path + ".pipe"} {
			if err := os.RemoveAll(made); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := os.Rename(kept, path); err != nil {
		t.Fatal(err)
	}
}

func TestSpecialFilesInACheckpoint(t *testing.T) {
	s := newSpoiled(t)
	for _, name := range s.files {
		eachSpecial(t, filepath.Join(s.path, name), s.verify)
	}
	if err := s.verify(); err != nil {
		t.Fatal(err)
	}
}

// TestSpecialFilesInASave puts special files where a commit looks for manifests and data,
// and where a rank is about to save.
func TestSpecialFilesInASave(t *testing.T) {
	directory := t.TempDir()
	s := newShard(t, 0, 1, shardtest.SplitFormat, 100,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Mixed(shardtest.SplitFormat.Moments))[0])
	train(t, []Shard{s}, 1, 2)
	writeShard(t, directory, s)
	folder := filepath.Join(directory, SavingPrefix+folderOf(s.State.Steps()))
	name := filepath.Join(folder, fileName(0, 1, s.Part))
	commit := func() error { _, err := Commit(directory, s.State.Steps(), s.Identity); return err }
	eachSpecial(t, name+manifestEnd, commit)
	eachSpecial(t, name+dataSuffix, commit)

	save := func() error { _, err := Save(directory, s, nil); return err }
	// A save writes over a sparse file. A loop is no file at all.
	eachSpecial(t, name+dataSuffix, save, "a sparse file", "a loop")
	eachSpecial(t, folder, save, "a directory")
	eachSpecial(t, folder, commit, "a directory")
}

// TestIndexNamesEachManifestOnce: an index that names a manifest twice is refused before
// any manifest is read. Here none exists.
func TestIndexNamesEachManifestOnce(t *testing.T) {
	directory := t.TempDir()
	x := &index{Schema: IndexSchema}
	for range 2 {
		x.Manifests = append(x.Manifests, stamp{"rank-00000-of-00001-bf16.json", 1, checksums{0}})
	}
	if err := writeSealed(filepath.Join(directory, indexName), x); err != nil {
		t.Fatal(err)
	}
	_, err := Open(directory)
	shardtest.MustSay(t, err, indexName, `"rank-00000-of-00001-bf16.json" is named twice`)
}
