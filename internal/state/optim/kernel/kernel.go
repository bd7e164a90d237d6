// Package kernel updates optimizer state in one pass over memory: unscale,
// clip, update and 16-bit output happen in registers.
//
// There are five kernels. One is plain Go. The same code with vector operations for
// NEON runs on every 64-bit Arm processor. Those for AVX2 (with FMA and F16C), AVX-512,
// and AVX-512 with VBMI and BF16 are generated from _asm.
//
// All give the same bits. Each operation below is one IEEE 754 binary32 operation,
// rounded to nearest even, in the order in which it is written. fma is fused. A
// denormal operand or result counts as a zero of its sign. Denormals carry nothing
// that training needs, and cost a vector unit ten times the time of a normal number.
// The momentum of a row that is never used again would turn into denormals and stay
// there. Which NaN comes out of an invalid operation is not specified. (A NaN whose
// fraction is all ones loses its meaning when it is rounded to bf16 half away from
// zero. Arithmetic does not make such NaN, and steps with NaN gradients are skipped.)
//
// Every algorithm begins, for each element, with
//
//	g = gradient · gradScale
//	g = fma(l2Penalty, p, g)
//
// # Adam and AdamW
//
//	m = fma(oneMinusBeta1, g, beta1·m)
//	v = fma(oneMinusBeta2, g·g, beta2·v)
//	d = fma(√v, inverseRootBias2, epsilon)
//	p = fma(decay, p, p)
//	p = fma(stepSize, m/d, p)
//
// is the order of DeepSpeed's CPU Adam (csrc/adam/cpu_adam_impl.cpp), and the
// arithmetic of torch.optim.AdamW and, with l2Penalty in place of decay,
// torch.optim.Adam.
//
// # Lion
//
//	u = fma(oneMinusBeta1, g, beta1·m)
//	m = fma(oneMinusBeta2, g, beta2·m)
//	p = fma(decay, p, p)
//	p = p + stepSize·sign(u), with sign(0) = 0
//
// is algorithm 2 of X. Chen et al., "Symbolic Discovery of Optimization
// Algorithms" (arXiv 2302.06675). (DeepSpeed's AVX Lion takes the sign with a
// wrong mask, csrc/includes/cpu_lion.h, and agrees with nobody.)
//
// # Adagrad
//
//	s = fma(g, g, s)
//	p = fma(stepSize, g/(√s + epsilon), p)
//
// is torch.optim.Adagrad.
//
// # SGD with momentum
//
//	b = fma(oneMinusBeta1, g, beta1·b)
//	u = fma(momentumShare, b, gradientShare·g)
//	p = fma(decay, p, p)
//	p = fma(stepSize, u, p)
//
// is torch.optim.SGD. beta1 is the momentum, and oneMinusBeta1 is 1 minus the
// dampening. u is b or, for Nesterov's momentum, g + momentum·b. Without momentum b
// does not change and u is g.
//
// # Moments in bf16
//
// A moment in bf16 is rounded when it is stored; the update of the parameter uses it
// before. exp_avg, Lion's momentum and SGD's momentum are rounded half away from
// zero. exp_avg_sq of Adam and the sum of Adagrad change by so little in a step that
// they would never move: with beta2 = 0.999, exp_avg_sq loses a thousandth in a step,
// and half a unit in the last place is two thousandths or more. They are rounded
// stochastically. The random number is a function of the step and of the element's
// place in its shard, so that the bits do not depend on which worker computes them.
//
// # Masters of 24 bits
//
// In split24 state a master weight has the upper 24 bits of a binary32 number. After the
// update, from random numbers of 8 bits,
//
//	p = float((bits(p) + random) &^ 0xff)
//
// rounds it up or down in magnitude, with the probability of the part that is cut off. So
// the expectation of p does not change. A number that is rounded beyond the largest becomes
// infinite. The random number is the upper 8 bits of d · d, modulo 2^32, where
//
//	d = dither(step) + element · 0x9e3779b9
//
// and dither is the lower half of SplitMix64's output. The element counts in its shard, so
// the bits do not depend on kernels, chunks or workers. A number from another format is
// rounded once, half away from zero.
//
// # Moments in int8
//
// Each moment of Adam takes a byte. The code of the second is s = √v, as a float of 8
// bits without a sign whose exponent counts from the floor of its block. The code of
// the first is m, with a sign, in units of R, the power of two just below the s of
// its own element. A block is [Block] consecutive elements; the last of a chunk may
// be short. Its header is floor, the biased exponent of the lowest octave of s, and
// shift, 23 minus the digits of s after the leading one. In a block of zeros
// everything is 0. (The study behind the code is in experiments/eight-bit.)
//
// From codes k of s and q of m, with base = floor << 23, in operations on 32-bit
// integers modulo 2^32 and on binary32 numbers:
//
//	s = float(k << shift + base)    and 0 where k = 0
//	R = float(bits(s) & 0x7f800000)
//	m = (float((q & 127) << 19 + bits(1/16)) - 1/16) · R, with the sign q >> 7
//	v = s · s
//
// After the update s is √v, or 2^63 if √v is larger or NaN. With the least positive
// and the largest bits(s) of the block,
//
//	for digits = 6, 5, 4, 3:
//	    shift = 23 - digits
//	    top   = (largest + (1 << shift) - 1) >> 23
//	    floor = max(top + 1 - (1 << (8 - digits)), 64)
//	    stop when digits = 3 or least >= floor << 23 + 1 << shift
//
// and for element i of block b of the shard in step t, where scramble is the
// finalizer of MurmurHash3 and signed compares as a signed number,
//
//	h = scramble(b) + t · 0xc13c8f09 + i · 0x9e3779b1
//	k = (max(signed(bits(s) - base), 1 << shift) + h >> (32 - shift)) >> shift
//	R = (k << shift + base) & 0x7f800000
//	x = |m| · float(254 << 23 - R) + 1/16, fused or not
//	q = min((bits(x) - bits(1/16) + h & 0x7ffff) >> 19, 127) | sign(m) << 7
//
// and k and q are 0 where s is 0. The sign of a NaN, and so the sign of its q, is not
// specified.
//
// # The sum of squares
//
// A bf16 gradient is divided into runs of 256 elements; the last may be short. Element
// i of a run goes to lane i/2 modulo 16 of sum i modulo 2: even and odd elements have
// 16 lanes each. The lanes of a run are added to the lanes of their sum, run by run:
//
//	s = fma(g, g, s), beginning with 0
//	lane = lane + float64(s)
//
// Then lane = even lane + odd lane.
//
// Other gradients are divided into runs of 128 elements. Four parts share the r runs:
// each gets ⌈r/4⌉ consecutive runs, and the last parts get the rest. Element i of a run
// goes to lane i modulo 16. The lanes of a run are added to the lanes of its part in the
// same way. Then lane = (part 0 + part 2) + (part 1 + part 3).
//
// At the end the lanes are added up
// pairwise, those first that are 8 apart. No term is negative, so eight operations in
// binary32 round away less than a part in two million. If the sum is less than 2^-64,
// infinite or NaN, squares may have left the range of binary32. The sum is then made
// again in float64, with one part:
//
//	lane = lane + float64(g)·float64(g)
package kernel

