package explain

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
)

// known is a size that a text tells.
func known(b ledger.Bytes) evidence.Size { return evidence.Size{Bytes: b, Known: true} }

// from returns a file with one fact a line.
func from(name string, kind evidence.Kind, facts ...evidence.Fact) *evidence.Source {
	source := &evidence.Source{Name: name, Kind: kind}
	for i, fact := range facts {
		source.Findings = append(source.Findings, evidence.Finding{Rank: evidence.NoRank, Fact: fact,
			Line: evidence.Line{File: name, Number: i + 1, Text: fmt.Sprintf("line %d", i+1)}})
	}
	return source
}

// ended is a launcher's word on a rank.
func ended(rank, pid, code, signal int) evidence.ProcessEnded {
	return evidence.ProcessEnded{By: "torchrun", Rank: rank, LocalRank: rank, PID: pid, ExitCode: code, Signal: signal}
}

// oom is PyTorch's error on a GPU of 80 GiB.
func oom(change func(*evidence.GPUOutOfMemory)) evidence.GPUOutOfMemory {
	f := evidence.GPUOutOfMemory{Backend: "CUDA", Requested: known(2 * ledger.GiB), Total: known(80 * ledger.GiB),
		Free: known(ledger.GiB), Allocated: known(77 * ledger.GiB), Reserved: known(78 * ledger.GiB),
		Self: known(79 * ledger.GiB)}
	if change != nil {
		change(&f)
	}
	return f
}

func kill(constraint string) evidence.KernelKill {
	return evidence.KernelKill{Constraint: constraint, PID: 77, Name: "python", NodeMask: "1",
		Anonymous: known(10 * ledger.GiB), Stats: map[string]ledger.Bytes{"anon": 9, "file": 5}}
}

func events(group string, oom, kills int64) evidence.Counters {
	return evidence.Counters{Group: group, File: "memory.events",
		Values: map[string]int64{"oom": oom, "oom_kill": kills}}
}

// recorded returns a recording whose only rank ended with a code or a signal, and whose last sample is as given.
func recorded(sample samples.Sample, end samples.RankEnd, output ...string) *Recording {
	sample.Processes = append(sample.Processes, samples.Process{PID: 77, Role: samples.RankProcess, Name: "python",
		Virtual: 9 * ledger.GiB, AddressSpaceLimit: -1, LockedLimit: -1,
		Proportional: samples.Kinds{Anonymous: 5 * ledger.GiB}})
	end.PID, end.Time = 77, 3*time.Second
	return NewRecording("run.jsonl", []samples.Record{
		{Start: &samples.Start{Schema: samples.Schema, Began: time.Unix(1e9, 0)}},
		{Time: time.Second, Sample: &sample},
		{Time: 2 * time.Second, Output: &samples.Output{Stream: "stderr", Lines: output}},
		{Time: 3 * time.Second, End: &samples.End{ExitCode: 1, Ranks: []samples.RankEnd{end}}},
	}...)
}

// cutOff returns a recording whose recorder was killed.
func cutOff() *Recording {
	r := recorded(samples.Sample{}, samples.RankEnd{})
	r.end = nil
	return r
}

const gib = ledger.GiB

