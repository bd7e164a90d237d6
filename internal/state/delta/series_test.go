package delta

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
)

// training is a training of some steps, with the parameters after each, and what is known of its messages.
type training struct {
	pieces []Piece
	states []InMemory // after each step; the first is before all
	whole  []bool     // steps whose messages have all parameters
	gap    int        // the step that lacks a message; 0 is none
	cut    int        // the pieces of the first rank in the last step
}

// draw draws a training, and writes its messages into a folder. Ranks share the parameters, and in half of the
// trainings they share them otherwise in every step.
func draw(t *testing.T, r *rand.Rand, folder string) training {
	t.Helper()
	first := train(r, types[r.IntN(len(types))], 0, 0)
	tr := training{pieces: first.pieces, states: []InMemory{first.old}, whole: []bool{false}}
	steps := 2 + r.IntN(6)
	if r.IntN(3) == 0 {
		tr.gap = 1 + r.IntN(steps)
	}
	settled := r.IntN(2) == 0
	tr.cut = r.IntN(3)
	for step := 1; step <= steps; step++ {
		if !settled {
			tr.cut = r.IntN(3)
		}
		s := trained{tr.pieces, tr.states[step-1], first.copyOf(tr.states[step-1])}
		for i := range s.now {
			change(r, s.now[i], s.pieces[i].size(), 0.01, 0.1)
			s.now[i][0]++ // every parameter changes
		}
		whole := r.IntN(6) == 0
		tr.states, tr.whole = append(tr.states, s.now), append(tr.whole, whole)
		for shard, from := range []int{0, tr.cut} {
			to := []int{tr.cut, len(s.pieces)}[shard]
			if from == to || step == tr.gap && shard == 1 {
				continue
			}
			of := trained{s.pieces[from:to], s.old[from:to], s.now[from:to]}
			name := filepath.Join(folder, fmt.Sprintf("%06d-%d%s", step, shard, Extension))
			if err := os.WriteFile(name, of.messageOf(uint64(step), whole), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	return tr
}

// leads reports whether the messages lead a model from a step to another.
func (tr *training) leads(from, to int) bool {
	for step := to; step > from || from > to; step-- {
		switch {
		case step == 0 || step == tr.gap:
			return false
		case tr.whole[step]:
			return true
		}
	}
	return true
}

// TestSeriesLeadToEveryStep applies the messages of random trainings to a model of a random step: the file has what the
// trainer had, to the bit, or is as it was, and the error says why.
func TestSeriesLeadToEveryStep(t *testing.T) {
	t.Parallel()
	met, trainings := map[string]int{}, 60
	if !testing.Short() {
		trainings = 1000
	}
	for seed := range uint64(trainings) {
		r := rand.New(rand.NewPCG(seed, 1))
		folder := t.TempDir()
		tr := draw(t, r, folder)
		last := len(tr.states) - 1
		from, step := r.IntN(last+1), r.IntN(last+1)
		path := filepath.Join(t.TempDir(), "model")
		safetensors(t, path, tr.pieces, tr.states[from])
		before := readFile(t, path)
		got, err := Apply(Application{Messages: []string{folder}, Model: path, Step: uint64(step)})
		if step == 0 {
			if step = last; tr.gap == last && last > 1 {
				step--
			}
		}
		want := before
		switch {
		case tr.gap == step:
			if err == nil || !strings.Contains(err.Error(), "are missing") &&
				!strings.Contains(err.Error(), "no message leads to") {
				t.Fatalf("seed %d: to step %d, which lacks a message: %v", seed, step, err)
			}
			met["incomplete"]++
		case !tr.leads(from, step):
			if differs := "are not those after step"; err == nil || !strings.Contains(err.Error(), differs) {
				t.Fatalf("seed %d: from step %d to %d: %v", seed, from, step, err)
			}
			met["gap"]++
		default:
			if err != nil || got.Step != uint64(step) || (got.Applied == 0) != (from == step) {
				t.Fatalf("seed %d: from step %d to %d: %+v, %v", seed, from, step, got, err)
			}
			safetensors(t, path+".expected", tr.pieces, tr.states[step])
			want = readFile(t, path+".expected")
			met["led"]++
		}
		if !bytes.Equal(readFile(t, path), want) {
			t.Fatalf("seed %d: from step %d to %d: the file has other bytes (%v)", seed, from, step, err)
		}
		if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".*")); len(left) > 0 {
			t.Fatalf("seed %d: files were left: %v", seed, left)
		}
	}
	for _, kind := range []string{"led", "gap", "incomplete"} {
		if met[kind] < trainings/20 {
			t.Errorf("%d of %d trainings are of the kind %s: expected more", met[kind], trainings, kind)
		}
	}
}

// TestHalfAStepIsFinished gives a model the message of one rank alone, and then those of all.
func TestHalfAStepIsFinished(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	var tr training
	for seed := uint64(0); len(tr.states) < 4 || tr.gap != 0 || tr.cut == 0; seed++ {
		clear(t, folder)
		tr = draw(t, rand.New(rand.NewPCG(seed, 3)), folder)
	}
	last := len(tr.states) - 1
	path := filepath.Join(t.TempDir(), "model")
	safetensors(t, path, tr.pieces, tr.states[last-1])
	for _, messages := range []string{filepath.Join(folder, fmt.Sprintf("%06d-1%s", last, Extension)), folder} {
		if r, err := Apply(Application{Messages: []string{messages}, Model: path}); err != nil || r.Applied != 1 {
			t.Fatalf("%s: %+v, %v", messages, r, err)
		}
	}
	safetensors(t, path+".expected", tr.pieces, tr.states[last])
	if !bytes.Equal(readFile(t, path), readFile(t, path+".expected")) {
		t.Error("the file has other bytes")
	}
}

// TestFoldersAreMadeAnew applies messages to a model of two files: into a folder that was not there, with all else that
// the model's folder has, and not in place.
func TestFoldersAreMadeAnew(t *testing.T) {
	t.Parallel()
	s := train(rand.New(rand.NewPCG(21, 22)), dtype.BF16, 0.01, 0.1)
	messages, model := t.TempDir(), t.TempDir()
	out := filepath.Join(t.TempDir(), "out")
	for name, data := range map[string][]byte{filepath.Join(messages, "8.delta"): s.message(false),
		filepath.Join(messages, "notes.txt"): []byte("not a message"),
		filepath.Join(model, "config.json"):  []byte("{}"),
	} {
		if err := os.WriteFile(name, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// A cache of the hub has links to files elsewhere.
	elsewhere := filepath.Join(t.TempDir(), "blob")
	safetensors(t, elsewhere, s.pieces[:1], s.old[:1])
	if err := os.Symlink(elsewhere, filepath.Join(model, "1.safetensors")); err != nil {
		t.Skip("links cannot be made here:", err)
	}
	safetensors(t, filepath.Join(model, "2.safetensors"), s.pieces[1:], s.old[1:])
	before := readFile(t, elsewhere)
	a := Application{Messages: []string{messages}, Model: model}
	if _, err := Apply(a); err == nil || !strings.Contains(err.Error(), "cannot be replaced at one instant") {
		t.Errorf("in place: %v", err)
	}
	a.Out = out
	r, err := Apply(a)
	if err != nil || r.Applied != 1 || r.Tensors != len(s.pieces) {
		t.Fatalf("%+v, %v", r, err)
	}
	for name, of := range map[string][2]int{"1.safetensors": {0, 1}, "2.safetensors": {1, len(s.pieces)}} {
		want := filepath.Join(t.TempDir(), "want")
		safetensors(t, want, s.pieces[of[0]:of[1]], s.now[of[0]:of[1]])
		if !bytes.Equal(readFile(t, filepath.Join(out, name)), readFile(t, want)) {
			t.Errorf("%s has other bytes", name)
		}
	}
	if string(readFile(t, filepath.Join(out, "config.json"))) != "{}" || !bytes.Equal(before, readFile(t, elsewhere)) {
		t.Error("the configuration is missing, or the model has changed")
	}
	if _, err := Apply(a); err == nil || !strings.Contains(err.Error(), "it exists") {
		t.Errorf("into a folder that exists: %v", err)
	}
	s.now[3][0] ^= 1 // by other means than a step
	a.Out, a.Messages = filepath.Join(t.TempDir(), "out"), []string{filepath.Join(t.TempDir(), "message")}
	lacking := trained{s.pieces, s.old, s.copyOf(s.old)}
	data := lacking.message(false)
	binary.LittleEndian.PutUint64(data[40:], s.checksum(s.now))
	sum := sha256.Sum256(data[:len(data)-sha256.Size])
	data = append(data[:len(data)-sha256.Size], sum[:]...)
	if err := os.WriteFile(a.Messages[0], data, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Apply(a); err == nil || !strings.Contains(err.Error(), "other than by its steps") {
		t.Errorf("a message that lacks a change: %v", err)
	}
	if left, _ := os.ReadDir(filepath.Dir(a.Out)); len(left) > 0 {
		t.Errorf("files were left: %v", left)
	}
}

// TestMessagesAreDeletedOnceTheModelHasThem deletes the messages up to a step, and no other.
func TestMessagesAreDeletedOnceTheModelHasThem(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	var tr training
	for seed := uint64(0); len(tr.states) < 5 || tr.gap != 0; seed++ {
		clear(t, folder)
		tr = draw(t, rand.New(rand.NewPCG(seed, 2)), folder)
	}
	path := filepath.Join(t.TempDir(), "model")
	safetensors(t, path, tr.pieces, tr.states[0])
	a := Application{Messages: []string{folder}, Model: path, Step: 3, Delete: true}
	if r, err := Apply(a); err != nil || r.Deleted == 0 {
		t.Fatalf("%+v, %v", r, err)
	}
	left, err := list([]string{folder})
	if err != nil || left[0].To != 4 {
		t.Fatalf("what is left begins with step %d, %v", left[0].To, err)
	}
	a.Step, a.Delete = 0, false
	if r, err := Apply(a); err != nil || r.Step != uint64(len(tr.states)-1) {
		t.Fatalf("the rest: %+v, %v", r, err)
	}
	safetensors(t, path+".expected", tr.pieces, tr.states[len(tr.states)-1])
	if !bytes.Equal(readFile(t, path), readFile(t, path+".expected")) {
		t.Error("the file has other bytes")
	}
}

func clear(t *testing.T, folder string) {
	t.Helper()
	paths, err := inFolder(folder, Extension)
	for _, path := range paths {
		err = errors.Join(err, os.Remove(path))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestTwoTrainingsAreRefused refuses messages of one step that make different parameters.
func TestTwoTrainingsAreRefused(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	r := rand.New(rand.NewPCG(23, 24))
	a := train(r, dtype.BF16, 0.01, 0.1)
	b := trained{a.pieces, a.old, a.copyOf(a.old)}
	change(r, b.now[3], 2, 0.01, 0)
	for name, data := range map[string][]byte{"a.delta": a.message(false), "b.delta": b.message(false)} {
		if err := os.WriteFile(filepath.Join(folder, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(folder, "model")
	safetensors(t, path, a.pieces, a.old)
	if _, err := Apply(Application{Messages: []string{folder}, Model: path}); err == nil ||
		!strings.Contains(err.Error(), "two trainings") {
		t.Errorf("messages of two trainings: %v", err)
	}
	if _, err := Apply(Application{Messages: []string{t.TempDir()}, Model: path}); err == nil ||
		!strings.Contains(err.Error(), "has no message") {
		t.Errorf("an empty folder: %v", err)
	}
}

// TestTensorsAreCountedOnce: ranks have a part of a tensor each.
func TestTensorsAreCountedOnce(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	s := train(rand.New(rand.NewPCG(25, 26)), dtype.BF16, 0.01, 0.1)
	path := filepath.Join(folder, "model")
	safetensors(t, path, s.pieces[3:], s.old[3:])
	const half = 10_000
	for i, bounds := range [][2]uint64{{0, half}, {half, s.pieces[3].Count}} {
		p := s.pieces[3]
		p.First, p.Count = p.First+bounds[0], bounds[1]-bounds[0]
		part := func(of InMemory) InMemory { return InMemory{of[3][2*bounds[0] : 2*bounds[1]]} }
		of := trained{[]Piece{p}, part(s.old), part(s.now)}
		if err := os.WriteFile(filepath.Join(folder, fmt.Sprint(i)+Extension), of.message(false), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r, err := Apply(Application{Messages: []string{folder}, Model: path})
	if err != nil || r.Tensors != 1 || r.Applied != 2 || r.Bytes != s.pieces[3].bytes() {
		t.Errorf("%+v, %v", r, err)
	}
}
