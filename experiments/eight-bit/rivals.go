package main

import (
	"math"
	"slices"
	"sort"
)

// state holds the moments of one block in some code.
type state interface {
	decode(m, v *vector)
	encode(number, step uint32, m, v *vector)
}

// ours adapts block, which holds roots.
type ours struct {
	code
	block
}

func (o *ours) decode(m, v *vector) {
	o.block.decode(m, v)
	for i, s := range v {
		v[i] = s * s
	}
}

func (o *ours) encode(number, step uint32, m, v *vector) {
	var s vector
	for i, x := range v {
		s[i] = root(x)
	}
	o.code.encode(&o.block, number, step, m, &s)
}

func root(x float32) float32 { return float32(math.Sqrt(float64(x))) }

func magnitude(x float32) float32 { return float32(math.Abs(float64(x))) }

func largest(x *vector) (most float32) {
	for _, e := range x {
		most = max(most, magnitude(e))
	}
	return most
}

// hash is a dither without memory.
func hash(block, element, step uint32) uint32 {
	return scramble((block*blockElements+element)*nextStride + scramble(step))
}

// nearest rounds to nearest: it adds half a step to every number. Ties, which are rare here, go up.
func nearest(_, _, _ uint32) uint32 { return 1<<31 | 1<<(firstShift-1) }

// halves returns two independent numbers from 0 to 1 from one word of dither.
func halves(word uint32) (upper, lower float32) {
	return float32(word>>19) / (1 << 13), float32(word&firstMask) / (1 << firstShift)
}

// brain holds moments in bf16, rounded to nearest: twice the bytes.
type brain struct{ first, second vector }

func (b *brain) decode(m, v *vector) { *m, *v = b.first, b.second }

func (b *brain) encode(_, _ uint32, m, v *vector) {
	round := func(to, from *vector) {
		for i, x := range from {
			to[i] = math.Float32frombits((math.Float32bits(x) + 0x8000) &^ 0xffff)
		}
	}
	round(&b.first, m)
	round(&b.second, v)
}

// mapped is a table of 256 numbers relative to the largest of the block.
type mapped struct {
	table []float32
	scale float32
	index [blockElements]uint8
}

func (d *mapped) decode(x *vector) {
	for i, k := range d.index {
		x[i] = d.table[k] * d.scale
	}
}

// encode takes the upper neighbour when the number's position between its neighbours exceeds the threshold.
func (d *mapped) encode(x *vector, threshold func(element int) float32) {
	d.scale = largest(x)
	if d.scale == 0 {
		return
	}
	for i, e := range x {
		e /= d.scale
		k := sort.Search(len(d.table)-1, func(k int) bool { return d.table[k] >= e })
		if k > 0 && e-d.table[k-1] <= threshold(i)*(d.table[k]-d.table[k-1]) {
			k--
		}
		d.index[i] = uint8(k)
	}
}

// dynamicTables returns the maps of T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv
// 2110.02861), as create_dynamic_map of bitsandbytes makes them. A map has seven decades. Each is divided evenly into
// twice as many steps as the decade below, with the numbers in the middle of the steps.
func dynamicTables() (signed, unsigned []float32) {
	signed, unsigned = []float32{0, 1}, []float32{0, 1}
	for decade := range 7 {
		scale, steps := math.Pow(10, float64(decade-6)), 1<<decade
		for k := range 2 * steps {
			unsigned = append(unsigned, float32(scale*(0.1+0.9*(float64(k)+0.5)/float64(2*steps))))
		}
		for k := range steps {
			x := float32(scale * (0.1 + 0.9*(float64(k)+0.5)/float64(steps)))
			signed = append(signed, x, -x)
		}
	}
	slices.Sort(signed)
	slices.Sort(unsigned)
	return signed, unsigned
}

// dynamic is the pair of maps that bitsandbytes uses.
type dynamic struct {
	first, second mapped
	dither        dither
}

func newDynamic(d dither) state {
	signed, unsigned := dynamicTables()
	return &dynamic{mapped{table: signed}, mapped{table: unsigned}, d}
}

func (d *dynamic) decode(m, v *vector) {
	d.first.decode(m)
	d.second.decode(v)
}

func (d *dynamic) encode(number, step uint32, m, v *vector) {
	d.first.encode(m, func(i int) float32 { _, lower := halves(d.dither(number, uint32(i), step)); return lower })
	d.second.encode(v, func(i int) float32 { upper, _ := halves(d.dither(number, uint32(i), step)); return upper })
}

// small is a pair of floats with three digits. They are relative to a scale of the block: the largest number, or the
// power of two above it. The first moment has a sign and 16 octaves, the second moment 32.
type small struct {
	powers        bool
	dither        dither
	first, second vector
}

