package kernel

import (
	"encoding/binary"
	"math"
	"runtime"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel/abi"
)

// At returns element i as an fp32 number.
func (a Array) At(i int) float32 {
	switch a.Type {
	case dtype.BF16:
		return BF16ToFloat32(binary.LittleEndian.Uint16(a.Data[2*i:]))
	case dtype.F16:
		return FP16ToFloat32(binary.LittleEndian.Uint16(a.Data[2*i:]))
	default:
		return math.Float32frombits(binary.LittleEndian.Uint32(a.Data[4*i:]))
	}
}

// Put rounds x to the array's type, to nearest even, and stores it as element i.
func (a Array) Put(i int, x float32) {
	switch a.Type {
	case dtype.BF16:
		binary.LittleEndian.PutUint16(a.Data[2*i:], Float32ToBF16(x))
	case dtype.F16:
		binary.LittleEndian.PutUint16(a.Data[2*i:], Float32ToFP16(x))
	default:
		binary.LittleEndian.PutUint32(a.Data[4*i:], math.Float32bits(x))
	}
}

// MasterWeight returns master weight i of the chunk.
func (c *Chunk) MasterWeight(f Format, i int) float32 {
	switch f.State {
	case FP32:
		return c.Master[i]
	case Split24:
		return Merge24(c.Parameter[i], c.LowBytes[i])
	}
	return Merge(c.Parameter[i], c.Low[i])
}

// PutMasterWeight stores master weight i, and the parameter that the trainer reads. It
// rounds to 24 bits half away from zero: the number comes from another format, and is
// rounded once, not step by step.
func (c *Chunk) PutMasterWeight(f Format, i int, p float32) {
	switch f.State {
	case Split:
		c.Parameter[i], c.Low[i] = Separate(p)
		return
	case Split24:
		c.Parameter[i], c.LowBytes[i] = Separate24(RoundTo24(p))
		return
	}
	c.Master[i] = p
	switch f.Parameter {
	case dtype.BF16:
		c.Parameter[i] = Float32ToBF16(p)
	case dtype.F16:
		c.Parameter[i] = Float32ToFP16(p)
	}
}

// load reads all elements as the arithmetic sees them.
func (a Array) load(to vector) {
	switch a.Type {
	case dtype.BF16:
		for i, h := range view[uint16](a.Data)[:len(to)] {
			to[i] = flush(BF16ToFloat32(h))
		}
	case dtype.F16:
		for i, h := range view[uint16](a.Data)[:len(to)] {
			to[i] = FP16ToFloat32(h) // fp16 has no number that is denormal in fp32
		}
	default:
		for i, x := range view[float32](a.Data)[:len(to)] {
			to[i] = flush(x)
		}
	}
}

// store rounds numbers to the array's type, to nearest even.
func (a Array) store(from vector) {
	switch a.Type {
	case dtype.BF16:
		to := view[uint16](a.Data)[:len(from)]
		for i, x := range from {
			to[i] = Float32ToBF16(x)
		}
	case dtype.F16:
		to := view[uint16](a.Data)[:len(from)]
		for i, x := range from {
			to[i] = Float32ToFP16(x)
		}
	default:
		copy(view[float32](a.Data), from)
	}
}

// away rounds numbers to bf16, half away from zero.
func (from vector) away(to []uint16) {
	to = to[:len(from)]
	for i, x := range from {
		to[i], _ = Separate(x)
	}
}

// dithered rounds numbers to bf16 at random. The part that is cut off is the
// probability of rounding up. The dither belongs to the first element.
func (from vector) dithered(to []uint16, dither uint32) {
	to = to[:len(from)]
	for i, x := range from {
		random := dither * dither >> 16
		to[i] = uint16((math.Float32bits(x) + random) >> 16)
		dither += abi.DitherStep
	}
}

// merge reads master weights of split state as the arithmetic sees them.
func (to vector) merge(parameter, low []uint16) {
	low = low[:len(to)]
	for i, parameter := range parameter[:len(to)] {
		to[i] = flush(Merge(parameter, low[i]))
	}
}

