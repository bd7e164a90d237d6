//go:build linux

package protocol

import "plimsoll/internal/base/ledger"

// StatSchema is the schema of [Overview].
const StatSchema = "plimsoll.stat/2"

// Overview is the status of a service, as plimsoll stat shows it.
type Overview struct {
	Schema   string  `json:"schema"`
	Service  string  `json:"service"` // its version
	Process  int     `json:"process"`
	Seconds  float64 `json:"seconds"` // since the start
	Restarts int     `json:"restarts"`
	Kernel   string  `json:"kernel"`
	Job      string  `json:"job"`
	Requests int64   `json:"requests"`
	Refused  int64   `json:"requests_refused"`
	Clients  int     `json:"clients"`
	// Unanswered counts the requests that are being handled. QueuedBytes is the size of the requests that have
	// arrived and are unread.
	Unanswered  int64           `json:"requests_unanswered"`
	QueuedBytes ledger.Bytes    `json:"requests_queued_bytes"`
	Sessions    []SessionStatus `json:"sessions"`
	// SetAside are the sessions of an earlier service that this one could not restore.
	// Their memory is kept.
	SetAside []SetAside `json:"set_aside"`
	// Ledger has every arena of every session, and the other memory of the process.
	Ledger ledger.Comparison `json:"ledger"`
}

// SessionStatus is the status of a session.
type SessionStatus struct {
	Rank        int    `json:"rank"`
	Part        string `json:"part"`
	Optimizer   string `json:"optimizer"`
	State       string `json:"state"`
	Moments     string `json:"moments"`
	Parameter   string `json:"parameter"`
	Gradient    string `json:"gradient"`
	Elements    int64  `json:"elements"`
	CPUs        []int  `json:"cpus"`
	Client      int64  `json:"client"` // its process; 0 for none
	Initialized bool   `json:"initialized"`
	Step        int64  `json:"step"` // the last finished step
	// Holds is the condition of states that the trainer updates, and empty for a shard.
	Holds string `json:"holds,omitempty"`
	// MissesGradients says that a step is under way and waits for gradients.
	MissesGradients bool         `json:"misses_gradients"`
	Saving          bool         `json:"saving"`
	SavedStep       int64        `json:"saved_step"`
	StateBytes      ledger.Bytes `json:"state_bytes"`
	// TrafficBytes is the size of what the update of one step reads and writes.
	TrafficBytes ledger.Bytes `json:"traffic_bytes"`
	// These count the steps that this service made itself.
	StepsMade       int64   `json:"steps_made"`
	StepSeconds     float64 `json:"step_seconds"`      // of all steps
	LastStepSeconds float64 `json:"last_step_seconds"` // of the last step
	LastNormSeconds float64 `json:"last_norm_seconds"`
	// Folder has the files of the state, and FileSystem is that of the folder. Both are empty if the state is in memory
	// files without a folder.
	Folder     string `json:"folder,omitempty"`
	FileSystem string `json:"file_system,omitempty"`
	// Tier is nil if all of the state is in memory.
	Tier *TierStatus `json:"tier,omitempty"`
}

// TierStatus says what a session has on disks.
type TierStatus struct {
	Folders []string     `json:"folders"`
	Bytes   ledger.Bytes `json:"bytes"`        // of the files
	Window  ledger.Bytes `json:"window_bytes"` // of memory
	// StepReads and StepWrites are what a step moves that leaves nothing alone. The writes wear the disks.
	StepReads  ledger.Bytes `json:"step_read_bytes"`
	StepWrites ledger.Bytes `json:"step_written_bytes"`
	// Read and Written count since this service opened the files.
	Read    int64 `json:"read_bytes"`
	Written int64 `json:"written_bytes"`
}

// SetAside is a session that could not be restored. Fields that could not be read are
// empty.
type SetAside struct {
	Name   string       `json:"name"` // for plimsoll restore
	Job    string       `json:"job"`
	Rank   int          `json:"rank"`
	Part   string       `json:"part"`
	Bytes  ledger.Bytes `json:"bytes"`
	Reason string       `json:"reason"`
}

// Bandwidth returns the memory traffic of the last step, in bytes a second.
func (s SessionStatus) Bandwidth() float64 {
	if s.LastStepSeconds == 0 {
		return 0
	}
	return float64(s.TrafficBytes) / s.LastStepSeconds
}
