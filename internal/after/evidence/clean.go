package evidence

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"plimsoll/internal/base/lazyregexp"
)

// longestText is how much of a line a finding shows.
const longestShown = 2000

// text is a line without colours and labels, and what its labels have said.
type text struct {
	string
	number int
	rank   int    // NoRank if no label names one
	stream string // the labels that tell the streams of several processes apart
	host   string
	time   string // in any of the layouts
	uptime time.Duration
	kernel bool // a label says that the kernel has written the line
	glued  bool // the text is the rest of a line, behind a progress bar or before it
}

// ofKernel reports whether the kernel has written the line.
func (t *text) ofKernel() bool { return t.kernel || t.uptime > 0 }

// label is what a launcher, a logger or a terminal writes in front of a line.
type label struct {
	first      string // a line with the label begins with one of these bytes; empty for letters and digits
	expression *regexp.Regexp
	take       func(t *text, groups []string)
}

func rankLabel(t *text, groups []string) {
	if rank, err := strconv.Atoi(groups[1]); err == nil && rank < 1<<24 {
		t.rank = rank
	}
	streamLabel(t, groups)
}

// streamLabel takes a label without the space behind it, which the indent of a line may have given.
func streamLabel(t *text, groups []string) { t.stream += strings.TrimRight(groups[0], " ") }

func hostLabel(t *text, groups []string) {
	t.host = groups[1]
	t.stream += t.host + HostMark
}

// HostMark ends the label of a host, which has several processes.
const HostMark = "@"

func uptimeLabel(t *text, groups []string) {
	if seconds, err := strconv.ParseFloat(groups[1], 64); err == nil && seconds < 1e9 {
		t.uptime = time.Duration(seconds * float64(time.Second))
	}
}

func noLabel(*text, []string) {}

// labels are in the order in which they are tried, again and again, until none is left. A label ends before the spaces
// that indent the line. They are compiled when the first line is read, as most commands read none.
var labels = sync.OnceValue(func() []label {
	return []label{
		// PyTorch's own prefix, Megatron, Lightning
		{"[", regexp.MustCompile(`^\[(?i:rank|local_rank)(?:[:=] ?| )?(\d+)\](?: ?: ?| )`), rankLabel},
		// nemo_run and other launchers: a host and a process of it; the process is no rank of the job
		{"[", regexp.MustCompile(`^\[[A-Za-z][\w.-]{0,100}:\d{1,5}\]: ?`), streamLabel},
		// nemo_run: a task of an experiment, and its replica
		{"i", regexp.MustCompile(`^i\.[\w.-]{1,100}/\d{1,5} `), streamLabel},
		// torchrun --tee
		{"[", regexp.MustCompile(`^\[default(\d+)\]:`), rankLabel},
		// mpirun --tag-output, SageMaker
		{"[", regexp.MustCompile(`^\[\d+,(?:mpirank:)?(\d+)(?:,[\w.-]+)?\]<std(?:out|err|diag)>:`), rankLabel},
		// srun --label
		{" 0123456789", regexp.MustCompile(`^ *(\d{1,6}): `), rankLabel},
		{"rR", regexp.MustCompile(`^(?i:rank)[ =]?(\d+) ?: `), rankLabel},
		// Ray, vLLM
		{"(", regexp.MustCompile(`^\([^()]{0,100}?\bpid=\d+[^()]{0,200}\) `), streamLabel},
		// kubectl logs --prefix
		{"[", regexp.MustCompile(`^\[pod/[^\]]{1,300}\] `), streamLabel},
		// docker compose
		{"", regexp.MustCompile(`^([a-z][\w.-]{0,100}-\d+) +\| `), streamLabel},
		// pdsh, ansible
		{"", regexp.MustCompile(`^([a-z][a-z0-9.-]{0,60}\d[a-z0-9.-]{0,60}): `), hostLabel},
		// a kernel log's level, and dmesg -x
		{"<", regexp.MustCompile(`^<\d{1,3}>`), noLabel},
		{"k", regexp.MustCompile(`^kern +:\w+ *: `), noLabel},
		// syslog and journalctl, in all styles of their times
		{"", regexp.MustCompile(`^((?:[A-Z][a-z]{2} )?[A-Z][a-z]{2} [ \d]\d (?:\d{4} )?\d\d:\d\d:\d\d(?:\.\d+)?)` +
			` (?:[A-Z]{3,4} )?(?:([\w.-]+) )?(kernel|[\w./@:-]+\[\d+\]): `), syslogLabel},
		{"0123456789", regexp.MustCompile(`^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)` +
			` ([\w.-]+) (kernel|[\w./@:-]+\[\d+\]): `), syslogLabel},
		{"[", regexp.MustCompile(`^\[ *(\d{1,9}\.\d{1,9})\] ?`), uptimeLabel},
		{"[", regexp.MustCompile(`^\[ *[TC]\d+\] `), streamLabel},
		{"[", regexp.MustCompile(`^\[([A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:[.,]\d+)? \d{4})\] ?`), timeLabel},
		{"[", regexp.MustCompile(`^\[[^\[\]]{1,40} \d\d:\d\d:\d\d \d{4}\] ?`), noLabel}, // in another language
		// a quotation
		{">", regexp.MustCompile(`^> `), noLabel},
		// Kubernetes' files of logs, docker logs --timestamps, loggers
		{"[0123456789", regexp.MustCompile(`^\[?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?` +
			`(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?)\]?:?(?: std(?:out|err) [FP])?(?: |$)`), timeLabel},
		{"[0123456789", regexp.MustCompile(`^\[?(\d\d:\d\d:\d\d(?:[.,]\d+)?)\]? `), noLabel},
		// levels and names of loggers: DeepSpeed, logging, loguru
		{"[", regexp.MustCompile(`^\[(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\] `), noLabel},
		{"[", regexp.MustCompile(`^\[[\w.]+\.py:\d+:\w+\] `), noLabel},
		{"-", regexp.MustCompile(`^- (?:[\w.]+ - )?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) - `), noLabel},
		{"|", regexp.MustCompile(`^\| (?:DEBUG|INFO|WARNING|ERROR|CRITICAL|SUCCESS) +\| (?:[\w.<>]+:[\w.<>]+:\d+ - )?`), noLabel},
	}
})

