//go:build linux

package binding_test

import (
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host/hosttest"
)

func TestTrainerShare(t *testing.T) {
	for text, want := range map[string]binding.TrainerShare{
		"0": {}, "2": {Cores: 2}, "0.25": {Fraction: 0.25}, "5e-1": binding.DefaultTrainerShare,
		"1.0": binding.WholeTrainerShare,
	} {
		var share binding.TrainerShare
		if err := share.Set(text); err != nil || share != want {
			t.Errorf("%s: %+v, %v", text, share, err)
		}
	}
}

// TestWholeShare gives a rank without an optimizer all of its cores.
func TestWholeShare(t *testing.T) {
	h := hosttest.ReadText(t, "../../../examples/machines/two-socket.txtar").Discover(t)
	plan, err := binding.Split(h, binding.Request{Ranks: 2, TrainerCores: binding.WholeTrainerShare})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"0-2,6-8", "3-5,9-11"} {
		r := plan.Ranks[i]
		if r.TrainerCPUs.String() != want || !r.OptimizerCPUs.IsEmpty() || r.OMPNumThreads != 3 ||
			len(r.NUMANodes) != 1 || r.NUMANodes[0] != i || r.Shared {
			t.Errorf("rank %d: %+v", i, r)
		}
	}
}

func FuzzTrainerShare(f *testing.F) {
	for _, text := range []string{"2", "0.25", "-1", "1.0", "NaN", "1e-3", "", "99999999999999999999"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var share, again binding.TrainerShare
		if err := share.Set(text); err != nil {
			if input, ok := err.(*fault.Input); !ok || input.Hint == "" {
				t.Errorf("%q: error %v has no hint", text, err)
			}
			return
		}
		if err := again.Set(share.String()); err != nil || again != share {
			t.Errorf("%q: %v is read back as %v, %v", text, share, again, err)
		}
	})
}
