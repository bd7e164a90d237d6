// Package roads compares the ways on which the state of an optimizer can be updated when it does not stay on the GPU:
// where its bytes are, and how long a trainer waits for it. docs/roads.md derives the law.
//
// The roads are the update by the CPU, states that come to the GPU chunk by chunk or as a whole, and states that stay
// on the GPU.
package roads

import (
	"math"

	"plimsoll/internal/base/ledger"
)

// Parameter is a parameter of one rank, with the sizes of what its optimizer needs for it.
type Parameter struct {
	Elements int64
	// States are the sizes of its state tensors in bytes, as they lie on the host. Scalars are not among them.
	States []int64
	// Master is the size of its master weights: 4 bytes an element, 2 for the low halves of split ones, or 0.
	Master int64
	// Own and Gradient are the sizes of the model's parameter and of its gradient.
	Own, Gradient int64
	// Operations are the floating-point operations of the matrix products in its update.
	Operations float64
	// Scalars is the number of its states that are one number, such as the number of steps.
	Scalars int
	// Temporary is what its update holds beside its state on the GPU, for a moment.
	Temporary int64
	// Staying is the size of its state if it stays on the GPU.
	Staying int64
}

// state returns the bytes that move in both directions: states and master weights. Each tensor begins at a multiple of
// 256 bytes, in the region of the host as in the slot of the device.
func (p *Parameter) state() int64 {
	sum := aligned(p.Master)
	for _, bytes := range p.States {
		sum += aligned(bytes)
	}
	return sum
}

// alignment is that of each tensor in a region and in the arena of gradients.
const alignment = 256

func aligned(bytes int64) int64 { return (bytes + alignment - 1) / alignment * alignment }

// Allocated returns what the allocators of GPUs count for a tensor of some bytes: a multiple of 512.
func Allocated(bytes int64) int64 { return (bytes + 511) / 512 * 512 }

// Chunk is a group of consecutive parameters whose state moves as one piece.
type Chunk struct {
	First, End int // of the parameters
	// State is what a slot of the device holds: states and master weights. Own is what the region of the host holds
	// beside them: the model's parameters, which are written in every step and read after a death only.
	State, Own ledger.Bytes
	Temporary  ledger.Bytes // what the update holds beside them: gradients and parameters in fp32
	Operations float64
	Traffic    ledger.Bytes // bytes of GPU memory that the update reads and writes
	Gradients  ledger.Bytes
}

// Region returns the bytes of the chunk in the arena.
func (c Chunk) Region() ledger.Bytes { return c.State + c.Own }

// Settings are those of plimsoll.torch.StateOffload.
type Settings struct {
	Whole bool // all states come to the GPU before one update of them all
	// Prefetch means that mode whole calls for the states at the beginning of the backward pass. Copies in hide behind
	// that pass, and the GPU holds the window meanwhile.
	Prefetch   bool
	ChunkBytes ledger.Bytes
	Fraction   float64 // of the state's bytes that is on the host
	Recovery   bool    // a step that was broken off can be finished, which takes all of the state on the host
}

// recovers reports whether a new process can go on from the arenas alone.
func (s Settings) recovers() bool { return s.Recovery && s.Fraction == 1 }

// chunk returns the size of a chunk. A step that is made at once cannot be finished in parts. So with recovery all of
// it is one region, beside which the old one stays whole.
func (s Settings) chunk() ledger.Bytes {
	if s.Whole && s.recovers() {
		return math.MaxInt64
	}
	return s.ChunkBytes
}

// DefaultChunk is the client's chunk size.
const DefaultChunk = 64 * ledger.MiB

// Layout is the state of a rank, divided into chunks.
type Layout struct {
	Settings
	Chunks []Chunk
	// Resident is the state of the parameters that the fraction leaves on the GPU.
	Resident ledger.Bytes
	// ResidentWork is the update of these parameters.
	ResidentWork Chunk
	Scalars      int // of all chunks
}

