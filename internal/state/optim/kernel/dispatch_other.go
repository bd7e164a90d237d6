//go:build !amd64 || purego

package kernel

import "plimsoll/internal/state/optim/kernel/abi"

func hasAVX512() bool { return false }

func hasAVX512BF16() bool { return false }
func hasAVX2() bool       { return false }

// There are no kernels that work in registers: nothing calls these.

func (s Set) update(int, int, Format, *Constants, *Chunk, *byte, *abi.Sums, *Changes) {
	panic("kernel: no " + s.String())
}
func (s Set) traffic(int, Format, *Chunk)                    { panic("kernel: no " + s.String()) }
func (s Set) sumWideSquares(int, Array, *[abi.Group]float64) { panic("kernel: no " + s.String()) }
func (s Set) sumSquares(int, int, Array, *[abi.Parts][abi.Group]float64) {
	panic("kernel: no " + s.String())
}
func (s Set) sumPairs(int, Array, *[2][abi.Group]float64) { panic("kernel: no " + s.String()) }
func (s Set) accumulate(int, Array, Array)                { panic("kernel: no " + s.String()) }

func retraction(key retractionKey, _ *abi.RetractionArguments) {
	panic("kernel: no " + key.set.String())
}
