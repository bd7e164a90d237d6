package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"unsafe"

	"plimsoll/internal/state/optim/kernel/abi"
)

// Retraction is what it takes to retract an update of a chunk, to the bit, as long as its gradients are there. It is
// written before the update, and takes a byte a parameter.
//
// The state after an update and the gradients nearly determine the state before: the inverse of each formula gives it
// within a few units of the last place. So the log has differences, as integers, between the bits that were there and
// those that the inverse gives. From g after gradScale and l2Penalty, and u = m/d of the update, it first takes away
// what was added:
//
//	p = fma(-stepSize, u, p), and 0 where p = stepSize·u
//	m = fma(-oneMinusBeta1, g, m), and 0 where m = oneMinusBeta1·g
//	v = fma(-oneMinusBeta2, g·g, v), and 0 where v = oneMinusBeta2·(g·g)
//
// and then divides by the factor f that the number had: x = fma(1/f - 1, x, x). The second factor is rounded, but is so
// small that this hardly shows: 1/f - 1 is 0.001 for a beta of 0.999. So the inverse rounds twice, as the update does.
// What is infinite or NaN counts as 0. All are operations of the package's contract, so any set of kernels retracts
// what any other has noted.
//
// m takes 3 bits, v and p take 2. The last code of each says that the difference is larger: it is then in a list of
// escapes. An update of which the list has no room cannot be retracted, and is not to be made. Such are those of
// gradients that are not finite, and the first few of a training, in which v is several times larger than before.
type Retraction struct{ bytes []byte }

const (
	// retractionHead are the sums of the streams before the update, in the order of [Sums]; see [Retraction.Sums].
	retractionHead = 64
	// A block of elements has a bit of its codes in each plane: of m the first, then of v, then of p.
	retractionPlanes = 7
	planesOfBlock    = retractionPlanes * Block / 8 // bytes
	// leastEscapes is the room for escapes, in bytes, that the smallest chunk has.
	leastEscapes = 64
	// An escape is a difference of 16 bits. This one says that the bits before the update follow, as they were.
	isVerbatim = math.MinInt16
)

// codeOf says how differences of numbers are coded: the first plane, and how many.
type codeOf abi.RetractionCode

// codesOf has the codes of each of the numbers.
func codesOf(number int) codeOf { return codeOf(abi.RetractionCodes[number]) }

// reach is the largest difference that has a code.
func (c codeOf) reach() uint32 { return 1<<(c.Bits-1) - 1 }

// escape is the code of all larger ones.
func (c codeOf) escape() uint32 { return 1<<c.Bits - 1 }

// RetractionVersion is that of what a log means. A process takes no logs of another version from the one before it.
const RetractionVersion = 2

// RetractionBytes returns the size of the log of a chunk: a byte for each element, and more for small chunks.
func RetractionBytes(elements int) int {
	blocks := (elements + Block - 1) / Block
	return (max(elements, retractionHead+planesOfBlock*blocks+leastEscapes) + 63) &^ 63
}

// RetractionIn returns the log in some memory, which must be aligned to a cache line and have the size of
// [RetractionBytes].
func RetractionIn(memory []byte) Retraction { return Retraction{memory} }

// Retractable refuses formats whose updates cannot be retracted.
func (f Format) Retractable() error {
	switch {
	case f.Algorithm != Adam:
		return fmt.Errorf("the optimizer is %v: expected AdamW or Adam", f.Algorithm)
	case f.Moments != MomentsFP32:
		return fmt.Errorf("moments are %v: expected fp32", f.Moments)
	case f.State == Split24:
		return errors.New("state is split24: expected split or fp32")
	}
	return nil
}

// Sums returns where the sums of the streams before the update are, in the order of [Sums]. [Retractor.Prepare] does
// not write them: whoever updates a chunk may know them already.
func (r Retraction) Sums() *[abi.UndoStreams]uint64 {
	return (*[abi.UndoStreams]uint64)(view[uint64](r.bytes[:8*abi.UndoStreams]))
}

// planes returns the planes of a block.
func (r Retraction) planes(block int) *planes {
	return (*planes)(view[uint64](r.bytes[retractionHead+planesOfBlock*block:][:planesOfBlock]))
}

// escapes returns the list of escapes of a chunk of so many elements.
func (r Retraction) escapes(elements int) escapes {
	return escapes{view[uint16](r.bytes[retractionHead+planesOfBlock*((elements+Block-1)/Block):])}
}

