//go:build !amd64 || purego

package kernel

import "plimsoll/optim/kernel/abi"

// There is only plain Go, which is never reached through these.

func supported(s Set) bool { return s == Generic }

func (s Set) update(int, int, Format, *Constants, *Chunk, *byte) { panic("kernel: no " + s.String()) }
func (s Set) traffic(int, Format, *Chunk)                        { panic("kernel: no " + s.String()) }
func (s Set) sumWideSquares(int, Array, *[abi.Group]float64)     { panic("kernel: no " + s.String()) }
func (s Set) sumSquares(int, int, Array, *[abi.Parts][abi.Group]float64) {
	panic("kernel: no " + s.String())
}
func (s Set) accumulate(int, Array, Array) { panic("kernel: no " + s.String()) }