// TestExplain has a case for every row of the tables, and for every trap.
func TestExplain(t *testing.T) {
	log := func(facts ...evidence.Fact) []*evidence.Source {
		return []*evidence.Source{from("log", evidence.TrainerLog, facts...)}
	}
	numa := samples.Sample{Node: samples.Node{Memory: 100 * gib, Available: 50 * gib,
		NUMANodes: []samples.NUMAFree{{Node: 0, Memory: 50 * gib, Free: 49 * gib}, {Node: 1, Memory: 50 * gib,
			Free: 1}}}}
	for name, c := range map[string]struct {
		in       Inputs
		resource Resource
		detail   string
		sure     Confidence
	}{
		"nothing":  {Inputs{}, None, "", Likely},
		"well":     {Inputs{Sources: log(ended(0, 1, 0, 0))}, None, "", Certain},
		"warnings": {Inputs{Sources: log(evidence.AllocationRetried{}, evidence.CacheFlushed{})}, None, "", Likely},

		"capacity": {Inputs{Sources: log(oom(nil))}, GPU, "capacity", Certain},
		"fragmentation": {Inputs{Sources: log(oom(func(f *evidence.GPUOutOfMemory) { f.Allocated = known(70 * gib) }))},
			GPU,
			"fragmentation", Certain},
		"cap": {Inputs{Sources: log(oom(func(f *evidence.GPUOutOfMemory) {
			f.Free, f.Allowed = known(70*gib), known(8*gib)
		}))}, GPU, "fraction cap", Certain},
		"neighbour": {Inputs{Sources: log(oom(func(f *evidence.GPUOutOfMemory) {
			f.Others = []evidence.GPUProcess{{PID: 5, Used: known(40 * gib)}}
		}))}, GPU, "another process", Certain},
		"neighbour of unknown size": {Inputs{Sources: log(oom(func(f *evidence.GPUOutOfMemory) {
			f.Others = []evidence.GPUProcess{{PID: 5}}
		}))}, GPU, "capacity", Certain},
		"NCCL": {Inputs{Sources: log(oom(func(f *evidence.GPUOutOfMemory) {
			f.Allocated, f.Reserved = known(50*gib), known(51*gib)
		}))}, GPU, "memory outside PyTorch", Certain},
		"NCCL and small pieces": {Inputs{Sources: log(oom(func(f *evidence.GPUOutOfMemory) {
			f.Allocated, f.Reserved = known(48*gib), known(51*gib)
		}))}, GPU, "memory outside PyTorch", Certain},
		"free": {Inputs{Sources: log(oom(func(f *evidence.GPUOutOfMemory) { f.Free = known(50 * gib) }))}, GPU,
			"free memory at the failure", Likely},
		"words": {Inputs{Sources: log(evidence.GPUOutOfMemory{})}, GPU, "", Likely},

		"driver": {Inputs{Sources: log(evidence.DriverOutOfMemory{})}, GPU, "", Likely},
		"pinned": {Inputs{Sources: log(evidence.DriverOutOfMemory{Pinning: true})}, Host, "pinned memory", Likely},
		"pinned, as the GPU is free": {Inputs{Sources: log(evidence.GPUUsage{Total: known(80 * gib),
			Free: known(70 * gib)},
			evidence.DriverOutOfMemory{})}, Host, "pinned memory", Likely},
		"cuBLAS": {Inputs{Sources: log(evidence.LibraryFailed{Library: "cuBLAS", Memory: true})}, GPU, "", Likely},
		"cuDNN":  {Inputs{Sources: log(evidence.LibraryFailed{Library: "cuDNN"})}, Undetermined, "", Unknown},
		"Triton": {Inputs{Sources: log(evidence.LibraryFailed{Library: "Triton", Memory: true})}, NotMemory,
			"shared memory of a GPU's multiprocessor", Certain},

		"ENOMEM": {Inputs{Sources: log(evidence.HostAllocationFailed{Errno: 12})}, Host, "", Likely},
		"ENOMEM with a limit": {Inputs{Sources: log(evidence.HostAllocationFailed{Errno: 12},
			evidence.Limit{Name: "RLIMIT_AS", Bytes: known(gib)})}, AddressSpace, "", Likely},
		"ENOMEM without a limit": {Inputs{Sources: log(evidence.HostAllocationFailed{Errno: 12},
			evidence.Limit{Name: "RLIMIT_AS"})}, Host, "", Likely},
		"ENOMEM with free memory": {Inputs{Sources: log(evidence.HostAllocationFailed{Requested: known(gib)},
			evidence.Counters{File: "meminfo", Values: map[string]int64{"MemTotal": 64 << 30,
				"MemAvailable": 60 << 30}})},
			AddressSpace, "", Likely},
		"ENOMEM beyond the host": {Inputs{Sources: log(evidence.HostAllocationFailed{Requested: known(100 * gib)},
			evidence.Counters{File: "meminfo", Values: map[string]int64{"MemTotal": 64 << 30,
				"MemAvailable": 60 << 30}})},
			Host, "capacity", Likely},
		"ENOMEM of unknown size": {Inputs{Recordings: []*Recording{recorded(numa, samples.RankEnd{ExitCode: 1},
			"MemoryError: std::bad_alloc", "Traceback (most recent call last):", "MemoryError")}}, Undetermined, "",
			Unknown},
		"overcommit": {Inputs{Sources: log(evidence.HostAllocationFailed{}, evidence.Limit{Name: "overcommit",
			Bytes: known(2)})},
			Host, "overcommit", Likely},

		"memlock": {Inputs{Sources: log(evidence.LockFailed{By: "mlock"})}, LockedMemory, "", Likely},
		"memlock with its limit": {Inputs{Sources: log(evidence.LockFailed{By: "mlock"},
			evidence.Limit{Name: "RLIMIT_MEMLOCK", Bytes: known(65536)})}, LockedMemory, "", Certain},
		"memlock without a limit": {Inputs{Sources: log(evidence.LockFailed{By: "mlock"},
			evidence.Limit{Name: "RLIMIT_MEMLOCK"})}, Host, "pinned memory", Likely},
		"register": {Inputs{Sources: log(evidence.LockFailed{By: "cudaHostRegister"})}, Host, "pinned memory", Likely},

		"shm": {Inputs{Sources: log(evidence.SharedMemoryFull{})}, SharedMemory, "", Likely},
		"shm with its path": {Inputs{Sources: log(evidence.SharedMemoryFull{Path: "/dev/shm/x"})}, SharedMemory, "",
			Certain},
		"shm by df": {Inputs{Sources: log(evidence.SharedMemoryFull{}, evidence.FileSystem{Mount: "/dev/shm",
			Size: known(gib), Used: known(gib)})}, SharedMemory, "", Certain},
		"disk without a path": {Inputs{Sources: log(evidence.DiskFull{})}, Disk, "", Likely},
		"time limit after a kill": {Inputs{Sources: log(evidence.BatchKill{By: "Slurm"},
			evidence.BatchEnd{Reason: "time limit"})}, CGroup, "", Likely},
		"counters of the host alone": {Inputs{Sources: log(evidence.Counters{File: "vmstat",
			Values: map[string]int64{"oom_kill": 3}}, ended(0, 77, 0, 9), evidence.Counters{File: "vmstat",
			Values: map[string]int64{"oom_kill": 4}})}, Undetermined, "", Unknown},
		"disk":            {Inputs{Sources: log(evidence.DiskFull{Path: "/ckpt"})}, Disk, "", Certain},
		"quota":           {Inputs{Sources: log(evidence.DiskFull{Quota: true})}, Disk, "quota", Certain},
		"disk of shm":     {Inputs{Sources: log(evidence.DiskFull{Path: "/dev/shm/x"})}, SharedMemory, "", Certain},
		"fork":            {Inputs{Sources: log(evidence.TooManyProcesses{By: "fork"})}, Processes, "", Certain},
		"thread":          {Inputs{Sources: log(evidence.TooManyProcesses{By: "threading"})}, Processes, "", Likely},
		"SIGBUS":          {Inputs{Sources: log(ended(0, 1, 0, 7))}, SharedMemory, "", Likely},
		"worker SIGBUS":   {Inputs{Sources: log(evidence.WorkerEnded{Signal: "Bus error"})}, SharedMemory, "", Likely},
		"an engine wakes": {Inputs{Sources: log(evidence.DriverOutOfMemory{Waking: true})}, GPU, waking, Likely},
		"SIGBUS of a worker": {Inputs{Sources: log(evidence.WorkerEnded{Signal: "Bus error"})}, SharedMemory, "",
			Likely},
		"SIGBUS of a worker with a free /dev/shm": {Inputs{Sources: log(evidence.WorkerEnded{Signal: "Bus error"},
			evidence.FileSystem{Mount: "/dev/shm", Size: known(64 * gib), Used: known(0)})}, Undetermined, "", Unknown},
		"SIGBUS with a full /dev/shm": {Inputs{Recordings: []*Recording{recorded(samples.Sample{Node: samples.Node{
			SharedFiles: samples.FileSystem{Size: gib, Used: gib}}}, samples.RankEnd{Signal: 7})}}, SharedMemory, "",
			Certain},
		"SIGBUS with a free /dev/shm": {Inputs{Recordings: []*Recording{recorded(samples.Sample{Node: samples.Node{
			SharedFiles: samples.FileSystem{Size: 100 * gib}}}, samples.RankEnd{Signal: 7})}}, Undetermined, "",
			Unknown},
		"SIGBUS with a /dev/shm that is soon full": {Inputs{Recordings: []*Recording{recorded(samples.Sample{
			Node: samples.Node{SharedFiles: samples.FileSystem{Size: gib}}}, samples.RankEnd{Signal: 7})}},
			SharedMemory, "", Likely},
		"SIGTERM of somebody": {Inputs{Recordings: []*Recording{
			recorded(samples.Sample{}, samples.RankEnd{Signal: 15})}}, Undetermined, "", Unknown},
		"file that is too large": {Inputs{Sources: log(evidence.DiskFull{TooLarge: true})}, Disk, fileSize, Likely},
		"SIGXFSZ":                {Inputs{Sources: log(ended(0, 1, 0, 25))}, Disk, fileSize, Certain},
		"archive, with a limit on files": {Inputs{Sources: log(evidence.Limit{Name: "RLIMIT_FSIZE", Bytes: known(gib)},
			evidence.DiskFull{Assumed: true})}, Disk, fileSize, Likely},
		"library not mapped": {Inputs{Sources: log(evidence.HostAllocationFailed{By: evidence.Loader})},
			Undetermined, "", Unknown},
		"library not mapped, with a limit": {Inputs{Sources: log(evidence.Limit{Name: "RLIMIT_AS", Bytes: known(gib)},
			evidence.HostAllocationFailed{By: evidence.Loader})}, AddressSpace, "", Likely},
		"thread, with a limit on addresses": {Inputs{Sources: log(evidence.Limit{Name: "RLIMIT_AS", Bytes: known(gib)},
			evidence.TooManyProcesses{By: "thread"})}, AddressSpace, "", Likely},
		"addresses of expandable segments": {Inputs{Sources: log(evidence.HostAllocationFailed{
			By: evidence.SegmentAddresses, Requested: known(90 * gib)})}, AddressSpace, segmentAddresses, Likely},

		"kernel, cgroup": {Inputs{Sources: log(kill("CONSTRAINT_MEMCG"))}, CGroup, "", Certain},
		"kernel, host":   {Inputs{Sources: log(kill("CONSTRAINT_NONE"))}, Host, "", Certain},
		"kernel, policy": {Inputs{Sources: log(kill("CONSTRAINT_MEMORY_POLICY"))}, NUMANode, "", Certain},
		"kernel, cpuset": {Inputs{Sources: log(kill("CONSTRAINT_CPUSET"))}, NUMANode, "", Certain},
		"kernel, old":    {Inputs{Sources: log(kill(""))}, Host, "", Likely},
		"kernel of another process": {Inputs{Sources: log(ended(0, 1, 0, 9),
			evidence.KernelKill{PID: 5, Name: "chrome", Constraint: "CONSTRAINT_NONE"})}, Undetermined, "", Unknown},
		"kernel, and an error of another kind": {Inputs{Sources: log(oom(nil), ended(0, 1, 1, 0),
			evidence.KernelKill{PID: 5, Name: "python", Constraint: "CONSTRAINT_NONE"})}, GPU, "capacity", Certain},
		"kernel against counters": {Inputs{Sources: log(events("/job", 0, 3), events("/job", 0, 3), ended(0, 77, 0, 9),
			kill("CONSTRAINT_MEMCG"))}, CGroup, "", Likely},

		"counters moved": {Inputs{Sources: log(events("/job", 1, 1), ended(0, 77, 137, 0), events("/job", 2, 2))},
			CGroup, "", Certain},
		"counters moved, in the other order": {Inputs{Sources: log(events("/job", 2, 2), ended(0, 77, 137, 0),
			events("/job", 1, 1))}, CGroup, "", Certain},
		"one reading": {Inputs{Sources: log(ended(0, 77, 137, 0), events("/job", 2, 2))}, CGroup, "", Likely},
		"counters moved without a limit": {Inputs{Sources: log(events("/job", 0, 1), ended(0, 77, 0, 9),
			events("/job", 0, 2))}, Host, "", Likely},
		"137 of a wrapper": {Inputs{Sources: log(events("/job", 0, 1), ended(0, 77, 137, 0), events("/job", 0, 1))},
			NotMemory, "", Likely},
		"137 alone": {Inputs{Sources: log(ended(0, 77, 137, 0))}, Undetermined, "", Unknown},
		"page cache": {Inputs{Sources: log(ended(0, 77, 137, 0), evidence.Counters{File: "memory.stat",
			Values: map[string]int64{"anon": 1 << 30, "file": 99 << 30}}, events("", 0, 0))}, NotMemory, "", Likely},
		"membind": {Inputs{Recordings: []*Recording{withKills(recorded(numa, samples.RankEnd{Signal: 9}), 0)}},
			NUMANode,
			"",
			Likely},
		"recorded cgroup": {Inputs{Recordings: []*Recording{withKills(recorded(numa, samples.RankEnd{Signal: 9}), 1)}},
			CGroup,
			"", Certain},

		"Slurm": {Inputs{Sources: log(evidence.BatchKill{By: "Slurm"})}, CGroup, "", Likely},
		"Ray":   {Inputs{Sources: log(evidence.BatchKill{By: "Ray"})}, Host, "", Likely},
		"Ray lost an actor": {Inputs{Sources: log(evidence.Exception{Type: "ray.exceptions.ActorDiedError"},
			evidence.WorkerEnded{Of: "Ray"}, ended(0, 4, 1, 0))}, Undetermined, "", Unknown},
		"Ray, beside counters of the kernel that stood still": {Inputs{Sources: log(ended(0, 4, 1, 0),
			evidence.BatchKill{By: "Ray"}, oomCounts{compared: true})}, Host, "", Likely},
		"time": {Inputs{Sources: log(ended(0, 1, 0, 15), evidence.BatchEnd{Reason: "time limit"})}, NotMemory, "",
			Certain},
		"cancel": {Inputs{Sources: log(evidence.BatchEnd{Reason: "cancelled"})}, NotMemory, "", Likely},
		"scancel": {Inputs{Sources: log(ended(0, 1, 3, 0), evidence.BatchEnd{Reason: "cancelled"})}, Undetermined, "",
			Unknown},
		"evicted": {Inputs{Sources: log(evidence.BatchEnd{Reason: "evicted: the node was low on memory"})}, Host, "",
			Likely},
		"evicted, no more": {Inputs{Sources: log(evidence.BatchEnd{Reason: "evicted"})}, Undetermined, "", Unknown},
		"evicted for a volume": {Inputs{Sources: log(evidence.BatchEnd{
			Reason: "evicted: the volume scratch reached its limit of 8.00 GiB"})}, Disk, "", Likely},
		"evicted for a volume in memory": {Inputs{Sources: log(
			evidence.Limit{Name: "/dev/shm", Bytes: evidence.Size{Bytes: 8 << 30, Known: true}},
			evidence.BatchEnd{Reason: "evicted: the volume cache reached its limit of 8.00 GiB"})}, SharedMemory, "",
			Likely},
		"crash and cancel": {Inputs{Sources: log(ended(0, 1, 0, 11), evidence.BatchEnd{Reason: "cancelled"})},
			NotMemory, "", Likely},
		"probe overcome": {Inputs{Sources: log(evidence.BatchEnd{By: "Kubernetes", Reason: "its startup probe failed"},
			evidence.ProcessEnded{By: "Kubernetes", Rank: evidence.NoRank, LocalRank: evidence.NoRank})}, None, "",
			Certain},
		"evicted for storage": {Inputs{Sources: log(evidence.BatchEnd{Reason: "evicted: ephemeral storage"})}, Disk, "",
			Likely},

		"ValueError": {Inputs{Sources: log(evidence.Exception{Type: "ValueError"}, ended(0, 1, 1, 0))}, NotMemory, "",
			Likely},
		"an exception beside the error": {Inputs{Sources: log(evidence.Exception{Type: "ImportError"}, oom(nil))}, GPU,
			"capacity", Certain},
		"victims only": {Inputs{Sources: log(evidence.CollectiveFailed{By: "NCCL"})}, Undetermined, "", Unknown},
		"exit code":    {Inputs{Sources: log(ended(0, 1, 1, 0))}, Undetermined, "", Unknown},
		"SIGSEGV":      {Inputs{Sources: log(ended(0, 1, 0, 11))}, NotMemory, "", Likely},
		"SIGSEGV, and a kill of the kernel": {Inputs{Sources: log(ended(0, 1, 0, 11), kill("CONSTRAINT_MEMCG"))},
			Undetermined, "", Unknown},
		"SIGSEGV, and a kill of another program": {Inputs{Sources: log(ended(0, 1, 0, 11),
			evidence.KernelKill{PID: 5, Name: "chrome", Constraint: "CONSTRAINT_NONE"})}, NotMemory, "", Likely},
		"SIGSEGV, and a batch system": {Inputs{Sources: log(ended(0, 1, 0, 11), evidence.BatchKill{By: "Slurm"})},
			CGroup, "", Likely},
		"SIGSEGV after ENOMEM": {Inputs{Sources: log(evidence.HostAllocationFailed{By: "malloc"}, ended(0, 1, 0, 11))},
			Host, "", Likely},
		"hardware": {Inputs{Sources: log(evidence.HardwareFailed{PID: 1, Name: "python"}, ended(0, 1, 0, 7))},
			NotMemory, "", Certain},
		"hardware, of a container": {Inputs{Sources: log(evidence.HardwareFailed{PID: 61288, Name: "pt_main_thread"},
			ended(0, 1, 0, 7))}, NotMemory, "", Certain},
		"hardware, of another program": {Inputs{Sources: log(evidence.HardwareFailed{PID: 5, Name: "qemu-kvm"},
			ended(0, 1, 0, 7))}, SharedMemory, "", Likely},
		"hardware, and a kill": {Inputs{Sources: log(evidence.HardwareFailed{PID: 5, Name: "python"},
			ended(0, 1, 0, 9))}, Undetermined, "", Unknown},
		"hardware, and a job that ended well": {Inputs{Sources: log(evidence.HardwareFailed{PID: 5, Name: "python"},
			ended(0, 1, 0, 0))}, None, "", Certain},
		"restarted": {Inputs{Sources: log(ended(0, 1, 0, 9), evidence.Restarted{})}, None, "", Likely},
		"failed after a restart": {Inputs{Sources: log(oom(nil), evidence.Restarted{}, evidence.DiskFull{Path: "/x"})},
			Disk, "",
			Certain},
		"went on": {Inputs{Sources: log(evidence.Progress{Step: 1}, oom(nil), evidence.Progress{Step: 2},
			evidence.Progress{Step: 3})}, None, "", Likely},
		"went on, as the trainer says": {Inputs{Sources: log(oom(nil), evidence.ProcessEnded{By: trainer,
			Rank: evidence.NoRank})}, None, "", Likely},
		"failed after training": {Inputs{Sources: log(evidence.ProcessEnded{By: trainer, Rank: evidence.NoRank},
			oom(nil))}, GPU, "capacity", Certain},
		"unknown text of missing memory": {Inputs{Sources: log(evidence.Exception{Type: "RuntimeError",
			Message: "arena: not enough device memory"})}, Undetermined, "", Unknown},
		"a word of memory": {Inputs{Sources: log(evidence.Exception{Type: "ValueError",
			Message: "load it elsewhere to save memory"})}, NotMemory, "", Likely},
		"exception after a kill": {Inputs{Sources: []*evidence.Source{
			from("log", evidence.TrainerLog, evidence.Exception{Type: "RuntimeError", Message: "a worker is gone"}),
			from("dmesg", evidence.KernelLog, kill("CONSTRAINT_NONE"))}}, Host, "", Likely},
		"exception of a peer after a kill": {Inputs{Sources: []*evidence.Source{
			from("log", evidence.TrainerLog, evidence.Exception{Type: "ray.exceptions.ActorDiedError"}),
			from("dmesg", evidence.KernelLog, kill("CONSTRAINT_MEMCG"))}}, CGroup, "", Certain},
		"exception after a kill that a counter shows": {Inputs{Recordings: []*Recording{withKills(recorded(numa,
			samples.RankEnd{ExitCode: 1}, "Traceback (most recent call last):", "  File \"t.py\", line 1, in <module>",
			"ValueError: a worker is gone"), 1)}}, CGroup, "", Likely},
		"exception after a kill that a batch system shows": {Inputs{Sources: log(evidence.Exception{Type: "ValueError"},
			evidence.BatchKill{By: "Slurm", What: "StepId=7.0"})}, CGroup, "", Likely},
		"exception after exit code 137": {Inputs{Sources: log(evidence.ProcessEnded{By: "shell",
			Rank: evidence.NoRank, LocalRank: evidence.NoRank, ExitCode: 137},
			evidence.Exception{Type: "ValueError"})}, Undetermined, "", Unknown},
		"exception of rank 0 after rank 1 was killed": {Inputs{Sources: log(ended(1, 5, 0, 9),
			ended(0, 4, 1, 0), evidence.Exception{Type: "ValueError"})}, Undetermined, "", Unknown},
		"exception and a kill of somebody else's process": {Inputs{Sources: []*evidence.Source{
			from("log", evidence.TrainerLog, ended(0, 4, 1, 0), evidence.Exception{Type: "ValueError"}),
			from("dmesg", evidence.KernelLog, evidence.KernelKill{PID: 9, Name: "mysqld",
				Constraint: "CONSTRAINT_NONE"})}}, NotMemory, "", Likely},
		"recording without an end": {Inputs{Recordings: []*Recording{cutOff()}}, Undetermined, "", Unknown},
		"recording without an end, and a good one": {Inputs{Recordings: []*Recording{recorded(numa,
			samples.RankEnd{}), cutOff()}}, None, "", Certain},
		"recording without an end, and a kill": {Inputs{Recordings: []*Recording{cutOff()},
			Sources: []*evidence.Source{from("dmesg", evidence.KernelLog, kill("CONSTRAINT_NONE"))}}, Host, "",
			Certain},
		"Xid": {Inputs{Sources: log(evidence.LibraryFailed{Library: driver, Status: "Xid 94"})}, NotMemory, "", Likely},
		"RLIMIT_AS in a " +
			"recording": {Inputs{Recordings: []*Recording{recorded(samples.Sample{Processes: []samples.Process{
			{PID: 78, Role: samples.Child, Virtual: gib, AddressSpaceLimit: gib}}}, samples.RankEnd{ExitCode: 1},
			"RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate "+
				"memory: you tried to allocate 988065536 bytes. Error code 12 (Cannot allocate memory)")}},
			AddressSpace, "",
			Certain},
	} {
		t.Run(name, func(t *testing.T) {
			e := Explain(c.in)
			if e.Cause.Resource != c.resource || e.Cause.Detail != c.detail || e.Confidence != c.sure {
				t.Errorf("%q, %q, %s, expected %q, %q, %s: %s", e.Cause.Resource, e.Cause.Detail, e.Confidence,
					c.resource,
					c.detail, c.sure, e.Cause.Text)
			}
			check(t, e)
		})
	}
}

