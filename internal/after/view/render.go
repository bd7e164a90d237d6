//go:build linux

package view

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// Screen is how much of a state is shown, and where.
type Screen struct {
	Width  int
	Height int // 0 for as many lines as there are
	Pane   Pane
	// Scroll is the number of lines that are scrolled past: of the table downwards, of the last lines upwards.
	Scroll int
	// Keys is what the user may type; empty for no user.
	Keys string
	// Leave is what the key q does, for the help.
	Leave string
}

// Pane is what is below the head of a screen.
type Pane int

// The panes.
const (
	Table Pane = iota // what is held, and the last lines if there is space
	Lines             // what the ranks and plimsoll have printed
	Help
)

// The styles use the 16 colors of a terminal, which fit its background.
var (
	titleStyle   = lipgloss.NewStyle().Bold(true)
	faintStyle   = lipgloss.NewStyle().Faint(true)
	goodStyle    = lipgloss.NewStyle().Foreground(lipgloss.Green)
	closeStyle   = lipgloss.NewStyle().Foreground(lipgloss.Yellow)
	warningStyle = lipgloss.NewStyle().Foreground(lipgloss.Red).Bold(true)
)

// Render draws the state. Every line fits the width. The number of lines is the height, unless that is 0.
func (s *State) Render(c Screen) []string {
	if c.Width < 1 {
		return nil
	}
	lines := s.head(c.Width)
	room := -1
	if c.Height > 0 {
		room = max(0, c.Height-len(lines)-1)
	}
	switch c.Pane {
	case Help:
		lines = append(lines, help(c)...)
	case Lines:
		lines = append(lines, s.lastLines(c.Width, room, c.Scroll)...)
	default:
		lines = append(lines, s.body(c.Width, room, c.Scroll)...)
	}
	if c.Height > 0 {
		lines = lines[:min(len(lines), max(0, c.Height-1))]
		lines = append(lines, make([]string, max(0, c.Height-1-len(lines)))...)
		lines = append(lines, faintStyle.Render(c.Keys))
	}
	for i, l := range lines {
		lines[i] = ansi.Truncate(l, c.Width, "…")
	}
	return lines
}

// Text draws the whole state without styles, for a file or a pipe.
func (s *State) Text(width int) string {
	return ansi.Strip(strings.Join(s.Render(Screen{Width: width}), "\n")) + "\n"
}

// head returns the lines about the job and the host.
func (s *State) head(width int) []string {
	name := titleStyle.Render("job " + clean(s.start.Job))
	right := clock(s.time)
	if s.end != nil {
		right = "ended after " + right
	}
	command := clean(strings.Join(s.start.Command, " "))
	room := width - ansi.StringWidth(name) - ansi.StringWidth(right) - 4
	left := name
	if room > 0 {
		left += "  " + ansi.Truncate(command, room, "…")
	}
	gap := max(1, width-ansi.StringWidth(left)-ansi.StringWidth(right))
	lines := []string{left + strings.Repeat(" ", gap) + right}
	if s.sample == nil {
		return append(lines, "no sample yet")
	}
	lines = append(lines, s.gauges(width)...)
	for _, w := range s.warnings() {
		lines = append(lines, warningStyle.Render("! "+w))
	}
	if n := len(s.sample.Missed); n > 0 {
		text := "not read: " + clean(s.sample.Missed[0])
		if n > 1 {
			text += fmt.Sprintf(" (and %d more)", n-1)
		}
		lines = append(lines, faintStyle.Render(text))
	}
	if s.end != nil {
		lines = append(lines, titleStyle.Render(ending(s.end)))
	}
	return append(lines, "")
}

// clock returns a time as hours, minutes and seconds.
func clock(t time.Duration) string {
	seconds := int(t.Seconds())
	return fmt.Sprintf("%d:%02d:%02d", seconds/3600, seconds/60%60, seconds%60)
}

// ending says how the job ended, and which rank was first.
func ending(e *samples.End) string {
	switch {
	case e.Detached:
		return "the recording has ended, and the job has not"
	case e.Unknown:
		return "the job has ended; its exit code is unknown"
	}
	text := fmt.Sprintf("the job has ended with exit code %d", e.ExitCode)
	first := slices.IndexFunc(e.Ranks, func(r samples.RankEnd) bool { return r.ExitCode != 0 || r.Signal != 0 })
	switch {
	case e.ByUser:
		text += ", as the user has asked it to"
	case first >= 0 && e.Ranks[first].Signal != 0:
		text += fmt.Sprintf("; rank %d was first, by signal %d", e.Ranks[first].Rank, e.Ranks[first].Signal)
	case first >= 0:
		text += fmt.Sprintf("; rank %d was first, with exit code %d", e.Ranks[first].Rank, e.Ranks[first].ExitCode)
	}
	return text
}

const barWidth = 16

