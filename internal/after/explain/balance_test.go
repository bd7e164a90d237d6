package explain

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/plan/job"
)

// TestBalance: whatever an error of PyTorch says, its holders and the free memory are no more than the card, and all of
// it if nothing is rounded.
func TestBalance(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		share := func(name string) ledger.Bytes { return ledger.Bytes(rapid.Int64Range(0, 20<<10).Draw(t, name)) << 20 }
		tensors, pieces, outside, free := share("tensors"), share("pieces"), share("outside"), share("free")
		others, rest := share("others"), share("rest")
		total := tensors + pieces + outside + free + others + rest
		f := evidence.GPUOutOfMemory{Backend: "CUDA", Total: known(total), Free: known(free), Allocated: known(tensors),
			Reserved: known(tensors + pieces), Requested: known(share("requested")),
			Others: []evidence.GPUProcess{{PID: 9, Used: known(others)}}}
		if rapid.Bool().Draw(t, "knows itself") {
			f.Self = known(tensors + pieces + outside)
		}
		e := Explain(Inputs{Sources: []*evidence.Source{from("log", evidence.TrainerLog, f)}})
		sum := free
		for _, h := range e.Holders {
			sum += h.Bytes
		}
		if sum > total || sum < total-rounding {
			t.Errorf("%v of %v have a holder: %+v", sum, total, e.Holders)
		}
	})
}

// TestBrokenSizes: what no machine has is a fault of the program, and what no GPU of the size has is said so.
func TestBrokenSizes(t *testing.T) {
	for text, want := range map[string]struct {
		resource Resource
		words    string
	}{
		"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.\n": {NotMemory, "shape"},
		"RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 8070450532247928832 bytes. " +
			"Error code 12 (Cannot allocate memory)\n": {NotMemory, "shape"},
		"RuntimeError: CUDA out of memory. Tried to allocate 90.00 GiB (GPU 0; 79.15 GiB total capacity; 1.00 GiB " +
			"already allocated; 77.00 GiB free; 1.10 GiB reserved in total by PyTorch)\n": {GPU, "no GPU of 79.2 GiB"},
		"RuntimeError: MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max " +
			"allowed: 27.20 GiB). Tried to allocate 292.50 MiB on private pool.\n": {GPU, "17.3 GiB of Metal"},
	} {
		if e := explainText(t, text); e.Cause.Resource != want.resource || !strings.Contains(e.Cause.Text, want.words) {
			t.Errorf("%q: %q (%s)", text, e.Cause.Resource, e.Cause.Text)
		}
	}
}

// TestPlannedPartsAreNoHolders: bytes of a plan do not stand beside a measured total.
func TestPlannedPartsAreNoHolders(t *testing.T) {
	e := Explain(Inputs{Sources: []*evidence.Source{from("log", evidence.TrainerLog, oom(nil))},
		Request: &job.Request{Model: "llama-3.1-8b", GPUs: 4, GPU: "A100-80GB", Sequence: 1024}})
	var sum ledger.Bytes
	for _, h := range e.Holders {
		sum += h.Bytes
	}
	if sum > 80*gib {
		t.Errorf("%v of 80 GiB have a holder: %+v", sum, e.Holders)
	}
	if !strings.Contains(strings.Join(e.Notes, " "), "The plan of the job divides what its tensors hold: ") {
		t.Errorf("no note divides the tensors: %q", e.Notes)
	}
}

// TestHostBalance: whatever the kernel has counted, the holders are all that was in use, and no more.
func TestHostBalance(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		share := func(name string) ledger.Bytes { return ledger.Bytes(rapid.Int64Range(0, 20<<10).Draw(t, name)) << 20 }
		var processes []evidence.KernelProcess
		var anonymous ledger.Bytes
		for pid := range rapid.IntRange(1, 20).Draw(t, "processes") {
			p := evidence.KernelProcess{PID: pid + 1, Name: "python", Anonymous: share("anonymous") + ledger.MiB}
			p.Resident = p.Anonymous
			anonymous += p.Anonymous
			processes = append(processes, p)
		}
		shared, cache, kernel, rest := share("shared"), share("cache"), share("kernel"), share("rest")
		used := anonymous + shared + cache + kernel + rest
		kill := evidence.KernelKill{PID: 1, Name: "python", Processes: processes, Constraint: "CONSTRAINT_NONE"}
		if rapid.Bool().Draw(t, "of a cgroup") {
			kill.Constraint, kill.Usage = "CONSTRAINT_MEMCG", known(used)
			kill.Stats = map[string]ledger.Bytes{"shmem": shared, "file": cache + shared, "kernel": kernel}
		} else {
			free := share("free")
			kill.Nodes = []evidence.NUMANode{{Size: known(used + free), Free: known(free)}}
			kill.Stats = map[string]ledger.Bytes{"shmem": shared, "active_file": cache, "pagetables": kernel / 2,
				evidence.HugePages: kernel - kernel/2}
		}
		e := Explain(Inputs{Sources: []*evidence.Source{from("dmesg", evidence.KernelLog, kill)}})
		var sum, unexplained ledger.Bytes
		for _, h := range e.Holders {
			sum += h.Bytes
			if h.Component == "unexplained" {
				unexplained += h.Bytes
			}
		}
		if sum > used || sum < used-max(used/tellingShare, rounding) {
			t.Errorf("%v of %v have a holder: %+v", sum, used, e.Holders)
		}
		if len(e.Holders) < mostHolders && unexplained > 0 && unexplained != rest {
			t.Errorf("%v are unexplained, expected %v", unexplained, rest)
		}
	})
}