// withKills adds counters by which the kernel killed one process, and reached a cgroup's limit so many times.
func withKills(r *Recording, reached int64) *Recording {
	counters := func(kills, reached int64) []samples.Counter {
		return []samples.Counter{{Name: "cgroup /a memory.events oom_kill", Group: "cgroup /a", Limit: gib,
			Kills:   kills,
			Reached: reached}, {Name: "/proc/vmstat oom_kill", Group: "the host", Kills: 7 + kills}}
	}
	r.start.Start.Counters = counters(0, 0)
	r.end.End.Counters = counters(1, reached)
	return r
}

// check holds for every explanation.
func check(t interface{ Errorf(string, ...any) }, e *Explanation) {
	failed := e.Cause.Resource != None
	switch {
	case e.Cause.Text == "" || strings.HasSuffix(e.Cause.Text, "."):
		t.Errorf("the text %q is no sentence without its period", e.Cause.Text)
	case failed && len(e.Evidence) == 0:
		t.Errorf("a failure without evidence: %+v", e.Cause)
	case e.Cause.Resource == Undetermined && (e.Confidence != Unknown || len(e.Collect) == 0):
		t.Errorf("a cause that is not known is %s, with %d commands to collect more", e.Confidence, len(e.Collect))
	case e.Cause.Resource != Undetermined && e.Confidence == Unknown:
		t.Errorf("%s is unknown", e.Cause.Resource)
	case len(e.Brief()) > longestBrief:
		t.Errorf("the short form has %d lines", len(e.Brief()))
	}
	if !slices.IsSortedFunc(e.Edits, byBytes) && !slices.IsSortedFunc(e.Edits, byVerdict) {
		t.Errorf("the edits are not sorted: %+v", e.Edits)
	}
	for _, r := range e.RuledOut {
		if r.Why == "" {
			t.Errorf("%s is ruled out for no reason", r.Resource)
		}
	}
	if text, err := json.Marshal(e); err != nil || strings.Contains(string(text), `:null,"files`) {
		t.Errorf("%s: %v", text, err)
	}
}

