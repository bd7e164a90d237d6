// Package explain says why a job has failed: which resource ran out, on which rank first and in which phase, what
// proves it, who held the bytes, and which changes of the user's own files free how many. Where the evidence does not
// tell, it says so, and what to collect.
package explain

import (
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/amend"
	"plimsoll/internal/plan/lever"
)

// Schema is the schema of the JSON document.
const Schema = "plimsoll.explanation/1"

// Resource is what ran out.
type Resource string

// The resources.
const (
	GPU          Resource = "gpu"
	Host         Resource = "host"
	CGroup       Resource = "cgroup"
	SharedMemory Resource = "shm"
	LockedMemory Resource = "memlock"
	AddressSpace Resource = "address_space"
	NUMANode     Resource = "numa_node"
	Disk         Resource = "disk"
	Processes    Resource = "processes"
	NotMemory    Resource = "not_memory"
	None         Resource = "none"
	Undetermined Resource = "" // there was a failure, and the evidence does not tell its cause
)

// Confidence is how sure an explanation is.
type Confidence string

// The degrees of confidence.
const (
	Certain Confidence = "certain" // a counter or the kernel says so, and nothing contradicts it
	Likely  Confidence = "likely"
	Unknown Confidence = "unknown"
)

// Explanation is the document.
type Explanation struct {
	Schema     string     `json:"schema"`
	Version    string     `json:"version"`
	Files      []File     `json:"files"` // what was read
	Cause      Cause      `json:"cause"`
	Confidence Confidence `json:"confidence"`
	// Victims are ranks that ended because the first one did.
	Victims  []Victim   `json:"victims"`
	Evidence []Evidence `json:"evidence"`
	Holders  []Holder   `json:"holders"`
	// RuledOut are the usual suspects that it was not, with the reason.
	RuledOut []RuledOut `json:"ruled_out"`
	// Edits are in the order of plimsoll plan if the plan of the job lacks memory, too. Otherwise what frees most comes
	// first.
	Edits []Edit `json:"edits"`
	// Collect are commands that would find the evidence that is missing.
	Collect []Collect `json:"collect"`
	// Notes are what the files say beside the failure: jumps of memory between two lines, retries, growth.
	Notes []string `json:"notes"`
}

// File is a file that was read.
type File struct {
	Name string `json:"name"`
	Kind string `json:"kind"` // as its content says: "trainer log", "kernel log", "memory.events", ...
}

// Cause is what ran out.
type Cause struct {
	Resource Resource `json:"resource"`
	Rank     *int     `json:"rank"` // that failed first; null if unknown
	// LocalRank is the number of the rank on its node, where only that is known.
	LocalRank *int              `json:"local_rank,omitempty"`
	Process   string            `json:"process,omitempty"` // that failed first, as its lines are labelled, without a rank
	Phase     *ledger.PhaseName `json:"phase"`             // null if unknown
	Text      string            `json:"text"`              // one sentence
	// Detail tells causes of one resource apart, such as "fragmentation" or "pinned memory"; empty for none.
	Detail string `json:"detail,omitempty"`
}

// Victim is a rank that another took along.
type Victim struct {
	Rank int    `json:"rank"`
	Text string `json:"text"`
}

// Evidence is a line that the explanation rests on.
type Evidence struct {
	File string `json:"file"`
	Line int    `json:"line"` // 0 for a file without lines
	Text string `json:"text"`
	Says string `json:"says"`
}

// Holder is who held bytes of the resource when it ran out.
type Holder struct {
	Component string       `json:"component"` // a component of the ledger, or a process
	Bytes     ledger.Bytes `json:"bytes"`
	Text      string       `json:"text"`
}

// RuledOut is a suspect that it was not.
type RuledOut struct {
	Resource Resource `json:"resource"`
	Why      string   `json:"why"`
}

// Edit is a change of a file of the user, of a command or of a variable. It has a line of a file, or no file.
type Edit struct {
	amend.Edit
	Frees ledger.Bytes `json:"frees_bytes"` // 0 if it cannot be said
	Why   string       `json:"why"`
	// Planned is the change with all its edits and with what its plan says; nil for one that was not planned.
	Planned *lever.Change `json:"planned,omitempty"`
}

// Collect is a command that finds missing evidence.
type Collect struct {
	Command string `json:"command"`
	Why     string `json:"why"`
}
