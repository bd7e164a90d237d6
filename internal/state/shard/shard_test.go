package shard

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/optim/kernel"
)

func anyRange(name string) *rapid.Generator[Range] {
	return rapid.Custom(func(t *rapid.T) Range {
		return Range{rapid.Int64Range(0, 40).Draw(t, name+" first"), rapid.Int64Range(0, 40).Draw(t, name+" count")}
	})
}

// elements lists the elements of a range.
func elements(r Range) []int64 {
	var list []int64
	for element := r.First; element < r.End(); element++ {
		list = append(list, element)
	}
	return list
}

func TestRangesAreSetsOfElements(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := anyRange("a").Draw(t, "a"), anyRange("b").Draw(t, "b")
		both := slices.DeleteFunc(elements(a), func(element int64) bool { return !b.Contains(element) })
		if got := elements(a.Intersect(b)); !slices.Equal(got, both) {
			t.Errorf("%v and %v have %v in common, want %v", a, b, got, both)
		}
		if got := Between(a.First, a.End()); got != a {
			t.Errorf("%v is %v by its ends", a, got)
		}
		if got := a.Shift(b.First); got.Count != a.Count || a.Contains(3) != got.Contains(3+b.First) {
			t.Errorf("%v moved by %d is %v", a, b.First, got)
		}
		shares := rapid.IntRange(1, 50).Draw(t, "shares")
		var all []int64
		for number := range shares {
			share := a.Share(number, shares)
			if each := a.Count / int64(shares); share.Count != each && share.Count != each+1 {
				t.Errorf("share %d of %d of %v is %v", number, shares, a, share)
			}
			all = append(all, elements(share)...)
		}
		if !slices.Equal(all, elements(a)) {
			t.Errorf("%d shares of %v have the elements %v", shares, a, all)
		}
	})
}

func TestSharesDoNotOverflow(t *testing.T) {
	all := Range{0, MaxElements - 1}
	if last := all.Share(1<<20-1, 1<<20); last.End() != all.Count || last.Count != 1<<30 {
		t.Errorf("the last share is %v", last)
	}
}

// anyLayout lays out sections of every kind.
func anyLayout(t *rapid.T) *Layout {
	format := kernel.Format{
		Algorithm: rapid.SampledFrom([]kernel.Algorithm{kernel.Adam, kernel.Lion}).Draw(t, "algorithm"),
		State:     rapid.SampledFrom([]kernel.State{kernel.Split, kernel.FP32, kernel.Split24}).Draw(t, "state"),
		Parameter: dtype.BF16, Gradient: dtype.BF16,
	}
	types := []kernel.MomentType{kernel.MomentsFP32, kernel.MomentsBF16, kernel.MomentsInt8}
	if format.Algorithm != kernel.Adam {
		types = types[:2]
	}
	format.Moments = rapid.SampledFrom(types).Draw(t, "moments")
	sections := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Section {
		return Section{
			Elements: rapid.Int64Range(0, 2000).Draw(t, "elements"), Group: rapid.IntRange(0, 3).Draw(t, "group"),
			Moments: rapid.SampledFrom(types).Draw(t, "moments"),
		}
	}), 0, 8).Draw(t, "sections")
	l, err := NewLayout(format, rapid.Int64Range(1, 900).Draw(t, "chunk"), sections)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// TestChunksCoverTheShard: every element is in one chunk, and every chunk in one section.
func TestChunksCoverTheShard(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := anyLayout(t)
		next := int64(0)
		for number := range l.Chunks {
			c := l.Chunk(number)
			section := l.Section(c.Section)
			if c.Number != number || c.First != next || c.Count < 1 || c.Intersect(section.Range) != c.Range ||
				l.ChunkAt(c.First) != c || l.ChunkAt(c.End()-1) != c || l.SectionAt(c.First) != c.Section {
				t.Fatalf("chunk %d is %+v of section %+v, after element %d", number, c, section, next)
			}
			if l.FormatOf(c.Section).Moments == kernel.MomentsInt8 && (c.First-section.First)%kernel.Block != 0 {
				t.Fatalf("chunk %+v of section %+v begins within a block", c, section)
			}
			next = c.End()
		}
		if next != l.Elements {
			t.Fatalf("the chunks cover %d of %d elements", next, l.Elements)
		}
		r := l.Range().Intersect(anyRange("some").Draw(t, "some").Shift(rapid.Int64Range(0, l.Elements).Draw(t, "by")))
		var want []int64
		for number := range l.Chunks {
			if l.Chunk(number).Intersect(r).Count > 0 {
				want = append(want, int64(number))
			}
		}
		if got := elements(l.ChunksOf(r)); !slices.Equal(got, want) {
			t.Fatalf("%v is in the chunks %v, want %v", r, got, want)
		}
	})
}

