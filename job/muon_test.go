package job

import (
	"testing"

	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/ledger"
)

// TestOrthogonalized compares the temporaries of a matrix with what a dispatch mode saw torch.optim.Muon allocate for
// it (Tracker in scripts/measure/train.py, torch 2.15). The mode also counts the momentum and the parameters, which
// change in place.
func TestOrthogonalized(t *testing.T) {
	for _, test := range []struct {
		rows, columns int64
		of            dtype.Type
		want          ledger.Bytes
	}{
		{2048, 8192, dtype.BF16, 218103808 - 6*2048*8192}, {8192, 2048, dtype.BF16, 218103808 - 6*2048*8192},
		{2048, 2048, dtype.BF16, 67108864 - 6*2048*2048}, {1024, 4096, dtype.F32, 88080384 - 12*1024*4096},
	} {
		p := &autograd.Parameter{Elements: test.rows * test.columns, Rows: test.rows, DType: test.of, Hidden: true}
		embedding := &autograd.Parameter{Elements: 10, Rows: 5, DType: test.of}
		o := NewOptimizer(muon, Foreach)
		sum := ledger.Bytes(0)
		passes := o.Passes([]*autograd.Parameter{p, p, embedding})
		for _, bytes := range passes[0] {
			sum += bytes
		}
		if sum != test.want || len(passes) != 2 || len(passes[1]) != 1 {
			t.Errorf("%d x %d in %v: %v and %v, want %v", test.rows, test.columns, test.of, sum.Exact(), passes[1],
				test.want.Exact())
		}
		if states := o.States(p); len(states) != 1 || states[0].Bytes != p.Elements*test.of.Size() {
			t.Errorf("a matrix has the states %v", states)
		}
		if states := o.States(embedding); len(states) != 2 {
			t.Errorf("an embedding has the states %v", states)
		}
	}
}
