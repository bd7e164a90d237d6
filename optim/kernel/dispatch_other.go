//go:build !amd64 || purego

package kernel

func supported(s Set) bool { return s == Generic }

func (s Set) adam(int, Format, *Adam, *Chunk) {
	panic("kernel: " + s.String() + " is not in this build")
}
func (s Set) traffic(int, Format, *Chunk) { panic("kernel: " + s.String() + " is not in this build") }
func (s Set) sumSquares(int, Gradient, *[16]float64) {
	panic("kernel: " + s.String() + " is not in this build")
}