// planes has the codes of a block: 64 elements in a word.
type planes [retractionPlanes * wordsOfBlock]uint64

// wordsOfBlock is the number of words of a plane.
const wordsOfBlock = Block / 64

// escapes is a list, or the rest of one. It begins at the end of the log, and goes towards its beginning.
type escapes struct{ left []uint16 }

// next returns the next words of the list, the first of them last, or nil if there are no more.
func (e *escapes) next(words int) []uint16 {
	rest := len(e.left) - words
	if rest < 0 {
		return nil
	}
	next := e.left[rest:]
	e.left = e.left[:rest]
	return next
}

// put appends the difference of a number from what it was, and reports whether there was room.
func (e *escapes) put(was, hat uint32) bool {
	by := int32(was - hat)
	if isVerbatim < by && by <= math.MaxInt16 {
		if next := e.next(1); next != nil {
			next[0] = uint16(by)
			return true
		}
		return false
	}
	next := e.next(3)
	if next != nil {
		next[2], next[1], next[0] = 1<<15, uint16(was), uint16(was>>16)
	}
	return next != nil
}

// take returns what a number was. ok is false if the list has ended.
func (e *escapes) take(hat uint32) (was uint32, ok bool) {
	by := e.next(1)
	if by == nil {
		return 0, false
	}
	if by[0] != 1<<15 {
		return hat + uint32(int32(int16(by[0]))), true
	}
	verbatim := e.next(2)
	if verbatim == nil {
		return 0, false
	}
	return uint32(verbatim[1]) | uint32(verbatim[0])<<16, true
}

// numbersOfBlock are the bits of the numbers of a block.
type numbersOfBlock [Block]uint32

// floats returns the first n numbers.
func (s *numbersOfBlock) floats(n int) vector { return unsafe.Slice((*float32)(unsafe.Pointer(s)), n) }

// stateOfBlock has the numbers of a block that an update replaces, in the order of [abi.Hats].
type stateOfBlock [abi.Hats]numbersOfBlock

// Retractor retracts updates, or prepares that, block by block. It has the memory for a block. One goroutine at a time
// may use it.
type Retractor struct {
	set    Set
	format Format
	k      scalars
	table  *abi.Table
	// inverses are what the inverse multiplies by.
	inverses abi.InverseTable
	after    buffers        // the state after the update, and its gradients
	products [Block]float32 // what the update has added to a number
	was      stateOfBlock   // the state before it
	hat      stateOfBlock   // what the inverse makes of the state after it
}

// begin readies the retractor for a chunk, and returns its length.
func (r *Retractor) begin(s Set, f Format, constants *Constants, c *Chunk) int {
	r.set, r.format, r.k, r.table = s, f, constants.scalars(), &constants.table
	for number, factor := range [abi.Hats]float64{
		abi.HatOfMaster: 1 + float64(r.k[abi.Decay]),
		abi.HatOfFirst:  float64(r.k[abi.Beta1]),
		abi.HatOfSecond: float64(r.k[abi.Beta2]),
	} {
		for lane := range r.inverses[number] {
			r.inverses[number][lane] = flush(float32(1/factor - 1))
		}
	}
	return c.check(f)
}

// Prepare writes the log for an update that is still to be made. It reports false if the update could not be retracted:
// then it must not be made.
func (r *Retractor) Prepare(s Set, f Format, constants *Constants, c Chunk, log Retraction) bool {
	n := r.begin(s, f, constants, &c)
	list := log.escapes(n)
	for first := 0; first < n; first += Block {
		part := c.Slice(first, min(first+Block, n))
		if !r.copiesMaster(&part) {
			return false
		}
		codes := log.planes(first / Block)
		r.foreseeBlock(&part, codes)
		if !r.escape(&part, codes, &list) {
			return false
		}
	}
	return true
}

// copiesMaster reports whether the parameters are what storing the master weights makes of them. A program may have
// written others, which the log does not have.
func (r *Retractor) copiesMaster(c *Chunk) bool {
	if r.format.State != FP32 || !r.format.hasParameter() {
		return true
	}
	copied := r.after.old[:c.Len()]
	r.set.store(Array{r.format.Parameter, bytesOf(copied)}, c.Master)
	return slices.Equal(copied, c.Parameter)
}