import (
	"fmt"
	"math"
	"os"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel/abi"
)

// EnvironmentVariable forces a choice of kernels: "generic", "avx2", "avx512", "avx512bf16"
// or "neon".
const EnvironmentVariable = "PLIMSOLL_KERNEL"

// Set is a set of kernels for one instruction set.
type Set uint8

// The sets, of each kind of processor from the slowest to the fastest.
const (
	Generic Set = iota
	AVX2
	AVX512
	AVX512BF16 // AVX-512 with VBMI and BF16: Zen 4, Sapphire Rapids and later
	NEON
)

var setNames = [...]string{Generic: "generic", AVX2: "avx2", AVX512: "avx512", AVX512BF16: "avx512bf16",
	NEON: "neon"}

func (s Set) String() string { return setNames[s] }

// inRegisters reports whether the set takes full tiles through all operations in
// registers. In other sets, and for the rest of a chunk, each operation takes many
// elements.
func (s Set) inRegisters() bool { return s == AVX2 || s == AVX512 || s == AVX512BF16 }

// Available returns the sets that this processor and this build can run. The fastest
// is last.
func Available() []Set {
	sets := []Set{Generic}
	for _, s := range []Set{AVX2, AVX512, AVX512BF16, NEON} {
		if supported(s) {
			sets = append(sets, s)
		}
	}
	return sets
}

func supported(s Set) bool {
	switch s {
	case AVX2:
		return hasAVX2()
	case AVX512:
		return hasAVX512()
	case AVX512BF16:
		return hasAVX512BF16()
	case NEON:
		return hasNEON
	}
	return s == Generic
}