// byBytes puts first what frees most.
func byBytes(a, b Edit) int { return cmp.Compare(b.Frees, a.Frees) }

// byVerdict puts first what makes a job fit, then what costs least time, then what frees most. What was not planned
// comes last.
func byVerdict(a, b Edit) int {
	order := map[plan.Result]int{plan.Fits: 1, plan.Tight: 2, plan.DoesNotFit: 3, plan.Unknown: 4, "": 5}
	of := func(e Edit) (verdict plan.Result, slower float64) {
		if e.Planned == nil {
			return "", 0
		}
		if e.Planned.Slower != nil && e.Planned.Verdict != plan.DoesNotFit {
			slower = *e.Planned.Slower
		}
		return e.Planned.Verdict, slower
	}
	first, slower := of(a)
	second, than := of(b)
	return cmp.Or(cmp.Compare(order[first], order[second]), cmp.Compare(slower, than), byBytes(a, b))
}

// TestExplainAnything gives Explain facts in any order, of any ranks.
func TestExplainAnything(t *testing.T) {
	facts := []evidence.Fact{oom(nil), oom(func(f *evidence.GPUOutOfMemory) { f.Device = 3 }),
		evidence.GPUOutOfMemory{},
		evidence.AllocationRetried{}, evidence.DriverOutOfMemory{}, evidence.LibraryFailed{Library: "Triton"},
		evidence.HostAllocationFailed{Requested: known(gib)}, evidence.LockFailed{By: "mlock"},
		evidence.SharedMemoryFull{},
		evidence.BusError{}, evidence.DiskFull{}, evidence.TooManyProcesses{}, evidence.WorkerEnded{PIDs: []int{7}},
		evidence.WorkerEnded{Signal: "Killed"}, evidence.Exception{Type: "ValueError"}, evidence.CollectiveFailed{},
		evidence.MemoryUsage{Tag: "x", HostUsed: known(gib)}, evidence.MemoryUsage{HostUsed: known(9 * gib)},
		evidence.Progress{Phase: ledger.Backward, Step: 3}, evidence.Progress{Step: 9}, evidence.Progress{Step: 11},
		ended(0, 77, 0, 9), ended(3, 5, 137, 0), ended(1, 0, 0, 15), ended(2, 0, 0, 0), evidence.BatchKill{By: "Slurm"},
		evidence.BatchEnd{Reason: "cancelled"}, kill("CONSTRAINT_MEMCG"), kill("CONSTRAINT_NONE"), events("/a", 0, 1),
		events("/a", 2, 3), evidence.Limit{Name: "RLIMIT_AS", Bytes: known(gib)}}
	rapid.Check(t, func(t *rapid.T) {
		var in Inputs
		for i := range rapid.IntRange(1, 3).Draw(t, "files") {
			kind := rapid.SampledFrom([]evidence.Kind{evidence.TrainerLog, evidence.KernelLog}).Draw(t, "kind")
			source := from(fmt.Sprint(i), kind, rapid.SliceOfN(rapid.SampledFrom(facts), 0, 8).Draw(t, "facts")...)
			for k := range source.Findings {
				source.Findings[k].Rank = rapid.IntRange(-1, 3).Draw(t, "rank")
				if rapid.Bool().Draw(t, "dated") {
					source.Findings[k].Time = time.Unix(int64(rapid.IntRange(1, 5).Draw(t, "time")), 0)
				}
			}
			in.Sources = append(in.Sources, source)
		}
		check(t, Explain(in))
	})
}