// NewLayout divides the parameters into chunks: consecutive parameters until a chunk has the bytes that are asked for.
// A parameter that is larger is a chunk of its own. With a fraction, the first parameters go to the host, until they
// hold that share of the state.
func NewLayout(parameters []Parameter, s Settings) *Layout {
	l := &Layout{Settings: s}
	var total, taken int64
	for i := range parameters {
		total += parameters[i].state()
	}
	wanted := int64(math.Ceil(s.Fraction * float64(total)))
	open := false // the last chunk takes more parameters
	for i := range parameters {
		p := &parameters[i]
		if taken >= wanted && s.Fraction < 1 {
			l.Resident += ledger.Bytes(p.Staying)
			l.ResidentWork.add(p, false)
			continue
		}
		taken += p.state()
		l.Scalars += p.Scalars
		if last := len(l.Chunks) - 1; !open || l.Chunks[last].State+ledger.Bytes(p.state()) > s.chunk() {
			l.Chunks = append(l.Chunks, Chunk{First: i, End: i})
			open = true
		}
		l.Chunks[len(l.Chunks)-1].add(p, s.recovers())
	}
	return l
}

// add adds a parameter to a chunk.
func (c *Chunk) add(p *Parameter, recovery bool) {
	c.End++
	c.State += ledger.Bytes(p.state())
	if recovery {
		c.Own += ledger.Bytes(aligned(p.Own))
	}
	c.Temporary += ledger.Bytes(p.Temporary)
	c.Operations += p.Operations
	c.Gradients += ledger.Bytes(aligned(p.Gradient))
	// A fused kernel reads states, master weights, parameter and gradient once, and writes all but the gradient.
	c.Traffic += ledger.Bytes(2*(p.state()+p.Own) + p.Gradient)
}

// State returns the bytes of the chunks: what is freed on the GPU, but for the window.
func (l *Layout) State() (sum ledger.Bytes) {
	for _, c := range l.Chunks {
		sum += c.State
	}
	return sum
}

// Own returns the bytes of the model's parameters in the arena.
func (l *Layout) Own() (sum ledger.Bytes) {
	for _, c := range l.Chunks {
		sum += c.Own
	}
	return sum
}

// Control returns the size of the control arena: a head, two tables of numbers, the hyperparameters of a step, and the
// numbers of the parameters that have no gradient in it. A table has the scalars, and for each parameter whether it has
// a state. Hyperparameters have 64 KiB, which are enough for the options of ten groups of parameters.
func (l *Layout) Control() ledger.Bytes {
	const head, hyperparameters, tables, number = 512, 64 << 10, 2, 8
	held := 0
	for _, c := range l.Chunks {
		held += c.End - c.First
	}
	return head + hyperparameters + tables*number*ledger.Bytes(l.Scalars+held) + number*ledger.Bytes(held)
}

// Gap returns the size of the largest region: so far are old and new regions apart.
func (l *Layout) Gap() (most ledger.Bytes) {
	for _, c := range l.Chunks {
		most = max(most, c.Region())
	}
	return most
}

// Arena returns the size of the arena "states". It has all regions, and room for the largest one: a step writes each
// region that much lower than it was, or higher, and overwrites only regions that are already written.
func (l *Layout) Arena() ledger.Bytes {
	sum := l.Gap()
	for _, c := range l.Chunks {
		sum += c.Region()
	}
	return sum
}

// Gradients returns the size of the arena "gradients": those of the step, with which a step that was broken off is
// finished. Without recovery there is none, and a step that is made at once needs none.
func (l *Layout) Gradients() (sum ledger.Bytes) {
	if l.Whole || !l.recovers() {
		return 0
	}
	for _, c := range l.Chunks {
		sum += c.Gradients
	}
	return sum
}

// Slot returns the size of a slot of the device: the state of the largest chunk.
func (l *Layout) Slot() (most ledger.Bytes) {
	for _, c := range l.Chunks {
		most = max(most, c.slot())
	}
	return most
}

// slot returns what the state of the chunk takes on the device.
func (c Chunk) slot() ledger.Bytes { return ledger.Bytes(Allocated(int64(c.State))) }

// Window returns what the GPU holds of the host's states in a step: two slots in mode chunked, everything in mode
// whole.
func (l *Layout) Window(whole bool) (sum ledger.Bytes) {
	if whole {
		for _, c := range l.Chunks {
			sum += c.slot()
		}
		return sum
	}
	return ledger.Bytes(min(2, len(l.Chunks))) * l.Slot()
}

// Freed returns the bytes that the GPU does not hold between two steps, but would if the states stayed there. Slots
// stay; the window of mode whole goes.
func (l *Layout) Freed(whole bool) ledger.Bytes {
	if whole {
		return l.State()
	}
	return max(0, l.State()-l.Window(false))
}