// foreseeBlock sets what the inverse will make of a block after an update that is still to be made, and writes the
// codes.
func (r *Retractor) foreseeBlock(c *Chunk, codes *planes) {
	n := c.Len()
	if r.callsKernels(n) {
		clear(codes[:]) // the last block may be short
		r.foreseeInRegisters(c, codes)
		return
	}
	r.was.load(r.format, c)
	r.after.load(r.set, r.format, c)
	r.after.update(r.set, r.format, &r.k, n)
	r.invertMaster(n)
	r.invertMoments(n)
	codes.encode(&r.was, &r.hat, n)
}

// load sets the numbers to those of a chunk of up to Block elements.
func (s *stateOfBlock) load(f Format, c *Chunk) {
	copy(s[abi.HatOfFirst][:], view[uint32](c.Moments[0].Data))
	copy(s[abi.HatOfSecond][:], view[uint32](c.Moments[1].Data))
	if f.State == FP32 {
		copy(s[abi.HatOfMaster][:], view[uint32](bytesOf(c.Master)))
		return
	}
	low := c.Low[:len(c.Parameter)]
	for i, parameter := range c.Parameter {
		s[abi.HatOfMaster][i] = math.Float32bits(Merge(parameter, low[i]))
	}
}

// invertMaster sets what the inverse makes of master weights.
func (r *Retractor) invertMaster(n int) {
	var p, m, v, u vector = r.after.weights[:n], r.after.first[:n], r.after.second[:n], r.after.scratch[:n]
	r.set.sqrt(u, v)
	r.set.fmaPlus(u, r.k[abi.InverseRootBias2], u, r.k[abi.Epsilon])
	r.set.div(u, m, u)
	r.invert(abi.HatOfMaster, p, abi.StepSize, u)
}

// invertMoments sets what the inverse makes of moments. The gradients have their scale and penalty.
func (r *Retractor) invertMoments(n int) {
	var g, m, v, squares vector = r.after.gradient[:n], r.after.first[:n], r.after.second[:n], r.after.scratch[:n]
	r.invert(abi.HatOfFirst, m, abi.OneMinusBeta1, g)
	r.set.square(squares, g)
	r.invert(abi.HatOfSecond, v, abi.OneMinusBeta2, squares)
}

// invert sets what the inverse makes of a number after an update, which has added a multiple of something to it.
func (r *Retractor) invert(number int, after vector, factor int, added vector) {
	n := len(after)
	hat, product := r.hat[number].floats(n), vector(r.products[:n])
	r.set.mul(product, r.k[factor], added)
	r.set.fma(hat, -r.k[factor], added, after)
	r.set.fma(hat, r.inverses[number][0], hat, hat)
	for i, word := range r.hat[number][:n] {
		if after[i] == product[i] || word&exponents == exponents {
			hat[i] = 0
		}
	}
}

// encode writes the codes of n numbers.
func (to *planes) encode(was, hat *stateOfBlock, n int) {
	var codes [Block]uint8
	for number := range abi.Hats {
		of := codesOf(number)
		for i := range n {
			codes[i] |= of.code(was[number][i] - hat[number][i])
		}
	}
	for first := 0; first < Block; first += 8 {
		eight := binary.LittleEndian.Uint64(codes[first:])
		for plane := range retractionPlanes {
			to.bytes()[plane*Block/8+first/8] = bitOfEach(eight, plane)
		}
	}
}

// code returns the code of a difference at its place among those of an element.
func (c codeOf) code(difference uint32) uint8 {
	return uint8(min(difference+c.reach(), c.escape()) << c.Plane)
}

// bitOfEach returns a bit of each of eight bytes.
func bitOfEach(eight uint64, bit int) byte {
	return byte(eight >> bit & 0x0101010101010101 * 0x0102040810204080 >> 56)
}

// escape appends the numbers of a block whose codes say so, in the order in which [Retractor.Retract] needs them. It
// reports whether the list had room.
func (r *Retractor) escape(c *Chunk, codes *planes, list *escapes) bool {
	for number := range abi.Hats {
		for word := range wordsOfBlock {
			for escaped := codes.escaped(codesOf(number), word); escaped != 0; escaped &= escaped - 1 {
				i := 64*word + bits.TrailingZeros64(escaped)
				if !list.put(c.numberBits(r.format, number, i), r.hat[number][i]) {
					return false
				}
			}
		}
	}
	return true
}

