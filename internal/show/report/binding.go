package report

import (
	"fmt"
	"slices"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
)

// BindingSchema is the schema of the JSON document.
const BindingSchema = "plimsoll.binding/1"

// Binding is the document of a plan of cores.
type Binding struct {
	Schema       string         `json:"schema"`
	Version      string         `json:"version"`
	Host         RehearsedHost  `json:"host"`
	TrainerCores string         `json:"trainer_cores"` // of each rank: a number, or a fraction
	Ranks        []binding.Rank `json:"ranks"`
	Notes        []string       `json:"notes"`
}

// NewBinding makes the document of an assignment of cores.
func NewBinding(
	version string, h *host.Host, request binding.Request, plan *binding.Assignment, notes []string,
) *Binding {
	return &Binding{
		Schema: BindingSchema, Version: version, Host: newHost(h),
		TrainerCores: request.TrainerCores.String(), Ranks: plan.Ranks, Notes: append([]string{}, notes...),
	}
}

// Page shows the cores of each rank, then the reasons.
func (b *Binding) Page() *Page {
	var h, reasons Facts
	h.add("host", "%s", b.Host)
	all, own := commonReasons(b.Ranks)
	reasons = append(reasons, Fact{"every rank", all})
	for rank := range own {
		reasons = append(reasons, Fact{fmt.Sprintf("rank %d", rank), own[rank]})
	}
	reasons.addEach("note", b.Notes)
	return &Page{
		Title:    "Binding of " + counted(len(b.Ranks), "rank"),
		Sections: []Section{{h}, {b.table()}, {reasons}},
		Verdict:  b.verdict(),
		Document: b,
	}
}

func (b *Binding) table() *Table {
	t := new(Table).with(Number, "rank").with(Words, "trainer CPUs", "optimizer CPUs").with(Number, "OMP_NUM_THREADS").
		with(Words, "NUMA nodes", "memory policy")
	for _, r := range b.Ranks {
		var threads any // nil without a trainer on this host
		if r.OMPNumThreads > 0 {
			threads = r.OMPNumThreads
		}
		t.add(r.Rank, r.TrainerCPUs, r.OptimizerCPUs, threads, cpuset.New(r.NUMANodes...), r.MemoryPolicy)
	}
	return t
}

// commonReasons separates the reasons that all ranks share from the reasons of each rank.
func commonReasons(ranks []binding.Rank) (all []string, own [][]string) {
	for _, reason := range ranks[0].Reasons {
		if !slices.ContainsFunc(ranks, func(r binding.Rank) bool { return !slices.Contains(r.Reasons, reason) }) {
			all = append(all, reason)
		}
	}
	for _, r := range ranks {
		own = append(own, slices.DeleteFunc(slices.Clone(r.Reasons),
			func(reason string) bool { return slices.Contains(all, reason) }))
	}
	return all, own
}

func (b *Binding) verdict() string {
	shared := []int{}
	for _, r := range b.Ranks {
		if r.Shared {
			shared = append(shared, r.Rank)
		}
	}
	if len(shared) == 0 {
		return "SEPARATE: no core has two ranks or two roles"
	}
	if len(shared) == 1 {
		return fmt.Sprintf("SHARED: there are too few cores; trainer and optimizer of rank %d share one", shared[0])
	}
	return fmt.Sprintf("SHARED: there are too few cores; ranks %s share", cpuset.New(shared...))
}
