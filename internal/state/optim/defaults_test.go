package optim_test

import (
	"fmt"
	"testing"

	"plimsoll/internal/state/optim"
)

// TestDefaults: the defaults are those that torch.optim and the paper of Lion document.
func TestDefaults(t *testing.T) {
	for want, got := range map[string]optim.Optimizer{
		"AdamW(lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01)": optim.DefaultAdamW(),
		"Lion(lr=0.0001, betas=(0.9, 0.99), weight_decay=0.0)":              optim.DefaultLion(),
		"Adagrad(lr=0.01, lr_decay=0.0, eps=1e-10, weight_decay=0.0)":       optim.DefaultAdagrad(),
	} {
		if fmt.Sprint(got) != want {
			t.Errorf("%v, want %s", got, want)
		}
	}
}