// gauges returns what is used of the host and of each limit, and against the plan.
func (s *State) gauges(width int) []string {
	node := &s.sample.Node
	var lines []string
	add := func(name string, used, whole ledger.Bytes, more string) {
		style := goodStyle
		switch {
		case used > whole/20*19:
			style = warningStyle
		case used > whole/5*4:
			style = closeStyle
		}
		text := fmt.Sprintf("%s▕%s▏ %v of %v", pad(name, 10), style.Render(bar(used, whole, barWidth)), used, whole)
		lines = append(lines, ansi.Truncate(text+more, width, "…"))
	}
	swap := ""
	if node.SwapTotal > 0 {
		swap = fmt.Sprintf(", swap %v", node.SwapTotal-node.SwapFree)
	}
	add("host", node.Memory-node.Available, node.Memory,
		fmt.Sprintf("%s, pressure %.1f %%", swap, 100*s.waiting))
	for _, l := range s.limits {
		if l.name != "the memory of the host" && (!l.apart || l.free < l.of) {
			add(strings.TrimPrefix(strings.TrimPrefix(l.name, "the limit of "), "the "), l.of-l.free, l.of, "")
		}
	}
	if plan := s.planned(ledger.Host); plan != nil {
		add("plan", s.held, plan.Peak().PeakUsed, fmt.Sprintf(" planned, peak %v", s.peak))
	}
	if l := s.headroom(); l != nil {
		lines = append(lines, fmt.Sprintf("%s%s until %s is full", pad("headroom", 11),
			titleStyle.Render(l.free.String()), l.name))
	}
	return lines
}

// pad makes a name as wide as a column.
func pad(name string, width int) string {
	name = ansi.Truncate(name, width, "…")
	return name + strings.Repeat(" ", width-ansi.StringWidth(name))
}

// body returns the tables, and below them the last lines if there is space. A negative room has no end.
func (s *State) body(width, room, scroll int) []string {
	if s.sample == nil {
		return nil
	}
	heading, rows := s.processes().lines(width)
	if len(s.sample.GPUs) > 0 {
		title, gpus := s.devices().lines(width)
		rows = append(append(rows, "", titleStyle.Render(title)), gpus...)
	}
	heading = titleStyle.Render(heading)
	if room < 0 {
		return append([]string{heading}, rows...)
	}
	const leastPane = 3
	if len(rows)+1 <= room {
		lines := append([]string{heading}, rows...)
		if left := room - len(lines) - 2; left >= leastPane {
			lines = append(lines, "", titleStyle.Render("last lines"))
			lines = append(lines, s.lastLines(width, left, 0)...)
		}
		return lines
	}
	shown := max(1, room-2)
	from := min(max(0, scroll), len(rows)-shown)
	lines := append([]string{heading}, rows[from:from+shown]...)
	return append(lines, faintStyle.Render(fmt.Sprintf("rows %d to %d of %d", from+1, from+shown, len(rows))))
}

// processes is the table of what the processes hold.
func (s *State) processes() *table {
	planned := s.plannedForRank()
	t := &table{columns: []column{words("rank", 8, 9), words("phase", 10, 8), number("step", 6, 6),
		number("s/step", 6, 5), number("memory", 9, 9), number("peak", 9, 7), number("of plan", 7, 6),
		number("cores", 5, 4), number("processes", 9, 1), spark("history", 2)}}
	if planned == 0 && s.planned(ledger.Host) == nil {
		t.columns[6].needed = 0
	}
	for _, r := range s.rows {
		if len(r.processes) == 0 && r.role != samples.RankProcess {
			continue
		}
		t.add(&r.memory, r.cells(planned)...)
	}
	share := ""
	if plan := s.planned(ledger.Host); plan != nil {
		share = percent(s.held, plan.Peak().PeakUsed)
	}
	t.add(&s.whole, "all", "", "", "", s.held.String(), s.peak.String(), share, "",
		fmt.Sprint(len(s.sample.Processes)))
	return t
}

// cells returns the cells of a row, before its history. Planned is 0 if it is unknown for a rank.
func (r *row) cells(planned ledger.Bytes) []string {
	row := []string{r.name(), "", "", "", r.held.String(), r.peak.String(), "", fmt.Sprintf("%.1f", r.cores),
		fmt.Sprint(len(r.processes))}
	if r.role != samples.RankProcess {
		return row
	}
	row[1] = clean(string(r.phase))
	if r.step > 0 {
		row[2] = fmt.Sprint(r.step)
	}
	if r.stepTime > 0 {
		row[3] = seconds(r.stepTime)
	}
	if planned > 0 {
		row[6] = percent(r.held, planned)
	}
	if len(r.processes) == 0 {
		row[1], row[4], row[6], row[7] = "ended", "", "", ""
	}
	return row
}