// numberBits returns a number of the state, as [abi.Hats] number them, of an element.
func (c *Chunk) numberBits(f Format, number, i int) uint32 {
	if number == abi.HatOfMaster {
		return math.Float32bits(c.MasterWeight(f, i))
	}
	return view[uint32](c.Moments[number-abi.HatOfFirst].Data)[i]
}

// escaped returns which numbers of a word have no code.
func (from *planes) escaped(of codeOf, word int) uint64 {
	escaped := ^uint64(0)
	for plane := of.Plane; plane < of.Plane+of.Bits; plane++ {
		escaped &= from[plane*wordsOfBlock+word]
	}
	return escaped
}

// bytes returns the planes in bytes, with eight elements in each.
func (from *planes) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(from)), planesOfBlock) }

// Retract restores a chunk to what it was before an update that [Retractor.Prepare] has prepared, beginning at element
// first, which is the first of a tile. It keeps an undo log, unless u is empty. It reports false if the log of the
// retraction is not one of such an update: memory has changed.
func (r *Retractor) Retract(s Set, f Format, constants *Constants, c Chunk, log Retraction, first int, u Undo) bool {
	n := r.begin(s, f, constants, &c)
	list := log.escapes(n)
	for block := 0; block < n; block += Block {
		end := min(block+Block, n)
		codes := log.planes(block / Block)
		if end <= first {
			if !codes.skip(&list) {
				return false
			}
			continue
		}
		part := c.Slice(block, end)
		if !r.restore(&part, codes, &list) {
			return false
		}
		r.put(&part, block, max(block, first)-block, u)
	}
	return true
}

// skip skips the escapes of a block.
func (from *planes) skip(list *escapes) bool {
	for number := range abi.Hats {
		of := codesOf(number)
		for word := range wordsOfBlock {
			for range bits.OnesCount64(from.escaped(of, word)) {
				if _, ok := list.take(0); !ok {
					return false
				}
			}
		}
	}
	return true
}

// retractionPart is what a kernel does of a retraction, for a block.
type retractionPart uint8

const (
	foreseeing       retractionPart = iota // sets what the inverse makes of all numbers after an update, and codes them
	restoringMaster                        // sets what the master weights were before it
	restoringMoments                       // and the moments, once the master weights are known
	puttingBack                            // stores them all, with an undo log
)

// retractionKey names a kernel of a part of a retraction.
type retractionKey struct {
	set   Set
	part  retractionPart
	state abi.State
}

// callsKernels reports whether kernels that work in registers take a block of n elements.
func (r *Retractor) callsKernels(n int) bool { return r.set.inRegisters() && n%abi.Group == 0 }

// restore sets the state before an update that was made.
func (r *Retractor) restore(c *Chunk, codes *planes, list *escapes) bool {
	n := c.Len()
	if r.callsKernels(n) {
		return r.restoreInRegisters(c, codes, list)
	}
	r.after.load(r.set, r.format, c)
	var p, g vector = r.after.weights[:n], r.after.gradient[:n]
	r.invertMaster(n)
	r.decode(codes, abi.HatOfMaster)
	if !r.takeEscapes(codes, abi.HatOfMaster, list) {
		return false
	}
	for i := range p {
		p[i] = flush(math.Float32frombits(r.was[abi.HatOfMaster][i]))
	}
	r.set.mul(g, r.k[abi.GradScale], g)
	r.set.fma(g, r.k[abi.L2Penalty], p, g)
	r.invertMoments(n)
	r.decode(codes, abi.HatOfFirst)
	r.decode(codes, abi.HatOfSecond)
	return r.takeEscapes(codes, abi.HatOfFirst, list) && r.takeEscapes(codes, abi.HatOfSecond, list)
}

// decode sets what numbers were. Where a code says that there is an escape, the number is off by it.
func (r *Retractor) decode(from *planes, number int) {
	bytes, of, was, hat := from.bytes(), codesOf(number), &r.was[number], &r.hat[number]
	for first := 0; first < Block; first += 8 {
		eight := uint64(0)
		for plane := range of.Bits {
			eight |= spreadBits(bytes[(of.Plane+plane)*Block/8+first/8]) << plane
		}
		for i := first; i < first+8; i++ {
			was[i] = hat[i] + uint32(eight&0xff) - of.reach()
			eight >>= 8
		}
	}
}

