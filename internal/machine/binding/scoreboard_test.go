//go:build linux

package binding_test

import (
	"flag"
	"fmt"
	"slices"
	"testing"

	"github.com/jedib0t/go-pretty/v6/table"
	"k8s.io/utils/cpuset"

	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/machine/host/hosttest"
)

var printScoreboard = flag.Bool("scoreboard", false, "print the scoreboard")

// score counts the faults of a rule over all cases.
type score struct{ cases, refused, illegal, shared, empty, uneven, unused, clean int }

// count judges one case: the parts of the ranks, or nil for a refusal.
func (s *score) count(h *host.Host, ranks int, parts []cpuset.CPUSet) {
	s.cases++
	if parts == nil {
		s.refused++
		return
	}
	illegal, shared := false, false
	sizes := []int{}
	owners := make([]int, len(h.Cores))
	used := 0
	for _, part := range parts {
		illegal = illegal || !part.IsSubsetOf(h.CPUs)
		size := 0
		for i, core := range h.Cores {
			if !core.Siblings.Intersection(part).IsEmpty() {
				size++
				owners[i]++
				shared = shared || owners[i] > 1
			}
		}
		sizes = append(sizes, size)
	}
	usable := 0
	for i, core := range h.Cores {
		if !core.Usable.IsEmpty() {
			usable++
			if owners[i] > 0 {
				used++
			}
		}
	}
	if h.Quota > 0 { // a quota cannot keep more cores busy
		usable = min(usable, max(int(h.Quota), ranks))
	}
	least, most := slices.Min(sizes), slices.Max(sizes)
	// One core of difference is unavoidable.
	uneven := least > 0 && most-least > 1 && 2*most > 3*least
	unused := 20*used < 19*usable
	clean := true
	for _, fault := range []struct {
		is    bool
		count *int
	}{{illegal, &s.illegal}, {shared, &s.shared}, {least == 0, &s.empty}, {uneven, &s.uneven}, {unused, &s.unused}} {
		if fault.is {
			*fault.count++
			clean = false
		}
	}
	if clean {
		s.clean++
	}
}

// TestScoreboard applies every rule to every machine and restriction of the corpus that has a core for each rank. Our
// rule must have no fault in any.
func TestScoreboard(t *testing.T) {
	machines := hosttest.Corpus(t)
	hosts := []*host.Host{}
	for _, m := range machines {
		hosts = append(hosts, m.Discover(t))
	}
	for _, s := range hosttest.Scenarios(t, machines) {
		hosts = append(hosts, s.Discover(t))
	}
	for _, ranks := range [][]int{{1, 2, 3, 4, 8}, {1, 2, 3, 4, 8, 16}} {
		scores := make([]score, len(rivals))
		for _, h := range hosts {
			for _, n := range ranks {
				if len(h.UsableCores()) < n {
					continue
				}
				for i, r := range rivals {
					if r.name == "torch exclusive" && len(h.GPUs) < n {
						continue // the rule needs one rank per GPU
					}
					scores[i].count(h, n, r.split(h, n))
				}
			}
		}
		if s := scores[len(scores)-1]; s.clean != s.cases || s.cases < 200 {
			t.Errorf("ranks %v: plimsoll %+v", ranks, s)
		}
		if *printScoreboard {
			fmt.Printf("\n%d machines and restrictions, ranks %v\n%s\n", len(hosts), ranks, scoreTable(scores))
		}
	}
	roles, theirs, mine := 0, 0, 0
	for _, h := range hosts {
		for _, n := range []int{1, 2} {
			plan, err := binding.Split(h, binding.Request{Ranks: n, TrainerCores: binding.DefaultTrainerShare})
			if err != nil || len(h.Cores) == h.Online.Size() || len(h.UsableCores()) < 2*n {
				continue // no hardware threads, or not a core for each role
			}
			roles++
			overlaps, own := false, false
			for i, part := range ours(h, n) {
				whole := cpuset.New() // including the siblings of its workers
				for _, core := range h.Cores {
					if !core.Usable.Intersection(part).IsEmpty() {
						whole = whole.Union(core.Usable)
					}
				}
				overlaps = overlaps || shareCores(h, zenFlowRoles, whole)
				own = own || shareCores(h, func(cpuset.CPUSet) (cpuset.CPUSet, cpuset.CPUSet) {
					return plan.Ranks[i].TrainerCPUs, plan.Ranks[i].OptimizerCPUs
				}, whole)
			}
			if overlaps {
				theirs++
			}
			if own {
				mine++
			}
		}
	}
	if mine > 0 || roles == 0 {
		t.Errorf("in %d of %d role splits trainer and optimizer share a core", mine, roles)
	}
	if *printScoreboard {
		fmt.Printf("\ntrainer and optimizer on one core, in %d role splits of whole cores with "+
			"hardware threads, 1 and 2 ranks:\n"+
			"DeepSpeed ZenFlow %d, plimsoll %d\n", roles, theirs, mine)
	}
}

func shareCores(h *host.Host, roles func(cpuset.CPUSet) (trainer, optimizer cpuset.CPUSet), cpus cpuset.CPUSet) bool {
	trainer, optimizer := roles(cpus)
	return slices.ContainsFunc(h.Cores, func(core host.Core) bool {
		return !core.Siblings.Intersection(trainer).IsEmpty() && !core.Siblings.Intersection(optimizer).IsEmpty()
	})
}

func scoreTable(scores []score) string {
	w := table.NewWriter()
	w.SetStyle(table.StyleLight)
	w.Style().Format = table.FormatOptions{} // headers as written
	w.AppendHeader(table.Row{"rule", "cases", "refused", "illegal CPU", "core shared", "empty rank", "uneven",
		"unused > 5 %", "clean"})
	for i, s := range scores {
		w.AppendRow(table.Row{rivals[i].name, s.cases, s.refused, s.illegal, s.shared, s.empty, s.uneven, s.unused,
			fmt.Sprintf("%d %%", 100*s.clean/s.cases)})
	}
	text := w.Render()
	for _, r := range rivals {
		text += fmt.Sprintf("\n%-18s  %s", r.name, r.source)
	}
	return text
}
