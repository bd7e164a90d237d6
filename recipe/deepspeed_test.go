package recipe

import (
	"errors"
	"flag"
	"testing"

	"plimsoll/fault"
)

var update = flag.Bool("update", false, "rewrite the errors in testdata/bad")

// ranks is the number of ranks for the files of testdata/bad.
const ranks = 8

func TestDeepSpeedBad(t *testing.T) {
	refused(t, "deepspeed", 105, func(path string) (*DeepSpeed, error) {
		d, err := LoadDeepSpeed(path)
		if err == nil {
			_, err = d.ResolveBatch(ranks)
		}
		return d, err
	})
}

// requireInput fails unless err is a *fault.Input.
func requireInput(t *testing.T, err error) {
	t.Helper()
	var bad *fault.Input
	if !errors.As(err, &bad) {
		t.Fatalf("got %v, want a *fault.Input", err)
	}
}
