package report

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/plan"
)

// VariedSchema is the schema of the JSON document.
const VariedSchema = "plimsoll.varied/1"

// Varied is a program that has planned itself with several values of an argument.
type Varied struct {
	Schema   string       `json:"schema"`
	Version  string       `json:"version"`
	Command  []string     `json:"command"` // in which {NAME} stands for the value
	Name     string       `json:"name"`
	GPU      string       `json:"gpu,omitempty"`
	Capacity ledger.Bytes `json:"gpu_capacity_bytes,omitempty"`
	Rows     []VariedRow  `json:"rows"`
	// Largest is the largest value of a range that fits, and Over the next larger one that was run and does not. Both
	// are empty if they were not found.
	Largest string `json:"largest,omitempty"`
	Over    string `json:"over,omitempty"`
}

// VariedRow is what a job holds with one value. Memory is that of the fullest GPU, and of a node.
type VariedRow struct {
	Value string `json:"value"`
	// Interpolated means that nothing was run: the figures lie between those of the values beside it.
	Interpolated bool         `json:"interpolated,omitempty"`
	Verdict      plan.Result  `json:"verdict,omitempty"`
	Allocated    ledger.Bytes `json:"peak_allocated_bytes"`
	Reserved     ledger.Bytes `json:"peak_reserved_bytes"`
	GPU          ledger.Bytes `json:"gpu_bytes"`
	Upper        ledger.Bytes `json:"gpu_upper_bytes"` // the upper end of the interval
	Host         ledger.Bytes `json:"host_bytes"`
	Failed       string       `json:"failed,omitempty"` // why there are no figures
}

// VariedRun is a run with one value.
type VariedRun struct {
	Value   string
	Verdict plan.Result
	Devices []ledger.Device
	Failed  string
}

func (r *VariedRun) row() VariedRow {
	row := VariedRow{Value: r.Value, Verdict: r.Verdict, Failed: r.Failed}
	if r.Failed != "" {
		return row
	}
	gpu := r.fullest()
	row.GPU, row.Upper = gpu.Peak().PeakUsed, gpu.Interval.Upper
	for _, p := range gpu.Phases {
		row.Allocated, row.Reserved = max(row.Allocated, p.PeakAllocated), max(row.Reserved, p.PeakReserved)
	}
	if host := r.host(); host != nil {
		row.Host = host.Peak().PeakUsed
	}
	return row
}

// fullest returns the GPU that holds most.
func (r *VariedRun) fullest() (fullest *ledger.Device) {
	for i := range r.Devices {
		d := &r.Devices[i]
		if d.Kind == ledger.GPU && (fullest == nil || d.Peak().PeakUsed > fullest.Peak().PeakUsed) {
			fullest = d
		}
	}
	return fullest
}

func (r *VariedRun) host() *ledger.Device {
	at := slices.IndexFunc(r.Devices, func(d ledger.Device) bool { return d.Kind == ledger.Host })
	if at < 0 {
		return nil
	}
	return &r.Devices[at]
}

// NewVaried makes the document. The values of a range are numbers in order.
func NewVaried(version string, command []string, name string, isRange bool, runs []VariedRun) *Varied {
	d := &Varied{Schema: VariedSchema, Version: version, Command: command, Name: name}
	for i := range runs {
		d.Rows = append(d.Rows, runs[i].row())
		for _, device := range runs[i].Devices {
			if device.Kind == ledger.GPU && d.GPU == "" {
				d.GPU, d.Capacity = device.Name, device.Capacity
			}
		}
	}
	if isRange {
		d.Largest, d.Over = d.limit()
		d.interpolate(runs)
	}
	return d
}

// limit returns the largest value that fits, and the next one, which does not.
func (d *Varied) limit() (fits, over string) {
	for i := 1; i < len(d.Rows); i++ {
		before, row := &d.Rows[i-1], &d.Rows[i]
		if before.Verdict == plan.Fits && row.Failed == "" && row.Verdict != plan.Fits {
			return before.Value, row.Value
		}
	}
	return "", ""
}

func (r *VariedRow) number() int {
	n, _ := strconv.Atoi(r.Value)
	return n
}