func (f *small) decode(m, v *vector) { *m, *v = f.first, f.second }

func (f *small) encode(number, step uint32, m, v *vector) {
	f.round(&f.first, m, 0x1p-15, true, func(i int) uint32 {
		return f.dither(number, uint32(i),
			step) & firstMask << 1
	})
	f.round(&f.second, v, 0x1p-31, false, func(i int) uint32 { return f.dither(number, uint32(i), step) >> 12 })
}

// round takes 20 random bits for each element.
func (f *small) round(to, from *vector, least float32, mayVanish bool, random func(element int) uint32) {
	scale := largest(from)
	if f.powers {
		_, exponent := math.Frexp(float64(scale))
		scale = float32(math.Ldexp(1, exponent))
	}
	for i, e := range from {
		to[i] = 0
		if e == 0 {
			continue
		}
		x := magnitude(e) / scale
		switch {
		case x >= least:
			x = math.Float32frombits((math.Float32bits(x) + random(i)) &^ (1<<20 - 1))
		case mayVanish && x/least+float32(random(i))/(1<<20) < 1:
			x = 0
		default:
			x = least
		}
		to[i] = float32(math.Copysign(float64(min(x, 1)*scale), float64(e)))
	}
}

// relative holds the first moment as the chosen code does, and the second moment in another code.
type relative struct {
	first  [blockElements]uint8
	second vector
	round  func(to, from *vector, random func(element int) float32)
}

func (r *relative) decode(m, v *vector) {
	*v = r.second
	for i, x := range v {
		m[i] = decodeFirst(r.first[i], math.Float32bits(root(x))&exponents)
	}
}

func (r *relative) encode(number, step uint32, m, v *vector) {
	if largest(v) == 0 {
		*r = relative{round: r.round}
		return
	}
	r.round(&r.second, v, func(i int) float32 { upper, _ := halves(hash(number, uint32(i), step)); return upper })
	for i, x := range r.second {
		r.first[i] = 0
		if x != 0 {
			r.first[i] = encodeFirst(m[i], math.Float32bits(root(x))&exponents, hash(number, uint32(i), step)&firstMask)
		}
	}
}

// fourthRoots divides the fourth root of the largest number into 255 steps.
func fourthRoots(to, from *vector, random func(element int) float32) {
	unit := root(root(largest(from))) / 255
	for i, x := range from {
		to[i] = 0
		if x != 0 {
			k := min(255, max(1, float32(math.Floor(float64(root(root(x))/unit+random(i))))))
			to[i] = k * unit * k * unit * k * unit * k * unit
		}
	}
}

// logarithms divides the logarithm between the smallest and the largest number,
// rounded outwards to bf16, into 254 steps.
func logarithms(to, from *vector, random func(element int) float32) {
	least, most := float32(math.MaxFloat32), largest(from)
	for _, x := range from {
		if x != 0 {
			least = min(least, x)
		}
	}
	low := math.Log(float64(math.Float32frombits(math.Float32bits(least) &^ 0xffff)))
	high := math.Log(float64(math.Float32frombits((math.Float32bits(most) + 0xffff) &^ 0xffff)))
	unit := max((high-low)/254, 1e-9)
	for i, x := range from {
		to[i] = 0
		if x != 0 {
			k := min(254, math.Floor((math.Log(float64(x))-low)/unit+float64(random(i))))
			to[i] = float32(math.Exp(low + k*unit))
		}
	}
}

// contestant is a code and its name.
type contestant struct {
	name string
	make func() state
}

var contestants = []contestant{
	{"bf16, nearest (16 bits)", func() state { return &brain{} }},
	{"dynamic map, nearest (bitsandbytes)", func() state { return newDynamic(nearest) }},
	{"dynamic map, random", func() state { return newDynamic(hash) }},
	{"3 digits, largest as scale, nearest", func() state { return &small{dither: nearest} }},
	{"3 digits, largest as scale, random", func() state { return &small{dither: hash} }},
	{"3 digits, power of two, nearest", func() state { return &small{powers: true, dither: nearest} }},
	{"3 digits, power of two, random", func() state { return &small{powers: true, dither: hash} }},
	{"fourth root, largest as scale, random", func() state { return &relative{round: fourthRoots} }},
	{"logarithm, least to largest, random", func() state { return &relative{round: logarithms} }},
	{"FlashOptim, nearest", func() state { return &flash{dither: nearest} }},
	{"FlashOptim's codes, random", func() state { return &flash{dither: sequence} }},
	{"chosen, but always 4 digits", func() state { return &ours{code: code{sequence, 4, 4}} }},
	{"chosen, but hash for sequence", func() state { return &ours{code: code{hash, 3, 6}} }},
	{"chosen", func() state { return &ours{code: chosen} }},
}
