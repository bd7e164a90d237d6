//go:build linux

package checkpoint

import (
	"crypto/rand"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
)

// folderOnHosts returns the paths of a new folder on several hosts that mount its file
// system. Each host has its own caches.
func folderOnHosts(t *testing.T) []string {
	const variable = "PLIMSOLL_TEST_HOSTS" // the mount points, with : between
	mounts := filepath.SplitList(os.Getenv(variable))
	if len(mounts) < 2 {
		t.Skipf("%s names no two mount points of one file system", variable)
	}
	first, err := os.MkdirTemp(mounts[0], "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(first); err != nil {
			t.Error(err)
		}
	})
	var folders []string
	for _, mount := range mounts {
		folders = append(folders, filepath.Join(mount, filepath.Base(first)))
	}
	return folders
}

// TestHosts: a job whose ranks are on several hosts saves into one folder, twice at each
// step. A host may cache the content of the folder for up to a minute. The job must not
// mistake the cache for the folder.
func TestHosts(t *testing.T) {
	folders := folderOnHosts(t)
	cuts := shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 9000)
	jobs := [][]Shard{newJob(t, shardtest.SplitFormat, 700, cuts), newJob(t, shardtest.SplitFormat, 700, cuts)}
	loaded := newJob(t, shardtest.SplitFormat, 700, cuts)
	for i, job := range jobs {
		train(t, job, uint64(1+i), 1)
	}
	look := func(want []Shard) {
		t.Helper()
		for _, folder := range folders {
			c := load(t, folder, loaded)
			if err := c.Verify(t.Context(), nil); err != nil {
				t.Error(err)
			}
			for rank, s := range loaded {
				shardtest.EqualState(t, bytesOfState(s), bytesOfState(want[rank]))
			}
		}
	}
	for round := range 4 {
		for _, job := range jobs {
			identity := rand.Text()
			for rank, s := range job {
				s.Identity = identity
				saving, err := Save(folders[rank], s, nil)
				if err != nil {
					t.Fatal(err)
				}
				if err := saving.Wait(); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := Commit(folders[0], job[0].State.Steps(), identity); err != nil {
				t.Fatal(err)
			}
			if round < 2 {
				look(job)
			}
		}
		if round >= 2 {
			look(jobs[1])
		}
		for _, job := range jobs {
			for _, s := range job {
				step(t, s, 1)
			}
		}
	}
}

// TestHostsWriteOneFile: two jobs on two hosts save the same step in one folder. They do
// not write into each other's files.
func TestHostsWriteOneFile(t *testing.T) {
	folders := folderOnHosts(t)
	job := newJob(t, shardtest.SplitFormat, 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32)))
	train(t, job, 1, 1)
	writer := newTestWriter(t, folders[0], job[0])
	if _, err := Save(folders[1], job[0], nil); err == nil ||
		!strings.Contains(err.Error(), "another job is saving the same step") {
		t.Errorf("while another host writes: %v", err)
	}
	if err := writer.discard(); err != nil {
		t.Error(err)
	}
	save(t, folders[1], job, "")
}