// separate stores master weights in split state.
func (from vector) separate(parameter, low []uint16) {
	parameter, low = parameter[:len(from)], low[:len(from)]
	for i, p := range from {
		parameter[i], low[i] = Separate(p)
	}
}

// merge24 reads master weights of split24 state as the arithmetic sees them.
func (to vector) merge24(parameter []uint16, low []byte) {
	low = low[:len(to)]
	for i, parameter := range parameter[:len(to)] {
		to[i] = flush(Merge24(parameter, low[i]))
	}
}

// separate24 stores master weights in split24 state, rounded at random. The dither belongs
// to the first element.
func (from vector) separate24(parameter []uint16, low []byte, dither uint32) {
	parameter, low = parameter[:len(from)], low[:len(from)]
	for i, p := range from {
		parameter[i], low[i] = Separate24(ditherTo24(p, dither))
		dither += abi.DitherStep
	}
}

// storeMoment stores a moment. It rounds to bf16 half away from zero, as the
// parameters of split state are rounded. That takes a third of the instructions of
// rounding to even, and ties are rare.
func (s Set) storeMoment(to Array, from vector) {
	if to.Type != dtype.BF16 {
		s.store(to, from)
		return
	}
	s.away(view[uint16](to.Data), from)
}

// storeSlowMoment stores a moment that hardly changes. It rounds to bf16 at random.
func (s Set) storeSlowMoment(to Array, from vector, dither uint32) {
	if to.Type != dtype.BF16 {
		s.store(to, from)
		return
	}
	s.dithered(view[uint16](to.Data), from, dither)
}

// loadMaster reads the master weights of a chunk as the arithmetic sees them.
func (s Set) loadMaster(to vector, f Format, c *Chunk) {
	switch f.State {
	case FP32:
		s.load(to, Array{dtype.F32, bytesOf(c.Master)})
	case Split24:
		to.merge24(c.Parameter, c.LowBytes)
	default:
		s.merge(to, c.Parameter, c.Low)
	}
}

// storeMaster stores the master weights, and the parameters that the trainer reads. The
// dither belongs to the first element.
func (s Set) storeMaster(f Format, c *Chunk, from vector, dither uint32) {
	switch f.State {
	case Split:
		s.separate(c.Parameter, c.Low, from)
		return
	case Split24:
		from.separate24(c.Parameter, c.LowBytes, dither)
		return
	}
	copy(c.Master, from)
	if f.hasParameter() {
		s.store(Array{f.Parameter, bytesOf(c.Parameter)}, from)
	}
}

// ditherOf returns the dither of an element of a shard.
func (c *Constants) ditherOf(element int64) uint32 {
	return c.dither + uint32(element)*abi.DitherStep
}

// masterDitherOf is ditherOf for masters of 24 bits, whose random numbers are their own.
func (c *Constants) masterDitherOf(element int64) uint32 {
	return c.masterDither + uint32(element)*abi.DitherStep
}

// scalars are the constants of a step, each once.
type scalars [abi.Rows]float32

func (c *Constants) scalars() (k scalars) {
	for row := range k {
		k[row] = flush(c.table[row][0])
	}
	return k
}

// buffers is the memory in which sets work that do not work in registers. They take as
// many elements through all operations at a time as stay in the first-level cache.
type buffers struct {
	weights, gradient, first, second, scratch [Block]float32
	old                                       [Block]uint16 // parameters
}

// updateInTiles updates a chunk, beginning at element first, which is the first of a
// tile. The undo log and the changes may be nil.
func (s Set) updateInTiles(f Format, constants *Constants, c *Chunk, first int, log *Undo, changes *Changes) {
	n, tile := c.Len(), Block
	if first == n {
		return
	}
	if log != nil {
		tile = f.granule()
	}
	var d buffers
	k := constants.scalars()
	for ; first < n; first += Block {
		end := min(first+Block, n)
		part := c.Slice(first, end)
		d.load(s, f, &part)
		d.update(s, f, &k, end-first)
		for at := first; at < end; at += tile {
			part := c.Slice(at, min(at+tile, end))
			if log != nil {
				log.keep(f, &part, at)
			}
			if changes == nil {
				d.store(s, f, constants, &part, at-first)
				continue
			}
			n := copy(d.old[:], part.Parameter)
			d.store(s, f, constants, &part, at-first)
			changes.note(at, d.old[:n], part.Parameter)
		}
	}
}

