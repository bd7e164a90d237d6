//go:build !arm64 || purego

package kernel

import "plimsoll/internal/state/optim/kernel/abi"

// Operations on many numbers are plain Go.

const hasNEON = false

func (Set) mul(to vector, a float32, b vector)                  { to.mul(a, b) }
func (Set) square(to, a vector)                                 { to.square(a) }
func (Set) add(to, a, b vector)                                 { to.add(a, b) }
func (Set) div(to, a, b vector)                                 { to.div(a, b) }
func (Set) sqrt(to, a vector)                                   { to.sqrt(a) }
func (Set) fma(to vector, a float32, b, c vector)               { to.fma(a, b, c) }
func (Set) fmaPlus(to vector, a float32, b vector, c float32)   { to.fmaPlus(a, b, c) }
func (Set) fmaSquare(to, a, c vector)                           { to.fmaSquare(a, c) }
func (Set) withSign(to vector, magnitude float32, a vector)     { to.withSign(magnitude, a) }
func (Set) addSquares(sums *[abi.Group]float32, run vector)     { run.addSquares(sums) }
func (Set) load(to vector, from Array)                          { from.load(to) }
func (Set) store(to Array, from vector)                         { to.store(from) }
func (Set) away(to []uint16, from vector)                       { from.away(to) }
func (Set) dithered(to []uint16, from vector, dither uint32)    { from.dithered(to, dither) }
func (Set) merge(to vector, parameter, low []uint16)            { to.merge(parameter, low) }
func (Set) separate(parameter, low []uint16, from vector)       { from.separate(parameter, low) }
func (Set) loadBlock(b block, firsts, roots vector)             { b.load(firsts, roots) }
func (Set) bound(roots vector) (least, largest uint32)          { return roots.bound() }
func (Set) codes(b block, firsts, roots vector, added rounding) { b.codes(firsts, roots, added) }
