package report

import (
	"cmp"
	"fmt"
	"image/color"
	"math"
	"slices"
	"strings"
	"unicode"

	"charm.land/lipgloss/v2"

	"plimsoll/internal/base/ledger"
)

// Bars are the phases of a device as bars: what it holds at its peak in each, component by component, below its
// capacity.
type Bars struct {
	Device  *ledger.Device
	palette []pigment
	most    int // phases that are shown: the fullest; 0 for all
}

// pigment is how a component is drawn: by a letter, or by a block in a color of the terminal.
type pigment struct {
	component ledger.Component // empty for all that have none of their own
	title     string
	letter    string
	hue
}

// hue is a color of the terminal, and the block that is drawn in it.
type hue struct {
	style lipgloss.Style
	block string
}

// The blocks. Terminals have six hues that are seen on dark and on light grounds, and their bright forms look alike:
// what takes less is shaded.
const (
	solid  = "█"
	shaded = "▒"
)

// hues are those of the largest components, in the order in which they are stacked: a test holds that neighbours are
// told apart, also by the color blind.
var hues = slices.Concat(inBlocks(solid, lipgloss.Blue, lipgloss.Yellow, lipgloss.Cyan, lipgloss.Red, lipgloss.Magenta,
	lipgloss.Green), inBlocks(shaded, lipgloss.Blue, lipgloss.Yellow, lipgloss.Cyan, lipgloss.Red))

func inBlocks(block string, colors ...color.Color) (list []hue) {
	for _, c := range colors {
		list = append(list, hue{lipgloss.NewStyle().Foreground(c), block})
	}
	return list
}

// paletteOf gives components a color and a letter, in the order in which they appear in a job: those that a plan names
// as the largest of a device, and then those that take the largest shares of any device's peak, since a host may hold
// ten times what a GPU does. The last two are for other components, and for what an allocator keeps beyond them.
func paletteOf(devices []ledger.Device) []pigment {
	var components []ledger.Component
	most := map[ledger.Component]float64{} // share
	for i := range devices {
		var peak ledger.Bytes
		for _, p := range devices[i].Phases {
			peak = max(peak, p.PeakUsed)
		}
		for k := range devices[i].Phases {
			sums := map[ledger.Component]ledger.Bytes{}
			for _, h := range held(&devices[i], &devices[i].Phases[k]) {
				c := wholeOf(h.Component)
				if _, known := most[c]; !known {
					components = append(components, c)
				}
				sums[c] += h.Bytes
				most[c] = max(most[c], float64(sums[c])/float64(max(peak, 1)))
			}
		}
	}
	for i := range devices {
		names, _ := largestAt(&devices[i])
		for _, c := range names {
			most[c]++ // more than any share
		}
	}
	bySize := slices.SortedStableFunc(slices.Values(components), func(a, b ledger.Component) int {
		return cmp.Compare(most[b], most[a])
	})
	large := bySize[:min(len(bySize), len(hues))]
	var palette []pigment
	taken := ""
	for _, c := range components {
		if !slices.Contains(large, c) {
			continue
		}
		letter := letterOf(c.Title(), taken)
		taken += letter
		palette = append(palette, pigment{c, oneLine(c.Title()), letter, hues[len(palette)]})
	}
	plain, grey := hue{block: solid}, inBlocks(solid, lipgloss.BrightBlack)[0]
	return append(palette, pigment{title: "other", letter: "+", hue: plain},
		pigment{title: "reserved, but not in use", letter: "-", hue: grey})
}

// held returns all that a device holds at the peak of a phase.
func held(device *ledger.Device, p *ledger.Phase) []ledger.Holding {
	return slices.Concat(p.Components, device.Outside)
}

// wholeOf returns the component that another is a part of, at the end.
func wholeOf(c ledger.Component) ledger.Component {
	for c.PartOf() != "" {
		c = c.PartOf()
	}
	return c
}

// letterOf returns the first letter of a title that is not taken.
func letterOf(title, taken string) string {
	for _, r := range title + "xyz" {
		if letter := strings.ToUpper(string(r)); unicode.IsLetter(r) && !strings.Contains(taken, letter) {
			return letter
		}
	}
	return "*"
}

// span is what a bar has of one pigment.
type span struct {
	pigment int
	bytes   ledger.Bytes
}

// spans returns the parts of a phase's bar, in the order of the palette.
func (b Bars) spans(p *ledger.Phase) []span {
	parts := make([]span, len(b.palette))
	for i := range parts {
		parts[i].pigment = i
	}
	other, unused := len(parts)-2, len(parts)-1
	rest := p.PeakUsed
	for _, h := range held(b.Device, p) {
		whole := wholeOf(h.Component)
		at := slices.IndexFunc(b.palette, func(g pigment) bool { return g.component == whole })
		if at < 0 {
			at = other
		}
		parts[at].bytes += h.Bytes
		rest -= h.Bytes
	}
	parts[unused].bytes = max(rest, 0)
	return parts
}

// scale says how many bytes a number of cells show, and at which cell the capacity is.
type scale struct {
	cells, capacity int // -1 where the capacity is unknown
	bytes           ledger.Bytes
}

