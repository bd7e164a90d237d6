package evidence

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/ledger"
)

// String returns the size, or "unknown".
func (s Size) String() string {
	if !s.Known {
		return "unknown"
	}
	return s.Bytes.String()
}

// sentence joins the parts of a sentence that are known.
func sentence(first string, parts ...string) string {
	var b strings.Builder
	b.WriteString(first)
	for _, part := range parts {
		if part != "" {
			b.WriteString(", " + part)
		}
	}
	return b.String()
}

// with returns the format with the size, or "" if the size is unknown.
func with(format string, s Size) string {
	if !s.Known {
		return ""
	}
	return fmt.Sprintf(format, s)
}

// by returns the words with the name, or "" without a name.
func by(format, name string) string {
	if name == "" {
		return ""
	}
	return fmt.Sprintf(format, name)
}

// Says is in [Fact], as for all types below.
func (f GPUOutOfMemory) Says() string {
	device := ""
	if f.Device >= 0 {
		device = fmt.Sprintf(" on GPU %d", f.Device)
	}
	others := ""
	if len(f.Others) > 0 {
		others = fmt.Sprintf("%d other processes use the GPU", len(f.Others))
	}
	return sentence("PyTorch's allocator found no memory"+device, with("asked for %s", f.Requested),
		with("allocated %s", f.Allocated), with("reserved %s", f.Reserved), with("free %s", f.Free),
		with("allowed %s", f.Allowed), with("of %s", f.Total), others)
}

// Says says it.
func (f AllocationRetried) Says() string {
	return sentence(fmt.Sprintf("PyTorch's allocator on GPU %d frees its cache and tries again", f.Device),
		with("asked for %s", f.Requested), with("free %s", f.Free))
}

// Says says it.
func (f CacheFlushed) Says() string {
	return fmt.Sprintf("PyTorch's allocator has flushed its cache %d times since the last step", f.Times)
}

// Says says it.
func (f DriverOutOfMemory) Says() string {
	if f.Pinning {
		return "the CUDA driver found no memory to pin, which comes from the host"
	}
	if f.Waking {
		return "the CUDA driver found no memory of the GPU for a rollout engine that wakes"
	}
	return "the CUDA driver found no memory: of the GPU, or of the host if it was to be pinned"
}

// Says says it.
func (f LibraryFailed) Says() string {
	if f.Memory {
		return f.Library + " found no memory on the GPU"
	}
	return f.Library + " failed: " + f.Status
}

// Says says it.
func (f HostAllocationFailed) Says() string {
	who := f.By
	if who == "" {
		who = "the process"
	}
	return sentence("the kernel refused memory of the host to "+who, with("asked for %s", f.Requested),
		by("for %s", f.File))
}

// Says says it.
func (f LockFailed) Says() string {
	return sentence(f.By+" could not lock memory", with("asked for %s", f.Requested))
}

// Says says it.
func (f SharedMemoryFull) Says() string {
	if f.By == RayStore {
		return sentence(RayStore+" is full", with("asked for %s", f.Requested))
	}
	return sentence("shared memory (/dev/shm) is full", by("says %s", f.By), by("at %s", f.Path))
}

// Says says it.
func (f BusError) Says() string {
	return sentence("a process got SIGBUS: the kernel had no page for a mapped file", number("PID %d", f.PID),
		by("in %s", f.Reads))
}

func number(format string, n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(format, n)
}

// Says says it.
func (f DiskFull) Says() string {
	if f.Quota {
		return sentence("the disk quota is used up", by("at %s", f.Path))
	}
	if f.TooLarge {
		return sentence("a file may not grow that large", by("at %s", f.Path))
	}
	if f.Assumed {
		return sentence("writing a file failed, as it does on a full disk", by("at %s", f.Path))
	}
	return sentence("the disk is full", by("at %s", f.Path))
}

// Says says it.
func (f TooManyProcesses) Says() string {
	return sentence("the kernel refused a new process or thread to "+f.By, by("in %s", f.Group))
}

// Says says it.
func (f WorkerEnded) Says() string {
	if f.Of != "" {
		return sentence(fmt.Sprintf("a worker of %s ended abruptly", f.Of), numbers("PID %s", f.PIDs))
	}
	return sentence(fmt.Sprintf("a worker of the data loader ended before its rank (PID %v)", f.PIDs),
		by("by signal: %s", f.Signal))
}

// numbers says numbers, if there are any.
func numbers(format string, list []int) string {
	if len(list) == 0 {
		return ""
	}
	return fmt.Sprintf(format, strings.Trim(fmt.Sprint(list), "[]"))
}

// Says says it.
func (f Exception) Says() string {
	if f.Type == noSpaceCode {
		return sentence("the kernel's number of such things is limited (ENOSPC), and no disk is full", f.Message)
	}
	return sentence("Python raised "+f.Type, f.Message)
}

// Says says it.
func (f CollectiveFailed) Says() string {
	return sentence("a collective of "+f.By+" failed, as happens when another rank has ended", f.What)
}

// Says says it.
func (f MemoryUsage) Says() string {
	return sentence(f.By+" prints memory", f.Tag, with("allocated %s", f.Allocated), with("peak %s", f.PeakAllocated),
		with("reserved %s", f.Reserved), with("peak reserved %s", f.PeakReserved), with("host %s", f.HostUsed),
		with("pinned %s", f.Pinned))
}

// Says says it.
func (f Estimate) Says() string {
	return sentence(f.By+" estimates", with("host %s", f.Host), with("GPU %s", f.GPU),
		with("weights and optimizer states %s", f.WeightsAndStates), with("activations %s", f.Activations), f.Options)
}

// Says says it.
func (f Setting) Says() string { return "the log shows " + f.Name + " " + f.Value }

