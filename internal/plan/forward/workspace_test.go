package forward

import "testing"

// TestColumnSums holds partial sums to what torch 2.15 took on GPUs that were not there, of these processors.
func TestColumnSums(t *testing.T) {
	ada, hopper := GPU{Processors: 128, Threads: 1536}, GPU{Processors: 132, Threads: 2048}
	for _, test := range []struct {
		on            GPU
		rows, columns int64
		want          int64
	}{
		{ada, 12608, 768, 77463552},
		{ada, 12608, 3072, 100663296},
		{ada, 128, 768, 0},         // one block adds them up
		{hopper, 4096, 1 << 20, 0}, // the columns alone fill the GPU
		{GPU{}, 12608, 768, 0},     // a CPU
	} {
		p := &pass{Options: Options{Passes: Passes{Kernels: Kernels{GPU: test.on}}}}
		if got := p.columnSums(test.rows, test.columns); got.Bytes != test.want {
			t.Errorf("%d x %d on %+v: %d bytes, expected %d", test.rows, test.columns, test.on, got.Bytes, test.want)
		}
	}
}