// load reads a chunk of up to Block elements.
func (d *buffers) load(s Set, f Format, c *Chunk) {
	n := c.Len()
	s.loadMaster(d.weights[:n], f, c)
	s.load(d.gradient[:n], c.Gradient)
	if f.Moments == MomentsInt8 {
		s.loadBlock(c.block(0), d.first[:n], d.second[:n])
		s.square(d.second[:n], d.second[:n])
		return
	}
	s.load(d.first[:n], c.Moments[0])
	if f.Algorithm.Moments() == 2 {
		s.load(d.second[:n], c.Moments[1])
	}
}

// store stores a chunk. Its first element is element at of the buffers.
func (d *buffers) store(s Set, f Format, constants *Constants, c *Chunk, at int) {
	end := at + c.Len()
	s.storeMaster(f, c, d.weights[at:end], constants.masterDitherOf(c.First))
	if f.Moments == MomentsInt8 {
		dither := scramble(uint32(c.First/Block)) + constants.stride
		s.encode(c.block(0), d.first[at:end], d.second[at:end], atRandom(dither))
		return
	}
	for number, moment := range [][]float32{d.first[at:end], d.second[at:end]}[:f.Algorithm.Moments()] {
		if number == f.Algorithm.SlowMoment() {
			s.storeSlowMoment(c.Moments[number], moment, constants.ditherOf(c.First))
		} else {
			s.storeMoment(c.Moments[number], moment)
		}
	}
}

// update updates the first n elements. If moments are int8, the second moments become
// their roots.
func (d *buffers) update(s Set, f Format, k *scalars, n int) {
	var p, g, m, v, t vector = d.weights[:n], d.gradient[:n], d.first[:n], d.second[:n], d.scratch[:n]
	s.mul(g, k[abi.GradScale], g)
	s.fma(g, k[abi.L2Penalty], p, g)
	switch f.Algorithm {
	case Adam:
		root := t
		if f.Moments == MomentsInt8 {
			root = v
		}
		s.adam(k, p, g, m, v, root, t)
	case Lion:
		s.lion(k, p, g, m, t)
	case Adagrad:
		s.adagrad(k, p, g, m, t)
	case SGD:
		s.sgd(k, p, g, m, t)
	}
}

// adam stores the root of v in root, which may be v or t.
func (s Set) adam(k *scalars, p, g, m, v, root, t vector) {
	s.mul(m, k[abi.Beta1], m)
	s.fma(m, k[abi.OneMinusBeta1], g, m)
	s.square(t, g)
	s.mul(v, k[abi.Beta2], v)
	s.fma(v, k[abi.OneMinusBeta2], t, v)
	s.sqrt(root, v)
	s.fmaPlus(t, k[abi.InverseRootBias2], root, k[abi.Epsilon])
	s.div(t, m, t)
	s.fma(p, k[abi.Decay], p, p)
	s.fma(p, k[abi.StepSize], t, p)
}

func (s Set) lion(k *scalars, p, g, m, u vector) {
	s.mul(u, k[abi.Beta1], m)
	s.fma(u, k[abi.OneMinusBeta1], g, u)
	s.mul(m, k[abi.Beta2], m)
	s.fma(m, k[abi.OneMinusBeta2], g, m)
	s.fma(p, k[abi.Decay], p, p)
	s.withSign(u, k[abi.StepSize], u)
	s.add(p, p, u)
}

func (s Set) adagrad(k *scalars, p, g, sum, t vector) {
	s.fmaSquare(sum, g, sum)
	s.sqrt(t, sum)
	s.fmaPlus(t, 1, t, k[abi.Epsilon])
	s.div(t, g, t)
	s.fma(p, k[abi.StepSize], t, p)
}

