package explain

import (
	"strings"
	"testing"
	"time"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// TestGrowthSinceTheShareWasRead: the share of a large process is read seldom. What became resident since then is its
// own, and is not put down to processes that nobody lists.
func TestGrowthSinceTheShareWasRead(t *testing.T) {
	process := func(resident, proportional ledger.Bytes) samples.Record {
		p := samples.Process{PID: 77, Role: samples.RankProcess, Name: "python", AddressSpaceLimit: -1,
			Resident: samples.Kinds{Anonymous: resident}, Proportional: samples.Kinds{Anonymous: proportional}}
		return samples.Record{Sample: &samples.Sample{Processes: []samples.Process{p},
			Node: samples.Node{Memory: 100 * gib, Free: 99*gib - resident, Anonymous: resident}}}
	}
	records := []samples.Record{{Start: &samples.Start{Schema: samples.Schema}},
		process(4*gib, 3*gib), process(40*gib, 3*gib), process(90*gib, 3*gib)}
	for i := range records {
		records[i].Time = time.Duration(i) * time.Second
	}
	records = append(records, samples.Record{Time: 4 * time.Second, End: &samples.End{Ranks: []samples.RankEnd{
		{PID: 77, Signal: 9, Time: 3500 * time.Millisecond}}}})
	r := NewRecording("run.jsonl", records...)
	kill := readSource(t, "kernel.log", []byte("[7.1] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=python,"+
		"pid=77,uid=0\n[7.2] Out of memory: Killed process 77 (python) total-vm:93451234kB, anon-rss:93451234kB, "+
		"file-rss:0kB\n"))
	e := Explain(Inputs{Recordings: []*Recording{r}, Sources: []*evidence.Source{kill}})
	if len(e.Holders) == 0 || e.Holders[0].Component != "process 77" || e.Holders[0].Bytes != 89*gib {
		t.Errorf("%+v, expected 89 GiB of process 77", e.Holders)
	}
	for _, h := range e.Holders {
		if strings.Contains(h.Text, "not listed") && h.Bytes > gib {
			t.Errorf("%v of %s, expected the process that is listed", h.Bytes, h.Text)
		}
	}
	if rise := r.lastLevels().rise; rise != 43*gib {
		t.Errorf("memory rises by %v a second, expected 43 GiB", rise)
	}
}
