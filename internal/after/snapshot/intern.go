package snapshot

import (
	"hash/maphash"
	"slices"
	"unsafe"
)

func sizeOf[T any]() int64 {
	var t T
	return int64(unsafe.Sizeof(t))
}

// texts numbers the distinct texts of a file. The names of keys come first, so that their numbers are constants.
type texts struct {
	numbers map[string]uint32
	all     []string
}

// overhead is about what an entry of a map and of a slice takes beside its content.
const overhead = 64

func newTexts() *texts {
	t := &texts{numbers: map[string]uint32{}}
	free := &budget{baseBudget}
	for _, name := range keyNames {
		t.number(free, []byte(name))
	}
	return t
}

func (t *texts) number(b *budget, text []byte) uint32 {
	if n, known := t.numbers[string(text)]; known {
		return n
	}
	b.spend(int64(len(text)) + overhead)
	n := uint32(len(t.all))
	t.all = append(t.all, string(text))
	t.numbers[t.all[n]] = n
	return n
}

// numbered numbers distinct values, such as frames, streams and pools.
type numbered[T comparable] struct {
	numbers map[T]uint32
	all     []T
}

func (s *numbered[T]) number(b *budget, value T) uint32 {
	n, known := s.numbers[value]
	if !known {
		b.spend(2*sizeOf[T]() + overhead)
		n = uint32(len(s.all))
		if s.numbers == nil {
			s.numbers = map[T]uint32{}
		}
		s.numbers[value] = n
		s.all = append(s.all, value)
	}
	return n
}

// stacks numbers distinct lists of frames. Entries that were made at one place have the same number.
type stacks struct {
	seed    maphash.Seed
	numbers map[uint64][]uint32 // by hash
	frames  []uint32            // of all stacks, one after the other
	ends    []uint32            // in frames
}

// The stacks that every file has.
const (
	noStack    uint32 = iota // no frames were recorded
	emptyStack               // frames were recorded, and there were none: a thread without Python
)

func newStacks() *stacks {
	return &stacks{seed: maphash.MakeSeed(), numbers: map[uint64][]uint32{}, ends: []uint32{0, 0}}
}

// of returns the frames of a stack, innermost first.
func (s *stacks) of(n uint32) []uint32 {
	if n <= emptyStack {
		return nil
	}
	return s.frames[s.ends[n-1]:s.ends[n]]
}

func (s *stacks) number(b *budget, frames []uint32) uint32 {
	if len(frames) == 0 {
		return emptyStack
	}
	bytes := unsafe.Slice((*byte)(unsafe.Pointer(&frames[0])), 4*len(frames))
	hash := maphash.Bytes(s.seed, bytes)
	for _, n := range s.numbers[hash] {
		if slices.Equal(s.of(n), frames) {
			return n
		}
	}
	b.spend(int64(8*len(frames)) + 2*overhead) // appending may double the list
	n := uint32(len(s.ends))
	s.frames = append(s.frames, frames...)
	s.ends = append(s.ends, uint32(len(s.frames)))
	s.numbers[hash] = append(s.numbers[hash], n)
	return n
}
