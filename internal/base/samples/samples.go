// Package samples is the record of a run: what its processes, its cgroups, its host and its GPUs held, second by
// second, what the trainer said of its phases, and how the run ended.
//
// A recording is a file of JSON lines. Each line is one [Record], and the first has a [Start]. A line is written by one
// write(2), so a recording is whole at any instant but for its last line, which [Read] leaves out if it is cut.
package samples

import (
	"time"

	"plimsoll/internal/base/ledger"
)

// Schema is the schema of recordings. It is in the first record.
const Schema = "plimsoll.samples/1"

// Record is one line. Exactly one of its pointers is set.
type Record struct {
	// Time is the time since the recording began.
	Time   time.Duration `json:"time_ns"`
	Start  *Start        `json:"start,omitempty"`
	Sample *Sample       `json:"sample,omitempty"`
	Mark   *Mark         `json:"mark,omitempty"`
	Output *Output       `json:"output,omitempty"`
	End    *End          `json:"end,omitempty"`
}

// Start is what a recording is of.
type Start struct {
	Schema  string    `json:"schema"`
	Version string    `json:"version"` // of plimsoll
	Began   time.Time `json:"began"`
	Host    Host      `json:"host"`
	Job     string    `json:"job"`     // its name, or the PID that is watched
	Command []string  `json:"command"` // empty if unknown
	// Plan is the plan that the job was started with, or nil.
	Plan *Plan `json:"plan,omitempty"`
	// Counters are those of the kernel's OOM killer before the first rank started.
	Counters []Counter `json:"counters"`
	// Ranks are how the ranks are bound. The list is empty if plimsoll has not started them.
	Ranks []BoundRank `json:"ranks,omitempty"`
	// Limits are those that the ranks start with, or nil if unknown.
	Limits *Limits `json:"limits,omitempty"`
	// WorkingDirectory is that of the job; empty if unknown.
	WorkingDirectory string `json:"working_directory,omitempty"`
}

// BoundRank is how a rank is bound to cores and memory.
type BoundRank struct {
	Rank         int    `json:"rank"`
	CPUs         string `json:"cpus"`          // such as 0-3,8
	MemoryPolicy string `json:"memory_policy"` // of package binding
	NUMANodes    []int  `json:"numa_nodes"`
}

// Limits are resource limits of a process (getrlimit); -1 for unlimited.
type Limits struct {
	AddressSpace ledger.Bytes `json:"address_space_bytes"` // RLIMIT_AS
	Locked       ledger.Bytes `json:"locked_bytes"`        // RLIMIT_MEMLOCK
	FileSize     ledger.Bytes `json:"file_size_bytes"`     // RLIMIT_FSIZE
	Processes    int64        `json:"processes"`           // RLIMIT_NPROC
}

// Host is the machine.
type Host struct {
	Name     string       `json:"name"`
	Kernel   string       `json:"kernel"`
	Memory   ledger.Bytes `json:"memory_bytes"`
	PageSize ledger.Bytes `json:"page_size_bytes"`
	CPUs     int          `json:"cpus"` // that the job may use
}

// Plan is the plan of a job.
type Plan struct {
	File    string          `json:"file"`
	SHA256  string          `json:"sha256"`
	Devices []ledger.Device `json:"devices"`
}

// Sample is what was held at one time.
type Sample struct {
	Processes []Process `json:"processes"`
	Node      Node      `json:"node"`
	// Groups are the cgroups of the job, the innermost first.
	Groups []Group `json:"cgroups"`
	GPUs   []GPU   `json:"gpus"`
	// Disk is the file system of the job's working directory. Its size is 0 if it is unknown.
	Disk FileSystem `json:"working_directory,omitzero"`
	// Cost is the CPU time that taking this sample took.
	Cost time.Duration `json:"cost_ns"`
	// Missed says what could not be read, and why. A process that has ended is not missed.
	Missed []string `json:"missed,omitempty"`
}

// NoRank is the rank of what belongs to no single rank.
const NoRank = ledger.WholeNode

// Role is what a process is to the job.
type Role string

// The roles.
const (
	RankProcess Role = "rank"    // the first process of a rank
	Child       Role = "child"   // a process that a rank has started, such as a data loader's worker
	Service     Role = "service" // the optimizer service
	Keeper      Role = "keeper"  // plimsoll run itself: guard and keeper
)

