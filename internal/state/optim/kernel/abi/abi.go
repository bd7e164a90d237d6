// Package abi is the contract between the assembly kernels and their callers. The
// generator of the kernels imports it, too.
package abi

// Algorithm is an optimizer's update rule.
type Algorithm uint8

// The algorithms.
const (
	Adam Algorithm = iota
	Lion
	Adagrad
	SGD
	Algorithms // their number
)

func (a Algorithm) String() string { return [...]string{"Adam", "Lion", "Adagrad", "SGD"}[a] }

// Moments returns the number of moments that the algorithm keeps.
func (a Algorithm) Moments() int {
	if a == Adam {
		return 2
	}
	return 1
}

// SlowMoment returns the number of the moment that changes in a step by less than
// bf16 can show, or -1 if there is none. An example is exp_avg_sq: a step takes away
// a thousandth of it. Rounded to nearest, it would never move.
func (a Algorithm) SlowMoment() int {
	switch a {
	case Adam:
		return 1
	case Adagrad:
		return 0
	}
	return -1
}

// State is how the fp32 master weights are held.
type State uint8

const (
	// Split holds the master in two 16-bit streams: the bf16 parameter that
	// the trainer uses, rounded half away from zero, and the low 16 bits.
	// Together they are the fp32 master, bit for bit.
	Split State = iota
	// FP32 holds the full master, and a 16-bit copy of it for the trainer.
	// With fp32 parameters the trainer uses the master itself.
	FP32
	// Split24 is Split with the upper 8 of the low 16 bits: a master of 24 bits, rounded
	// stochastically after the update.
	Split24
	States // their number
)

func (s State) String() string { return [...]string{"split", "fp32", "split24"}[s] }

// LowSize returns the bytes that the master of an element has beside the parameter that is
// its upper half, or 0 if the parameter is a copy.
func (s State) LowSize() int { return [...]int{2, 0, 1}[s] }

// MomentType is how moments are held.
type MomentType uint8

const (
	// MomentsFP32 are exact.
	MomentsFP32 MomentType = iota
	// MomentsBF16 are rounded after the update has used them: the slow moment
	// stochastically, the other half away from zero.
	MomentsBF16
	// MomentsInt8 are rounded to a byte each, in blocks that share a header.
	MomentsInt8
	MomentTypes // their number
)

func (m MomentType) String() string { return [...]string{"fp32", "bf16", "int8"}[m] }

// Size returns the number of bytes of an element of a moment.
func (m MomentType) Size() int64 { return [...]int64{4, 2, 1}[m] }

// Suits reports whether the moments of an algorithm can have the type.
func (m MomentType) Suits(a Algorithm) bool { return m != MomentsInt8 || a == Adam }

// Kinds of elements, of gradients and of the parameter copy.
const (
	BF16 = iota
	FP16
	Wide // fp32 gradients; no parameter copy
)

// Group is the number of elements that vector kernels count in.
const Group = 16

// The sum of squares of a gradient divides it into parts, which kernels read side by
// side, and these into runs, which they add up in fp32.
const (
	Parts = 4
	Run   = 8 * Group // elements
	// PairRun is the run of a bf16 gradient, which is not divided into parts: even and odd elements have sums of
	// their own.
	PairRun = 2 * Run
)

// Block is the number of elements whose int8 moments share a header.
const Block = 256

// Tile returns the number of elements of a tile: the unit in which an update changes
// a chunk.
func (m MomentType) Tile() int {
	return [...]int{Group, 2 * Group, Block}[m]
}

// The layout of an undo log. It begins with the element up to which the old values
// are kept. A ring follows for each stream that an update reads and overwrites: the
// old values of the last tiles. A kernel stores the element after it has filled the
// rings up to there, and before it changes anything of that tile.
const (
	UndoTiles = 4
	undoHead  = 64
)

// The streams of an undo log, in order.
const (
	UndoMaster = iota // or the parameters, where they are the upper half
	UndoLow
	UndoMoment1
	UndoMoment2
	UndoHeaders
	UndoStreams // their number
)

// Sums has the sums of the 64-bit words of each stream of the undo log, modulo 2^64: before an update and after it. The
// words of a stream are spread over 8 lanes. A kernel leaves out parameters that are the upper half of the master.
type Sums [UndoStreams][2][8]uint64

// UndoLayout returns, for each stream, the bytes of a tile and where its ring begins,
// and the bytes of the log.
func UndoLayout(state State, moments MomentType, count int) (tile, ring [UndoStreams]int, bytes int) {
	size := [UndoStreams]int{4, 0, int(moments.Size()), int(moments.Size()), 0}
	if low := state.LowSize(); low > 0 {
		size[UndoMaster], size[UndoLow] = 2, low
	}
	if count == 1 {
		size[UndoMoment2] = 0
	}
	bytes = undoHead
	for i := range tile {
		tile[i], ring[i] = moments.Tile()*size[i], bytes
		if i == UndoHeaders && moments == MomentsInt8 {
			tile[i] = 2
		}
		bytes += UndoTiles * tile[i]
	}
	return tile, ring, bytes
}