// takeEscapes sets what numbers were that have no code. It reports false if the list has too few.
func (r *Retractor) takeEscapes(from *planes, number int, list *escapes) bool {
	of, was := codesOf(number), &r.was[number]
	for word := range wordsOfBlock {
		for escaped := from.escaped(of, word); escaped != 0; escaped &= escaped - 1 {
			i, ok := 64*word+bits.TrailingZeros64(escaped), false
			hat := was[i] - of.escape() + of.reach()
			if was[i], ok = list.take(hat); !ok {
				return false
			}
		}
	}
	return true
}

// spreadBits returns a byte for each bit: 1 or 0.
func spreadBits(b byte) uint64 {
	return (uint64(b)*0x0101010101010101&0x8040201008040201 + 0x7f7f7f7f7f7f7f7f) >> 7 & 0x0101010101010101
}

// put stores the state before the update in a block, beginning at one of its elements, and keeps an undo log.
func (r *Retractor) put(c *Chunk, block, start int, u Undo) {
	n := c.Len()
	if r.callsKernels(n) {
		r.putInRegisters(c, block, start, u)
		return
	}
	for at := start; at < n; at += r.format.granule() {
		tile := c.Slice(at, min(at+r.format.granule(), n))
		if u.bytes != nil {
			u.keep(r.format, &tile, block+at)
		}
		r.putTile(&tile, at)
	}
}

// putTile stores the state before the update in a tile, which begins at an element of the block.
func (r *Retractor) putTile(c *Chunk, at int) {
	n := c.Len()
	copy(view[uint32](c.Moments[0].Data), r.was[abi.HatOfFirst][at:at+n])
	copy(view[uint32](c.Moments[1].Data), r.was[abi.HatOfSecond][at:at+n])
	p := r.was[abi.HatOfMaster][at : at+n]
	if r.format.State == Split {
		for i, word := range p {
			c.Parameter[i], c.Low[i] = Separate(math.Float32frombits(word))
		}
		return
	}
	copy(view[uint32](bytesOf(c.Master)), p)
	if r.format.hasParameter() {
		r.set.store(Array{r.format.Parameter, bytesOf(c.Parameter)}, c.Master)
	}
}

// arguments returns those of a kernel that works on the first n elements of a block: full groups.
func (r *Retractor) arguments(n int, c *Chunk, codes *planes, numbers *stateOfBlock) abi.RetractionArguments {
	return abi.RetractionArguments{
		Elements:     n,
		GradientKind: kind(r.format.Gradient),
		CopyKind:     kind(r.format.Parameter),
		Table:        r.table,
		Inverses:     &r.inverses,
		Parameter:    pointer(c.Parameter),
		Low:          pointer(c.low()),
		Master:       pointer(c.Master),
		Moment1:      pointer(c.Moments[0].Data),
		Moment2:      pointer(c.Moments[1].Data),
		Gradient:     pointer(c.Gradient.Data),
		Planes:       (*byte)(unsafe.Pointer(codes)),
		Numbers:      &numbers[0][0],
	}
}

// call has a kernel do a part of a retraction.
func (r *Retractor) call(part retractionPart, state abi.State, a *abi.RetractionArguments) {
	s := r.set
	if s == AVX512BF16 {
		s = AVX512
	}
	retraction(retractionKey{s, part, state}, a)
}

// foreseeInRegisters is [Retractor.foreseeBlock], for full groups.
func (r *Retractor) foreseeInRegisters(c *Chunk, codes *planes) {
	a := r.arguments(c.Len(), c, codes, &r.hat)
	r.call(foreseeing, r.format.State, &a)
}

// restoreInRegisters is [Retractor.restore], for full groups.
func (r *Retractor) restoreInRegisters(c *Chunk, codes *planes, list *escapes) bool {
	a := r.arguments(c.Len(), c, codes, &r.was)
	r.call(restoringMaster, r.format.State, &a)
	if !r.takeEscapes(codes, abi.HatOfMaster, list) {
		return false
	}
	a.Master = (*float32)(unsafe.Pointer(&r.was[abi.HatOfMaster][0]))
	r.call(restoringMoments, FP32, &a)
	return r.takeEscapes(codes, abi.HatOfFirst, list) && r.takeEscapes(codes, abi.HatOfSecond, list)
}

// putInRegisters is [Retractor.put], for full groups.
func (r *Retractor) putInRegisters(c *Chunk, block, start int, u Undo) {
	a := r.arguments(c.Len(), c, nil, &r.was)
	a.First, a.Start, a.Undo = block, start, pointer(u.bytes)
	r.call(puttingBack, r.format.State, &a)
}