// Process is the memory of one process. Its PID and its StartTime together are its identity.
type Process struct {
	PID       int    `json:"pid"`
	StartTime uint64 `json:"start_time_ticks"` // /proc/PID/stat, field 22
	Parent    int    `json:"parent"`
	Rank      int    `json:"rank"`
	Role      Role   `json:"role"`
	Name      string `json:"name"` // /proc/PID/comm

	// Where the rank is in its training loop.
	Phase     ledger.PhaseName `json:"phase"`
	Iteration ledger.Iteration `json:"iteration,omitempty"`
	Step      int64            `json:"step"` // optimizer steps that the rank has begun; 0 before the first

	Resident     Kinds        `json:"resident"`     // pages in RAM (Rss)
	Proportional Kinds        `json:"proportional"` // pages that several processes map are divided among them (Pss)
	Huge         ledger.Bytes `json:"huge_bytes"`   // the part of Resident on huge pages of either kind
	// ProportionalAge is how long before this sample Proportional and Huge were read: the kernel walks all pages for
	// them. It is -1 if they could not be read yet.
	ProportionalAge time.Duration `json:"proportional_age_ns"`

	Locked     ledger.Bytes `json:"locked_bytes"` // VmLck: mlock
	Pinned     ledger.Bytes `json:"pinned_bytes"` // VmPin: by drivers and io_uring
	Swap       ledger.Bytes `json:"swap_bytes"`
	PageTables ledger.Bytes `json:"page_tables_bytes"`
	Virtual    ledger.Bytes `json:"virtual_bytes"`       // VmSize
	Peak       ledger.Bytes `json:"peak_resident_bytes"` // VmHWM: since the process began, or since its last mark
	// AddressSpaceLimit and LockedLimit are RLIMIT_AS and RLIMIT_MEMLOCK; -1 for unlimited.
	AddressSpaceLimit ledger.Bytes `json:"address_space_limit_bytes"`
	LockedLimit       ledger.Bytes `json:"locked_limit_bytes"`

	CPUTime time.Duration `json:"cpu_time_ns"`
	Threads int           `json:"threads"`

	// Mappings and NUMANodes are read less often. They are nil in the samples between.
	Mappings  []Mapping   `json:"mappings,omitempty"`
	NUMANodes []NUMANode  `json:"numa_nodes,omitempty"`
	MapsCost  MappingCost `json:"mappings_cost,omitzero"`
}

// MappingCost is what reading the mappings took.
type MappingCost struct {
	Wall time.Duration `json:"wall_ns"`
	CPU  time.Duration `json:"cpu_ns"`
}

// Kinds is memory by its kind.
type Kinds struct {
	Anonymous ledger.Bytes `json:"anonymous_bytes"`
	Shared    ledger.Bytes `json:"shared_memory_bytes"` // memfds, /dev/shm, System V
	File      ledger.Bytes `json:"file_bytes"`          // page cache
	Hugetlb   ledger.Bytes `json:"hugetlb_bytes"`
}

// Sum returns the bytes of all kinds.
func (k Kinds) Sum() ledger.Bytes { return k.Anonymous + k.Shared + k.File + k.Hugetlb }

// Mapping is the memory of all mappings of one name.
type Mapping struct {
	Name string `json:"name"` // a path, [heap], [stack], memfd:NAME, or empty for anonymous memory
	// Arena is the component that an arena of ours holds, and its dtype group; empty for all other mappings.
	Arena        ledger.Component `json:"component,omitempty"`
	Part         string           `json:"part,omitempty"`
	Kind         MappingKind      `json:"kind"`
	Resident     ledger.Bytes     `json:"resident_bytes"`
	Proportional ledger.Bytes     `json:"proportional_bytes"`
	Huge         ledger.Bytes     `json:"huge_bytes"`
	Locked       ledger.Bytes     `json:"locked_bytes"`
	Count        int              `json:"count"`
}

// MappingKind is the kind of memory of a mapping.
type MappingKind string

// The kinds of mappings.
const (
	AnonymousMapping MappingKind = "anonymous"
	SharedMapping    MappingKind = "shared_memory"
	FileMapping      MappingKind = "file"
	HugetlbMapping   MappingKind = "hugetlb"
)

// NUMANode is the memory of a process on one NUMA node.
type NUMANode struct {
	Node  int          `json:"node"`
	Bytes ledger.Bytes `json:"bytes"`
}

