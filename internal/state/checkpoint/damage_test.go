//go:build linux

package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// spoiled is a checkpoint that tests damage, and a job that has another state.
type spoiled struct {
	path   string
	files  []string
	others []Shard
	before []map[ledger.Component][]byte
	empty  []Shard
}

func newSpoiled(t *testing.T) *spoiled {
	f := shardtest.Format(kernel.Adam, kernel.Split, kernel.MomentsInt8, dtype.BF16)
	cuts := shardtest.CutModel(shardtest.SmallModel, shardtest.Mixed(f.Moments), 9000)
	job := newJob(t, f, 700, cuts)
	train(t, job, 1, 2)
	s := &spoiled{path: save(t, t.TempDir(), job, `{"epoch":1}`), others: newJob(t, f, 700, cuts),
		empty: newJob(t, f, 700, cuts)}
	train(t, s.others, 2, 3)
	for _, o := range s.others {
		s.before = append(s.before, bytesOfState(o))
	}
	entries, err := os.ReadDir(s.path)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		s.files = append(s.files, e.Name())
	}
	if len(s.files) != 5 {
		t.Fatalf("the checkpoint has the files %v", s.files)
	}
	return s
}

// verify opens and verifies.
func (s *spoiled) verify() error {
	c, err := Open(s.path)
	if err != nil {
		return err
	}
	return c.Verify(context.Background(), nil)
}

// loads loads all ranks. The state of a rank that cannot be loaded must not change.
func (s *spoiled) loads(t shardtest.Failer) error {
	t.Helper()
	c, err := Open(s.path)
	if err != nil {
		return err
	}
	var all error
	for rank, o := range s.others {
		if _, _, err := c.Load(context.Background(), o); err != nil {
			shardtest.EqualState(t, bytesOfState(o), s.before[rank])
			if o.State.Steps() != 3 {
				t.Fatalf("the state was not loaded, and is at step %d", o.State.Steps())
			}
			all = errors.Join(all, err)
		} else {
			train(t, s.others[rank:rank+1], 2, 0)
			restore(o, s.before[rank])
		}
	}
	return all
}

// restore gives a shard a state back.
func restore(s Shard, state map[ledger.Component][]byte) {
	for component, bytes := range state {
		copy(s.State.Arena(component).Bytes(), bytes)
	}
	s.State.SetSteps(3)
}

// loadsNew loads all ranks into shards that hold nothing. They may be filled in part.
func (s *spoiled) loadsNew(t shardtest.Failer) error {
	t.Helper()
	c, err := Open(s.path)
	if err != nil {
		return err
	}
	var all error
	for rank, o := range s.empty {
		_, _, err := c.LoadNew(context.Background(), o)
		if err != nil && !errors.Is(err, ErrPartial) {
			t.Fatalf("rank %d: %v does not say that the state is loaded in part", rank, err)
		}
		all = errors.Join(all, err)
	}
	return all
}

var between = regexp.MustCompile(`between bytes (\d+) and (\d+): `)

// TestEveryFlippedBitIsFound: the error names the file. For a bit of the data it also
// names the place and the parameter.
func TestEveryFlippedBitIsFound(t *testing.T) {
	s := newSpoiled(t)
	if err := s.verify(); err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.SampledFrom(s.files).Draw(t, "file")
		path := filepath.Join(s.path, name)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		at := rapid.IntRange(0, len(text)-1).Draw(t, "byte")
		bit := byte(1) << rapid.IntRange(0, 7).Draw(t, "bit")
		shardtest.Poke(t, path, at, text[at]^bit)
		defer shardtest.Poke(t, path, at, text[at])

		err = s.verify()
		shardtest.MustSay(t, err, name)
		if strings.HasSuffix(name, dataSuffix) {
			found := between.FindStringSubmatch(err.Error())
			if found == nil {
				t.Fatalf("%v does not say where", err)
			}
			from, _ := strconv.Atoi(found[1])
			end, _ := strconv.Atoi(found[2])
			if at < from || at >= end {
				t.Fatalf("byte %d was changed, and %v", at, err)
			}
		}
		loaded := s.loads(t)
		// A load does not need the header.
		if header := strings.Contains(err.Error(), "the header"); (loaded == nil) != header {
			t.Fatalf("verify says %v, and load %v", err, loaded)
		}
		if anew := s.loadsNew(t); (anew == nil) != (loaded == nil) {
			t.Fatalf("load says %v, and into an empty shard %v", loaded, anew)
		} else if anew != nil {
			shardtest.MustSay(t, anew, name)
		}
	})
}

