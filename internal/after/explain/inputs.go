package explain

import (
	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/steptime"
)

// Inputs are what people have after a failure. All are optional.
type Inputs struct {
	Version string // of plimsoll
	// Sources are the files, in the order in which the user named them.
	Sources []*evidence.Source
	// Recordings are runs that plimsoll has recorded, each in a file or in memory.
	Recordings []*Recording
	// Plans are documents of plimsoll plan --out.
	Plans []Plan
	// Snapshots are of GPUs, by PyTorch.
	Snapshots []Snapshot
	// Request is the job in the user's own files, such as ds_config.json, or nil if they name no model. Explain plans
	// changes of it, and says what each frees.
	Request *job.Request
	// Machine says how fast a machine runs a job; nil if nothing is known beyond data sheets.
	Machine func(*job.Job) steptime.Machine
	// Configurations are the files of the request.
	Configurations []File
	// Unread are files of archives that explain reads only as files of their own.
	Unread []File
	// LeftOut are files that were named, and that are empty or of no kind that explain reads.
	LeftOut []File
	// Cut are archives that are damaged or cut, so that the rest of their files is missing.
	Cut []string
	// Parameters is the number of trained parameters on the node, or 0 if unknown.
	Parameters int64
	// Peak and End are the bytes of a GPU that the user has read off, or 0.
	Peak, End ledger.Bytes
}

// Plan is a plan document.
type Plan struct {
	File       string
	Parameters int64
	Devices    []ledger.Device
}

// Snapshot is who held the memory of a GPU in a memory snapshot of PyTorch.
type Snapshot struct {
	File     string
	Rank     int              // of the process, or evidence.NoRank if unknown
	Device   int              // -1 if the file was not read
	Holdings []ledger.Holding // by component
	Lines    []SnapshotLine   // of the source, the largest first
}

// SnapshotLine is what a line of the source held in a snapshot.
type SnapshotLine struct {
	Place string // "file:line function"
	Bytes ledger.Bytes
}
