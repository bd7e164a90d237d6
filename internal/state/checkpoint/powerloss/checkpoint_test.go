//go:build linux

package powerloss

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

var model = []shardtest.Tensor{
	{Name: "embed.weight", Shape: []int64{40, 16}},
	{Name: "mlp.weight", Shape: []int64{16, 24}},
	{Name: "norm.weight", Shape: []int64{16}, Group: 1},
}

// job is the shards of two ranks.
type job []checkpoint.Shard

func newJob(t *testing.T) job {
	t.Helper()
	var j job
	cuts := shardtest.CutModel(model, shardtest.Alike(kernel.MomentsFP32), 600)
	for rank, pieces := range cuts {
		j = append(j, checkpoint.Shard{Rank: rank, World: len(cuts), Part: "bf16", Format: shardtest.SplitFormat,
			Pieces: pieces, State: shardtest.New(t, rank, shardtest.SplitFormat, 1024, shard.Sections(pieces))})
	}
	return j
}

// trained returns a job after some steps with gradients of a seed.
func trained(t *testing.T, seed uint64, steps int) job {
	t.Helper()
	j := newJob(t)
	for _, s := range j {
		shardtest.Train(t, s.State, seed, steps)
	}
	return j
}

// state is the state of each rank.
type state []map[ledger.Component][]byte

func (j job) state() state {
	var all state
	for _, s := range j {
		all = append(all, shardtest.Bytes(s.State))
	}
	return all
}

func (s state) equal(other state) bool {
	return slices.EqualFunc(s, other, func(a, b map[ledger.Component][]byte) bool {
		for component, bytes := range a {
			if !slices.Equal(bytes, b[component]) {
				return false
			}
		}
		return len(a) == len(b)
	})
}

// save saves all ranks side by side.
func (j job) save(t *testing.T, folder string) {
	t.Helper()
	var savings []*checkpoint.Saving
	for _, s := range j {
		saving, err := checkpoint.Save(folder, s, nil)
		if err != nil {
			t.Fatal(err)
		}
		savings = append(savings, saving)
	}
	for _, saving := range savings {
		if err := saving.Wait(); err != nil {
			t.Fatal(err)
		}
	}
}

// commit commits what was saved at a step.
func commit(t *testing.T, folder string, step int64) {
	t.Helper()
	if _, err := checkpoint.Commit(folder, step, ""); err != nil {
		t.Fatal(err)
	}
}

// saved is a checkpoint that was saved between two operations. Whoever saved it was told so with the latter.
type saved struct {
	step        int64
	begun, told int
	state       state
}

// TestCheckpoints saves checkpoints of two ranks, one of them twice, and begins another. After each loss of power those
// that were told of are there to the bit, any other is whole, and the job goes on to save.
func TestCheckpoints(t *testing.T) {
	t.Run("a file system that exchanges names", func(t *testing.T) { testCheckpoints(t, &recorder{}) })
	// Between two names there is no checkpoint: the next commit brings it back.
	t.Run("one that does not", func(t *testing.T) { testCheckpoints(t, &recorder{plain: true}) })
}

func testCheckpoints(t *testing.T, disk *recorder) {
	folder := disk.mount(t)
	all := saveSeveral(t, disk, folder)
	known, seen, next := reader{}, map[string]bool{}, trained(t, 3, 9)
	eachLoss(t, disk.log, 0, often(), func(t *testing.T, left string, operations int) {
		if !disk.plain {
			check(t, known, left, operations, all)
		}
		digest := digestOf(t, left)
		if seen[digest] && !disk.plain {
			return
		}
		seen[digest] = true
		commitAgain(t, left)
		check(t, known, left, operations, all)
		next.save(t, left)
		commit(t, left, 9)
		if got := known.read(t, left+"/step-00000009"); !got.equal(next.state()) {
			t.Error("the checkpoint that was saved next has other bits")
		}
		for _, e := range entries(t, left) {
			if strings.HasPrefix(e, ".") {
				t.Errorf("%s is left", e)
			}
		}
	})
}

// saveSeveral saves some checkpoints, and returns them in order.
func saveSeveral(t *testing.T, disk *recorder, folder string) (all []saved) {
	t.Helper()
	save := func(j job) {
		s := saved{step: j[0].State.Steps(), begun: disk.length(), state: j.state()}
		j.save(t, folder)
		commit(t, folder, s.step)
		s.told = disk.length()
		all = append(all, s)
	}
	save(trained(t, 1, 1))
	save(trained(t, 1, 2))
	save(trained(t, 1, 3))
	save(trained(t, 2, 3)) // in place of the one before
	begun := trained(t, 1, 4)
	all = append(all, saved{step: 4, begun: disk.length(), told: math.MaxInt, state: begun.state()})
	begun.save(t, folder)
	return all
}

// commitAgain commits all that was saved, as jobs do that die in a commit.
func commitAgain(t *testing.T, folder string) {
	t.Helper()
	for _, name := range entries(t, folder) {
		var step int64
		if _, err := fmt.Sscanf(name, checkpoint.SavingPrefix+"step-%d", &step); err == nil {
			_, _ = checkpoint.Commit(folder, step, "") // it may be incomplete
		}
	}
}

// check holds what is left to what was saved.
func check(t *testing.T, known reader, left string, operations int, all []saved) {
	t.Helper()
	there := map[string]bool{}
	for _, name := range entries(t, left) {
		if there[name] = true; strings.HasPrefix(name, ".") {
			continue
		}
		got := known.read(t, filepath.Join(left, name))
		if !slices.ContainsFunc(all, func(s saved) bool {
			return s.folder() == name && s.begun < operations && !s.replaced(all, operations) && s.state.equal(got)
		}) {
			t.Errorf("%s has bits that nobody has saved, or older ones", name)
		}
	}
	for _, s := range all {
		if s.told <= operations && !there[s.folder()] {
			t.Errorf("%s is gone, which was saved", s.folder())
		}
	}
}

// replaced reports whether another checkpoint of the step is known to have taken the place of this one.
func (s saved) replaced(all []saved, operations int) bool {
	return slices.ContainsFunc(all, func(other saved) bool {
		return other.step == s.step && other.begun > s.begun && other.told <= operations
	})
}

func (s saved) folder() string { return fmt.Sprintf("step-%08d", s.step) }

// reader has the states of checkpoints that it has read, by their bytes.
type reader map[string]state

// read returns the state that a checkpoint holds.
func (known reader) read(t *testing.T, path string) state {
	t.Helper()
	digest := digestOf(t, path)
	if known[digest] == nil {
		known[digest] = load(t, path)
	}
	return known[digest]
}

func load(t *testing.T, path string) state {
	t.Helper()
	c, err := checkpoint.Open(path)
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	if err := c.Verify(t.Context(), nil); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	j := newJob(t)
	for _, s := range j {
		if _, _, err := c.Load(t.Context(), s); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
	return j.state()
}

func entries(t *testing.T, folder string) (names []string) {
	t.Helper()
	list, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

// digestOf returns a digest of a file, or of the files in a folder and of their names.
func digestOf(t *testing.T, of string) string {
	t.Helper()
	sum := sha256.New()
	if err := filepath.WalkDir(of, func(path string, e fs.DirEntry, err error) error {
		fmt.Fprintln(sum, strings.TrimPrefix(path, of))
		if err != nil || e.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		fmt.Fprintln(sum, len(data))
		sum.Write(data)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return string(sum.Sum(nil))
}
