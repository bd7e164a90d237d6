//go:build linux

package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/state/states"
)

// restingStates returns states of a rank, each tensor with bytes of its own.
func restingStates(rank, world int, names ...string) (Resting, map[string][]byte) {
	random := rand.New(rand.NewPCG(uint64(rank), 1))
	r := Resting{Rank: rank, World: world, Part: "states", Step: 3, Read: func(int) {},
		Awaited: func() bool { return rank == 1 }}
	var regions [][]byte
	bytes := map[string][]byte{}
	for i, name := range names {
		c := states.Chunk{
			Tensors: []states.Tensor{
				{Name: name, Key: "codes", Type: dtype.U8, Shape: []int64{3, 5}},
				{Name: name, Key: "exp_avg", Type: dtype.F32, Shape: []int64{600, 701}, Offset: 256},
				{Name: name, Key: "none", Type: dtype.BF16, Shape: []int64{0, 4}, Offset: 1683200},
			},
			Scalars: []states.Scalar{{Name: name, Key: "step", Type: dtype.F32}},
			Bytes:   1683200,
		}
		region := make([]byte, c.Bytes)
		for j := range region {
			region[j] = byte(random.Uint32())
		}
		for _, t := range c.Tensors {
			bytes[t.Title()] = region[t.Offset : t.Offset+t.Bytes()]
		}
		r.Chunks, regions = append(r.Chunks, c), append(regions, region)
		r.Order, r.Scalars = append(r.Order, len(names)-1-i), append(r.Scalars, uint64(i+1)<<32|uint64(i+7))
	}
	r.Region = func(chunk int) []byte { return regions[chunk] }
	return r, bytes
}

// saveStates makes a checkpoint of the states of all ranks.
func saveStates(t *testing.T, directory string, ranks ...Resting) {
	t.Helper()
	for _, r := range ranks {
		saving, err := SaveStates(directory, r, []byte(fmt.Sprintf(`{"rank":%d}`, r.Rank)))
		if err == nil {
			err = saving.Wait()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Commit(directory, 3, ""); err != nil {
		t.Fatal(err)
	}
}

// loadStates loads the newest checkpoint into states as those that are given. It returns the tensors.
func loadStates(directory string, into Resting) (map[string][]byte, []uint64, string, error) {
	c, err := OpenStates(directory)
	if err != nil {
		return nil, nil, "", err
	}
	regions, scalars, found := make([][]byte, len(into.Chunks)), make([]uint64, len(into.Chunks)), map[string][]byte{}
	_, training, err := c.Load(context.Background(), Filling{
		Rank: into.Rank, World: into.World, Part: into.Part, Chunks: into.Chunks, Keeps: true,
		Begin: func(int64) ([][]byte, []uint64) {
			for i, chunk := range into.Chunks {
				regions[i] = make([]byte, chunk.Bytes)
				for _, tensor := range chunk.Tensors {
					found[tensor.Title()] = regions[i][tensor.Offset : tensor.Offset+tensor.Bytes()]
				}
			}
			return regions, scalars
		},
	})
	return found, scalars, string(training), err
}

// TestStatesComeBack loads into the same ranks, and into one rank where each tensor is in one file.
func TestStatesComeBack(t *testing.T) {
	directory := t.TempDir()
	first, firstBytes := restingStates(0, 2, "a", "b")
	second, secondBytes := restingStates(1, 2, "c")
	saveStates(t, directory, first, second)
	one, _ := restingStates(0, 1, "a", "b", "c")
	for _, test := range []struct {
		into    Resting
		want    []map[string][]byte
		scalars string
	}{
		{first, []map[string][]byte{firstBytes}, "[7 8]"},
		{second, []map[string][]byte{secondBytes}, "[7]"},
		{one, []map[string][]byte{firstBytes, secondBytes}, "[7 8 7]"},
	} {
		got, scalars, training, err := loadStates(directory, test.into)
		if err != nil || fmt.Sprint(scalars) != test.scalars || training != fmt.Sprintf(`{"rank":%d}`, test.into.Rank) {
			t.Fatalf("%v, training %s: %v", scalars, training, err)
		}
		for _, of := range test.want {
			for name, want := range of {
				if string(got[name]) != string(want) {
					t.Errorf("%s differs", name)
				}
			}
		}
	}
	c, err := OpenAny(directory)
	if err != nil {
		t.Fatal(err)
	}
	var read atomic.Int64
	err = c.Verify(context.Background(), func(bytes int64) { read.Add(bytes) })
	if err != nil || read.Load() != c.Bytes() || c.World() != 2 || c.Step() != 3 {
		t.Errorf("%d of %d bytes are verified: %v", read.Load(), c.Bytes(), err)
	}
	const want = "expected the state of an optimizer of the service"
	if _, err := Open(directory); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("a checkpoint of states is opened as one of shards: %v", err)
	}
}

// TestStatesOfSeveralRanksAreNotGuessed refuses what two ranks have, and a rank that is missing.
func TestStatesOfSeveralRanksAreNotGuessed(t *testing.T) {
	directory := t.TempDir()
	first, _ := restingStates(0, 2, "a")
	second, _ := restingStates(1, 2, "a")
	saving, err := SaveStates(directory, first, nil)
	if err != nil || saving.Wait() != nil {
		t.Fatal(err)
	}
	_, err = Commit(directory, 3, "")
	if err == nil || !strings.Contains(err.Error(), "the files of rank 1 of 2 are missing") {
		t.Errorf("a checkpoint without rank 1: %v", err)
	}
	saveStates(t, directory, first, second)
	one, _ := restingStates(0, 1, "a")
	const want = `2 of them have "a.codes", each with other numbers, so that nothing tells which of these rank 0 of 1`
	if _, _, _, err := loadStates(directory, one); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("one of two is taken: %v", err)
	}
	if _, _, _, err := loadStates(directory, second); err != nil {
		t.Error(err)
	}
}