// gluedTrace is the beginning of a rank's traceback behind a progress bar, which has not ended its line.
var gluedTrace = lazyregexp.New(`[^:\s]\[rank\d+\]: ?Traceback \(most recent call last\)`)

// bar is the end of tqdm's progress bar, which ends no line: what comes next stands behind it.
var bar = lazyregexp.New(`\d%\|[^|]*\|[^\[\]]*\[[^\[\]]*(?:it/s|s/it)[^\[\]]*\]\s*`)

// unglued returns the texts, and what stands behind a progress bar as a text of its own.
func unglued(texts []text) []text {
	for i := 0; i < len(texts); i++ {
		t := texts[i]
		if !strings.Contains(t.string, "%|") {
			continue
		}
		place := bar.FindStringIndex(t.string)
		if place == nil || place[1] == len(t.string) {
			continue
		}
		rest := t
		texts[i].string, rest.string = t.string[:place[1]], t.string[place[1]:]
		texts[i].glued, rest.glued = true, true
		texts = slices.Insert(texts, i+1, rest)
	}
	return texts
}

// clean returns the text of a line.
func clean(line string, number int) text {
	t := text{string: plain(line), number: number, rank: NoRank}
	if strings.Contains(t.string, tracebackHeader) {
		if glued := gluedTrace.FindStringIndex(t.string); glued != nil {
			t.string = t.string[glued[0]+1:]
		}
	}
	for more, tries := true, 0; more && tries < 8; tries++ {
		more = false
		for i := range labels() {
			l := &labels()[i]
			if t.string == "" || !l.begins(t.string[0]) {
				continue
			}
			if groups := l.expression.FindStringSubmatch(t.string); groups != nil {
				t.string, more = t.string[len(groups[0]):], true
				l.take(&t, groups)
			}
		}
	}
	return t
}

func (l *label) begins(first byte) bool {
	if l.first == "" {
		return first|0x20 >= 'a' && first|0x20 <= 'z'
	}
	return strings.IndexByte(l.first, first) >= 0
}

// escapes are the sequences with which programs colour text and move the cursor.
var escapes = lazyregexp.New("\x1b(?:\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b]*(?:\x07|\x1b\\\\)|[@-Z\\\\^_])")

// plain returns the line without colours, control characters and bytes that are no UTF-8.
func plain(line string) string {
	if strings.IndexByte(line, 0x1b) >= 0 {
		line = escapes.ReplaceAllString(line, "")
	}
	for i := range len(line) {
		if c := line[i]; c < 0x20 && c != '\t' || c >= 0x7f {
			return strings.Map(printable, strings.ToValidUTF8(line, "\uFFFD"))
		}
	}
	return line
}

func printable(r rune) rune {
	switch {
	case r == '\t':
		return r
	case r < 0x20 || r == 0x7f || r >= 0x80 && r < 0xa0 || r == '\uFEFF':
		return -1
	}
	return r
}

func timeLabel(t *text, groups []string) { t.time = groups[1] }

// when returns the time of the line, or zero.
func (t *text) when() time.Time {
	when, _ := parseTime(t.time)
	return when
}

func syslogLabel(t *text, groups []string) {
	timeLabel(t, groups)
	t.host = groups[2]
	t.kernel = groups[3] == "kernel"
	if t.kernel {
		t.stream += t.host
	} else {
		t.stream += t.host + " " + groups[3]
	}
}

// layouts are those of times. A time without a zone counts as UTC: only differences matter.
var layouts = []string{
	"2006-01-02T15:04:05.999999999Z07:00", "2006-01-02T15:04:05.999999999Z0700", "2006-01-02 15:04:05.999999999",
	"2006-01-02T15:04:05.999999999", "Mon Jan _2 15:04:05 2006", "Mon Jan _2 2006 15:04:05",
	"Jan _2 15:04:05.999999999",
	"2006-01-02 15:04:05.999999999Z07:00", "2006-01-02 15:04:05.999999999 Z0700", "2006-01-02 15:04:05.999999999 UTC",
	"2006-01-02 15:04:05.999999999Z0700",
}

func parseTime(s string) (time.Time, bool) {
	if s == "" {
		return time.Time{}, false
	}
	s = strings.Replace(s, ",", ".", 1)
	for _, layout := range layouts {
		if t, err := time.Parse(layout, s); err == nil {
			return t, true
		}
	}
	return time.Time{}, false
}

// shown returns the text as findings show it.
func (t *text) shown() string {
	s := strings.TrimSpace(t.string)
	if len(s) > longestShown {
		s = strings.ToValidUTF8(s[:longestShown], "") + "…"
	}
	return s
}
