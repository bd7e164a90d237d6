package evidence

import (
	"strconv"
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
)

// counters reads counters of a cgroup or of the host, one a line.
type counters struct {
	fact   Counters
	format *counterFormat
	at     text
}

// counterFormat is the format of a file of counters.
type counterFormat struct {
	file  *lazyregexp.Regexp // the last part of its path
	row   *lazyregexp.Regexp // with the key, the value and the unit
	known map[string]bool    // keys, of which one begins a file that no line names; nil for none
	name  string             // of such a file
	kind  Kind
}

var (
	flatRow   = lazyregexp.New(`^\s*([a-z]\w*) (\d+)()$`)
	colonRow  = lazyregexp.New(`^\s*([A-Z]\w*(?:\(\w+\))?):\s+(\d+)( kB)?$`)
	statusRow = lazyregexp.New(`^\s*([A-Z]\w*):\t? *(?:(\d+)( kB)?|[^\s].*|)$`)
	singleRow = lazyregexp.New(`^\s*()(\d+|max)()$`)
	// pressureRow takes the total of a line of PSI.
	pressureRow = lazyregexp.New(`^\s*(some|full) avg10=[\d.]+ avg60=[\d.]+ avg300=[\d.]+ total=(\d+)()$`)
)

func keys(list string) map[string]bool {
	set := map[string]bool{}
	for _, key := range strings.Fields(list) {
		set[key] = true
	}
	return set
}

// counterFormats are those of cgroups (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst) and of /proc.
var counterFormats = []counterFormat{
	{
		file: lazyregexp.New(`^memory(?:\.swap)?\.events(?:\.local)?$`), row: flatRow,
		known: keys("low high max oom oom_kill oom_group_kill sock_throttled"), name: "memory.events",
		kind: CgroupCounter,
	}, {
		file: lazyregexp.New(`^memory\.oom_control$`), row: flatRow, known: keys("oom_kill_disable under_oom"),
		name: "memory.oom_control", kind: CgroupCounter,
	}, {
		file: lazyregexp.New(`^memory\.stat$`), row: flatRow, known: keys("anon cache"), name: "memory.stat",
		kind: CgroupCounter,
	}, {
		file: lazyregexp.New(`^(?:memory\.pressure|memory)$`), row: pressureRow, known: keys("some"),
		name: "memory.pressure", kind: CgroupCounter,
	}, {
		file: lazyregexp.New(`^vmstat$`), row: flatRow, known: keys("nr_free_pages"), name: "vmstat", kind: HostCounter,
	}, {
		file: lazyregexp.New(`^meminfo$`), row: colonRow, known: keys("MemTotal"), name: "meminfo", kind: HostCounter,
	}, {
		file: lazyregexp.New(`^status$`), row: statusRow, known: keys("Name"), name: "status", kind: ProcessCounter,
	}, {
		file: lazyregexp.New(`^smaps_rollup$`), row: colonRow, known: keys("Rss"), name: "smaps_rollup",
		kind: ProcessCounter,
	}, {
		file: lazyregexp.New(`^(?:memory|pids)\.(?:swap\.|memsw\.|kmem\.)?(?:current|peak|max|high|low|min|` +
			`limit_in_bytes|usage_in_bytes|max_usage_in_bytes|failcnt)$`),
		row: singleRow, kind: CgroupCounter,
	},
}

// counterPatterns begin a block of counters: a line that names the file, or the first line of a file.
var counterPatterns = []pattern{
	{ // head -v, tail, grep, a shell's prompt and cat, or the path alone
		name:     "file of counters",
		literals: []string{"memory.", "meminfo", "vmstat", "pids.", "smaps_rollup", "/status", "/pressure/memory"},
		expression: `^(?:==> |(?:before|after)\b[: -]*|[$#>] ?(?:sudo )?(?:cat|head|tail|grep \S+) |# ?|-+ ?|=+ ?)?(?P<path>(?:[\w.@\\:-]*/)*)` +
			`(?P<file>(?:memory|pids)\.[a-z_.]+[a-z]|meminfo|vmstat|smaps_rollup|status|memory)\b(?: ?(?:before|after))?(?: <==| ?-+| ?=+|:| ?=)?\s*(?P<rest>.*)$`,
		take: func(r *reader, m *match) { r.namedCounters(m) },
	},
	{
		name:       "first line of memory.events",
		literals:   []string{"low ", "oom_kill"},
		expression: `^\s*(?:low|oom_kill_disable|oom_kill) \d+$`,
		take:       unnamedCounters,
	},
	{
		name:       "first line of memory.stat",
		literals:   []string{"anon ", "cache "},
		expression: `^\s*(?:anon|cache) \d+$`,
		take:       unnamedCounters,
	},
	{
		name:       "first line of /proc/vmstat",
		literals:   []string{"nr_free_pages "},
		expression: `^\s*nr_free_pages \d+$`,
		take:       unnamedCounters,
	},
	{
		name:       "first line of PSI",
		literals:   []string{"some avg10="},
		expression: `^\s*some avg10=[\d.]+ `,
		take:       unnamedCounters,
	},
	{
		name:       "first line of /proc/PID/status",
		literals:   []string{"Name:\t"},
		expression: `^Name:\t\S`,
		take:       unnamedCounters,
	},
	{
		name:       "first line of smaps_rollup",
		literals:   []string{"Rss:"},
		expression: `^\s*Rss:\s+\d+ kB$`,
		take:       unnamedCounters,
	},
	{
		name:       "first line of /proc/meminfo",
		literals:   []string{"MemTotal:"},
		expression: `^\s*MemTotal:\s+\d+ kB$`,
		take:       unnamedCounters,
	},
}

