//go:build amd64 && !purego

package kernel

import (
	"unsafe"

	"golang.org/x/sys/cpu"

	"plimsoll/internal/state/optim/kernel/abi"
)

//go:generate go run -C _asm . -out ../kernel_amd64.s -dispatch ../kernel_amd64.go

func hasAVX512() bool {
	x := &cpu.X86
	return x.HasAVX512F && x.HasAVX512BW && x.HasAVX512DQ && x.HasAVX512VL && hasAVX2()
}

// hasVBMIAndBF16 is a variable for tests on processors that lack both: see _emulate.
var hasVBMIAndBF16 = cpu.X86.HasAVX512VBMI && cpu.X86.HasAVX512BF16

func hasAVX512BF16() bool { return hasAVX512() && hasVBMIAndBF16 }

// byIntel reports whether Intel has made the processor: its name ends in "ntel".
var byIntel = vendor() == 'n'|'t'<<8|'e'<<16|'l'<<24

// x/sys/cpu has no bit for F16C; every processor with AVX2 and FMA has it.
func hasAVX2() bool { return cpu.X86.HasAVX2 && cpu.X86.HasFMA }

// kernelKey and trafficKey name a kernel.
type kernelKey struct {
	set       Set
	algorithm abi.Algorithm
	state     abi.State
	moments   abi.MomentType
}

type trafficKey struct {
	set     Set
	state   abi.State
	moments abi.MomentType
	count   int // of moments
}

// arguments returns the arguments for the first n elements of a chunk: full tiles.
func (s Set) arguments(n int, f Format, c *Chunk) abi.Arguments {
	ahead := abi.PrefetchAhead(f.Moments)
	if byIntel {
		ahead = abi.PrefetchAheadIntel
	}
	return abi.Arguments{
		Elements:     n,
		Prefetching:  prefetching(n, c.Gradient, ahead),
		Ahead:        ahead,
		GradientKind: kind(f.Gradient),
		CopyKind:     kind(f.Parameter),
		Parameter:    pointer(c.Parameter),
		Low:          pointer(c.low()),
		Master:       pointer(c.Master),
		Moment1:      pointer(c.Moments[0].Data),
		Moment2:      pointer(c.Moments[1].Data),
		Headers:      pointer(c.Headers),
		Gradient:     pointer(c.Gradient.Data),
	}
}

// prefetching returns for how many of the first n elements the stream goes on that far
// ahead. The capacity of the slice tells where the full stream ends. Loops end there;
// the longest advance by two groups.
func prefetching(n int, stream Array, ahead int) int {
	last := cap(stream.Data)/int(stream.Type.Size()) - ahead
	return max(0, min(n, last-last%(2*abi.Group)))
}

// update updates elements first to n, both at the beginning of a tile, with an
// undo log or nil, with sums or nil, and with changes or nil.
func (s Set) update(first, n int, f Format, constants *Constants, c *Chunk, undo *byte, sums *abi.Sums,
	changes *Changes) {
	a := s.arguments(n, f, c)
	a.Start, a.Undo, a.Sums = first, undo, sums
	a.Table, a.Dither = &constants.table, constants.ditherOf(c.First+int64(first))
	a.MasterDither = constants.masterDitherOf(c.First + int64(first))
	if f.Moments == MomentsInt8 {
		a.Dither, a.Block = constants.stride, uint32(c.First/Block)
	}
	if changes != nil {
		kept := changes.room(n - first)
		a.Moves, a.Kept = pointer(changes.Moves), pointer(kept)
		defer func() { changes.Old = changes.Old[:len(changes.Old)+between(pointer(kept), a.Kept)] }()
	}
	update(kernelKey{s, f.Algorithm, f.State, f.Moments}, &a)
}

func (s Set) traffic(n int, f Format, c *Chunk) {
	a := s.arguments(n, f, c)
	if s == AVX512BF16 {
		s = AVX512
	}
	traffic(trafficKey{s, f.State, f.Moments, f.Algorithm.Moments()}, &a)
}

// sumSquares adds up the first n elements of every part.
func (s Set) sumSquares(n, apart int, g Array, sums *[abi.Parts][abi.Group]float64) {
	if s != AVX2 {
		sumSquaresAVX512(n, apart, kind(g.Type), pointer(g.Data), sums)
		return
	}
	sumSquaresAVX2(n, apart, kind(g.Type), pointer(g.Data), sums)
}

// sumPairs adds up the first n elements of a bf16 gradient: full runs of pairs.
func (s Set) sumPairs(n int, g Array, sums *[2][abi.Group]float64) {
	reach := n - n%abi.PairRun
	if last := cap(g.Data)/2 - abi.PrefetchAlone; last < reach {
		reach = max(0, last-last%abi.PairRun)
	}
	if s != AVX2 {
		sumPairsAVX512(n, reach, pointer(g.Data), sums)
		return
	}
	sumPairsAVX2(n, reach, pointer(g.Data), sums)
}

func (s Set) sumWideSquares(n int, g Array, lanes *[abi.Group]float64) {
	reach := prefetching(n, g, abi.PrefetchAlone)
	if s != AVX2 {
		sumWideSquaresAVX512(n, reach, kind(g.Type), pointer(g.Data), lanes)
		return
	}
	sumWideSquaresAVX2(n, reach, kind(g.Type), pointer(g.Data), lanes)
}

func (s Set) accumulate(n int, sum, gradient Array) {
	ahead := abi.PrefetchAhead(abi.MomentsBF16)
	reach := min(prefetching(n, sum, ahead), prefetching(n, gradient, ahead))
	if s != AVX2 {
		accumulateAVX512(n, reach, kind(sum.Type), pointer(sum.Data), kind(gradient.Type), pointer(gradient.Data))
		return
	}
	accumulateAVX2(n, reach, kind(sum.Type), pointer(sum.Data), kind(gradient.Type), pointer(gradient.Data))
}

// between returns the number of words from one address to another.
func between(from, to *uint16) int {
	return int(uintptr(unsafe.Pointer(to))-uintptr(unsafe.Pointer(from))) / 2
}
