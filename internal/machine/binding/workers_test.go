package binding_test

import (
	"testing"

	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/machine/host/hosttest"
)

// TestOneWorkerOnEachCacheFirst: where there are fewer workers than cores, no last-level cache has two workers as long
// as another has none, and no package has two as long as another has none. A core has a few times the speed of its
// share of a socket's memory, so workers on one die would wait for that die's link.
func TestOneWorkerOnEachCacheFirst(t *testing.T) {
	severalCaches, severalPackages := 0, 0
	for _, m := range hosttest.Corpus(t) {
		h := m.Machine.Discover(t)
		plan, err := binding.Split(h, binding.Request{Ranks: 1})
		if err != nil {
			t.Fatal(err)
		}
		rank := plan.Ranks[0]
		cores, caches, packages := coresOf(h, rank.OptimizerCPUs.List())
		if !alike(cores) {
			continue // the fastest cores come first
		}
		if caches > 1 && caches < len(cores) {
			severalCaches++
		}
		if packages > 1 {
			severalPackages++
		}
		for _, number := range []int{1, 2, 3, caches, caches + 1, len(cores) - 1} {
			if number < 1 || number > len(cores) {
				continue
			}
			cpus := rank.Workers(h, number)
			chosen, cachesOf, packagesOf := coresOf(h, cpus)
			if len(chosen) != number || cachesOf != min(number, caches) || packagesOf != min(number, packages) {
				t.Errorf("%s: %d workers on CPUs %v have %d of %d caches and %d of %d packages", m.Name, number, cpus,
					cachesOf, caches, packagesOf, packages)
			}
		}
	}
	if severalCaches < 3 || severalPackages < 3 {
		t.Errorf("only %d machines of the corpus have several caches, and %d several packages", severalCaches,
			severalPackages)
	}
}

// coresOf returns the cores of CPUs, and how many caches and packages they have.
func coresOf(h *host.Host, cpus []int) (cores []host.Core, caches, packages int) {
	cacheSet, packageSet := map[int]bool{}, map[int]bool{}
	for _, c := range h.UsableCores() {
		for _, cpu := range cpus {
			if c.Usable.Contains(cpu) {
				cores = append(cores, c)
				cacheSet[c.Cache], packageSet[c.Package] = true, true
			}
		}
	}
	return cores, len(cacheSet), len(packageSet)
}

func alike(cores []host.Core) bool {
	for _, c := range cores {
		if c.Kind != cores[0].Kind || c.Whole() != cores[0].Whole() {
			return false
		}
	}
	return true
}