// namedCounters begins a block with the line that names its file. grep writes the name in front of each line.
func (r *reader) namedCounters(m *match) {
	file, path := m.get("file"), m.get("path")
	for i := range counterFormats {
		f := &counterFormats[i]
		if !f.file.MatchString(file) {
			continue
		}
		group := groupOf(path)
		b := &counters{format: f, at: m.text, fact: Counters{Group: group, File: file, Values: map[string]int64{}}}
		if old, ok := m.stream.block.(*counters); ok && old.fact.Group == group && old.fact.File == file &&
			m.get("rest") != "" {
			b = old
		}
		if rest := m.get("rest"); rest != "" {
			t := m.text
			t.string = rest
			if !b.line(r, &t) {
				return
			}
		}
		if m.stream.block != block(b) {
			r.begin(m.stream, b)
		}
		return
	}
	r.finish(m.stream)
}

var (
	groupRoot = lazyregexp.New(`^.*sys/fs/cgroup(?:/(?:memory|unified)(?:/|$))?`)
	// reading is a folder that tells readings apart, and no cgroup.
	reading = lazyregexp.New(`(?i)(?:^|/)(?:before|after|begin|start|end|pre|post|old|new)(?:/|$)`)
)

// groupOf returns the cgroup whose files are in a folder. It is empty for the root and where the path does not tell.
func groupOf(path string) string {
	if strings.HasPrefix(path, "/proc") {
		return ""
	}
	group := strings.Trim(reading.ReplaceAllString(groupRoot.ReplaceAllString(path, "/"), "/"), "/.")
	if group == "" {
		return ""
	}
	return "/" + group
}

// unnamedCounters begins a block with its first counter.
func unnamedCounters(r *reader, m *match) {
	for i := range counterFormats {
		f := &counterFormats[i]
		groups := f.row.FindStringSubmatch(m.text.string)
		if groups == nil || !f.known[groups[1]] {
			continue
		}
		b := &counters{format: f, at: m.text, fact: Counters{File: f.name, Values: map[string]int64{}}}
		r.begin(m.stream, b)
		b.line(r, &m.text)
		return
	}
}

// mostCounters bounds the memory of a block.
const mostCounters = 2000

func (b *counters) line(r *reader, t *text) bool {
	groups := b.format.row.FindStringSubmatch(t.string)
	if groups == nil || len(b.fact.Values) >= mostCounters {
		return false
	}
	key, text := groups[1], groups[2]
	if key == "" {
		if key = b.fact.File; len(b.fact.Values) > 0 { // a number that belongs to no file
			return false
		}
	}
	if _, again := b.fact.Values[key]; again { // the file once more, later
		b.end(r)
		b.fact.Values, b.at = map[string]int64{}, *t
	}
	value, err := strconv.ParseInt(text, 10, 64)
	switch {
	case text == "": // words, in /proc/PID/status
		return true
	case err != nil || value >= noLimit:
		value = Unlimited
	case groups[3] != "":
		value *= int64(kb)
	}
	b.fact.Values[key] = value
	if key == "oom_kill" && value > 0 {
		b.at = *t // it says the most
	}
	return true
}

// noLimit is from where on version 1 of cgroups means none: the largest multiple of the page size.
const noLimit = 1 << 60

func (b *counters) end(r *reader) {
	if len(b.fact.Values) == 0 {
		return
	}
	r.kinds[b.format.kind] += len(b.fact.Values)
	for _, file := range []string{"memory.max", "memory.limit_in_bytes"} {
		if value, ok := b.fact.Values[file]; ok && b.fact.File == file {
			r.add(&b.at, Limit{
				Name: "memory.max", Group: b.fact.Group, Bytes: Size{Bytes: ledger.Bytes(value), Known: value >= 0},
			})
			return
		}
	}
	r.add(&b.at, b.fact)
}