// The code of int8 moments; see kernel's documentation. A header is the floor
// in its low byte and the shift in its high one.
const (
	FewestDigits = 3         // of second, after the leading one
	MostDigits   = 6         //
	LeastFloor   = 127 - 63  // the exponent of 2^-63, the root of the smallest normal number
	MostRoot     = 190 << 23 // the bits of 2^63, the largest root
	FirstShift   = 19        // 23 minus the digits of first
	FirstOffset  = 123 << 23 // the bits of 1/16, which makes the steps of first even around zero

	StepStride    = 0xc13c8f09 // of the random number of an element, from step to step
	ElementStride = 0x9e3779b1 // and from element to element of a block
)

// PrefetchAhead returns how far ahead of the loop kernels prefetch, in elements. It
// was the quickest distance in measurements. It is large enough to bridge the ends
// of pages, where the processor's own prefetching ends, and small enough to leave the
// rest to the processor.
func PrefetchAhead(m MomentType) int {
	if m == MomentsFP32 {
		return 96
	}
	return 192
}

// PrefetchAheadIntel is the distance on processors of Intel. Theirs fetch less by
// themselves: 96 elements with fp32 moments make updates 2 to 6 % slower than 192. (On
// Zen 4, 192 make them a tenth slower than 96.)
const PrefetchAheadIntel = 192

// PrefetchAlone is the distance for a pass over a single stream: as many bytes have
// to be under way.
const PrefetchAlone = 2048

// Rows of the table of constants.
const (
	GradScale = iota
	L2Penalty
	Beta1
	OneMinusBeta1
	Beta2
	OneMinusBeta2
	InverseRootBias2
	Epsilon
	Decay
	StepSize
	MomentumShare // of the direction of SGD
	GradientShare
	Rows // their number
)

// Table holds the constants of a step, each repeated for every lane of the
// widest vector, so that kernels can use them as operands in memory.
type Table [Rows][Group]float32

// DitherStep is the difference of the dithers of two adjacent elements, modulo 2^32.
// The random number of an element is the upper half of the square of its dither,
// modulo 2^32. (Without the square, the roundings of an entire shard have a common
// part: its average was off by 1 to 3 % for thousands of steps. The squares of a
// sequence of even strides come from B. Widynski, "Middle-Square Weyl Sequence RNG",
// arXiv 1704.00358.)
const DitherStep = 0x9e3779b9

// Arguments are the arguments of every update and traffic kernel. Streams that a
// kernel does not use are nil.
type Arguments struct {
	Elements int // full tiles
	// Prefetching is the number of elements for which the streams go on at least
	// Ahead further; a multiple of 2 Groups. Prefetching an address
	// without memory is harmless but slow.
	Prefetching  int
	Ahead        int   // how far ahead the kernel prefetches, in elements; int8 moments have a fixed distance
	Start        int   // the element to begin with; the first of a block if moments are int8
	Undo         *byte // the undo log; nil for none
	Sums         *Sums // what the sums of streams are added to; nil for none, and for int8 moments
	Table        *Table
	GradientKind int
	CopyKind     int
	Dither       uint32 // of the first element; of the step if moments are int8
	MasterDither uint32 // of the first element, for masters of 24 bits
	Block        uint32 // number of the first block in the shard
	Parameter    *uint16
	Low          *byte
	Master       *float32
	Moment1      *byte
	Moment2      *byte
	Headers      *uint16
	Gradient     *byte
	// Moves has a word for each 16 elements: bits 0 to 15 are those that moved to the next number or the one before,
	// and bits 16 to 31 those that became lower or moved further. It is nil if nobody wants to know.
	Moves *uint32
	Kept  *uint16 // where the next 16 words go of which some moved further; at the end, where the next would go
}

// The codes of a retraction: a bit of each element in each plane of a block.
type RetractionCode struct{ Plane, Bits int }

// The numbers of a block before an update, and the codes of each.
const (
	HatOfMaster = iota
	HatOfFirst
	HatOfSecond
	Hats // their number
)

// RetractionCodes are the codes of these numbers.
var RetractionCodes = [Hats]RetractionCode{HatOfMaster: {5, 2}, HatOfFirst: {0, 3}, HatOfSecond: {3, 2}}

// InverseTable has, for each of these numbers, the inverse of the factor that an update multiplies it by, less 1. Each
// is repeated for every lane, as in [Table].
type InverseTable [Hats][Group]float32

// RetractionArguments are the arguments of the kernels that retract the update of a block, or prepare that. Streams
// that a kernel does not use are nil.
type RetractionArguments struct {
	Start        int // where to begin, for the kernel that stores
	Elements     int // full groups, of one block
	First        int // the element of the chunk at which the block begins
	GradientKind int
	Table        *Table
	Inverses     *InverseTable
	Parameter    *uint16
	Low          *byte
	Master       *float32
	Moment1      *byte
	Moment2      *byte
	Gradient     *byte
	Planes       *byte
	Numbers      *uint32 // in the order of Hats, each of a block
	CopyKind     int
	Undo         *byte // or nil
}