// TestFirstRank: only the first rank to end is a witness, whatever the order of its lines.
func TestFirstRank(t *testing.T) {
	at := func(rank int, seconds int64, fact evidence.Fact) evidence.Finding {
		return evidence.Finding{Line: evidence.Line{File: "log", Number: int(seconds) + rank}, Rank: rank, Fact: fact,
			Time: time.Unix(seconds, 0)}
	}
	source := &evidence.Source{Name: "log", Kind: evidence.TrainerLog, Findings: []evidence.Finding{
		at(1, 30, evidence.CollectiveFailed{By: "NCCL"}), at(1, 31, ended(1, 0, 0, 6)), at(2, 25, oom(nil)),
		at(3, 20, evidence.Progress{Phase: ledger.Backward, Step: -1}), at(3, 20, oom(nil)), at(0, 32, ended(0, 0, 0,
			15)),
	}}
	e := Explain(Inputs{Sources: []*evidence.Source{source}})
	if e.Cause.Rank == nil || *e.Cause.Rank != 3 || e.Cause.Phase == nil || *e.Cause.Phase != ledger.Backward {
		t.Errorf("the cause is %+v, expected rank 3 in backward", e.Cause)
	}
	var ranks []int
	for _, v := range e.Victims {
		ranks = append(ranks, v.Rank)
	}
	if !slices.Equal(ranks, []int{0, 1, 2}) {
		t.Errorf("the victims are %v, expected ranks 0, 1 and 2", ranks)
	}
	if want := "Rank 3 ran out of GPU memory in the backward pass: it asked for 2.00 " +
		"GiB"; !strings.HasPrefix(e.Cause.Text,
		want) {
		t.Errorf("%q, expected %q", e.Cause.Text, want)
	}
}