// interpolate adds the powers of two between the values that were run.
func (d *Varied) interpolate(runs []VariedRun) {
	var all []VariedRow
	for i := range d.Rows {
		row := &d.Rows[i]
		if i > 0 && row.Failed == "" && d.Rows[i-1].Failed == "" {
			from := d.Rows[i-1].number()
			for n := 1; n < row.number(); n *= 2 {
				if n > from {
					share := float64(n-from) / float64(row.number()-from)
					all = append(all, between(&runs[i-1], &runs[i], share).named(strconv.Itoa(n)))
				}
			}
		}
		all = append(all, *row)
	}
	d.Rows = all
}

func (r VariedRow) named(value string) VariedRow {
	r.Value = value
	return r
}

// between interpolates between two runs. Each phase takes a line of its own, as another phase may hold most in the one
// than in the other. What is reserved beyond what is allocated takes a line, too.
func between(from, to *VariedRun, share float64) VariedRow {
	on := func(a, b ledger.Bytes) ledger.Bytes { return a + ledger.Bytes(share*float64(b-a)) }
	highest := func(a, b *ledger.Device, of func(*ledger.Phase) ledger.Bytes) (most ledger.Bytes) {
		for i := range a.Phases {
			p := &a.Phases[i]
			at := slices.IndexFunc(b.Phases, func(other ledger.Phase) bool {
				return other.Name == p.Name && other.Iteration == p.Iteration
			})
			if at >= 0 {
				most = max(most, on(of(p), of(&b.Phases[at])))
			}
		}
		return most
	}
	a, b := from.row(), to.row()
	row := VariedRow{Interpolated: true, Allocated: highest(from.fullest(), to.fullest(),
		func(p *ledger.Phase) ledger.Bytes { return p.PeakAllocated })}
	row.Reserved = row.Allocated + on(a.Reserved-a.Allocated, b.Reserved-b.Allocated)
	row.GPU = row.Reserved + on(a.GPU-a.Reserved, b.GPU-b.Reserved)
	row.Upper = row.GPU + on(a.Upper-a.GPU, b.Upper-b.GPU)
	if one, other := from.host(), to.host(); one != nil && other != nil {
		row.Host = highest(one, other, func(p *ledger.Phase) ledger.Bytes { return p.PeakUsed })
	}
	return row
}

// Fits reports whether some value fits, or whether no limit is known.
func (d *Varied) Fits() bool {
	return d.Capacity == 0 || slices.ContainsFunc(d.Rows, func(r VariedRow) bool {
		return r.Failed == "" && !r.Interpolated && r.Verdict != plan.DoesNotFit
	})
}

// Page shows a row for each value.
func (d *Varied) Page() *Page {
	var job Facts
	job.add("program", "%s", strings.Join(d.Command, " "))
	if d.Capacity > 0 {
		job.add("GPU", "%s, %v", d.GPU, d.Capacity)
	}
	t := (&Table{Style: Plain}).with(Label, d.Name).with(Bytes, "allocated", "reserved", "GPU", "host").
		with(Words, "fits")
	var failed Facts
	for _, r := range d.Rows {
		if r.Failed != "" {
			failed.add(d.Name+" "+r.Value, "%s; without --vary and with this value, it shows what it says", r.Failed)
			continue
		}
		says := map[plan.Result]string{plan.Fits: "yes", plan.Tight: "perhaps", plan.DoesNotFit: "no"}[r.Verdict]
		if r.Interpolated {
			says = "not run: between its neighbors"
		}
		t.add(r.Value, r.Allocated, r.Reserved, r.GPU, r.Host, says)
	}
	page := &Page{Title: "Plans of " + d.Name, Sections: []Section{{job}, {t}}, Document: d, Verdict: d.verdict(),
		Dense: true}
	if len(failed) > 0 {
		page.Sections = append(page.Sections, Section{failed})
	}
	page.Tone = Good
	if !d.Fits() {
		page.Tone = Bad
	}
	return page
}

func (d *Varied) verdict() string {
	fits := slices.DeleteFunc(slices.Clone(d.Rows), func(r VariedRow) bool { return r.Verdict != plan.Fits })
	switch {
	case d.Capacity == 0:
		return "no verdict: give --gpu or --gpu-memory"
	case d.Largest != "":
		return fmt.Sprintf("largest that fits: %s %s; %s does not", d.Name, d.Largest, d.Over)
	case len(fits) == 0:
		return "no value fits for certain"
	}
	values := make([]string, len(fits))
	for i, r := range fits {
		values[i] = r.Value
	}
	return fmt.Sprintf("fits: %s %s", d.Name, strings.Join(values, ", "))
}
