//go:build !amd64 || purego

package kernel

// There is only the reference, which is never reached through these.

func supported(s Set) bool { return s == Generic }

func (s Set) update(int, int, Format, *Constants, *Chunk, *byte) { panic("kernel: no " + s.String()) }
func (s Set) traffic(int, Format, *Chunk)                        { panic("kernel: no " + s.String()) }
func (s Set) sumSquares(int, Array, *[16]float64)                { panic("kernel: no " + s.String()) }
func (s Set) accumulate(int, Array, Array)                       { panic("kernel: no " + s.String()) }