// TestLaunchersNameTheFirst: of two ranks with the same error, the first is the one that the launcher names, or saw end
// first. The order of their lines says less.
func TestLaunchersNameTheFirst(t *testing.T) {
	failed := func(rank int, seconds int64, first bool) evidence.Finding {
		f := ended(rank, rank, 1, 0)
		f.First = first
		return evidence.Finding{Line: evidence.Line{File: "log", Number: 10 + rank}, Rank: evidence.NoRank, Fact: f,
			Time: time.Unix(seconds, 0)}
	}
	errorOf := func(rank, line int) evidence.Finding {
		return evidence.Finding{Line: evidence.Line{File: "log", Number: line}, Rank: rank, Fact: oom(nil)}
	}
	for name, ends := range map[string][]evidence.Finding{
		"named":   {failed(1, 5, false), failed(4, 5, true)},
		"earlier": {failed(1, 6, false), failed(4, 5, false)},
	} {
		e := Explain(Inputs{Sources: []*evidence.Source{{Name: "log", Kind: evidence.TrainerLog,
			Findings: append([]evidence.Finding{errorOf(1, 1), errorOf(4, 2)}, ends...)}}})
		if e.Cause.Rank == nil || *e.Cause.Rank != 4 || len(e.Victims) != 1 || e.Victims[0].Rank != 1 {
			t.Errorf("%s: %+v, %+v: expected rank 4, which took rank 1 along", name, e.Cause, e.Victims)
		}
	}
}

// TestPageCache: the page cache of a cgroup is no holder, and is cleared.
func TestPageCache(t *testing.T) {
	e := Explain(Inputs{Sources: []*evidence.Source{from("dmesg", evidence.KernelLog, kill("CONSTRAINT_MEMCG"))}})
	if len(e.Holders) != 1 || e.Holders[0].Component != "anonymous" || e.Holders[0].Bytes != 9 {
		t.Errorf("the holders are %+v, expected anonymous memory", e.Holders)
	}
	if !slices.ContainsFunc(e.RuledOut, func(r RuledOut) bool { return strings.HasPrefix(r.Why, "page cache") }) {
		t.Errorf("%+v: the page cache is not ruled out", e.RuledOut)
	}
}

// TestPlannedEdits plans changes of the user's own file. Each names the file and its line, with what its plan says, and
// the one that makes the job fit comes first.
func TestPlannedEdits(t *testing.T) {
	phase := from("log", evidence.TrainerLog, evidence.Progress{Phase: ledger.Backward, Step: -1}, oom(nil))
	e := Explain(Inputs{Sources: []*evidence.Source{phase}, Request: &job.Request{Model: "llama-3.1-8b", GPUs: 4,
		GPU: "A100-80GB", Sequence: 1024, DeepSpeed: "testdata/zero1.json"}})
	byKey := map[string]Edit{} // of one edit alone, the one that frees most
	for _, edit := range e.Edits {
		if others := len(edit.Planned.Edits) - 1; edit.Frees > byKey[edit.Key].Frees && (others == 0 ||
			edit.Key == "train_micro_batch_size_per_gpu") && len(edit.Planned.Flags) == 0 {
			byKey[edit.Key] = edit
		}
	}
	edit := byKey["zero_optimization.stage"]
	if edit.File != "testdata/zero1.json" || edit.Line != 4 || edit.From != "1" || edit.To != "3" ||
		edit.Frees < 4*gib {
		t.Errorf("%+v: expected stage 3 of testdata/zero1.json", edit)
	}
	if edit := byKey["train_micro_batch_size_per_gpu"]; edit.From != "4" || edit.Line != 2 ||
		len(edit.Planned.Edits) != 2 || edit.Frees < 100*ledger.MiB {
		t.Errorf("%+v: expected a smaller micro batch with more accumulation", edit)
	}
	edit = byKey["zero_optimization.offload_optimizer.device"]
	if edit.To != `"cpu"` || edit.Planned.Verdict != plan.Fits {
		t.Errorf("%+v: expected the offloaded optimizer, which makes the job fit", edit)
	}
	if e.Edits[0].Planned.Verdict != plan.Fits {
		t.Errorf("%+v: expected a change that makes the job fit first", e.Edits[0])
	}
	check(t, e)
}