// TestStatesOfReplicas loads what two ranks have saved alike, as with DistributedDataParallel, into other numbers of
// ranks.
func TestStatesOfReplicas(t *testing.T) {
	directory := t.TempDir()
	first, bytes := restingStates(0, 2, "a", "b")
	second := first
	second.Rank = 1
	saveStates(t, directory, first, second)
	for _, world := range []int{1, 2, 4} {
		for rank := range world {
			into, _ := restingStates(rank, world, "a", "b")
			got, scalars, _, err := loadStates(directory, into)
			if err != nil || fmt.Sprint(scalars) != "[7 8]" {
				t.Fatalf("rank %d of %d: %v: %v", rank, world, scalars, err)
			}
			for name, want := range bytes {
				if string(got[name]) != string(want) {
					t.Errorf("rank %d of %d: %s differs", rank, world, name)
				}
			}
		}
	}
}

// TestStatesUnderAnotherNameAreNamed tells a program which name its optimizer had.
func TestStatesUnderAnotherNameAreNamed(t *testing.T) {
	for _, test := range []struct{ saved, wanted, hint string }{
		{"first.states", "second.states",
			`part first.states has it: the optimizer that saved it had name="first"; give`},
		{"first.states", "states", `had name="first"; give this one the same name`},
		{"states", "second.states", `had no name; make this one without its name "second"`},
	} {
		directory := t.TempDir()
		saved, _ := restingStates(0, 1, "a")
		saved.Part = test.saved
		saveStates(t, directory, saved)
		wanted, _ := restingStates(0, 1, "a")
		wanted.Part = test.wanted
		_, _, _, err := loadStates(directory, wanted)
		var input *fault.Input
		if !errors.As(err, &input) || !strings.Contains(input.Hint, test.hint) {
			t.Errorf("%s as %s: %v", test.saved, test.wanted, err)
		}
	}
}

// TestDamagedStatesAreFound flips a bit at many places, one at a time.
func TestDamagedStatesAreFound(t *testing.T) {
	directory := t.TempDir()
	resting, _ := restingStates(0, 1, "a")
	saveStates(t, directory, resting)
	paths, err := filepath.Glob(filepath.Join(directory, "step-00000003", "*"))
	if err != nil || len(paths) != 3 {
		t.Fatal(paths, err)
	}
	random := rand.New(rand.NewPCG(1, 1))
	for i := range 60 {
		path := paths[i%3]
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		at := random.IntN(len(text))
		text[at] ^= 1 << random.IntN(8)
		err = os.WriteFile(path, text, 0o600)
		if err == nil {
			err = verifyStates(directory)
		}
		if err == nil {
			t.Fatalf("%s: nobody has noticed that byte %d is another", path, at)
		}
		text[at] ^= 0xff
		if again := os.WriteFile(path, text[:at], 0o600); again != nil || verifyStates(directory) == nil {
			t.Fatalf("%s: nobody has noticed that it ends at byte %d", path, at)
		}
		saveStates(t, directory, resting)
	}
	if err := verifyStates(directory); err != nil {
		t.Error(err)
	}
}

func verifyStates(directory string) error {
	c, err := OpenStates(directory)
	if err != nil {
		return err
	}
	return c.Verify(context.Background(), nil)
}

// FuzzStatesManifest: an accepted manifest describes a file whose tensors can all be found.
func FuzzStatesManifest(f *testing.F) {
	resting, _ := restingStates(0, 1, "a", "b")
	tensors := tensorsOf(resting.Chunks)
	m := &statesManifest{manifestHead: owner{0, 1, "states", "", 3}.head(StatesSchema), Header: 4096,
		HeaderSum: checksums{1}, Block: sumBlock, Tensors: tensors, Bytes: 4096}
	for i := range tensors {
		m.Bytes += tensors[i].bytes()
	}
	text, err := json.Marshal(m)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Fuzz(func(t *testing.T, text []byte) {
		file := &statesFile{path: "file", manifest: &statesManifest{}, byName: map[string]*tensorDocument{}}
		if json.Unmarshal(text, file.manifest) != nil || file.check() != nil {
			return
		}
		m, end := file.manifest, int64(0)
		for i := range m.Tensors {
			tensor := &m.Tensors[i]
			if tensor.offset != end || file.byName[tensor.Name] != tensor {
				t.Fatalf("%s is at %d, and %d bytes come before", tensor.Name, tensor.offset, end)
			}
			end += tensor.bytes()
		}
		if m.Header+end != m.Bytes {
			t.Fatal(errors.New("the tensors are not the file"))
		}
	})
}
