//go:build linux

package checkpoint

import (
	"bufio"
	"crypto/sha256"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
)

// TestSaveWhileStepsRun: a save holds the state of its beginning, whatever steps change
// meanwhile.
func TestSaveWhileStepsRun(t *testing.T) {
	for name, f := range map[string]kernel.Format{
		"split": shardtest.SplitFormat,
		"fp32":  shardtest.Format(kernel.Adam, kernel.FP32, kernel.MomentsBF16, dtype.F16),
		"int8":  shardtest.Format(kernel.Adam, kernel.Split, kernel.MomentsInt8, dtype.BF16),
	} {
		t.Run(name, func(t *testing.T) {
			directory := t.TempDir()
			cuts := shardtest.CutModel(largerModel, shardtest.Mixed(f.Moments))
			job := newJob(t, f, 256, cuts)
			train(t, job, 1, 1)
			loaded := newJob(t, f, 256, cuts)
			for range 10 {
				before := bytesOfState(job[0])
				saving, err := Save(directory, job[0], nil)
				if err != nil {
					t.Fatal(err)
				}
				for range 3 {
					step(t, job[0], 1)
				}
				if err := saving.Wait(); err != nil {
					t.Fatal(err)
				}
				if saving.Step() != job[0].State.Steps()-3 {
					t.Errorf("step %d is saved, and three later it is %d", saving.Step(), job[0].State.Steps())
				}
				path, err := Commit(directory, saving.Step(), "")
				if err != nil {
					t.Fatal(err)
				}
				load(t, path, loaded)
				shardtest.EqualState(t, bytesOfState(loaded[0]), before)
			}
		})
	}
}

var largerModel = []shardtest.Tensor{
	{"embed_tokens.weight", []int64{1000, 64}, 0},
	{"norm.weight", []int64{64}, 1},
	{"mlp.weight", []int64{64, 1024}, 0},
}

// childVariable names the folder that a child of the test saves in.
const childVariable = "PLIMSOLL_TEST_CHECKPOINTS"

func TestMain(m *testing.M) {
	if directory := os.Getenv(childVariable); directory != "" {
		trainForEver(directory)
	}
	os.Exit(m.Run())
}

// process is the failer of a child of the test: a failure ends the process.
type process struct{}

func (process) Helper()        {}
func (process) Cleanup(func()) {}
func (process) Fatalf(format string, arguments ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", arguments...)
	os.Exit(1)
}

const crashSeed = 77

func crashJob(f shardtest.Failer) []Shard {
	moments := shardtest.Format(kernel.Adam, kernel.Split, kernel.MomentsInt8, dtype.BF16)
	return newJob(f, moments, 4096, shardtest.CutModel(largerModel, shardtest.Mixed(moments.Moments), 70000))
}

// trainForEver goes on from the newest checkpoint, and saves every step while
// the next one runs. It says when a save begins.
func trainForEver(directory string) {
	var f process
	job := crashJob(f)
	if _, err := Open(directory); err == nil {
		load(f, directory, job)
	} else {
		train(f, job, crashSeed, 0)
	}
	for {
		var savings []*Saving
		for _, s := range job {
			saving, err := Save(directory, s, nil)
			if err != nil {
				f.Fatalf("%v", err)
			}
			savings = append(savings, saving)
		}
		fmt.Println("saving")
		for _, s := range job {
			step(f, s, crashSeed)
			fmt.Println("stepped")
		}
		for _, saving := range savings {
			if err := saving.Wait(); err != nil {
				f.Fatalf("%v", err)
			}
			fmt.Println("saved")
		}
		if _, err := Commit(directory, savings[0].Step(), ""); err != nil {
			f.Fatalf("%v", err)
		}
		fmt.Println("committed")
	}
}

// TestKilledAnywhere kills a process that trains and saves, again and again. The newest
// checkpoint is always complete and has the bits of its step.
func TestKilledAnywhere(t *testing.T) {
	kills := 200
	if testing.Short() {
		kills = 20
	}
	directory := t.TempDir()
	reference, loaded := crashJob(t), crashJob(t)
	train(t, reference, crashSeed, 0)
	newest, underway := int64(-1), 0
	for kill := range kills {
		killChild(t, directory, 1+rand.N(24))
		names := filesOf(t, directory)
		if slices.ContainsFunc(names, func(name string) bool { return strings.HasPrefix(name, SavingPrefix) }) {
			underway++
		}
		c, err := Open(directory)
		if err != nil {
			if newest < 0 && strings.Contains(err.Error(), "no complete checkpoint") {
				continue // killed before the first
			}
			t.Fatalf("kill %d: %v", kill, err)
		}
		if c.Step() < newest {
			t.Fatalf("kill %d: step %d was there, and now the newest is %d", kill, newest, c.Step())
		}
		newest = c.Step()
		load(t, directory, loaded)
		for reference[0].State.Steps() < newest {
			for _, s := range reference {
				step(t, s, crashSeed)
			}
		}
		if got, want := fingerprint(loaded), fingerprint(reference); got != want {
			t.Fatalf("kill %d: the checkpoint of step %d is not the state of that step", kill, newest)
		}
		for _, name := range names { // the disk is not for all of them
			if !strings.HasPrefix(name, SavingPrefix) && name != folderOf(newest) {
				if err := os.RemoveAll(filepath.Join(directory, name)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	t.Logf("%d of %d kills were while a checkpoint was being written; step %d was reached", underway, kills, newest)
	if underway < kills/4 || newest < int64(kills/4) {
		t.Errorf("%d of %d kills were while a checkpoint was being written, and step %d was reached",
			underway, kills, newest)
	}
}

// killChild starts a child and kills it soon after so many lines that say what it has
// done.
func killChild(t *testing.T, directory string, lines int) {
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), childVariable+"="+directory)
	child.Stderr = os.Stderr
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	for said := bufio.NewScanner(out); lines > 0 && said.Scan(); {
		lines--
	}
	if lines > 0 {
		t.Fatalf("the child ended: %v", child.Wait())
	}
	for range rand.N(1000) {
		runtime.Gosched()
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := child.Wait(); err == nil || child.ProcessState.Exited() {
		t.Fatalf("the child ended by itself: %v", child.ProcessState)
	}
}

// fingerprint returns a fingerprint of all state of a job.
func fingerprint(job []Shard) string {
	h := sha256.New()
	for _, s := range job {
		state := bytesOfState(s)
		for _, component := range slices.Sorted(maps.Keys(state)) {
			fmt.Fprintf(h, "%s %x\n", component, sha256.Sum256(state[component]))
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}
