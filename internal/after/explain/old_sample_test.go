package explain

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// killAtLimit is what the kernel prints when it kills a process at the limit of the cgroup /job, 40 GiB.
func killAtLimit(pid int, name string) []string {
	return strings.Split(fmt.Sprintf(`<4>[ 100.500000] %[2]s invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0
<6>[ 100.500001] memory: usage 41943040kB, limit 41943040kB, failcnt 9
<6>[ 100.500002] Tasks state (memory values in pages):
<6>[ 100.500003] [  pid  ]   uid  tgid total_vm      rss rss_anon rss_file rss_shmem pgtables_bytes swapents oom_score_adj name
<6>[ 100.500004] [     50]     0    50   900000     2560     2560        0         0    73728        0             0 plimsoll
<6>[ 100.500005] [%7[1]d]     0 %[1]d 20000000 10223616 10223616        0         0    73728        0          1000 %[2]s
<6>[ 100.500006] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/job,task_memcg=/job,task=%[2]s,pid=%[1]d,uid=0
<3>[ 100.500007] Memory cgroup out of memory: Killed process %[1]d (%[2]s) total-vm:80000000kB, anon-rss:40894464kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:72kB oom_score_adj:1000`, pid, name), "\n")
}

// killedAtLimit is a recording of a job in the cgroup /job whose last sample is old. The kernel's log is in it or not.
func killedAtLimit(end samples.RankEnd, kernel ...string) *Recording {
	sample := samples.Sample{Groups: []samples.Group{{Name: "cgroup /job", Limit: 40 * gib, Current: 6 * gib,
		Anonymous: 5 * gib}}}
	r := recorded(sample, end)
	counter := func(reached, kills int64) []samples.Counter {
		return []samples.Counter{{Name: "cgroup /job memory.events oom_kill", Group: "cgroup /job", Limit: 40 * gib,
			Reached: reached, Kills: kills}}
	}
	r.start.Start.Counters, r.end.End.Counters = counter(0, 0), counter(3, 1)
	if len(kernel) > 0 {
		last := *r.end
		r.end = nil
		r.Add(&samples.Record{Time: 3 * time.Second, Output: &samples.Output{Rank: samples.NoRank,
			Stream: samples.KernelStream, Lines: kernel}})
		r.Add(&last.Record)
	}
	return r
}

// TestSampleBeforeTheKill: what was taken between the last sample and the kill is no free memory. The kernel's account
// of the kill divides it, and without that account it is said to have come late.
func TestSampleBeforeTheKill(t *testing.T) {
	for name, c := range map[string]struct {
		kernel    []string
		component string
		bytes     ledger.Bytes
	}{
		"with the kernel's log":    {killAtLimit(77, "python"), "process 77", 39 * gib},
		"without the kernel's log": {nil, "unexplained", 34 * gib},
	} {
		r := killedAtLimit(samples.RankEnd{Signal: 9, ExitCode: 137}, c.kernel...)
		e := Explain(Inputs{Recordings: []*Recording{r}})
		var sum ledger.Bytes
		for _, h := range e.Holders {
			sum += h.Bytes
		}
		if e.Cause.Resource != CGroup || e.Cause.Rank == nil || len(e.Holders) == 0 ||
			e.Holders[0].Component != c.component || e.Holders[0].Bytes != c.bytes ||
			max(sum-40*gib, 40*gib-sum) > gib {
			t.Errorf("%s: %+v, held by %+v: expected %v of %s first, and 40 GiB in all", name, e.Cause, e.Holders,
				c.bytes, c.component)
		}
	}
}

// TestKillOfAShortLife: a process that no sample has is of the job where run has recorded its kill, and of the only
// rank. It counts whatever the shell around it has made of the exit code. Others have the rank of the sample.
func TestKillOfAShortLife(t *testing.T) {
	for name, end := range map[string]samples.RankEnd{"a good end": {}, "a failure": {ExitCode: 1}} {
		for _, pid := range []int{77, 99} {
			e := Explain(Inputs{Recordings: []*Recording{killedAtLimit(end, killAtLimit(pid, "touch")...)}})
			if e.Cause.Resource != CGroup || e.Confidence != Certain || e.Cause.Rank == nil || *e.Cause.Rank != 0 ||
				len(e.Holders) == 0 || e.Holders[0].Component != fmt.Sprint("process ", pid) {
				t.Errorf("%s of process %d: %+v (%s), held by %+v", name, pid, e.Cause, e.Confidence, e.Holders)
			}
		}
	}
	r := killedAtLimit(samples.RankEnd{ExitCode: 1}, killAtLimit(99, "touch")...)
	r.end.End.Ranks = append(r.end.End.Ranks, samples.RankEnd{Rank: 1, PID: 78, ExitCode: 1, Time: 4 * time.Second})
	if e := Explain(Inputs{Recordings: []*Recording{r}}); e.Cause.Resource != CGroup {
		t.Errorf("of two ranks: %+v", e.Cause)
	}
}

// TestFullSharedMemoryAfterTheSample: files of /dev/shm go with the process that dies, so all of it is in the balance.
func TestFullSharedMemoryAfterTheSample(t *testing.T) {
	sample := samples.Sample{Node: samples.Node{SharedFiles: samples.FileSystem{Size: 16 * gib, Used: 2 * gib}}}
	e := Explain(Inputs{Recordings: []*Recording{recorded(sample, samples.RankEnd{ExitCode: 1},
		"RuntimeError: unable to write to file </torch_77_1>: No space left on device (28)")}})
	if e.Cause.Resource != SharedMemory || len(e.Holders) != 2 || e.Holders[0].Bytes != 14*gib ||
		!strings.Contains(e.Holders[0].Text, "after the last sample") || e.Holders[1].Bytes != 2*gib {
		t.Errorf("%+v, held by %+v", e.Cause, e.Holders)
	}
}