// plannedForRank returns the share of a rank in what is planned for its host. It is 0 if there is none: an optimizer
// service holds a part of it.
func (s *State) plannedForRank() ledger.Bytes {
	plan, ranks := s.planned(ledger.Host), 0
	for _, r := range s.rows {
		switch r.role {
		case samples.RankProcess:
			ranks++
		case samples.Service:
			return 0
		}
	}
	if plan == nil || ranks == 0 {
		return 0
	}
	return plan.Peak().PeakUsed / ledger.Bytes(ranks)
}

func percent(part, whole ledger.Bytes) string {
	return fmt.Sprintf("%.0f %%", 100*float64(part)/float64(max(1, whole)))
}

// seconds returns a time with three digits.
func seconds(d time.Duration) string {
	switch t := d.Seconds(); {
	case t < 9.995:
		return fmt.Sprintf("%.2f", t)
	case t < 99.95:
		return fmt.Sprintf("%.1f", t)
	default:
		return fmt.Sprintf("%.0f", t)
	}
}

// name returns what the row is of.
func (r *row) name() string {
	switch r.role {
	case samples.RankProcess:
		return fmt.Sprint(r.rank)
	case samples.Service:
		return "service"
	case samples.Keeper:
		return "plimsoll"
	}
	return "other"
}

// devices is the table of what the GPUs hold.
func (s *State) devices() *table {
	t := &table{columns: []column{words("GPU", 4, 9), words("rank", 6, 7), number("used", 9, 9), number("of", 9, 8),
		number("headroom", 9, 6), number("torch", 9, 5), number("of plan", 7, 4), words("throttled by", 12, 1),
		spark("history", 2)}}
	plan := s.planned(ledger.GPU)
	if plan == nil {
		t.columns[6].needed = 0
	}
	for i := range s.sample.GPUs {
		gpu := &s.sample.GPUs[i]
		ranks := s.ranksOn(gpu)
		row := []string{fmt.Sprint(gpu.Index), "", gpu.Used.String(), gpu.Total.String(), gpu.Free.String(), "", "",
			clean(strings.Join(gpu.Throttled, ", "))}
		var numbers []string
		for _, r := range ranks {
			numbers = append(numbers, fmt.Sprint(r.rank))
		}
		row[1] = strings.Join(numbers, ",")
		if len(ranks) == 1 && ranks[0].torch > 0 {
			row[5] = ranks[0].torch.String()
		}
		if plan != nil {
			row[6] = percent(gpu.Used, plan.Peak().PeakUsed)
		}
		t.add(s.gpus[gpu.Index], row...)
	}
	return t
}

// ranksOn returns the ranks with a process on a GPU.
func (s *State) ranksOn(gpu *samples.GPU) (ranks []*row) {
	for _, r := range s.rows {
		if r.role != samples.RankProcess {
			continue
		}
		for id := range r.processes {
			if slices.ContainsFunc(gpu.Processes, func(p samples.GPUProcess) bool { return p.PID == id.pid }) {
				ranks = append(ranks, r)
				break
			}
		}
	}
	return ranks
}

// lastLines returns the last lines of the ranks, and the last messages below them. A negative room has no end.
func (s *State) lastLines(width, room, scroll int) []string {
	all := s.printed()
	all = append(all, s.messages...)
	if len(all) == 0 {
		all = []string{"nothing printed yet"}
	}
	if room < 0 {
		room = len(all)
	}
	last := max(min(len(all), room), len(all)-max(0, scroll))
	lines := slices.Clone(all[max(0, last-room):last])
	for i, l := range lines {
		lines[i] = ansi.Truncate(l, width, "…")
	}
	return lines
}

// printed returns the lines of the ranks. Several ranks have labels.
func (s *State) printed() (all []string) {
	for _, l := range s.lines {
		all = append(all, s.labelled(l))
	}
	return all
}

func (s *State) labelled(l line) string {
	if len(s.start.Ranks) > 1 || l.rank != 0 {
		return fmt.Sprintf("[rank %d] %s", l.rank, l.text)
	}
	return l.text
}

// help returns what the keys do, and what the columns are.
func help(c Screen) []string {
	return []string{
		titleStyle.Render("keys"),
		"  q          " + c.Leave,
		"  l          the last lines that the ranks have printed, and back",
		"  up, down   scroll; also k and j, page up and page down, home and end",
		"  ?          this help, and back",
		"  Ctrl-C     ends the job, or the watching",
		"",
		titleStyle.Render("columns"),
		"  memory     what the processes hold; pages that several share are divided",
		"  peak       the most that was resident",
		"  of plan    memory, as a share of what is planned for its peak",
		"  cores      that were busy since the last sample",
		"  torch      what torch.cuda has reserved, if the rank tells",
		"",
		"headroom is what is left until the nearest limit is full, page cache aside.",
	}
}