// TestListedHolders: a list of Ray, ps or the kubelet divides the memory of the host, as far as it says whose it is.
func TestListedHolders(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want map[string]ledger.Bytes
	}{
		"Ray": {"Memory on the node (IP: 10.8.1.17, ID: 4b0d) where the task (actor ID: 9c1f, name=A, pid=41, memory " +
			"used=30.00GB) was running was 95.00GB / 100.00GB (0.95), which exceeds the memory usage threshold of " +
			"0.95.\nPID\tMEM(GB)\tCOMMAND\n41\t30.00\tray::Worker.step\n42\t25.00\tray::Worker.step\n",
			map[string]ledger.Bytes{"process 41": 30 * gib, "process 42": 25 * gib, "unexplained": 40 * gib}},
		"Ray, twice": {"PID\tMEM(GB)\tCOMMAND\n7\t90.00\tray::Old\nTask was killed due to the node running low on " +
			"memory.\nPID\tMEM(GB)\tCOMMAND\n41\t30.00\tray::Worker.step\n",
			map[string]ledger.Bytes{"process 41": 30 * gib}},
		"Ray, three times": {"PID\tMEM(GB)\tCOMMAND\n7\t90.00\tray::Old\nTask was killed due to the node running low " +
			"on memory.\nPID\tMEM(GB)\tCOMMAND\n41\t30.00\tray::Worker.step\nanother line\n" +
			"PID\tMEM(GB)\tCOMMAND\n9\t10.00\tray::New\n", map[string]ledger.Bytes{"process 41": 30 * gib}},
		"ps": {"System OOM encountered, victim process: python, pid: 41\n" +
			"USER PID %CPU %MEM VSZ RSS TTY STAT START TIME COMMAND\nroot 41 99.0 60.0 99999999 31457280 ? Rl 09:12 " +
			"91:02 python train.py\nMiB Mem : 51200.0 total, 10240.0 free, 40960.0 used, 5120.0 buff/cache\n",
			map[string]ledger.Bytes{"process 41": 30 * gib, "page_cache": 5 * gib, "unexplained": 5 * gib}},
		"the kubelet": {"The node was low on resource: memory. Threshold quantity: 100Mi, available: 88Mi. " +
			"Container trainer was using 57Gi, request is 0, has larger consumption of memory. Container sidecar was " +
			"using 1Gi, request is 2Gi.\n",
			map[string]ledger.Bytes{"container trainer": 57 * gib, "container sidecar": gib}},
	} {
		e := explainText(t, c.text)
		got := map[string]ledger.Bytes{}
		for _, h := range e.Holders {
			got[h.Component] = h.Bytes
		}
		if e.Cause.Resource != Host || !maps.Equal(got, c.want) {
			t.Errorf("%s: %s, %v, expected %v", name, e.Cause.Resource, got, c.want)
		}
	}
}