func TestTruncatedAndMissingFilesAreFound(t *testing.T) {
	s := newSpoiled(t)
	for _, name := range s.files {
		path := filepath.Join(s.path, name)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, length := range []int{0, 1, len(text) / 2, len(text) - 1} {
			if err := os.WriteFile(path, text[:length], 0o644); err != nil {
				t.Fatal(err)
			}
			shardtest.MustSay(t, s.verify(), name)
			shardtest.MustSay(t, s.loads(t), name)
		}
		if err := os.WriteFile(path, append(text, 0), 0o644); err != nil {
			t.Fatal(err)
		}
		shardtest.MustSay(t, s.verify(), name)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if name == indexName {
			shardtest.MustSay(t, s.verify(), s.path, "no complete checkpoint")
		} else {
			shardtest.MustSay(t, s.verify(), name, "not complete", "no such file")
		}
		if err := os.WriteFile(path, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.verify(); err != nil {
		t.Error(err)
	}
}

func TestOpenTakesTheNewestComplete(t *testing.T) {
	directory := t.TempDir()
	_, err := Open(directory)
	shardtest.MustSay(t, err, directory, "no complete checkpoint is here")
	_, err = Open(filepath.Join(directory, "nothing"))
	shardtest.MustSay(t, err, "nothing", "no such file")

	job := newJob(t, shardtest.SplitFormat, 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 9000))
	train(t, job, 1, 2)
	save(t, directory, job, "")
	train(t, job, 1, 1)
	path := save(t, directory, job, "")
	// One that is only begun, and one that lost its index.
	train(t, job, 1, 1)
	if saving, err := Save(directory, job[0], nil); err != nil || saving.Wait() != nil {
		t.Fatal(err, saving.Wait())
	}
	if err := os.Mkdir(filepath.Join(directory, folderOf(9)), 0o755); err != nil {
		t.Fatal(err)
	}
	c, err := Open(directory)
	if err != nil || c.Path() != path || c.Step() != 3 {
		t.Fatalf("%+v, %v, want step 3", c, err)
	}
	_, err = Open(filepath.Join(directory, ".saving-"+folderOf(4)))
	shardtest.MustSay(t, err, "no complete checkpoint")
	// One that cannot be looked into is not passed over for an older one.
	if err := os.WriteFile(filepath.Join(directory, folderOf(12)), nil, 0o644); err != nil { // no folder
		t.Fatal(err)
	}
	if err := os.Symlink(indexName, filepath.Join(directory, folderOf(9), indexName)); err != nil { // to itself
		t.Fatal(err)
	}
	_, err = Open(directory)
	shardtest.MustSay(t, err, filepath.Join(folderOf(9), indexName), "symbolic links")
}

// TestRanksWithoutState: if a model has too few parameters for all ranks, ranks without
// state save nothing, and the commit names them.
func TestRanksWithoutState(t *testing.T) {
	job := newJob(t, shardtest.SplitFormat, 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 3000))
	train(t, job, 3, 2)
	saved := func() string {
		directory := t.TempDir()
		for _, s := range job {
			s.World = 4
			saving, err := Save(directory, s, nil)
			if err != nil || saving.Wait() != nil {
				t.Fatal(err, saving.Wait())
			}
		}
		return directory
	}
	for _, c := range []struct {
		without []int
		want    string
	}{
		{nil, "the files of ranks 2, 3 of 4 are missing"},
		{[]int{3}, "the files of rank 2 of 4 are missing"},
		{[]int{1, 2, 3}, "the index says that rank 1 has no state, but the rank has saved some"},
		{[]int{2, 3, 4}, "the index says that rank 4 of 4 has no state: expected a rank of the job"},
	} {
		_, err := Commit(saved(), 2, "", c.without...)
		shardtest.MustSay(t, err, c.want)
	}
	path, err := Commit(saved(), 2, "", 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	others := newJob(t, shardtest.SplitFormat, 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 3000))
	c := load(t, path, others)
	for i := range job {
		shardtest.EqualState(t, bytesOfState(others[i]), bytesOfState(job[i]))
	}
	for ranks, want := range map[int]int{0: 4, 3: 3} { // 0: as it is
		path, err := c.Convert(t.Context(), t.TempDir(), Conversion{Ranks: ranks}, nil)
		if err != nil {
			t.Fatal(err)
		}
		others := newJob(t, shardtest.SplitFormat, 700,
			shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 3000))
		if converted := load(t, path, others); converted.World() != want {
			t.Errorf("converted for %d ranks, it is of %d, want %d", ranks, converted.World(), want)
		}
		for i := range job {
			shardtest.EqualState(t, bytesOfState(others[i]), bytesOfState(job[i]))
		}
	}
}

