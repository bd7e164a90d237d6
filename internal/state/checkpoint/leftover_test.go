//go:build linux

package checkpoint

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
)

// TestClearLeftovers: a save that lacks room removes the leftovers of an earlier save of
// its rank, and nothing that may be of use.
func TestClearLeftovers(t *testing.T) {
	const own, other = "rank-00000-of-00002-bf16", "rank-00001-of-00002-bf16"
	files := func(names ...string) []string {
		for i, name := range names {
			if strings.HasPrefix(name, "rank-") {
				names[i] = name + dataSuffix
			}
		}
		return names
	}
	for name, c := range map[string]struct {
		folder      string
		there, left []string
		prepare     func(t *testing.T, folder string)
	}{
		"its own": {
			".saving-step-00000002",
			[]string{own + dataSuffix, own + manifestEnd, "." + own + manifestEnd + "123"}, nil, nil,
		},
		"of a later step, too": {".saving-step-00000099", files(own), nil, nil},
		"another rank's stays": {".saving-step-00000002", files(own, other), files(other), nil},
		"a job of another size": {
			".saving-step-00000002", files("rank-00003-of-00007-bf16", "rank-00001-of-00001-fp32"), nil, nil,
		},
		"another part": {".saving-step-00000002", files("rank-00000-of-00002-fp32"),
			files("rank-00000-of-00002-fp32"), nil},
		"what no save writes": {".saving-step-00000002", []string{own + dataSuffix, "notes.txt"},
			[]string{"notes.txt"}, nil},
		"no folder of a save": {".saving-my-work", files(own), files(own), nil},
		"the step it is of":   {".saving-step-00000005", files(own), files(own), nil},
		"a checkpoint":        {"step-00000002", files(own), files(own), nil},
		"lacks but its name": {".saving-step-00000002", []string{own + dataSuffix, indexName},
			[]string{indexName, own + dataSuffix}, nil},
		"was replaced": {".saving-step-00000002",
			[]string{other + dataSuffix, indexName, replacedMark}, nil, nil},
		"removed half":       {".discarded-step-00000001", files(other), nil, nil},
		"the only one of it": {".discarded-step-00000002", files(other), files(other), nil},
		"is being written": {".saving-step-00000002", files(own, other), files(own, other),
			lockFile(other + dataSuffix)},
		"another writes there": {".saving-step-00000002", files(own), files(own), lockFile("")},
		"a pipe in its place": {".saving-step-00000002", files(own), files(own, other),
			func(t *testing.T, folder string) {
				if err := unix.Mkfifo(filepath.Join(folder, other+dataSuffix), 0o600); err != nil {
					t.Fatal(err)
				}
			}},
	} {
		t.Run(name, func(t *testing.T) {
			directory := t.TempDir()
			job := newJob(t, shardtest.SplitFormat, 700,
				shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 9000))
			job[0].State.SetSteps(5)
			put := func(folder string, names ...string) {
				if err := os.MkdirAll(filepath.Join(directory, folder), 0o755); err != nil {
					t.Fatal(err)
				}
				for _, name := range names {
					if err := os.WriteFile(filepath.Join(directory, folder, name), []byte("x"), 0o644); err != nil {
						t.Fatal(err)
					}
				}
			}
			put("step-00000001", indexName)
			put(c.folder, c.there...)
			if c.prepare != nil {
				c.prepare(t, filepath.Join(directory, c.folder))
			}
			removed := clearLeftovers(directory, job[0].owner(job[0].State.Steps()))
			var left []string
			if Exists(filepath.Join(directory, c.folder)) {
				left = filesOf(t, filepath.Join(directory, c.folder))
			}
			if strings.Join(left, " ") != strings.Join(c.left, " ") ||
				len(removed) > 0 != (len(c.left) < len(c.there)) {
				t.Errorf("it has left %v, want %v; it says that it has removed %v", left, c.left, removed)
			}
			if len(c.left) == 0 && Exists(filepath.Join(directory, c.folder)) {
				t.Error("the folder is left")
			}
		})
	}
}

// lockFile locks a file of a folder, or the folder itself, as its users do.
func lockFile(name string) func(t *testing.T, folder string) {
	return func(t *testing.T, folder string) {
		file, err := os.Open(filepath.Join(folder, name))
		if err != nil {
			t.Fatal(err)
		}
		how := unix.LOCK_EX
		if name == "" {
			how = unix.LOCK_SH
		}
		if err := unix.Flock(int(file.Fd()), how); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { file.Close() })
	}
}

// TestBrokenSavesLeaveRoom: on a disk with room for two checkpoints, saves go on after
// one that was never committed. The error names other leftovers that take room.
func TestBrokenSavesLeaveRoom(t *testing.T) {
	directory := t.TempDir()
	if err := unix.Mount("tmpfs", directory, "tmpfs", 0, "size=500k"); err != nil {
		if os.Getenv("CI") == "true" && os.Getuid() == 0 {
			t.Fatal(err)
		}
		t.Skip("no file system can be mounted here: ", err)
	}
	t.Cleanup(func() { unix.Unmount(directory, unix.MNT_DETACH) })
	job := newJob(t, shardtest.SplitFormat, 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32)))
	saveStep := func(step int64) (*Saving, error) {
		job[0].State.SetSteps(step)
		saving, err := Save(directory, job[0], nil)
		if err == nil {
			err = saving.Wait()
		}
		return saving, err
	}
	if _, err := saveStep(1); err != nil {
		t.Fatal(err)
	}
	if _, err := Commit(directory, 1, ""); err != nil {
		t.Fatal(err)
	}
	for step := int64(2); step < 6; step++ { // nobody commits them
		saving, err := saveStep(step)
		if err != nil {
			t.Fatal(err)
		}
		if removed := saving.Removed(); step > 2 &&
			(len(removed) != 1 || !strings.Contains(removed[0].Path, folderOf(step-1)) || removed[0].Bytes < 12*15649) {
			t.Errorf("step %d: removed are %v", step, removed)
		}
	}
	// Another part: the save cannot know whether a job is about to commit it.
	kept := filepath.Join(directory, SavingPrefix+folderOf(5))
	for _, suffix := range []string{dataSuffix, manifestEnd} {
		name := filepath.Join(kept, "rank-00000-of-00001-")
		if err := os.Rename(name+"bf16"+suffix, name+"other"+suffix); err != nil {
			t.Fatal(err)
		}
	}
	_, err := saveStep(6)
	for _, want := range []string{"the checkpoint takes 19", kept + " holds 19", "of an unfinished save",
		"remove the unfinished save if no job is writing it"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if got, want := strings.Join(filesOf(t, directory), " "), ".saving-step-00000005 step-00000001"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
