package kernel

import (
	"encoding/binary"
	"math"
	"runtime"

	"plimsoll/dtype"
	"plimsoll/optim/kernel/abi"
)

// At is element i as an fp32 number.
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

// Put rounds x to the array's type, to nearest even, and stores it as element
// i.
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

// MasterWeight is master weight i of a chunk.
func (c *Chunk) MasterWeight(f Format, i int) float32 {
	if f.State == FP32 {
		return c.Master[i]
	}
	return Merge(c.Parameter[i], c.Low[i])
}

// PutMasterWeight stores master weight i, and what the trainer reads of it.
func (c *Chunk) PutMasterWeight(f Format, i int, p float32) {
	if f.State == Split {
		c.Parameter[i], c.Low[i] = Separate(p)
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

// storeMoment stores a moment. In bf16, it is rounded half away from zero, as
// the parameters of split state are: that takes a third of the instructions of
// rounding to even, and ties are rare.
func (a Array) storeMoment(from vector) {
	if a.Type != dtype.BF16 {
		a.store(from)
		return
	}
	to := view[uint16](a.Data)[:len(from)]
	for i, x := range from {
		to[i], _ = Separate(x)
	}
}

// storeSlowMoment stores a moment that hardly changes. In bf16, it is rounded up
// with the probability of the part that is cut off. The dither is that of the
// first element.
func (a Array) storeSlowMoment(from vector, dither uint32) {
	if a.Type != dtype.BF16 {
		a.store(from)
		return
	}
	to := view[uint16](a.Data)[:len(from)]
	for i, x := range from {
		random := dither * dither >> 16
		to[i] = uint16((math.Float32bits(x) + random) >> 16)
		dither += abi.DitherStep
	}
}

// loadMaster reads the master weights as the arithmetic sees them.
func (c *Chunk) loadMaster(f Format, to vector) {
	if f.State == FP32 {
		for i, x := range c.Master[:len(to)] {
			to[i] = flush(x)
		}
		return
	}
	low := c.Low[:len(to)]
	for i, parameter := range c.Parameter[:len(to)] {
		to[i] = flush(Merge(parameter, low[i]))
	}
}

// storeMaster stores the master weights, and what the trainer reads of them.
func (c *Chunk) storeMaster(f Format, from vector) {
	if f.State == FP32 {
		copy(c.Master, from)
		if f.hasParameter() {
			Array{f.Parameter, bytesOf(c.Parameter)}.store(from)
		}
		return
	}
	parameter, low := c.Parameter[:len(from)], c.Low[:len(from)]
	for i, p := range from {
		parameter[i], low[i] = Separate(p)
	}
}

// ditherOf is the dither of an element of a shard.
func (c *Constants) ditherOf(element int64) uint32 {
	return c.dither + uint32(element)*abi.DitherStep
}

// scalars are the constants of a step, once each.
type scalars [abi.Rows]float32

func (c *Constants) scalars() (k scalars) {
	for row := range k {
		k[row] = flush(c.table[row][0])
	}
	return k
}

// desk is where the plain Go kernel works. It takes as many elements through all
// operations at a time as stay in the first-level cache.
type desk struct {
	weights, gradient, first, second, scratch [Block]float32
}

// updateGeneric updates a chunk from element first on, the first of a turn, with
// an undo log or nil.
func updateGeneric(f Format, constants *Constants, c *Chunk, first int, log *Undo) {
	n, turn := c.Len(), Block
	if first == n {
		return
	}
	if log != nil {
		turn = f.granule()
	}
	var d desk
	k := constants.scalars()
	for ; first < n; first += Block {
		end := min(first+Block, n)
		part := c.Slice(first, end)
		d.load(f, &part)
		d.update(f, &k, end-first)
		for at := first; at < end; at += turn {
			part := c.Slice(at, min(at+turn, end))
			if log != nil {
				log.keep(f, &part, at)
			}
			d.store(f, constants, &part, at-first)
		}
	}
}

// load reads a chunk of up to Block elements.
func (d *desk) load(f Format, c *Chunk) {
	n := c.Len()
	c.loadMaster(f, d.weights[:n])
	c.Gradient.load(d.gradient[:n])
	if f.Moments == MomentsInt8 {
		c.block(0).load(d.first[:n], d.second[:n])
		vector(d.second[:n]).square(d.second[:n])
		return
	}
	c.Moments[0].load(d.first[:n])
	if f.Algorithm.Moments() == 2 {
		c.Moments[1].load(d.second[:n])
	}
}

// store stores a chunk that begins with an element of the desk.
func (d *desk) store(f Format, constants *Constants, c *Chunk, at int) {
	end := at + c.Len()
	c.storeMaster(f, d.weights[at:end])
	if f.Moments == MomentsInt8 {
		dither := scramble(uint32(c.First/Block)) + constants.stride
		c.block(0).encode(d.first[at:end], d.second[at:end], atRandom(dither))
		return
	}
	for number, moment := range [][]float32{d.first[at:end], d.second[at:end]}[:f.Algorithm.Moments()] {
		if number == f.Algorithm.SlowMoment() {
			c.Moments[number].storeSlowMoment(moment, constants.ditherOf(c.First))
		} else {
			c.Moments[number].storeMoment(moment)
		}
	}
}

// update updates the first n elements. A second moment that will be stored in
// int8 becomes its root.
func (d *desk) update(f Format, k *scalars, n int) {
	var p, g, m, v, t vector = d.weights[:n], d.gradient[:n], d.first[:n], d.second[:n], d.scratch[:n]
	g.mul(k[abi.GradientScale], g)
	g.fma(k[abi.L2Penalty], p, g)
	switch f.Algorithm {
	case Adam:
		root := t
		if f.Moments == MomentsInt8 {
			root = v
		}
		k.adam(p, g, m, v, root, t)
	case Lion:
		k.lion(p, g, m, t)
	case Adagrad:
		k.adagrad(p, g, m, t)
	case SGD:
		k.sgd(p, g, m, t)
	}
}

// adam makes the root of v in a vector that may be v or t.
func (k *scalars) adam(p, g, m, v, root, t vector) {
	m.mul(k[abi.Beta1], m)
	m.fma(k[abi.OneMinusBeta1], g, m)
	t.square(g)
	v.mul(k[abi.Beta2], v)
	v.fma(k[abi.OneMinusBeta2], t, v)
	root.sqrt(v)
	t.fmaPlus(k[abi.InverseRootBias2], root, k[abi.Epsilon])
	t.div(m, t)
	p.fma(k[abi.Decay], p, p)
	p.fma(k[abi.StepSize], t, p)
}

func (k *scalars) lion(p, g, m, u vector) {
	u.mul(k[abi.Beta1], m)
	u.fma(k[abi.OneMinusBeta1], g, u)
	m.mul(k[abi.Beta2], m)
	m.fma(k[abi.OneMinusBeta2], g, m)
	p.fma(k[abi.Decay], p, p)
	u.withSign(k[abi.StepSize], u)
	p.add(p, u)
}

func (k *scalars) adagrad(p, g, sum, t vector) {
	sum.fmaSquare(g, sum)
	t.sqrt(sum)
	t.fmaPlus(1, t, k[abi.Epsilon])
	t.div(g, t)
	p.fma(k[abi.StepSize], t, p)
}

func (k *scalars) sgd(p, g, b, u vector) {
	b.mul(k[abi.Beta1], b)
	b.fma(k[abi.OneMinusBeta1], g, b)
	u.mul(k[abi.GradientShare], g)
	u.fma(k[abi.MomentumShare], b, u)
	p.fma(k[abi.Decay], p, p)
	p.fma(k[abi.StepSize], u, p)
}

// accumulateGeneric adds a gradient to a sum.
func accumulateGeneric(sum, gradient Array) {
	var a, b [Block]float32
	for first, n := 0, sum.Len(); first < n; first += Block {
		end := min(first+Block, n)
		x, y := vector(a[:end-first]), vector(b[:end-first])
		part := sum.Slice(first, end)
		part.load(x)
		gradient.Slice(first, end).load(y)
		x.add(x, y)
		part.store(x)
	}
}

// sumSquaresGeneric adds up runs, of which the last may be short.
func sumSquaresGeneric(g Array, lanes *[abi.Group]float64) {
	var numbers [abi.Run]float32
	for first, n := 0, g.Len(); first < n; first += abi.Run {
		end := min(first+abi.Run, n)
		run := vector(numbers[:end-first])
		g.Slice(first, end).load(run)
		var sums [abi.Group]float32
		for len(run) > 0 {
			group := run[:min(abi.Group, len(run))]
			vector(sums[:len(group)]).fmaSquare(group, sums[:])
			run = run[len(group):]
		}
		for lane, x := range sums {
			lanes[lane] += float64(x)
		}
	}
}

func sumWideSquaresGeneric(g Array, lanes *[abi.Group]float64) {
	var numbers [abi.Run]float32
	for first, n := 0, g.Len(); first < n; first += abi.Run {
		end := min(first+abi.Run, n)
		g.Slice(first, end).load(numbers[:end-first])
		for i, x := range numbers[:end-first] {
			lanes[i%abi.Group] += float64(float64(x) * float64(x))
		}
	}
}

// zero is or-ed into streams that are to be moved and not changed. The compiler
// cannot know that it stays 0.
var zero uint64

func trafficGeneric(f Format, c Chunk) {
	if f.State == Split {
		touch(bytesOf(c.Parameter))
		touch(bytesOf(c.Low))
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