// TestRecordedBalance: the last sample divides what was in use, also among those that are not of the job.
func TestRecordedBalance(t *testing.T) {
	sample := samples.Sample{
		Node: samples.Node{Memory: 100 * gib, Free: 2 * gib, Available: 4 * gib, Anonymous: 35 * gib, Shared: 20 * gib,
			PageCache: 3 * gib, HugetlbTotal: 16 * gib, HugetlbFree: 12 * gib,
			SharedFiles: samples.FileSystem{Size: 16 * gib, Used: 16 * gib}},
		Groups: []samples.Group{{Name: "/job", Limit: 40 * gib, Current: 40 * gib, Anonymous: 6 * gib, Shared: 30 * gib,
			File: 31 * gib, Kernel: gib}},
	}
	for name, c := range map[string]struct {
		fact     evidence.Fact
		resource Resource
		want     map[string]ledger.Bytes
		edit     string
	}{
		"host": {evidence.KernelKill{PID: 77, Constraint: "CONSTRAINT_NONE"}, Host, map[string]ledger.Bytes{
			"process 77": 5 * gib, "anonymous": 30 * gib, "shared_memory": 20 * gib, "page_cache": 3 * gib,
			"huge_pages": 16 * gib, "unexplained": 24 * gib}, ""},
		"cgroup": {evidence.KernelKill{PID: 77, Constraint: "CONSTRAINT_MEMCG"}, CGroup, map[string]ledger.Bytes{
			"process 77": 5 * gib, "anonymous": gib, "shared_memory": 30 * gib, "page_cache": gib, "kernel": gib,
			"unexplained": 2 * gib}, ""},
		"shm": {evidence.SharedMemoryFull{By: "DataLoader"}, SharedMemory, map[string]ledger.Bytes{
			"unexplained": 16 * gib}, ""},
		"the host as a batch system saw it": {evidence.BatchKill{By: "earlyoom"}, Host, map[string]ledger.Bytes{
			"process 77": 5 * gib, "anonymous": 30 * gib, "shared_memory": 20 * gib, "page_cache": 3 * gib,
			"huge_pages": 16 * gib, "unexplained": 24 * gib}, "vm.nr_hugepages"},
	} {
		e := Explain(Inputs{Sources: []*evidence.Source{from("log", evidence.TrainerLog, c.fact)},
			Recordings: []*Recording{recorded(sample, samples.RankEnd{Signal: 9})}})
		got := map[string]ledger.Bytes{}
		for _, h := range e.Holders {
			got[h.Component] = h.Bytes
		}
		if e.Cause.Resource != c.resource || !maps.Equal(got, c.want) {
			t.Errorf("%s: %s, %v, expected %s, %v", name, e.Cause.Resource, got, c.resource, c.want)
		}
		if c.edit != "" && (len(e.Edits) == 0 || e.Edits[0].Key != c.edit || e.Edits[0].Frees != 12*gib) {
			t.Errorf("%s: the edits are %+v, expected %s first", name, e.Edits, c.edit)
		}
	}
}

// TestSleepingEngine: what an engine says when it sleeps divides the GPU that is too small when it wakes.
func TestSleepingEngine(t *testing.T) {
	e := explainText(t, "Sleep mode freed 30.00 GiB memory, 2.00 GiB memory is still in use.\n"+
		"Sleep mode freed 9.00 GiB memory, 7.50 GiB memory is still in use.\n"+
		"RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62\n")
	got := map[string]ledger.Bytes{}
	for _, h := range e.Holders {
		got[h.Component] = h.Bytes
	}
	want := map[string]ledger.Bytes{"rollout_engine": 9 * gib, "trainer": 15 * gib / 2}
	if e.Cause.Detail != waking || !maps.Equal(got, want) {
		t.Errorf("%s: %v, expected %v", e.Cause.Detail, got, want)
	}
}

// TestSharedPagesCountOnce: processes may count pages that they share more than once. No kind makes the holders more
// than what was in use.
func TestSharedPagesCountOnce(t *testing.T) {
	kill := evidence.KernelKill{PID: 1, Name: "python", Constraint: "CONSTRAINT_MEMCG", Usage: known(30 * gib),
		Processes: []evidence.KernelProcess{{PID: 1, Resident: 15 * gib}, {PID: 2, Resident: 13 * gib}},
		Stats:     map[string]ledger.Bytes{"shmem": 10 * gib, "file": 11 * gib}}
	e := Explain(Inputs{Sources: []*evidence.Source{from("dmesg", evidence.KernelLog, kill)}})
	got := map[string]ledger.Bytes{}
	for _, h := range e.Holders {
		got[h.Component] = h.Bytes
	}
	want := map[string]ledger.Bytes{"process 1": 15 * gib, "process 2": 13 * gib, "shared_memory": 2 * gib}
	if !maps.Equal(got, want) {
		t.Errorf("%v, expected %v", got, want)
	}
}

// TestSnapshotOfTheRank: of the snapshots that ranks have written, that of the rank that ran out counts.
func TestSnapshotOfTheRank(t *testing.T) {
	in := Inputs{Sources: []*evidence.Source{from("log", evidence.TrainerLog, oom(nil))}}
	in.Sources[0].Findings[0].Rank = 1
	for rank := range 3 {
		in.Snapshots = append(in.Snapshots, Snapshot{File: "s", Rank: rank, Device: -1,
			Lines: []SnapshotLine{{Place: fmt.Sprintf("train.py:%d", rank), Bytes: gib}}})
	}
	if notes := strings.Join(Explain(in).Notes, " "); !strings.Contains(notes, "by train.py:1.") {
		t.Errorf("the notes are %q", notes)
	}
}

