package evidence

import (
	"cmp"
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
)

// listing is a table of who holds memory, as a program prints it: a line of columns, and a line for each holder.
type listing struct {
	by   string
	kind Kind
	// header matches the line of columns.
	literals []string
	header   string
	// row has the groups mem, name and, for processes, pid. What it does not match ends the table.
	row *lazyregexp.Regexp
	// unit is that of numbers without one.
	unit ledger.Bytes
}

var listings = []listing{
	{ // Ray: src/ray/raylet/worker_killing_policy.cc, python/ray/_private/memory_monitor.py before 2.0
		by: "Ray", kind: TrainerLog, unit: ledger.GiB,
		literals: []string{"MEM(GB)", "MEM\tCOMMAND", "MEM COMMAND"},
		header:   `(?:^|memory users: )PID\s+MEM(?:\(GB\))?\s+COMMAND$`,
		// A process whose command cannot be read has none.
		row: lazyregexp.New(`^(?P<pid>\d+)\s+(?P<mem>[\d.]+(?:GB)?)(?:\s+(?P<name>\S.*)|\s*)$`),
	},
	{ // procps: ps aux
		by: "ps", kind: ProcessCounter, unit: kb,
		literals: []string{"%MEM"},
		header:   `^USER\s+PID\s+%CPU\s+%MEM\s+VSZ\s+RSS\s+TTY\s+STAT\s+START\s+TIME\s+COMMAND$`,
		row: lazyregexp.New(`^\S+\s+(?P<pid>\d+)\s+[\d.]+\s+[\d.]+\s+\d+\s+(?P<mem>\d+)\s+\S+\s+\S+\s+\S+\s+[\d:.-]+\s+` +
			`(?P<name>\S.*)$`),
	},
	{ // procps: top
		by: "top", kind: ProcessCounter, unit: kb,
		literals: []string{"%MEM"},
		header:   `^\s*PID\s+USER\s+PR\s+NI\s+VIRT\s+RES\s+SHR\s+S\s+%CPU\s+%MEM\s+TIME\+\s+COMMAND$`,
		row: lazyregexp.New(`^\s*(?P<pid>\d+)\s+\S+\s+\S+\s+-?\d+\s+[\d.]+[kmgt]?\s+(?P<mem>[\d.]+[kmgt]?)\s+[\d.]+[kmgt]?\s+` +
			`[A-Za-z]\s+[\d.]+\s+[\d.]+\s+[\d:.]+\s+(?P<name>\S.*)$`),
	},
	{ // docker stats
		by: "docker stats", kind: Docker, unit: 1,
		literals: []string{"MEM USAGE / LIMIT"},
		header:   `^CONTAINER ID\s+NAME\s+CPU %\s+MEM USAGE / LIMIT\s+MEM %`,
		row:      lazyregexp.New(`^[0-9a-f]{12}\s+(?P<name>\S+)\s+[\d.]+%\s+(?P<mem>[\d.]+[KMGT]?i?B)\s+/\s+[\d.]+[KMGT]?i?B`),
	},
	{ // kubectl top pod
		by: "kubectl top", kind: Kubernetes, unit: 1,
		literals: []string{"MEMORY(bytes)"},
		header:   `^(?:NAMESPACE\s+)?(?:POD\s+)?NAME\s+CPU\(cores\)\s+MEMORY\(bytes\)\s*$`,
		row:      lazyregexp.New(`^(?:\S+\s+)*?(?P<name>\S+)\s+\d+m?\s+(?P<mem>\d+[KMGT]i)\s*$`),
	},
}

// listingPatterns begin the tables of who holds memory.
var listingPatterns = patternsOfListings()

func patternsOfListings() []pattern {
	list := make([]pattern, len(listings))
	for i := range listings {
		l := &listings[i]
		list[i] = pattern{
			name: "list of " + l.by, literals: l.literals, expression: l.header, kind: l.kind,
			take: func(r *reader, m *match) { r.begin(m.stream, &memoryTable{listing: l, at: m.text}) },
		}
	}
	return list
}

// memoryTable reads the rows of a listing.
type memoryTable struct {
	*listing
	at     text
	list   []MemoryHolder
	closed bool
}

// mostListed bounds the holders of a list. The rest is left out: whoever holds much is listed first, or is one of few.
const mostListed = 4096

func (b *memoryTable) line(_ *reader, t *text) bool {
	groups := b.row.FindStringSubmatch(t.string)
	if groups == nil || b.closed || len(b.list) >= mostListed {
		b.closed = b.closed || len(b.list) > 0
		return false
	}
	get := func(name string) string {
		if i := b.row.SubexpIndex(name); i >= 0 {
			return groups[i]
		}
		return ""
	}
	if size := sizeOf(get("mem"), b.unit); size.Known {
		name := cmp.Or(strings.TrimSpace(get("name")), "of no known command")
		b.list = append(b.list, MemoryHolder{atoi(get("pid")), shortened(name), size.Bytes})
	}
	return true
}

func (b *memoryTable) end(r *reader) {
	if len(b.list) > 0 {
		r.add(&b.at, MemoryList{b.by, b.list})
	}
}

// longestName is how much of a command line names a process.
const longestName = 60

func shortened(name string) string {
	if runes := []rune(name); len(runes) > longestName {
		return string(runes[:longestName-3]) + "..."
	}
	return name
}