// TestIssue7693 has the figures of DeepSpeed's issue 7693: memory around grad.mul_ in the first step. Twice memory
// rises by 4 bytes a parameter, once on the GPU and once on the host.
func TestIssue7693(t *testing.T) {
	usage := func(tag string, gpu, host float64) evidence.MemoryUsage {
		return evidence.MemoryUsage{By: "DeepSpeed", Tag: tag, Allocated: known(ledger.Bytes(gpu * float64(gib))),
			HostUsed: known(ledger.Bytes(host * float64(gib)))}
	}
	e := Explain(Inputs{Parameters: 3_221_225_472, Sources: []*evidence.Source{from("log", evidence.TrainerLog,
		usage("before", 9.36, 135.32), usage("after grad.to(cuda)", 21.36, 135.33), usage("after mul_", 21.36, 135.33),
		usage("after grad.cpu", 9.36, 147.38))}})
	if len(e.Notes) != 2 || e.Cause.Resource != None {
		t.Fatalf("%q: expected two notes and no failure", e.Notes)
	}
	for i, words := range [][]string{{"log:2", "GPU memory", "12.0 GiB", "4.00 bytes a parameter", "fp32 gradient"},
		{"log:4", "host memory", "4.02 bytes a parameter", "second copy", "grad = grad.cpu()", "no leak"}} {
		for _, word := range words {
			if !strings.Contains(e.Notes[i], word) {
				t.Errorf("%q lacks %q", e.Notes[i], word)
			}
		}
	}
}

// TestJumpsWithoutParameters: where no file says how many parameters there are, the line that names its operation tells
// how many elements were touched, and the other jumps are counted in them.
func TestJumpsWithoutParameters(t *testing.T) {
	log := `before the step
MA 9.36 GB         Max_MA 9.36 GB         CA 12.05 GB         Max_CA 12 GB
CPU Virtual Memory:  used = 135.32 GB, percent = 6.8%
after grad.to(cuda)
MA 21.36 GB         Max_MA 21.36 GB         CA 24.05 GB         Max_CA 24 GB
CPU Virtual Memory:  used = 135.33 GB, percent = 6.8%
after grad.cpu
MA 9.36 GB         Max_MA 21.36 GB         CA 24.05 GB         Max_CA 24 GB
CPU Virtual Memory:  used = 147.38 GB, percent = 7.4%
after the first optimizer step
MA 9.36 GB         Max_MA 21.36 GB         CA 24.05 GB         Max_CA 24 GB
CPU Virtual Memory:  used = 171.40 GB, percent = 8.6%
`
	e := explainText(t, log)
	if len(e.Notes) != 3 {
		t.Fatalf("%q: expected three notes", e.Notes)
	}
	for i, words := range [][]string{{"4.00 bytes an element", "fp32 gradient"}, {"4.02 bytes an element", "no leak"},
		{"8.01 bytes an element", "exp_avg"}} {
		for _, word := range words {
			if !strings.Contains(e.Notes[i], word) {
				t.Errorf("%q lacks %q", e.Notes[i], word)
			}
		}
	}
}

// TestDisputedJumps: the two rises that the issue reports in the first step have no source, and the note says so.
func TestDisputedJumps(t *testing.T) {
	for tag, word := range map[string]string{"after unscale_and_clip_grads": "see_memory_usage counts the whole node",
		"after adam_update": "mimalloc"} {
		e := Explain(Inputs{Parameters: 1 << 30, Sources: []*evidence.Source{from("log", evidence.TrainerLog,
			evidence.MemoryUsage{HostUsed: known(10 * gib)}, evidence.MemoryUsage{Tag: tag,
				HostUsed: known(14 * gib)})}})
		if len(e.Notes) != 1 || !strings.Contains(e.Notes[0], "4.00 bytes a parameter") ||
			!strings.Contains(e.Notes[0], word) {
			t.Errorf("%s: %q lacks %q", tag, e.Notes, word)
		}
	}
}

// TestFalcon has the figures of a question in a forum, "Why does GPU memory usage spike during gradient update step":
// Falcon-7B on an A100, 53 GB at the end and 66 GB at the peak.
func TestFalcon(t *testing.T) {
	e := Explain(Inputs{Peak: 66 * gib, End: 53 * gib, Request: &job.Request{Model: "falcon-7b", Precision: "fp16",
		GPU: "A100-80GB", Sequence: 128}})
	if want := "12.9 GiB of it are temporaries of the optimizer step"; !strings.Contains(e.Cause.Text, want) {
		t.Errorf("%q lacks %q", e.Cause.Text, want)
	}
	if len(e.Edits) == 0 || e.Edits[0].To != "adamw/fused" || e.Edits[0].Frees < 11*gib {
		t.Errorf("%+v: expected the fused step first", e.Edits)
	}
	check(t, e)
}

// TestManyErrors: a log of many errors takes no longer than reading it.
func TestManyErrors(t *testing.T) {
	var facts []evidence.Fact
	for i := range 100_000 {
		facts = append(facts, oom(nil), ended(i, i, 137, 0))
	}
	began := time.Now()
	check(t, Explain(Inputs{Sources: []*evidence.Source{from("log", evidence.TrainerLog, facts...)}}))
	if took := time.Since(began); took > 2*time.Minute { // compared in pairs they take hours
		t.Errorf("100,000 errors took %v", took)
	}
}