// TestNodeBalance: what a NUMA node has in use is divided among the processes that hold it, with a remainder.
func TestNodeBalance(t *testing.T) {
	sample := samples.Sample{
		Node: samples.Node{Memory: 100 * gib, Available: 50 * gib, NUMANodes: []samples.NUMAFree{
			{Node: 0, Memory: 50 * gib, Free: 49 * gib}, {Node: 1, Memory: 50 * gib, Free: 1 * gib}}},
		Processes: []samples.Process{{PID: 77, Rank: 0, Role: samples.RankProcess, Name: "python",
			NUMANodes: []samples.NUMANode{{Node: 0, Bytes: 3 * gib}, {Node: 1, Bytes: 41 * gib}}}},
	}
	e := Explain(Inputs{Recordings: []*Recording{withKills(recorded(sample, samples.RankEnd{Signal: 9}), 0)}})
	held := map[string]ledger.Bytes{}
	for _, h := range e.Holders {
		held[h.Component] = h.Bytes
	}
	want := map[string]ledger.Bytes{"process 77": 41 * gib, "unexplained": 8 * gib}
	if e.Cause.Resource != NUMANode || !maps.Equal(held, want) {
		t.Errorf("%q is held by %v, expected %v", e.Cause.Resource, held, want)
	}
}

// TestObjectStore: the memory of Ray's object store is divided by what its account says, with a remainder.
func TestObjectStore(t *testing.T) {
	const full = "ray.exceptions.ObjectStoreFullError: Failed to put object ff00 in object store because it is full. " +
		"Object size is 2726297600 bytes.\n"
	account := "(raylet) store.cc:513: Plasma store at capacity\n========== Plasma store: =================\n" +
		"Current usage: 20 / 13 GB\n- num bytes created total: 130191297154\n1 pending objects of total size 2600MB\n" +
		"- objects in use: 502\n- bytes in use: 19840565680\n\n- objects created by worker: 5\n" +
		"- bytes created by worker: 11000000000\n- objects restored: 497\n- bytes restored: 8000000000\n" +
		"- bytes received: 0\n"
	for name, text := range map[string]string{
		"account before": account + "\n" + full, "account after": full + account,
	} {
		e := explainText(t, text)
		held := map[string]ledger.Bytes{}
		for _, h := range e.Holders {
			held[h.Text] += h.Bytes
		}
		want := map[string]ledger.Bytes{"Ray's object store: made by tasks and ray.put": 11e9,
			"Ray's object store: read back after a spill":          8e9,
			"in Ray's object store, and of no kind that it counts": 1e9}
		if e.Cause.Resource != SharedMemory || e.Cause.Detail != evidence.RayStore || !maps.Equal(held, want) {
			t.Errorf("%s: %q (%s), held by %v", name, e.Cause.Resource, e.Cause.Detail, held)
		}
		if len(e.Edits) == 0 || e.Edits[0].Key != "--object-store-memory" || e.Edits[0].From != "12.1 GiB" {
			t.Errorf("%s: %+v", name, e.Edits)
		}
	}
	e := explainText(t, full+"Plasma memory usage 720 MiB, 90 objects, 36.00% full, 0.0% needed\n")
	if len(e.Holders) != 1 || e.Holders[0].Bytes != 720<<20 || e.Edits[0].From != "1.95 GiB" {
		t.Errorf("ray memory: %+v, %+v", e.Holders, e.Edits)
	}
	if e := explainText(t, full+" 3.07GiB/9.31GiB object_store_memory\n"); e.Edits[0].From != "9.31 GiB" {
		t.Errorf("ray status: %+v", e.Edits)
	}
}