// Select returns the fastest set, or the one that the environment variable
// PLIMSOLL_KERNEL names. It never falls back from a named set to another.
func Select() (Set, error) {
	available := Available()
	name, forced := os.LookupEnv(EnvironmentVariable)
	if !forced || name == "" {
		return available[len(available)-1], nil
	}
	for i, known := range setNames {
		if name != known {
			continue
		}
		if !supported(Set(i)) {
			return Generic, fmt.Errorf("%s=%s: this processor or build does not have it; it has %v",
				EnvironmentVariable, name, available)
		}
		return Set(i), nil
	}
	return Generic, fmt.Errorf("%s=%s: expected one of %s", EnvironmentVariable, name, strings.Join(setNames[:], ", "))
}

// Update updates a chunk. Every stream of the chunk must have the same length.
func (s Set) Update(f Format, constants *Constants, c Chunk) {
	c.check(f)
	s.updateFrom(0, f, constants, &c, Undo{}, nil, nil)
}

// Traffic moves the bytes that Update moves, stream by stream, without its
// arithmetic: the limit that memory sets to an update. It does not change the
// streams, with one exception. An update of fp32 state only writes the parameter
// copy: it holds zeros afterwards, until the next update writes it.
func (s Set) Traffic(f Format, c Chunk) {
	n := c.check(f)
	if whole := n - n%f.granule(); s.inRegisters() && whole > 0 {
		s.traffic(whole, f, &c)
		c = c.Slice(whole, n)
	}
	trafficGeneric(f, c)
}

// SumSquares returns the sum of the squares of a gradient, before scaling. The
// package comment says in which order. It is infinite or NaN exactly when an element
// is.
func (s Set) SumSquares(g Array) float64 {
	if sum := s.sumSquaresInRuns(g); leastSum <= sum && sum <= math.MaxFloat64 {
		return sum
	}
	var lanes [abi.Group]float64
	n := g.Len()
	whole := 0
	if s.inRegisters() {
		whole = n - n%abi.Group
	}
	if whole > 0 {
		s.sumWideSquares(whole, g, &lanes)
	}
	s.sumWideSquaresInTiles(g.Slice(whole, n), &lanes)
	return addUp(&lanes)
}

// leastSum is the least sum that is exact enough: from here on, squares that counted
// as zero would add nothing.
const leastSum = 0x1p-64

// sumSquaresInRuns returns the sum with squares in fp32.
func (s Set) sumSquaresInRuns(g Array) float64 {
	if g.Type == dtype.BF16 {
		return s.sumSquaresOfPairs(g)
	}
	return s.sumSquaresOfParts(g)
}

func (s Set) sumSquaresOfPairs(g Array) float64 {
	var sums [2][abi.Group]float64
	n := g.Len()
	whole := 0
	if s.inRegisters() {
		whole = n - n%abi.PairRun
	}
	if whole > 0 {
		s.sumPairs(whole, g, &sums)
	}
	s.sumPairsInTiles(g.Slice(whole, n), &sums)
	for lane := range sums[0] {
		sums[0][lane] += sums[1][lane]
	}
	return addUp(&sums[0])
}

func (s Set) sumSquaresOfParts(g Array) float64 {
	var sums [abi.Parts][abi.Group]float64
	n := g.Len()
	runs := (n + abi.Run - 1) / abi.Run
	apart := (runs + abi.Parts - 1) / abi.Parts * abi.Run
	whole := max(0, n-(abi.Parts-1)*apart) // the elements that every part has
	whole -= whole % abi.Run
	if !s.inRegisters() {
		whole = 0
	}
	if whole > 0 {
		s.sumSquares(whole, apart, g, &sums)
	}
	for part := range sums {
		first, end := min(part*apart+whole, n), min((part+1)*apart, n)
		s.sumSquaresInTiles(g.Slice(first, end), &sums[part])
	}
	for lane := range sums[0] {
		sums[0][lane] = (sums[0][lane] + sums[2][lane]) + (sums[1][lane] + sums[3][lane])
	}
	return addUp(&sums[0])
}

// addUp adds up the lanes pairwise, the pairs furthest apart first.
func addUp(lanes *[abi.Group]float64) float64 {
	for width := len(lanes) / 2; width > 0; width /= 2 {
		for i := range width {
			lanes[i] += lanes[i+width]
		}
	}
	return lanes[0]
}

// Accumulate adds a gradient to a sum of the same length. Their types may differ. An
// addition is one binary32 operation; its result is rounded to the type of the sum,
// to nearest even.
func (s Set) Accumulate(sum, gradient Array) {
	n := sum.Len()
	if gradient.Len() != n {
		panic("kernel: a gradient and the sum that it is added to differ in length")
	}
	whole := 0
	if s.inRegisters() {
		whole = n - n%abi.Group
		if whole > 0 {
			s.accumulate(whole, sum, gradient)
		}
	}
	s.accumulateInTiles(sum.Slice(whole, n), gradient.Slice(whole, n))
}
