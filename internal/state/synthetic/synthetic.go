// Package synthetic makes up weights and gradients that look like a model's. So a
// step can be run and timed without a model. A number depends on its place (rank,
// step, element) alone, not on the worker that writes it.
package synthetic

import (
	"encoding/binary"
	"math"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel"
)

// mix is the output function of SplitMix64 (G. Steele, D. Lea and C. Flood,
// "Fast splittable pseudorandom number generators", OOPSLA 2014).
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

const golden = 0x9e3779b97f4a7c15

// pattern says which bits of a synthetic number are random. Its sign, its fraction
// and two bits of its exponent are. The rest of the exponent is fixed and puts the
// magnitude between 2^-11 and 2^-7, where weights and gradients lie. So a random
// word becomes as many elements as it holds by replacing a few bits of each.
type pattern struct{ random, fixed uint64 }

const (
	weightBits     = 0x81ff_ffff
	weightExponent = 116 << 23
)

var gradientPattern = map[dtype.Type]pattern{
	dtype.BF16: {0x81ff_81ff_81ff_81ff, 116 << 7 * 0x0001_0001_0001_0001},
	dtype.F16:  {0x8fff_8fff_8fff_8fff, 4 << 10 * 0x0001_0001_0001_0001},
	dtype.F32:  {weightBits * 0x0000_0001_0000_0001, weightExponent * 0x0000_0001_0000_0001},
}

// Weights writes weights into a chunk that begins at element first of a rank's shard. All
// else of a new state is zeros, which its arenas hold when their pages come from the kernel.
func Weights(rank int, first int64, chunk kernel.Chunk) {
	seed := mix(uint64(rank) + 1)
	var word uint64 // of two elements
	for i := range chunk.Len() {
		switch place := uint64(first) + uint64(i); {
		case place%2 == 0:
			word = mix(seed + golden*place)
		case i == 0:
			word = mix(seed+golden*(place-1)) >> 32
		default:
			word >>= 32
		}
		w := math.Float32frombits(uint32(word)&weightBits | weightExponent)
		switch {
		case chunk.Low != nil:
			chunk.Parameter[i], chunk.Low[i] = kernel.Separate(w)
		case chunk.LowBytes != nil:
			chunk.Parameter[i], chunk.LowBytes[i] = kernel.Separate24(w)
		default:
			chunk.Master[i] = w
		}
	}
}

// Gradients writes the gradients of a step, beginning at element first of a rank's
// shard.
func Gradients(rank, step int, first int64, g kernel.Array) {
	seed := mix(uint64(rank)<<32 + uint64(step) + 0x5eed)
	bits := gradientPattern[g.Type]
	place := uint64(first * g.Type.Size())
	word := func(i int) uint64 { return mix(seed+golden*(place+uint64(i)))&bits.random | bits.fixed }
	i := 0
	for ; i+8 <= len(g.Data); i += 8 {
		binary.LittleEndian.PutUint64(g.Data[i:], word(i))
	}
	if i < len(g.Data) {
		var last [8]byte
		binary.LittleEndian.PutUint64(last[:], word(i))
		copy(g.Data[i:], last[:])
	}
}

// ScaledGradients are the gradients of a backward pass in fp16 whose loss was
// multiplied by a scale. One of 32,768 is far larger than the rest: the gradients of
// real models have such outliers, and they overflow first. A gradient has 16 random
// bits, so a table holds all of them.
type ScaledGradients struct {
	held  dtype.Type // of the gradients as they are stored
	scale float64
	bits  [1 << 16]uint32 // of the held type
}

// Outlier is the magnitude of the largest gradients before they are scaled.
const Outlier = 3

// NewScaledGradients returns gradients that are stored in a type after the backward
// pass. The loss is not scaled yet.
func NewScaledGradients(held dtype.Type) *ScaledGradients {
	s := &ScaledGradients{held: held}
	s.SetScale(1)
	return s
}

// SetScale changes the number that the loss is multiplied by. Gradients that leave
// the range of fp16 become infinite, or zero.
func (s *ScaledGradients) SetScale(scale float64) {
	if scale == s.scale {
		return
	}
	s.scale = scale
	half := gradientPattern[dtype.F16]
	for random := range s.bits {
		gradient := float64(kernel.FP16ToFloat32(uint16(random)&uint16(half.random) | uint16(half.fixed)))
		if random&0x7fff == 0 {
			gradient = math.Copysign(Outlier, gradient)
		}
		scaled := kernel.Float32ToFP16(float32(gradient * scale))
		switch s.held {
		case dtype.F16:
			s.bits[random] = uint32(scaled)
		case dtype.BF16:
			s.bits[random] = uint32(kernel.Float32ToBF16(kernel.FP16ToFloat32(scaled)))
		default:
			s.bits[random] = math.Float32bits(kernel.FP16ToFloat32(scaled))
		}
	}
}

// Write writes the gradients of a step, beginning at element first of a rank's
// shard. first must be a multiple of four.
func (s *ScaledGradients) Write(rank, step int, first int64, g kernel.Array) {
	seed := mix(uint64(rank)<<32 + uint64(step) + 0x5eed)
	var word uint64
	for i := range g.Len() {
		if i%4 == 0 {
			word = mix(seed + golden*uint64(first+int64(i)))
		}
		bits := s.bits[uint16(word)]
		word >>= 16
		if s.held == dtype.F32 {
			binary.LittleEndian.PutUint32(g.Data[4*i:], bits)
		} else {
			binary.LittleEndian.PutUint16(g.Data[2*i:], uint16(bits))
		}
	}
}