func TestCommitWaitsForAllRanks(t *testing.T) {
	directory := t.TempDir()
	job := newJob(t, shardtest.SplitFormat, 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 3000, 6000, 9000))
	_, err := Commit(directory, 0, "")
	shardtest.MustSay(t, err, directory, "nothing was saved here at step 0")
	for i, rank := range []int{2, 0} {
		saving, err := Save(directory, job[rank], nil)
		if err != nil || saving.Wait() != nil {
			t.Fatal(err, saving.Wait())
		}
		_, err = Commit(directory, 0, "")
		shardtest.MustSay(t, err, []string{"ranks 0, 1, 3 of 4", "ranks 1, 3 of 4"}[i])
	}
	path := save(t, directory, job, "")
	if again, err := Commit(directory, 0, ""); err != nil || again != path {
		t.Errorf("once more: %s, %v", again, err)
	}
}

// TestCommitSweeps: a commit removes the leftovers of crashed saves, except of later
// steps, which may be under way.
func TestCommitSweeps(t *testing.T) {
	directory := t.TempDir()
	job := newJob(t, shardtest.SplitFormat, 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 9000))
	for _, step := range []int64{3, 5, 9} {
		job[0].State.SetSteps(step)
		if saving, err := Save(directory, job[0], nil); err != nil || saving.Wait() != nil {
			t.Fatal(err, saving.Wait())
		}
	}
	for _, s := range job {
		s.State.SetSteps(5)
	}
	// Of a job of another size that crashed at that step, and of a process that
	// was killed while it wrote a manifest.
	for _, name := range []string{"rank-00000-of-00007-bf16.safetensors", "rank-00000-of-00007-bf16.json",
		".rank-00000-of-00002-bf16.json123"} {
		if err := os.WriteFile(filepath.Join(directory, SavingPrefix+folderOf(5), name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	path := save(t, directory, job, "")
	if got, want := strings.Join(filesOf(t, directory), " "), ".saving-step-00000009 step-00000005"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got := filesOf(t, path); len(got) != 5 {
		t.Errorf("the checkpoint has the files %v", got)
	}
	// One that died before it had swept is asked for again.
	for _, name := range []string{".discarded-step-00000005", ".saving-step-00000003"} {
		if err := os.Mkdir(filepath.Join(directory, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Commit(directory, 5, ""); err != nil {
		t.Error(err)
	}
	if got, want := strings.Join(filesOf(t, directory), " "), ".saving-step-00000009 step-00000005"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func filesOf(t shardtest.Failer, directory string) []string {
	entries, err := os.ReadDir(directory)
	if err != nil {
		t.Fatalf("%v", err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestSameStepAgain replaces the checkpoint of a step by another.
func TestSameStepAgain(t *testing.T) {
	directory := t.TempDir()
	cuts := shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 9000)
	job := newJob(t, shardtest.SplitFormat, 700, cuts)
	train(t, job, 1, 1)
	save(t, directory, job, "")
	other := newJob(t, shardtest.SplitFormat, 700, cuts)
	train(t, other, 2, 1)
	save(t, directory, other, "")
	if got := filesOf(t, directory); len(got) != 1 {
		t.Errorf("the folder has %v", got)
	}
	loaded := newJob(t, shardtest.SplitFormat, 700, cuts)
	load(t, directory, loaded)
	shardtest.EqualState(t, bytesOfState(loaded[0]), bytesOfState(other[0]))
}

// twoOfAStep returns two states of one step, and a job to load either. The older is saved
// at a path.
func twoOfAStep(t *testing.T) (directory, path string, older, newer, loaded []Shard) {
	directory = t.TempDir()
	cuts := shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32))
	older, newer, loaded = newJob(t, shardtest.SplitFormat, 700, cuts), newJob(t, shardtest.SplitFormat, 700, cuts),
		newJob(t, shardtest.SplitFormat, 700, cuts)
	train(t, older, 1, 1)
	train(t, newer, 2, 1)
	return directory, save(t, directory, older, ""), older, newer, loaded
}

// TestCommitLeavesWhatIsNoCheckpoint: a commit does not take a program's own folder, named
// like a checkpoint, for an older checkpoint.
func TestCommitLeavesWhatIsNoCheckpoint(t *testing.T) {
	directory := t.TempDir()
	job := newJob(t, shardtest.SplitFormat, 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32)))
	folder := filepath.Join(directory, folderOf(0))
	weights := filepath.Join(folder, "model.pt")
	if err := errors.Join(os.Mkdir(folder, 0o755), os.WriteFile(weights, []byte("weights"), 0o644)); err != nil {
		t.Fatal(err)
	}
	writeShard(t, directory, job[0])
	_, err := Commit(directory, 0, "")
	shardtest.MustSay(t, err, folder, "a folder of that name exists and is no checkpoint", "move it away")
	if _, err := os.Stat(weights); err != nil {
		t.Error(err)
	}
	if err := os.Remove(weights); err != nil {
		t.Fatal(err)
	}
	if _, err := Commit(directory, 0, ""); err != nil { // nothing is lost with an empty folder
		t.Error(err)
	}
}

// TestCommitAfterACrash: a checkpoint that was exchanged for an older one of its
// step stays, when the process died before the older was removed.
func TestCommitAfterACrash(t *testing.T) {
	directory, path, older, newer, loaded := twoOfAStep(t)
	saving := filepath.Join(directory, SavingPrefix+folderOf(1))
	crash := func() {
		writeShard(t, directory, newer[0])
		if err := writeIndex(saving, "", nil); err != nil {
			t.Fatal(err)
		}
		if err := exchange(saving, path); err != nil {
			if os.Getenv("CI") == "true" {
				t.Fatal(err)
			}
			t.Skip("folders cannot be exchanged here: ", err)
		}
	}
	commit := func(want []Shard) {
		t.Helper()
		if _, err := Commit(directory, 1, ""); err != nil {
			t.Fatal(err)
		}
		if got := filesOf(t, directory); len(got) != 1 {
			t.Errorf("the folder has %v", got)
		}
		load(t, directory, loaded)
		shardtest.EqualState(t, bytesOfState(loaded[0]), bytesOfState(want[0]))
	}
	crash()
	commit(newer)
	crash()
	writeShard(t, directory, older[0]) // over what the crash has left
	commit(older)
}

// TestReplaceInTwo: if two folders cannot be exchanged, the older checkpoint is never
// there in part. A process that looks all the time sees either checkpoint, or for an
// instant none.
func TestReplaceInTwo(t *testing.T) {
	directory, path, _, newer, loaded := twoOfAStep(t)
	for i := range 3000 { // that take a while to be removed
		if err := os.WriteFile(filepath.Join(path, fmt.Sprintf("other-%d", i)), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	writeShard(t, directory, newer[0])
	saving := filepath.Join(directory, SavingPrefix+folderOf(1))
	if err := errors.Join(writeIndex(saving, "", nil),
		os.MkdirAll(filepath.Join(directory, discardedPrefix+folderOf(1), "left"), 0o755)); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() { done <- replaceInTwo(saving, path) }()
	for replaced := false; !replaced; {
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			replaced = true
		default:
		}
		if held := len(filesOf(t, directory)); held == 0 {
			t.Fatal("nothing is left")
		}
		before, _ := os.Stat(path)
		files, err := os.ReadDir(path)
		after, _ := os.Stat(path) // the same, or it was another that was read
		if err == nil && before != nil && after != nil && os.SameFile(before, after) && len(files) != 3 &&
			len(files) != 3003 {
			t.Fatalf("a part of the older checkpoint is there: %d files", len(files))
		}
	}
	if got := filesOf(t, directory); len(got) != 1 {
		t.Errorf("the folder has %v", got)
	}
	load(t, directory, loaded)
	shardtest.EqualState(t, bytesOfState(loaded[0]), bytesOfState(newer[0]))
}

// writeShard saves a shard, and does not commit it.
func writeShard(t *testing.T, directory string, s Shard) {
	t.Helper()
	saving, err := Save(directory, s, nil)
	if err == nil {
		err = saving.Wait()
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestSaveRefuses(t *testing.T) {
	directory := t.TempDir()
	job := newJob(t, shardtest.SplitFormat, 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 9000))
	_, err := Save(filepath.Join(directory, "nothing"), job[0], nil)
	shardtest.MustSay(t, err, "nothing", "does not exist", "mkdir -p")
	file := filepath.Join(directory, "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	_, err = Save(file, job[0], nil)
	shardtest.MustSay(t, err, file, "this is a file")
	pieces := func(change func([]shard.Piece) []shard.Piece) func(*Shard) {
		return func(s *Shard) { s.Pieces = change(slices.Clone(s.Pieces)) }
	}
	for says, change := range map[string]func(*Shard){
		`rank 2 of 2`:                      func(s *Shard) { s.Rank = 2 },
		`a job of 0 ranks`:                 func(s *Shard) { s.World = 0 },
		`part "a/b"`:                       func(s *Shard) { s.Part = "a/b" },
		`the state is held as`:             func(s *Shard) { s.Format.Gradient = dtype.BF16 },
		`the ranges have 8000 elements`:    pieces(func(p []shard.Piece) []shard.Piece { p[0].Count = 8000; return p }),
		`has no name`:                      pieces(func(p []shard.Piece) []shard.Piece { p[0].Name = ""; return p }),
		`a name that is not UTF-8`:         pieces(func(p []shard.Piece) []shard.Piece { p[0].Name = "\xff"; return p }),
		`expected a range within the 9600`: pieces(func(p []shard.Piece) []shard.Piece { p[0].First = 9000; return p }),
		`the shape [300 -1]`: pieces(func(p []shard.Piece) []shard.Piece {
			p[0].Shape = []int64{300,
				-1}
			return p
		}),
		`than the shard, 9000`:            pieces(func(p []shard.Piece) []shard.Piece { p[0].Count = 9500; return p }),
		`of group 7 with fp32 moments do`: pieces(func(p []shard.Piece) []shard.Piece { p[0].Group = 7; return p }),
		`of group 0 with bf16 moments do`: pieces(func(p []shard.Piece) []shard.Piece {
			p[0].Moments = kernel.MomentsBF16
			return p
		}),
		`parameter "model.embed_tokens.weight" is listed twice`: pieces(func(p []shard.Piece) []shard.Piece {
			p[0].Count = 4500
			return append(p, p[0])
		}),
	} {
		s := job[0]
		change(&s)
		if _, err := Save(directory, s, nil); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v does not say %q", err, says)
		}
	}
	if got := filesOf(t, directory); len(got) != 1 {
		t.Errorf("what was refused has left %v", got)
	}
}

// TestNamesOfTensorsDiffer: a parameter that is named like the stream of another,
// or like what safetensors has beside tensors, would be in the file twice.
func TestNamesOfTensorsDiffer(t *testing.T) {
	for _, name := range []string{"a/exp_avg", "__metadata__"} {
		model := []shardtest.Tensor{{"a", []int64{4}, 0}, {name, []int64{4}, 0}}
		job := newJob(t, shardtest.SplitFormat, 700, shardtest.CutModel(model, shardtest.Alike(kernel.MomentsFP32)))
		if _, err := Save(t.TempDir(), job[0], nil); err == nil ||
			!strings.Contains(err.Error(), fmt.Sprintf("two tensors would have the name %q", name)) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestFullDisk leaves the older checkpoint and its disk as they are.
func TestFullDisk(t *testing.T) {
	directory := t.TempDir()
	if err := unix.Mount("tmpfs", directory, "tmpfs", 0, "size=2M"); err != nil {
		if os.Getenv("CI") == "true" && os.Getuid() == 0 {
			t.Fatal(err)
		}
		t.Skip("no file system can be mounted here: ", err)
	}
	t.Cleanup(func() { unix.Unmount(directory, unix.MNT_DETACH) })
	cuts := shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32))
	job := newJob(t, shardtest.SplitFormat, 700, cuts)
	train(t, job, 1, 1)
	path := save(t, directory, job, "")
	before := bytesOfState(job[0])
	step(t, job[0], 1)

	t.Run("before", func(t *testing.T) {
		if err := os.WriteFile(filepath.Join(directory, "other"), make([]byte, 1800<<10), 0o644); err != nil {
			t.Fatal(err)
		}
		_, err := Save(directory, job[0], nil)
		var full *DoesNotFit
		if !errors.As(err, &full) || full.Needed < 12*15649 || full.Available > 200<<10 ||
			!strings.Contains(err.Error(), directory) {
			t.Errorf("%v", err)
		}
	})
	t.Run("when the manifest is written", func(t *testing.T) {
		if err := os.Remove(filepath.Join(directory, "other")); err != nil {
			t.Fatal(err)
		}
		w := newTestWriter(t, directory, job[0])
		_ = os.WriteFile(filepath.Join(directory, "other"), make([]byte, 2<<20), 0o644) // all there is
		if err := writeAll(w, job[0]); err != nil {
			t.Fatal(err) // this room was taken before
		}
		err := w.finish()
		if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "rank-00000-of-00001-bf16.json") {
			t.Errorf("%v, want that the device is full, and the file", err)
		}
		if err := w.discard(); err != nil {
			t.Error(err)
		}
		if got := strings.Join(filesOf(t, directory), " "); got != "other step-00000001" {
			t.Errorf("the folder has %s", got)
		}
	})
	c, err := Open(directory)
	if err != nil || c.Path() != path {
		t.Fatalf("%v, %v, want %s", c, err, path)
	}
	loaded := newJob(t, shardtest.SplitFormat, 700, cuts)
	load(t, directory, loaded)
	shardtest.EqualState(t, bytesOfState(loaded[0]), before)
}

// newTestWriter begins to write a shard.
func newTestWriter(f shardtest.Failer, directory string, s Shard) *writer {
	l, err := layoutOf(s)
	if err != nil {
		f.Fatalf("%v", err)
	}
	w, err := newWriter(directory, s, l, s.State.Steps(), nil)
	if err != nil {
		f.Fatalf("%v", err)
	}
	return w
}

// writeAll writes every chunk, and gives an error of one.
func writeAll(w *writer, s Shard) error {
	errs := make(chan error, w.layout.Chunks)
	s.State.Each(func(at shard.Chunk, c kernel.Chunk) { errs <- w.write(at.First, c) })
	close(errs)
	for err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// TestFailedWriteLeavesNothing: every write fails, as the file is open for reading only.
func TestFailedWriteLeavesNothing(t *testing.T) {
	directory := t.TempDir()
	job := newJob(t, shardtest.SplitFormat, 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32)))
	w := newTestWriter(t, directory, job[0])
	readOnly, err := os.Open(w.file.Name())
	if err != nil {
		t.Fatal(err)
	}
	w.file.Close()
	w.file = readOnly
	if err := writeAll(w, job[0]); err == nil ||
		!strings.Contains(err.Error(), "rank-00000-of-00001-bf16.safetensors") {
		t.Errorf("%v does not name the file", err)
	}
	if err := w.discard(); err != nil {
		t.Error(err)
	}
	if got := filesOf(t, directory); len(got) != 0 {
		t.Errorf("a save that failed has left %v", got)
	}
}

// TestTwoSavesAtOnce: the second save is refused and does not damage the first.
func TestTwoSavesAtOnce(t *testing.T) {
	directory := t.TempDir()
	cuts := shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32))
	job, other := newJob(t, shardtest.SplitFormat, 700, cuts), newJob(t, shardtest.SplitFormat, 700, cuts)
	train(t, job, 1, 1)
	train(t, other, 2, 1)
	w := newTestWriter(t, directory, job[0])
	_, err := Save(directory, other[0], nil)
	shardtest.MustSay(t, err, "rank-00000-of-00001-bf16.safetensors",
		"another job is saving the same step in this folder")
	if err := errors.Join(writeAll(w, job[0]), w.finish()); err != nil {
		t.Fatal(err)
	}
	if _, err := Commit(directory, 1, ""); err != nil {
		t.Fatal(err)
	}
	loaded := newJob(t, shardtest.SplitFormat, 700, cuts)
	load(t, directory, loaded)
	shardtest.EqualState(t, bytesOfState(loaded[0]), bytesOfState(job[0]))
	save(t, directory, other, "") // afterwards it may
}

func TestCancel(t *testing.T) {
	directory := t.TempDir()
	job := newJob(t, shardtest.SplitFormat, 1,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32))) // many chunks
	saving, err := Save(directory, job[0], nil)
	if err != nil {
		t.Fatal(err)
	}
	saving.Cancel()
	if err := saving.Wait(); err == nil {
		t.Skip("it was done before")
	}
	if got := filesOf(t, directory); len(got) != 0 {
		t.Errorf("a save that was cancelled has left %v", got)
	}
	save(t, directory, job, "") // and another can begin
}

// TestCommitRefuses what is not all of one save: files of another save, and files that were begun and not finished.
func TestCommitRefuses(t *testing.T) {
	directory := t.TempDir()
	job := newJob(t, shardtest.SplitFormat, 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 9000))
	for _, rank := range job {
		if saving, err := Save(directory, rank, nil); err != nil || saving.Wait() != nil {
			t.Fatal(err, saving.Wait())
		}
	}
	_, err := Commit(directory, 0, "another")
	shardtest.MustSay(t, err, `but the commit is of save "another" of the same step`)
	begun := filepath.Join(directory, SavingPrefix+folderOf(0), "rank-00007-of-00008-bf16.safetensors")
	if err := os.WriteFile(begun, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	_, err = Commit(directory, 0, "")
	shardtest.MustSay(t, err, begun, "this file was begun and not finished")
}

func TestBegunBefore(t *testing.T) {
	for name, want := range map[string]bool{".saving-step-00000004": true, ".saving-step-00000005": false,
		".saving-step-00000006": false, "step-00000004": false, ".saving-other": false} {
		if got := begunBefore(name, 5); got != want {
			t.Errorf("%s: %t, want %t", name, got, want)
		}
	}
}