func (s Set) sgd(k *scalars, p, g, b, u vector) {
	s.mul(b, k[abi.Beta1], b)
	s.fma(b, k[abi.OneMinusBeta1], g, b)
	s.mul(u, k[abi.GradientShare], g)
	s.fma(u, k[abi.MomentumShare], b, u)
	s.fma(p, k[abi.Decay], p, p)
	s.fma(p, k[abi.StepSize], u, p)
}

// accumulateInTiles adds a gradient to a sum.
func (s Set) accumulateInTiles(sum, gradient Array) {
	var a, b [Block]float32
	for first, n := 0, sum.Len(); first < n; first += Block {
		end := min(first+Block, n)
		x, y := vector(a[:end-first]), vector(b[:end-first])
		part := sum.Slice(first, end)
		s.load(x, part)
		s.load(y, gradient.Slice(first, end))
		s.add(x, x, y)
		s.store(part, x)
	}
}

// sumSquaresInTiles adds up runs; the last may be short.
func (s Set) sumSquaresInTiles(g Array, lanes *[abi.Group]float64) {
	var numbers [abi.Run]float32
	for first, n := 0, g.Len(); first < n; first += abi.Run {
		end := min(first+abi.Run, n)
		run := vector(numbers[:end-first])
		s.load(run, g.Slice(first, end))
		var sums [abi.Group]float32
		s.addSquares(&sums, run)
		for lane, x := range sums {
			lanes[lane] += float64(x)
		}
	}
}

// sumPairsInTiles adds up runs of pairs; the last may be short.
func (s Set) sumPairsInTiles(g Array, lanes *[2][abi.Group]float64) {
	var numbers [abi.PairRun]float32
	var apart [2][abi.PairRun / 2]float32
	for first, n := 0, g.Len(); first < n; first += abi.PairRun {
		end := min(first+abi.PairRun, n)
		run := vector(numbers[:end-first])
		s.load(run, g.Slice(first, end))
		for i, x := range run {
			apart[i%2][i/2] = x
		}
		for parity := range apart {
			var sums [abi.Group]float32
			s.addSquares(&sums, apart[parity][:(len(run)+1-parity)/2])
			for lane, x := range sums {
				lanes[parity][lane] += float64(x)
			}
		}
	}
}

func (s Set) sumWideSquaresInTiles(g Array, lanes *[abi.Group]float64) {
	var numbers [abi.Run]float32
	for first, n := 0, g.Len(); first < n; first += abi.Run {
		end := min(first+abi.Run, n)
		s.load(numbers[:end-first], g.Slice(first, end))
		for i, x := range numbers[:end-first] {
			lanes[i%abi.Group] += float64(float64(x) * float64(x))
		}
	}
}

// zero is or-ed into streams, which moves them and does not change them. The compiler
// cannot know that it stays 0.
var zero uint64

func trafficGeneric(f Format, c Chunk) {
	if f.State != FP32 {
		touch(bytesOf(c.Parameter))
		touch(c.low())
	} else {
		clear(c.Parameter)
		touch(bytesOf(c.Master))
	}
	for _, m := range c.Moments {
		touch(m.Data)
	}
	touch(bytesOf(c.Headers))
	read(c.Gradient.Data)
}

// touch moves bytes to the processor and back.
func touch(b []byte) {
	words := view[uint64](b)
	for ; len(words) >= 4; words = words[4:] {
		words[0] |= zero
		words[1] |= zero
		words[2] |= zero
		words[3] |= zero
	}
	for i := len(b) &^ 31; i < len(b); i++ {
		b[i] |= byte(zero)
	}
}

// read moves bytes to the processor.
func read(b []byte) {
	var all uint64
	words := view[uint64](b)
	for ; len(words) >= 4; words = words[4:] {
		all |= words[0] | words[1] | words[2] | words[3]
	}
	for _, x := range b[len(b)&^31:] {
		all |= uint64(x)
	}
	runtime.KeepAlive(all)
}
