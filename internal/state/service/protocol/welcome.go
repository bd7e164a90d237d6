//go:build linux

package protocol

import "plimsoll/internal/base/ledger"

// SessionSchema is the schema of [Welcome].
const SessionSchema = "plimsoll.session/1"

// Welcome is the answer to open.
type Welcome struct {
	Schema      string `json:"schema"`
	Attached    bool   `json:"attached"`
	Step        int64  `json:"step"`
	Initialized bool   `json:"initialized"`
	Elements    int64  `json:"elements"`
	Service     string `json:"service"`
	Kernel      string `json:"kernel"`
	// PreparedStep is the prepared step, or 0 if there is none. AskedStep is the step that a client asked for last,
	// and AskedGradScale the factor of its gradients.
	PreparedStep   uint64  `json:"prepared_step"`
	AskedStep      uint64  `json:"asked_step"`
	AskedGradScale float64 `json:"asked_factor"`
	// ArrivingStep is the step that waits for gradients, or 0. TornStep is a step that some of the state has had, as
	// the trainer ended before all gradients were there, or 0. With either, the state is not initialized.
	ArrivingStep uint64 `json:"arriving_step"`
	TornStep     uint64 `json:"torn_step"`
	// Retracts says that the session has a log with which steps can be retracted.
	Retracts bool `json:"retracts"`
	// CanGoBack says that the state was found on a tier, which still has the state before the last step, too.
	CanGoBack bool `json:"can_go_back"`
	// Accumulated is the number of accumulations that were finished since the gradients were cleared, at step
	// ClearedStep. Accumulating is the number of one that is half done, or 0.
	Accumulated  int64          `json:"accumulated"`
	Accumulating int64          `json:"accumulating"`
	ClearedStep  int64          `json:"cleared_step"`
	Arenas       []WelcomeArena `json:"arenas"`
}

// WelcomeArena is an arena that the trainer maps.
type WelcomeArena struct {
	Name      string           `json:"name"`
	Component ledger.Component `json:"component"`
	Type      string           `json:"type"`
	Bytes     ledger.Bytes     `json:"bytes"`
	Mapped    ledger.Bytes     `json:"mapped_bytes"`
}
