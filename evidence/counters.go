package evidence

import (
	"regexp"
	"strconv"
	"strings"
)

// counters reads counters of a cgroup or of the host, one a line.
type counters struct {
	fact   Counters
	format *counterFormat
	at     text
}

// counterFormat is the format of a file of counters.
type counterFormat struct {
	file  *regexp.Regexp // the last part of its path
	row   *regexp.Regexp // with the groups key and value
	unit  int64
	known map[string]bool // keys, of which one begins a file that no line names; nil for any
	name  string          // of such a file
	kind  Kind
}

var (
	flatRow   = regexp.MustCompile(`^\s*(?P<key>[a-z]\w*) (?P<value>\d+)$`)
	colonRow  = regexp.MustCompile(`^\s*(?P<key>[A-Z]\w*(?:\(\w+\))?):\s+(?P<value>\d+)(?: kB)?$`)
	singleRow = regexp.MustCompile(`^\s*(?P<key>)(?P<value>\d+|max)$`)
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
	{regexp.MustCompile(`^memory(?:\.swap)?\.events(?:\.local)?$`), flatRow, 1, keys("low high max oom oom_kill oom_group_kill sock_throttled"),
		"memory.events", CgroupCounter},
	{regexp.MustCompile(`^memory\.oom_control$`), flatRow, 1, keys("oom_kill_disable under_oom"), "memory.oom_control", CgroupCounter},
	{regexp.MustCompile(`^memory\.stat$`), flatRow, 1, keys("anon cache rss"), "memory.stat", CgroupCounter},
	{regexp.MustCompile(`^vmstat$`), flatRow, 1, keys("nr_free_pages"), "vmstat", HostCounter},
	{regexp.MustCompile(`^meminfo$`), colonRow, 1024, keys("MemTotal"), "meminfo", HostCounter},
	{regexp.MustCompile(`^(?:memory|pids)\.(?:swap\.|memsw\.)?(?:current|peak|max|high|low|min|limit_in_bytes|usage_in_bytes|` +
		`max_usage_in_bytes|failcnt)$`), singleRow, 1, nil, "", CgroupCounter},
}

// counterPatterns begin a block of counters: a line that names the file, or the first line of a file.
var counterPatterns = []pattern{
	{ // head -v, tail, grep, a shell's prompt and cat, or the path alone
		name:     "file of counters",
		literals: []string{"memory.", "meminfo", "vmstat", "pids."},
		expression: `^(?:==> |[$#>] ?(?:sudo )?(?:cat|head|tail|grep \S+) |# ?|-+ ?|=+ ?)?(?P<path>(?:[\w.@\\:-]*/)*)` +
			`(?P<file>(?:memory|pids)\.[a-z_.]+[a-z]|meminfo|vmstat)\b(?: ?(?:before|after))?(?: <==| ?-+| ?=+|:| ?=)?\s*(?P<rest>.*)$`,
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
		group := strings.TrimPrefix(strings.TrimSuffix(path, "/"), "/sys/fs/cgroup")
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
		key = b.fact.File
	}
	if _, again := b.fact.Values[key]; again { // the file once more, later
		b.end(r)
		b.fact.Values, b.at = map[string]int64{}, *t
	}
	value, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		value = Unlimited
	}
	b.fact.Values[key] = value * b.format.unit
	return true
}

func (b *counters) end(r *reader) {
	if len(b.fact.Values) > 0 {
		r.kinds[b.format.kind] += len(b.fact.Values)
		r.add(&b.at, b.fact)
	}
}
