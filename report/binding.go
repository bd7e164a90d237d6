package report

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"k8s.io/utils/cpuset"

	"plimsoll/binding"
	"plimsoll/host"
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

// WriteJSON writes the document.
func (b *Binding) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(b)
}

// WriteText writes the document for people: the cores of each rank, then the reasons.
func (b *Binding) WriteText(w io.Writer) error {
	var out strings.Builder
	line := func(name, value string) { fmt.Fprintf(&out, "%-18s %s\n", name, value) }
	line("host", b.Host.String())
	out.WriteString("\n" + b.table() + "\n\n")
	all, own := commonReasons(b.Ranks)
	for i, reason := range all {
		line(once(i, "every rank"), reason)
	}
	for rank, reasons := range own {
		for i, reason := range reasons {
			line(once(i, fmt.Sprintf("rank %d", rank)), reason)
		}
	}
	for _, note := range b.Notes {
		line("note", note)
	}
	out.WriteString("\n" + b.verdict() + "\n")
	_, err := io.WriteString(w, out.String())
	return err
}

// once returns the name for the first line and "" for the others.
func once(i int, name string) string {
	if i > 0 {
		return ""
	}
	return name
}

func (b *Binding) table() string {
	t := table.NewWriter()
	t.SetStyle(table.StyleLight)
	t.Style().Format = table.FormatOptions{} // headers as written
	t.SetColumnConfigs([]table.ColumnConfig{{Number: 4, Align: text.AlignRight}})
	t.AppendHeader(table.Row{"rank", "trainer CPUs", "optimizer CPUs", "OMP_NUM_THREADS", "NUMA nodes",
		"memory policy"})
	for _, r := range b.Ranks {
		threads := "" // no trainer on this host
		if r.OMPNumThreads > 0 {
			threads = fmt.Sprint(r.OMPNumThreads)
		}
		t.AppendRow(table.Row{r.Rank, r.TrainerCPUs, r.OptimizerCPUs, threads, cpuset.New(r.NUMANodes...),
			r.MemoryPolicy})
	}
	return t.Render()
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
