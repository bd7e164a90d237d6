package origin_test

import (
	"testing"

	"plimsoll/internal/plan/origin"
	"plimsoll/internal/plan/origin/origintest"
)

// TestInstalled looks every place up in the frameworks that are installed.
func TestInstalled(t *testing.T) {
	places := origin.Table(origin.Job{Releases: origintest.Releases(t)})
	if len(places) < 50 {
		t.Fatalf("only %d places", len(places))
	}
	for _, missing := range origintest.Missing(t, places) {
		t.Error(missing)
	}
	wrong := []origin.Place{{Project: origin.PyTorch, File: "torch/optim/adam.py", Function: "Adam.unknown"},
		{Project: origin.PyTorch, File: "torch/optim/unknown.py", Function: "Adam"}}
	if missing := origintest.Missing(t, wrong); len(missing) != 2 {
		t.Errorf("of two wrong places these are missing: %v", missing)
	}
}
