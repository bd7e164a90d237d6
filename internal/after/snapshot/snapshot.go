// Package snapshot reads memory snapshots of PyTorch, which torch.cuda.memory._dump_snapshot and the C++ observers of
// failed allocations write. It answers who held the bytes of a GPU at any time of the recorded trace, and how much
// memory other settings of the allocator would have reserved.
//
// A snapshot is a pickle, and Python runs whatever a pickle says. This reader runs nothing: it knows only the
// instructions that build lists, dictionaries, texts and numbers, and refuses a file with any other.
//
// A snapshot may have gigabytes. The reader makes rows of its entries while it reads, and holds equal texts, frames and
// stacks once.
package snapshot

import (
	"iter"

	"plimsoll/internal/base/ledger"
)

// Snapshot is a file.
type Snapshot struct {
	// Settings are those of the allocator, if the file has them.
	Settings Settings
	// Annotations are marks of torch.profiler and record_function.
	Annotations []Annotation
	// OtherActions counts entries of the traces whose action this reader does not know, by name.
	OtherActions map[string]int

	segments []Segment
	traces   []rows // of events, by device
	*records
}

// Settings are the settings of the allocator that the file states.
type Settings struct {
	Known         bool
	Configuration string       // of PYTORCH_CUDA_ALLOC_CONF
	MaxSplit      ledger.Bytes // 0 for no limit
	Expandable    bool
	GarbageAbove  float64
}

// Annotation is the begin or the end of a range.
type Annotation struct {
	Device int
	Time   int64 // microseconds since 1970
	Name   string
	Begins bool
}

// Pool is the id of a memory pool. The zero Pool is the default one. CUDA graphs and torch.cuda.MemPool make others.
type Pool [2]uint64

// Segment is memory that the allocator took from the driver in one piece.
type Segment struct {
	Device  int
	Address uint64
	Size    ledger.Bytes
	Stream  uint64
	Pool    Pool
	Large   bool
	blocks  rows
}

// State is the state of a block.
type State uint8

// The states of blocks.
const (
	Inactive    State = iota
	Allocated         // the program holds it
	PendingFree       // the program has freed it, and a stream may still use it
)

// Block is a part of a segment.
type Block struct {
	Address   uint64
	Size      ledger.Bytes
	Requested ledger.Bytes // by the program
	State     State
	stack     uint32
}

// Action is what an entry of the trace says.
type Action uint8

// The actions. Entries with others are counted in Snapshot.OtherActions.
const (
	otherAction Action = iota
	Alloc
	FreeRequested
	FreeCompleted
	SegmentAlloc
	SegmentFree
	SegmentMap
	SegmentUnmap
	OOM
	noAction // the snapshot itself, and annotations of tensors
)

// Event is an entry of a trace.
type Event struct {
	Address uint64       // for OOM: the bytes that the device had free
	Size    ledger.Bytes // for Alloc and the frees: that the program requested
	Time    int64        // microseconds since 1970, or 0 if the file has no times
	stream  uint32       // in records.streams
	stack   uint32
	Action  Action
	// backward is set if the file names the frames of the forward pass that the allocation belongs to.
	backward bool
	category uint8 // in categories, what torch.profiler calls the memory; 0 if the file does not tell
}

// Frame is a place in the source.
type Frame struct {
	file, name uint32 // in records.texts
	line       int32
}

// Blocks returns the blocks of a segment in order of address.
func (s *Snapshot) Blocks(g *Segment) iter.Seq[*Block] {
	return func(yield func(*Block) bool) {
		for n := g.blocks.first; n < g.blocks.last; n++ {
			if !yield(s.blocks.at(n)) {
				return
			}
		}
	}
}
