//go:build !purego

package kernel

import "os"

// "make test-avx512" sets the variable where a tracer makes the instructions that the processor lacks.
func init() {
	if os.Getenv("PLIMSOLL_TEST_TRAPPED") != "" {
		hasVBMIAndBF16 = true
	}
}
