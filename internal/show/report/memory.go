package report

import (
	"cmp"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"fmt"
	"html/template"
	"slices"
	"strings"

	"plimsoll/internal/base/ledger"
)

// memoryScript draws the devices of a plan with Chart.js.
//
//go:embed memory.js
var memoryScript string

// chartLibrary is the release of Chart.js that stands in its first lines, under its license beside it.
//
//go:embed chartjs/chart.umd.min.js
var chartLibrary string

// memoryView is what memory.js shows: devices with their phases, and what each phase holds.
type memoryView struct {
	Palette []string       `json:"palette"` // titles of the colors; the last two are for others, and for what is unused
	Classes []string       `json:"classes"` // of the colors in the page
	Devices []memoryDevice `json:"devices"`
}

// memoryDevice is a device, or a NUMA node of a host: then it has a single phase.
type memoryDevice struct {
	Title        string        `json:"title"`
	Capacity     ledger.Bytes  `json:"capacity"` // 0 if unknown
	CapacityText string        `json:"capacity_text"`
	Peak         int           `json:"peak"` // the phase that holds most
	Phases       []memoryPhase `json:"phases"`
}

type memoryPhase struct {
	Name string       `json:"name"`
	Used ledger.Bytes `json:"used"`
	Text string       `json:"text"`
	// Allocator are the parts of what a GPU's allocator has from the driver, and what is outside of it.
	Allocator []memoryPart    `json:"allocator,omitempty"`
	Held      []memoryHolding `json:"held"` // the largest first
}

type memoryPart struct {
	Title string       `json:"title"`
	Bytes ledger.Bytes `json:"bytes"`
	Text  string       `json:"text"`
}

// memoryHolding is a holding as the page shows it.
type memoryHolding struct {
	Bytes   ledger.Bytes `json:"bytes"`
	Why     string       `json:"why,omitempty"`
	Formula []string     `json:"formula,omitempty"` // its lines
	Source  string       `json:"source,omitempty"`
	Title   string       `json:"title"`
	Text    string       `json:"text"`
	Color   int          `json:"color"` // its place in the palette
}

// newMemoryView returns the view of all bars of a page, or nil for a page without bars.
func newMemoryView(page *Page) *memoryView {
	view := &memoryView{}
	for _, section := range page.Sections {
		for _, block := range section {
			bars, isBars := block.(Bars)
			if !isBars {
				continue
			}
			if view.Palette == nil {
				view.Palette, view.Classes = pageColors(bars.palette)
			}
			view.Devices = append(view.Devices, bars.view())
			view.Devices = append(view.Devices, bars.nodes()...)
		}
	}
	if view.Devices == nil {
		return nil
	}
	return view
}

// pageColors returns the titles of a palette, and their colors in a page.
func pageColors(palette []pigment) (titles, classes []string) {
	var components []ledger.Component
	for _, g := range palette[:len(palette)-2] {
		components = append(components, g.component)
	}
	of := colorClasses(components)
	for _, g := range palette {
		titles, classes = append(titles, g.title), append(classes, of[g.component])
	}
	classes[len(classes)-2], classes[len(classes)-1] = otherColor, "unused"
	return titles, classes
}

func (b Bars) view() memoryDevice {
	d := memoryDevice{Title: titleOf(b.Device), Capacity: b.Device.Capacity,
		CapacityText: b.Device.Capacity.String()}
	rows := phaseRows(b.Device)
	d.Peak = max(0, slices.IndexFunc(rows, func(r phaseRow) bool { return alike(r.phase, b.Device.Peak()) }))
	for _, r := range rows {
		p := memoryPhase{Name: r.name, Used: r.phase.PeakUsed, Text: r.phase.PeakUsed.String(),
			Held: b.holdings(r.phase)}
		if b.Device.Kind == ledger.GPU {
			p.Allocator = allocatorParts(r.phase)
		}
		d.Phases = append(d.Phases, p)
	}
	return d
}

// holdings returns all that a device holds at the peak of a phase, the largest first, and then what is unused.
func (b Bars) holdings(p *ledger.Phase) []memoryHolding {
	var all []memoryHolding
	for _, h := range held(b.Device, p) {
		title := h.Component.Title()
		if h.Part != "" {
			title += " (" + h.Part + ")"
		}
		color := slices.IndexFunc(b.palette, func(g pigment) bool { return g.component == wholeOf(h.Component) })
		if color < 0 {
			color = len(b.palette) - 2
		}
		of := memoryHolding{Bytes: h.Bytes, Why: h.Why, Title: title, Text: h.Bytes.String(), Color: color}
		if of.Formula = h.Formula.Lines(); h.Origin != nil {
			of.Source = h.Origin.String()
		}
		all = append(all, of)
	}
	slices.SortStableFunc(all, func(x, y memoryHolding) int { return cmp.Compare(y.Bytes, x.Bytes) })
	spans := b.spans(p)
	if rest := spans[len(spans)-1]; rest.bytes > 0 {
		all = append(all, memoryHolding{Bytes: rest.bytes,
			Why:   "what the allocator keeps beyond that: rounding, fragments, memory of earlier phases",
			Title: b.palette[rest.pigment].title, Text: rest.bytes.String(), Color: rest.pigment})
	}
	return all
}

// allocatorParts divides what is in use on a GPU by who has it.
func allocatorParts(p *ledger.Phase) (parts []memoryPart) {
	for _, part := range []memoryPart{
		{Title: "tensors", Bytes: p.PeakRequested},
		{Title: "rounding", Bytes: p.PeakAllocated - p.PeakRequested},
		{Title: "free in segments", Bytes: p.PeakReserved - p.PeakAllocated},
		{Title: "outside of it", Bytes: p.PeakUsed - p.PeakReserved},
	} {
		if part.Bytes > 0 {
			part.Text = part.Bytes.String()
			parts = append(parts, part)
		}
	}
	return parts
}

// nodes returns a host's NUMA nodes. What they hold is known as a sum alone.
func (b Bars) nodes() (devices []memoryDevice) {
	other := len(b.palette) - 2
	for _, n := range b.Device.NUMANodes {
		sum := memoryHolding{Bytes: n.PeakUsed, Why: "what its ranks hold: " + counted(n.Ranks, "rank"),
			Title: "in use", Text: n.PeakUsed.String(), Color: other}
		phase := memoryPhase{Name: "at the peak", Used: n.PeakUsed, Text: n.PeakUsed.String(),
			Held: []memoryHolding{sum}}
		devices = append(devices, memoryDevice{Title: fmt.Sprintf("NUMA node %d of the host", n.Node),
			Capacity: n.Capacity, CapacityText: n.Capacity.String(), Phases: []memoryPhase{phase}})
	}
	return devices
}

// htmlScripts are the scripts of a page that draws memory, as the browser runs them, and the policy that allows them.
type htmlScripts struct {
	Library, Memory template.JS
	Policy          string
}

var scripts = htmlScripts{template.JS(chartLibrary), template.JS(memoryScript),
	"script-src '" + strings.Join(ScriptHashes(), "' '") + "'"}

// ScriptHashes returns the hashes of all scripts of reports, for a page that shows reports inside of it.
func ScriptHashes() []string { return []string{ScriptHash(chartLibrary), ScriptHash(memoryScript)} }

// ScriptHash returns the hash by which a Content-Security-Policy allows a script.
func ScriptHash(script string) string {
	sum := sha256.Sum256([]byte(script))
	return "sha256-" + base64.StdEncoding.EncodeToString(sum[:])
}