// Node is the memory of the host.
type Node struct {
	Memory    ledger.Bytes `json:"memory_bytes"`
	Available ledger.Bytes `json:"available_bytes"`
	Free      ledger.Bytes `json:"free_bytes"`
	PageCache ledger.Bytes `json:"page_cache_bytes"`
	Shared    ledger.Bytes `json:"shared_memory_bytes"`
	Anonymous ledger.Bytes `json:"anonymous_bytes"`
	Locked    ledger.Bytes `json:"locked_bytes"` // Mlocked and Unevictable: the larger one
	SwapTotal ledger.Bytes `json:"swap_total_bytes"`
	SwapFree  ledger.Bytes `json:"swap_free_bytes"`
	// The pool of huge pages.
	HugetlbTotal ledger.Bytes `json:"hugetlb_total_bytes"`
	HugetlbFree  ledger.Bytes `json:"hugetlb_free_bytes"`
	// CommitLimit counts only where vm.overcommit_memory is 2.
	CommitLimit ledger.Bytes `json:"commit_limit_bytes"`
	Committed   ledger.Bytes `json:"committed_bytes"`
	// SharedFiles is /dev/shm as a file system. Its size is 0 if there is none.
	SharedFiles FileSystem `json:"dev_shm"`
	Pressure    Pressure   `json:"pressure"`
	// NUMANodes have the free memory of each NUMA node.
	NUMANodes []NUMAFree `json:"numa_nodes"`
	Kills     int64      `json:"oom_kills"` // /proc/vmstat oom_kill
}

// NUMAFree is the memory of a NUMA node.
type NUMAFree struct {
	Node   int          `json:"node"`
	Memory ledger.Bytes `json:"memory_bytes"`
	Free   ledger.Bytes `json:"free_bytes"`
}

// FileSystem is the size of a file system.
type FileSystem struct {
	Size ledger.Bytes `json:"size_bytes"`
	Used ledger.Bytes `json:"used_bytes"`
}

// Pressure is how long tasks have waited for memory (PSI), in all since the host or the cgroup began.
type Pressure struct {
	Some time.Duration `json:"some_ns"` // at least one task waited
	Full time.Duration `json:"full_ns"` // all tasks waited
}

// Group is a cgroup with its memory controller.
type Group struct {
	Name      string       `json:"name"`
	Current   ledger.Bytes `json:"current_bytes"`
	Peak      ledger.Bytes `json:"peak_bytes"`  // 0 if the kernel does not tell
	Limit     ledger.Bytes `json:"limit_bytes"` // 0 for none
	High      ledger.Bytes `json:"high_bytes"`  // 0 for none
	Anonymous ledger.Bytes `json:"anonymous_bytes"`
	File      ledger.Bytes `json:"file_bytes"`
	Shared    ledger.Bytes `json:"shared_memory_bytes"`
	Kernel    ledger.Bytes `json:"kernel_bytes"`
	Swap      ledger.Bytes `json:"swap_bytes"`
	Pressure  Pressure     `json:"pressure"`
	Events    Events       `json:"events"`
}

// Headroom returns what the cgroup may still take. Its page cache goes first. Shared memory is counted with the page
// cache and stays.
func (g *Group) Headroom() (free ledger.Bytes, limited bool) {
	return max(0, g.Limit-g.Current+max(0, g.File-g.Shared)), g.Limit > 0
}

// Events counts what happened in a cgroup (memory.events).
type Events struct {
	High    int64 `json:"high"`
	Max     int64 `json:"max"`
	OOM     int64 `json:"oom"`
	OOMKill int64 `json:"oom_kill"`
}

// GPU is the memory of a GPU.
type GPU struct {
	Index    int          `json:"index"`
	UUID     string       `json:"uuid"`
	Name     string       `json:"name"`
	Total    ledger.Bytes `json:"total_bytes"`
	Reserved ledger.Bytes `json:"reserved_bytes"` // by the driver
	Used     ledger.Bytes `json:"used_bytes"`
	Free     ledger.Bytes `json:"free_bytes"`
	// Processes are those that the driver knows. The list is empty where the driver does not tell.
	Processes []GPUProcess `json:"processes"`
	// Throttled names why the clocks are low; empty if they are not.
	Throttled []string `json:"throttled,omitempty"`
	ECCErrors int64    `json:"ecc_errors"` // uncorrected since the last reboot; -1 if unknown
}

// GPUProcess is the memory of a process on a GPU.
type GPUProcess struct {
	PID  int          `json:"pid"`
	Used ledger.Bytes `json:"used_bytes"` // -1 if unknown
}

// Mark is an instant in a rank's training loop at which a phase begins. What it measures belongs to the phase that
// ends there.
type Mark struct {
	Rank      int              `json:"rank"`
	PID       int              `json:"pid"`
	Phase     ledger.PhaseName `json:"phase"` // that begins; empty if none does
	Iteration ledger.Iteration `json:"iteration,omitempty"`
	Step      int64            `json:"step"`
	Name      string           `json:"name,omitempty"` // the user's own name of the phase
	Source    MarkSource       `json:"source"`
	// Dropped is the number of marks before this one that the client could not send.
	Dropped int64 `json:"dropped_marks,omitempty"`
	// Ended is what the phase that ends here has held, or nil if the source cannot tell.
	Ended *Ended `json:"ended,omitempty"`
}

