//go:build linux

package states

import (
	"encoding/json"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/goldentest"
)

// model is an arena in which every byte says which chunk and which step it is of.
type model struct {
	layout *Layout
	sizes  []int64
	bytes  []stamp
	at     Moment
}

type stamp struct {
	chunk int
	step  int64
}

func newModel(sizes []int64) *model {
	var chunks []Chunk
	for _, size := range sizes {
		chunks = append(chunks, Chunk{Bytes: size})
	}
	l := NewLayout(chunks)
	return &model{layout: l, sizes: sizes, bytes: make([]stamp, l.Bytes())}
}

// write copies so many bytes of the next region, and commits it if that is all of them.
func (m *model) write(bytes int64) {
	chunk := m.layout.Next(m.at)
	begin := m.layout.Offset(chunk, m.at.Steps+1)
	for i := range bytes {
		m.bytes[begin+i] = stamp{chunk, m.at.Steps + 1}
	}
	if bytes == m.sizes[chunk] {
		m.at = m.layout.At(m.layout.Position(m.at) + 1)
	}
}

// check finds every region whole, and of the step that the position says.
func (m *model) check(t *rapid.T) {
	for chunk, size := range m.sizes {
		steps := m.layout.StepsOf(chunk, m.at)
		if steps != m.at.Steps && steps != m.at.Steps+1 {
			t.Fatalf("chunk %d has had %d steps at %+v", chunk, steps, m.at)
		}
		if steps == 0 {
			continue // it was never written
		}
		begin := m.layout.Offset(chunk, steps)
		if begin < 0 || begin+size > m.layout.Bytes() {
			t.Fatalf("the region of chunk %d is bytes %d to %d of %d", chunk, begin, begin+size, m.layout.Bytes())
		}
		for i := range size {
			if got, want := m.bytes[begin+i], (stamp{chunk, steps}); got != want {
				t.Fatalf("at %+v, byte %d of chunk %d is %+v, want %+v", m.at, i, chunk, got, want)
			}
		}
	}
}

// TestRegionsAreWholeAtAnyInstant breaks steps off after any number of bytes, and begins chunks anew.
func TestRegionsAreWholeAtAnyInstant(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newModel(rapid.SliceOfN(rapid.Int64Range(0, 12), 1, 8).Draw(t, "sizes"))
		for range rapid.IntRange(1, 60).Draw(t, "writes") {
			all := m.sizes[m.layout.Next(m.at)]
			written := all
			if rapid.Bool().Draw(t, "is killed") {
				written = rapid.Int64Range(0, all).Draw(t, "bytes")
			}
			m.write(written)
			m.check(t)
		}
	})
}

// TestSavesReadWhatNoStepOverwrites lets a step run as far as the save allows, at any instant of the save.
func TestSavesReadWhatNoStepOverwrites(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newModel(rapid.SliceOfN(rapid.Int64Range(0, 12), 1, 8).Draw(t, "sizes"))
		for range rapid.IntRange(1, 3).Draw(t, "steps") {
			for range m.sizes {
				m.write(m.sizes[m.layout.Next(m.at)])
			}
		}
		steps := m.at.Steps
		base := m.layout.Position(m.at)
		for read := range m.sizes {
			for m.layout.Position(m.at) < base+uint64(read)+1 && rapid.Bool().Draw(t, "goes on") {
				m.write(m.sizes[m.layout.Next(m.at)]) // at a position of at most base + read
			}
			chunk := m.layout.Next(Moment{steps, read})
			begin := m.layout.Offset(chunk, steps)
			for i := range m.sizes[chunk] {
				if got, want := m.bytes[begin+i], (stamp{chunk, steps}); got != want {
					t.Fatalf("the save of step %d reads %+v of chunk %d: %+v", steps, m.at, chunk, got)
				}
			}
		}
	})
}

// TestConditions has the condition for each kind of death.
func TestConditions(t *testing.T) {
	l := NewLayout(make([]Chunk, 4))
	for _, test := range []struct {
		position, gradientsOf uint64
		recovery              bool
		want                  Condition
	}{
		{0, 0, true, New},
		{3, 1, true, New}, // the first step has nothing to go on from
		{4, 1, true, Whole},
		{4, 2, true, Whole}, // the gradients were there, and no region was written
		{5, 2, true, Redo},
		{7, 2, true, Redo},
		{7, 2, false, Torn},
		{7, 1, true, Torn},
		{8, 2, false, Whole},
		{1 << 63, 2, false, Whole}, // written by no trainer: the last step that there can be
	} {
		if got := l.Condition(test.position, test.gradientsOf, test.recovery); got != test.want {
			t.Errorf("%+v: %s", test, got)
		}
	}
}

// arithmetic is what the Python client must compute, too.
type arithmetic struct {
	Sizes     []int64   `json:"sizes"`
	Bytes     int64     `json:"bytes"`
	Positions []atPlace `json:"positions"`
}

type atPlace struct {
	Position  uint64    `json:"position"`
	Steps     int64     `json:"steps"`
	Committed int       `json:"committed"`
	Next      int       `json:"next"`
	Offset    int64     `json:"offset"` // of the next region
	StepsOf   []int64   `json:"steps_of"`
	Condition Condition `json:"condition"` // with recovery and gradients of step 2
}

// TestPythonComputesTheSame compares the arithmetic with a file that python/tests/test_held.py compares with, too.
func TestPythonComputesTheSame(t *testing.T) {
	var all []arithmetic
	for _, sizes := range [][]int64{{256}, {512, 1024, 256}, {0, 256, 2048, 256, 0}} {
		l := newModel(sizes).layout
		a := arithmetic{Sizes: sizes, Bytes: l.Bytes()}
		for position := range uint64(4 * len(sizes)) {
			m := l.At(position)
			p := atPlace{Position: l.Position(m), Steps: m.Steps, Committed: m.Committed, Next: l.Next(m),
				Offset: l.Offset(l.Next(m), m.Steps+1), Condition: l.Condition(position, 2, true)}
			for chunk := range sizes {
				p.StepsOf = append(p.StepsOf, l.StepsOf(chunk, m))
			}
			a.Positions = append(a.Positions, p)
		}
		all = append(all, a)
	}
	got, err := json.MarshalIndent(all, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	goldentest.Compare(t, "testdata/arithmetic.json", string(got)+"\n")
}
