package origin

import (
	"maps"
	"slices"
	"testing"

	"plimsoll/ledger"
	"plimsoll/version"
)

// TestPlacesOfReleases asks for a component whose place has moved, in releases before and after.
func TestPlacesOfReleases(t *testing.T) {
	for _, x := range []struct {
		minor int
		want  string
	}{
		{5, "PyTorch 2.5, torch/distributed/_composable/fsdp/_fsdp_collectives.py, foreach_reduce"},
		{6, "PyTorch 2.6, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce"},
	} {
		j := Job{Engine: FSDP2, Releases: map[Project]version.Version{PyTorch: {Major: 2, Minor: x.minor}}}
		if got := Of(j, ledger.Gradients); got == nil || got.String() != x.want {
			t.Errorf("%v, want %s", got, x.want)
		}
	}
	if got := Of(Job{Engine: Plain}, ledger.NormActivations); got != nil {
		t.Errorf("the modules of an unknown library have the origin %v", got)
	}
}

// Table returns all places that some releases have, for the tests of the table.
func Table(j Job) []Place {
	lists := slices.Concat(slices.Collect(maps.Values(ofOptimizers)), slices.Collect(maps.Values(always)),
		[][]Place{loss})
	for _, engine := range ofEngines {
		lists = slices.AppendSeq(lists, maps.Values(engine))
	}
	var all []Place
	for _, list := range lists {
		if p := j.newest(list); p != nil {
			all = append(all, *p)
		}
	}
	return all
}
