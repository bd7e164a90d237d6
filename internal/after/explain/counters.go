package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
)

// oomCounts is what the counters of the kernel's OOM killer say. It is a fact of several readings.
type oomCounts struct {
	counts   []oomCount
	compared bool // with readings from before the job
	complete bool // with those of every cgroup of the job
}

// oomCount is one counter, or its difference to the reading before.
type oomCount struct {
	name    string // "cgroup /a/b memory.events oom_kill"
	group   string // "cgroup /a/b"; empty for the host
	kills   int64
	reached int64 // how often an allocation had failed at the limit
	limit   ledger.Bytes
}

// Says is the fact in one sentence.
func (o oomCounts) Says() string {
	since := "since the cgroup was made"
	if o.compared {
		since = "while the job ran"
	}
	if o.kills() == 0 {
		return fmt.Sprintf("the kernel's OOM killer counted no kill %s", since)
	}
	kill := slices.MaxFunc(o.counts, func(a, b oomCount) int { return cmp.Compare(a.kills, b.kills) })
	text := fmt.Sprintf("%s counted %s %s", kill.name, counted(kill.kills, "kill"), since)
	if r := o.atLimit(); r != nil {
		text += fmt.Sprintf(", and the limit %sof %s was reached %s", sizeBefore(r.limit), r.group,
			counted(r.reached, "time"))
	}
	return text
}

func sizeBefore(b ledger.Bytes) string {
	if b == 0 {
		return ""
	}
	return fmt.Sprintf("of %v ", b)
}

// amount returns a number of bytes before the word for memory, or "" for 0.
func amount(b ledger.Bytes) string {
	if b == 0 {
		return ""
	}
	return fmt.Sprintf("%v of ", b)
}

// counted returns a number with its noun.
func counted(n int64, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return ledger.Count(n) + " " + noun
}

// kills is the number of processes that the kernel has killed, as the highest counter says. Counters of a cgroup
// include those below.
func (o oomCounts) kills() int64 {
	var most int64
	for _, c := range o.counts {
		most = max(most, c.kills)
	}
	return most
}

// atLimit returns the innermost cgroup at whose limit an allocation has failed, or nil.
func (o oomCounts) atLimit() *oomCount {
	for i := range o.counts {
		if c := &o.counts[i]; c.group != "" && c.reached > 0 {
			return c
		}
	}
	return nil
}

// groups reports whether a counter of a cgroup was read.
func (o oomCounts) groups() bool {
	return slices.ContainsFunc(o.counts, func(c oomCount) bool { return c.group != "" })
}

// countedKills returns what the readings of the counters say, as a finding of the last of them. Of two readings of one
// counter, the second was made later.
func (s *scene) countedKills() []evidence.Finding {
	readings := map[string][]seen[evidence.Counters]{}
	var order []string
	for _, c := range all[evidence.Counters](s.findings) {
		if _, ok := c.fact.Values["oom_kill"]; !ok {
			continue
		}
		key := c.fact.File + " " + c.fact.Group
		if readings[key] == nil {
			order = append(order, key)
		}
		readings[key] = append(readings[key], c)
	}
	var found []evidence.Finding
	var compared, single oomCounts
	compared.compared = true
	var last, lastSingle evidence.Finding
	for _, key := range order {
		first, now := readings[key][0], readings[key][len(readings[key])-1]
		if len(readings[key]) == 1 {
			count := difference(now.fact, nil, s.limitOf(now.fact.Group))
			if count.group != "" && count.reached == 0 && s.peakAtLimit(now.fact.Group) { // version 1 counts no "oom"
				count.reached = 1
			}
			single.counts = append(single.counts, count)
			lastSingle = now.Finding
			continue
		}
		if now.fact.Values["oom_kill"] < first.fact.Values["oom_kill"] { // named the other way round
			first, now = now, first
		}
		compared.counts = append(compared.counts, difference(now.fact, first.fact.Values,
			s.limitOf(now.fact.Group)))
		last = now.Finding
	}
	if len(compared.counts) > 0 {
		last.Fact = compared
		found = append(found, last)
	}
	if len(single.counts) > 0 && single.groups() {
		lastSingle.Fact = single
		found = append(found, lastSingle)
	}
	return found
}

// difference returns what a counter has counted since a reading.
func difference(now evidence.Counters, was map[string]int64, limit ledger.Bytes) oomCount {
	host := strings.Contains(now.File, "vmstat")
	c := oomCount{name: strings.TrimSpace(now.Group + " " + now.File + " oom_kill"),
		kills:   now.Values["oom_kill"] - was["oom_kill"],
		reached: now.Values["oom"] - was["oom"], limit: limit}
	if !host {
		c.group = cmp.Or(now.Group, "the cgroup")
	}
	return c
}

// limitOf returns the limit of a cgroup, or 0 if unknown: the first that is said of it or of no cgroup in particular.
func (s *scene) limitOf(group string) ledger.Bytes {
	own, known := s.index.limits[group]
	if general, ok := s.index.limits[""]; ok && (!known || general.place < own.place) {
		own = general
	}
	return own.bytes
}

// peakAtLimit reports whether the memory of a cgroup has been as much as its limit allows.
func (s *scene) peakAtLimit(group string) bool {
	limit := s.limitOf(group)
	peak, known := s.index.peaks[group]
	return limit > 0 && known && peak >= limit-limit/1000
}

// value returns a number of /proc/meminfo, memory.stat or another file of counters, from its last reading.
func (s *scene) value(name string) (ledger.Bytes, evidence.Finding, bool) {
	counters := all[evidence.Counters](s.findings)
	for _, c := range slices.Backward(counters) {
		if v, ok := c.fact.Values[name]; ok {
			return ledger.Bytes(v), c.Finding, true
		}
	}
	return 0, evidence.Finding{}, false
}

// limit returns a limit that a file states, or nil.
func (s *scene) limit(names ...string) *seen[evidence.Limit] {
	for _, l := range slices.Backward(all[evidence.Limit](s.findings)) {
		if slices.Contains(names, l.fact.Name) {
			return &l
		}
	}
	return nil
}