// TestChunksCoverTheStreams: the chunks that a stream has lie in it one after the other, and nothing else does.
func TestChunksCoverTheStreams(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := anyLayout(t)
		memory, inMemory := make([][]byte, len(l.Streams)), int64(0)
		for i := range l.Streams {
			s := &l.Streams[i]
			next, chunks := int64(0), 0
			for number := range l.Chunks {
				at, chunk, ok := l.In(s, l.Chunk(number))
				if !ok {
					continue
				}
				if at.First != next || at.Count < 1 || chunk != chunks {
					t.Fatalf("chunk %d is chunk %d of %s at %v, after %d elements", number, chunk, s.Arena, at, next)
				}
				next, chunks = at.End(), chunks+1
			}
			if next != s.Length || chunks != s.Chunks {
				t.Fatalf("the chunks cover %d of %+v", next, s)
			}
			memory[i] = make([]byte, s.Size())
			inMemory += s.Size()
		}
		resident := int64(0)
		for i, section := range l.Sections() {
			resident += l.FormatOf(i).ResidentBytes(section.Elements)
		}
		if l.StateBytes() != ledger.Bytes(inMemory) || inMemory != resident {
			t.Fatalf("%v of state in streams of %d B, and its formats take %d B", l.StateBytes(), inMemory, resident)
		}
		for number := range l.Chunks {
			state := l.State(l.Chunk(number), memory)
			for role := kernel.ParameterRole; role <= kernel.GradientRole; role++ {
				for i := range state.Bytes(role) {
					state.Bytes(role)[i]++
				}
			}
		}
		for i, m := range memory {
			if slices.ContainsFunc(m, func(b byte) bool { return b != 1 }) {
				t.Fatalf("a byte of %s is in no chunk, or in two", l.Streams[i].Arena)
			}
		}
	})
}

// TestACutHasTheSameChunks: the layout of some chunks has these, with the same elements and moments.
func TestACutHasTheSameChunks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := anyLayout(t)
		shares := rapid.IntRange(1, 9).Draw(t, "shares")
		next := int64(0)
		for number := range shares {
			chunks := Range{0, int64(l.Chunks)}.Share(number, shares)
			cut, elements, err := l.Cut(chunks)
			if err != nil || elements.First != next || cut.Elements != elements.Count ||
				int64(cut.Chunks) != chunks.Count {
				t.Fatalf("chunks %v are %v elements in %d chunks, %v", chunks, elements, cut.Chunks, err)
			}
			for i := range cut.Chunks {
				own, full := cut.Chunk(i), l.Chunk(int(chunks.First)+i)
				if own.Shift(elements.First) != full.Range || cut.FormatOf(own.Section) != l.FormatOf(full.Section) {
					t.Fatalf("chunk %+v was %+v", own, full)
				}
			}
			next = elements.End()
		}
		if next != l.Elements {
			t.Fatalf("the shares cover %d of %d elements", next, l.Elements)
		}
	})
}

func TestNewLayoutRefusesNonsense(t *testing.T) {
	split := kernel.Format{Parameter: dtype.BF16, Gradient: dtype.BF16}
	fp16, lion := split, split
	fp16.Parameter, lion.Algorithm = dtype.F16, kernel.Lion
	int8 := Section{Elements: 100, Moments: kernel.MomentsInt8}
	for name, test := range map[string]struct {
		format   kernel.Format
		chunk    int64
		sections []Section
	}{
		"no chunk":           {split, 0, nil},
		"negative chunk":     {split, -1, nil},
		"fp16 split":         {fp16, 1, nil},
		"negative section":   {split, 1, []Section{{Elements: -1}, {Elements: 101}}},
		"negative group":     {split, 1, []Section{{Elements: 100, Group: -1}}},
		"moments not suited": {lion, 1, []Section{int8}},
		"too large":          {split, 1, []Section{{Elements: 1}, {Elements: MaxElements}}},
	} {
		if _, err := NewLayout(test.format, test.chunk, test.sections); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := NewLayout(split, 1, []Section{int8}); err != nil {
		t.Error(err)
	}
}

// TestCutsOfPiecesCoverThem: cutting the concatenation of pieces anywhere keeps every element of every parameter, in
// order.
func TestCutsOfPiecesCoverThem(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type element struct {
			name  string
			place int64
		}
		list := func(pieces []Piece) []element {
			var all []element
			for _, p := range pieces {
				for _, place := range elements(p.Range) {
					all = append(all, element{p.Name, place})
				}
			}
			return all
		}
		var pieces []Piece
		total := int64(0)
		for i := range rapid.IntRange(0, 6).Draw(t, "pieces") {
			own := anyRange("piece").Draw(t, "piece")
			pieces = append(pieces, Piece{Name: string(rune('a' + i)), Shape: []int64{80}, Range: own, Group: i / 2})
			total += own.Count
		}
		shares := rapid.IntRange(1, 5).Draw(t, "shares")
		var all []element
		for number := range shares {
			share := Range{0, total}.Share(number, shares)
			cut := Cut(pieces, share)
			if held := elementsOf(Sections(cut)); held != share.Count {
				t.Fatalf("share %d of %d elements has sections of %d", number, share.Count, held)
			}
			all = append(all, list(cut)...)
		}
		if !slices.Equal(all, list(pieces)) {
			t.Fatalf("cut into %d, %v is %v", shares, pieces, all)
		}
	})
}

func elementsOf(sections []Section) int64 {
	total := int64(0)
	for _, s := range sections {
		if s.Elements == 0 {
			return -1 // could be none
		}
		total += s.Elements
	}
	return total
}