// MarkSource is where a mark comes from.
type MarkSource string

// The sources of marks.
const (
	FromClient   MarkSource = "client"   // the trainer itself, by plimsoll's client
	FromLog      MarkSource = "log"      // a line that the trainer has printed
	FromBehavior MarkSource = "inferred" // what the processes do
)

// Ended is the memory of a phase that has ended.
type Ended struct {
	Phase     ledger.PhaseName `json:"phase"`
	Iteration ledger.Iteration `json:"iteration,omitempty"`
	Step      int64            `json:"step"`
	Resident  ledger.Bytes     `json:"resident_bytes"`      // at the end of the phase
	Peak      ledger.Bytes     `json:"peak_resident_bytes"` // in the phase
	// FreeHeap is memory that malloc keeps for its next use (mallinfo2's fordblks); -1 if unknown.
	FreeHeap ledger.Bytes `json:"free_heap_bytes"`
	// PeakFreeHeap is FreeHeap at the peak. It is that of the end if the client has not found the peak's instant.
	PeakFreeHeap ledger.Bytes `json:"peak_free_heap_bytes,omitempty"`
	// Holdings are held at the end of the phase: tensors in host memory that the client has counted, by component, and
	// what the process held before the model was made. They are nil where the client has not counted tensors.
	Holdings []ledger.Holding `json:"holdings"`
	// PeakHoldings are all that was held at the peak. They are nil where the peak was at the end, or where the client
	// does not know its instant.
	PeakHoldings []ledger.Holding `json:"peak_holdings,omitempty"`
	GPUs         []TorchMemory    `json:"gpus,omitempty"`
}

// TorchMemory is what torch.cuda says of a GPU in a phase.
type TorchMemory struct {
	Device        int              `json:"device"`
	Allocated     ledger.Bytes     `json:"allocated_bytes"`
	Reserved      ledger.Bytes     `json:"reserved_bytes"`
	PeakAllocated ledger.Bytes     `json:"peak_allocated_bytes"`
	PeakReserved  ledger.Bytes     `json:"peak_reserved_bytes"`
	Total         ledger.Bytes     `json:"total_bytes"`
	Free          ledger.Bytes     `json:"free_bytes"`
	Retries       int64            `json:"alloc_retries"`
	Holdings      []ledger.Holding `json:"holdings"`
}

// KernelStream is the stream of lines from the kernel's log about the job's processes. They have no rank.
const KernelStream = "kernel"

// Output is text that a rank has printed: lines that say something of memory, and the last ones before the end.
type Output struct {
	Rank   int      `json:"rank"`
	Stream string   `json:"stream"` // stdout, stderr or KernelStream
	Lines  []string `json:"lines"`
	// Skipped is the number of lines before these that are left out, as the rank has printed too many.
	Skipped int64 `json:"skipped_lines,omitempty"`
}

// End is how the run ended. A recording without one was cut off: the recorder was killed.
type End struct {
	ExitCode int       `json:"exit_code"`
	Ranks    []RankEnd `json:"ranks"` // in the order in which they ended
	// ByUser is set if the user or a batch system asked the job to end.
	ByUser   bool      `json:"by_user"`
	Counters []Counter `json:"counters"`
	// Unknown is set if the exit code is unknown: plimsoll watch is not the parent of the processes. ExitCode is 0.
	Unknown bool `json:"exit_code_unknown,omitempty"`
	// Detached is set if the processes went on when the recorder ended.
	Detached bool `json:"detached,omitempty"`
}

// RankEnd is how a rank ended.
type RankEnd struct {
	Rank     int           `json:"rank"`
	PID      int           `json:"pid"`
	Time     time.Duration `json:"time_ns"`
	ExitCode int           `json:"exit_code"`
	Signal   int           `json:"signal"` // 0 for none
	// Asked is set if plimsoll had asked the rank to end before it ended, or has killed it.
	Asked bool `json:"asked"`
	// Attempt counts the starts of all ranks, from 0 on.
	Attempt int `json:"attempt,omitempty"`
	// Unknown is set if the exit code is unknown, as in End. ExitCode and Signal are 0.
	Unknown bool `json:"exit_code_unknown,omitempty"`
}

// Counter is a counter of the kernel's OOM killer, as package host reads it.
type Counter struct {
	Name    string       `json:"name"`
	Group   string       `json:"group"`
	Limit   ledger.Bytes `json:"limit_bytes"` // 0 for none
	Reached int64        `json:"reached"`
	Kills   int64        `json:"kills"`
}