// TestForkRejected: the kernel's refusal of a fork speaks for a job that met one, and of another job otherwise.
func TestForkRejected(t *testing.T) {
	kernel := from("dmesg", evidence.KernelLog, evidence.TooManyProcesses{By: "fork", Group: "/pod"})
	log := func(fact evidence.Fact) *evidence.Source { return from("log", evidence.TrainerLog, fact) }
	for _, test := range []struct {
		name       string
		files      []*evidence.Source
		resource   Resource
		confidence Confidence
	}{
		{"alone", []*evidence.Source{kernel}, Processes, Likely},
		{"its own", []*evidence.Source{kernel, log(evidence.TooManyProcesses{By: "fork"})}, Processes, Certain},
		{"another job's", []*evidence.Source{kernel, log(evidence.Exception{Type: "KeyError"})}, NotMemory, Likely},
		{"a job that goes on", []*evidence.Source{kernel, log(evidence.Progress{Step: 3})}, None, Likely},
	} {
		e := Explain(Inputs{Sources: test.files})
		if e.Cause.Resource != test.resource || e.Confidence != test.confidence {
			t.Errorf("%s: %s %q, expected %s %q", test.name, e.Confidence, e.Cause.Resource, test.confidence,
				test.resource)
		}
		named := slices.ContainsFunc(e.Evidence, func(e Evidence) bool { return strings.Contains(e.Says, "/pod") })
		if named != (test.resource == Processes) {
			t.Errorf("%s: the evidence names the cgroup: %v", test.name, named)
		}
	}
}

// TestPortInUse: a server that cannot listen fails by itself, and a client that reaches no server does not.
func TestPortInUse(t *testing.T) {
	for message, resource := range map[string]Resource{
		"The server socket has failed to listen on any local network address. port: 29500":  NotMemory,
		"The client socket has timed out after 600000ms while trying to connect to (n1, 9)": Undetermined,
	} {
		e := Explain(Inputs{Sources: []*evidence.Source{from("log", evidence.TrainerLog,
			evidence.Exception{Type: "torch.distributed.DistNetworkError", Message: message})}})
		if e.Cause.Resource != resource {
			t.Errorf("%s: %q, expected %q", message, e.Cause.Resource, resource)
		}
	}
}

// TestRankOfKill: a rank that raised an exception after the kernel killed another process was not killed itself.
func TestRankOfKill(t *testing.T) {
	raised := evidence.Finding{Line: evidence.Line{File: "log", Number: 1}, Rank: 3,
		Fact: evidence.Exception{Type: "ValueError", Message: "a worker is gone"}}
	e := Explain(Inputs{Sources: []*evidence.Source{
		{Name: "log", Kind: evidence.TrainerLog, Findings: []evidence.Finding{raised}},
		from("dmesg", evidence.KernelLog, kill("CONSTRAINT_NONE"))}})
	if e.Cause.Rank != nil || !strings.HasPrefix(e.Cause.Text, "Process 77 (python) was killed") {
		t.Errorf("%+v, expected process 77 and no rank", e.Cause)
	}
	if !slices.ContainsFunc(e.Evidence, func(v Evidence) bool { return strings.Contains(v.Says, "ValueError") }) {
		t.Errorf("the evidence is %+v, expected the exception, too", e.Evidence)
	}
}

// TestLongRecording: of a long recording the sample before the first end stays, and memory does not grow.
func TestLongRecording(t *testing.T) {
	const many = 10 * keptSamples
	sample := func(i, pid int, available ledger.Bytes) *samples.Record {
		return &samples.Record{Time: time.Duration(i) * time.Second, Sample: &samples.Sample{
			Node:      samples.Node{Memory: 100 * gib, Available: available},
			Processes: []samples.Process{{PID: pid, Role: samples.RankProcess}}}}
	}
	r := NewRecording("run.jsonl", samples.Record{Start: &samples.Start{Began: time.Unix(1e9, 0)}})
	for i := range many {
		r.Add(sample(i, 7, 50*gib-ledger.Bytes(i)))
		r.Add(&samples.Record{Time: time.Duration(i) * time.Second,
			Mark: &samples.Mark{Phase: ledger.Forward, Step: int64(i), Ended: &samples.Ended{}}})
		r.Add(&samples.Record{Time: time.Duration(i) * time.Second,
			Output: &samples.Output{Lines: []string{strings.Repeat("x", 64<<10)}}})
	}
	for i := range many {
		r.Add(sample(many+i, 8, 10*gib))
	}
	r.Add(&samples.Record{Time: 2 * many * time.Second, End: &samples.End{Ranks: []samples.RankEnd{
		{PID: 7, Time: many * time.Second, Signal: 9}}}})
	if l := r.lastLevels(); l == nil || l.node.Available != 50*gib-(many-1) || l.at.Number != 1+3*(many-1)+1 {
		t.Errorf("%+v, expected the last sample of process 7", l)
	}
	if n := len(r.samples.all()); n > keptSamples+1 {
		t.Errorf("%d samples are kept, expected %d at most", n, keptSamples+1)
	}
	if n := r.outputs.size; n > keptOutput {
		t.Errorf("%d bytes of output are kept, expected %d at most", n, keptOutput)
	}
}

// TestWaitingRankIsNoWitness: a rank whose collective has timed out is not the one that has failed.
func TestWaitingRankIsNoWitness(t *testing.T) {
	e := explainText(t, "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 564.00 MiB. GPU 1 has a "+
		"total capacity of 22.20 GiB of which 203.12 MiB is free. Of the allocated memory 19.13 GiB is allocated by "+
		"PyTorch.\n[rank3]:[E412 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: "+
		"WorkNCCL(SeqNum=55, OpType=ALLGATHER, Timeout(ms)=1800000) ran for 1800871 milliseconds before timing out.\n")
	if e.Cause.Resource != GPU || e.Cause.Rank != nil || len(e.Victims) != 1 || e.Victims[0].Rank != 3 {
		t.Errorf("%s on rank %v, victims %v; expected the GPU on no rank in particular, and rank 3 as a victim",
			e.Cause.Resource, e.Cause.Rank, e.Victims)
	}
}

// TestKilledBeforeItWasAsked: a rank that the kernel has killed is the first to end. Its launcher may have died with
// it, and the next one counts it among those that were asked to end.
func TestKilledBeforeItWasAsked(t *testing.T) {
	asked := func(rank, pid int) evidence.ProcessEnded {
		return evidence.ProcessEnded{By: recorder, Rank: rank, LocalRank: rank, PID: pid, Signal: 9, Victim: true}
	}
	e := Explain(Inputs{Sources: []*evidence.Source{from("run.jsonl", evidence.TrainerLog, asked(0, 76), asked(1, 77)),
		from("dmesg", evidence.KernelLog, kill("CONSTRAINT_MEMCG"))}})
	if e.Cause.Resource != CGroup || e.Cause.Rank == nil || *e.Cause.Rank != 1 || len(e.Victims) != 1 ||
		e.Victims[0].Rank != 0 {
		t.Errorf("%s on rank %v, victims %v; expected the cgroup on rank 1, and rank 0 as a victim", e.Cause.Resource,
			e.Cause.Rank, e.Victims)
	}
}
