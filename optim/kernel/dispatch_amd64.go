//go:build amd64 && !purego

package kernel

import (
	"golang.org/x/sys/cpu"

	"plimsoll/dtype"
)

//go:generate go run -C _asm . -out ../kernel_amd64.s -stubs ../kernel_amd64.go -pkg kernel

func supported(s Set) bool {
	x := &cpu.X86
	switch s {
	case AVX512:
		return x.HasAVX512F && x.HasAVX512BW && x.HasAVX512DQ && x.HasAVX512VL && supported(AVX2)
	case AVX2:
		// x/sys/cpu has no bit for F16C; every processor with AVX2 and FMA
		// has it.
		return x.HasAVX2 && x.HasFMA
	}
	return true
}

// The numbers of types in _asm/main.go.
func gradientKind(t dtype.Type) int {
	switch t {
	case dtype.BF16:
		return 0
	case dtype.F16:
		return 1
	}
	return 2
}

func copyKind(t dtype.Type) int {
	switch t {
	case dtype.BF16:
		return 0
	case dtype.F16:
		return 1
	}
	return 2
}

// adam updates the first n elements, a multiple of 16.
func (s Set) adam(n int, f Format, a *Adam, c *Chunk) {
	kind := gradientKind(f.Gradient)
	param, m, v, g := pointer(c.Parameter), pointer(c.ExpAvg), pointer(c.ExpAvgSq), pointer(c.Gradient.Data)
	switch {
	case s == AVX512 && f.State == Split:
		adamSplitAVX512(n, &a.table, kind, param, pointer(c.Low), m, v, g)
	case s == AVX512:
		adamFP32AVX512(n, &a.table, kind, copyKind(f.Parameter), param, pointer(c.Master), m, v, g)
	case f.State == Split:
		adamSplitAVX2(n, &a.table, kind, param, pointer(c.Low), m, v, g)
	default:
		adamFP32AVX2(n, &a.table, kind, copyKind(f.Parameter), param, pointer(c.Master), m, v, g)
	}
}

func (s Set) traffic(n int, f Format, c *Chunk) {
	size := int(f.Gradient.Size())
	param, m, v, g := pointer(c.Parameter), pointer(c.ExpAvg), pointer(c.ExpAvgSq), pointer(c.Gradient.Data)
	switch {
	case s == AVX512 && f.State == Split:
		trafficSplitAVX512(n, size, param, pointer(c.Low), m, v, g)
	case s == AVX512:
		trafficFP32AVX512(n, size, param, pointer(c.Master), m, v, g)
	case f.State == Split:
		trafficSplitAVX2(n, size, param, pointer(c.Low), m, v, g)
	default:
		trafficFP32AVX2(n, size, param, pointer(c.Master), m, v, g)
	}
}

func (s Set) sumSquares(n int, g Gradient, lanes *[16]float64) {
	if s == AVX512 {
		sumSquaresAVX512(n, gradientKind(g.Type), pointer(g.Data), lanes)
		return
	}
	sumSquaresAVX2(n, gradientKind(g.Type), pointer(g.Data), lanes)
}