// TestObjectStoreAmongOthers: Ray's store is a holder of the host's memory, and a full /dev/shm has no room for it.
func TestObjectStoreAmongOthers(t *testing.T) {
	e := explainText(t, "ray.exceptions.OutOfMemoryError: 1 worker(s) were killed due to the node running low on "+
		"memory. Memory on the node (IP: 10.8.1.17, ID: ad89) was 30GB / 31GB (0.96)\n"+
		"Object store memory usage: [- objects spillable: 0\n- bytes created by worker: 8589934592\n"+
		"(global lru) capacity: 10737418240\n(global lru) used: 80%]\n"+
		"Top 10 memory users: PID\tMEM(GB)\tCOMMAND\n6704\t20.0\tray::hungry\n6345\t0.24\tray::idle\n")
	if !slices.ContainsFunc(e.Holders, func(h Holder) bool {
		return h.Component == "shared_memory" && h.Bytes == 8*gib
	}) {
		t.Errorf("%+v, held by %+v: expected 8 GiB of shared memory", e.Cause, e.Holders)
	}
	full := Explain(Inputs{Sources: []*evidence.Source{from("log", evidence.TrainerLog,
		evidence.SharedMemoryFull{By: evidence.RayStore}, evidence.FileSystem{Mount: "/dev/shm", Size: known(64 * gib),
			Used: known(64 * gib)})}})
	if full.Confidence != Certain || full.Cause.Detail != "" {
		t.Errorf("%+v, %s: expected a full /dev/shm for certain", full.Cause, full.Confidence)
	}
}

// TestLockedMemory: the memory that a limit of locked memory allows is divided among those that count against it.
func TestLockedMemory(t *testing.T) {
	process := samples.Process{PID: 77, Role: samples.RankProcess, Locked: 2 * gib, Pinned: 3 * gib,
		LockedLimit: 10 * gib, Proportional: samples.Kinds{Anonymous: 50 * gib}}
	r := NewRecording("run.jsonl", samples.Record{Start: &samples.Start{Schema: samples.Schema}},
		samples.Record{Time: time.Second, Sample: &samples.Sample{Processes: []samples.Process{process}}},
		samples.Record{Time: 2 * time.Second, Output: &samples.Output{Lines: []string{"n1:1:1 [0] ibvwrap.cc:278 " +
			"NCCL WARN Call to ibv_reg_mr_iova2 of 1073741824 bytes failed with error Cannot allocate memory"}}},
		samples.Record{Time: 3 * time.Second, End: &samples.End{Ranks: []samples.RankEnd{
			{PID: 77, ExitCode: 1, Time: 2500 * time.Millisecond}}}})
	e := Explain(Inputs{Recordings: []*Recording{r}})
	var held []ledger.Bytes
	for _, h := range e.Holders {
		held = append(held, h.Bytes)
	}
	if e.Cause.Resource != LockedMemory || !slices.Equal(held, []ledger.Bytes{4 * gib, 3 * gib, 2 * gib}) ||
		e.Holders[0].Component != "unexplained" {
		t.Errorf("%+v, held by %+v: expected 4 GiB unexplained, 3 GiB and 2 GiB", e.Cause, e.Holders)
	}
	e = explainText(t, "mlock: Cannot allocate memory\nName:\tpython\nVmLck:\t 1048576 kB\nVmPin:\t 0 kB\n")
	if e.Cause.Resource != LockedMemory || len(e.Holders) != 1 || e.Holders[0].Bytes != gib {
		t.Errorf("status: %+v, held by %+v", e.Cause, e.Holders)
	}
}

// TestPinnedMemory: pinned memory is a part of the shared memory of a rank; what DeepSpeed has not counted remains.
func TestPinnedMemory(t *testing.T) {
	lines := []string{"[pinned-memory optimizer] 12.0 GiB pinned across 41 allocations",
		"RuntimeError: cudaHostRegister failed: out of memory"}
	process := samples.Process{PID: 77, Role: samples.RankProcess, AddressSpaceLimit: -1,
		Proportional: samples.Kinds{Anonymous: 50 * gib, Shared: 20 * gib}}
	recording := func(processes ...samples.Process) *Recording {
		return NewRecording("run.jsonl", samples.Record{Start: &samples.Start{Schema: samples.Schema}},
			samples.Record{Time: time.Second, Sample: &samples.Sample{Processes: processes}},
			samples.Record{Time: 2 * time.Second, Output: &samples.Output{Lines: lines}},
			samples.Record{Time: 3 * time.Second, End: &samples.End{Ranks: []samples.RankEnd{
				{PID: 77, ExitCode: 1, Time: 2500 * time.Millisecond}}}})
	}
	e := Explain(Inputs{Recordings: []*Recording{recording(process)}})
	if e.Cause.Detail != pinned || len(e.Holders) != 2 || e.Holders[0].Component != "pinned_by_deepspeed" ||
		e.Holders[0].Bytes != 12*gib || e.Holders[1].Component != "unexplained" || e.Holders[1].Bytes != 8*gib {
		t.Errorf("%+v, held by %+v", e.Cause, e.Holders)
	}
	e = explainText(t, lines[0]+"\n"+lines[1]+"\n")
	if len(e.Holders) != 1 || e.Holders[0].Bytes != 12*gib {
		t.Errorf("without a recording: %+v", e.Holders)
	}
}
