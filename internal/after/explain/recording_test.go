package explain

import (
	"slices"
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

const peerGoneLine = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by " +
	"peer [127.0.0.1]:18842"

const closingLine = "W1130 08:41:02.100000 19363 torch/distributed/elastic/multiprocessing/api.py:1010] Sending " +
	"process 30233 closing signal SIGTERM"

// TestRecordedLauncher: what a launcher prints of its ranks is not put down to the rank that the launcher itself is.
func TestRecordedLauncher(t *testing.T) {
	r := recorded(samples.Sample{}, samples.RankEnd{ExitCode: 247}, "[rank0]: "+peerGoneLine,
		"[2026-11-30 08:40:11,120] [ERROR] [launch.py:325:sigkill_handler] ['python', 'train.py'] exits with "+
			"return code = -9")
	e := Explain(Inputs{Recordings: []*Recording{r}})
	if e.Cause.Rank != nil || len(e.Victims) != 1 || e.Victims[0].Rank != 0 ||
		!strings.Contains(e.Cause.Text, "SIGKILL") {
		t.Errorf("%+v, took along %+v: expected the kill of another rank than 0", e.Cause, e.Victims)
	}
}

// TestCollectiveThatTimesOut: nobody ended, and so nobody is said to have taken others along.
func TestCollectiveThatTimesOut(t *testing.T) {
	for line, timesOut := range map[string]bool{peerGoneLine: false, closingLine: false, "RuntimeError: " +
		"[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv " +
		"operation to complete": true} {
		e := explainText(t, line+"\n")
		if strings.Contains(e.Cause.Text, "a collective timed out") != timesOut {
			t.Errorf("%s\n%q", line, e.Cause.Text)
		}
		if slices.Contains(e.Collect, collectStacks) != timesOut {
			t.Errorf("%s\n%+v", line, e.Collect)
		}
	}
}

// TestThresholdOfRay: Ray ends workers below the limit of the node, and its own list says who held the memory, not a
// sample of the time after.
func TestThresholdOfRay(t *testing.T) {
	after := samples.Sample{Node: samples.Node{Memory: 24 * gib, Free: 20 * gib, Available: 20 * gib}}
	r := recorded(after, samples.RankEnd{ExitCode: 1}, "ray.exceptions.OutOfMemoryError: 1 worker(s) were killed due "+
		"to the node running low on memory. Memory on the node (IP: 10.8.1.17, ID: ad89) was 4.77GB used / 23.54GB "+
		"limit (0.202843)",
		"Top 10 memory users: PID\tMEM(GB)\tCOMMAND", "6704\t2.68\tray::hungry", "6345\t0.24\t")
	r.start.Start.Counters = []samples.Counter{{Name: "/proc/vmstat oom_kill", Group: "the host"}}
	r.end.End.Counters = r.start.Start.Counters // the kernel has killed nobody
	e := Explain(Inputs{Recordings: []*Recording{r}})
	if e.Cause.Resource != Host || len(e.Holders) == 0 || e.Holders[0].Component != "process 6704" {
		t.Errorf("%+v, held by %+v", e.Cause, e.Holders)
	}
	if len(e.Edits) == 0 || e.Edits[0].Key != "RAY_memory_usage_threshold" || e.Edits[0].From != "0.20 or less" {
		t.Errorf("%+v", e.Edits)
	}
}

// TestBoundNodes: the memory policy of a rank explains a kill of that rank, and not of another one.
func TestBoundNodes(t *testing.T) {
	for ended, want := range map[int]Resource{0: NUMANode, 1: Undetermined} {
		free := samples.Sample{Node: samples.Node{Memory: 100 * gib, Free: 60 * gib, Available: 60 * gib}}
		r := recorded(free, samples.RankEnd{Rank: ended, Signal: 9})
		r.start.Start.Ranks = []samples.BoundRank{{Rank: 1, MemoryPolicy: "preferred", NUMANodes: []int{1}},
			{Rank: 0, MemoryPolicy: "bind", NUMANodes: []int{0}}}
		r.start.Start.Counters = []samples.Counter{{Name: "/proc/vmstat oom_kill", Group: "the host"}}
		r.end.End.Counters = []samples.Counter{{Name: "/proc/vmstat oom_kill", Group: "the host", Kills: 1}}
		if e := Explain(Inputs{Recordings: []*Recording{r}}); e.Cause.Resource != want {
			t.Errorf("rank %d: %q, expected %q: %s", ended, e.Cause.Resource, want, e.Cause.Text)
		}
	}
}