func (s scale) cell(bytes ledger.Bytes) int {
	return int(math.Round(float64(bytes) / float64(max(s.bytes, 1)) * float64(s.cells)))
}

func (b Bars) text(l layout) string {
	if l.table {
		return timeline(b.Device).text(l)
	}
	width := l.page
	if width == 0 {
		width = terminal
	}
	rows := fullest(phaseRows(b.Device), b.most)
	names := 0
	for _, r := range rows {
		names = max(names, len(r.name))
	}
	names = min(names, width/3)
	const size = len(" 1002 GiB")
	s := scale{cells: width - names - 1 - size - 1, capacity: -1, bytes: b.Device.Peak().PeakUsed}
	if c := b.Device.Capacity; c > 0 {
		s.bytes = max(s.bytes, c)
		s.capacity = s.cell(c)
	}
	var out strings.Builder
	out.WriteString(b.heading(s, names, width))
	shown := make([]bool, len(b.palette))
	for _, r := range rows {
		bar := b.bar(r.phase, s, shown, l)
		for i, name := range wrapped(r.name, names) {
			if i > 0 {
				fmt.Fprintf(&out, "%s\n", name)
				continue
			}
			fmt.Fprintf(&out, "%-*s %s%*s\n", names, name, bar, size, r.phase.PeakUsed)
		}
	}
	out.WriteString(b.legend(shown, width, l))
	return trimmedLines(out.String())
}

// legend says what is shown, in lines of the width.
func (b Bars) legend(shown []bool, width int, l layout) string {
	var out strings.Builder
	column := 0
	for i, g := range b.palette {
		if !shown[i] {
			continue
		}
		entry := len("  x ") + len(g.title)
		if column+entry > width && column > 0 {
			out.WriteString("\n")
			column = 0
		}
		fmt.Fprintf(&out, "  %s %s", g.drawn(1, l), g.title)
		column += entry
	}
	return out.String() + "\n"
}

// heading names the device, and its capacity above the line.
func (b Bars) heading(s scale, names, width int) string {
	title := titleOf(b.Device)
	if s.capacity < 0 {
		return title + "\n"
	}
	capacity := b.Device.Capacity.String()
	to := names + 1 + s.capacity + 1 + len(capacity)/2 // the column after the capacity
	to = min(max(to, len(title)+1+len(capacity)), width)
	return fmt.Sprintf("%s%*s\n", title, to-len(title), capacity)
}

// bar draws a phase. It marks what it shows.
func (b Bars) bar(p *ledger.Phase, s scale, shown []bool, l layout) string {
	row := slices.Repeat([]int{-1}, s.cells+1)
	sum := ledger.Bytes(0)
	for _, part := range b.spans(p) {
		from := s.cell(sum)
		sum += part.bytes
		for i := from; i < min(s.cell(sum), len(row)); i++ {
			row[i], shown[part.pigment] = part.pigment, true
		}
	}
	const line = -2
	if s.capacity >= 0 {
		row[s.capacity] = line
	}
	var out strings.Builder
	for from := 0; from < len(row); {
		to := from
		for to < len(row) && row[to] == row[from] {
			to++
		}
		switch {
		case row[from] == line:
			out.WriteString("│")
		case row[from] < 0:
			out.WriteString(strings.Repeat(" ", to-from))
		default:
			out.WriteString(b.palette[row[from]].drawn(to-from, l))
		}
		from = to
	}
	return out.String()
}

// drawn returns a number of cells.
func (g pigment) drawn(cells int, l layout) string {
	switch {
	case l.color && l.ascii:
		return g.style.Render(strings.Repeat(g.letter, cells))
	case l.color:
		return g.style.Render(strings.Repeat(g.block, cells))
	}
	return strings.Repeat(g.letter, cells)
}

// Markdown has no bars: it shows the figures.
func (b Bars) markdown() string { return timeline(b.Device).markdown() }

// phaseRow is a phase, or several with the same figures.
type phaseRow struct {
	name  string
	phase *ledger.Phase
}

func phaseRows(device *ledger.Device) (rows []phaseRow) {
	for i := 0; i < len(device.Phases); {
		p := &device.Phases[i]
		last := i
		for last+1 < len(device.Phases) && alike(p, &device.Phases[last+1]) {
			last++
		}
		name, end := rowText(p), &device.Phases[last]
		switch {
		case last > i && p.Iteration == end.Iteration:
			name = string(p.Name) + " to " + rowText(end)
		case last > i:
			name += " to " + rowText(end)
		}
		rows = append(rows, phaseRow{name, p})
		i = last + 1
	}
	return rows
}

// fullest returns as many rows as are wanted, those that hold most, in their order; 0 is all.
func fullest(rows []phaseRow, most int) []phaseRow {
	if most == 0 || len(rows) <= most {
		return rows
	}
	sorted := slices.Clone(rows)
	slices.SortStableFunc(sorted, func(a, b phaseRow) int { return cmp.Compare(b.phase.PeakUsed, a.phase.PeakUsed) })
	return slices.DeleteFunc(rows, func(r phaseRow) bool { return !slices.Contains(sorted[:most], r) })
}

// trimmedLines returns lines without spaces at their ends.
func trimmedLines(text string) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		lines[i] = strings.TrimRight(line, " ")
	}
	return strings.Join(lines, "\n")
}