// Says says it.
func (f TrainedParameters) Says() string {
	return "the job trains " + ledger.Count(f.Number) + " parameters"
}

// Says says it.
func (f Progress) Says() string {
	switch {
	case f.Metrics:
		return "training goes on: the line has metrics of a step"
	case f.Epoch:
		return fmt.Sprintf("training is at epoch %d", f.Step)
	case f.Phase == "":
		return fmt.Sprintf("training is at step %d", f.Step)
	case f.Step < 0:
		return fmt.Sprintf("training is in phase %s", f.Phase)
	}
	return fmt.Sprintf("training is at step %d, in phase %s", f.Step, f.Phase)
}

// Says says it.
func (f ProcessEnded) Says() string {
	who := "a process"
	switch {
	case f.Rank != NoRank:
		who = fmt.Sprintf("rank %d", f.Rank)
	case f.LocalRank != NoRank:
		who = fmt.Sprintf("local rank %d", f.LocalRank)
	}
	how := fmt.Sprintf("ended with exit code %d", f.ExitCode)
	if f.Signal != 0 {
		how = fmt.Sprintf("was ended by signal %d", f.Signal)
	}
	victim := ""
	if f.Victim {
		victim = "as another had failed"
	}
	return sentence(who+" "+how, number("PID %d", f.PID), by("says %s", f.By), victim)
}

// Says says it.
func (f BatchKill) Says() string {
	times := ""
	if f.Count > 1 {
		times = fmt.Sprintf("%d times", f.Count)
	}
	return sentence(f.By+" says that memory ran out", by("in %s", f.What), times, with("used %s", f.Used),
		with("limit %s", f.Limit))
}

// Says says it.
func (f MemoryList) Says() string {
	most := slices.MaxFunc(f.Holders, func(a, b MemoryHolder) int { return cmp.Compare(a.Bytes, b.Bytes) })
	return fmt.Sprintf("%s lists who holds memory: of %d most has %s, %v", f.By, len(f.Holders), most.Name, most.Bytes)
}

// Says says it.
func (f PoolUsage) Says() string {
	return sentence(f.By+" says how full it is", with("used %s", f.Used), with("of %s", f.Size),
		with("%s wait for room", f.Waiting))
}

// Says says it.
func (f EngineSlept) Says() string {
	return fmt.Sprintf("the rollout engine slept and gave %v back, and %v stayed in use", f.Freed, f.Left)
}

// Says says it.
func (f BatchEnd) Says() string {
	if strings.HasPrefix(f.Reason, "signal ") {
		return f.By + " was asked to end, by " + f.Reason
	}
	return f.By + " ended the job: " + f.Reason
}

// Says says it.
func (f Restarted) Says() string { return f.By + " starts the ranks again" }

// Says says it.
func (f Started) Says() string { return sentence("a run begins", f.What) }

// Says says it.
func (f KernelKill) Says() string {
	if f.PID == 0 {
		return sentence("the kernel's OOM killer was invoked", by("by %s", f.Trigger))
	}
	where := map[string]string{
		"CONSTRAINT_MEMCG": "the limit of a cgroup", "CONSTRAINT_CPUSET": "the memory nodes of its cpuset",
		"CONSTRAINT_MEMORY_POLICY": "the memory nodes of its memory policy",
		"CONSTRAINT_NONE":          "the memory of the host",
	}[f.Constraint]
	return sentence(fmt.Sprintf("the kernel killed %s (PID %d)", f.Name, f.PID), by("as %s ran out", where), f.Group,
		with("limit %s", f.Limit), with("anonymous %s", f.Anonymous), with("shared %s", f.Shared),
		with("file %s", f.File))
}

// Says says it.
func (f HardwareFailed) Says() string {
	return fmt.Sprintf("a memory module has an error that cannot be corrected, and process %d (%s) got SIGBUS",
		f.PID, f.Name)
}

// Says says it.
func (f KernelReason) Says() string {
	what := "a cgroup's limit"
	switch f.Constraint {
	case "CONSTRAINT_CPUSET":
		what = "the NUMA nodes of a cpuset"
	case "CONSTRAINT_MEMORY_POLICY":
		what = "the NUMA nodes of a memory policy, as numactl --membind sets one"
	}
	return "the kernel looked for memory within " + what + " (" + f.Constraint + ")"
}

// Says says it.
func (f Counters) Says() string {
	return sentence(fmt.Sprintf("%s has %d counters", f.File, len(f.Values)), by("of %s", f.Group),
		number("oom_kill %d", int(f.Values["oom_kill"])), number("max %d", int(f.Values["max"])))
}

// counts are the limits that are no bytes.
var counts = map[string]bool{"RLIMIT_NPROC": true, "RLIMIT_NOFILE": true, "overcommit": true}

// Says says it.
func (f Limit) Says() string {
	value := "unlimited"
	switch {
	case !f.Bytes.Known:
	case counts[f.Name]:
		value = ledger.Count(int64(f.Bytes.Bytes))
	default:
		value = f.Bytes.String()
	}
	return sentence(f.Name+" is "+value, by("for %s", f.Group))
}

// Says says it.
func (f FileSystem) Says() string {
	return sentence("df shows the file system at "+f.Mount, with("of %s", f.Size), with("used %s", f.Used),
		with("free %s", f.Free))
}

// Says says it.
func (f GPUUsage) Says() string {
	gpu := "a GPU"
	if f.Device != NoRank {
		gpu = fmt.Sprintf("GPU %d", f.Device)
	}
	return sentence("nvidia-smi shows "+gpu, with("of %s", f.Total), with("used %s", f.Used),
		with("free %s", f.Free), number("%d processes", len(f.Processes)))
}
