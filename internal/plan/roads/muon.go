package roads

// newtonSchulzSteps is the default of torch.optim.Muon (ns_steps).
const newtonSchulzSteps = 5

// NewtonSchulz returns the floating-point operations of Newton-Schulz iterations over matrices of rows x columns, as
// torch.optim.Muon makes them (_zeropower_via_newtonschulz in torch/optim/_muon.py). With m <= n, a step has three
// products: X times its transpose (2 m m n), its square (2 m m m), and that times X (2 m m n).
func NewtonSchulz(matrices, rows, columns int64) float64 {
	m, n := float64(min(rows, columns)), float64(max(rows, columns))
	return float64(matrices) * newtonSchulzSteps * (4*m*m*n + 2*m*m*m)
}
